"""Insert new modules in place of activations, and restore the original activations."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pwlu.conversion import rewrite
from pwlu.conversion.tracing import Call, full_name, stateless_leaf, unshare
from pwlu.units.deferred_norm import DeferredNorm, stop_deferring_
from pwlu.units.module import require_model

_REPLACED = "_pwlu_replaced"  # in the owner's __dict__: the original activation by child name; None for a function call
_SHARED = "_pwlu_shared"  # in the parent's __dict__: the original by child name, for a module registered in several places
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


class OriginalActivation(nn.Module):
    """Computes the original activation in a trial run. The values must be right, because control flow may depend on them."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.function = call.start.function if call.module is None else model.get_submodule(call.module)

    def forward(self, x: Tensor) -> Tensor:
        """Return the original activation of x."""
        return self.function(x)


def insert_(model: nn.Module, new: Mapping[str, tuple[nn.Module, rewrite.Edit | None]]) -> None:
    """Insert modules by name. With an edit, a rewritten call uses the module; without one, it replaces a registered module."""
    places = {name: name.rpartition(".") for name in new}
    rewritten = {model.get_submodule(places[name][0]) for name, (_, edit) in new.items() if edit is not None}
    for parent, key, shared in unshare(model, lambda module: module in rewritten and stateless_leaf(module)):
        parent.__dict__.setdefault(_SHARED, {}).setdefault(key, shared)
    for name, (module, edit) in new.items():
        path, _, key = places[name]
        owner = model.get_submodule(path)
        old = owner._modules.get(key)
        if old is not None and not isinstance(module, OriginalActivation):  # keep its hooks: their handles still remove them
            module.__dict__.update({key: old.__dict__[key] for key in _HOOKS if old.__dict__.get(key) not in (None, {})})
        owner.__dict__.setdefault(_REPLACED, {}).setdefault(key, old)
        owner._modules[key] = module.train(owner.training)
        if edit is not None:
            rewrite.rewrite_(owner, edit)
        _disable_fast_path(model, path)


def inserted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that :func:`convert_` inserted into the model, by name."""
    return {
        full_name(name, key): owner._modules[key]
        for name, owner in model.named_modules()
        for key in owner.__dict__.get(_REPLACED, {})
        if owner._modules.get(key) is not None
    }


def _disable_fast_path(model: nn.Module, name: str) -> None:
    """Disable the fused inference kernel of torch's transformer layers, which has its own activation."""
    while True:
        module = model.get_submodule(name)
        for cls, key, value in (
            (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
            (nn.TransformerEncoder, "use_nested_tensor", False),
        ):
            if isinstance(module, cls) and hasattr(module, key):
                module.__dict__.setdefault(_REPLACED, {}).setdefault(key, getattr(module, key))
                setattr(module, key, value)
        if not name:
            return
        name = name.rpartition(".")[0]


def restore_(model: nn.Module) -> list[str]:
    """Put the activations back that :func:`convert_` replaced, in place. Norms that were fused with them run separately again.

    Args:
        model: a converted model.

    Returns:
        The names of the activations that were removed.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: if the model was not converted, or was wrapped after the conversion.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        >>> report = pwlu.convert_(model, torch.randn(2, 4))
        >>> pwlu.restore_(model)
        ['1']
    """
    require_model("restore_", model)
    owners = [(name, module) for name, module in model.named_modules() if _REPLACED in module.__dict__]
    if not owners:
        raise ValueError(f"restore_: {type(model).__name__} was not converted by pwlu.convert_, so there is nothing to restore")
    for name, module in owners:
        if hasattr(type(module), "_pwlu_edits") and "_pwlu_edits" not in vars(type(module)):
            raise ValueError(
                f"restore_: {name or 'the model'} was wrapped after the conversion (fully_shard?). Restore before wrapping"
            )
    removed = []
    for name, module in owners:
        for key, old in module.__dict__.pop(_REPLACED).items():
            if key not in module._modules:  # an attribute, not a child
                setattr(module, key, old)
                continue
            removed.append(full_name(name, key))
            if old is None:
                delattr(module, key)
            else:
                module._modules[key] = old.train(module.training)
        module.__class__ = rewrite.original_class(type(module))
    for module in list(model.modules()):
        for key, shared in module.__dict__.pop(_SHARED, {}).items():
            module._modules[key] = shared
    if any(_REPLACED in module.__dict__ for module in model.modules()):  # the restored modules may have been converted too
        removed += restore_(model)
    left = set(model.modules())
    norms: list[Any] = [module for module in left if isinstance(module, DeferredNorm)]
    for norm in norms:
        if not left.issuperset(norm.units):
            stop_deferring_(norm)
    return removed
