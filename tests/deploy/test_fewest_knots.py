"""The fewest knots of a non-uniform PWLU within a tolerance: against every choice of knots."""

import itertools

import pytest
import torch
from torch import nn

import pwlu
from pwlu.deploy.fewest_knots import keep_fewest_knots, least_errors
from pwlu.reference import nonuniform as nonuniform_reference
from pwlu.reference.nonuniform import Knots


def functions(channels, count, seed):
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.rand(*shape, generator=random, dtype=torch.float64)  # noqa: E731
    knots = (draw(channels, count) + 0.05).cumsum(1) - 2
    return Knots(knots, draw(channels, count), draw(channels) - 0.5, draw(channels) - 0.5)


def apply(of, x):
    return nonuniform_reference.forward(x, *of, channel_dim=0)


def by_force(one, count):
    """Return the least error with exactly `count` knots, over all choices, measured at many points."""
    ends = one.knots[:, :1] - 5, one.knots[:, -1:] + 5
    x = torch.cat([*ends, one.knots], 1)
    found = []
    for kept in itertools.combinations(range(one.knots.shape[1]), count):
        new = Knots(one.knots[:, kept], one.heights[:, kept], one.left_slope, one.right_slope)
        found.append(float((apply(new, x) - apply(one, x)).abs().max()))
    return min(found)


@pytest.mark.parametrize("seed", range(8))
def test_no_choice_of_knots_is_better(seed):
    of = functions(3, 7, seed)
    least, *_ = least_errors(of)
    for c in range(3):
        one = Knots(*(block[c : c + 1] for block in of))
        exact = [by_force(one, k) for k in range(2, 8)]
        torch.testing.assert_close(least[c, 2:], torch.tensor(exact, dtype=torch.float64), rtol=1e-9, atol=1e-12)
        for allowed in (0.05, 0.2, 0.5):
            fewest = next(k for k, error in enumerate(exact, 2) if error <= allowed)
            limit = torch.tensor([allowed], dtype=torch.float64)
            new = keep_fewest_knots(one, limit)
            assert new.knots.shape[1] == fewest
            x = torch.linspace(-9, 9, 4001, dtype=torch.float64)[None]
            assert float((apply(new, x) - apply(one, x)).abs().max()) <= allowed + 1e-12
    new = keep_fewest_knots(of, torch.full((3,), 0.2, dtype=torch.float64))  # one number of knots for all channels
    x = torch.linspace(-9, 9, 4001, dtype=torch.float64).expand(3, -1)
    assert float((apply(new, x) - apply(of, x)).abs().max()) <= 0.2 + 1e-12
    assert (new.knots.diff(dim=1) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_simplify(dtype):
    unit = pwlu.PWLU(4, 16, init=lambda x: (x - 0.75).relu() + 0.1 * x, dtype=dtype)
    model = nn.Sequential(pwlu.NonUniformPWLU.from_uniform(unit), pwlu.PWLU(4, dtype=dtype))
    x = torch.randn(200, 4, dtype=dtype)
    expected = model(x)
    first, second = pwlu.simplify_(model, 1e-3)
    assert (first.became, first.was, first.intervals, second.became) == ("fewer", 16, 1, "relu")
    assert type(model[0]) is pwlu.NonUniformPWLU
    assert first.removed == 4 * 30
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    model(x).sum().backward()
    assert model[0].weight.grad.shape == (4 * 6,)


def test_a_function_that_needs_all_its_knots_is_kept():
    act = pwlu.NonUniformPWLU(2, 6, init="silu", dtype=torch.float64)
    before = act.weight.detach().clone()
    (row,) = pwlu.simplify_(act, 1e-6)
    assert (row.became, row.reason) == ("kept", "fewer knots exceed the tolerance")
    assert torch.equal(act.weight, before)
