"""An exported fused model runs in a process without pwlu, and batch norm before a PWLU is folded."""

import copy
import os
import shutil
import textwrap

import pytest
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import pwlu
from pwlu.deploy.onnx_export import export_onnx


def network():
    """Convolutions, batch norm with statistics of its own, and PWLUs that are no longer what they started as."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), pwlu.PWLU(6, init="silu"), nn.Conv2d(6, 4, 3), pwlu.PWLU(1, 5))
    with torch.no_grad():
        for unit in (model[2], model[4]):
            for p in unit.parameters():
                p.add_(0.1 * torch.randn_like(p))
        for tensor in (model[1].weight, model[1].bias, model[1].running_mean, model[1].running_var):
            tensor.uniform_(0.5, 2)
    return model.eval()


@pytest.fixture
def fused():
    model = network()
    pwlu.fuse_(model)
    return model


def program_of(model):
    batch = torch.export.Dim("batch", min=1, max=64)
    return torch.export.export(model, (torch.randn(2, 3, 12, 12),), dynamic_shapes=({0: batch},))


def exported(model, path):
    torch.export.save(program_of(model), path)


def traced(model, path):
    torch.jit.trace(model, torch.randn(2, 3, 12, 12)).save(path)


def compiled(model, path):
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler here")
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(program_of(model), package_path=str(path))


def onnx(model, path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    export_onnx(model, torch.randn(1, 3, 12, 12), path)


LOADERS = {
    "exported": (exported, "model.pt2", "torch.export.load(path).module()"),
    "traced": (traced, "model.ts", "torch.jit.load(path)"),
    "compiled": (compiled, "model.pt2", "torch._inductor.aoti_load_package(path)"),
    "onnx": (
        onnx,
        "model.onnx",
        "lambda x: torch.from_numpy(onnxruntime.InferenceSession(path).run(None, {'input': x.numpy()})[0])",
    ),
}

ELSEWHERE = """
    import sys
    sys.modules["pwlu"] = None  # where pwlu is installed in the environment of the tests, this hides it
    try:
        import pwlu
    except ImportError:
        pass
    else:
        raise SystemExit("pwlu can be imported here")
    import torch
    import torch._inductor
    if "onnxruntime" in {load!r}:
        import onnxruntime
    path, data = sys.argv[1:]
    run = {load}
    saved = torch.load(data)
    with torch.no_grad():
        torch.save([run(x) for x in saved], data)
    assert not [name for name in sys.modules if name.startswith("pwlu.")]
"""


@pytest.fixture
def run_elsewhere(processes, tmp_path):
    """A function that loads a file in a process that cannot import pwlu, and writes its outputs in place of the inputs."""

    def run_elsewhere(path, load, inputs):
        torch.save(inputs, tmp_path / "data.pt")
        command = ["-c", textwrap.dedent(ELSEWHERE).format(load=load), path, tmp_path / "data.pt"]
        return processes(command, dict(os.environ), path=())

    return run_elsewhere


def test_a_file_of_a_model_that_is_not_fused_needs_pwlu(run_elsewhere, tmp_path):
    """The next test can fail."""
    exported(network(), tmp_path / "model.pt2")
    assert run_elsewhere(tmp_path / "model.pt2", LOADERS["exported"][2], [torch.randn(2, 3, 12, 12)]).returncode


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`:FutureWarning")
@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.slow] if how == "compiled" else []) for how in LOADERS])
def test_it_runs_where_there_is_no_pwlu(how, fused, run_elsewhere, tmp_path):
    save, name, load = LOADERS[how]
    save(fused, tmp_path / name)
    inputs = [3 * torch.randn(batch, 3, 12, 12) for batch in (2, 3)]
    inputs[0][0, 0, 0, :3] = torch.tensor([1e30, -1e30, 0.0])
    done = run_elsewhere(tmp_path / name, load, inputs)
    assert not done.returncode, done.stdout + done.stderr
    with torch.no_grad():
        for x, y in zip(inputs, torch.load(tmp_path / "data.pt"), strict=True):
            assert_equal_to_rounding(y, fused, fused, x)


def assert_equal_to_rounding(y, model, other, x):
    """Check that y is as close to the float64 result as the other output, up to the order of sums."""
    exact = copy.deepcopy(model).double()(x.double())
    worst = (other(x) - exact).abs().max()
    assert y.shape == exact.shape
    assert (y - exact).abs().max() <= 4 * worst + 4 * 2.0**-23 * exact.abs().max()


def test_batch_norm_folds_into_the_convolution():
    model = network()
    folded = copy.deepcopy(model)
    folded[0], folded[1] = fuse_conv_bn_eval(folded[0], folded[1]), nn.Identity()
    pwlu.fuse_(folded)
    x = 3 * torch.randn(5, 3, 12, 12)
    with torch.no_grad():
        assert_equal_to_rounding(folded(x), model, model, x)
        folded[0].bias += 1e-3  # the check can fail
        with pytest.raises(AssertionError):
            assert_equal_to_rounding(folded(x), model, model, x)
