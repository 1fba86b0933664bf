"""The module :class:`PWLU`, and helpers that find, read and write the PWLUs of a model."""

import gc
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from pwlu import functional, ops, reference
from pwlu.common import checks
from pwlu.common.text import abbreviate
from pwlu.initial_functions import InitialFunction, find_initial_function, fit_bounds, initial_parameters
from pwlu.reference import Blocks
from pwlu.units.constraints import OWN_WEIGHT, Constraint, constrained, keep_constrained
from pwlu.units.deferred_norm import Deferred
from pwlu.units.sharding import full_values, gathered, write_parameter
from pwlu.units.statistics import InputStatistics
from pwlu.version import __version__, later_version


def block_view(name: str, shape: str) -> property:
    """Return a property whose value is a view of one block of the weight."""

    def get(unit: "PWLU") -> Tensor:
        view: Tensor = getattr(unit.blocks(), name)
        view.requires_grad_ = _refuse_to_freeze  # type: ignore[assignment,method-assign]  # the error of torch gives no hint
        return view

    def set(unit: "PWLU", value: Any) -> None:
        if not isinstance(value, Tensor) or value.data_ptr() != get(unit).data_ptr():  # `act.left -= 1` assigns the same view
            _refuse_to_assign(name)

    return property(get, set, doc=f"The block ``{name}`` of the weight, a view of shape {shape}.")


class PWLU(nn.Module):
    """Piecewise Linear Unit: a learnable piecewise linear activation, with one function per channel or one for all channels.

    See :func:`pwlu.functional.pwlu` for the formula. The input may have any shape. The output has the shape, dtype and memory
    layout of the input.

    The module has one parameter, ``weight`` (C (N + 5),). Its blocks are views of it: ``left`` (C,), ``right`` (C,),
    ``heights`` (C, N+1), ``left_slope`` (C,) and ``right_slope`` (C,). You can read them at any time. To change them, call
    :meth:`assign`, or write to them in place under ``torch.no_grad()``. The weight has one dimension, so that training code
    that decays only parameters with two or more dimensions does not decay it.

    Args:
        channels: the number of functions C, one per entry of dimension ``channel_dim``. Default: 1, one function for all
            elements.
        intervals: the number of intervals N. Default: 16; the paper recommends 8 to 16.
        bounds: the left and right bound. If the initial function has a kink (ReLU at 0), the bounds move until a knot lies on
            it. They move by up to half an interval, or by one interval if there are two kinks, as in ReLU6. Default: (-3, 3).
        init: the initial function: a name such as ``"relu"``, ``"silu"`` or ``"identity"`` (see
            ``pwlu.initial_functions.INITIAL_FUNCTIONS``), a function from tensor to tensor, or a
            ``pwlu.initial_functions.InitialFunction``. Default: ``"relu"``.
        channel_dim: the channel dimension of the input. Default: 1, for images (B, C, H, W); use -1 for sequences (B, T, C).
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Attributes:
        statistics: the running statistics of the input, for :class:`pwlu.TwoPhase`.
        phase: 0 without a :class:`pwlu.TwoPhase`, else the phase, 1 or 2. The phase does not change the
            output.
        constraint: what :func:`pwlu.constrain_` demands of the functions, or None.

    Raises:
        ValueError: if an argument is not valid, or no knots can lie on the kinks of the initial function.

    Example::

        act = pwlu.PWLU(channels=64)
        y = act(torch.randn(8, 64, 32, 32))  # equals relu(x) before training
    """

    _layout: Any = reference  # the module that states the blocks of the weight: Blocks, pack, unpack, size
    _version = 1  # format of the state dict (torch stores it in the metadata) and of the pickle
    gradient_scale: Tensor | None
    left = block_view("left", "(C,)")
    right = block_view("right", "(C,)")
    heights = block_view("heights", "(C, N+1)")
    left_slope = block_view("left_slope", "(C,)")
    right_slope = block_view("right_slope", "(C,)")

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
        self.channels = checks.check_integer(
            "PWLU", "channels", channels, "the size of channel_dim, or 1 for one function for all elements", 1
        )
        self.intervals = checks.check_integer("PWLU", "intervals", intervals, "8 to 16 work well", 1)
        self.channel_dim = checks.check_integer("PWLU", "channel_dim", channel_dim, "1 for images, -1 for the last dimension")
        self.init = init
        self.constraint: Constraint | None = None
        start = find_initial_function(init)
        if start.channels not in (1, self.channels):
            raise ValueError(
                f"PWLU: init={start.name!r} has {start.channels} functions and needs channels={start.channels}, "
                f"not channels={self.channels}"
            )
        self.bounds = fit_bounds(_check_bounds(bounds, dtype), self.intervals, start.kinks, start.name)
        self.weight = nn.Parameter(torch.empty(self.channels * self._layout.size(self.intervals), device=device, dtype=dtype))
        self.statistics = InputStatistics(self.channels, self.weight.device, reference.compute_dtype(self.weight))
        self.register_buffer("gradient_scale", None, persistent=False)
        self.reset_parameters()

    @property
    def phase(self) -> int:
        """Return the phase of the learning method, 1 or 2; 0 without a :class:`pwlu.TwoPhase`."""
        return self.statistics.phase

    @phase.setter
    def phase(self, value: int) -> None:
        self.statistics.phase = value

    def initial_weight(self) -> Tensor:
        """Return the initial weight, in float64 on the CPU; see :meth:`initial_blocks`."""
        return reference.pack(*self.initial_blocks())

    def initial_blocks(self) -> Blocks:
        """Return ``init`` between ``bounds`` with the constraint applied, as the blocks of a PWLU in float64 on the CPU."""
        left, right = (torch.full((self.channels,), b, dtype=torch.float64, device="cpu") for b in self.bounds)
        blocks = Blocks(left, right, *initial_parameters(find_initial_function(self.init), left, right, self.intervals))
        if self.constraint is None:
            return blocks
        weight = constrained(reference.pack(*blocks).to(self.weight.dtype), self.intervals, self.constraint)
        return reference.unpack(weight.double(), self.intervals)

    def reset_parameters(self) -> None:
        """Reset the weight to ``init`` between ``bounds``, and clear the statistics."""
        write_weight(self, self.initial_weight())
        self.statistics.reset()

    def blocks(self) -> Any:
        """Return the blocks of the weight.

        Returns:
            left, right, heights, left_slope and right_slope, as views of the weight. If the weight is sharded, they are views
            of the gathered weight.
        """
        return self._layout.unpack(gathered(self.weight), self.intervals)

    @torch.no_grad()
    def assign(self, **blocks: Tensor) -> None:
        """Write blocks of the weight in place. This also works for a sharded weight.

        Args:
            **blocks: new values by name, among left, right, heights, left_slope and right_slope.

        Raises:
            TypeError: if there is no block of a name, or a value is not a tensor.
            ValueError: if a value has the wrong shape.

        Example::

            act = pwlu.PWLU(channels=2)
            act.assign(left_slope=torch.tensor([0.1, 0.2]))
        """
        old = self.blocks()
        self._check_names("assign", blocks)
        for name, value in blocks.items():
            expected = tuple(getattr(old, name).shape)
            if not isinstance(value, Tensor):
                raise TypeError(f"PWLU.assign: {name} must be a tensor, not {value!r}. Write torch.full({expected}, number)")
            if value.shape != expected:
                raise ValueError(
                    f"PWLU.assign: {name} must have the shape {expected}, not {tuple(value.shape)}. To give all channels the "
                    f"same values, write value.expand{expected}"
                )
        write_weight(self, self._layout.pack(*(value.to(old.left) for value in old._replace(**blocks))))

    def scale_gradients(self, **factors: float) -> None:
        """Multiply the gradient of each block by a factor.

        A factor of 0 freezes the block. With SGD, any other factor scales its learning rate. If other PWLUs share the weight,
        call this method on each of them, because each scales only the gradients that it computes. Like ``requires_grad``, the
        factors are not saved in the state dict. Calling this method without arguments removes them. They do not affect weight
        decay: use :func:`pwlu.parameter_groups`, which turns weight decay off for PWLUs.

        Args:
            **factors: factors by name, among those of :meth:`assign`. Default: 1.0 for every block.

        Raises:
            TypeError: if there is no block of a name.

        Example::

            act = pwlu.PWLU(channels=64)
            act.scale_gradients(left=0.0, right=0.0)  # learn heights and slopes, keep the bounds
        """
        self._check_names("scale_gradients", factors)
        size = self.channels * self._layout.size(self.intervals)
        scale = torch.ones(size, device=self.weight.device, dtype=self.weight.dtype)
        blocks = self._layout.unpack(scale, self.intervals)
        for name, factor in factors.items():
            getattr(blocks, name).fill_(float(factor))
        self.gradient_scale = None if all(factor == 1.0 for factor in factors.values()) else scale

    def _check_names(self, caller: str, blocks: dict[str, Any]) -> None:
        known = self._layout.Blocks._fields
        if unknown := blocks.keys() - set(known):
            raise TypeError(
                f"PWLU.{caller}: {', '.join(sorted(unknown))} is not a block of the weight. The blocks are {', '.join(known)}"
            )

    def effective_weight(self) -> Tensor:
        """Return the weight, with its gradient scaled as set by :meth:`scale_gradients`."""
        weight: Any = self._parameters.get("weight")  # faster than attribute access
        if weight is None:
            weight = self.weight  # computed: parametrized or pruned
            if self.constraint is not None:
                raise RuntimeError(
                    f"PWLU: the weight is computed (parametrized or pruned), so it cannot be kept {self.constraint}. Remove "
                    "the constraint before you parametrize or prune: pwlu.constrain_(act)"
                )
        scale = self._buffers["gradient_scale"]
        return weight if scale is None else torch.lerp(weight.detach(), weight, scale)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) and isinstance(x, Deferred):
            return x.activate(self)
        weight = self.effective_weight()
        statistics: Any = self._modules["statistics"]  # faster than attribute access
        if statistics.phase == 1 and self.training and isinstance(x, Tensor):
            return ops.observe(x, weight, self.intervals, self.channel_dim, statistics.pool)
        return functional.packed(x, weight, self.intervals, self.channel_dim)

    def extra_repr(self) -> str:
        left, right = self.bounds
        return (
            f"channels={self.channels}, intervals={self.intervals}, bounds=({left:g}, {right:g}), "
            f"init={find_initial_function(self.init).name!r}, channel_dim={self.channel_dim}"
            + (f", constraint={str(self.constraint)!r}" if self.constraint is not None else "")
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"  # one line, without the submodule `statistics`

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name in self._layout.Blocks._fields:
            _refuse_to_assign(name)
        if (pruned := name.removesuffix("_orig")) in self._layout.Blocks._fields:
            _refuse_to_compute(pruned)
        super().register_parameter(name, param)

    @property
    def parametrizations(self) -> nn.Module:
        """Return the parametrizations that torch.nn.utils.parametrize registered.

        register_parametrization reads this attribute before it checks the name. So this is the place to raise a helpful error
        for the name of a block.
        """
        caller = sys._getframe(1).f_back
        if caller is not None and caller.f_code is parametrize.register_parametrization.__code__:
            name = str(caller.f_locals.get("tensor_name"))
            if name in self._layout.Blocks._fields:
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
        where = prefix or "the state dict"
        if (number := local_metadata.get("version", self._version)) > self._version:
            error_msgs.append(later_version(where, formats=(number, self._version)))
            return
        if any(prefix + name in state_dict for name in ("inv_step", "slopes", "offsets", "knot_weight")):
            error_msgs.append(
                f"{where} holds a fused PWLU, but the PWLU of this model is not fused. The tables do not determine the "
                "parameters: load the weights saved before pwlu.fuse_, or fuse this model first: pwlu.fuse_(model)."
            )
            return
        if all(prefix + name in state_dict for name in Blocks._fields):
            error_msgs.append(
                f"{where} was saved by an earlier version, in which a PWLU had five parameters; now it has one. Write "
                f"state['{prefix}weight'] = pwlu.reference.pack(*(state.pop('{prefix}' + name) for name in "
                "pwlu.reference.Blocks._fields)), rename running_mean, running_std, updates, dropped, steps and realigned to "
                "statistics.running_mean, ..., and rename pool to statistics._extra_state."
            )
            return
        if not any(key.startswith(prefix) for key in state_dict) and self._at_start():
            return  # weights from before the conversion: the unit keeps its initial function
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_written_by": (self._version, __version__)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        number, release = state.pop("_written_by", (1, ""))
        if number > self._version:
            raise RuntimeError(later_version("PWLU: the pickle", release, (number, self._version)))
        super().__setstate__({"constraint": None} | state)
        if self.constraint is not None:  # a copy keeps it too
            keep_constrained(self)

    def _at_start(self) -> bool:
        if self.weight.is_meta:
            return False
        return not self.statistics.steps and torch.equal(
            full_values(self.weight).cpu(), self.initial_weight().to(self.weight.dtype)
        )


def units_of(model: nn.Module) -> dict[str, PWLU]:
    """Return all PWLUs of the model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PWLU)}


def unwrapped(model: Any) -> Any:
    """Return the model without the wrappers of DistributedDataParallel and torch.compile."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
    return model


def require_model(caller: str, model: Any) -> None:
    """Check that the argument is a module. `caller` is the function that the error names."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{caller}: model must be a torch.nn.Module, not {type(model).__name__}. Write pwlu.{caller}(model, ...)"
        )


def require_units(caller: str, model: Any, refused: Mapping[type[PWLU], str] | None = None) -> dict[str, PWLU]:
    """Return all PWLUs of the model by name; raise ValueError if there are none.

    Args:
        caller: the function that errors name.
        model: the model.
        refused: kinds of PWLUs that raise TypeError, and the reason, which ends the sentence. Default: None.
    """
    require_model(caller, model)
    units = units_of(model)
    if not units:
        tables = ("inv_step", "knot_weight")  # importing FusedPWLU here would be a cycle
        fused = any(hasattr(module, name) for module in model.modules() for name in tables)
        first = "" if caller == "fuse_" else f": call pwlu.{caller} before pwlu.fuse_(model)"
        hint = f"It is already fused{first}" if fused else "Convert it first: pwlu.convert_(model, sample)"
        raise ValueError(f"{caller}: {type(model).__name__} has no PWLU. {hint}")
    for name, unit in units.items():
        for kind, why in (refused or {}).items():
            if isinstance(unit, kind):
                raise TypeError(f"{caller}: {name or 'the model'} is a {kind.__name__}, {why}")
    return units


def require_values(caller: str, units: Mapping[str, PWLU]) -> None:
    """Raise ValueError if units are on the meta device."""
    if empty := [name for name, unit in units.items() if unit.weight.is_meta]:
        raise ValueError(f"{caller}: {abbreviate(empty)} is on the meta device and has no values. Load the weights first")


def require_own_weights(caller: str, units: dict[str, PWLU], why: str, modules: Mapping[str, nn.Module] | None = None) -> None:
    """Raise ValueError if a unit shares its weight with another of the modules.

    Args:
        caller: the function that errors name.
        units: the units.
        why: the reason, which ends the sentence.
        modules: all modules that may share. Default: the units.
    """
    owners = {id(weight_parameter(unit)): name for name, unit in reversed(units.items())}
    for name, module in (modules or units).items():
        for parameter in module._parameters.values():
            if (other := owners.get(id(parameter), name)) != name:
                raise ValueError(
                    f"{caller}: {other} and {name or 'the model'} share one weight, but {why}. Share the module instead, or "
                    f"{OWN_WEIGHT}"
                )


def controlled(units: Mapping[str, PWLU]) -> list[str]:
    """Return the names of the units that have a :class:`pwlu.TwoPhase`.

    A TwoPhase whose optimizer was deleted may wait for garbage collection, so collect garbage first.
    """
    if any(unit.phase for unit in units.values()):
        gc.collect()
    return [name for name, unit in units.items() if unit.phase]


def exact_blocks(unit: PWLU) -> Any:
    """Return the blocks of the weight of a unit in float64 on the CPU, detached from autograd."""
    return unit._layout.Blocks(*(block.detach().to("cpu", torch.float64) for block in unit.blocks()))


def weight_parameter(unit: PWLU) -> Any:
    """Return the weight of a unit; raise RuntimeError if it is computed, because then it cannot be written."""
    parameter = unit._parameters.get("weight")
    if parameter is None:
        raise RuntimeError(
            "PWLU: the weight is computed (parametrized or pruned), so pwlu cannot write it. Make it a parameter again: "
            "torch.nn.utils.parametrize.remove_parametrizations(act, 'weight') or torch.nn.utils.prune.remove(act, 'weight')"
        )
    return parameter


def write_weight(unit: PWLU, value: Tensor) -> None:
    """Write the weight of a unit in place. If it is sharded, each rank writes its own shard."""
    write_parameter(weight_parameter(unit), value)


def apply_constraint(unit: PWLU) -> None:
    """Make the functions of a unit satisfy its constraint, if it has one. Optimizer steps have a hook of their own for this."""
    if unit.constraint is not None:
        write_weight(unit, constrained(full_values(weight_parameter(unit)), unit.intervals, unit.constraint))


def _refuse_to_freeze(requires_grad: bool = True) -> None:
    raise RuntimeError(
        "a block of a PWLU is a view of its weight and cannot be frozen separately. Write act.scale_gradients(left=0.0) to "
        "freeze one block, or act.requires_grad_(False) to freeze all of them"
    )


def _refuse_to_assign(name: str) -> None:
    raise AttributeError(
        f"{name} is a block of the weight and cannot be replaced. Write act.assign({name}=value), or change it in place: "
        f"with torch.no_grad(): act.{name}.copy_(value)"
    )


def _refuse_to_compute(name: str) -> None:
    raise ValueError(
        f"{name} is a block of the weight and cannot be parametrized or pruned separately. Parametrize 'weight' with a module "
        "that changes this block, using pwlu.reference.unpack and pwlu.reference.pack. To scale or stop its gradient, write "
        f"act.scale_gradients({name}=0.0)"
    )


def _check_bounds(bounds: Any, dtype: torch.dtype | None) -> tuple[float, float]:
    try:
        left, right = (float(b) for b in bounds)
    except (TypeError, ValueError):
        raise ValueError(f"PWLU: bounds must be two numbers such as (-3.0, 3.0), not {bounds!r}") from None
    stored, largest = torch.finfo(dtype or torch.get_default_dtype()), max(abs(left), abs(right))
    if not (stored.eps * largest < right - left <= stored.max and largest <= stored.max):  # not a tensor: it could be fake
        raise ValueError(
            f"PWLU: bounds must be finite with left < right in {stored.dtype}, and so must be their distance, such as "
            f"(-3.0, 3.0), not ({left!r}, {right!r})"
        )
    return left, right
