"""The functions of torch that are activations: their kinds, their arguments and the matching initial functions."""

import copy
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pwlu.baselines import PReLU
from pwlu.initial_functions import INITIAL_FUNCTIONS, InitialFunction, Slopes

PRELU_CLASSES = (nn.PReLU, PReLU)

# The kinds that convert_ replaces by default. The other kinds in ARGUMENTS are more often gates or outputs.
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
    "prelu": {"weight": None},
    "rrelu": {"lower": 1 / 8, "upper": 1 / 3, "training": False, "inplace": False},
    "softsign": {},
    "logsigmoid": {},
    "hardshrink": {"lambd": 0.5},
    "softshrink": {"lambd": 0.5},
    "tanhshrink": {},
    "threshold": {"threshold": 0.0, "value": 0.0, "inplace": False},
    "clamp": {"min": None, "max": None},
    "sigmoid": {},
    "tanh": {},
}
# Other names of these functions.
_ALIASES = {"log_sigmoid": "logsigmoid", "_threshold": "threshold", "clip": "clamp", "clamp_min": "clamp", "clamp_max": "clamp"}


class Activation(NamedTuple):
    """A call of an activation: its kind, its input, the matching initial function, and whether it works in place."""

    kind: str
    x: Tensor
    start: InitialFunction
    in_place: bool

    def apply(self) -> Tensor:
        """Return the result, out of place."""
        return self.start.function(self.x)


def recognise(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Activation | None:
    """Return the activation that a call of a torch function computes (F.relu, torch.relu, x.relu_(), ...), or None."""
    name = getattr(function, "__name__", "")
    kind = name.removesuffix("_")
    if kind == "clamp_max":
        args, kwargs = args[:1], {**dict(zip(("max",), args[1:], strict=False)), **kwargs}
    kind = _ALIASES.get(kind, kind)
    x = args[0] if args else kwargs.get("input")
    if kind not in ARGUMENTS or not isinstance(x, Tensor):
        return None
    given = dict(zip(ARGUMENTS[kind], args[1:], strict=False)) | {k: v for k, v in kwargs.items() if k in ARGUMENTS[kind]}
    in_place = name.endswith("_") or bool(given.pop("inplace", False))
    if kind == "prelu":
        return Activation(kind, x, InitialFunction(partial(F.prelu, weight=given["weight"]), name=kind), in_place)
    if kind == "clamp" and not all(v is None or isinstance(v, (int, float)) for v in given.values()):
        return None
    given.pop("training", None)  # treat rrelu as random in evaluation mode too
    special = {k: v for k, v in given.items() if v != ARGUMENTS[kind][k]}
    if kind == "hardtanh" and (special.get("min_val"), special.get("max_val")) == (0, 6):
        kind, special = "relu6", {}  # nn.ReLU6 calls hardtanh(0, 6)
    return Activation(kind, x, _initial_function(kind, *special.items()), in_place)


_WITHOUT_NAME = {  # kinds that are not in INITIAL_FUNCTIONS
    "hardshrink": InitialFunction(F.hardshrink, (), (1.0, 1.0), "hardshrink"),  # not continuous, so it has no kinks
    "rrelu": InitialFunction(partial(F.rrelu, training=True), (0.0,), name="rrelu"),
    "threshold": InitialFunction(partial(F.threshold, threshold=0.0, value=0.0), (0.0,), (0.0, 1.0), "threshold"),
}


@cache
def _initial_function(kind: str, *arguments: tuple[str, Any]) -> InitialFunction:
    """Return the initial function of a kind, with these arguments in place of the default ones."""
    special = dict(arguments)
    if kind == "clamp":
        return _clamp_function(special.get("min"), special.get("max"))
    known = INITIAL_FUNCTIONS.get(kind) or _WITHOUT_NAME[kind]
    if not special:
        return known
    function = partial(known.function, **special)
    name = f"{kind}({', '.join(f'{k}={v}' for k, v in special.items())})"
    kinks, slopes = known.kinks, known.slopes
    if kind == "leaky_relu":
        slopes = (float(special["negative_slope"]), 1.0)
    elif kind == "elu":
        kinks = (0.0,)  # the slopes at 0 are alpha and 1
    elif kind == "threshold":
        kinks = (float(special.get("threshold", 0.0)),)
    elif kind == "softshrink":
        kinks = (-float(special["lambd"]), float(special["lambd"]))
    elif kind == "hardtanh":
        kinks = (float(special.get("min_val", -1.0)), float(special.get("max_val", 1.0)))
    return InitialFunction(function, kinks, slopes, name)


def _clamp_function(low: float | None, high: float | None) -> InitialFunction:
    if low == 0 and high in (None, 6):
        return INITIAL_FUNCTIONS["relu6" if high else "relu"]
    slopes = float(low is None), float(high is None)
    kinks = tuple(float(limit) for limit in (low, high) if limit is not None)
    return InitialFunction(partial(torch.clamp, min=low, max=high), kinks, slopes, f"clamp({low}, {high})")


def prelu_function(weight: Tensor) -> InitialFunction:
    """Return the initial function that equals PReLU with these slopes, one per channel or one for all."""
    if weight.is_meta:
        return InitialFunction(partial(F.prelu, weight=weight), name="prelu")
    if len(weight) == 1:
        return _initial_function("leaky_relu", ("negative_slope", weight.item()))
    return InitialFunction(Slopes(weight), (0.0,), None, "prelu", len(weight))


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_QUICK_GELU = InitialFunction(_quick_gelu, (), (0.0, 1.0), "quick_gelu")
Recognised = tuple[str, InitialFunction]
# Kind and initial function of activations that a module may compute by a formula of its own.
WRITTEN_OUT: list[Recognised] = [
    *((kind, INITIAL_FUNCTIONS[kind]) for kind in ARGUMENTS if kind in INITIAL_FUNCTIONS),
    ("gelu", _initial_function("gelu", ("approximate", "tanh"))),
    ("gelu", _QUICK_GELU),
]


def recognise_module(module: nn.Module, kinds: Iterable[str | type[nn.Module]]) -> Recognised | None:
    """Return kind and initial function of a module whose class is one of `kinds`, or PReLU; None for other classes."""
    learned = prelu_function(module.weight) if isinstance(module, nn.PReLU) and type(module) in PRELU_CLASSES else None
    if kind := next((kind for kind in kinds if isinstance(kind, type) and isinstance(module, kind)), None):
        return kind.__name__, learned or InitialFunction(frozen_copy(module), name=type(module).__name__)
    return ("prelu", learned) if learned else None


def frozen_copy(module: nn.Module) -> nn.Module:
    """Return a copy that computes initial functions: in float64, on the CPU, in evaluation mode."""
    return copy.deepcopy(module).to("cpu", torch.float64).requires_grad_(False).eval()
