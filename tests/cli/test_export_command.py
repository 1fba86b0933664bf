"""``pwlu export``: the files compute what was trained, say what their input is, and need nothing of pwlu."""

import json
import sys

import numpy as np
import pytest
import torch
from lab_helpers import one_thread, short_run, task_of
from torch import nn
from torch.nn import functional as F
from trained_helpers import folder_of

from pwlu.cli import main
from pwlu.deploy import onnx_export
from pwlu.lab.inference import exporting
from pwlu.lab.inference.exporting import fold_batch_norm_
from pwlu.lab.inference.trained_network import load
from pwlu.lab.recipes.settings import UserError

onnx, onnxruntime, _ = (pytest.importorskip(package) for package in ("onnx", "onnxruntime", "onnxscript"))
fuse_ = exporting.fuse_


def export(*arguments):
    with one_thread():
        return main(["export", *map(str, arguments)])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """With functions that are no longer ReLU."""
    return short_run(tmp_path_factory.mktemp("runs"), "--unit-lr", 3).path


def accuracy(file, metadata):
    """Return the accuracy of the file alone on the test images, prepared as its metadata says."""
    images, labels = task_of().data.test.images.numpy(), task_of().data.test.labels.numpy()
    mean, std = (np.array(json.loads(metadata[name]), np.float32)[:, None, None] for name in ("mean", "std"))
    x = ((images / np.float32(255) - mean) / std).astype(np.float32)
    if file.suffix == ".onnx":
        session = onnxruntime.InferenceSession(file)
        scores = session.run(None, {session.get_inputs()[0].name: x})[0]
    else:
        scores = torch.export.load(file).module()(torch.from_numpy(x)).detach().numpy()
    return 100 * float((scores.argmax(1) == labels).mean())


def metadata_of(file):
    if file.suffix == ".onnx":
        return {each.key: each.value for each in onnx.load(file).metadata_props}
    extra = {"metadata.json": ""}
    torch.export.load(file, extra_files=extra)
    return json.loads(extra["metadata.json"])


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`:FutureWarning")
@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_the_file_alone_is_as_good_as_the_run(suffix, run, tmp_path, capsys):
    file = tmp_path / f"model{suffix}"
    assert export(run, file) == 0
    printed = capsys.readouterr().out
    metadata = metadata_of(file)
    result = json.loads((run / "result.json").read_text())
    one = 100 / result["measured_images"]  # rounding may decide between two classes
    assert accuracy(file, metadata) == pytest.approx(result["accuracy"], abs=1.5 * one)
    assert accuracy(file, metadata | {"mean": "[0.9]"}) < result["accuracy"] - 5
    expected = {"recipe": "digits", "activation": "pwlu", "seed": "0", "classes": "10"}
    assert expected.items() <= metadata.items()
    assert json.loads(metadata["class_names"]) == list("0123456789")
    assert json.loads(metadata["result"]) == result
    assert metadata["input"] in printed
    assert "input: float32, batch x 1 x 8 x 8: grey images of 8 x 8" in printed
    assert "one score per class before softmax: 0, 1, 2," in printed
    assert ": largest difference " in printed
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_standard_operators_without_batch_norm(run, tmp_path, monkeypatch, capsys):
    """No data set is needed."""

    def gone(*_):
        raise UserError("the digits are scikit-learn's")

    monkeypatch.setattr("pwlu.lab.data.datasets.load", gone)
    assert export(run, tmp_path / "model.onnx", "--opset", 20, "--form", "gather") == 0
    model = onnx.load(tmp_path / "model.onnx")
    operators = [node.op_type for node in model.graph.node]
    assert {node.domain for node in model.graph.node} == {""}
    assert "BatchNormalization" not in operators
    assert operators.count("Conv") == 3
    assert operators.count("GatherND") == 6
    assert model.opset_import[0].version == 20
    printed = capsys.readouterr().out
    assert "opset 20, any batch size, 3 PWLUs as gather" in printed
    assert "minus 0.286, divided by 0.3532" in printed
    assert {"mean", "std", "class_names"} <= metadata_of(tmp_path / "model.onnx").keys()


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`:FutureWarning")
def test_aten_operators_without_batch_norm(run, tmp_path, capsys):
    assert export(run, tmp_path / "model.pt2") == 0
    assert "any batch size, 3 batch norms folded" in capsys.readouterr().out
    called = {str(node.target) for node in torch.export.load(tmp_path / "model.pt2").graph.nodes if node.op == "call_function"}
    assert not [name for name in called if "pwlu" in name or "norm" in name]
    assert "aten.conv2d.default" in called


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`:FutureWarning")
@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_a_run_of_another_activation(suffix, tmp_path, capsys):
    other, file = short_run(tmp_path / "runs", "--act", "prelu").path, tmp_path / f"model{suffix}"
    assert export(other, file) == 0
    assert ("no fused PWLUs" in capsys.readouterr().out) == (suffix == ".onnx")
    result = json.loads((other / "result.json").read_text())
    assert accuracy(file, metadata_of(file)) == pytest.approx(result["accuracy"], abs=0.2)
    assert export(other, file, "--simplify", 0.01) == 2
    assert "is a run of prelu, without PWLUs: leave out --simplify" in capsys.readouterr().err


def test_simplified(run, tmp_path, capsys):
    sizes = []
    for tolerance in (0.02, 0.9):
        assert export(run, tmp_path / "model.onnx", "--simplify", tolerance) == 0
        printed = capsys.readouterr().out
        assert "parameters removed" in printed
        sizes.append((tmp_path / "model.onnx").stat().st_size)
    assert "no fused PWLUs\n" in printed  # each has become something plainer
    assert sizes[0] > sizes[1]


@pytest.fixture
def detector(tmp_path):
    import detection_helpers as helpers  # skips the test if a package is missing

    task = helpers.task_of("tiny/retinanet_resnet18_fpn", helpers.write_objects(tmp_path))
    folder_of(task, tmp_path / "run")
    return tmp_path / "run"


def test_a_detector_is_refused(detector, tmp_path, capsys):
    assert export(detector, tmp_path / "model.onnx") == 2
    printed = capsys.readouterr().err
    assert "torch.export cannot trace a whole detector of torchvision, because non-maximum suppression" in printed
    assert "which has 18 of the 26 activations" in printed
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.slow
def test_the_backbone_of_a_detector(detector, tmp_path, capsys):
    assert export(detector, tmp_path / "model.onnx", "--backbone") == 0
    printed = capsys.readouterr().out
    assert "18 PWLUs as elements" in printed
    assert "the maps of the feature pyramid, for a detector of 2 classes" in printed
    backbone = load(detector).backbone()
    x = backbone.sample(3)
    with torch.no_grad():
        expected = list(backbone.network(x).values())
    for found, wanted in zip(exporting.session(tmp_path / "model.onnx")(x), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


# Folding.


class Wired(nn.Module):
    """Batch norm after a convolution; after one whose map is wanted elsewhere; and layers that are called twice."""

    def __init__(self):
        super().__init__()
        self.late, self.early = nn.BatchNorm2d(4), nn.Conv2d(3, 4, 1, bias=False)
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.twice, self.each = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.plain, self.bare = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, affine=False)

    def forward(self, x):
        y = self.conv(F.relu(self.late(self.early(x))))
        z = self.norm(y) + y
        return self.bare(self.plain(self.each(self.twice(z)) - self.each(self.twice(-z))))


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`:FutureWarning")
def test_what_can_be_folded_is():
    model = Wired().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                for tensor in module.state_dict().values():
                    if tensor.is_floating_point():
                        tensor.uniform_(0.5, 2)
        x = torch.randn(2, 3, 5, 5)
        expected = model(x)
        assert fold_batch_norm_(model, x) == 1
        assert isinstance(model.late, nn.Identity)
        assert isinstance(model.norm, nn.BatchNorm2d)
        torch.testing.assert_close(model(x), expected, rtol=0, atol=64 * 2.0**-24 * float(expected.abs().max()))


# Mistakes.


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`:FutureWarning")
@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_a_wrong_file_does_not_appear(suffix, run, tmp_path, monkeypatch, capsys):
    """An existing file stays as it was."""
    file = tmp_path / f"model{suffix}"
    file.write_text("of yesterday")
    for module in ("lab.inference.exporting", "deploy.onnx_export"):
        monkeypatch.setattr(f"pwlu.{module}.fuse_", lambda m: (fuse_(m), m.get_submodule("11").bias.data.add_(1e-3)))
    assert export(run, file) == 2
    assert "rounding explains" in capsys.readouterr().err
    assert file.read_text() == "of yesterday"
    assert list(tmp_path.iterdir()) == [file]


def test_a_wrong_file_without_pwlus_does_not_appear(tmp_path, monkeypatch):
    model, file = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()).eval(), tmp_path / "model.onnx"
    runner = onnx_export._runner
    monkeypatch.setattr(onnx_export, "_runner", lambda *given: lambda x: [y + 1e-3 for y in runner(*given)(x)])
    with pytest.raises(RuntimeError, match=r"of the model in ONNX Runtime differs from PyTorch's by .*\.onnx\.$"):
        exporting.write_onnx(model, torch.randn(2, 1, 5, 5), file, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["model.ptx"], "the suffix of model.ptx does not select a format. Write model.onnx, standard ONNX operators"),
        (["missing/model.onnx"], "the folder missing does not exist: create it"),
        (["folder.onnx"], "folder.onnx is a folder. Name a file in it, such as folder.onnx/model.onnx"),
        (["model.pt2", "--opset", 19], "--opset and --form are for ONNX: leave them out, or write model.onnx"),
        (["model.onnx", "--opset", 11], "opset must be an integer of at least 18 (18 is the default), not 11"),
        (["model.onnx", "--simplify", 2], "--simplify 2: simplify_: tolerance is a share of the function's range"),
        (["model.onnx", "--backbone"], "is a run of digits, which is not a detector: leave out --backbone"),
    ],
)
def test_mistakes(arguments, text, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.onnx").mkdir()
    assert export(run, *arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("pwlu export: ")
    assert text in printed
    assert [path.name for path in tmp_path.iterdir()] == ["folder.onnx"]


def test_no_run(tmp_path, capsys):
    assert export(tmp_path / "nowhere", tmp_path / "model.onnx") == 2
    assert f"pwlu export: there is no folder {tmp_path / 'nowhere'}" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_missing_packages(package, tmp_path, monkeypatch):
    """Without PWLUs; with them, pwlu.export_onnx says the same."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"needs onnx, onnxscript and onnxruntime .*pip install '\.\[onnx\]'"):
        exporting.write_onnx(nn.Sequential(nn.ReLU()).eval(), torch.randn(2, 3), tmp_path / "model.onnx", {})


def test_without_torchvision(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pwlu.lab.inference.trained_network", None)
    assert export(run, tmp_path / "model.onnx") == 2
    assert "pip install '.[train,onnx]'" in capsys.readouterr().err
