"""Optimizer helpers for TwoPhase: unwrap an optimizer, and create the optimizer state of units that have not learned yet."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pwlu.units.module import PWLU


def unwrap_optimizer(caller: str, optimizer: Any) -> Optimizer:
    """Return the optimizer inside the wrappers of Lightning or Accelerate. `caller` is the function that errors name."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{caller}: optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}. If there are several, pass "
            "the one that holds the PWLU parameters."
        )
    return optimizer


def state_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that holds the state: in ZeroRedundancyOptimizer it is the inner one, for this rank's shard."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def add_momentum_buffers(optimizer: Optimizer, units: Iterable[PWLU]) -> None:
    """Add momentum buffers of 0 for units that start to learn.

    PyTorch's fused SGD needs momentum buffers for all parameters of a group, or for none.
    """
    learned = {id(p) for unit in units for p in unit.parameters()}
    for group in optimizer.param_groups:
        has_momentum = any("momentum_buffer" in optimizer.state.get(p, {}) for p in group["params"])
        if group.get("fused") and group.get("momentum") and has_momentum:
            for parameter in group["params"]:
                if id(parameter) in learned and parameter.requires_grad:
                    optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


@torch.no_grad()
def complete_state(optimizer: Optimizer, units: Iterable[PWLU]) -> None:
    """Create the optimizer state of units that have not learned yet, as it is before their first step.

    In Phase I units have no gradients, so an optimizer has no state for them. torch.distributed.checkpoint cannot load such an
    incomplete state. To create it, run one step of the optimizer with zero gradients and no weight decay.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    learned = {id(p) for unit in units for p in unit.parameters() if p.requires_grad}
    weights = [p for p in held if id(p) in learned and p not in optimizer.state]
    if not weights or not optimizer.state or isinstance(optimizer, torch.optim.LBFGS):  # LBFGS has one state for all parameters
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
        if "step" in state:  # everything else is zero, as in a new state
            state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], Tensor) else 0
