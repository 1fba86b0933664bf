"""Constrain the shape of PWLUs: Lipschitz, monotone, convex, odd, within a range."""

import math
import sys
from typing import Any

from torch import nn

from pwlu.units.constraints import Constraint, check_agreement, constrained_units, keep_constrained
from pwlu.units.dynamic import DynamicPWLU
from pwlu.units.module import PWLU, apply_constraint, require_units, require_values, weight_parameter
from pwlu.units.nonuniform import NonUniformPWLU

_REFUSED: dict[type[PWLU], str] = {
    DynamicPWLU: "whose functions differ between samples. Convert the model with to='pwlu', or pass the parts of the model "
    "that have other PWLUs",
    NonUniformPWLU: "and the projections need equally spaced knots. Convert the model with to='pwlu', or replace the unit: "
    "unit.to_uniform(tolerance).unit",
}


def constrain_(
    model: nn.Module,
    *,
    lipschitz: float | None = None,
    monotone: bool = False,
    convex: bool = False,
    odd: bool = False,
    range: tuple[float, float] | None = None,
) -> list[str]:
    """Constrain the functions of all PWLUs of a model, now and after every optimizer step, in place.

    A hook projects the functions after each step of any ``torch.optim`` optimizer that holds their weights, in both phases of
    :class:`pwlu.TwoPhase`. The training loop does not change. :func:`pwlu.realign_`, :func:`pwlu.simplify_` and
    :func:`pwlu.refine_` keep the constraints. Copies of the model have them too. :func:`pwlu.save` stores them, and
    :func:`pwlu.describe` reports them. The page on constraints states the order of the projections and the rounding.

    The new constraints replace earlier ones. A call without constraints removes them. If something else writes the weights,
    such as ``load_state_dict`` or an optimizer outside ``torch.optim``, call this function again afterwards.

    Args:
        model: a model with PWLUs, or a part of it.
        lipschitz: the largest absolute slope L. Default: None, no limit.
        monotone: whether the functions must not decrease. Default: False.
        convex: whether the functions must be convex, with slopes that do not decrease. Default: False.
        odd: whether f(-x) = -f(x); the bounds become symmetric. Default: False. With ``convex``, only lines through 0 remain.
        range: the smallest and largest output (a, b); the outer slopes become 0. Default: None, no limits. With ``odd``, the
            outputs stay within the largest symmetric part of the range.

    Returns:
        The names of the PWLUs.

    Raises:
        TypeError: if ``model`` is not a module or has a :class:`pwlu.DynamicPWLU` or :class:`pwlu.NonUniformPWLU`.
        ValueError: if the model has no PWLU, an argument is not valid, only constants satisfy the constraints, or a PWLU shares
            its weight with one that has other constraints.
        RuntimeError: if the weight of a PWLU is computed (parametrized or pruned).

    Example::

        model = torch.nn.Sequential(torch.nn.Linear(4, 8), pwlu.PWLU(channels=8))
        pwlu.constrain_(model, lipschitz=1.0, monotone=True)  # ['1']
    """
    units = require_units("constrain_", model, _REFUSED)
    require_values("constrain_", units)
    constraint = check_constraint(Constraint(lipschitz, monotone, convex, odd, range))
    new = constraint if any(value not in (None, False) for value in constraint) else None
    constrained, changing = constrained_units(), set(units.values())
    for name, unit in units.items():
        weight = weight_parameter(unit)
        low, high = constraint.limits(weight.dtype)
        if low >= high:
            raise ValueError(
                f"constrain_: {name or 'the model'} is {weight.dtype}, which has no two numbers in range={range!r}. Write a "
                "wider range, or use float64"
            )
        if new is not None:
            others = {unit.constraint for unit in constrained.get(id(weight), ()) if unit not in changing}
            check_agreement(name or "the model", {new} | others)
    for unit in units.values():
        unit.constraint = new
        apply_constraint(unit)
        if unit.constraint is not None:
            keep_constrained(unit)
    return list(units)


def check_constraint(given: Constraint) -> Constraint:
    """Check that a constraint is valid and that functions other than constants satisfy it; return it with Python floats."""
    for name in ("monotone", "convex", "odd"):
        if not isinstance(value := getattr(given, name), bool):
            raise ValueError(f"constrain_: {name} must be True or False, not {value!r}")
    constraint = given._replace(lipschitz=_check_lipschitz(given.lipschitz), range=_check_range(given.range))
    _check_possible(constraint)
    return constraint


def _check_lipschitz(lipschitz: Any) -> float | None:
    if lipschitz is None:
        return None
    if isinstance(lipschitz, bool) or not isinstance(lipschitz, (int, float)) or not 0 < lipschitz <= sys.float_info.max:
        raise ValueError(f"constrain_: lipschitz is the largest slope: write a positive number such as 1.0, not {lipschitz!r}")
    return float(lipschitz)


def _check_range(given: Any) -> tuple[float, float] | None:
    if given is None:
        return None
    try:
        low, high = (float(number) for number in given)
    except (TypeError, ValueError, OverflowError):
        low, high = math.nan, math.nan
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"constrain_: range must be two finite numbers a < b such as (0.0, 6.0), not {given!r}")
    return low, high


def _check_possible(constraint: Constraint) -> None:
    if constraint.range is None:
        return
    if constraint.convex:
        raise ValueError(
            "constrain_: convex=True and range exclude each other: a convex function that stays within a range is constant. "
            "Leave out one of them"
        )
    low, high = constraint.range
    if constraint.odd and not low < 0 < high:
        raise ValueError(
            f"constrain_: odd=True needs a range around 0, because f(-x) = -f(x), not ({low:g}, {high:g}). "
            f"Write range=({-max(abs(low), abs(high)):g}, {max(abs(low), abs(high)):g})"
        )
