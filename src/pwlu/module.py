"""The module: a learnable activation."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from pwlu import checks, functional, ops, reference
from pwlu.deferred_norm import Deferred
from pwlu.initial_functions import InitialFunction, find_initial_function, fit_bounds, initial_parameters
from pwlu.reference import Blocks
from pwlu.statistics import InputStatistics
from pwlu.version import __version__


def _block(name: str, shape: str) -> property:
    """Return a property that is a view of one block of the weight."""

    def get(unit: "PWLU") -> Tensor:
        view: Tensor = getattr(unit.blocks(), name)
        view.requires_grad_ = _refuse_to_freeze  # type: ignore[assignment,method-assign]  # torch's own message would not help
        return view

    def set(unit: "PWLU", value: Any) -> None:
        if not isinstance(value, Tensor) or value.data_ptr() != get(unit).data_ptr():  # `act.left -= 1` gives it back
            _refuse_to_assign(name)

    return property(get, set, doc=f"The block {name} of the weight, a view of shape {shape}.")


class PWLU(nn.Module):
    r"""Piecewise Linear Unit: a learnable piecewise linear activation, one function per channel or one for all.

    See :func:`pwlu.functional.pwlu` for the formula.

    Args:
        channels: C functions, one for each entry of dimension ``channel_dim``; 1 means one function for everything.
        intervals: N; the paper recommends 8 to 16.
        bounds: where the N intervals begin and end. Where the start has a kink (ReLU at 0), they move a little, by up to half
            an interval (one, if there are two kinks as in ReLU6), so that a knot lies on it.
        init: the function to start as: a name such as ``"relu"``, ``"silu"``, ``"identity"`` (see
            ``pwlu.initial_functions.INITIAL_FUNCTIONS``), a function from tensor to tensor, or a
            ``pwlu.initial_functions.InitialFunction``.
        channel_dim: 1 for images (B, C, H, W), -1 for sequences (B, T, C).

    There is one parameter, ``weight`` (C (N + 5),). It has one dimension, so that the usual rule for weight decay ("two or more
    dimensions") leaves it alone. Its blocks are views: ``left`` (C,), ``right`` (C,), ``heights`` (C, N+1), ``left_slope``
    (C,), ``right_slope`` (C,). Read them at any time; write to them in place under ``torch.no_grad()``, or by :meth:`assign`.

    ``statistics`` is the state of the learning method (:class:`pwlu.TwoPhase`), see
    :class:`pwlu.statistics.InputStatistics`. ``phase`` is 0 without a controller, else 1 or 2; the function computed is that of
    the weight in every phase.

    Shape: any; output as input, in dtype and memory layout too.

    Example::

        act = pwlu.PWLU(channels=64)
        y = act(torch.randn(8, 64, 32, 32))  # equals relu(x) until it is trained
    """

    _version = 1  # format of the state dict (torch stores it in the metadata) and of the pickle
    gradient_scale: Tensor | None
    left = _block("left", "(C,)")
    right = _block("right", "(C,)")
    heights = _block("heights", "(C, N+1)")
    left_slope = _block("left_slope", "(C,)")
    right_slope = _block("right_slope", "(C,)")

    def __init__(
        self,
        channels: int = 1,
        intervals: int = 16,
        bounds: tuple[float, float] = (-3.0, 3.0),
        *,
        init: str | Callable[[Tensor], Tensor] | InitialFunction = "relu",
        channel_dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels = checks.whole_number(
            "PWLU", "channels", channels, "1 for one function for everything, or the size of channel_dim", 1
        )
        self.intervals = checks.whole_number("PWLU", "intervals", intervals, "8 to 16 work well", 1)
        self.channel_dim = checks.whole_number("PWLU", "channel_dim", channel_dim, "1 for images, -1 for the last")
        self.init = init
        start = find_initial_function(init)
        if start.channels not in (1, self.channels):
            raise ValueError(f"PWLU: init={start.name!r} has {start.channels} functions, for channels={start.channels} alone")
        self.bounds = fit_bounds(_check_bounds(bounds, dtype), self.intervals, start.kinks, start.name)
        self.weight = nn.Parameter(torch.empty(self.channels * (self.intervals + 5), device=device, dtype=dtype))
        self.statistics = InputStatistics(self.channels, self.weight.device, reference.compute_dtype(self.weight))
        self.register_buffer("gradient_scale", None, persistent=False)
        self.reset_parameters()

    @property
    def phase(self) -> int:
        """0 without a controller, else the phase of the learning method, 1 or 2."""
        return self.statistics.phase

    @phase.setter
    def phase(self, value: int) -> None:
        self.statistics.phase = value

    def initial_weight(self) -> Tensor:
        """Return the weight at the start, ``init`` between ``bounds``, in float64 on the CPU."""
        left, right = (torch.full((self.channels,), b, dtype=torch.float64, device="cpu") for b in self.bounds)
        return reference.pack(left, right, *initial_parameters(find_initial_function(self.init), left, right, self.intervals))

    def reset_parameters(self) -> None:
        """Go back to the start: ``init`` between ``bounds``, and no statistics."""
        write_weight(self, self.initial_weight())
        self.statistics.reset()

    def blocks(self) -> Blocks:
        """Return left, right, heights, left_slope and right_slope: views of the weight, or of all of it if it is sharded."""
        return reference.unpack(gathered(self.weight), self.intervals)

    @torch.no_grad()
    def assign(self, **blocks: Tensor) -> None:
        """Write blocks of the weight, by name: ``act.assign(left=..., right=...)``. Works for a sharded weight, too."""
        old = self.blocks()
        if unknown := blocks.keys() - set(Blocks._fields):
            raise TypeError(f"PWLU.assign: there is no block {', '.join(sorted(unknown))}, only {', '.join(Blocks._fields)}")
        for name, value in blocks.items():
            if value.shape != getattr(old, name).shape:
                expected = tuple(getattr(old, name).shape)
                raise ValueError(f"PWLU.assign: {name} must have the shape {expected}, not {tuple(value.shape)}")
        write_weight(self, reference.pack(*(value.to(old.left) for value in old._replace(**blocks))))

    def scale_gradients(
        self,
        *,
        left: float = 1.0,
        right: float = 1.0,
        heights: float = 1.0,
        left_slope: float = 1.0,
        right_slope: float = 1.0,
    ) -> None:
        """Multiply the gradient of each block by a number: 0 freezes it, and with SGD another number scales its learning rate.

        Like ``requires_grad``, this is a setting and not in the state dict. All 1, the default, removes it. Weight decay of the
        optimizer is not affected: use :func:`pwlu.parameter_groups`, which turns it off for PWLUs.
        """
        factors = {"left": left, "right": right, "heights": heights, "left_slope": left_slope, "right_slope": right_slope}
        scale = torch.ones(self.channels * (self.intervals + 5), device=self.weight.device, dtype=self.weight.dtype)
        blocks = reference.unpack(scale, self.intervals)
        for name, factor in factors.items():
            getattr(blocks, name).fill_(float(factor))
        self.gradient_scale = None if all(factor == 1.0 for factor in factors.values()) else scale

    def effective_weight(self) -> Tensor:
        """Return the weight, with the gradient that :meth:`scale_gradients` asks for."""
        weight: Any = self._parameters.get("weight")  # by the way of attributes it would take longer
        if weight is None:
            weight = self.weight  # computed: parametrized or pruned
        scale = self._buffers["gradient_scale"]
        return weight if scale is None else torch.lerp(weight.detach(), weight, scale)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) and isinstance(x, Deferred):
            return x.activate(self)
        weight = self.effective_weight()
        statistics: Any = self._modules["statistics"]  # by the way of attributes it would take longer
        if statistics.phase == 1 and self.training and isinstance(x, Tensor):
            return ops.observe(x, weight, self.intervals, self.channel_dim, statistics.pool)
        return functional.packed(x, weight, self.intervals, self.channel_dim)

    def extra_repr(self) -> str:
        left, right = self.bounds
        return (
            f"channels={self.channels}, intervals={self.intervals}, bounds=({left:g}, {right:g}), "
            f"init={find_initial_function(self.init).name!r}, channel_dim={self.channel_dim}"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"  # in one line, without the statistics

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name in Blocks._fields:
            _refuse_to_assign(name)
        if (pruned := name.removesuffix("_orig")) in Blocks._fields:
            _refuse_to_compute(pruned)
        super().register_parameter(name, param)

    @property
    def parametrizations(self) -> nn.Module:
        """What torch.nn.utils.parametrize has put here. It asks for this before it finds that a block is no parameter."""
        asking = sys._getframe(1).f_back
        if asking is not None and asking.f_code is parametrize.register_parametrization.__code__:
            name = asking.f_locals.get("tensor_name")
            if name in Blocks._fields:
                _refuse_to_compute(name)
        found = self._modules.get("parametrizations")
        if found is None:
            raise AttributeError(f"{type(self).__name__} has no attribute 'parametrizations'")
        return found

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        where = prefix or "the state"
        if (number := local_metadata.get("version", self._version)) > self._version:
            error_msgs.append(f"{where} was written {_by_a_later_version(number, self._version)}")
            return
        if any(prefix + name in state_dict for name in ("inv_step", "slopes", "offsets")):
            error_msgs.append(
                f"{where} holds a fused PWLU, this model an unfused one. The parameters cannot be had back "
                "from the tables: load the weights saved before pwlu.fuse_, or fuse this model first: pwlu.fuse_(model)."
            )
            return
        if all(prefix + name in state_dict for name in Blocks._fields):
            error_msgs.append(
                f"{where} holds the five parameters of an earlier PWLU, which now has one. Write state['{prefix}weight'] = "
                f"pwlu.reference.pack(*(state.pop('{prefix}' + name) for name in pwlu.reference.Blocks._fields)), rename "
                "running_mean, running_std, updates, dropped, steps and realigned to statistics.running_mean, ..., and pool "
                "to statistics._extra_state."
            )
            return
        if not any(key.startswith(prefix) for key in state_dict) and self._at_start():
            return  # weights from before the conversion: the unit stays as it is, at its start
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_written_by": (self._version, __version__)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        number, release = state.pop("_written_by", (1, ""))
        if number > self._version:
            raise RuntimeError(f"PWLU: the pickle was written {_by_a_later_version(number, self._version, f', {release}')}")
        super().__setstate__(state)

    def _at_start(self) -> bool:
        if self.weight.is_meta:
            return False
        return not self.statistics.steps and torch.equal(
            full_values(self.weight).cpu(), self.initial_weight().to(self.weight.dtype)
        )


def _by_a_later_version(number: int, known: int, release: str = "") -> str:
    return (
        f"by a later version of pwlu{release}, in format {number} of a PWLU. This is pwlu {__version__}, which reads formats "
        f"up to {known}: update it"
    )


def units_of(model: nn.Module) -> dict[str, PWLU]:
    """Return every PWLU of the model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PWLU)}


def unwrapped(model: Any) -> Any:
    """Return the model inside DistributedDataParallel and torch.compile."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
    return model


def require_model(caller: str, model: Any) -> None:
    """Raise TypeError unless it is a module. `caller`: the function of pwlu that errors speak for."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{caller}: expected a model, a torch.nn.Module, not {type(model).__name__}: write pwlu.{caller}(model, ...)"
        )


def require_units(caller: str, model: Any) -> dict[str, PWLU]:
    """Return every PWLU of the model, by name; raise an error that says what to do first where there is none."""
    require_model(caller, model)
    units = units_of(model)
    if not units:
        fused = any(hasattr(module, "inv_step") for module in model.modules())  # the class is of a file that imports this one
        first = "" if caller == "fuse_" else f": call pwlu.{caller} before pwlu.fuse_(model)"
        hint = f"It is fused already{first}" if fused else "Convert it first: pwlu.convert_(model, sample)"
        raise ValueError(f"{caller}: {type(model).__name__} has no PWLU. {hint}")
    return units


def gathered(parameter: Tensor) -> Tensor:
    """Return all of a parameter that may be sharded over processes (as fully_shard does it), with its gradient."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def full_values(parameter: Tensor) -> Tensor:
    """Return its values alone."""
    return gathered(parameter.detach())


def weight_parameter(unit: PWLU) -> Any:
    """Return the weight of a unit; raise RuntimeError if it is no parameter, which cannot be written."""
    parameter = unit._parameters.get("weight")
    if parameter is None:
        raise RuntimeError(
            "PWLU: the weight is computed (parametrized or pruned), so it cannot be written, as realignment has to. Make it "
            "plain first: torch.nn.utils.parametrize.remove_parametrizations(act, 'weight') or "
            "torch.nn.utils.prune.remove(act, 'weight')"
        )
    return parameter


@torch.no_grad()
def write_weight(unit: PWLU, value: Tensor) -> None:
    """Write the weight of a unit in place, each process its part of a sharded one."""
    parameter = weight_parameter(unit)
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import distribute_tensor

        value = value.to(parameter.device, parameter.dtype)
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


def _refuse_to_freeze(requires_grad: bool = True) -> None:
    raise RuntimeError(
        "a block of a PWLU is a view of its weight and cannot be frozen on its own. Write act.scale_gradients(left=0.0) to "
        "hold one block still, or act.requires_grad_(False) for all of them"
    )


def _refuse_to_assign(name: str) -> None:
    raise AttributeError(
        f"{name} is a block of the weight and cannot be replaced. Write act.assign({name}=value), or change it in place: "
        f"with torch.no_grad(): act.{name}.copy_(value)"
    )


def _refuse_to_compute(name: str) -> None:
    raise ValueError(
        f"{name} is a block of the weight and cannot be parametrized or pruned on its own. Parametrize 'weight', with a module "
        f"that changes that block: pwlu.reference.unpack and pack take it apart and together. To scale its gradient or hold it "
        f"still: act.scale_gradients({name}=0.0)"
    )


def _check_bounds(bounds: Any, dtype: torch.dtype | None) -> tuple[float, float]:
    try:
        left, right = (float(b) for b in bounds)
    except (TypeError, ValueError):
        raise ValueError(f"PWLU: bounds must be two numbers such as (-3.0, 3.0), not {bounds!r}") from None
    stored, largest = torch.finfo(dtype or torch.get_default_dtype()), max(abs(left), abs(right))
    if not (stored.eps * largest < right - left <= stored.max and largest <= stored.max):  # no tensor: it may be a fake one
        raise ValueError(f"PWLU: bounds must be finite with left < right, such as (-3.0, 3.0), not ({left:g}, {right:g})")
    return left, right
