"""Padé Activation Units."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pwlu import reference
from pwlu.baselines import fused
from pwlu.baselines.arguments import Device, DType
from pwlu.baselines.rational import fit
from pwlu.common import checks
from pwlu.initial_functions import InitialFunction, find_initial_function


class PAU(nn.Module):
    """Padé Activation Unit (Molina et al. 2020, arXiv 1907.06732), one function for all elements::

        y = (sum over j = 0..5 of a_j x^j) / (1 + |sum over k = 1..4 of b_k x^k|)

    This is the "safe" PAU of that paper. The authors' package, rational_activations, calls it version B. Version A, the default
    there, has the sum of the absolute values |b_k x^k| in the denominator.

    The input may have any shape. The output has the shape and dtype of the input. The computation runs in float32 (float64 for
    float64); in float32, x^5 overflows for |x| > 10^7. The backward pass saves only x and the parameters.

    The parameters are ``numerator`` (6,), a_0 to a_5, and ``denominator`` (4,), b_1 to b_4.

    On NVIDIA GPUs, forward and backward are one Triton kernel each. Set ``PWLU_CUDA_KERNEL=reference`` to use PyTorch operators
    instead.

    Args:
        start: the function that the initial parameters approximate: a name, a function from tensor to tensor, or a
            ``pwlu.initial_functions.InitialFunction``. See :func:`pwlu.baselines.rational.fit`. Default: "leaky_relu", as the
            authors use it. ``pwlu.convert_(..., to="pau")`` passes the activation that it replaces.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Attributes:
        start_error: the largest difference between the initial PAU and the function for |x| <= 3.
    """

    def __init__(
        self,
        start: str | Callable[[Tensor], Tensor] | InitialFunction = "leaky_relu",
        device: Device = None,
        dtype: DType = None,
    ) -> None:
        super().__init__()
        function = find_initial_function(start)
        self._fit = fit(function)  # keep the numbers, because the function may not be picklable
        self.start, self.start_error = function.name, self._fit.error
        self.numerator = nn.Parameter(torch.empty(6, device=device, dtype=dtype))
        self.denominator = nn.Parameter(torch.empty(4, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset the parameters to the initial function."""
        self.numerator.copy_(torch.tensor(self._fit.numerator, dtype=torch.float64, device="cpu"))
        self.denominator.copy_(torch.tensor(self._fit.denominator, dtype=torch.float64, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        """Return y."""
        checks.check_input(x)
        y: Tensor = _PAU.apply(x, self.numerator, self.denominator)
        return y

    def extra_repr(self) -> str:
        """Return the arguments, for repr."""
        return f"start={self.start!r}, start_error={self.start_error:.2g}"


class _PAU(torch.autograd.Function):
    """y = P/Q with Q = 1 + |A|, by the Triton kernels if possible, else by PyTorch operators; polynomials by Horner's rule."""

    @staticmethod
    def forward(x: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
        if fused.can_use_kernels(x, numerator, denominator):
            from pwlu.baselines import pau_kernels

            return pau_kernels.forward(x, numerator, denominator)
        wide, a, b = _in_compute_type(x, numerator, denominator)
        y = _polynomial(a, wide).div_(_polynomial(b, wide).mul_(wide).abs_().add_(1))
        return y.to(x.dtype).detach()  # torch.compile of torch 2.11 loses the gradient of the result of an in-place operation

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, numerator, denominator = ctx.saved_tensors
        need_x, *need_parameters = ctx.needs_input_grad
        if fused.can_use_kernels(x, grad, numerator, denominator):
            from pwlu.baselines import pau_kernels

            grad_x, found = pau_kernels.backward(grad, x, numerator, denominator, need_x, any(need_parameters))
            if found is None:
                return grad_x, None, None
            return grad_x, found[:6].to(numerator.dtype), found[6:].to(denominator.dtype)
        wide, a, b = _in_compute_type(x, numerator, denominator)
        inside = _polynomial(b, wide).mul_(wide)
        bottom = inside.abs().add_(1)
        grad_top = grad.to(wide.dtype) / bottom  # the gradient of P
        # The gradient of A is -g P sign(A)/Q^2.
        grad_inside = _polynomial(a, wide).div_(bottom).mul_(grad_top).mul_(inside.sign_()).neg_()
        grad_x = grad_a = grad_b = None
        if need_x:
            powers = torch.arange(1, 6, device=x.device, dtype=wide.dtype)
            grad_x = _polynomial(a[1:] * powers, wide).mul_(grad_top)
            grad_x = grad_x.addcmul_(_polynomial(b * powers[:4], wide), grad_inside).to(x.dtype)
        if need_parameters[0]:
            grad_a = _moments(grad_top, wide, 5).to(numerator.dtype)
        if need_parameters[1]:
            grad_b = _moments(grad_inside, wide, 4)[1:].to(denominator.dtype)
        return grad_x, grad_a, grad_b


def _in_compute_type(x: Tensor, numerator: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = reference.compute_dtype(x)
    return x.to(dtype), numerator.to(dtype), denominator.to(dtype)


def _polynomial(coefficients: Tensor, x: Tensor) -> Tensor:
    """Return c_0 + c_1 x + c_2 x^2 + ..., a polynomial of degree at least 1."""
    *rest, last = coefficients.unbind()
    y = torch.addcmul(rest[-1], last, x)
    for coefficient in rest[-2::-1]:
        y = torch.addcmul(coefficient, y, x)
    return y


def _moments(weights: Tensor, x: Tensor, degree: int) -> Tensor:
    """Return the sums of w, w x, w x^2, ...: (degree + 1,)."""
    sums, terms = [weights.sum()], weights * x
    for _ in range(degree - 1):
        sums.append(terms.sum())
        terms *= x
    return torch.stack([*sums, terms.sum()])
