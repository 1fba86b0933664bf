"""Fit the rational function of PAU to a given function."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from pwlu.initial_functions import InitialFunction

_NEAR, _FAR, _FAR_WEIGHT = 3.0, 10.0, 1e-3
_STEPS = 200
_EXACT = 1e-20  # smaller losses differ only by rounding; for example, every denominator fits a straight line exactly
_DENOMINATORS = ((0.0, 0.1, 0.0, 0.001), (0.0, 1.0, 0.0, 0.1))  # initial guesses: for smooth functions, and with kinks


class Fit(NamedTuple):
    """The coefficients a_0 to a_5 and b_1 to b_4, and the largest difference to the function for |x| <= 3."""

    numerator: tuple[float, ...]
    denominator: tuple[float, ...]
    error: float


@functools.cache
def fit(start: InitialFunction) -> Fit:
    """Fit P/Q with P = a_0 + ... + a_5 x^5 and Q = 1 + |b_1 x + ... + b_4 x^4| to a function, in float64.

    This is a least-squares fit between -3 and 3, as PAU's authors do it. Points out to -10 and 10 count too, with a weight of
    0.001. Without them, the best fit of hard swish would be a parabola, and that of GELU would fall to -6 at x = 10. The error
    for |x| <= 3 is 0.06 for ReLU, 0.04 for hard swish, 0.003 for GELU, 0.0003 for SiLU.
    """
    x = torch.linspace(-_FAR, _FAR, 1001, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        y = start.function(x)
    if not y.isfinite().all():
        raise ValueError(
            f"PAU: the initial function {start.name} must be finite between {-_FAR:g} and {_FAR:g}, but is not. "
            "Pass another initial function such as 'relu'"
        )
    near = x.abs() <= _NEAR
    weight = torch.where(near, 1.0, _FAR_WEIGHT**0.5).to(x.dtype)
    problem = _Problem(x[:, None] ** torch.arange(6, dtype=x.dtype, device="cpu"), y, weight)
    solutions = [problem.descend(torch.tensor(b, dtype=x.dtype, device="cpu")) for b in _DENOMINATORS]
    best = min(solutions, key=lambda s: max(s.loss, _EXACT))
    denominator = best.denominator * (1 if best.inside.sum() >= 0 else -1)  # both signs give the same function
    error = (best.fitted - y)[near].abs().max().item()
    return Fit(tuple(best.numerator.tolist()), tuple(denominator.tolist()), error)


class _Solution(NamedTuple):
    """The best numerator for a denominator, with intermediate results for the next step."""

    denominator: Tensor
    numerator: Tensor
    inside: Tensor  # A in Q = 1 + |A|
    basis: Tensor  # x^j / Q
    fitted: Tensor
    loss: float


class _Problem:
    """Least squares by variable projection: the numerator is a linear solve, so the search is over the denominator only."""

    def __init__(self, powers: Tensor, y: Tensor, weight: Tensor) -> None:
        self.powers, self.y, self.weight = powers, y, weight

    def solve(self, denominator: Tensor) -> _Solution:
        """Return the best numerator for a denominator."""
        inside = self.powers[:, 1:5] @ denominator
        basis = self.powers / (1 + inside.abs())[:, None]
        weighted, target = basis * self.weight[:, None], self.y * self.weight
        numerator = torch.linalg.lstsq(weighted, target[:, None]).solution[:, 0]
        fitted = basis @ numerator
        loss = ((fitted - self.y) * self.weight).square().sum().item()
        return _Solution(denominator, numerator, inside, basis, fitted, loss)

    def descend(self, denominator: Tensor) -> _Solution:
        """Run Levenberg-Marquardt from an initial denominator until no step reduces the loss."""
        now, damping = self.solve(denominator), 1e-3
        for _ in range(_STEPS):
            slopes = -(now.fitted * now.inside.sign())[:, None] * now.basis[:, 1:5] * self.weight[:, None]
            spanned, _ = torch.linalg.qr(now.basis * self.weight[:, None])
            slopes = slopes - spanned @ (spanned.T @ slopes)  # remove changes that the numerator can compensate
            hessian, gradient = slopes.T @ slopes, slopes.T @ ((now.fitted - self.y) * self.weight)
            scale = torch.diag(hessian.diagonal() + 1e-12)
            while damping < 1e12:
                new = self.solve(now.denominator - torch.linalg.solve(hessian + damping * scale, gradient))
                if new.loss < now.loss:
                    break
                damping *= 10
            else:
                return now
            settled = new.loss > now.loss * (1 - 1e-10)
            now, damping = new, max(damping / 10, 1e-12)
            if settled:
                return now
        return now
