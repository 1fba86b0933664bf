"""Parameter groups for an optimizer: PWLUs get no weight decay, and their own learning rate."""

from typing import Any

from torch import nn

from pwlu.common import checks
from pwlu.units.module import require_units
from pwlu.units.squeeze import function_parameters

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)  # _NormBase: batch and instance norm


def parameter_groups(
    model: nn.Module,
    lr: float,
    *,
    weight_decay: float = 0.0,
    lr_factor: float = 1.0,
    norm_weight_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: PWLUs with learning rate ``lr * lr_factor`` and no weight decay, and the rest.

    Weight decay would pull heights and bounds towards zero, which does not make the function simpler. The small network of a
    :class:`pwlu.DynamicPWLU` is among the rest. Parameters with ``requires_grad=False`` are left out.

    Args:
        model: a model with PWLUs.
        lr: the learning rate of all other parameters.
        weight_decay: the weight decay of all other parameters. Default: 0.0.
        lr_factor: the learning rate of PWLUs divided by ``lr``. Default: 1.0.
        norm_weight_decay: the weight decay of the parameters of normalization layers, as a third group. Default: None, which
            puts them among the other parameters. Before a ReLU their scale hardly matters, because ReLU(c x) = c ReLU(x).
            Before a PWLU, weight decay shrinks the inputs until they no longer reach the bounds; 0 prevents this.

    Returns:
        A list of dicts with the keys ``params``, ``lr``, ``weight_decay`` and ``name``. The names are "weights", "norms" and
        "pwlu".

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: if it has no PWLUs, or a number is not finite or negative.

    Example::

        model = torch.nn.Sequential(torch.nn.Linear(4, 8), pwlu.PWLU(channels=8))
        optimizer = torch.optim.SGD(pwlu.parameter_groups(model, lr=0.1, weight_decay=1e-4), momentum=0.9)
    """
    units = require_units("parameter_groups", model)
    for name, value in (("lr", lr), ("weight_decay", weight_decay), ("lr_factor", lr_factor)):
        checks.check_rate("parameter_groups", name, value)
    if norm_weight_decay is not None:
        checks.check_rate("parameter_groups", "norm_weight_decay", norm_weight_decay)
    groups = split_parameters(model, function_parameters(units.values()), lr, weight_decay, lr_factor, norm_weight_decay)
    return [group | {"name": "pwlu" if group["name"] == "functions" else group["name"]} for group in groups]


def split_parameters(
    model: nn.Module, functions: set[int], lr: float, weight_decay: float, lr_factor: float, norm_weight_decay: float | None
) -> list[dict[str, Any]]:
    """Return the groups of :func:`parameter_groups` for any learnable activation.

    `functions` holds the ids of the activation parameters. Their group is named "functions".
    """
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
    """Return the ids of the parameters of normalization layers: PyTorch's, their subclasses, and classes named ``...Norm``."""
    found = (m for m in model.modules() if isinstance(m, _NORMS) or type(m).__name__.endswith("Norm"))
    return {id(p) for module in found for p in module.parameters(recurse=False)}
