"""Activations to compare PWLU with, by name: those of torch, and the learnable ones of the paper's comparison."""

from collections.abc import Callable

from torch import Tensor, nn

from pwlu.baselines.apl import APL
from pwlu.baselines.frelu import FReLU
from pwlu.baselines.pau import PAU
from pwlu.baselines.prelu import PReLU
from pwlu.baselines.relu import ReLU
from pwlu.initial_functions import InitialFunction
from pwlu.module import PWLU

__all__ = ["APL", "NAMES", "PAU", "FReLU", "PReLU", "ReLU", "activation", "check_name"]

_Init = str | Callable[[Tensor], Tensor] | InitialFunction

_MAKERS: dict[str, Callable[[int, int, _Init], nn.Module]] = {
    "relu": lambda channels, channel_dim, start: nn.ReLU(),
    "swish": lambda channels, channel_dim, start: nn.SiLU(),
    "silu": lambda channels, channel_dim, start: nn.SiLU(),
    "gelu": lambda channels, channel_dim, start: nn.GELU(),
    "hardswish": lambda channels, channel_dim, start: nn.Hardswish(),
    "prelu": lambda channels, channel_dim, start: PReLU(channels, channel_dim),
    "apl": lambda channels, channel_dim, start: APL(channels, 3, channel_dim),
    "apl5": lambda channels, channel_dim, start: APL(channels, 5, channel_dim),
    "pau": lambda channels, channel_dim, start: PAU(start),
    "frelu": lambda channels, channel_dim, start: FReLU(channels, channel_dim),
    "pwlu": lambda channels, channel_dim, start: PWLU(channels, channel_dim=channel_dim),
}
NAMES = tuple(_MAKERS)


def activation(name: str, channels: int = 1, channel_dim: int = 1, start: _Init = "leaky_relu") -> nn.Module:
    """The activation of that name for an input with so many channels.

    Args:
        name: relu, swish (or silu), gelu, hardswish; prelu, apl (S = 3, as the paper has it), apl5, frelu and pwlu, which have
            parameters for each channel; or pau, which has one function for all of them.
        channels: 1 stands for one function for everything, except for frelu.
        channel_dim: where the channels are: 1 in images, -1 in sequences.
        start: the function that pau begins as. The others have starts of their own, which their classes describe.
    """
    check_name(name)
    return _MAKERS[name](channels, channel_dim, start)


def check_name(name: str) -> None:
    """Raise ValueError unless :func:`activation` knows the name."""
    if name not in _MAKERS:
        raise ValueError(f"activation: {name!r} is not known. Write one of {', '.join(NAMES)}")
