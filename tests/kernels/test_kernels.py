"""Every implementation of the operators against the oracle: values, intervals, layouts, dtypes, edge cases."""

from types import SimpleNamespace

import pytest
import torch
from helpers import (
    DTYPES,
    LAYOUTS,
    NAMES,
    assert_within,
    implementations,
    laid_out,
    oracle,
    parameter_dtype,
    segment_probe,
    unit,
    wild_values,
)
from hypothesis import given, note, settings
from hypothesis import strategies as st

from pwlu import reference


@pytest.fixture
def code(request, device):
    return implementations(device)[request.param]


@st.composite
def problems(draw):
    rank = draw(st.integers(0, 5))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=rank, max_size=rank)))
    if rank and draw(st.booleans()):  # now and then long enough for vector loops and several blocks
        at = draw(st.integers(0, rank - 1))
        shape = (*shape[:at], draw(st.integers(20, 1200)), *shape[at + 1 :])
        while torch.Size(shape).numel() > 20_000:
            shape = tuple(s // 2 for s in shape)
    dim = draw(st.integers(-rank, rank - 1)) if rank else 1
    channels = shape[dim] if rank and shape[dim] and draw(st.booleans()) else 1
    return {
        "shape": shape,
        "dim": dim,
        "channels": channels,
        "intervals": draw(st.sampled_from([1, 2, 3, 7, 8, 14, 15, 16, 22, 23, 30, 31, 62, 64, 65, 130])),
        "dtype": draw(st.sampled_from(DTYPES)),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "seed": draw(st.integers(0, 2**31)),
    }


@settings(max_examples=250)
@given(problem=problems())
def test_any_input_people_have(problem, device):
    """Shapes x dtypes x layouts x channel dimensions, forward, backward, look-up and moments, on every implementation."""
    generator = torch.Generator().manual_seed(problem["seed"])
    dtype, dim, channels = problem["dtype"], problem["dim"], problem["channels"]
    x = (3 * torch.randn(problem["shape"], generator=generator)).to(device, dtype)
    grad = torch.randn(problem["shape"], generator=generator).to(device, dtype)
    parameters = unit(channels, problem["intervals"], parameter_dtype(dtype), device, generator)
    x = laid_out(x, problem["layout"])
    expected = oracle(x, parameters, dim, grad)
    for name, code in implementations(device).items():
        note(f"implementation: {name}")
        check_operators(code, x, grad, parameters, dim, expected)
        check_moments(code, x, channels, dim)
        observed, *moments = code.observe(x, *parameters, dim)
        assert torch.equal(observed, code.forward(x, *parameters, dim))
        assert observed.stride() == torch.empty_like(x).stride()
        check_moments(SimpleNamespace(moments=lambda *_, found=moments: found), x, channels, dim)


def check_operators(code, x, grad, parameters, dim, expected):
    """Compare forward, backward and look-up with what the oracle expects."""
    y, bound_of_y, gradients, bounds = expected
    strides = torch.empty_like(x).stride()
    actual = code.forward(x, *parameters, dim)
    assert (actual.dtype, actual.stride()) == (x.dtype, strides)
    assert_within(actual, y, bound_of_y)

    grad_x, others = code.backward(grad, x, *parameters, dim, True, True)
    assert (grad_x.dtype, grad_x.stride()) == (x.dtype, strides)
    for g, parameter, wanted, bound in zip([grad_x, *others], [x, *parameters], gradients, bounds, strict=True):
        assert g.dtype == parameter.dtype
        assert_within(g, wanted, bound)
    alone, nothing = code.backward(grad, x, *parameters, dim, True, False)
    assert nothing is None
    assert torch.equal(alone, grad_x)
    nothing, same = code.backward(grad, x, *parameters, dim, False, True)
    assert nothing is None
    for g, wanted, bound in zip(same, gradients[1:], bounds[1:], strict=True):
        assert_within(g, wanted, bound)

    tables = [t.to(parameters[0].dtype) for t in reference.tables(*(p.double() for p in parameters))]
    actual = code.lookup(x, parameters[0], *tables, dim)
    assert actual.stride() == strides
    # the neighbouring segment may be chosen next to a knot, where both lines meet to within the bound
    assert_within(actual, y, 2 * bound_of_y)


def check_moments(code, x, channels, dim):
    count, mean, m2 = code.moments(x, channels, dim)
    assert count.tolist() == [x.numel() // channels] * channels
    assert mean.dtype == m2.dtype == reference.compute_dtype(x)
    values = (x.reshape(1, -1) if channels == 1 else x.movedim(dim, 0).reshape(channels, -1)).double()
    if not values.numel():
        assert mean.tolist() == m2.tolist() == [0.0] * channels
        return
    u = torch.finfo(mean.dtype).eps
    center = values.mean(1)
    deviations = (values - center[:, None]).square().sum(1)
    # the mean of n numbers in pairwise or double sums, and the squares of deviations from a mean that is off by that
    slack = 4 * u * values.abs().amax(1)
    assert_within(mean, center, slack)
    running = (8 + values.shape[1]) * u * deviations  # what a running sum of n numbers may lose
    underflow = values.shape[1] * torch.finfo(mean.dtype).tiny
    assert_within(m2, deviations, running + values.shape[1] * slack.square() + 2 * u * values.square().amax(1) + underflow)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("left", "right"), [(-3.0, 3.0), (-1.7, 0.9), (-2.3, 2.9), (1e-3, 1.3e-3), (9997.0, 10003.0)])
@pytest.mark.parametrize("intervals", [1, 3, 10, 16, 40, 64])
def test_same_interval_for_every_element(code, device, dtype, left, right, intervals):
    """Slopes are the segments' numbers, so grad_x of ones shows the segment that was chosen: no tolerance."""
    wide = parameter_dtype(dtype)
    parameters = [p.to(device) for p in segment_probe(intervals, left, right, wide)]
    x = wild_values(dtype, [p.cpu() for p in parameters]).to(device)
    grad_x, _ = code.backward(torch.ones_like(x), x, *parameters, 1, True, False)
    expected = reference.segments(reference.finite(x.to(wide)), parameters[0], parameters[1], intervals)
    assert grad_x.round().long().tolist() == expected.tolist()


@pytest.mark.parametrize("shape", [(40, 33), (2, 33, 5), (2, 33, 40)])
def test_same_interval_in_every_layout(code, device, shape):
    """As above with many channels, in planes and in rows."""
    probes = [segment_probe(16, -3 + 0.01 * c, 3 + 0.02 * c) for c in range(33)]
    parameters = [torch.cat(p).to(device) for p in zip(*probes, strict=True)]
    x = (2 * torch.randn(shape)).to(device)
    grad_x, _ = code.backward(torch.ones_like(x), x, *parameters, 1, True, False)
    bounds = (reference.along(p, x, 1) for p in parameters[:2])
    assert grad_x.round().long().tolist() == reference.segments(x, *bounds, 16).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("intervals", [16, 100])
def test_look_up_takes_the_entry_of_its_segment(code, device, dtype, intervals):
    wide = parameter_dtype(dtype)
    left, right, *_ = parameters = segment_probe(intervals, -3.0, 3.0, wide)
    x = wild_values(dtype, parameters).to(device)
    left, scale = left.to(device), (intervals / (right - left)).to(device)
    offsets = torch.arange(-1.0, intervals + 1, dtype=wide, device=device)[None]
    y = code.lookup(x, left, scale, torch.zeros_like(offsets), offsets, 1)
    position = ((reference.finite(x.to(wide)) - left) * scale).floor().nan_to_num(0.0).clamp(-1, intervals)
    assert y[~x.isnan()].tolist() == position.to(dtype)[~x.isnan()].tolist()
    assert y[x.isnan()].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
class TestEdgeCases:
    """Check the decisions of docs/paper.md on every path."""

    def relu(self, device, dtype):
        wide = parameter_dtype(dtype)
        knots = torch.linspace(-3, 3, 17, dtype=wide, device=device)
        one = torch.ones(1, dtype=wide, device=device)
        return [-3 * one, 3 * one, knots.relu()[None], 0 * one, one]

    def test_nan_stays_nan(self, code, device, dtype):
        x = torch.tensor([torch.nan, 1.0], dtype=dtype, device=device)
        parameters = self.relu(device, dtype)
        assert code.forward(x, *parameters, 1).isnan().tolist() == [True, False]
        # it belongs to interval 0: the other heights' gradients are untouched
        _, grads = code.backward(torch.ones_like(x), x, *parameters, 1, True, True)
        assert grads[2].isnan()[0].tolist() == [True, True] + [False] * 15
        assert not grads[3].isnan().any()

    def test_infinity_is_the_largest_number(self, code, device, dtype):
        x = torch.tensor([torch.inf, -torch.inf], dtype=dtype, device=device)
        parameters = self.relu(device, dtype)
        largest = torch.tensor(torch.finfo(parameter_dtype(dtype)).max, dtype=parameter_dtype(dtype)).to(dtype)
        assert code.forward(x, *parameters, 1).tolist() == [largest.item(), 0.0]  # inf in 16 bits
        grad_x, grads = code.backward(torch.zeros_like(x), x, *parameters, 1, True, True)
        assert grad_x.tolist() == [0.0, 0.0]
        assert all(not g.isnan().any() for g in grads)

    @pytest.mark.parametrize(("left", "right"), [(1.0, 1.0), (1.0, -1.0)])
    def test_bounds_that_crossed(self, code, device, dtype, left, right):
        _, _, heights, left_slope, right_slope = self.relu(device, dtype)
        bounds = [torch.full_like(left_slope, b) for b in (left, right)]
        parameters = [*bounds, heights, left_slope + 0.5, right_slope]
        x = torch.tensor([-1.0, 0.5, 1.0, 2.0], dtype=dtype, device=device)
        expected = [(-1.0 - left) * 0.5, (0.5 - left) * 0.5, 1 - right + 3, 2 - right + 3]
        assert code.forward(x, *parameters, 1).tolist() == expected
        _, grads = code.backward(torch.ones_like(x), x, *parameters, 1, False, True)
        assert [g.tolist() for g in grads] == [
            [-1.0],  # two on the left, slope 1/2
            [-2.0],  # two on the right, slope 1
            [[2.0] + [0.0] * 15 + [2.0]],
            [(-1.0 - left) + (0.5 - left)],
            [(1.0 - right) + (2.0 - right)],
        ]
        tables = [t.to(left_slope.dtype) for t in reference.tables(*(p.double() for p in parameters))]
        assert code.lookup(x, bounds[0], *tables, 1).tolist() == expected

    @pytest.mark.parametrize(("left", "right"), [(1.0, 1.0), (1.0, -1.0)])
    def test_nan_where_bounds_crossed(self, code, device, dtype, left, right):
        """It belongs to interval 0 here too, which then has a width of 1."""
        _, _, heights, left_slope, right_slope = self.relu(device, dtype)
        heights = heights + torch.arange(17, device=device)
        bounds = [torch.full_like(left_slope, b) for b in (left, right)]
        x = torch.tensor([torch.nan, 3.0], dtype=dtype, device=device)
        grad_x, grads = code.backward(torch.ones_like(x), x, *bounds, heights, left_slope, right_slope, 1, True, True)
        assert grad_x.tolist() == [1.0, 1.0]
        assert grads[2].isnan()[0].tolist() == [True, True] + [False] * 15

    def test_bounds_whose_difference_overflows(self, code, device, dtype):
        """Nothing lies between them, as with crossed bounds."""
        _, _, heights, left_slope, _ = self.relu(device, dtype)
        largest = torch.finfo(left_slope.dtype).max
        bounds = [torch.full_like(left_slope, b) for b in (-0.6 * largest, 0.6 * largest)]
        x = torch.tensor([-2.0, 0.0, 5.0], dtype=dtype, device=device)
        parameters = [*bounds, heights, left_slope, left_slope]
        assert code.forward(x, *parameters, 1).tolist() == [3.0, 3.0, 3.0]
        grad_x, grads = code.backward(torch.ones_like(x), x, *parameters, 1, True, True)
        assert grad_x.tolist() == [0.0, 0.0, 0.0]
        assert grads[2].tolist() == [[0.0] * 16 + [3.0]]

    def test_inputs_just_below_a_knot(self, code, device, dtype):
        """x - B_L is rounded, so inputs within half a unit in the last place of it count as on the knot: y may be x, not 0."""
        wide = parameter_dtype(dtype)
        near = torch.tensor([-2.0, -0.5], dtype=wide, device=device) * torch.finfo(wide).eps
        x = near.to(dtype)
        far, close = code.forward(x, *self.relu(device, dtype), 1).tolist()
        assert far == 0.0
        assert close in (x[1].item(), 0.0)  # 0 where a kernel goes on with the rounded x - B_L, as those for CUDA do

    def test_relu_is_exact(self, code, device, dtype):
        x = (3 * torch.randn(10_000)).to(device, dtype)
        parameters = self.relu(device, dtype)
        y = code.forward(x, *parameters, 1)
        assert_within(y, x.double().relu(), rounding_of_relu(x))


def rounding_of_relu(x):
    return (
        4 * torch.finfo(reference.compute_dtype(x)).eps * (x.double().abs() + 6) + torch.finfo(x.dtype).eps * x.double().abs()
    )


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("shape", [(3, 4, 64), (50, 4), (6, 4, 49)])
def test_a_parameter_that_is_nan(code, device, which, shape):
    """As after a step that diverged: NaN wherever the definition has it, in that channel alone."""
    x, parameters = torch.randn(shape, device=device) * 3, unit(4, 16, device=device)
    parameters[which][2] = torch.nan
    y = code.forward(x, *parameters, 1)
    assert y.isnan().tolist() == reference.forward(x, *parameters, 1).isnan().tolist()
    grad_x, grads = code.backward(torch.ones_like(x), x, *parameters, 1, True, True)
    assert not grad_x[:, [0, 1, 3]].isnan().any()
    assert not any(g[[0, 1, 3]].isnan().any() for g in grads)


def test_moments_of_huge_numbers(code, device):
    for shape, dim in [((100, 8), 1), ((4, 8, 50), 1), ((6, 8, 49), 1)]:
        _, mean, m2 = code.moments(torch.full(shape, 1e25, device=device), 8, dim)
        assert mean.tolist() == [torch.tensor(1e25).item()] * 8
        assert m2.isfinite().all()


def test_empty_inputs(code, device):
    parameters = unit(3, 4, device=device)
    for shape in [(0, 3), (5, 3, 0), (0, 3, 0, 2)]:
        x = torch.empty(shape, device=device)
        assert code.forward(x, *parameters, 1).shape == x.shape
        grad_x, grads = code.backward(x, x, *parameters, 1, True, True)
        assert grad_x.shape == x.shape
        assert all(torch.equal(g, torch.zeros_like(p)) for g, p in zip(grads, parameters, strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", range(5))
def test_empty_inputs_and_a_parameter_that_is_not_finite(code, device, which, value):
    """Nothing was summed up, so gradients are 0."""
    parameters = unit(3, 4, device=device)
    parameters[which][1] = value
    x = torch.empty(0, 3, device=device)
    _, grads = code.backward(x, x, *parameters, 1, True, True)
    assert not any(g.any() for g in grads)


def test_moments_of_a_large_mean(code, device):
    for shape, dim, channels in [((20_000, 3), 1, 3), ((4, 3, 5000), 1, 3), ((30_000,), 0, 1)]:
        x = (1e4 + torch.randn(shape)).to(device)
        check_moments(code, x, channels, dim)


def test_names_are_in_the_order_of_the_arguments():
    assert list(reference.partials(torch.zeros(1), *unit(1, 2), 0))[1:] == list(NAMES)
