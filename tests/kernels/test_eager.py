"""The operators in eager mode without Python: what it launches, and what serves without it.

How it is built and loaded: test_library_cache.py. All other tests run with it too, where it can be built: see conftest.py.
"""

import os
from pathlib import Path

import pytest
import torch
from helpers import unit, weight_of
from imported import SOURCES, SUPPORT, run_pytest

import pwlu
from pwlu import ops
from pwlu.kernels import build, dispatch, eager

HERE = Path(__file__).parent
USE = "import pwlu, torch; from pwlu.kernels import eager; assert pwlu.PWLU(3)(torch.ones(2, 3)).sum() == 6"
pytestmark = pytest.mark.skipif(eager.library is None, reason="eager.cpp was not built here")


@pytest.fixture
def run(processes):
    """Run Python in another process; return its status and what it prints."""

    def run(*arguments, **environment):
        done = processes(arguments, os.environ | environment, (HERE, SUPPORT, SOURCES))
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.slow
def test_launches_are_those_of_python(run, tmp_path):
    """Without a GPU: kernels, grids and arguments, for training, Phase I and the fused form; failed launches; many shapes."""
    command = [*eager._compiler(), *eager._flags(), "-O1", "-DPWLU_PRETEND_GPU"]
    build.make(tmp_path / "libraries" / eager.stem().name, lambda: command, eager.SOURCE, eager._libraries())
    status, said = run("-m", "eager_launches", PWLU_CACHE=str(tmp_path), PWLU_EAGER="compiled")
    assert status == 0, said
    assert int(said) > 500


@pytest.mark.parametrize("executable", ["None", "''", "'/gone/python'"])
def test_without_an_executable(run, executable, tmp_path):
    """As in an embedded Python. Nor can the cache be written."""
    (tmp_path / "file").touch()
    status, said = run(
        "-c", f"import sys; sys.executable = {executable}; {USE}", PWLU_CACHE=str(tmp_path / "file"), PWLU_EAGER="auto"
    )
    assert status == 0, said


def test_wishes(run, tmp_path):
    assert "PWLU_EAGER must be compiled, python or auto, not 'fast'" in run("-c", "import pwlu", PWLU_EAGER="fast")[1]
    said = run("-m", "pwlu", "info", PWLU_EAGER="python", PWLU_CACHE=str(tmp_path))[1]
    assert "eager mode  Python (PWLU_EAGER=python)" in said


@pytest.mark.slow
def test_operators_without_it():
    """The operators also work without a C++ compiler, and in the first process."""
    done = run_pytest("tests/ops/test_ops.py", "tests/test_functional.py", PWLU_EAGER="python")
    assert not done.returncode, done.stdout[-3000:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_same_bits_as_by_python(dtype, monkeypatch):
    """What it has learned and what it leaves to Python."""
    x = torch.randn(4, 5, 6, 7, dtype=dtype, requires_grad=True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weight, intervals = weight_of(unit(5, 4, wide))
    weight.requires_grad_()

    def results():
        pool = torch.ones(3, 5, dtype=wide)
        y, observed = ops.forward(x, weight, intervals, 1), ops.observe(x, weight, intervals, 1, pool)
        both = (torch.autograd.grad(each, [x, weight], torch.cos(x)) for each in (y, observed))
        return [y, *next(both), observed, *next(both), pool]

    results()
    learned = results()
    with monkeypatch.context() as patch:
        patch.setattr(eager, "register_cpu", lambda *_: None)
        eager.forget()
        taught = results()
    assert "CppFunction" in str(learned[0].grad_fn)
    for a, b in zip(learned, taught, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_of_another_type(dtype, other, device):
    """On the CPU, eager.cpp leaves them to Python: its kernels need weights of the compute dtype."""
    x, (weight, intervals) = torch.randn(3, 5, 4, device=device).to(dtype), weight_of(unit(5, 4, device=device))
    ops.forward(x, weight, intervals, 1)
    inputs = [t.requires_grad_() for t in (x, weight.to(other))]
    for _ in range(2):
        y = ops.forward(*inputs, intervals, 1)
        assert torch.equal(y, dispatch.forward(*(t.detach() for t in inputs), intervals, 1))
        expected = dispatch.backward(torch.ones_like(y), *(t.detach() for t in inputs), intervals, 1, True, True)
        for found, wanted in zip(torch.autograd.grad(y.sum(), inputs), expected, strict=True):
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted)


def test_a_weight_elsewhere(device):
    if device.type == "cpu":
        pytest.skip("needs a second device")
    x, (weight, intervals) = torch.randn(3, 5, device=device), weight_of(unit(5, 4, device=device))
    ops.forward(x, weight, intervals, 1)
    with pytest.raises(ValueError, match="on cpu"):
        ops.forward(x, weight.cpu(), intervals, 1)


def fused_norm_and_unit(channels):
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(channels), pwlu.PWLU(channels))
    pwlu.fuse_norms_(model, torch.randn(4, channels, 8, 8))
    return model


@pytest.mark.parametrize("make", [pwlu.PWLU, fused_norm_and_unit, pwlu.DynamicPWLU])
def test_hooks_of_saved_tensors_run_above_autograd(make):
    """Count versions in the hooks: below autograd, changes in place do not count."""
    model, x, versions = make(6), torch.randn(4, 6, 8, 8, requires_grad=True), []

    def pack(tensor):
        versions.append(torch.zeros(2).add_(1)._version)
        return tensor

    model(x)  # Python registers the kernels
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    assert len(versions) > 1
    assert all(versions)
