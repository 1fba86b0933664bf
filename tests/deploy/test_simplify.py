"""Fewer intervals, plainer modules, and more intervals: what is promised of the error holds everywhere."""

import copy
import json
import re

import pytest
import torch
import torch.nn.functional as F
from helpers import oracle
from networks import data, network, train
from torch import nn

import pwlu
from pwlu.baselines import PReLU
from pwlu.deploy.fitting import minimax_fit
from pwlu.deploy.simplify import Line, refine_, simplify_
from pwlu.units.module import units_of


def unit(function, channels=3, intervals=16, bounds=(-3.0, 3.0), dtype=torch.float64, noise=0.0):
    """A function between bounds that differ from channel to channel, as training leaves them."""
    act = pwlu.PWLU(channels, intervals, bounds, init=function, dtype=dtype)
    with torch.no_grad():
        act.left.mul_(1 + 0.1 * torch.arange(channels))
        heights, *slopes = pwlu.reference.start(function, act.left.double(), act.right.double(), intervals)
        for parameter, value in zip((act.heights, act.left_slope, act.right_slope), (heights, *slopes), strict=True):
            parameter.copy_(value + noise * torch.randn(value.shape, dtype=torch.float64))
    return act


def wave(x):
    return torch.sin(1.3 * x) + 0.3 * x


def promise(act):
    """Points from B_L - W to B_R + W, knots included, shape (J, C), and the range R of each channel."""
    left, right = act.left.detach().double(), act.right.detach().double()
    shares = torch.linspace(-1, 2, 3 * 16 * 60 + 1, dtype=torch.float64)[:, None]
    return left + (right - left) * shares, (act.heights.amax(1) - act.heights.amin(1)).detach().double()


@torch.no_grad()
def errors(act, new, x):
    return (new(x) - act(x)).abs().amax(0)


SHAPES = {
    "wave": (wave, 0.0),
    "silu": (F.silu, 0.002),
    "tanh": (torch.tanh, 0.0),
    "relu": (torch.relu, 0.001),
    "leaky": (lambda x: torch.where(x < 0, 0.2 * x, x), 0.001),
    "line": (lambda x: 0.7 * x - 0.2, 0.001),
    "identity": (lambda x: x, 0.001),
    "moved kink": (lambda x: (x - 0.5).relu(), 0.001),
}


@pytest.mark.parametrize("tolerance", [1e-3, 1e-2, 0.1])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_promise_holds(shape, tolerance):
    function, noise = SHAPES[shape]
    act = unit(function, noise=noise)
    new = copy.deepcopy(act)
    (row,) = simplify_(new, tolerance)
    x, scale = promise(act)
    made = errors(act, new, x)
    assert (made <= tolerance * scale).all()
    # what is reported is what is made: the new kinks may lie between the points
    assert 0.97 * row.error - 1e-12 <= made.max() <= row.error + 1e-12
    assert 0.97 * row.relative - 1e-12 <= (made / scale).max() <= row.relative + 1e-12
    width = act.right - act.left
    beyond = torch.cat([act.left - 10 * width, act.right + 10 * width]).detach().reshape(2, 3)
    if isinstance(new, pwlu.PWLU):
        assert (errors(act, new, beyond) <= tolerance * scale).all()
    else:
        assert (errors(act, new, beyond) <= (1 + 9 * 2) * tolerance * scale).all()


@pytest.mark.parametrize("tolerance", [3e-3, 2e-2])
def test_the_promise_holds_in_float32(tolerance):
    act = unit(wave, intervals=48, dtype=torch.float32)
    new = copy.deepcopy(act)
    (row,) = simplify_(new, tolerance)
    assert row.became == "fewer"
    x, scale = promise(act)
    x = x.float()
    of_old, of_new = (oracle(x, [p.detach() for p in a.blocks()], 1)[1].amax(0) for a in (act, new))
    assert of_old.max() < 0.05 * tolerance  # else rounding alone could explain all
    with torch.no_grad():
        assert ((new(x).double() - act(x).double()).abs().amax(0) <= tolerance * scale + of_old + of_new).all()


@pytest.mark.parametrize(
    ("function", "became", "kind"),
    [
        ("identity", "identity", nn.Identity),
        ("relu", "relu", nn.ReLU),
        (lambda x: 0.25 * x - 3, "line", Line),
        (torch.zeros_like, "line", Line),
        ("leaky_relu", "prelu", PReLU),
        (lambda x: 2 * x.relu(), "fewer", pwlu.PWLU),
    ],
)
def test_what_it_becomes(function, became, kind):
    act = pwlu.PWLU(4, init=function, dtype=torch.float64)
    old = copy.deepcopy(act)
    (row,) = simplify_(act)
    assert (row.became, type(act)) == (became, kind)
    assert row.intervals == (1 if became == "fewer" else 0)
    x = 5 * torch.randn(9, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(act(x), old(x), rtol=0, atol=1e-12)
    assert row.error <= 1e-13
    assert row.removed == 4 * 21 - row.parameters
    assert row.parameters == sum(p.numel() for p in act.parameters())


def test_a_module_must_do_for_all_channels():
    act = pwlu.PWLU(3, dtype=torch.float64)
    with torch.no_grad():
        act.heights[1] *= 1.01
    assert [row.became for row in simplify_(copy.deepcopy(act), 0.1)] == ["relu"]
    assert [row.became for row in simplify_(act, 1e-3)] == ["fewer"]


def test_the_channel_that_needs_most_decides():
    """Wherever it is among the channels; the others, with a corner each, can have any number of intervals."""
    alone = unit(wave, 1)
    (expected,) = simplify_(copy.deepcopy(alone), 0.02)
    assert 1 < expected.intervals < 16
    for place in (0, 11):
        act = pwlu.PWLU(12, init=lambda x: 2 * x.relu(), dtype=torch.float64)
        with torch.no_grad():
            for parameter, value in zip(act.blocks(), alone.blocks(), strict=True):
                parameter[place] = value[0]
        (row,) = simplify_(act, 0.02)
        assert (row.intervals, row.error) == (expected.intervals, pytest.approx(expected.error, rel=1e-6))


def test_a_kink_far_outside_counts():
    """y = x between bounds of 10 and 11 is no ReLU: what the unit does below 0 is to stay, should inputs ever go there."""
    act = pwlu.PWLU(2, dtype=torch.float64)
    with torch.no_grad():
        act.left[1], act.right[1], act.left_slope[1] = 10, 11, 1
        act.heights[1] = torch.linspace(10, 11, 17)
    (row,) = simplify_(act)
    assert row.became == "prelu"
    assert act.weight.tolist() == [0, 1]


def test_slopes_of_each_channel():
    act = pwlu.PWLU(3, init="identity", channel_dim=-1)
    slopes = torch.tensor([-0.5, 1.0, 0.1])
    with torch.no_grad():
        knots = torch.linspace(-3, 3, 17)
        act.heights.copy_(torch.where(knots < 0, slopes[:, None] * knots, knots))
        act.left_slope.copy_(slopes)
    (row,) = simplify_(act)
    assert row.became == "prelu"
    torch.testing.assert_close(act.weight.detach(), slopes, rtol=0, atol=1e-6)
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(act(x), torch.where(x < 0, slopes * x, x))


def test_one_corner_wherever_it_is_needs_one_interval():
    """Bounds move to it; that is how a unit is after realignment, with 0 somewhere between two knots."""
    act = unit(lambda x: torch.where(x < -1.5, -0.3 * (x + 1.5), 1.7 * (x + 1.5)))
    with torch.no_grad():
        act.left.fill_(-3.0)
        act.heights.copy_(torch.where(torch.linspace(-3, 3, 17) < -1.5, -0.3, 1.7) * (torch.linspace(-3, 3, 17) + 1.5))
    old = copy.deepcopy(act)
    (row,) = simplify_(act)
    assert (row.became, row.intervals) == ("fewer", 1)
    assert errors(old, act, promise(old)[0]).max() < 1e-6
    realigned = network(torch.float64)
    optimizer = torch.optim.SGD(realigned.parameters(), lr=0.1)
    phases = pwlu.TwoPhase(realigned, optimizer, realign_at=2)
    train(realigned, optimizer, data(2, dtype=torch.float64))
    phases.remove()
    x = data(1, dtype=torch.float64)[0][0]
    before = realigned(x)
    assert [row.intervals for row in simplify_(realigned)] == [1, 1]
    torch.testing.assert_close(realigned(x), before, rtol=0, atol=1e-12)


def test_fitted_heights_need_fewer_intervals_than_interpolated_ones():
    act = unit(F.silu, channels=1)
    new = copy.deepcopy(act)
    (row,) = simplify_(new, 0.01, replace=False)
    x, scale = promise(act)
    plain = pwlu.PWLU(1, row.intervals, dtype=torch.float64, init="silu")
    with torch.no_grad():
        plain.left.copy_(act.left)
        plain.heights.copy_(act(torch.linspace(-3, 3, row.intervals + 1, dtype=torch.float64))[None])
        plain.left_slope.copy_(act.left_slope)
        plain.right_slope.copy_(act.right_slope)
    assert errors(act, new, x) <= 0.01 * scale < errors(act, plain, x)


def test_least_maximum():
    x = torch.linspace(-1, 1, 41, dtype=torch.float64)
    target, nothing = torch.stack([x**2, x.abs(), x.exp()]), torch.zeros(3, dtype=torch.float64)
    line = torch.stack([torch.ones_like(x), x], 1).expand(3, -1, -1)
    fitted = minimax_fit(line, target, torch.zeros(3, 2, dtype=torch.float64), nothing + 1)
    made = (line @ fitted[:, :, None] - target[:, :, None]).abs().amax((1, 2))
    # Chebyshev: the tangent parallel to the chord, half way between; on 41 points a little less
    slope = x.exp()[-1].sub(x.exp()[0]).div(2)
    of_exp = (x.exp()[-1] - slope - (slope - slope * slope.log())) / 2
    best = torch.stack([torch.tensor(0.5), torch.tensor(0.5), of_exp])
    assert (made >= 0.995 * best).all()
    assert (made <= 1.03 * best).all()


def test_an_untouched_resnet_is_as_it_was():
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18().eval()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = model(x)
        pwlu.convert_(model, x)
        converted = model(x)
        report = simplify_(model)
        assert torch.equal(model(x), expected)
    torch.testing.assert_close(converted, expected)
    assert len(report) == len(report.of("relu")) == 17
    assert max(row.error for row in report) == 0
    assert not units_of(model)
    assert str(report).endswith("ResNet: 17 relu; 81,984 parameters removed")
    pwlu.restore_(model)
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_report():
    model = nn.Sequential(pwlu.PWLU(2), unit(wave, dtype=torch.float32), unit(wave, 3, 12, dtype=torch.float32))
    report = simplify_(model, 0.03)
    rows = json.loads(json.dumps(report.as_dicts()))
    assert [row["became"] for row in rows] == [row.became for row in report] == ["relu", "fewer", "fewer"]
    lines = str(report).splitlines()
    assert re.match(r"0 +2 +16 +relu +0 +0 %$", lines[2])
    assert re.match(rf"1 +3 +16 +{model[1].intervals} intervals +0\.\d+ +\d.* %$", lines[3])
    assert re.match(r"Sequential: 1 relu, 2 fewer; \d+ parameters removed$", lines[-1])
    # of 4 intervals it needs the one with the corner, and 3 heights go
    one = simplify_(pwlu.PWLU(1, 4, (-2.0, 2.0), init=lambda x: 2 * x.relu()), replace=False)
    assert re.search(r"the model +1 +4 +1 interval +0 .*\nPWLU: 1 fewer; 3 parameters removed$", str(one))
    one = simplify_(pwlu.PWLU(1, 2, (-2.0, 2.0), init=lambda x: 2 * x.relu()), replace=False)
    assert str(one).endswith("PWLU: 1 fewer; 1 parameter removed")
    assert re.search(
        r"kept +0 +0 % +fewer intervals exceed the tolerance\nSequential: 2 kept; 0 parameters removed$",
        str(simplify_(model[1:], 1e-9)),
    )


# What stays.


def test_objects_hooks_and_modes_stay():
    model = nn.Sequential(nn.Linear(3, 3), pwlu.PWLU(3), nn.Sequential(unit(wave, dtype=torch.float32))).eval()
    model.append(model[1])  # in two places
    model[1].mine = "kept"
    visible = lambda: [m for name, m in model.named_modules() if "statistics" not in name]  # noqa: E731
    before, seen = visible(), []
    handles = [act.register_forward_hook(lambda act, *_: seen.append(type(act).__name__)) for act in (model[1], model[2][0])]
    model[1].requires_grad_(False)
    assert len(simplify_(model, 0.02)) == 2
    assert all(a is b for a, b in zip(visible(), before, strict=True))
    assert not model[1].training
    model(torch.randn(2, 3))
    assert seen == ["ReLU", "PWLU", "ReLU"]
    handles[0].remove()
    model(torch.randn(2, 3))
    assert seen[3:] == ["PWLU"]
    assert model[1].mine == "kept"
    assert vars(model[1]).keys() - {"mine"} == vars(nn.ReLU()).keys()
    assert not model[1].state_dict()
    x = torch.randn(2, 3)
    assert torch.equal(copy.deepcopy(model)(x), model(x))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_state_and_frozen_parameters_stay(dtype, frozen):
    model = nn.ModuleList([unit(wave), unit(lambda x: torch.where(x < 0, x / 4, x)), unit(lambda x: x / 2)]).to(dtype)
    model[0].statistics.running_mean.fill_(0.5)
    model[0].statistics.realigned.fill_(True)
    keys = list(model[0].state_dict())
    pwlu.freeze_(model, frozen)
    x = torch.randn(7, 3, dtype=dtype)
    before = [act(x) for act in model]
    (report,) = ([row.became for row in simplify_(model, 0.05)],)
    assert report == ["fewer", "prelu", "line"]
    assert all(p.dtype == dtype and p.requires_grad is not frozen for p in model.parameters())
    for act, expected in zip(model, before, strict=True):
        assert act(x).dtype == dtype
        assert (act(x) - expected).abs().max() < 0.4
    assert list(model[0].state_dict()) == keys
    assert model[0].statistics.realigned
    assert (model[0].statistics.running_mean == 0.5).all()
    assert model[0].intervals == model[0].heights.shape[1] - 1
    model[0].reset_parameters()
    pwlu.PWLU(3, model[0].intervals, dtype=dtype).load_state_dict(model[0].state_dict())


def test_it_goes_on_to_be_trained_and_fused():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(model, optimizer, data(30))
    simplify_(model, 0.02)
    assert all(p.grad is None for act in units_of(model).values() for p in act.parameters())
    assert units_of(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, data(3))
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    x = data(1)[0][0]
    expected = model.eval()(x)
    pwlu.fuse_(model)
    torch.testing.assert_close(model(x), expected)


def test_it_begins_anew_with_a_knot_on_the_kink():
    act = pwlu.PWLU(1, 16, (-3, 3))
    with torch.no_grad():
        act.heights.mul_(2)
    simplify_(act)
    assert act.intervals == 1
    act.reset_parameters()
    x = torch.linspace(-9, 9, 50)
    torch.testing.assert_close(act(x), x.relu())


def test_filters():
    model = nn.Sequential(pwlu.PWLU(), pwlu.PWLU(), pwlu.PWLU(init="silu"))
    report = simplify_(model, where=lambda name, act: name != "0" and act.init == "relu")
    assert [(row.name, row.became) for row in report] == [("1", "relu")]
    assert type(model[0]) is pwlu.PWLU
    assert [row.became for row in simplify_(model, replace=False)] == ["fewer", "kept"]
    assert model[0].intervals == 1


def test_bounds_that_crossed_and_numbers_that_are_none():
    act = unit(wave)
    with torch.no_grad():
        act.right[1] = act.left[1] - 0.5
        act.right[2] = act.left[2]
    old = copy.deepcopy(act)
    (row,) = simplify_(act, 0.02)
    assert row.became == "fewer"
    x = torch.linspace(-9, 9, 999, dtype=torch.float64)[:, None].expand(-1, 3)
    assert torch.equal(act(x)[:, 1:], old(x)[:, 1:])
    with torch.no_grad():
        act.right.copy_(act.left)
    assert [row.intervals for row in simplify_(act)] == [1]
    with torch.no_grad():
        act.heights[0, 0] = torch.nan
    assert [row.reason for row in simplify_(act)] == ["its parameters are not finite"]


def of(bounds, heights, slopes=(0.0, 0.0), dtype=torch.bfloat16):
    act = pwlu.PWLU(1, len(heights) - 1, bounds, init="identity", dtype=dtype)
    with torch.no_grad():
        for parameter, value in zip(act.blocks()[2:], ([heights], [slopes[0]], [slopes[1]]), strict=True):
            parameter.copy_(torch.tensor(value, dtype=torch.float64))
    return act


def test_rounding_that_breaks_the_promise_is_seen():
    """Eight bits: 1/3, 257 and 258.25 are not among them."""
    third = of((0, 3), [0, 0.5, 1], (1 / 3, 1 / 3))
    (row,) = simplify_(third, 1e-3)  # a line with the slope 1/3 would do
    assert (row.became, row.error) == ("fewer", 0)
    (row,) = simplify_(of((-1, 1), [256, 258, 256]), 0.6)  # 257 would do
    assert row.became == "kept"
    corner = of((256, 260), [max(0.0, k / 4 - 2) for k in range(17)], (0, 1))
    (row,) = simplify_(corner)  # bounds of 258 and 258.25 would do
    assert (row.intervals, row.error) == (2, 0)
    assert corner.left < corner.right


def test_bounds_stay_where_that_is_better():
    """The function leaves the line it comes in on so slowly that bounds could move; but its corner is half way."""
    act = of((-3, 3), [0.05 * 0.375 * k if k < 8 else 0.15 + 3 * 0.375 * (k - 8) for k in range(17)], dtype=torch.float64)
    (row,) = simplify_(act, 0.01)
    assert row.intervals == 2
    assert row.error < 1e-12
    assert (act.left.item(), act.right.item()) == (-3, 3)


def test_line_in_16_bits():
    line = Line(2, -1)
    with torch.no_grad():
        line.bias.copy_(torch.tensor([1.0, -1.0]))
    x = torch.randn(3, 2, dtype=torch.bfloat16)
    assert torch.equal(line(x), (x.float() + torch.tensor([1.0, -1.0])).bfloat16())
    assert repr(line) == "Line(channels=2, channel_dim=-1)"
    with pytest.raises(ValueError, match="the activation has 2 channels"):
        line(torch.randn(3, 4))


# More intervals.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_refine(dtype):
    model = nn.Sequential(unit(wave, intervals=8, dtype=dtype), unit(wave, intervals=16, dtype=dtype))
    model[0].statistics.running_std.fill_(2.0)
    old, keys = copy.deepcopy(model), list(model.state_dict())
    x = promise(model[0])[0].to(dtype)
    assert refine_(model, 16) == ["0"]
    assert [act.intervals for act in model] == [16, 16]
    assert torch.equal(model[0].heights[:, ::2], old[0].heights)
    assert list(model.state_dict()) == keys
    assert (model[0].statistics.running_std == 2).all()
    parameters = [[p.detach() for p in act.blocks()] for act in (model[0], old[0])]
    bound = sum(oracle(x, p, 1)[1] for p in parameters)
    assert ((model[0](x) - old[0](x)).abs() <= bound).all()
    assert refine_(model, 48) == ["0", "1"]
    assert refine_(model, 48) == []


@pytest.mark.parametrize("kind", ["uniform", "nonuniform"])
def test_gradient_factors_stay(kind):
    """Keep a frozen block frozen when the number of intervals changes."""
    act, before = unit(wave), 16
    act.scale_gradients(left=0.0, heights=0.5)
    if kind == "uniform":
        pwlu.refine_(act, 32)
    else:
        act = pwlu.NonUniformPWLU.from_uniform(act)
        act.scale_gradients(left=0.0, heights=0.5)
        simplify_(act, 0.05)
    assert act.intervals != before
    factors = [block.unique().tolist() for block in act._layout.unpack(act.gradient_scale, act.intervals)]
    assert dict(zip(act.blocks()._fields, factors, strict=True)) == {
        name: [{"left": 0.0, "heights": 0.5}.get(name, 1.0)] for name in act.blocks()._fields
    }
    act(torch.randn(50, 3, dtype=torch.float64)).sum().backward()
    assert torch.count_nonzero(act._layout.unpack(act.weight.grad, act.intervals).left) == 0


def test_refine_refuses_what_would_change_the_function():
    model = nn.Sequential(pwlu.PWLU(intervals=8), pwlu.PWLU(intervals=16))
    with pytest.raises(ValueError, match=r"1 has 16 intervals, and 24 is not a multiple of that.*\. Write 16 or 32$"):
        refine_(model, 24)
    with pytest.raises(ValueError, match=r"Write 8$"):
        refine_(model, 5)
    for wrong in (0, -8, 8.0, True):
        with pytest.raises(ValueError, match=f"refine_: intervals must be an integer of at least 1 .*, not {wrong}"):
            refine_(model, wrong)
    assert [act.intervals for act in model] == [8, 16]


# What is refused, before anything changes.


class Mine(pwlu.PWLU):
    pass


@pytest.mark.parametrize("change", [simplify_, lambda model: refine_(model, 32)])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.Linear(2, 2), r"Linear has no PWLU. Convert it first: pwlu.convert_\(model, sample\)"),
        (lambda: pwlu.fuse_(fused := nn.Sequential(pwlu.PWLU())) and fused, "already fused: call pwlu.*_ before pwlu.fuse_"),
        (lambda: "model", r"_: model must be a torch\.nn\.Module, not str\. Write pwlu\.\w+_\(model, \.\.\.\)"),
        (lambda: nn.Sequential(pwlu.PWLU(), Mine()), "1 is an instance of a subclass of PWLU"),
        (lambda: nn.Sequential(pwlu.PWLU(), pwlu.PWLU(device="meta")), "1 is on the meta device and has no values"),
        (lambda: nn.DataParallel(nn.Sequential(pwlu.PWLU())), "wrapped by DataParallel, .* Unwrap it first"),
        (lambda: nn.Sequential(torch.compile(nn.Sequential(pwlu.PWLU()))), "wrapped by OptimizedModule"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.nn.DataParallel:FutureWarning")
def test_models_that_are_refused(make, text, change):
    model = make()
    before = repr(model)
    with pytest.raises((ValueError, TypeError), match=text):
        change(model)
    assert repr(model) == before


@pytest.mark.parametrize("change", [simplify_, lambda model: refine_(model, 32)])
def test_a_model_that_is_being_trained(change):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    phases = pwlu.TwoPhase(model, optimizer, realign_at=1)
    for _ in range(2):  # in Phase I, then in Phase II
        with pytest.raises(RuntimeError, match=r"1, 3 has a TwoPhase.* call its remove\(\) first; .*copy\.deepcopy\(model\)"):
            change(model)
        assert change(copy.deepcopy(model))
        train(model, optimizer, data(1))
    phases.remove()
    assert change(model)


def test_a_controller_that_is_gone_does_not_matter():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.itself = optimizer  # so that it is only gone when someone looks
    pwlu.TwoPhase(model, optimizer, realign_at=1)
    del optimizer
    assert len(simplify_(model).of("relu")) == 2


@pytest.mark.parametrize("tolerance", [0, -1e-3, 1.0, float("nan"), True, "small", None])
def test_bad_tolerance(tolerance):
    act = pwlu.PWLU()
    with pytest.raises(ValueError, match=f"tolerance is a share of the function's range: .*, not {tolerance!r}"):
        simplify_(act, tolerance)
    assert type(act) is pwlu.PWLU


def test_where_that_leaves_nothing():
    with pytest.raises(ValueError, match="where must return True for at least one PWLU, but it returned False for all of 0, 1"):
        simplify_(nn.Sequential(pwlu.PWLU(), pwlu.PWLU()), where=lambda name, act: False)
