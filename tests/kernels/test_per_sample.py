"""The CPU kernel of functions that differ between samples."""

import pytest
import torch
from helpers import assert_within, oracle, unit, weight_of
from test_dynamic_kernels import FORMS

from pwlu import reference
from pwlu.kernels import cpu
from pwlu.reference.dynamic import fold


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_the_cpu_kernel(form, dtype):
    """All results against the oracle: the functions of all samples are those of one tensor with as many channels."""
    kernel = cpu.kernel()
    if kernel is None:
        pytest.skip("needs a C compiler")
    (shape, dim), n = FORMS[form], 16
    grad, x = torch.randn(2, *shape).to(dtype)
    functions = shape[0] * shape[dim]
    parameters = unit(functions, n, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    y, bound, gradients, bounds = oracle(fold(x, functions, dim), parameters, 0, fold(grad, functions, dim))
    weight, _ = weight_of(parameters)
    found = kernel.per_sample_forward(x, weight, n, dim)
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
