"""Freeze PWLUs: permanently, or for one optimizer step."""

from collections.abc import Iterable

from torch import nn

from pwlu.units.module import PWLU, units_of


def freeze_(model: nn.Module, frozen: bool = True) -> list[str]:
    """Freeze or unfreeze all PWLUs of a model, in place.

    Existing gradients are removed, so that no optimizer applies them. DistributedDataParallel reads ``requires_grad`` when it
    wraps a model: call this function before you wrap it.

    Args:
        model: the model.
        frozen: True to freeze, False to unfreeze. Default: True.

    Returns:
        The names of the PWLUs; an empty list if there are none.

    Example::

        model = torch.nn.Sequential(torch.nn.Linear(4, 8), pwlu.PWLU(channels=8))
        pwlu.freeze_(model)  # ['1']
    """
    units = units_of(model)
    for unit in units.values():
        unit.requires_grad_(not frozen)
        remove_gradients([unit])
    return list(units)


def remove_gradients(units: Iterable[PWLU]) -> None:
    """Set the gradients of units to None, so that an optimizer skips them."""
    for unit in units:
        for parameter in unit.parameters():
            parameter.grad = None
