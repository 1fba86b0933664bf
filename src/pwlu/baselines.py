"""Activations to compare with, by name."""

from collections.abc import Callable

from torch import nn

from pwlu.module import PWLU

_MAKERS: dict[str, Callable[[int], nn.Module]] = {
    "relu": lambda channels: nn.ReLU(),
    "swish": lambda channels: nn.SiLU(),
    "silu": lambda channels: nn.SiLU(),
    "gelu": lambda channels: nn.GELU(),
    "hardswish": lambda channels: nn.Hardswish(),
    "pwlu": PWLU,
}


def activation(name: str, channels: int = 1) -> nn.Module:
    """The activation of that name for an input with so many channels."""
    if name not in _MAKERS:
        raise ValueError(f"activation: {name!r} is not known. Write one of {', '.join(_MAKERS)}")
    return _MAKERS[name](channels)
