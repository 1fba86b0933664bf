"""What TwoPhase refuses or warns of when it is made."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pwlu.module import PWLU, units_of, weight_parameter
from pwlu.text import abbreviate


def check_steps(realign_at: Any) -> int:
    """Return the number of steps of Phase I; raise unless it is one."""
    if isinstance(realign_at, bool) or not isinstance(realign_at, int) or realign_at < 1:
        raise ValueError(
            f"TwoPhase: realign_at must be a whole number of optimizer steps of at least 1, such as 5 * len(loader), not "
            f"{realign_at!r}. To train without Phase I, leave TwoPhase out."
        )
    return realign_at


def check_weights(units: Mapping[str, PWLU]) -> None:
    """Raise if units share a weight: realignment writes every weight, so each must be a parameter of its own."""
    owners: dict[int, str] = {}
    for name, unit in units.items():
        weight = weight_parameter(unit)
        if (other := owners.setdefault(id(weight), name)) != name:
            raise ValueError(
                f"TwoPhase: {other} and {name} share one weight, but each has bounds where its own inputs are. Share the "
                "module instead, or give each its own: act.weight = torch.nn.Parameter(act.weight.detach().clone())"
            )


def check_optimizer(optimizer: Optimizer, units: Mapping[str, PWLU]) -> None:
    """Raise unless the optimizer holds all parameters of the units."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    wanted = [(name, p) for name, unit in units.items() for p in unit.parameters() if p.requires_grad]
    missing = list(dict.fromkeys(name for name, p in wanted if id(p) not in held))
    if missing:
        raise ValueError(
            f"TwoPhase: the optimizer does not hold the parameters of {abbreviate(missing)}. Make it after pwlu.convert_ "
            "(and after fully_shard): torch.optim.SGD(pwlu.parameter_groups(model, lr=...), ...). If they are split over "
            "several optimizers, put all PWLU parameters of a model into one, or make one TwoPhase for each part of it."
        )


def check_copy(copy: nn.Module, units: Mapping[str, PWLU]) -> list[PWLU]:
    """Return the units of a copy of the model; raise unless they are like those of the model."""
    others = list(units_of(copy).values())
    shapes = [[(u.channels, u.intervals) for u in each] for each in (units.values(), others)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"TwoPhase: copies must have the PWLUs of the model, {len(units)} with the same shapes in the same "
            f"order; {type(copy).__name__} has {len(others)}. Copy the model after pwlu.convert_: "
            "copies=[copy.deepcopy(model)]"
        )
    return others


def warn_of_decay(optimizer: Optimizer, units: Mapping[str, PWLU]) -> None:
    """Warn if the optimizer has weight decay for the units."""
    learned = {id(unit.weight) for unit in units.values()}
    decays = [g.get("weight_decay", 0.0) for g in optimizer.param_groups if any(id(p) in learned for p in g["params"])]
    if any(decays):
        warnings.warn(
            f"TwoPhase: the PWLUs have a weight decay of {max(decays):g}, which pulls heights and bounds towards zero. "
            "Make the optimizer with groups: torch.optim.SGD(pwlu.parameter_groups(model, lr=..., weight_decay=...)). "
            "With Hugging Face's Trainer write pwlu.integrations.hugging_face.own_group_(trainer) right after it is made",
            stacklevel=3,
        )
