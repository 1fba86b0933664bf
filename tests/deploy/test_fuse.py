"""The form for inference."""

import copy
import re

import pytest
import torch
from helpers import DTYPES, assert_within, oracle
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import pwlu


def trained(channels=6, dtype=torch.float32):
    """A network whose units are no longer what they started as."""
    torch.manual_seed(2)
    shared = pwlu.PWLU(1, intervals=5, init="tanh")
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3), pwlu.PWLU(channels, init="silu"), shared, nn.Conv2d(channels, 4, 3), shared
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not name.endswith("weight"):
                p.add_(0.1 * torch.randn_like(p))
    return model.to(dtype).eval()


@pytest.fixture
def pair():
    model = trained()
    fused = copy.deepcopy(model)
    assert pwlu.fuse_(fused) == ["1", "2"]
    return model, fused


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_to_rounding(dtype):
    model = trained(dtype=dtype)
    fused = copy.deepcopy(model)
    pwlu.fuse_(fused)
    x = torch.randn(4, 3, 12, 12).to(dtype)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        worst = (model(x).double() - exact).abs().max()  # what rounding does to the unfused model
        difference = (fused(x).double() - exact).abs().max()
    assert difference <= 3 * worst + torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("intervals", [16, 64])
@pytest.mark.parametrize("bounds", [(-3.0, 3.0), (97.0, 103.0)])
def test_one_unit_equals_itself(dtype, intervals, bounds):
    """Steep functions far from 0: rounding the tables to 16 bits would show."""
    act = pwlu.PWLU(5, intervals, bounds, init=torch.sin)
    with torch.no_grad():
        act.heights.normal_()
    act.to(dtype).eval()
    fused = copy.deepcopy(act)
    pwlu.fuse_(fused)
    x = (sum(bounds) / 2 + 2 * torch.randn(500, 5)).to(dtype)
    with torch.no_grad():
        y, bound = oracle(x, [p.detach() for p in act.blocks()], 1)
        assert_within(fused(x), y, 2 * bound)


def test_bad_input_of_a_fused_unit(pair):
    with pytest.raises(TypeError, match="x must be float32"):
        pair[1][1](torch.ones(2, 6).long())
    with pytest.raises(ValueError, match="left is on cpu but x is on meta"):
        pair[1][1](torch.ones(2, 6, device="meta"))
    with pytest.raises(TypeError, match="x must be a tensor, not list"):
        pair[1][1]([1.0])


def test_forward_mode_is_refused(pair):
    x = torch.randn(2, 6)
    with pytest.raises(RuntimeError, match="fuse_ is for inference only"):
        torch.func.jvp(pair[1][1], (x,), (x,))
    with pytest.raises(RuntimeError, match="fuse_ is for inference only"):
        torch.func.jacfwd(pair[1][1])(x)


def test_make_fx_records_aten_operators_alone(pair):
    graph = make_fx(pair[1])(torch.randn(2, 3, 12, 12)).graph
    assert not [n for n in graph.nodes if "pwlu" in str(n.target)]


def test_all_or_none_are_fused():
    model = nn.Sequential(pwlu.PWLU(3), pwlu.PWLU(3, device="meta"))
    with pytest.raises(NotImplementedError, match="meta"):
        pwlu.fuse_(model)
    assert all(type(m) is pwlu.PWLU for m in model)


def test_the_hint_of_the_error_works():
    """What the message tells people to write is run as it stands there."""
    model = nn.Sequential(pwlu.PWLU()).eval()
    trapped = copy.deepcopy(model)
    pwlu.fuse_(trapped)
    with pytest.raises(RuntimeError) as error:
        trapped(torch.ones(3, requires_grad=True)).sum().backward()
    names = {"model": model, "copy": copy, "pwlu": pwlu}
    exec(re.search(r"fuse a copy of it: (.*)\.$", str(error.value)).group(1), names)
    assert isinstance(names["fused"][0], pwlu.FusedPWLU)
    assert isinstance(model[0], pwlu.PWLU)


def test_layouts_survive(pair):
    x = torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last)
    with torch.no_grad():
        assert pair[1](x).is_contiguous(memory_format=torch.channels_last)


def test_it_has_no_parameters_left(pair):
    units = [m for m in pair[1].modules() if isinstance(m, pwlu.FusedPWLU)]
    assert len(units) == 2
    assert not any(list(u.parameters()) for u in units)
    assert repr(units[0]) == "FusedPWLU(channels=6, intervals=16, channel_dim=1)"
    assert {k: tuple(b.shape) for k, b in units[0].named_buffers()} == {
        "left": (6,),
        "inv_step": (6,),
        "slopes": (6, 18),
        "offsets": (6, 18),
    }


def test_modules_stay_the_same_objects():
    act = pwlu.PWLU(3)
    seen = []
    act.register_forward_hook(lambda *a: seen.append(1))
    assert pwlu.fuse_(act) == [""]
    act.eval()(torch.randn(2, 3))
    assert isinstance(act, pwlu.FusedPWLU)
    assert seen == [1]


def test_it_cannot_be_trained_by_accident(pair):
    x = torch.randn(2, 3, 12, 12)
    pair[1].train()
    with pytest.raises(RuntimeError, match=r"call model\.eval\(\) first"):
        pair[1](x)
    pair[1].eval()
    y = pair[1](x)  # without no_grad, as people forget: inference works
    with pytest.raises(RuntimeError, match=r"fuse_ is for inference only.*copy\.deepcopy"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match=r"fuse_ is for inference only"):
        torch.func.grad(lambda x: pair[1](x).sum())(x)


def test_nor_when_compiled(pair):
    torch._dynamo.reset()
    compiled = torch.compile(pair[1], fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 12, 12)
    with pytest.raises(RuntimeError, match="fuse_ is for inference only"):
        compiled(x).sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), pair[1](x))


def test_compiled_inference(pair):
    torch._dynamo.reset()
    compiled = torch.compile(pair[1], fullgraph=True)
    with torch.no_grad():
        for batch in (2, 3, 5):
            x = torch.randn(batch, 3, 12, 12)
            torch.testing.assert_close(compiled(x), pair[1](x))


def test_loading_across_the_two_forms(pair):
    model, fused = pair
    with pytest.raises(RuntimeError, match=r"but this model is fused\. Load them into the model before pwlu\.fuse_"):
        fused.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="holds a fused PWLU, but the PWLU of this model is not fused"):
        model.load_state_dict(fused.state_dict())
    with pytest.raises(RuntimeError, match="fused"):
        model.load_state_dict(fused.state_dict(), strict=False)
    other = trained()
    pwlu.fuse_(other)
    other.load_state_dict(fused.state_dict())


def test_nothing_to_fuse():
    with pytest.raises(ValueError, match=r"Linear has no PWLU\. Convert it first"):
        pwlu.fuse_(nn.Linear(2, 2))
    act = pwlu.PWLU()
    pwlu.fuse_(act)
    with pytest.raises(ValueError, match=r"It is already fused$"):
        pwlu.fuse_(act)


def test_subclasses_are_refused_before_anything_changes():
    class Mine(pwlu.PWLU):
        pass

    model = nn.Sequential(pwlu.PWLU(), Mine())
    with pytest.raises(TypeError, match="1 is an instance of a subclass of PWLU"):
        pwlu.fuse_(model)
    assert type(model[0]) is pwlu.PWLU


def test_wrong_channels(pair):
    with pytest.raises(ValueError, match="the activation has 6 channels"):
        pair[1][1](torch.randn(2, 5))


def test_copies_and_pickles(pair, tmp_path):
    x = torch.randn(2, 3, 12, 12)
    torch.save(pair[1], tmp_path / "model.pt")
    with torch.no_grad():
        for other in (copy.deepcopy(pair[1]), torch.load(tmp_path / "model.pt", weights_only=False)):
            assert torch.equal(other(x), pair[1](x))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_it_has_aten_operators_alone(pair, strict):
    """test_deploy.py runs such files without pwlu."""
    program = torch.export.export(pair[1], (torch.randn(2, 3, 12, 12),), strict=strict)
    called = {n.target for n in program.graph.nodes if n.op == "call_function"}
    assert not {t for t in called if isinstance(t, torch._ops.OpOverload) and t.namespace != "aten"}
