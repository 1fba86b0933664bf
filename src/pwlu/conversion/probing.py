"""Evaluate functions on test inputs, to find which activation a module computes and whether a PWLU can start as it."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pwlu.conversion.kinds import WRITTEN_OUT, Recognised
from pwlu.conversion.quiet import quiet


def stateless(module: nn.Module) -> bool:
    """Return whether a module and its children have no parameters and no buffers."""
    return next(module.parameters(), None) is None and next(module.buffers(), None) is None


def known_functions(model: nn.Module) -> dict[str, Recognised]:
    """Return kind and initial function, by name, of modules outside torch that compute a known activation."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[nn.Module, Recognised | None] = {}
    for name, module in modules.items():
        if name and not type(module).__module__.startswith("torch.") and module not in found and stateless(module):
            found[module] = _match_known(module)
    return {name: recognised for name, module in modules.items() if (recognised := found.get(module)) is not None}


def _match_known(module: nn.Module) -> Recognised | None:
    x = torch.linspace(-10, 10, 401, dtype=torch.float64, device="cpu").view(1, 401, 1, 1)
    try:
        with quiet(), torch.device("cpu"):
            # Convert the result, because some modules always compute in float32.
            values: Tensor = copy.deepcopy(module).eval().forward(x.clone()).double()
            if values.shape != x.shape:
                return None
            return next(
                (kind for kind in WRITTEN_OUT if torch.allclose(values, kind[1].function(x), rtol=1e-5, atol=1e-5)), None
            )
    except Exception:  # it does not take a single tensor
        return None


def why_unusable(function: Callable[[Tensor], Tensor]) -> str | None:
    """Return why a PWLU cannot start as this function, in training or evaluation mode; None if it can."""
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
                    return "does not return a tensor of the shape of its input"
                if not torch.equal(first, again) or any(not torch.equal(before[key], after[key]) for key in before):
                    return "is random, or changes its state"
                if not torch.allclose(first[:2, ::2], part, equal_nan=True):
                    return "is not an elementwise function"
                results.append(first)
    except Exception as error:
        return f"cannot be computed on a tensor alone ({type(error).__name__}: {error})"
    return None if torch.allclose(results[0], results[1], equal_nan=True) else "differs between training and evaluation mode"
