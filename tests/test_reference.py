"""The definition: three derivations of the gradients against each other, and the forms against the definition."""

import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES, NAMES, assert_within, oracle, over_channel, parameter_dtype, unit, wild_values

from pwlu import reference

SHAPES = [((6, 3, 5), 1, 3), ((4, 3), -1, 3), ((3, 7), 0, 3), ((2, 3, 2, 2), 1, 1), ((), 1, 1)]


@pytest.mark.parametrize(("shape", "dim", "channels"), SHAPES)
@pytest.mark.parametrize("intervals", [1, 3, 16])
def test_definition_equals_the_papers_equations(shape, dim, channels, intervals):
    parameters = unit(channels, intervals)
    x = 3 * torch.randn(shape)
    assert_within(reference.forward(x, *parameters, dim), *oracle(x, parameters, dim))


@pytest.mark.parametrize(("shape", "dim", "channels"), SHAPES)
def test_autograd_table_and_sums_agree(shape, dim, channels):
    """Plain autograd through the definition, the gradient table, and the 2(N+2) sums."""
    parameters = [p.requires_grad_() for p in unit(channels, 5, torch.float64)]
    x = (3 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    grad = torch.randn(shape, dtype=torch.float64)
    by_autograd = torch.autograd.grad(reference.forward(x, *parameters, dim), (x, *parameters), grad)
    table = reference.partials(x.detach(), *(p.detach() for p in parameters), dim)
    by_table = [grad * table["x"]]
    for name in NAMES:
        terms = table[name] * (grad.unsqueeze(-1) if name == "heights" else grad)
        by_table.append(over_channel(terms, x, channels, dim, name == "heights"))
    grad_x, others = reference.backward(grad, x.detach(), *(p.detach() for p in parameters), dim)
    for a, b, c in zip(by_autograd, by_table, [grad_x, *others], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(a, c, rtol=1e-12, atol=1e-12)


def test_finite_differences_agree():
    parameters = [p.requires_grad_() for p in unit(3, 5, torch.float64)]
    x = (3 * torch.randn(6, 3, 4, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *p: reference.forward(x, *p, 1), (x, *parameters))


@pytest.mark.parametrize("intervals", [1, 4, 16])
def test_tables_equal_the_definition(intervals):
    parameters = unit(3, intervals, torch.float64)
    x = torch.randn(50, 3, dtype=torch.float64) * 4
    y = reference.lookup(x, parameters[0], *reference.tables(*parameters), 1)
    assert_within(y, *oracle(x, parameters, 1))


def test_segments_are_counted_from_the_left():
    left, right = torch.tensor(-2.0), torch.tensor(2.0)
    x = torch.tensor([-9.0, -2.0, -1.1, -1.0, 0.0, 1.9, 2.0, 9.0, torch.nan, torch.inf, -torch.inf])
    expected = [-1, 0, 0, 1, 2, 3, 4, 4, 0, 4, -1]
    assert reference.segments(x, left, right, 4).tolist() == expected


def test_every_knot_begins_its_interval_when_exact():
    left, right = torch.tensor(-3.0), torch.tensor(3.0)
    knots = torch.arange(17) * 0.375 - 3
    assert reference.segments(knots, left, right, 16).tolist() == list(range(17))


@pytest.mark.parametrize(("left", "right"), [(1.0, 1.0), (1.0, 0.0), (0.0, 2**-149)])
def test_bounds_with_nothing_between_leave_the_outer_pieces(left, right):
    parameters = [torch.tensor(v) for v in ([left], [right], [[5.0, 6.0, 7.0]], [0.5], [2.0])]
    x = torch.tensor([left - 1, left, left + 1])
    expected = [4.5, (left - right) * 2 + 7, (left + 1 - right) * 2 + 7]
    assert reference.segments(x, *parameters[:2], 2).tolist() == [-1, 2, 2]
    assert reference.forward(x, *parameters, 1).tolist() == expected
    grad_x, grads = reference.backward(torch.ones(3), x, *parameters, 1)
    assert all(g.isfinite().all() for g in [grad_x, *grads])


def test_start_functions():
    left, right = torch.tensor([-3.0, 1.0, -5.0], dtype=torch.float64), torch.tensor([3.0, 4.0, -2.0], dtype=torch.float64)
    heights, left_slope, right_slope = reference.start(F.relu, left, right, 16)
    knots = torch.stack([torch.linspace(a, b, 17, dtype=torch.float64) for a, b in zip(left, right, strict=True)])
    torch.testing.assert_close(heights, knots.relu())
    # a channel whose inputs are all positive goes on as the identity, one whose inputs are all negative as 0
    torch.testing.assert_close(left_slope, torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(right_slope, torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))


def test_moments_of_a_large_mean():
    x = 1e4 + torch.randn(10_000, 2)
    mean, m2 = reference.moments(x, 2, 1)
    exact = x.double()
    torch.testing.assert_close(mean.double(), exact.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(m2.double(), ((exact - exact.mean(0)) ** 2).sum(0), rtol=1e-4, atol=0)


def test_no_value_takes_the_tables_out_of_range():
    parameters = unit(1, 16)
    x = wild_values(torch.float32, parameters)
    y = reference.forward(x, *parameters, 1)
    assert y.isnan().tolist() == x.isnan().tolist()
    y = reference.lookup(x, parameters[0], *reference.tables(*parameters), 1)
    assert y.isnan().tolist() == x.isnan().tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_unchecked_look_up_gives_the_same_bits(dtype):
    """Compare also what is not finite and what lies on knots, in every segment."""
    parameters = unit(3, 5, parameter_dtype(dtype))
    wild = wild_values(dtype, parameters)
    x = torch.cat([wild, 3 * torch.randn(300).to(dtype)])[:, None].expand(-1, 3)
    tables = parameters[0], *reference.tables(*parameters)
    checked, unchecked = (reference.lookup(x, *tables, 1, unchecked=flag) for flag in (False, True))
    assert torch.equal(checked.isnan(), unchecked.isnan())
    assert torch.equal(checked.nan_to_num(0), unchecked.nan_to_num(0))
