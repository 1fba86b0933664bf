"""PWLUs that do not learn: for good, or for one step."""

from collections.abc import Iterable

from torch import nn

from pwlu.module import PWLU, units_of, weight_parameter


def freeze_(model: nn.Module, frozen: bool = True) -> list[str]:
    """Let no PWLU of the model learn any more (``frozen=False``: let them learn again); return their names.

    Gradients are taken away too, so that no optimizer goes on with them. DistributedDataParallel must be told anew which
    parameters learn: wrap the model after this.
    """
    units = units_of(model)
    for unit in units.values():
        unit.requires_grad_(not frozen)
        take_gradients([unit])
    return list(units)


def take_gradients(units: Iterable[PWLU]) -> None:
    """Remove the gradients of units, so that an optimizer leaves them as they are."""
    for unit in units:
        weight_parameter(unit).grad = None
