"""The module: a learnable activation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pwlu import functional, ops, reference
from pwlu.starts import Start, find_start, fit_bounds, start_parameters

_MOST_PENDING = 64


class PWLU(nn.Module):
    r"""Piecewise Linear Unit: a learnable piecewise linear activation, one function a channel or one for all.

    See :func:`pwlu.functional.pwlu` for the formula.

    Args:
        channels: C functions, one for each entry of dimension ``channel_dim``; 1 means one function for everything.
        intervals: N; the paper recommends 8 to 16.
        bounds: where the N intervals begin and end. Where the start has a kink (ReLU at 0), they move a little, by up to half
            an interval (one, if there are two kinks as in ReLU6), so that a knot lies on it.
        init: the function to start as: a name such as ``"relu"``, ``"silu"``, ``"identity"`` (see
            ``pwlu.starts.STARTS``), a function from tensor to tensor, or a ``pwlu.starts.Start``.
        channel_dim: 1 for images (B, C, H, W), -1 for sequences (B, T, C).

    Parameters: ``left`` (C,), ``right`` (C,), ``heights`` (C, N+1), ``left_slope`` (C,), ``right_slope`` (C,).

    State for the learning method (:class:`pwlu.TwoPhase`), always in the state dict: ``running_mean`` and ``running_std`` (C,)
    of the input; ``updates`` and ``dropped`` (C,), how often they were updated or found not to be finite; ``steps``, of Phase
    I; ``realigned``; and ``pool`` (3, C), count, mean and sum of squared deviations since the last step.
    ``phase`` is 0 without a controller, else 1 or 2; the function computed is that of the parameters in every phase.

    Shape: any; output as input, in dtype and memory layout too.

    Example::

        act = pwlu.PWLU(channels=64)
        y = act(torch.randn(8, 64, 32, 32))  # equals relu(x) until it is trained
    """

    running_mean: Tensor
    running_std: Tensor
    updates: Tensor
    dropped: Tensor
    steps: Tensor
    realigned: Tensor

    def __init__(
        self,
        channels: int = 1,
        intervals: int = 16,
        bounds: tuple[float, float] = (-3.0, 3.0),
        init: str | Callable[[Tensor], Tensor] | Start = "relu",
        channel_dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels = functional.whole_number(
            "PWLU", "channels", channels, "1 for one function for everything, or the size of channel_dim", 1
        )
        self.intervals = functional.whole_number("PWLU", "intervals", intervals, "8 to 16 work well", 1)
        self.channel_dim = functional.whole_number("PWLU", "channel_dim", channel_dim, "1 for images, -1 for the last")
        self.init = init
        start = find_start(init)
        self.bounds = fit_bounds(_check_bounds(bounds, dtype), self.intervals, start.kinks, start.name)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.left = nn.Parameter(torch.empty(self.channels, **options))
        self.right = nn.Parameter(torch.empty(self.channels, **options))
        self.heights = nn.Parameter(torch.empty(self.channels, self.intervals + 1, **options))
        self.left_slope = nn.Parameter(torch.empty(self.channels, **options))
        self.right_slope = nn.Parameter(torch.empty(self.channels, **options))
        self.phase = 0
        self.loaded = False  # a controller that has counted steps must look again
        device, wide = self.left.device, reference.compute_dtype(self.left)
        for name in ("running_mean", "running_std"):
            self.register_buffer(name, torch.empty(self.channels, device=device, dtype=wide))
        for name in ("updates", "dropped"):
            self.register_buffer(name, torch.empty(self.channels, device=device, dtype=torch.int64))
        self.register_buffer("steps", torch.empty((), device=device, dtype=torch.int64))
        self.register_buffer("realigned", torch.empty((), device=device, dtype=torch.bool))
        # In the state dict like a buffer, but not registered as one: every process has its own until they are merged, and
        # DistributedDataParallel would overwrite all of them with that of the first.
        self._pool = torch.empty(3, self.channels, device=device, dtype=wide)
        self._pending: list[list[Tensor]] = []  # moments not yet added to it: one step merges those of all units at once
        self.reset_parameters()

    def start_parameters(self) -> tuple[Tensor, ...]:
        """The parameters at the start, ``init`` between ``bounds``, in float64 on the CPU."""
        left, right = (torch.full((self.channels,), b, dtype=torch.float64, device="cpu") for b in self.bounds)
        return left, right, *start_parameters(find_start(self.init), left, right, self.intervals)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the start: ``init`` between ``bounds``, and no statistics."""
        for parameter, value in zip(self.unit_parameters(), self.start_parameters(), strict=True):
            write(parameter, value)
        for state in (*self.buffers(recurse=False), self.pool):
            state.zero_()
        self.loaded, self.phase = True, min(self.phase, 1)  # a controller begins anew with it

    @property
    def pool(self) -> Tensor:
        """Count, mean and sum of squared deviations of the input since the last step of the optimizer: (3, C)."""
        for moments in self._pending:  # not by ops.pool, which does nothing while a backward pass is under way
            self._pool.copy_(reference.merge(self._pool, *moments))
        self._pending.clear()
        return self._pool

    def unit_parameters(self) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter, nn.Parameter, nn.Parameter]:
        """left, right, heights, left_slope, right_slope: the order in which functions take them."""
        own: dict[str, Any] = self._parameters  # by the way of attributes it would take microseconds
        try:
            return own["left"], own["right"], own["heights"], own["left_slope"], own["right_slope"]
        except KeyError:  # a parametrization, say, makes attributes of them
            return self.left, self.right, self.heights, self.left_slope, self.right_slope

    def forward(self, x: Tensor) -> Tensor:
        parameters = (*self.unit_parameters(), self.channel_dim)
        if self.phase == 1 and self.training and not isinstance(x, torch.fx.Proxy):
            if self._pool.device != self.running_mean.device:  # fully_shard moves parameters and buffers, one by one
                self._pool = self._pool.to(self.running_mean.device)
            y, *moments = functional.observe(x, *parameters)
            self._keep(moments)
            return y
        return functional.pwlu(x, *parameters)

    def _keep(self, moments: list[Tensor]) -> None:
        """Where every run of the code is a run of this line, moments wait for the step; a graph must hold the sum itself."""
        transformed = torch._C._are_functorch_transforms_active()  # a moment may then be a batch of them
        if torch.compiler.is_compiling() or transformed or len(self._pending) >= _MOST_PENDING or _captured(moments[0]):
            ops.pool(self._pool, *moments)
        elif not ops.run_again() and type(moments[0]) is Tensor:  # not a fake one
            self._pending.append(moments)

    def extra_repr(self) -> str:
        left, right = self.bounds
        return (
            f"channels={self.channels}, intervals={self.intervals}, bounds=({left:g}, {right:g}), "
            f"init={find_start(self.init).name!r}, channel_dim={self.channel_dim}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PWLU":
        before = {"running_mean": self.running_mean, "running_std": self.running_std, "_pool": self.pool}
        super()._apply(fn, recurse)
        self._pool = fn(self._pool)
        # moved with the model, but not rounded to 16 bits with it: steps of a tenth would vanish
        for name, wide in before.items():
            moved = getattr(self, name)
            if moved.dtype in (torch.bfloat16, torch.float16):
                setattr(self, name, wide.to(moved.device, reference.compute_dtype(moved)))
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no controller, which would let it out of Phase I.
        return {**super().__getstate__(), "phase": 0, "loaded": False, "_pool": self.pool, "_pending": []}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "pool"] = self.pool

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
        if any(prefix + name in state_dict for name in ("inv_step", "slopes", "offsets")):
            error_msgs.append(
                f"{prefix or 'the state'} holds a fused PWLU, this model an unfused one. The parameters cannot be had back "
                "from the tables: load the weights saved before pwlu.fuse_, or fuse this model first: pwlu.fuse_(model)."
            )
            return
        absent = not any(key.startswith(prefix) for key in state_dict)
        if absent and self._at_start():
            return  # weights from before the conversion: the unit stays as it is, at its start
        pool = state_dict.get(prefix + "pool")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if absent:
            return  # a part of a model: all that is missing has been listed
        if pool is None:
            self.pool.zero_()
        else:
            unexpected_keys[:] = [key for key in unexpected_keys if key != prefix + "pool"]
            if pool.shape != self.pool.shape:
                error_msgs.append(
                    f"size mismatch for {prefix}pool: {tuple(pool.shape)} in the state, {tuple(self.pool.shape)} here."
                )
            elif local_metadata.get("assign_to_params_buffers", False):
                self._pool = pool.detach()
            else:
                self.pool.copy_(pool)
        self.loaded = True
        if self.phase and not self.realigned.is_meta:
            self.phase = 2 if self.realigned else 1

    def _at_start(self) -> bool:
        if self.heights.is_meta:
            return False
        pairs = zip(self.unit_parameters(), self.start_parameters(), strict=True)
        return not self.steps and all(torch.equal(whole(p).cpu(), value.to(p.dtype)) for p, value in pairs)


def units_of(model: nn.Module) -> dict[str, PWLU]:
    """Every PWLU of the model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PWLU)}


def require_model(caller: str, model: Any) -> None:
    """TypeError unless it is a module. `caller`: the function of pwlu that errors speak for."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{caller}: expected a model, a torch.nn.Module, not {type(model).__name__}: write pwlu.{caller}(model, ...)"
        )


def require_units(caller: str, model: Any) -> dict[str, PWLU]:
    """Every PWLU of the model, by name; an error that says what to do first where there is none."""
    require_model(caller, model)
    units = units_of(model)
    if not units:
        fused = any(hasattr(module, "inv_step") for module in model.modules())  # the class is of a file that imports this one
        first = f"it is fused: call pwlu.{caller} before pwlu.fuse_(model)"
        hint = first if fused else "convert it first: pwlu.convert_(model, sample)"
        raise ValueError(f"{caller}: {type(model).__name__} has no PWLU; {hint}")
    return units


def _captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def gathered(parameter: Tensor) -> Tensor:
    """All of a parameter that may be split over processes (as fully_shard does it), with its gradient."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def whole(parameter: Tensor) -> Tensor:
    """Its values alone."""
    return gathered(parameter.detach())


def write(parameter: Any, value: Tensor) -> None:
    """In place, so that whoever holds the parameter keeps it; where it is split over processes, each writes its part."""
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import distribute_tensor

        value = value.to(parameter.device, parameter.dtype)
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


def _check_bounds(bounds: Any, dtype: torch.dtype | None) -> tuple[float, float]:
    try:
        left, right = (float(b) for b in bounds)
    except (TypeError, ValueError):
        raise ValueError(f"PWLU: bounds must be two numbers such as (-3.0, 3.0), not {bounds!r}") from None
    ends = torch.tensor([left, right], dtype=dtype, device="cpu")  # as they will be stored
    if not (ends.diff().isfinite().item() and ends[0] < ends[1]):
        raise ValueError(f"PWLU: bounds must be finite with left < right, such as (-3.0, 3.0), not ({left:g}, {right:g})")
    return left, right
