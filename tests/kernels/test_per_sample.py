"""The kernels of functions that differ between samples, those for CUDA on a GPU or in emulation; and that they can fail."""

import pytest
import torch
from helpers import assert_within, oracle, unit, weight_of
from test_cuda_kernel import DTYPES, INTERVALS, fresh

import pwlu
from pwlu import reference
from pwlu.kernels import cpu, cuda, dispatch
from pwlu.kernels.cuda import compile as kernels
from pwlu.reference.dynamic import fold

# (shape, channel_dim) of contiguous tensors whose samples have several rows.
FORMS = {
    "rows": ((3, 50, 40), -1),
    "many samples": ((70, 4, 8), 2),
    "many channels": ((2, 5, 700), 2),
    "rows of no even length": ((3, 33, 37), -1),
    "images": ((2, 6, 7, 24), 3),
    "small planes": ((3, 6, 40, 7, 7), 2),
    "tiny planes": ((3, 20, 24, 3), 2),
}


def problem(form, dtype, device, intervals):
    shape, dim = FORMS[form]
    grad, x = torch.randn(2, *shape, device=device).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return grad, 2 * x, unit(shape[0] * shape[dim], intervals, device=device, dtype=wide), dim


def compare(kernel, form, dtype, device, intervals=16):
    """All results against the oracle: the functions of all samples are those of one tensor with as many channels."""
    grad, x, parameters, dim = problem(form, dtype, device, intervals)
    functions = len(parameters[0])
    y, bound, gradients, bounds = oracle(fold(x, functions, dim), parameters, 0, fold(grad, functions, dim))
    weight, n = weight_of(parameters)[0], intervals
    found = kernel.per_sample_forward(x, weight, n, dim)
    if "planes" in form and intervals == 256:  # the sums do not fit into shared memory
        assert kernel.per_sample_backward(grad, x, weight, n, dim, True, True) is NotImplemented
        return
    assert found.stride() == x.stride()
    assert_within(fold(found, functions, dim), y, bound)
    grad_x, grad_weight = kernel.per_sample_backward(grad, x, weight, n, dim, True, True)
    assert_within(fold(grad_x, functions, dim), gradients[0], bounds[0])
    for actual, expected, limit in zip(reference.unpack(grad_weight, n), gradients[1:], bounds[1:], strict=True):
        assert_within(actual, expected, limit)
    only_x, nothing = kernel.per_sample_backward(grad, x, weight, n, dim, True, False)
    assert torch.equal(only_x, grad_x)
    assert not nothing.numel()
    assert torch.equal(kernel.per_sample_backward(grad, x, weight, n, dim, False, True)[1], grad_weight)  # bit for bit


@pytest.mark.parametrize("intervals", INTERVALS)
@pytest.mark.parametrize("form", FORMS)
def test_forms_and_numbers_of_intervals(kernel, device, form, intervals):
    compare(kernel, form, torch.float32, device, intervals)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_the_cpu_kernel(form, dtype):
    if cpu.kernel() is None:
        pytest.skip("needs a C compiler")
    compare(cpu.kernel(), form, dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["rows", "small planes"])
def test_wide_vectors(kernel, device, form, dtype, monkeypatch):
    monkeypatch.setattr(cuda.plan, "_ELEMENTS_OF_THREAD", 0)
    compare(fresh(kernel), form, dtype, device)


@pytest.mark.parametrize("form", ["rows", "small planes"])
def test_many_splits(kernel, device, form, monkeypatch):
    monkeypatch.setattr(cuda.plan.Gpu, "slots", lambda *_: 100_000)
    compare(fresh(kernel), form, torch.float32, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_in_16_bits(kernel, device, dtype):
    grad, x, parameters, dim = problem("rows", dtype, device, 16)
    short = weight_of(parameters)[0].to(dtype)
    assert torch.equal(kernel.per_sample_forward(x, short, 16, dim), kernel.per_sample_forward(x, short.float(), 16, dim))
    narrow, wide = (kernel.per_sample_backward(grad, x, w, 16, dim, True, True)[1] for w in (short, short.float()))
    assert torch.equal(narrow, wide.to(dtype))


LAST = torch.channels_last
USES = {  # input, channels of the unit: whether these kernels run
    "channels_last": (torch.randn(3, 5, 4, 6).contiguous(memory_format=LAST), 5, True),
    "sequences": (torch.randn(3, 7, 5).transpose(1, 2), 5, True),
    "contiguous": (torch.randn(3, 5, 4, 6), 5, False),
    "one function per sample": (torch.randn(3, 5, 4, 6).contiguous(memory_format=LAST), 1, False),
    "one sample": (torch.randn(1, 5, 4, 6).contiguous(memory_format=LAST), 5, False),
    "one position": (torch.randn(3, 5, 1, 1).contiguous(memory_format=LAST), 5, False),
    "samples inside": (torch.randn(4, 6, 3, 5).permute(2, 3, 0, 1), 5, False),
    "float64": (torch.randn(3, 5, 4, 6).double().contiguous(memory_format=LAST), 5, False),
}


@pytest.mark.parametrize("use", USES)
def test_the_operators_use_the_kernels(kernel, device, monkeypatch, use):
    """If folding samples and channels into one dimension would copy. The results do not depend on it."""
    monkeypatch.setattr(dispatch, "_kernel_for_device", lambda device: kernel)
    x, channels, runs = USES[use]
    x, calls, run = x.to(device).requires_grad_(), [], type(kernel)._run
    monkeypatch.setattr(type(kernel), "_run", lambda *arguments: calls.append(arguments[2][0]) or run(*arguments))
    act = pwlu.DynamicPWLU(channels, 4, device=device, dtype=x.dtype)
    torch.nn.init.normal_(act.direction_weight)
    y = act(x)
    grad_x, *gradients = torch.autograd.grad(y.square().sum(), (x, *act.parameters()))
    expected = ["per_sample_forward", "per_sample_backward"] if runs else ["forward", "backward"]
    assert calls == ([] if x.dtype == torch.float64 else expected)
    assert y.stride() == torch.empty_like(x).stride()
    monkeypatch.setattr(dispatch, "_kernel_for_device", lambda device: None)
    plain = act(x)
    torch.testing.assert_close(y, plain, rtol=1e-5, atol=1e-5)
    for found, wanted in zip(
        (grad_x, *gradients), torch.autograd.grad(plain.square().sum(), (x, *act.parameters())), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_more_samples_than_a_grid_has_blocks(kernel, device, monkeypatch):
    monkeypatch.setattr(cuda.plan, "_MOST_BLOCKS", 2)
    _, x, parameters, dim = problem("rows", torch.float32, device, 16)
    assert fresh(kernel).per_sample_forward(x, weight_of(parameters)[0], 16, dim) is NotImplemented


MISTAKES = [
    ("const i64 sample = blockIdx.z, ", "const i64 sample = 0, "),
    ("elements = sample * all.outer * all.channels * all.inner", "elements = sample * all.channels * all.inner"),
    ("functions * (i == 2 ? all.intervals + 1 : 1)", "functions"),
    ("(all.kind == 0 ? 4 : 2);\n", "4;\n"),
    (" + functions * all.splits * LINES(0, all.intervals)", ""),
    ("a.grad = static_cast<const Vector<T, 1> *>(all.grad) + elements", "a.grad = all.grad"),
]


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(kernel, device, mistake, monkeypatch):
    old, new = mistake
    assert kernels.source([]).count(old) == 1
    source = kernels.source
    monkeypatch.setattr(kernels, "source", lambda chosen: source(chosen).replace(old, new))
    monkeypatch.setattr(cuda.plan.Gpu, "slots", lambda *_: 100_000)
    broken = fresh(kernel)
    with pytest.raises(AssertionError):  # noqa: PT012
        compare(broken, "rows", torch.float32, device)
        test_parameters_in_16_bits(broken, device, torch.bfloat16)
