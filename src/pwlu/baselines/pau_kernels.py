"""Triton kernels of PAU, one for forward and one for backward. ``pau.py`` states the formulas."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pwlu.baselines.fused import max_programs
from pwlu.kernels import layout
from pwlu.reference import compute_dtype

_BLOCK, _BACKWARD_BLOCK = 1024, 512  # elements per block of a program; backward keeps ten sums per element in registers


def forward(x: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return y for an x that is not empty."""
    y = torch.empty_like(x)
    x = layout.laid_out_as(y, x)
    with torch.cuda.device_of(x):
        _forward[(triton.cdiv(x.numel(), _BLOCK),)](x, numerator.contiguous(), denominator.contiguous(), y, x.numel(), _BLOCK)
    return y


def backward(
    grad: Tensor, x: Tensor, numerator: Tensor, denominator: Tensor, need_x: bool, need_parameters: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradient of x, and those of a_0 to a_5 and b_1 to b_4 as one tensor (10,) in float64; None if not needed.

    A program visits k blocks. It adds in float32 (float64 for float64): first each element of the block over the k blocks, then
    all elements of the block. The sums of the programs are added in float64. So the rounding error of a sum is at most
    (k + 9) eps/2 times the sum of the absolute values of its terms.
    """
    like = torch.empty_like(x)
    x, grad = layout.laid_out_as(like, x), layout.laid_out_as(like, grad)
    programs = min(triton.cdiv(x.numel(), _BACKWARD_BLOCK), max_programs(x.device))
    wide = compute_dtype(x)
    grad_x = like if need_x else None
    sums = x.new_empty(programs, 10, dtype=wide) if need_parameters else None
    with torch.cuda.device_of(x):
        _backward[(programs,)](
            grad, x, numerator.contiguous(), denominator.contiguous(), grad_x, sums, x.numel(), _BACKWARD_BLOCK
        )
    return grad_x, None if sums is None else sums.sum(0, dtype=torch.float64)


@triton.jit
def _coefficients(address: tl.tensor, COUNT: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Load COUNT numbers from an address."""
    found: tl.tuple = ()
    for k in tl.static_range(COUNT):
        found = found + (tl.load(address + k).to(WIDE),)  # noqa: RUF005 (Triton does not unpack)
    return found


@triton.jit
def _polynomial(coefficients: tl.tensor, x: tl.tensor, DEGREE: tl.constexpr) -> tl.tensor:
    """Return c_0 + c_1 x + c_2 x^2 + ... by Horner's rule."""
    y = coefficients[DEGREE]
    for k in tl.static_range(DEGREE - 1, -1, -1):
        y = y * x + coefficients[k]
    return y


@triton.jit
def _derivative(coefficients: tl.tensor, x: tl.tensor, DEGREE: tl.constexpr) -> tl.tensor:
    """Return c_1 + 2 c_2 x + 3 c_3 x^2 + ..."""
    y = coefficients[DEGREE] * DEGREE
    for k in tl.static_range(DEGREE - 1, 0, -1):
        y = y * x + coefficients[k] * k
    return y


@triton.jit
def _ratio(top: tl.tensor, bottom: tl.tensor) -> tl.tensor:
    """Return the correctly rounded quotient; Triton's division of float32 is not correctly rounded."""
    return top / bottom if bottom.dtype == tl.float64 else tl.div_rn(top, bottom)


@triton.jit
def _forward(
    x: tl.tensor, numerator: tl.tensor, denominator: tl.tensor, y: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    a = _coefficients(numerator, 6, WIDE)
    b = (0.0,) + _coefficients(denominator, 4, WIDE)  # noqa: RUF005
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size, other=0).to(WIDE)
    bottom = 1 + tl.abs(_polynomial(b, value, 4))
    tl.store(y + at, _ratio(_polynomial(a, value, 5), bottom).to(y.dtype.element_ty), mask=at < size)


@triton.jit
def _backward(
    grad: tl.tensor,
    x: tl.tensor,
    numerator: tl.tensor,
    denominator: tl.tensor,
    grad_x: tl.tensor,
    sums: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the gradient of x; program p writes its partial sum of parameter gradient j to sums[p, j]."""
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    a = _coefficients(numerator, 6, WIDE)
    b = (0.0,) + _coefficients(denominator, 4, WIDE)  # noqa: RUF005
    program = tl.program_id(0)
    totals: tl.tuple = (tl.zeros((BLOCK,), WIDE),) * 10
    for start in range(program.to(tl.int64) * BLOCK, size, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < size, other=0).to(WIDE)
        inside = _polynomial(b, value, 4)
        inverse = _ratio(1.0, 1 + tl.abs(inside))
        grad_top = tl.load(grad + at, mask=at < size, other=0).to(WIDE) * inverse
        grad_inside = _polynomial(a, value, 5) * inverse * grad_top
        grad_inside = tl.where(inside > 0, -grad_inside, tl.where(inside < 0, grad_inside, grad_inside * 0))
        if grad_x is not None:
            slope = _derivative(a, value, 5) * grad_top + _derivative(b, value, 4) * grad_inside
            tl.store(grad_x + at, slope.to(grad_x.dtype.element_ty), mask=at < size)
        if sums is not None:
            terms = grad_top
            added: tl.tuple = ()
            for j in tl.static_range(10):
                if j == 6:
                    terms = grad_inside * value
                added = added + (totals[j] + terms,)  # noqa: RUF005
                terms = terms * value
            totals = added
    if sums is not None:
        for j in tl.static_range(10):
            tl.store(sums + program * 10 + j, tl.sum(totals[j]))
