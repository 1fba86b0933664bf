"""Activations by name, to compare PWLU with: those of PyTorch, those of the paper's comparison, and dynamic ones."""

from collections.abc import Callable

from torch import Tensor, nn

from pwlu.baselines.acon import ACONC, MetaACON
from pwlu.baselines.apl import APL
from pwlu.baselines.dynamic_relu import DyReLU, SEReLU
from pwlu.baselines.frelu import FReLU
from pwlu.baselines.pau import PAU
from pwlu.baselines.relu import PReLU, ReLU
from pwlu.initial_functions import InitialFunction
from pwlu.units.dynamic import DynamicPWLU
from pwlu.units.module import PWLU
from pwlu.units.nonuniform import NonUniformPWLU

__all__ = [
    "ACONC",
    "APL",
    "NAMES",
    "PAU",
    "DyReLU",
    "FReLU",
    "MetaACON",
    "PReLU",
    "ReLU",
    "SEReLU",
    "activation",
    "check_name",
]

_Init = str | Callable[[Tensor], Tensor] | InitialFunction

_MAKERS: dict[str, Callable[[int, int, _Init], nn.Module]] = {
    "relu": lambda channels, channel_dim, start: nn.ReLU(),
    "swish": lambda channels, channel_dim, start: nn.SiLU(),
    "silu": lambda channels, channel_dim, start: nn.SiLU(),
    "gelu": lambda channels, channel_dim, start: nn.GELU(),
    "mish": lambda channels, channel_dim, start: nn.Mish(),
    "hardswish": lambda channels, channel_dim, start: nn.Hardswish(),
    "prelu": lambda channels, channel_dim, start: PReLU(channels, channel_dim),
    "apl": lambda channels, channel_dim, start: APL(channels, 3, channel_dim),
    "apl5": lambda channels, channel_dim, start: APL(channels, 5, channel_dim),
    "pau": lambda channels, channel_dim, start: PAU(start),
    "frelu": lambda channels, channel_dim, start: FReLU(channels, channel_dim),
    "aconc": lambda channels, channel_dim, start: ACONC(channels, channel_dim),
    "metaacon": lambda channels, channel_dim, start: MetaACON(channels, channel_dim),
    "dyrelu": lambda channels, channel_dim, start: DyReLU(channels, channel_dim),
    "se_relu": lambda channels, channel_dim, start: SEReLU(channels, channel_dim),
    "pwlu": lambda channels, channel_dim, start: PWLU(channels, channel_dim=channel_dim),
    "dynamic_pwlu": lambda channels, channel_dim, start: DynamicPWLU(channels, channel_dim=channel_dim),
    "nonuniform_pwlu": lambda channels, channel_dim, start: NonUniformPWLU(channels, channel_dim=channel_dim),
}
NAMES = tuple(_MAKERS)


def activation(name: str, channels: int = 1, channel_dim: int = 1, start: _Init = "leaky_relu") -> nn.Module:
    """Create an activation by name.

    Args:
        name: without parameters: "relu", "swish" or "silu", "gelu", "mish", "hardswish". With parameters per channel: "prelu",
            "apl" (S = 3, as in the paper), "apl5", "frelu", "aconc", "pwlu", "nonuniform_pwlu". With one function for all
            channels: "pau". With functions that depend on the sample: "metaacon", "dyrelu", "se_relu", "dynamic_pwlu".
        channels: the number of channels of the input. 1 means one function for all channels, except for "frelu". Default: 1.
        channel_dim: the channel dimension of the input. Default: 1, for images; use -1 for sequences.
        start: the initial function of "pau": a name, a function, or an ``InitialFunction``. The other activations have fixed
            initial functions, which their classes describe. Default: "leaky_relu".

    Returns:
        A new module.

    Raises:
        ValueError: if the name is not known.

    Example::

        act = pwlu.activation("apl", channels=64)
        y = act(torch.randn(8, 64, 32, 32))
    """
    check_name(name)
    return _MAKERS[name](channels, channel_dim, start)


def check_name(name: str) -> None:
    """Check that :func:`activation` knows the name; raise ValueError if not."""
    if name not in _MAKERS:
        raise ValueError(f"activation: {name!r} is not known. Write one of {', '.join(NAMES)}")
