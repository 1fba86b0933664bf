"""Parameter groups for an optimizer: PWLUs learn without weight decay, and at their own rate."""

from typing import Any

from torch import nn

from pwlu.module import require_units

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)  # the first: batch and instance norm


def parameter_groups(
    model: nn.Module,
    lr: float,
    *,
    weight_decay: float = 0.0,
    lr_factor: float = 1.0,
    norm_weight_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Groups for an optimizer: the weights, and the parameters of PWLUs with ``lr * lr_factor`` and no weight decay.

    Decay would pull heights and bounds towards zero, which is no simpler a function. Parameters that need no gradient are left
    out.

    Args:
        model: with PWLUs.
        lr: of the weights.
        weight_decay: of the weights.
        lr_factor: how much faster PWLUs learn.
        norm_weight_decay: of the scale and shift of normalisation layers, which become a group of their own; default: that of
            the weights. With ReLU their size means little, as ReLU(c x) = c ReLU(x), but decay makes the inputs of a PWLU
            shrink away from its bounds: 0 keeps them there.
    """
    units = require_units("parameter_groups", model)
    of_units = {id(p) for unit in units.values() for p in unit.parameters()}
    groups = grouped(model, of_units, lr, weight_decay, lr_factor, norm_weight_decay)
    return [group | {"name": "pwlu" if group["name"] == "functions" else group["name"]} for group in groups]


def grouped(
    model: nn.Module, functions: set[int], lr: float, weight_decay: float, lr_factor: float, norm_weight_decay: float | None
) -> list[dict[str, Any]]:
    """The groups of :func:`parameter_groups`, with the ids of what learns functions: they may be of any activation."""
    norms = set() if norm_weight_decay is None else _norm_parameters(model)
    groups: dict[str, dict[str, Any]] = {
        "weights": {"params": [], "lr": lr, "weight_decay": weight_decay},
        "norms": {"params": [], "lr": lr, "weight_decay": norm_weight_decay},
        "functions": {"params": [], "lr": lr * lr_factor, "weight_decay": 0.0},
    }
    for p in model.parameters():
        if p.requires_grad:
            name = "functions" if id(p) in functions else "norms" if id(p) in norms else "weights"
            groups[name]["params"].append(p)
    return [group | {"name": name} for name, group in groups.items() if group["params"]]


def _norm_parameters(model: nn.Module) -> set[int]:
    """The ids of scales and shifts of normalisation layers: torch's, what inherits from them, and classes named ...Norm."""
    found = (m for m in model.modules() if isinstance(m, _NORMS) or type(m).__name__.endswith("Norm"))
    return {id(p) for module in found for p in module.parameters(recurse=False)}
