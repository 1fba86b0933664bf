"""Padé Activation Units."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pwlu import checks, reference
from pwlu.baselines import fused
from pwlu.baselines.rational import fit
from pwlu.initial_functions import InitialFunction, find_initial_function


class PAU(nn.Module):
    r"""Padé Activation Unit (Molina et al. 2020, arXiv 1907.06732), one function for everything:

    .. math:: y = \frac{\sum_{j=0}^5 a_j x^j}{1 + |\sum_{k=1}^4 b_k x^k|}

    This is the "safe" PAU of the paper that introduced it. Its authors' package, rational_activations, calls it version B; its
    version A, the default there, has the sum of the absolute values :math:`|b_k x^k|` in the denominator.

    Args:
        start: the function it begins as, nearly: see :func:`pwlu.baselines.rational.fit`. The default is that of its authors;
            ``pwlu.convert_(..., to="pau")`` takes what stood there. A name, a function of a tensor, or a
            ``pwlu.initial_functions.InitialFunction``.

    Parameters: ``numerator`` (6,), a_0 to a_5, and ``denominator`` (4,), b_1 to b_4. ``start_error`` is the largest difference
    to the function at the start, for \|x\| <= 3.

    Shape: any; output as input. Arithmetic is in float32 (float64 for float64), where x^5 overflows beyond \|x\| = 10^7.
    Backward needs x and the parameters alone. On NVIDIA GPUs forward and backward are a kernel each, in Triton;
    ``PWLU_CUDA_KERNEL=reference`` asks for plain operations.
    """

    def __init__(
        self,
        start: str | Callable[[Tensor], Tensor] | InitialFunction = "leaky_relu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        function = find_initial_function(start)
        self._fit = fit(function)  # numbers, not the function, which may not be possible to pickle
        self.start, self.start_error = function.name, self._fit.error
        self.numerator = nn.Parameter(torch.empty(6, device=device, dtype=dtype))
        self.denominator = nn.Parameter(torch.empty(4, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the start."""
        self.numerator.copy_(torch.tensor(self._fit.numerator, dtype=torch.float64, device="cpu"))
        self.denominator.copy_(torch.tensor(self._fit.denominator, dtype=torch.float64, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        """y."""
        checks.check_input(x)
        y: Tensor = _PAU.apply(x, self.numerator, self.denominator)
        return y

    def extra_repr(self) -> str:
        """For print."""
        return f"start={self.start!r}, start_error={self.start_error:.2g}"


class _PAU(torch.autograd.Function):
    """P/Q with Q = 1 + |A|, each by Horner's rule; by kernels where they serve."""

    @staticmethod
    def forward(x: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
        if fused.usable(x, numerator, denominator):
            from pwlu.baselines import pau_kernels

            return pau_kernels.forward(x, numerator, denominator)
        wide, a, b = _in_compute_type(x, numerator, denominator)
        y = _polynomial(a, wide).div_(_polynomial(b, wide).mul_(wide).abs_().add_(1))
        return y.to(x.dtype).detach()  # the compiler of torch 2.11 loses the gradients of what an operation in place returns

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, numerator, denominator = ctx.saved_tensors
        need_x, *need_parameters = ctx.needs_input_grad
        if fused.usable(x, grad, numerator, denominator):
            from pwlu.baselines import pau_kernels

            grad_x, found = pau_kernels.backward(grad, x, numerator, denominator, need_x, any(need_parameters))
            if found is None:
                return grad_x, None, None
            return grad_x, found[:6].to(numerator.dtype), found[6:].to(denominator.dtype)
        wide, a, b = _in_compute_type(x, numerator, denominator)
        inside = _polynomial(b, wide).mul_(wide)
        bottom = inside.abs().add_(1)
        of_top = grad.to(wide.dtype) / bottom  # the gradient of P
        of_inside = _polynomial(a, wide).div_(bottom).mul_(of_top).mul_(inside.sign_()).neg_()  # and of A: -g P sign(A)/Q^2
        grad_x = grad_a = grad_b = None
        if need_x:
            powers = torch.arange(1, 6, device=x.device, dtype=wide.dtype)
            grad_x = _polynomial(a[1:] * powers, wide).mul_(of_top)
            grad_x = grad_x.addcmul_(_polynomial(b * powers[:4], wide), of_inside).to(x.dtype)
        if need_parameters[0]:
            grad_a = _moments(of_top, wide, 5).to(numerator.dtype)
        if need_parameters[1]:
            grad_b = _moments(of_inside, wide, 4)[1:].to(denominator.dtype)
        return grad_x, grad_a, grad_b


def _in_compute_type(x: Tensor, numerator: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = reference.compute_dtype(x)
    return x.to(dtype), numerator.to(dtype), denominator.to(dtype)


def _polynomial(coefficients: Tensor, x: Tensor) -> Tensor:
    """c_0 + c_1 x + c_2 x^2 + ..., of degree 1 at least."""
    *rest, last = coefficients.unbind()
    y = torch.addcmul(rest[-1], last, x)
    for coefficient in rest[-2::-1]:
        y = torch.addcmul(coefficient, y, x)
    return y


def _moments(weights: Tensor, x: Tensor, degree: int) -> Tensor:
    """The sums of w, w x, w x^2, ...: (degree + 1,)."""
    sums, terms = [weights.sum()], weights * x
    for _ in range(degree - 1):
        sums.append(terms.sum())
        terms *= x
    return torch.stack([*sums, terms.sum()])
