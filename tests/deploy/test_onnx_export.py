"""ONNX: what is written runs in ONNX Runtime and computes the same; what does not is refused, and leaves nothing behind."""

import copy
import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import wild_values
from torch import nn

import pwlu
from pwlu.deploy.onnx_export import export_onnx
from pwlu.deploy.onnx_forms import FORMS, Clips, Elements, Form

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def trained_(model):
    """Units that are no longer what they started as."""
    with torch.no_grad():
        for unit in model.modules():
            if isinstance(unit, pwlu.PWLU):
                for p in unit.parameters():
                    p.add_(0.1 * torch.randn_like(p))
    return model.eval()


def network():
    shared = pwlu.PWLU(1, intervals=5, init="tanh")
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), pwlu.PWLU(6, init="silu"), shared, nn.Conv2d(6, 4, 3), shared]
    return trained_(nn.Sequential(*layers))


IMAGES = torch.randn(1, 3, 8, 8)


def run(path, *inputs):
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    given = {each.name: x.numpy() for each, x in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, given)]


@pytest.mark.parametrize("form", FORMS)
def test_a_network(form, tmp_path):
    """The file computes the same in ONNX Runtime; the report says what was checked, and the model stays as it was."""
    model, path = network(), tmp_path / "model.onnx"
    before = copy.deepcopy(model.state_dict())
    report = export_onnx(model, IMAGES, path, form=form)
    assert [type(m) for m in model.modules()].count(pwlu.PWLU) == 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    assert (report.path, report.size, report.opset, report.form) == (path, path.stat().st_size, 18, form)
    assert report.units == ["2", "3"]
    assert report.reached == 1
    assert report.batches[:3] == (1, 3, 2)
    assert report.difference <= report.tolerance < 1e-4
    assert report.unit_difference <= report.unit_tolerance < 1e-4
    assert report.share <= 1e-5
    assert report.unit_share <= 1e-5
    assert not report.unreached

    text = str(report)
    assert re.search(rf"model\.onnx: 0\.0\d MB, opset 18, any batch size, 2 PWLUs as {form}\noperators: .*Conv 2", text)
    numbers = r"largest difference \S+ \(\S+ of the largest output\), tolerance \S+"
    assert re.search(rf"on random batches of 1, 3, 2, 128: {numbers}\n", text)
    assert re.search(rf"each PWLU alone, on 100 % of all segments: {numbers}$", text)

    loaded = onnx.load(path)
    assert [o.domain for o in loaded.opset_import] == [""]
    assert not loaded.functions
    found = [node.op_type for node in loaded.graph.node]
    assert report.operators == {name: found.count(name) for name in found}
    assert "BatchNormalization" not in found  # folded into the convolution before it
    assert {"elements": "GatherElements", "gather": "GatherND", "clips": "Clip"}[form] in found
    assert str(Path(pwlu.__file__).parent).encode() not in path.read_bytes()

    x = 3 * torch.randn(7, 3, 8, 8)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        worst = (model(x) - exact).abs().max()
    (y,) = run(path, x)
    assert (y - exact).abs().max() <= 8 * worst + 4 * 2.0**-23 * exact.abs().max()


class Places(nn.Module):
    """Every place for channels that there is."""

    def __init__(self):
        super().__init__()
        self.images, self.rows = pwlu.PWLU(4), pwlu.PWLU(4, 7)
        self.last, self.first = pwlu.PWLU(4, 3, channel_dim=-1), pwlu.PWLU(4, channel_dim=-3)
        self.one, self.line = pwlu.PWLU(1, 1), pwlu.PWLU()

    def forward(self, x):
        images, rows = self.images(x), self.rows(x.mean((2, 3)))
        last, first = self.last(x.movedim(1, -1)), self.first(x[:, :, 0].movedim(1, 0)[None])
        return images, rows, last, first, self.one(x), self.line(x.flatten())


@pytest.mark.parametrize("form", [Elements, Clips])
def test_channels_anywhere_and_numbers_of_every_size(form, tmp_path):
    """NaN stays NaN, a slope of 0 gives a number at infinity, and far out nothing cancels."""
    model = trained_(Places())
    model.images.left_slope.data.zero_()
    model.one.right_slope.data.zero_()
    name = next(name for name, each in FORMS.items() if each is form)
    export_onnx(model, torch.randn(2, 4, 3, 5), tmp_path / "model.onnx", form=name)
    values = wild_values(torch.float32, [p.detach() for p in model.images.blocks()])
    x = values[: 4 * 15 * (len(values) // 60)].reshape(-1, 4, 3, 5)
    fused = copy.deepcopy(model)
    pwlu.fuse_(fused)
    with torch.no_grad():
        wanted = fused(x)
    for y, expected in zip(run(tmp_path / "model.onnx", x), wanted, strict=True):
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.equal(y.isinf(), expected.isinf())
        torch.testing.assert_close(y, expected, equal_nan=True, rtol=16 * 2.0**-24, atol=64 * 2.0**-24)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.act, self.out = nn.Embedding(11, 6), pwlu.PWLU(6, init="gelu", channel_dim=-1), nn.Linear(6, 4)

    def forward(self, tokens, scale, mask=None, *, factor=1.0):
        h = self.act(factor * self.embed(tokens) * scale[:, None, None])
        return {"y": self.out(h.mean(1)), "h": h if mask is None else h * mask[..., None]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_several_inputs_and_outputs(dtype, tmp_path):
    model = trained_(Two()).to(dtype)
    tokens, scale, mask = torch.randint(11, (4, 5)), torch.rand(4).to(dtype), torch.rand(4, 5) > 0.3
    report = export_onnx(model, {"factor": 2.0, "mask": mask, "scale": scale, "tokens": tokens}, tmp_path / "a.onnx")
    with torch.no_grad():
        wanted = model(tokens, scale, mask, factor=2.0)
    eps = torch.finfo(dtype).eps
    for y, expected in zip(run(tmp_path / "a.onnx", tokens, scale, mask), wanted.values(), strict=True):
        assert y.dtype == dtype
        torch.testing.assert_close(y, expected, rtol=8 * eps, atol=8 * eps)
    assert report.tolerance < 100 * eps * 100
    if dtype == torch.float32:
        assert export_onnx(model, (tokens, scale), tmp_path / "b.onnx").any_batch


@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("resnet18", "mobilenet_v3_small")), "vit"]
)
def test_torchvision(name, tmp_path):
    torchvision = pytest.importorskip("torchvision")
    if name == "vit":
        model = torchvision.models.VisionTransformer(32, 16, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=24)
        nn.init.normal_(model.heads.head.weight)
    else:
        model = torchvision.models.get_model(name)
    sample = torch.randn(1, 3, 32, 32)
    converted = len(pwlu.convert_(model, torch.randn(2, 3, 32, 32)).converted)
    trained_(model)
    pwlu.fuse_(model)
    report = export_onnx(model, sample, tmp_path / "model.onnx")
    assert len(report.units) == converted
    assert report.reached == 1
    assert report.operators["GatherElements"] == 2 * converted
    assert 0 < report.difference <= report.tolerance


class Fixed(nn.Module):
    """A model that cannot take other batches than those of 2."""

    def __init__(self):
        super().__init__()
        self.act, self.shift = pwlu.PWLU(), nn.Parameter(torch.randn(2, 6))

    def forward(self, x):
        return self.act(x + self.shift)


def test_one_batch_size(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)torch\.onnx\.export failed: .*pass dynamic_batch=False"):
        export_onnx(Fixed().eval(), torch.randn(2, 6), tmp_path / "model.onnx")
    report = export_onnx(Fixed().eval(), torch.randn(2, 6), tmp_path / "model.onnx", dynamic_batch=False, opset=20)
    assert (set(report.batches), report.opset) == ({2}, 20)
    assert "batches of 2" in str(report)


@pytest.mark.parametrize("what", ["table", "position", "wiring"])
def test_a_wrong_file_is_refused_and_nothing_is_left(what, tmp_path, monkeypatch):
    """Each of the two checks sees what the other cannot: slightly wrong units, and right units in a wrong network."""
    model, prepare = network(), Elements.prepare_

    def wrong(unit):
        prepare(unit)
        if what == "table":
            unit.offsets[0, 0] += 1e-4
        else:
            unit.shift += 1e-3

    text = r"of the PWLU '[23]', on inputs of every segment, in ONNX Runtime differs .* rounding explains only .*form='gather'"
    if what == "wiring":
        text = "the result of the model in ONNX Runtime differs from PyTorch's by"
        monkeypatch.setattr("pwlu.deploy.onnx_export.fuse_", lambda m: (pwlu.fuse_(m), m[4].bias.data.add_(1e-4)))
    else:
        monkeypatch.setattr(Elements, "prepare_", wrong)
    path = tmp_path / "model.onnx"
    path.write_text("of yesterday")
    with pytest.raises(RuntimeError, match=text):
        export_onnx(model, IMAGES, path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    assert path.read_text() == "of yesterday"


def test_a_tolerance_of_ones_own(tmp_path):
    class InFloat32(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.act = nn.Linear(3, 4), pwlu.PWLU(4)

        def forward(self, x):
            return self.act(self.linear(x.float()))

    model = trained_(InFloat32())
    with pytest.raises(RuntimeError, match=r"does not run in float64.*\n.*tolerance=1e-5"):
        export_onnx(model, torch.randn(2, 3), tmp_path / "model.onnx")
    export_onnx(model, torch.randn(2, 3), tmp_path / "model.onnx", tolerance=1e-5)
    with pytest.raises(RuntimeError, match="the tolerance allows only 0"):
        export_onnx(model, torch.randn(2, 3), tmp_path / "other.onnx", tolerance=0.0)
    assert not (tmp_path / "other.onnx").exists()


class Foreign(Form):
    def compute(self, x):
        return torch.onnx.ops.symbolic("mine::Pwlu", (x,), dtype=x.dtype, shape=x.shape, version=1)


def test_a_sample_that_reaches_no_unit(tmp_path):
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = pwlu.PWLU()

        def forward(self, x):
            return self.act(x) if x.ndim == 2 else x + 1

    with pytest.raises(ValueError, match=r"reaches none of the model's PWLUs, such as 'act'\. Pass a sample that does"):
        export_onnx(Beside().eval(), torch.randn(2, 3, 4), tmp_path / "model.onnx")


def test_operators_of_others_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("pwlu.deploy.onnx_export._check_units_alone", lambda *_: None)
    monkeypatch.setitem(FORMS, "elements", Foreign)
    with pytest.raises(RuntimeError, match="operators that are not part of ONNX: mine::Pwlu"):
        export_onnx(network(), IMAGES, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


class Unable(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = pwlu.PWLU()

    def forward(self, x):
        return self.act(x) if x.sum().item() > 0 else x


@pytest.mark.parametrize(
    ("model", "options", "error", "text"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.ReLU()), {}, ValueError, "has no PWLU, only 1 Linear, 2 ReLU"),
        ("model", {}, TypeError, r"model must be a torch\.nn\.Module, not str\. Write pwlu\.export_onnx\(model, \.\.\.\)"),
        (network().train(), {}, ValueError, r"the model, 0, 1 and 5 more is in training mode\. Call model\.eval\(\) first"),
        (network().bfloat16(), {}, ValueError, r"is in bfloat16.*deepcopy\(model\)\.float\(\)"),
        (network().double(), {}, ValueError, "is in float64"),
        (network(), {"sample": torch.randn(2, 4, 8, 8)}, RuntimeError, r"(?s)does not run on the sample: .*keyword arguments"),
        (network(), {"sample": {"y": IMAGES}}, RuntimeError, "does not run on the sample: TypeError"),
        (network(), {"path": "missing/model.onnx"}, FileNotFoundError, "the folder .*missing does not exist: create it first"),
        (network(), {"path": "."}, IsADirectoryError, r"is a folder\. Pass a file in it, such as .*model\.onnx"),
        (network(), {"form": "relu"}, ValueError, "form must be one of 'elements', 'gather', 'clips', not 'relu'"),
        (network(), {"opset": 11}, ValueError, r"opset must be an integer of at least 18 \(.*\), not 11"),
        (Unable().eval(), {}, RuntimeError, r"torch\.onnx\.export failed: "),
    ],
)
def test_bad_input(model, options, error, text, tmp_path):
    options = {"sample": IMAGES} | options
    path = tmp_path / options.pop("path", "model.onnx")
    before = repr(model)
    with pytest.raises(error, match=text):
        export_onnx(model, options.pop("sample"), path, **options)
    assert repr(model) == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_missing_packages(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"needs onnx, onnxscript and onnxruntime \(.*{package}.*pip install '\.\[onnx\]'"):
        export_onnx(network(), IMAGES, tmp_path / "model.onnx")
