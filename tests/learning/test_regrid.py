"""Bounds that follow the inputs, and functions that stay."""

import copy

import pytest
import torch
from networks import data, network, same, train, units, values
from torch import nn

import pwlu
from pwlu.learning.function_table import table_of
from pwlu.learning.regridding import fitted


class Inputs:
    """A measurement of inputs with this mean and standard deviation, for each channel."""

    def __init__(self, name, mean, std):
        self.name, self.count = name, [1000] * len(mean)
        self.p5, self.p95 = ([m + sign * 1.6448536269514722 * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))


def random_unit(channels=3, intervals=16, dtype=torch.float64):
    unit = pwlu.PWLU(channels, intervals, dtype=dtype)
    unit.weight.data += 0.3 * torch.randn(unit.weight.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return unit


def smooth_unit(channels=3, intervals=16):
    return pwlu.PWLU(channels, intervals, (-4.0, 4.0), init=torch.tanh, dtype=torch.float64)


def grid(unit, per_interval=16):
    """Points in and a little outside of the bounds, (C, M)."""
    d = (unit.right - unit.left) / unit.intervals
    steps = torch.arange(-2 * per_interval, (unit.intervals + 2) * per_interval + 1) / per_interval
    return (unit.left[:, None] + d[:, None] * steps).detach()


def evaluated(unit, x):
    return pwlu.reference.forward(x, *unit.blocks(), channel_dim=0).detach()


def test_bounds_are_three_standard_deviations_from_the_mean_and_the_function_stays_nearly():
    model = nn.Sequential(smooth_unit())
    old = copy.deepcopy(model[0])
    (report,) = pwlu.regrid_(model, [Inputs("0", [0.0, 0.5, -1.0], [1.0, 0.5, 0.3])])
    torch.testing.assert_close(model[0].left.tolist(), [-3.0, -1.0, -1.9])
    torch.testing.assert_close(model[0].right.tolist(), [3.0, 2.0, -0.1])
    assert (report.name, report.channels, report.kept) == ("0", 3, 0)
    x = grid(model[0])[:, 32:-32]
    difference = evaluated(model[0], x) - evaluated(old, x)
    assert 0 < difference.abs().max() < 0.02
    weight = torch.softmax(-torch.linspace(-3, 3, x.shape[1], dtype=torch.float64).square() / 2, 0)
    before = evaluated(old, x)
    spread = before - (before * weight).sum(1, keepdim=True)
    expected = ((difference.square() * weight).sum() / (spread.square() * weight).sum()).sqrt().item()
    assert report.error == pytest.approx(expected, rel=0.05)  # on half as many points


def test_exact_if_the_new_grid_has_the_knots():
    """Half as many intervals carry the function, and the outer ones are straight continuations."""
    coarse, fine = random_unit(1, 8), pwlu.PWLU(1, 16, dtype=torch.float64)
    left, right = (bound.item() for bound in (coarse.left, coarse.right))
    fine.assign(left=coarse.left.detach(), right=coarse.right.detach())
    knots = torch.linspace(left, right, 17, dtype=torch.float64)[None]
    fine.assign(
        heights=evaluated(coarse, knots), left_slope=coarse.left_slope.detach(), right_slope=coarse.right_slope.detach()
    )
    # twice as wide, on the same knots of the coarse function
    width = right - left
    inputs = Inputs("", [(left + right) / 2], [2 * width / 6])
    (report,) = pwlu.regrid_(fine, [inputs])
    assert (fine.right - fine.left).item() == pytest.approx(2 * width)
    assert report.error < 1e-13
    x = grid(fine)
    torch.testing.assert_close(evaluated(fine, x), evaluated(coarse, x), rtol=0, atol=1e-12)


def test_the_same_inputs_again_change_nothing():
    model = nn.Sequential(random_unit())
    inputs = [Inputs("0", [0.3, 0.0, 1.0], [0.4, 2.0, 1.0])]
    assert pwlu.regrid_(model, inputs)[0].error > 0
    before = model[0].weight.detach().clone()
    (report,) = pwlu.regrid_(model, inputs)
    assert torch.equal(before, model[0].weight)
    assert (report.kept, report.error) == (3, 0.0)


@pytest.mark.parametrize(("make", "key"), [(torch.optim.SGD, "momentum_buffer"), (torch.optim.Adam, "exp_avg")])
def test_momentum_follows_as_a_change_of_the_function(make, key):
    """Regridding a function that momentum has moved gives what moving the regridded function does. Both maps are linear."""
    unit = random_unit()
    optimizer = make([unit.weight], lr=0.1, **({"momentum": 0.9} if make is torch.optim.SGD else {}))
    unit.weight.grad = torch.randn_like(unit.weight)
    optimizer.step()
    table = table_of([unit])
    old, momentum = table.read([unit.weight.detach()]), table.read([optimizer.state[unit.weight][key]])
    (second,) = [v.clone() for k, v in optimizer.state[unit.weight].items() if k == "exp_avg_sq"] or [None]
    pwlu.regrid_(unit, [Inputs("", [0.3, 0.0, 1.0], [0.4, 2.0, 1.0])], optimizer=optimizer)
    new, mapped = table.read([unit.weight.detach()]), table.read([optimizer.state[unit.weight][key]])
    assert (mapped[:, :2] == 0).all()
    moved = torch.cat([old[:, :2], old[:, 2:] + 0.5 * momentum[:, 2:]], 1)
    torch.testing.assert_close(fitted(moved, new[:, :1], new[:, 1:2]), new + 0.5 * mapped, rtol=0, atol=1e-12)
    assert (mapped - momentum).abs().max() > 0.01
    if second is not None:
        assert torch.equal(optimizer.state[unit.weight]["exp_avg_sq"], second)


def test_measured_by_alignment_during_training():
    """The IOU becomes that of bounds at three standard deviations, and training goes on."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pwlu.TwoPhase(model, optimizer, 2)
    train(model, optimizer, data(6))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight *= 0.2
            layer.bias *= 0.2
    batches = [x for x, _ in data(20, batch=64)]
    before = pwlu.alignment(model, batches).units[0].iou
    reports = pwlu.regrid_(model, pwlu.alignment(model, batches), optimizer=optimizer)
    after = pwlu.alignment(model, batches).units[0].iou
    assert [r.kept for r in reports] == [0, 0]
    assert sorted(before)[4] < 0.3 < 0.45 < sorted(after)[4]
    train(model, optimizer, data(3))
    assert all(p.isfinite().all() for p in model.parameters())


def test_one_function_for_several_channels_gets_the_moments_of_all():
    unit = random_unit(1)
    pwlu.regrid_(unit, [Inputs("", [-1.0, 1.0], [0.5, 0.5])])
    sigma = (0.25 + 1.0) ** 0.5
    assert unit.left.item() == pytest.approx(-3 * sigma)
    assert unit.right.item() == pytest.approx(3 * sigma)


def test_functions_that_are_not_moved():
    model = nn.Sequential(random_unit(), random_unit(), random_unit(), random_unit(1))
    model[1].requires_grad_(False)
    model[2].scale_gradients(left=0.0)
    before = values(unit.weight for unit in model)
    found = [Inputs(str(i), [0.0, 1.0, 2.0], [1.0, 0.0, float("nan")]) for i in range(3)]
    found[0].count[0] = 0
    reports = pwlu.regrid_(model, found)  # the last one was not reached
    assert same(before, [unit.weight for unit in model])
    assert [r.kept for r in reports] == [3, 3, 3, 1]


def test_constraints_and_copies():
    model = nn.Sequential(random_unit(dtype=torch.float32))
    pwlu.constrain_(model, lipschitz=0.5, monotone=True)
    average = copy.deepcopy(model)
    average[0].weight.data[9:] += 0.01
    others = average[0].weight.detach().clone()
    pwlu.regrid_(model, [Inputs("0", [0.3, 0.0, 1.0], [0.4, 2.0, 1.0])], copies=average)
    assert torch.equal(average[0].left, model[0].left)
    assert not torch.equal(average[0].weight, others)
    for unit in (model[0], average[0]):
        slopes = unit.heights.diff() * unit.intervals / (unit.right - unit.left)[:, None]
        assert slopes.min() >= 0
        assert slopes.max() <= 0.5 + 1e-6


def test_errors():
    """They say what is wrong with the phase, the inputs, the kind of unit, the optimizer or the copies."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pwlu.TwoPhase(model, optimizer, 2)
    inputs = pwlu.alignment(model, [data(1)[0][0]])
    with pytest.raises(RuntimeError, match="regrid_: 1, 3 is in Phase I"):
        pwlu.regrid_(model, inputs)
    for unit in units(model):
        unit.phase = 2
    with pytest.raises(ValueError, match="inputs has x, which is not a PWLU of this model"):
        pwlu.regrid_(model, [Inputs("x", [0.0], [1.0])])
    with pytest.raises(ValueError, match="inputs has 2 channels of 1, which has 8 functions"):
        pwlu.regrid_(model, [Inputs("1", [0.0, 1.0], [1.0, 1.0])])
    with pytest.raises(TypeError, match="is a DynamicPWLU"):
        pwlu.regrid_(pwlu.DynamicPWLU(3), [])
    with pytest.raises(TypeError, match="is a NonUniformPWLU"):
        pwlu.regrid_(pwlu.NonUniformPWLU(3, intervals=1, init="identity"), [])
    with pytest.raises(TypeError, match="regrid_: optimizer must be a"):
        pwlu.regrid_(model, [], optimizer="SGD")
    for wrong in (data(1)[0][0], [data(1)[0][0]], model, None):
        with pytest.raises(TypeError, match=r"inputs must be what pwlu\.alignment returns"):
            pwlu.regrid_(model, wrong)
    with pytest.raises(ValueError, match="regrid_: the optimizer does not hold the parameters of 1, 3"):
        pwlu.regrid_(model, inputs, optimizer=torch.optim.SGD(network().parameters(), lr=0.1))
    with pytest.raises(ValueError, match="regrid_: copies must have the same PWLUs"):
        pwlu.regrid_(model, inputs, copies=nn.Sequential(pwlu.PWLU(2)))
    with pytest.raises(ValueError, match="1, 3 is on the meta device"):
        pwlu.regrid_(copy.deepcopy(model).to("meta"), inputs)


def test_errors_come_before_anything_changes():
    model = network()
    inputs = pwlu.alignment(model, [data(1)[0][0]])
    before = model[1].weight.detach().clone()
    tied = copy.deepcopy(model)
    tied[3].weight = tied[1].weight
    with pytest.raises(ValueError, match="regrid_: 1 and 3 share one weight"):
        pwlu.regrid_(tied, inputs)
    nn.utils.parametrize.register_parametrization(model[3], "weight", nn.Identity())
    with pytest.raises(RuntimeError, match="the weight is computed"):
        pwlu.regrid_(model, inputs)
    assert torch.equal(tied[1].weight, before)
    assert torch.equal(model[1].weight, before)


@pytest.mark.parametrize("value", [0.0, 0.1, 3.3, -500.0])
def test_equal_inputs_move_nothing(value):
    """Keep a dead channel, although its quantiles differ by the width of a bin. The bounds used to close in on its inputs."""
    unit = random_unit(dtype=torch.float32)
    before = unit.weight.detach().clone()
    (found,) = pwlu.regrid_(unit, pwlu.alignment(unit, [torch.full((64, 3), value)]))
    assert found.kept == 3
    assert torch.equal(unit.weight, before)
