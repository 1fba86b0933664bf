"""Modules that write an activation out, such as ``x * torch.sigmoid(x)``: they are known by their values."""

import copy

import torch
from torch import Tensor, nn

from pwlu.conversion.kinds import WRITTEN_OUT, Recognised
from pwlu.conversion.quiet import quiet


def stateless(module: nn.Module) -> bool:
    """Whether neither a module nor its children have parameters or buffers."""
    return next(module.parameters(), None) is None and next(module.buffers(), None) is None


def known_functions(model: nn.Module) -> dict[str, Recognised]:
    """Return kind and start of the modules of others than torch that compute an activation we know, by name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[nn.Module, Recognised | None] = {}
    for name, module in modules.items():
        if name and not type(module).__module__.startswith("torch.") and module not in found and stateless(module):
            found[module] = _known(module)
    return {name: recognised for name, module in modules.items() if (recognised := found.get(module)) is not None}


def _known(module: nn.Module) -> Recognised | None:
    x = torch.linspace(-10, 10, 401, dtype=torch.float64, device="cpu").view(1, 401, 1, 1)
    try:
        with quiet(), torch.device("cpu"):
            # Some compute in float32 whatever comes.
            values: Tensor = copy.deepcopy(module).eval().forward(x.clone()).double()
            if values.shape != x.shape:
                return None
            return next(
                (kind for kind in WRITTEN_OUT if torch.allclose(values, kind[1].function(x), rtol=1e-5, atol=1e-5)), None
            )
    except Exception:  # it takes something else than one tensor
        return None
