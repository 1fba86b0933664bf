"""APL and PAU as kernels: on a GPU with --device cuda, elsewhere by Triton's interpreter, in a process of its own."""

import importlib.metadata
import importlib.util
import os
import sys

import helpers
import numpy as np
import pytest
import torch
from helpers import DTYPES, parameter_dtype
from imported import run_pytest
from test_baselines import apl, batch, check_apl, check_pau, pau
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import pwlu
from pwlu.baselines import APL, PAU, fused

LAYOUTS = ("NCHW", "channels_last", "sliced", "vector", "empty")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def kernels(device, monkeypatch):
    """Kernels compute, and what they do not write is NaN."""
    if device.type != "cuda":
        if not INTERPRETED:
            pytest.skip("run by test_by_the_interpreter")
        monkeypatch.setattr(fused, "can_use_kernels", lambda x, *rest: x.numel() > 0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def rounding(y, dtype):
    """The interpreter cuts bfloat16 off, which may take a whole unit."""
    return helpers.rounding(y, dtype) * (2 if INTERPRETED and dtype == torch.bfloat16 else 1)


# Values and gradients.

# Shape, where the channels are, and the order in memory: several tiles, and no size is a multiple of theirs.
SHAPES = {
    "planes of two tiles": ((3, 2, 37, 41), 1, False),
    "many small planes": ((75, 2, 3, 11), 1, False),
    "one plane": ((1, 1, 23), 1, False),
    "channels_last": ((2, 40, 9, 7), 1, True),
    "few channels, last": ((2500, 3), -1, False),
    "one column": ((300, 2, 1, 1), 1, False),
    "several columns per channel": ((70, 19, 2), 1, False),
}


def tensor(name, dtype, device):
    shape, dim, channels_last = SHAPES[name]
    x = (2 * torch.randn(shape, dtype=torch.float64)).to(device, dtype)
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x, dim


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_apl_of_every_layout(layout, dtype, device):
    x, dim = batch(layout, dtype)
    for channels, hinges in ((x.shape[dim], 3), (x.shape[dim], 5), (1, 1)):
        check_apl(apl(channels, hinges, dim, parameter_dtype(dtype)).to(device), x.to(device), dim, rounding)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SHAPES)
def test_apl_of_several_tiles(name, dtype, device):
    x, dim = tensor(name, dtype, device)
    for hinges in (3, 5):
        act = apl(x.shape[dim], hinges, dim, parameter_dtype(dtype)).to(device)
        check_apl(
            act, x, dim, rounding, sums=24
        )  # a program's 2 tiles, 10 for its sum, a few for products, halves of float32 at the end


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pau_of_every_layout(layout, dtype, device):
    check_pau(pau(parameter_dtype(dtype)).to(device), batch(layout, dtype)[0].to(device), rounding)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 511, 1024, 10000])
def test_pau_of_several_blocks(size, dtype, device):
    x = (2 * torch.randn(size, dtype=torch.float64)).to(device, dtype)
    check_pau(pau(parameter_dtype(dtype)).to(device), x, rounding)


@pytest.mark.usefixtures("kernels")
def test_one_function_for_all(device):
    for x in (torch.randn((), device=device), torch.randn(50, 300, device=device), torch.randn(3, 5, 4, device=device)[:, ::2]):
        check_apl(apl(1).to(device), x, 1, sums=24)
        check_pau(pau().to(device), x)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["apl", "pau"])
def test_parameters_of_another_type_and_order(name, device):
    x = torch.randn(6, 5, 7, device=device).bfloat16()
    act = (apl(5) if name == "apl" else pau()).to(device)
    for parameter_name, parameter in act.named_parameters():
        spread = parameter.new_empty(*parameter.shape, 2)[..., 0].copy_(parameter.detach())
        setattr(act, parameter_name, nn.Parameter(spread))
        assert not getattr(act, parameter_name).is_contiguous()
    for _ in range(2):
        if name == "apl":
            check_apl(act, x, 1, rounding)
        else:
            check_pau(act, x, rounding)
        act.bfloat16()


def results(act, x, grad):
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = act(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *act.parameters()], grad)]


@pytest.mark.usefixtures("kernels")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["x", "grad"])
def test_nan_and_infinity(where, odd, device, monkeypatch):
    """NaN and infinity give the same as plain operations, and do not change other elements."""
    x, grad = torch.randn(2, 4, 9, 10, device=device), torch.randn(2, 4, 9, 10, device=device)
    (x if where == "x" else grad)[1, 2, 3, 4] = odd
    for layout in (torch.contiguous_format, torch.channels_last):
        given = x.contiguous(memory_format=layout)
        for act in (apl(4).to(device), apl(4, 5).to(device), pau().to(device)):
            found = results(act, given, grad)
            with monkeypatch.context() as patch:
                patch.setattr(fused, "can_use_kernels", lambda *tensors: False)
                expected = results(act, given, grad)
            assert any(not e.isfinite().all() for e in expected)
            for f, e in zip(found, expected, strict=True):
                torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-4, equal_nan=True)  # places matter here


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["apl", "pau"])
def test_views(name, device):
    """x with gaps, and a gradient that is one number for all, in another order than x, or has gaps itself."""
    act, base = (apl(5) if name == "apl" else pau()).to(device), torch.randn(3, 5, 8, 9, device=device)
    gaps, whole = base[..., ::2, 1:], base[..., ::2, 1:].contiguous()
    ones, other, spread = torch.ones((), device=device).expand_as(whole), torch.randn_like(whole), torch.randn_like(base)
    for x in (gaps, gaps[:1].expand_as(gaps), whole.contiguous(memory_format=torch.channels_last)):
        for grad in (ones, other.contiguous(memory_format=torch.channels_last), spread[..., 1::2, :-1]):
            leaf, same = x.detach().requires_grad_(), x.clone(memory_format=torch.contiguous_format).requires_grad_()
            assert leaf.stride() == x.stride()
            y, expected = act(leaf), act(same)
            torch.testing.assert_close(y, expected)
            assert y.stride() == torch.empty_like(x).stride()
            found = torch.autograd.grad(y, [leaf, *act.parameters()], grad)
            gradients = torch.autograd.grad(expected, [same, *act.parameters()], grad.contiguous())
            torch.testing.assert_close(found[0], gradients[0])
            for f, g in zip(found[1:], gradients[1:], strict=True):  # 96 or 480 terms, in another order
                torch.testing.assert_close(f, g, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["apl", "pau"])
def test_gradients_that_are_not_needed(name, device):
    act, x = (apl(5) if name == "apl" else pau()).to(device), torch.randn(2, 5, 3, device=device, requires_grad=True)
    tensors = [x, *act.parameters()]
    expected = torch.autograd.grad(act(x).square().sum(), tensors)
    for i, wanted in enumerate(tensors):
        for tensor in tensors:
            tensor.requires_grad_(tensor is wanted)
        torch.testing.assert_close(torch.autograd.grad(act(x).square().sum(), wanted)[0], expected[i], rtol=0, atol=0)
    with torch.no_grad():
        assert torch.equal(act(x), act(x.detach()))


@pytest.mark.usefixtures("kernels")
def test_the_same_every_time(device):
    x, grad = torch.randn(300, 5, device=device), torch.randn(300, 5, device=device)
    for act in (apl(5).to(device), pau().to(device)):
        for one, other in zip(results(act, x, grad), results(act, x, grad), strict=True):
            assert torch.equal(one, other)


def test_more_than_two_to_the_31_elements(device):
    """All but the last image is 0 and has no gradient."""
    if device.type != "cuda" or torch.cuda.mem_get_info(device)[0] < 30 << 30:
        pytest.skip("needs a GPU with 30 GB")
    shape, images = (2**15 + 3, 64, 32, 32), torch.randn(2, 64, 32, 32, device=device).bfloat16()
    for layout in (torch.contiguous_format, torch.channels_last):
        x, grad = (torch.empty(shape, device=device, dtype=torch.bfloat16, memory_format=layout).zero_() for _ in range(2))
        assert x.numel() > 2**31
        x[-1], grad[-1] = images
        for act in (apl(64).to(device), apl(1).to(device), pau().to(device)):
            leaf = x.detach().requires_grad_()
            y = act(leaf)
            found = torch.autograd.grad(y, [leaf, *act.parameters()], grad)
            expected = results(act, x[-1:], grad[-1:])
            torch.testing.assert_close(y[-1:], expected[0])
            torch.testing.assert_close(found[0][-1:], expected[1])
            assert not found[0][:-1].any()
            for f, e in zip(found[1:], expected[2:], strict=True):
                torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-3)  # of sums of 65536 terms


# Where kernels serve.


@pytest.mark.parametrize("name", ["apl", "pau"])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # shapes are constants to it
@pytest.mark.parametrize("way", ["compile", "make_fx", "trace"])
def test_seen_through(way, name, device):
    """Tracing would record the output of a kernel as a constant, so plain operations run instead."""
    act = pwlu.activation(name).to(device)
    x, other = torch.randn(2, 5, 4, device=device), torch.randn(2, 5, 4, device=device)
    if way == "compile":
        found = torch.compile(act, fullgraph=True, backend="aot_eager")
    elif way == "make_fx":
        found = make_fx(act)(x)
    else:
        found = torch.jit.trace(act, x)
    torch.testing.assert_close(found(other), act(other))


@pytest.mark.parametrize("name", ["apl", "pau"])
def test_transforms(name, device):
    act, x = pwlu.activation(name, 5).to(device), torch.randn(2, 5, 4, device=device, requires_grad=True)
    found = torch.func.grad(lambda x: act(x).square().sum())(x.detach())
    torch.testing.assert_close(found, torch.autograd.grad(act(x).square().sum(), x)[0])


def test_fake_tensors_do_not_use_kernels():
    with FakeTensorMode():
        x, act = torch.empty(2, 5, 4, device="cuda"), APL(5, device="cuda")
        assert not fused.can_use_kernels(x, act.slopes, act.offsets)
        assert act(x).shape == x.shape
    assert x.is_cuda
    assert not fused.can_use_kernels(x)  # outside, too


def test_can_use_kernels(device, monkeypatch):
    monkeypatch.setattr(fused, "_runs_triton", lambda index: True)
    x, act = torch.randn(2, 5, device=device), PAU(device=device)
    assert fused.can_use_kernels(x, *act.parameters()) == (device.type == "cuda")
    assert not fused.can_use_kernels(x[:0], *act.parameters())
    if device.type == "cuda":
        assert not fused.can_use_kernels(x, *PAU().parameters())  # plain operations say what is wrong


def test_without_triton(monkeypatch):
    properties = {"get_device_capability": lambda index: (9, 0), "get_device_name": lambda index: "A GPU"}
    for name, function in properties.items():
        monkeypatch.setattr(torch.cuda, name, function)
    runs = fused._runs_triton.__wrapped__
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "triton", None)
        with pytest.warns(
            UserWarning, match=r"without their Triton kernels, .* slower \(Triton, which comes with torch on Linux, does not"
        ):
            assert not runs(0)
        patch.setenv("PWLU_CUDA_KERNEL", "reference")
        assert not runs(0)  # and nothing is said
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
        with pytest.warns(UserWarning, match=r"A GPU is older than compute capability 8\.0"):
            assert not runs(0)
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.warns(UserWarning, match="a build of torch for AMD"):
        assert not runs(0)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_by_the_interpreter(device):
    if device.type == "cuda":
        pytest.skip("the kernels themselves are tested")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: it comes with torch's builds for CUDA on Linux")
    if importlib.metadata.version("triton").startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton 3.6 does not run with NumPy 2.4")
    done = run_pytest("-k", "not interpreter and not seen_through", __file__, TRITON_INTERPRET="1")
    assert not done.returncode, done.stdout
    assert "run by test_by_the_interpreter" not in done.stdout
