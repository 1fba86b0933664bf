"""The CUDA kernels of non-uniform PWLUs against float64, on a GPU or in emulation on the CPU; and that they can fail."""

import pytest
import test_cuda_kernel
import torch
from cuda_emulator import put_mistake
from helpers import assert_within, knot_weight, laid_out, over_channel, rounding
from test_cuda_kernel import DTYPES, FORMS, INTERVALS, fresh

import pwlu
from pwlu.kernels import cuda, dispatch
from pwlu.reference.nonuniform import Knots, backward, forward, lines, pack_knots, unpack_knots, widths_of


def problem(form, dtype, device, intervals):
    """As for a PWLU, but with intervals of very different widths, and with elements on all knots."""
    grad, x, (_, _, heights, *slopes), dim = test_cuda_kernel.problem(form, dtype, device, intervals)
    widths = torch.randn(len(heights), intervals, device=device).exp()
    left = torch.full((len(heights), 1), -3.0, device=device)
    knots = torch.cat([left, 6 * widths / widths.sum(1, keepdim=True)], 1).cumsum(1)
    across = x.movedim(dim if len(knots) > 1 else 0, -1)
    if len(knots) > 1 and across[..., 0].numel() >= knots.shape[1]:
        at = torch.randperm(across[..., 0].numel(), device=device)[: knots.shape[1]]
        flat = across.reshape(-1, len(knots))
        flat[at] = knots.T.to(dtype)
        x = flat.view(across.shape).movedim(-1, dim).contiguous()
    return grad, x, Knots(knots, heights, *slopes), dim


def oracle(x, parameters, dim, grad):
    """y and the gradients of x and of the parameters with their error bounds, all float64.

    u is the unit roundoff of float32. Segments are exact. The position x - b has one rounding, a slope three, a product and a
    sum one each. Sums are off by 8 u of the sum of sizes, as for a PWLU. The share of a knot in an element is at most |g|,
    however narrow the interval is; every knot has shares of two intervals.
    """
    u, channels = torch.finfo(torch.float32).eps / 2, len(parameters.knots)
    exact, x, grad, dtype = Knots(*(p.double() for p in parameters)), x.double(), grad.double(), x.dtype
    segment, origin, slope, _ = lines(x, *exact, dim)
    y = forward(x, *exact, dim)
    bound = u * (5 * ((x - origin) * slope).abs() + 2 * y.abs()) + rounding(y, dtype)
    grad_x, grads = backward(grad, x, *exact, dim)
    size = over_channel(grad.abs(), x, channels, dim, False)[:, None]
    slopes = torch.cat(
        [exact.left_slope[:, None], exact.heights.diff(dim=1) / widths_of(exact.knots), exact.right_slope[:, None]], 1
    )
    outer = over_channel(
        (grad * (x - origin)).abs() * ((segment < 0) | (segment >= exact.knots.shape[1] - 1)), x, channels, dim, False
    )
    of_knots = size * (slopes[:, 1:].abs() + slopes[:, :-1].abs())
    bounds = [16 * u * b for b in (of_knots, size.expand_as(exact.heights), outer, outer)]
    of_x = 4 * u * grad_x.abs() + rounding(grad_x, dtype)
    return y, bound, [grad_x, *grads], [of_x, *(b + rounding(g, torch.float32) for b, g in zip(bounds, grads, strict=True))]


def compare(kernel, form, dtype, device, intervals=16):
    grad, x, parameters, dim = problem(form, dtype, device, intervals)
    weight = pack_knots(*parameters)
    y, bound, gradients, bounds = oracle(x, parameters, dim, grad)
    assert_within(kernel.nonuniform_forward(x, weight, intervals, dim), y, bound)
    grad_x, grad_weight = kernel.nonuniform_backward(grad, x, weight, intervals, dim, True, True)
    for found, expected, limit in zip([grad_x, *unpack_knots(grad_weight, intervals)], gradients, bounds, strict=True):
        assert_within(found, expected, limit)
    only_x, nothing = kernel.nonuniform_backward(grad, x, weight, intervals, dim, True, False)
    assert torch.equal(only_x, grad_x)
    assert not nothing.numel()
    nothing, again = kernel.nonuniform_backward(grad, x, weight, intervals, dim, False, True)
    assert torch.equal(again, grad_weight)  # bit for bit
    assert not nothing.numel()


@pytest.mark.parametrize("intervals", INTERVALS)
@pytest.mark.parametrize("form", FORMS)
def test_forms_and_numbers_of_intervals(kernel, device, form, intervals):
    compare(kernel, form, torch.float32, device, intervals)


@pytest.mark.parametrize("form", ["planes", "rows", "small planes"])
def test_narrow_vectors_in_16_bits(kernel, device, form, monkeypatch):
    """With less work per thread: all vector widths of a form."""
    compare(kernel, form, torch.bfloat16, device)
    monkeypatch.setattr(cuda.plan, "_ELEMENTS_OF_THREAD", 0)
    compare(fresh(kernel, shared=100 << 10, shared_of_block=99 << 10), form, torch.float16, device, 40)


@pytest.mark.parametrize("form", ["planes", "small planes", "rows"])
def test_many_splits(kernel, device, form, monkeypatch):
    monkeypatch.setattr(cuda.plan.Gpu, "slots", lambda *_: 100_000)
    compare(fresh(kernel), form, torch.float32, device)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "sliced", "reversed_dims"])
def test_layouts(kernel, device, layout):
    x, grad = (laid_out(t, layout) for t in torch.randn(2, 6, 5, 8, 8, device=device))
    weight = knot_weight(5, 16, torch.float32).to(device)
    y = kernel.nonuniform_forward(x, weight, 16, 1)
    assert y.stride() == torch.empty_like(x).stride()
    assert torch.equal(y, kernel.nonuniform_forward(x.contiguous(), weight, 16, 1))
    grad_x, _ = kernel.nonuniform_backward(grad, x, weight, 16, 1, True, True)
    assert torch.equal(grad_x, kernel.nonuniform_backward(grad.contiguous(), x.contiguous(), weight, 16, 1, True, True)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_wild_values(kernel, device, dtype):
    """NaN, infinities and large numbers, and knots that coincide, are huge, infinite or NaN: as the definition."""
    inf, huge, nan = torch.inf, 3e38, torch.nan
    rows = [[-1, 0, 0, 1], [-huge, -1, 1, huge], [-huge, huge, huge, inf], [0, 1, inf, inf], [-1, 1, nan, nan]]
    knots, slopes = torch.tensor(rows, device=device), torch.randn(2, 5, device=device)
    slopes[0, 0] = slopes[1, 1] = 0  # a slope of 0 at infinity gives the height
    weight = pack_knots(knots, torch.randn(5, 4, device=device), *slopes)
    most = torch.finfo(dtype).max
    x = torch.tensor([nan, inf, -inf, most, -most, 0.0, -0.0, 1.0, -1.0, 0.5, -1e-30], device=device).to(dtype)
    x = x[:, None].expand(-1, 5).contiguous()
    torch.testing.assert_close(
        kernel.nonuniform_forward(x, weight, 3, 1), dispatch.plain_nonuniform_forward(x, weight, 3, 1), equal_nan=True
    )
    back, plain = (
        run(torch.ones_like(x), x, weight, 3, 1, True, True)
        for run in (kernel.nonuniform_backward, dispatch.plain_nonuniform_backward)
    )
    torch.testing.assert_close(back[0], plain[0], equal_nan=True)
    tame = x[5:, :1].contiguous()  # on both sides of an empty interval
    of_one = pack_knots(*(p[:1] for p in unpack_knots(weight, 3)))
    back, plain = (
        run(torch.ones_like(tame), tame, of_one, 3, 1, True, True)
        for run in (kernel.nonuniform_backward, dispatch.plain_nonuniform_backward)
    )
    torch.testing.assert_close(back[1], plain[1])


def test_knots_in_no_order(kernel, device):
    """They have no meaning, but the search stays within the table."""
    for intervals in (1, 2, 3, 16, 40):
        *_, parameters, _ = problem("planes", torch.float32, device, intervals)
        knots = parameters.knots[:, torch.randperm(intervals + 1, device=device)]
        weight = pack_knots(knots, *parameters[1:])
        assert kernel.nonuniform_forward(torch.randn(50, 5, 16, 16, device=device), weight, intervals, 1).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_in_16_bits(kernel, device, dtype):
    grad, x, parameters, dim = problem("planes", torch.float32, device, 16)
    short = pack_knots(*parameters).to(dtype)
    assert torch.equal(kernel.nonuniform_forward(x, short, 16, dim), kernel.nonuniform_forward(x, short.float(), 16, dim))
    found = kernel.nonuniform_backward(grad, x, short, 16, dim, True, True)
    expected = kernel.nonuniform_backward(grad, x, short.float(), 16, dim, True, True)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1].to(dtype))


def test_the_operators_use_the_kernels(kernel, device, monkeypatch):
    """But not for float64, and not for more intervals than fit."""
    monkeypatch.setattr(dispatch, "_kernel_for_device", lambda device: kernel)
    act = pwlu.NonUniformPWLU(5, 4, init="silu", device=device)
    x, calls = torch.randn(4, 5, 8, 8, device=device), []
    run = type(kernel)._run
    monkeypatch.setattr(type(kernel), "_run", lambda *arguments: calls.append(arguments[2][0]) or run(*arguments))
    act(x).sum().backward()
    assert calls == ["nonuniform_forward", "nonuniform_backward"]
    act.double()(x.double()).sum().backward()
    pwlu.NonUniformPWLU(5, 20_000, device=device)(x[:1]).sum().backward()
    assert len(calls) == 2


MISTAKES = [
    ("if (x[u][j] >= knots[", "if (x[u][j] > knots["),
    ("half; count > 0;", "half; count > 1;"),
    ("x - knots.origin(found)", "(x + 1000.0f) - (knots.origin(found) + 1000.0f)"),
    ("if (k == 0 || k > intervals) return", "if (k == 0) return"),
    ("max(k - 1, 0), a.kind)", "min(k, a.intervals), a.kind)"),
    ("if (k == lines - 1) slope = get(4, c);", ""),
    ("begin = end, before = after;", "begin = end;"),
    ("origins + panel.place[j]", "origins + panel.place[0]", 2),
    ("- sum(i + 1).y / width(i + 1)", "- sum(i + 1).y"),
    ("-slope_before * before - slope_after * after", "-slope_before * before"),
    ("write(a.gradients[4], channel, a.kind, sum(n + 1).y)", "write(a.gradients[4], channel, a.kind, sum(n).y)"),
]


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(kernel, device, mistake, monkeypatch):
    put_mistake(monkeypatch, *mistake)
    monkeypatch.setattr(cuda.plan, "_ELEMENTS_OF_THREAD", 0)
    broken = fresh(kernel)
    with pytest.raises(AssertionError):  # noqa: PT012
        for form in ("planes", "rows", "small planes"):
            compare(broken, form, torch.float32, device)
            compare(broken, form, torch.bfloat16, device, 3)
