"""What TwoPhase does to optimizers of any kind: find the one inside a wrapper, and give units a state there."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pwlu.module import PWLU


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer inside what Lightning or Accelerate wrap around it."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"TwoPhase: optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}. If there are several, give "
            "the one that holds the PWLU parameters."
        )
    return optimizer


def keeper(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that keeps the state: ZeroRedundancyOptimizer has another inside, for this process's part."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def join(optimizer: Optimizer, units: Iterable[PWLU]) -> None:
    """Momentum of 0 for units that begin to learn: torch's fused SGD wants it for all parameters of a group, or for none."""
    learned = {id(p) for unit in units for p in unit.parameters()}
    for group in optimizer.param_groups:
        begun = any("momentum_buffer" in optimizer.state.get(p, {}) for p in group["params"])
        if group.get("fused") and group.get("momentum") and begun:
            for parameter in group["params"]:
                if id(parameter) in learned and parameter.requires_grad:
                    optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


@torch.no_grad()
def complete_state(optimizer: Optimizer, units: Iterable[PWLU]) -> None:
    """Give the optimizer a state of units before it is saved, as it would be at their first step.

    Until then it has none, as units have no gradients in Phase I, and torch.distributed.checkpoint would refuse to load it.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    learned = {id(p) for unit in units for p in unit.parameters() if p.requires_grad}
    weights = [p for p in held if id(p) in learned and p not in optimizer.state]
    if not weights or not optimizer.state or isinstance(optimizer, torch.optim.LBFGS):  # that has one state for all
        return
    gradients, values = [p.grad for p in held], [p.clone() for p in weights]
    decays = [group.get("weight_decay") for group in optimizer.param_groups]
    try:
        for p in held:
            p.grad = None
        for p in weights:
            p.grad = torch.zeros_like(p)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        optimizer.step()
    finally:
        for p, gradient in zip(held, gradients, strict=True):
            p.grad = gradient
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group.pop("weight_decay") if decay is None else group.update(weight_decay=decay)
    for p, value in zip(weights, values, strict=True):
        p.copy_(value)
        state = optimizer.state[p]
        if "step" in state:  # all else is zero, as at the start
            state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], Tensor) else 0
