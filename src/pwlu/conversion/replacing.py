"""New modules in the place of activations: put in, named, and taken out again."""

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from pwlu.conversion import rewrite
from pwlu.conversion.conversion_report import Site
from pwlu.conversion.sites import Found
from pwlu.conversion.tracing import Call, stateless_leaf, unshare

_REPLACED = "_pwlu_replaced"  # what stood there, by child, in the owner's __dict__; None for a call of a function
_SHARED = "_pwlu_shared"  # likewise, where one module without state stood in several places
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


class _StandIn(nn.Module):
    """Computes what stood there: the course of a model may depend on values."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.function = call.start.function if call.module is None else model.get_submodule(call.module)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def apply(model: nn.Module, founds: Sequence[Found], trial: bool = False) -> None:
    """Put the new activations in (for a trial, stand-ins) and rewrite the calls."""
    wanted = [found for found in founds if found.wanted]
    rewritten = {model.get_submodule(found.owner) for found in wanted if found.edit is not None}
    for parent, key, shared in unshare(model, lambda module: module in rewritten and stateless_leaf(module)):
        parent.__dict__.setdefault(_SHARED, {}).setdefault(key, shared)
    modules = [_StandIn(model, found.calls[0]) if trial or found.module is None else found.module for found in wanted]
    for found, new in zip(wanted, modules, strict=True):
        owner = model.get_submodule(found.owner)
        old = owner._modules.get(found.key)
        if old is not None and not trial:  # its hooks go on, and their handles still remove them
            new.__dict__.update({key: old.__dict__[key] for key in _HOOKS if key in old.__dict__})
        owner.__dict__.setdefault(_REPLACED, {}).setdefault(found.key, old)
        owner._modules[found.key] = new.train(owner.training)
        if found.edit is not None:
            rewrite.rewrite_(owner, found.edit)
        _leave_fast_path(model, found.owner)


def replaced(model: nn.Module) -> dict[str, nn.Module]:
    """Return what :func:`convert_` put into the model, by name."""
    return {
        f"{name}.{key}" if name else key: owner._modules[key]
        for name, owner in model.named_modules()
        for key in owner.__dict__.get(_REPLACED, {})
        if owner._modules.get(key) is not None
    }


def put_(model: nn.Module, new: Mapping[str, tuple[nn.Module, rewrite.Edit | None]]) -> None:
    """Put known modules in by name, each with the call to be rewritten for it, as :func:`convert_` did to another model."""
    founds = []
    for name, (module, edit) in new.items():
        owner, _, key = name.rpartition(".")
        founds.append(Found(Site(name, "", "", action="converted"), [], Counter(), owner, key, edit, module))
    apply(model, founds)


def _leave_fast_path(model: nn.Module, name: str) -> None:
    """torch's transformer layers have, for evaluation, one kernel for everything, with an activation of its own."""
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
    """Put the activations back that :func:`convert_` replaced; return the names of what was taken out."""
    owners = [(name, module) for name, module in model.named_modules() if _REPLACED in module.__dict__]
    if not owners:
        raise ValueError(f"restore_: {type(model).__name__} has nothing that pwlu.convert_ put there")
    for name, module in owners:
        if hasattr(type(module), "_pwlu_edits") and "_pwlu_edits" not in vars(type(module)):
            raise ValueError(
                f"restore_: {name or 'the model'} was wrapped after the conversion (fully_shard?). Restore it before that"
            )
    removed = []
    for name, module in owners:
        for key, old in module.__dict__.pop(_REPLACED).items():
            if key not in module._modules:  # an attribute, not a child
                setattr(module, key, old)
                continue
            removed.append(f"{name}.{key}" if name else key)
            if old is None:
                delattr(module, key)
            else:
                module._modules[key] = old.train(module.training)
        module.__class__ = rewrite.original(type(module))
    for module in list(model.modules()):
        for key, shared in module.__dict__.pop(_SHARED, {}).items():
            module._modules[key] = shared
    if any(_REPLACED in module.__dict__ for module in model.modules()):  # in what was put back
        removed += restore_(model)
    return removed
