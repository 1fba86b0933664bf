"""Which functions of torch are activations: their kinds, their arguments, and the start that equals each."""

import copy
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pwlu.starts import STARTS, Start

# What convert_ replaces unless told otherwise. The rest of ARGUMENTS serve as gates and outputs more often than as activations.
DEFAULT_KINDS = ("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "hardswish")

# Arguments after the input, in order, with their defaults.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "relu": {"inplace": False},
    "relu6": {"inplace": False},
    "leaky_relu": {"negative_slope": 0.01, "inplace": False},
    "elu": {"alpha": 1.0, "inplace": False},
    "selu": {"inplace": False},
    "celu": {"alpha": 1.0, "inplace": False},
    "gelu": {"approximate": "none"},
    "silu": {"inplace": False},
    "mish": {"inplace": False},
    "hardswish": {"inplace": False},
    "hardtanh": {"min_val": -1.0, "max_val": 1.0, "inplace": False},
    "hardsigmoid": {"inplace": False},
    "softplus": {"beta": 1.0, "threshold": 20.0},
    "sigmoid": {},
    "tanh": {},
}


class Activation(NamedTuple):
    """A call of an activation: its kind, its input, the start that equals it, and whether it writes into its input."""

    kind: str
    x: Tensor
    start: Start
    in_place: bool

    def apply(self) -> Tensor:
        """The result, never in place."""
        return self.start.function(self.x)


def recognise(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Activation | None:
    """The activation that this call of a torch function is, if it is one: F.relu, torch.relu, x.relu(), x.relu_(), ..."""
    name = getattr(function, "__name__", "")
    kind = name.removesuffix("_")
    x = args[0] if args else kwargs.get("input")
    if kind not in ARGUMENTS or not isinstance(x, Tensor):
        return None
    given = dict(zip(ARGUMENTS[kind], args[1:], strict=False)) | {k: v for k, v in kwargs.items() if k in ARGUMENTS[kind]}
    in_place = name.endswith("_") or bool(given.pop("inplace", False))
    special = {k: v for k, v in given.items() if v != ARGUMENTS[kind][k]}
    if kind == "hardtanh" and (special.get("min_val"), special.get("max_val")) == (0, 6):
        kind, special = "relu6", {}  # that is how nn.ReLU6 says it
    return Activation(kind, x, _start(kind, *special.items()), in_place)


@cache
def _start(kind: str, *arguments: tuple[str, Any]) -> Start:
    """The start of that kind, with other arguments than the default ones if there are any."""
    known = STARTS[kind]
    if not arguments:
        return known
    special = dict(arguments)
    function = partial(getattr(F, kind), **special)
    name = f"{kind}({', '.join(f'{k}={v}' for k, v in special.items())})"
    kinks, slopes = known.kinks, known.slopes
    if kind == "leaky_relu":
        slopes = (float(special["negative_slope"]), 1.0)
    elif kind == "elu":
        kinks = (0.0,)  # its slopes on either side of 0 are alpha and 1
    elif kind == "hardtanh":
        kinks = (float(special.get("min_val", -1.0)), float(special.get("max_val", 1.0)))
    return Start(function, kinks, slopes, name)


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_QUICK_GELU = Start(_quick_gelu, (), (0.0, 1.0), "quick_gelu")
Recognised = tuple[str, Start]
# Kind and start of what modules write out.
WRITTEN_OUT: list[Recognised] = [
    *((kind, STARTS[kind]) for kind in ARGUMENTS),
    ("gelu", _start("gelu", ("approximate", "tanh"))),
    ("gelu", _QUICK_GELU),
]


def recognise_module(module: nn.Module, kinds: Iterable[str | type[nn.Module]]) -> Recognised | None:
    """Kind and start of a module that is an activation because its class is one of `kinds`."""
    if kind := next((kind for kind in kinds if isinstance(kind, type) and isinstance(module, kind)), None):
        return kind.__name__, Start(copy.copy(module), name=type(module).__name__)  # before it is watched
    return None
