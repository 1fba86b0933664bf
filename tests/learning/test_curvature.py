"""The penalty on bends, against its formula knot by knot."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import pwlu


def second_differences(unit, c):
    """Of channel c at all knots, in plain numbers."""
    left, right, heights, left_slope, right_slope = (p[c].tolist() for p in unit.blocks())
    step = (right - left) / unit.intervals
    points = [heights[0] - left_slope * step, *heights, heights[-1] + right_slope * step]
    return [b - a for a, b in pairwise(b - a for a, b in pairwise(points))]


def network():
    """Units of two N, of several channels and of one, that are not where they started."""
    model = nn.Sequential(
        pwlu.PWLU(3, 4), pwlu.PWLU(1, 5, (-1.0, 2.0), init="silu"), pwlu.PWLU(2, 4, (-0.5, 0.25)), pwlu.PWLU(2, 1)
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.double().parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator)
    return model


def test_formula():
    model = network()
    expected = sum(b**2 for unit in model for c in range(unit.channels) for b in second_differences(unit, c))
    assert pwlu.curvature(model).item() == pytest.approx(expected, rel=1e-12)


def test_gradient():
    model = network()

    def penalty(*values):
        return torch.func.functional_call(_Penalty(model), dict(zip(names, values, strict=True)))

    names = [f"model.{name}" for name, _ in model.named_parameters()]
    parameters = list(model.parameters())
    assert torch.autograd.gradcheck(penalty, parameters)


class _Penalty(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self):
        return pwlu.curvature(self.model)


def test_a_straight_line_has_none_and_relu_has_one_bend():
    """Heights of 0.25 k and bounds of -2 and 2 are exact in binary, and so is all that comes of them."""
    line = pwlu.PWLU(3, 8, (-2.0, 2.0), init=torch.positive)
    assert pwlu.curvature(line) == 0
    assert pwlu.curvature(pwlu.PWLU(3, 8, (-2.0, 2.0))) == 3 * 0.5**2
    assert pwlu.curvature(nn.Sequential(line, pwlu.PWLU(1, 8, (0.0, 4.0)))) == 0.5**2  # at the left end


def test_it_smooths():
    """Descent on the penalty alone, with the largest steps that are used in training, ends in straight lines."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    first = pwlu.curvature(model).item()
    for _ in range(400):
        optimizer.zero_grad()
        (0.01 * pwlu.curvature(model)).backward()
        optimizer.step()
    assert pwlu.curvature(model).item() < 0.05 * first


def test_mixed_types():
    single, double = pwlu.PWLU(2, 4), pwlu.PWLU(3, 4).double()
    penalty = pwlu.curvature(nn.Sequential(single, double))
    assert penalty.dtype == torch.float32
    assert penalty == pwlu.curvature(single) + pwlu.curvature(double)


def test_no_units():
    with pytest.raises(ValueError, match=r"curvature: Linear has no PWLU. Convert it first: pwlu.convert_\(model, sample\)"):
        pwlu.curvature(nn.Linear(2, 2))
