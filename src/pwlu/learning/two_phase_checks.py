"""Argument checks and warnings of TwoPhase and regrid_. `caller` is the one that errors name."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pwlu.common.text import abbreviate
from pwlu.units.module import PWLU, units_of
from pwlu.units.squeeze import function_parameters


def check_rule(rule: Any, optimizer: Optimizer) -> None:
    """Check that a rule, None for the paper's, can use the optimizer: it needs a finite rate."""
    if rule is None:
        return
    for group in optimizer.param_groups:
        if "dampening" in group and group["momentum"] >= 1:
            raise ValueError(
                f"TwoPhase: the rule needs the rate of SGD, lr (1 - dampening)/(1 - momentum), but momentum is "
                f"{group['momentum']:g}. Write a momentum below 1, such as 0.9, or rule='paper'"
            )


def check_optimizer(caller: str, optimizer: Optimizer, units: Mapping[str, PWLU]) -> None:
    """Check that the optimizer holds all parameters of the units."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    wanted = [(name, p) for name, unit in units.items() for p in unit.parameters() if p.requires_grad]
    missing = list(dict.fromkeys(name for name, p in wanted if id(p) not in held))
    if missing:
        raise ValueError(
            f"{caller}: the optimizer does not hold the parameters of {abbreviate(missing)}. Create it after pwlu.convert_ "
            "(and after fully_shard): torch.optim.SGD(pwlu.parameter_groups(model, lr=...), ...). If you have several "
            f"optimizers, put all PWLU parameters of the model into one, or call {caller} for each part of the model."
        )


def check_copies(caller: str, copies: nn.Module | Sequence[nn.Module], units: Mapping[str, PWLU]) -> list[list[PWLU]]:
    """Check that each copy of the model has the same units; return the units of each."""
    return [_check_copy(caller, copy, units) for copy in ([copies] if isinstance(copies, nn.Module) else copies)]


def _check_copy(caller: str, copy: nn.Module, units: Mapping[str, PWLU]) -> list[PWLU]:
    others = list(units_of(copy).values())
    shapes = [[(u.intervals, [p.shape for p in u.parameters()]) for u in each] for each in (units.values(), others)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{caller}: copies must have the same PWLUs as the model, {len(units)} with the same shapes in the same "
            f"order, but {type(copy).__name__} has {len(others)}. Copy the model after pwlu.convert_: "
            "copies=[copy.deepcopy(model)]"
        )
    return others


def warn_of_decay(optimizer: Optimizer, units: Mapping[str, PWLU]) -> None:
    """Warn if the optimizer applies weight decay to the units."""
    learned = function_parameters(units.values())
    decays = [g.get("weight_decay", 0.0) for g in optimizer.param_groups if any(id(p) in learned for p in g["params"])]
    if any(decays):
        warnings.warn(
            f"TwoPhase: the PWLUs have a weight decay of {max(decays):g}, which pulls heights and bounds towards zero. "
            "Create the optimizer with parameter groups: torch.optim.SGD(pwlu.parameter_groups(model, lr=..., "
            "weight_decay=...)). With Hugging Face's Trainer, write pwlu.integrations.hugging_face.own_group_(trainer) right "
            "after you create the trainer",
            stacklevel=3,
        )
