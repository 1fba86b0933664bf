"""The CUDA kernels of dynamic units against the reference in float64, on a GPU or in emulation; and that they can fail."""

import math

import pytest
import torch
from cuda_emulator import H200, Emulated, put_mistake
from test_cuda_kernel import DTYPES, INTERVALS, fresh

import pwlu
from pwlu.kernels import cuda, dispatch, eager
from pwlu.ops import dynamic as dynamic_ops

# (shape, channel_dim) of contiguous tensors. In some, the samples have several rows.
FORMS = {
    "rows": ((3, 50, 40), -1),
    "many samples": ((70, 4, 8), 2),
    "many channels": ((2, 5, 700), 2),
    "rows of no even length": ((3, 33, 37), -1),
    "images": ((2, 6, 7, 24), 3),
    "small planes": ((3, 6, 40, 7, 7), 2),
    "tiny planes": ((3, 20, 24, 3), 2),
    "planes": ((3, 5, 32, 32), 1),
    "odd planes": ((3, 40, 7, 7), 1),
    "matrix": ((5, 40), 1),
    "one sample": ((1, 50, 40), 2),
}
NAMES = ("x", "weight", "directions", "first", "first_bias", "second", "second_bias")


def problem(form, dtype, device, intervals=16, layered=(False, False), directions=2):
    """Gradient, x, the parameters of a unit, and the channel dimension. `layered`: one function; one coefficient."""
    shape, dim = FORMS[form]
    grad, x = torch.randn(2, *shape, device=device).to(dtype)
    channels, mixing = 1 if layered[0] else shape[dim], "layer" if layered[1] else "channel"
    options = {"features": shape[dim], "mixing": mixing, "directions": directions, "channel_dim": dim, "device": device}
    act = pwlu.DynamicPWLU(channels, intervals, **options)
    parameters = [act.weight, act.direction_weight, *act.squeeze.parameters()]
    sizes = [0.3, 0.3, *[0.05] * 4]  # small, because rounding matters more where tanh is nearly 1
    parameters = [p.detach() + s * torch.randn_like(p) for p, s in zip(parameters, sizes, strict=True)]
    return grad, away_from_knots(2 * x.double(), parameters[0], intervals, channels, dim).to(dtype), parameters, dim


def away_from_knots(x, weight, intervals, channels, dim):
    """Move the numbers that may be in another interval in float64."""
    left, right = weight.double()[: 2 * channels].view(2, *[channels if d == dim % x.ndim else 1 for d in range(x.ndim)])
    step = (right - left) / intervals
    t = (x - left) / step
    return torch.where((t - t.round()).abs() < 0.01, x + 0.03 * step, x)


def assert_near(found, expected, name, dtype=torch.float32):
    """Allow for rounding in float32, which 1 - tanh^2 amplifies, and for up to three roundings of x's dtype."""
    largest = float(expected.abs().max())
    off = 2e-4 * largest + (0.0 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps * largest)
    assert torch.isfinite(found).all(), name
    assert float((found.double() - expected).abs().max()) <= off, name


def compare(kernel, form, dtype, device, intervals=16, layered=(False, False), directions=2):
    """Compare all results with the reference in float64."""
    grad, x, parameters, dim = problem(form, dtype, device, intervals, layered, directions)
    wide = [p.double() for p in parameters]
    y, state = dispatch.dynamic_forward_apart(x.double(), *wide, intervals, dim)
    found, found_state = kernel.dynamic_forward(x, *parameters, intervals, dim)
    assert found.stride() == x.stride()
    assert_near(found, y, "y", dtype)
    assert_near(found_state, state, "state")
    both = kernel.dynamic_backward(grad, x, *parameters, found_state, intervals, dim)
    expected = dispatch.dynamic_backward_apart(grad.double(), x.double(), *wide, state, intervals, dim)
    for name, actual, wanted, like in zip(NAMES, both, expected, [x, *parameters], strict=True):
        assert (actual.shape, actual.stride(), actual.dtype) == (like.shape, like.stride(), like.dtype)
        assert_near(actual, wanted, name, dtype if name == "x" else torch.float32)
    again = kernel.dynamic_backward(grad, x, *parameters, found_state, intervals, dim)
    assert all(torch.equal(a, b) for a, b in zip(both, again, strict=True))  # bit for bit
    return [found, found_state, *both]


@pytest.mark.parametrize("intervals", INTERVALS)
@pytest.mark.parametrize("form", FORMS)
def test_forms_and_numbers_of_intervals(kernel, device, form, intervals):
    if intervals == 256 and form in ("small planes", "tiny planes"):  # the sums do not fit into shared memory
        grad, x, parameters, dim = problem(form, torch.float32, device, intervals)
        state = kernel.dynamic_forward(x, *parameters, intervals, dim)[1]
        assert kernel.dynamic_backward(grad, x, *parameters, state, intervals, dim) is NotImplemented
    else:
        compare(kernel, form, torch.float32, device, intervals)


@pytest.mark.parametrize("directions", [1, 3, 5])
@pytest.mark.parametrize("layered", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("form", ["rows", "images", "small planes", "planes", "odd planes", "matrix", "one sample"])
def test_common_functions_and_coefficients(kernel, device, form, layered, directions):
    compare(kernel, form, torch.float32, device, 4, layered, directions)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["rows", "small planes", "planes", "matrix"])
def test_wide_vectors(kernel, device, form, dtype, monkeypatch):
    monkeypatch.setattr(cuda.plan, "_ELEMENTS_OF_THREAD", 0)
    compare(fresh(kernel), form, dtype, device)


@pytest.mark.parametrize("form", ["rows", "small planes", "planes", "one sample"])
def test_many_splits(kernel, device, form, monkeypatch):
    monkeypatch.setattr(cuda.plan.Gpu, "slots", lambda *_: 100_000)
    compare(fresh(kernel), form, torch.float32, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["rows", "planes", "many channels", "rows of no even length"])
def test_small_gpus(kernel, device, form, dtype):
    """Blocks that finish several channels, and a kernel for the means: see test_the_kernel_of_the_means."""
    compare(fresh(kernel, multiprocessors=2), form, dtype, device)


def test_the_kernel_of_the_means(kernel, device):
    """It serves if channels are neighbours in memory, and there are enough samples."""
    for form, runs in {"many samples": True, "rows": False, "planes": False, "matrix": False}.items():
        own = fresh(kernel)
        compare(own, form, torch.float32, device)
        assert any(name.startswith("means") for name in own._loaded) == runs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_another_type(kernel, device, dtype):
    grad, x, parameters, dim = problem("rows", torch.float32, device)
    other = [p.to(dtype) for p in parameters]
    plain = [p.float() for p in other]
    y, state = kernel.dynamic_forward(x, *other, 16, dim)
    assert torch.equal(y, kernel.dynamic_forward(x, *plain, 16, dim)[0])
    for a, b in zip(*(kernel.dynamic_backward(grad, x, *p, state, 16, dim) for p in (other, plain)), strict=True):
        assert torch.equal(a, b.to(a.dtype))


@pytest.mark.parametrize("form", ["rows", "odd planes"])
def test_nan_stays_in_its_sample(kernel, device, form):
    _, x, parameters, dim = problem(form, torch.float32, device)
    before, _ = kernel.dynamic_forward(x, *parameters, 16, dim)
    x[1].view(-1)[3] = math.nan
    after, _ = kernel.dynamic_forward(x, *parameters, 16, dim)
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert after[1].isnan().all()


LAST = torch.channels_last
USES = {  # input, channels of the unit
    "channels_last": (torch.randn(3, 5, 4, 6).contiguous(memory_format=LAST), 5),
    "sequences": (torch.randn(3, 7, 5).transpose(1, 2), 5),
    "contiguous": (torch.randn(3, 5, 4, 6), 5),
    "one function per sample": (torch.randn(3, 5, 4, 6).contiguous(memory_format=LAST), 1),
    "one sample": (torch.randn(1, 5, 4, 6).contiguous(memory_format=LAST), 5),
    "one position": (torch.randn(3, 5, 1, 1).contiguous(memory_format=LAST), 5),
    "samples inside": (torch.randn(4, 6, 3, 5).permute(2, 3, 0, 1), 5),
    "channels outside": (torch.randn(5, 3, 4, 6).transpose(0, 1), 5),
    "sliced": (torch.randn(3, 5, 4, 12)[..., ::2], 5),
    "float64": (torch.randn(3, 5, 4, 6).double().contiguous(memory_format=LAST), 5),
}


@pytest.mark.parametrize("use", USES)
def test_the_operators_use_the_kernels(kernel, device, monkeypatch, use):
    """For every layout, with the same results as without kernels."""
    monkeypatch.setattr(dispatch, "_kernel_for_device", lambda device: kernel)
    eager.forget()  # on a GPU, eager.cpp would not call Python
    x, channels = USES[use]
    x, calls, run = x.to(device).requires_grad_(), [], type(kernel)._run
    monkeypatch.setattr(type(kernel), "_run", lambda *arguments: calls.append(arguments[2][0]) or run(*arguments))
    act = pwlu.DynamicPWLU(channels, 4, device=device, dtype=x.dtype)
    torch.nn.init.normal_(act.direction_weight)
    y = act(x)
    grad_x, *gradients = torch.autograd.grad(y.square().sum(), (x, *act.parameters()))
    assert calls == ([] if x.dtype == torch.float64 else ["dynamic_forward", "dynamic_backward", "dynamic_input"])
    assert y.stride() == torch.empty_like(x).stride()
    monkeypatch.setattr(dispatch, "_kernel_for_device", lambda device: None)
    eager.forget()
    plain = act(x)
    torch.testing.assert_close(y, plain, rtol=1e-5, atol=1e-5)
    for found, wanted in zip(
        (grad_x, *gradients), torch.autograd.grad(plain.square().sum(), (x, *act.parameters())), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("layered", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("form", ["rows", "many samples", "small planes", "planes", "matrix", "one sample"])
def test_the_same_bits_by_eager_cpp(device, form, layered):
    """Compare the first call, which comes to Python, with the second one, which does not."""
    grad, x, parameters, dim = problem(form, torch.bfloat16, device, layered=layered)
    inputs = [t.requires_grad_() for t in (x, *parameters)]
    eager.forget()
    results = []
    for _ in range(2):
        y, state = dynamic_ops.forward(*inputs, 16, dim)
        results.append([y, state, *torch.autograd.grad(y, inputs, grad)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_more_samples_than_a_grid_has_blocks(kernel, device, monkeypatch):
    monkeypatch.setattr(cuda.plan, "_MOST_BLOCKS", 2)
    _, x, parameters, dim = problem("rows", torch.float32, device)
    assert fresh(kernel).dynamic_forward(x, *parameters, 16, dim) is NotImplemented
    compare(fresh(kernel), "odd planes", torch.float32, device)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["rows", "small planes", "planes", "many channels"])
def test_no_races(device, form):
    if device.type == "cuda":
        pytest.skip("races are found in emulation")
    for processor in (H200, H200._replace(multiprocessors=2)):
        compare(Emulated(0, processor, races=True), form, torch.float32, device)


MISTAKES = [
    ("const i64 sample = blockIdx.z, ", "const i64 sample = 0, "),
    ("elements = sample * all.outer * all.channels * all.inner", "elements = sample * all.channels * all.inner"),
    (" + functions * all.splits * LINES(0, all.intervals)", ""),
    ("a.grad = static_cast<const Vector<T, 1> *>(all.grad) + elements", "a.grad = all.grad"),
    ("a.first = (int)functions", "a.first = 0"),
    ("(a.rates == 1 ? 0u : a.first + channel - sample * of_sample)", "0u"),
    ("directions[at[u]], heights[u])", "directions[at[u]], 0.0f)"),
    ("for (int j = 0; j < W; ++j) sums[j] += values[j];", "for (int j = 0; j < W; ++j) sums[j] = values[j];"),
    ("for (int row = 0; row < rows; ++row) sum += of_rows", "for (int row = 0; row < 1; ++row) sum += of_rows"),
    ("if (base + warp * PER_WARP >= depth) continue;", "if (warp) continue;"),
    ("return z < 0.0f ? 0.0f : z;", "return z;"),
    ("return hidden[at] <= 0.0f ? 0.0f : sum;", "return sum;"),
    ("return sum * a.factor;", "return sum;"),
    ("sum * (1.0 - (double)coefficients[at] * coefficients[at])", "sum"),
    ("part[k * to_line].y - interval * g;", "part[k * to_line].y;"),
    ("const float factor = m == 0 ? 1.0f : ", "const float factor = true ? 1.0f : "),
    ("return sum(k, member);", "return sum(k, max(member - 1, 0));"),
    ("values[j] += means[", "values[j] -= means["),
    ("+ split * to_split + k * to_line + c]", "+ k * to_line + c]"),
]


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(kernel, device, mistake, monkeypatch):
    put_mistake(monkeypatch, *mistake)
    monkeypatch.setattr(cuda.plan.Gpu, "slots", lambda *_: 100_000)
    with pytest.raises(AssertionError):
        compare(fresh(kernel, multiprocessors=2), "rows", torch.float32, device)
