"""A PWLU after a quantized input becomes a table with the same bits, made of aten operators alone."""

import copy
import importlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from helpers import CPU_VARIANTS, oracle, unit
from torch import nn
from torch.ao.quantization.fx import _decomposed  # noqa: F401  the operators of quantized graphs

import pwlu
from pwlu import reference
from pwlu.deploy.int8_tables import tabulate_
from pwlu.kernels import cpu, dispatch, eager

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`:FutureWarning")  # torch's own, in 2.13

quantised = torch.ops.quantized_decomposed
RANGES = {torch.uint8: (0, 255), torch.int8: (-128, 127)}
FINE = (0.01, 3)  # scale and zero point of outputs: so fine that the ends of the range are met


class Quantised(nn.Module):
    """quantise(act(dequantise(q))), with scales for all channels or, where they are tensors, along `axis`."""

    def __init__(self, act, scale=0.05, zero=0, out=FINE, dtype=torch.uint8, axis=1):
        super().__init__()
        self.act, self.dtype, self.axis, self.out = act, dtype, axis, out
        self.per_channel = isinstance(scale, torch.Tensor)
        if self.per_channel:
            self.register_buffer("scale", scale)
            self.register_buffer("zero", zero)
        else:
            self.scale, self.zero = scale, zero

    def forward(self, q):
        limits = (*RANGES[self.dtype], self.dtype)
        if self.per_channel:
            x = quantised.dequantize_per_channel(q, self.scale, self.zero, self.axis, *limits)
        else:
            x = quantised.dequantize_per_tensor(q, self.scale, self.zero, *limits)
        y = self.act(x)
        return y if self.out is None else quantised.quantize_per_tensor(y, *self.out, *limits)


def act_of(channels=6, intervals=16, channel_dim=1):
    act = pwlu.PWLU(channels, intervals, channel_dim=channel_dim)
    with torch.no_grad():
        for parameter, value in zip(act.blocks(), unit(channels, intervals), strict=True):
            parameter.copy_(value)
    return act.eval()


def graph_of(model, q):
    return torch.export.export(model, (q,)).module()


def every_number(channels, dtype=torch.uint8):
    """All 256 in every channel: (16, C, 4, 4)."""
    numbers = torch.arange(256).to(torch.uint8).view(dtype)
    return numbers.reshape(16, 1, 4, 4).repeat(1, channels, 1, 1)


def assert_unchanged(model, q, tables=1):
    """Tabulated, the model gives the same bits."""
    graph = graph_of(model, q)
    with torch.no_grad():
        before = graph(q)
        report = tabulate_(graph)
        assert len(report.tabulated) == tables, report
        after = graph(q)
    assert not any("pwlu" in str(node.target) and node.op == "call_function" for node in graph.graph.nodes)
    for a, b in zip(*(y if isinstance(y, tuple) else (y,) for y in (before, after)), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    return graph, report


def use(code, monkeypatch):
    monkeypatch.setattr(dispatch, "kernel_of", lambda x: None if code == "reference" else cpu.load(code))
    eager.forget()


def quantise(y, dtype):
    scale, zero = FINE
    return (torch.round(y * (1.0 / scale)) + zero).clamp(*RANGES[dtype])


@pytest.mark.parametrize("implementation", ["reference", *CPU_VARIANTS])
@pytest.mark.parametrize(
    ("dtype", "zero"), [(torch.uint8, 0), (torch.uint8, 255), (torch.uint8, 121), (torch.int8, -128), (torch.int8, 127)]
)
@pytest.mark.parametrize(("channels", "intervals"), [(6, 16), (6, 1), (1, 5), (33, 40)])
def test_every_entry(implementation, dtype, zero, channels, intervals, monkeypatch):
    """What the definition gives, to the bit where plain torch computes it, and else within the kernel's rounding before it."""
    use(implementation, monkeypatch)
    act, q = act_of(channels, intervals), every_number(channels, dtype)
    graph, report = assert_unchanged(Quantised(act, 0.05, zero, dtype=dtype), q)
    name = str(dtype).removeprefix("torch.")
    assert [(call.rows, call.given, call.gives) for call in report] == [(channels, name, name)]
    with torch.no_grad():
        found, x = graph(q), (q.float() - zero) * torch.tensor(0.05)
        exactly = quantise(reference.forward(x, *act.blocks(), 1), dtype)
        y, bound = oracle(x, [p.detach() for p in act.blocks()], 1)
    assert (found == RANGES[dtype][0]).any() or (found == RANGES[dtype][1]).any()  # some saturate
    if implementation == "reference":
        assert torch.equal(found, exactly.to(dtype))
    assert ((quantise(y - bound, dtype) <= found) & (found <= quantise(y + bound, dtype))).all()
    assert (found != exactly).float().mean() < 0.01


@pytest.mark.parametrize(
    ("shape", "channel_dim"), [((3, 6, 5, 4), 1), ((3, 6, 5, 4), -3), ((3, 7, 6), -1), ((3, 7, 6), 2), ((6,), 0), ((6, 9), 0)]
)
@pytest.mark.parametrize("dtype", RANGES)
def test_shapes(shape, channel_dim, dtype):
    q = torch.randint(*RANGES[dtype], shape, dtype=dtype)
    assert_unchanged(Quantised(act_of(6, channel_dim=channel_dim), dtype=dtype, out=(0.05, 7)), q)


@pytest.mark.parametrize("shape", [(), (5,), (3, 6, 5, 4)])
@pytest.mark.parametrize("dtype", RANGES)
def test_one_function_for_all(shape, dtype):
    q = torch.randint(*RANGES[dtype], shape, dtype=dtype)
    graph, report = assert_unchanged(Quantised(act_of(1), dtype=dtype, out=(0.05, 7)), q)
    assert graph(q).shape == shape
    assert [call.rows for call in report] == [1]


@pytest.mark.parametrize("channels", [1, 6])
def test_layouts(channels):
    q = torch.randint(0, 256, (3, 6, 5, 4), dtype=torch.uint8)
    model = Quantised(act_of(channels))
    graph, _ = assert_unchanged(model, q)
    want = graph(q)
    for other in (q.contiguous(memory_format=torch.channels_last), q.transpose(0, 3).contiguous().transpose(0, 3)):
        assert torch.equal(graph(other), want)
        assert_unchanged(model, other)
    assert not torch.equal(graph(q.flip(1)), want)  # the inputs show a difference


def test_any_batch_size():
    q = torch.randint(0, 256, (3, 6, 5, 4), dtype=torch.uint8)
    model = Quantised(act_of())
    batch = torch.export.Dim("batch", min=1, max=64)
    graph = torch.export.export(model, (q,), dynamic_shapes=({0: batch},)).module()
    tabulate_(graph)
    many = torch.randint(0, 256, (17, 6, 5, 4), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(graph(many), model(many))


@pytest.mark.parametrize(("channels", "out"), [(6, FINE), (6, None), (1, FINE)])
def test_a_scale_for_every_channel(channels, out):
    """The table has a row for every scale, also where there is one function for all."""
    scales, zeros = torch.rand(6) + 0.01, torch.randint(0, 256, (6,))
    _, report = assert_unchanged(Quantised(act_of(channels), scales, zeros, out), every_number(6))
    assert [call.rows for call in report] == [6]
    _, report = assert_unchanged(
        Quantised(act_of(1), scales, zeros, axis=2), torch.randint(0, 256, (3, 4, 6), dtype=torch.uint8)
    )
    assert [call.rows for call in report] == [6]


class OutputScales(nn.Module):
    """The output is quantised with a scale for each entry of `axis`."""

    def __init__(self, axis):
        super().__init__()
        self.act, self.axis = act_of(), axis
        self.register_buffer("scale", torch.rand(6) + 0.01)
        self.register_buffer("zero", torch.randint(0, 256, (6,)))

    def forward(self, q):
        y = self.act(quantised.dequantize_per_tensor(q, 0.05, 121, 0, 255, torch.uint8))
        return quantised.quantize_per_channel(y, self.scale, self.zero, self.axis, 0, 255, torch.uint8)


@pytest.mark.parametrize(("axis", "gives"), [(1, "uint8"), (0, "float32")])
def test_scales_of_the_output(axis, gives):
    """Along the dimension of the channels they go into the table; else the output is quantised as before."""
    _, report = assert_unchanged(OutputScales(axis), torch.randint(0, 256, (6, 6, 3), dtype=torch.uint8))
    assert [call.gives for call in report] == [gives]


class Users(nn.Module):
    """An output that several use: quantised with these parameters, or as it is."""

    def __init__(self, *outs):
        super().__init__()
        self.act, self.outs = act_of(), outs

    def forward(self, q):
        y = self.act(quantised.dequantize_per_tensor(q, 0.05, 121, 0, 255, torch.uint8))
        limits = (0, 255, torch.uint8)
        return tuple(y + 1 if out is None else quantised.quantize_per_tensor(y, *out, *limits) for out in self.outs)


@pytest.mark.parametrize(
    ("outs", "gives"),
    [((FINE, FINE), "uint8"), ((FINE, (0.2, 3)), "float32"), ((FINE, None), "float32"), ((None, None), "float32")],
)
def test_users_of_the_output(outs, gives):
    graph, report = assert_unchanged(Users(*outs), every_number(6))
    assert [call.gives for call in report] == [gives]
    assert sum("index" in str(node.target) for node in graph.graph.nodes) == 1


class Mixed(nn.Module):
    """The same unit on a quantised input, on another one, and on one that is not; and one unit that has none of those."""

    def __init__(self):
        super().__init__()
        self.block = nn.ModuleDict({"act": act_of()})
        self.wide, self.moving = act_of(), act_of()

    def forward(self, q, x):
        first = self.block["act"](quantised.dequantize_per_tensor(q, 0.05, 121, 0, 255, torch.uint8))
        second = self.block["act"](quantised.dequantize_per_tensor(q, 0.1, 3, 0, 255, torch.uint8))
        wide = self.wide(quantised.dequantize_per_tensor(q.to(torch.int16), 0.1, 3, -(2**15), 2**15 - 1, torch.int16))
        scale, zero = quantised.choose_qparams(x, 0, 255, 1e-6, torch.uint8)
        moving = self.moving(quantised.dequantize_per_tensor.tensor(q, scale, zero, 0, 255, torch.uint8))
        return first, second, self.block["act"](x), wide, moving


def test_one_after_another():
    """Chain tables: the 8-bit output of one is the input of the next."""
    assert_unchanged(nn.Sequential(*(Quantised(act_of()) for _ in range(3))), every_number(6), tables=3)


def test_which_and_why():
    """Units with an 8-bit input become tables; the report says why others do not."""
    q, x = every_number(6), torch.randn(2, 6, 3)
    model = Mixed().eval()
    graph = torch.export.export(model, (q, x)).module()
    with torch.no_grad():
        before = graph(q, x)
        report = tabulate_(graph)
        assert all(torch.equal(a, b) for a, b in zip(before, graph(q, x), strict=True))
    reasons = {
        "its input is not quantized",
        "its input is quantized to int16, not to 8 bits",
        "the scale of its input is computed at run time",
    }
    assert len(report) == 5
    assert [call.name for call in report.tabulated] == ["block.act", "block.act"]
    assert {call.reason for call in report if not call.rows} == reasons
    assert json.loads(json.dumps(report.as_dicts()))[0] == {
        "name": "block.act",
        "rows": 6,
        "given": "uint8",
        "gives": "float32",
        "reason": "",
    }
    lines = str(report).splitlines()
    assert lines[2].split() == ["block.act", "6", "x", "256,", "uint8", "->", "float32"]
    assert lines[-1].endswith("2 of 5 PWLUs are tables")
    # tables come, and parameters go unless something reads them
    names = {"table", "starts", "table_1", "starts_1", "weight"}
    assert {name for name in graph.state_dict() if name.startswith("block.act.")} == {f"block.act.{name}" for name in names}


def test_parameters_go():
    graph, _ = assert_unchanged(Quantised(act_of()), every_number(6))
    assert set(graph.state_dict()) == {"act.table", "act.starts"}
    assert graph.get_buffer("act.table").shape == (6 * 256,)
    graph, _ = assert_unchanged(Quantised(act_of(1)), every_number(6))
    assert set(graph.state_dict()) == {"act.table", "act.starts"}
    assert graph.get_buffer("act.table").shape == (256,)


def test_channels_elsewhere():
    graph = graph_of(Quantised(act_of(6), torch.ones(16), torch.zeros(16, dtype=torch.int64), axis=0), every_number(6))
    text = "its input has scales along dimension 0, but the PWLU has functions along dimension 1"
    with pytest.raises(ValueError, match=text):
        tabulate_(graph)


def test_errors():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), act_of()).eval()
    x = torch.randn(1, 3, 8, 8)
    with pytest.raises(TypeError, match=r"must be the graph that convert_pt2e returns, not Sequential\. Use prepare_pt2e "):
        tabulate_(model)
    graph = graph_of(model, x)
    code = graph.code
    with pytest.raises(ValueError, match=r"no PWLU has an 8-bit input. To quantize it, use prepare_pt2e with (.*\n)*1 "):
        tabulate_(graph)
    assert graph.code == code
    pwlu.fuse_(model)
    with pytest.raises(ValueError, match=r"the graph has no PWLU. Export and quantize the model without pwlu.fuse_"):
        tabulate_(graph_of(model, x))


# With torchao, which quantises.


class Block(nn.Module):
    """What a residual network has: a stem with a pool, an addition, and layers behind another pool."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), act_of(8), nn.MaxPool2d(2))
        self.conv, self.act = nn.Conv2d(8, 8, 3, padding=1), act_of(8)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 12), act_of(12), nn.Linear(12, 4))

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.act(self.conv(x) + x))


@pytest.fixture
def pt2e():
    """Modules of torchao and of ours for it."""
    pytest.importorskip("torchao", reason="torchao is not installed: pip install '.[int8]'")
    names = ("quantize_pt2e", "quantizer.x86_inductor_quantizer", "quantizer", "observer")
    found = [importlib.import_module(f"torchao.quantization.pt2e.{name}") for name in names]
    graph = graph_of(nn.Linear(2, 2), torch.randn(1, 2))
    x86(found[1]).annotate(graph)
    if not any("quantization_annotation" in node.meta for node in graph.graph.nodes):
        pytest.skip(f"this torchao finds no layers to quantise with torch {torch.__version__}")
    return (*found, importlib.import_module("pwlu.integrations.pt2e"))


def x86(module):
    config = module.get_default_x86_inductor_quantization_config()
    return module.X86InductorQuantizer().set_global(config)


def converted(pt2e, model, x, quantizer):
    prepared = pt2e[0].prepare_pt2e(graph_of(model, x), quantizer)
    with torch.no_grad():
        prepared(x)
        return pt2e[0].convert_pt2e(prepared)


def test_pt2e(pt2e):
    """All PWLUs of a network become tables from 8 bits to 8 bits, and its outputs stay the same."""
    x, model = torch.randn(4, 3, 16, 16), Block().eval()
    before = converted(pt2e, model, x, pt2e[-1].PWLUQuantizer(x86(pt2e[1])))
    after = copy.deepcopy(before)
    report = tabulate_(after)
    assert [(call.name, call.rows, call.given, call.gives) for call in report] == [
        ("stem.2", 8, "uint8", "uint8"),
        ("act", 8, "uint8", "uint8"),
        ("head.3", 12, "uint8", "uint8"),
    ]
    with torch.no_grad():
        assert torch.equal(before(x), after(x))
        off = (after(x) - model(x)).abs().max() / model(x).abs().max()
    assert 0 < off < 0.2  # 8 bits, and a network whose functions are random


def test_a_quantizer_that_annotates_nothing(monkeypatch):
    """It is an error, as the PWLUs would have no 8-bit inputs. torchao 0.18 with torch 2.11 is such a case."""
    pytest.importorskip("torchao", reason="torchao is not installed: pip install '.[int8]'")
    module = importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = importlib.import_module("pwlu.integrations.pt2e").PWLUQuantizer(x86(module))
    monkeypatch.setattr(quantizer.quantizer, "annotate", lambda model: model)
    with pytest.raises(ValueError, match="X86InductorQuantizer annotated nothing in this model"):
        quantizer.annotate(graph_of(act_of(3), torch.randn(1, 3, 4, 4)))


def test_without_our_quantizer(pt2e):
    with pytest.warns(UserWarning, match="The input of maxpool2d is not quantized"):
        graph = converted(pt2e, Block().eval(), torch.randn(4, 3, 16, 16), x86(pt2e[1]))
    with pytest.raises(ValueError, match=r"no PWLU has an 8-bit input.*\.PWLUQuantizer, calibrate"):
        tabulate_(graph)


def test_scales_for_channels_by_pt2e(pt2e):
    """A table has a row for each of them."""
    x, model = torch.randn(4, 3, 16, 16), Block().eval()
    by_channel = pt2e[2].QuantizationSpec(
        dtype=torch.uint8,
        quant_min=0,
        quant_max=255,
        qscheme=torch.per_channel_affine,
        ch_axis=1,
        observer_or_fake_quant_ctr=pt2e[3].PerChannelMinMaxObserver,
    )
    before = converted(pt2e, model, x, pt2e[-1].PWLUQuantizer(x86(pt2e[1]), inputs=by_channel))
    assert sum(node.target is quantised.quantize_per_channel.default for node in before.graph.nodes) == 3
    after = copy.deepcopy(before)
    assert len(tabulate_(after).tabulated) == 3
    with torch.no_grad():
        assert torch.equal(before(x), after(x))


def test_errors_of_the_quantizer(pt2e):
    _, module, _, _, ours = pt2e
    with pytest.raises(ValueError, match=r"X86InductorQuantizer has no setting for .* inputs=QuantizationSpec"):
        ours.PWLUQuantizer(module.X86InductorQuantizer())
    dynamic = module.get_default_x86_inductor_quantization_config(is_dynamic=True)
    with pytest.raises(ValueError, match=r"this quantization is dynamic\. Use one with is_dynamic=False"):
        ours.PWLUQuantizer(module.X86InductorQuantizer().set_global(dynamic))


def test_without_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization.pt2e.quantizer", None)
    monkeypatch.delitem(sys.modules, "pwlu.integrations.pt2e", raising=False)
    with pytest.raises(ImportError, match=r"needs the package torchao.*pip install '\.\[int8\]'"):
        importlib.import_module("pwlu.integrations.pt2e")


ELSEWHERE = """
    import sys
    sys.modules["pwlu"] = sys.modules["torchao"] = None  # where they are installed, this hides them
    import torch
    import torch._inductor
    package, data = sys.argv[1:]
    run = torch._inductor.aoti_load_package(package)
    torch.save(run(torch.load(data)), data)
    assert not [name for name in sys.modules if name.startswith("pwlu.")]
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
def test_compiled(pt2e, tmp_path):
    """Compiled, the network with tables gives the bits of the one without; its package needs no pwlu."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("no oneDNN here, which computes convolutions of 8 bits")
    x = torch.randn(4, 3, 16, 16)
    before = converted(pt2e, Block().eval(), x, pt2e[-1].PWLUQuantizer(x86(pt2e[1])))
    after = copy.deepcopy(before)
    tabulate_(after)
    package = tmp_path / "model.pt2"
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        want = torch.compile(before)(x)
        torch._inductor.aoti_compile_and_package(torch.export.export(after, (x,)), package_path=str(package))
    torch.save(x, tmp_path / "data.pt")
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(ELSEWHERE), package, tmp_path / "data.pt"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    assert torch.equal(torch.load(tmp_path / "data.pt"), want)


def test_the_page(pt2e, capsys):
    """The code that docs/deploy.md shows."""
    page = (Path(__file__).parents[2] / "docs/deploy.md").read_text()
    (block,) = (block for block in page.split("```")[1::2] if "PWLUQuantizer" in block)
    quantise, compile_ = block.split("import torch._inductor.config")
    exec(quantise, {"model": Block().eval(), "images": torch.randn(8, 3, 16, 16), "torch": torch, "pwlu": pwlu})
    assert "3 of 3 PWLUs are tables" in capsys.readouterr().out
    assert "freezing = True" in compile_
    assert "torch.compile(quantized)" in compile_
