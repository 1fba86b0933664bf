"""The realignment at step T': the formula, in place, and the channels it leaves alone."""

import math

import pytest
import torch
import torch.nn.functional as F
from networks import data, network, of_units, same, train, units, values
from torch import nn

import pwlu
from pwlu.initial_functions import InitialFunction
from pwlu.learning.realignment import Realigned
from pwlu.reference import Blocks

U = 2.0**-53


def realigned_by_hand(function, mu, sigma, intervals):
    """B = mu -+ 3 sigma, Y_k = f(B_k), K = the slopes of the chords over one more interval; of one channel, in doubles."""
    f = lambda x: function(torch.tensor(x, dtype=torch.float64)).item()  # noqa: E731
    left, right = mu - 3 * sigma, mu + 3 * sigma
    d = (right - left) / intervals
    heights = [f(left + k * d) for k in range(intervals + 1)]
    return left, right, heights, (heights[0] - f(left - d)) / d, (f(right + d) - heights[-1]) / d


def averages(batches, channels):
    """Running mean and deviation of each channel over the inputs of some steps, and the largest input."""
    mu = sigma = None
    for x in batches:
        rows = x.reshape(1, -1) if channels == 1 else x.T
        mean, std = rows.mean(1), rows.std(1, correction=0)
        mu = mean if mu is None else 0.9 * mu + 0.1 * mean
        sigma = std if sigma is None else 0.9 * sigma + 0.1 * std
    return mu, sigma, max(x.abs().max().item() for x in batches)


def trained(model, batches, realign_at=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    phases = pwlu.TwoPhase(model, optimizer, realign_at or len(batches))
    train(model, optimizer, batches)
    return phases


@pytest.mark.parametrize(("init", "function"), [("relu", F.relu), ("silu", F.silu), (torch.sin, torch.sin)])
def test_every_unit_goes_where_its_inputs_are(init, function):
    """Means of n inputs are known to n u, deviations too; heights follow with the slope, at most 1.1; chords divide by d."""
    model = network(torch.float64, init=init)
    seen = {unit: [] for unit in units(model)}
    for unit in seen:
        unit.register_forward_pre_hook(lambda unit, inputs: seen[unit].append(inputs[0].detach().clone()))
    phases = trained(model, data(4, dtype=torch.float64))
    assert phases.report == [Realigned("1", 8, 0), Realigned("3", 1, 0)]
    for unit, inputs in seen.items():
        mu, sigma, largest = averages(inputs, unit.channels)
        n = inputs[0].numel() // unit.channels
        of_mean, of_std = 4 * n * U * largest, 16 * n * U * largest**2 / sigma.min().item()
        loss = of_mean + 3 * of_std + 16 * U * largest
        for c in range(unit.channels):
            expected = realigned_by_hand(function, mu[c].item(), sigma[c].item(), unit.intervals)
            of_slope = 2 * loss / (6 * sigma[c].item() / unit.intervals)
            for p, value, bound in zip(unit.blocks(), expected, [loss, loss, 2 * loss, of_slope, of_slope], strict=True):
                value = torch.tensor(value, dtype=torch.float64)
                torch.testing.assert_close(p.detach()[c], value, rtol=0, atol=bound)


def test_at_exactly_that_step_and_in_place():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    phases = pwlu.TwoPhase(model, optimizer, realign_at=3)
    parameters = of_units(model)
    places = [p.data_ptr() for p in parameters]
    start = values(parameters)
    for i, batch in enumerate(data(4), start=1):
        assert same(start, parameters) == (i <= 3)
        train(model, optimizer, [batch])
        assert [bool(unit.statistics.realigned) for unit in units(model)] == [i >= 3] * 2
    assert all(a is b for a, b in zip(parameters, of_units(model), strict=True))
    assert places == [p.data_ptr() for p in of_units(model)]
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in parameters)
    assert [unit.statistics.steps.item() for unit in units(model)] == [3, 3]
    assert len(phases.report) == 2


# Channels that cannot be realigned, or that lie to one side. The first unit sees the data as they are.


class Bare(nn.Module):
    """A unit on the bare input, and one that is never reached."""

    def __init__(self, channels, **options):
        super().__init__()
        self.act = pwlu.PWLU(channels, **options)
        self.unreached = pwlu.PWLU(3)
        self.out = nn.Linear(channels, 1)

    def forward(self, x):
        return self.out(self.act(x))


def batches_of(columns, steps=2, rows=64):
    """Batches with these columns: functions of a normal variable."""
    return [(torch.stack([column(torch.randn(rows)) for column in columns], 1), torch.randn(rows, 1)) for _ in range(steps)]


def test_channels_without_a_width_keep_what_they_have():
    """A constant, one that is almost constant for float32, one that was never finite; and a unit without any input."""
    columns = [
        lambda z: z,
        lambda z: torch.full_like(z, 0.7),
        torch.zeros_like,
        lambda z: 1e4 + 1e-3 * z,  # neighbours of 1e4 are as far apart
        lambda z: torch.full_like(z, math.nan),
    ]
    model = Bare(len(columns))
    start = values(model.act.blocks()), values(model.unreached.blocks())
    phases = trained(model, batches_of(columns))
    assert phases.report == [Realigned("act", 5, 4), Realigned("unreached", 3, 3)]
    for before, p in zip(start[0], model.act.blocks(), strict=True):
        assert torch.equal(before[1:], p[1:])
        assert p[0].isfinite().all()
    assert not torch.equal(start[0][0][0], model.act.left[0])
    assert same(start[1], model.unreached.blocks())
    assert model.unreached.statistics.realigned
    assert model.act.statistics.updates.tolist() == [2, 2, 2, 2, 0]
    assert model.act.statistics.dropped.tolist() == [0, 0, 0, 0, 2]


def test_a_channel_to_one_side_goes_on_as_the_start_does_there():
    """ReLU of positive numbers is the identity, left of the bounds too; of negative ones it is 0."""
    model = Bare(2, dtype=torch.float64)
    model.double()
    batches = [(x.double(), y.double()) for x, y in batches_of([lambda z: 20 + z, lambda z: -20 + z])]
    phases = trained(model, batches)
    assert phases.report[0].kept == 0
    left, right, heights, left_slope, right_slope = (p.detach() for p in model.act.blocks())
    assert left[0] > 10
    knots = left[:, None] + (right - left)[:, None] * torch.arange(17) / 16
    roundings = 8 * U * 30  # of numbers up to 30
    torch.testing.assert_close(heights[0], knots[0], rtol=0, atol=roundings)
    of_slope = 2 * roundings / ((right - left)[0].item() / 16)
    for slope in (left_slope, right_slope):
        torch.testing.assert_close(slope[0].item(), 1.0, rtol=0, atol=of_slope)
        assert slope[1] == 0
    assert not heights[1].any()
    x = torch.tensor([[1.0, -40.0], [20.0, -20.0], [40.0, -1.0]], dtype=torch.float64)
    bound = 40 * of_slope + 2 * roundings
    torch.testing.assert_close(model.act(x).detach(), F.relu(x), rtol=0, atol=bound)


def test_a_start_with_slopes_of_its_own_has_chords_after_realignment():
    """ReLU far to the right has two slopes of 1, whatever its own far out are."""
    model = Bare(1, init=InitialFunction(F.relu, (0.0,), (0.0, 1.0), "mine"))
    trained(model, batches_of([lambda z: 50 + z]))
    assert model.act.left_slope.item() == pytest.approx(1.0, rel=2.0**-20)


def test_frozen_blocks_keep_their_values():
    """Bounds that are held stay, and the rest fits the start between the bounds that result."""
    model = Bare(2, dtype=torch.float64)
    model.double()
    with torch.no_grad():
        model.act.left.copy_(torch.tensor([-5.0, 100.0]))  # the second: right of where its right bound would go
        model.act.heights.fill_(7.0)
    model.act.scale_gradients(left=0.0)
    batches = [(x.double(), y.double()) for x, y in batches_of([lambda z: z, lambda z: z])]
    phases = trained(model, batches)
    assert phases.report[0] == Realigned("act", 2, 1)
    left, right, heights, left_slope, right_slope = (p.detach() for p in model.act.blocks())
    assert left.tolist() == [-5.0, 100.0]
    statistics = model.act.statistics
    assert right[0] == statistics.running_mean[0] + 3 * statistics.running_std[0]
    assert right[1] == 3.0
    assert (heights[1] == 7.0).all()
    knots = left[0] + (right - left)[0] * torch.arange(17) / 16
    torch.testing.assert_close(heights[0], F.relu(knots), rtol=0, atol=8 * U * 5)
    assert (left_slope[0], right_slope[0].round(decimals=9)) == (0, 1)


@pytest.mark.parametrize("frozen", [("heights",), ("left", "right"), ("left_slope", "right_slope"), Blocks._fields])
def test_any_block_can_be_frozen(frozen):
    model = Bare(3)
    with torch.no_grad():
        for block in model.act.blocks():
            block.add_(0.125)
    before = dict(zip(Blocks._fields, values(model.act.blocks()), strict=True))
    model.act.scale_gradients(**dict.fromkeys(frozen, 0.0))
    phases = trained(model, batches_of([lambda z: z + 1] * 3))
    after = model.act.blocks()._asdict()
    assert {name for name in Blocks._fields if torch.equal(before[name], after[name])} == set(frozen)
    assert phases.report[0].kept == (3 if frozen == Blocks._fields else 0)


def test_a_model_in_sixteen_bits():
    """Bounds are rounded to bfloat16; a channel whose knots would fall together there keeps what it has."""
    model = Bare(2).bfloat16()
    batches = [(x.bfloat16(), y.bfloat16()) for x, y in batches_of([lambda z: z, lambda z: 100 + z])]
    phases = trained(model, batches)
    assert phases.report[0] == Realigned("act", 2, 1)
    mu, sigma = (s.double() for s in (model.act.statistics.running_mean, model.act.statistics.running_std))
    assert torch.equal(model.act.left[0].detach(), (mu - 3 * sigma)[0].bfloat16())
    assert model.act.left[1] == -3


def test_bounds_that_the_type_of_the_weight_does_not_have():
    """In float16 60,000 and three times the deviation are beyond the largest number: such a channel keeps what it has."""
    model = Bare(3)
    model.act.half()
    phases = trained(model, batches_of([lambda z: z, lambda z: 5e4 + 1e4 * z, lambda z: 2e4 * z]))
    assert phases.report[0] == Realigned("act", 3, 1)
    assert model.act.weight.isfinite().all()
    model = Bare(2)
    phases = trained(model, batches_of([lambda z: z, lambda z: 6e37 * z]))  # the width: 3.6e38
    assert phases.report[0] == Realigned("act", 2, 1)


# By hand.


def test_realigning_by_hand_ends_phase_one():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    phases = pwlu.TwoPhase(model, optimizer, realign_at=100)
    train(model, optimizer, data(2))
    assert pwlu.realign_(model) == [Realigned("1", 8, 0), Realigned("3", 1, 0)]
    assert (phases.phase, phases.steps) == (2, 2)
    before = values(of_units(model))
    train(model, optimizer, data(2))
    assert not same(before, of_units(model))
    assert phases.steps == 2


def test_realigning_by_hand_equals_what_the_controller_does():
    by_hand, controlled = network(), network()
    trained(by_hand, data(3), realign_at=4)
    pwlu.realign_(by_hand)
    trained(controlled, data(3), realign_at=3)
    assert same(by_hand.state_dict().values(), controlled.state_dict().values())


def test_what_was_pooled_but_not_counted_is_let_go():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pwlu.TwoPhase(model, optimizer, realign_at=3)
    train(model, optimizer, data(2))
    model(data(1)[0][0])
    assert all(unit.statistics.pool.any() for unit in units(model))
    pwlu.realign_(model)
    assert not any(unit.statistics.pool.any() for unit in units(model))
