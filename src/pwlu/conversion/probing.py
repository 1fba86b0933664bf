"""Trying functions out: which activation a module computes that writes it out, and whether a unit can start as it."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pwlu.conversion.kinds import WRITTEN_OUT, Recognised
from pwlu.conversion.quiet import quiet


def stateless(module: nn.Module) -> bool:
    """Return whether neither a module nor its children have parameters or buffers."""
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


def refusal(function: Callable[[Tensor], Tensor]) -> str | None:
    """Why a PWLU cannot start as this function, in training or in evaluation mode; None if it can."""
    x = torch.linspace(-5, 5, 64, dtype=torch.float64, device="cpu").view(4, 16)
    module = function if isinstance(function, nn.Module) else None
    results = []
    try:
        with quiet():
            for training in (True, False):
                tried = copy.deepcopy(module).train(training) if module is not None else function
                before = copy.deepcopy(module.state_dict()) if module is not None else {}
                first, again, part = tried(x.clone()), tried(x.clone()), tried(x[:2, ::2].clone())
                after = tried.state_dict() if isinstance(tried, nn.Module) else {}
                if not isinstance(first, Tensor) or first.shape != x.shape:
                    return "does not return one number for each number"
                if not torch.equal(first, again) or any(not torch.equal(before[key], after[key]) for key in before):
                    return "is random, or keeps a state that changes"
                if not torch.allclose(first[:2, ::2], part, equal_nan=True):
                    return "is not computed element by element"
                results.append(first)
    except Exception as error:
        return f"cannot be computed on numbers alone ({type(error).__name__}: {error})"
    return None if torch.allclose(results[0], results[1], equal_nan=True) else "differs between training and evaluation mode"
