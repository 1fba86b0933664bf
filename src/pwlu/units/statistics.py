"""Running statistics of the input of a PWLU in Phase I, over calls, gradient accumulation steps and processes.

Every forward pass in training mode adds count, mean and M2 of its input to a pool. Once per optimizer step, :func:`advance_`
merges the pools of all processes, updates the running statistics, and clears the pools:

    mu = 0.9 mu + 0.1 mean,   sigma = 0.9 sigma + 0.1 sqrt(M2/count)

The first update copies mean and standard deviation. A channel keeps its statistics if its pool is empty or not finite.
``dropped`` counts the pools that are not finite.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

MOMENTUM = 0.1
_FLOATING = ("running_mean", "running_std")
_COUNTS = ("updates", "dropped")


class InputStatistics(nn.Module):
    """The statistics of the input of one PWLU, collected in Phase I. All of them are in the state dict.

    Attributes:
        running_mean: running mean of each channel, (C,).
        running_std: running standard deviation of each channel, (C,).
        updates: the number of updates of each channel, (C,).
        dropped: how often the pool of each channel was not finite, (C,).
        steps: the number of steps of Phase I so far.
        realigned: whether Phase I has ended.
        phase: 0 without a :class:`pwlu.TwoPhase` controller, else 1 or 2.

    ``pool`` (3, C) is part of the extra state, not a buffer. Each rank has its own pool until they are merged, and
    DistributedDataParallel would overwrite buffers with those of rank 0.
    """

    running_mean: Tensor
    running_std: Tensor
    updates: Tensor
    dropped: Tensor
    steps: Tensor
    realigned: Tensor

    def __init__(self, channels: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        for name in _FLOATING:
            self.register_buffer(name, torch.zeros(channels, device=device, dtype=dtype))
        for name in _COUNTS:
            self.register_buffer(name, torch.zeros(channels, device=device, dtype=torch.int64))
        self.register_buffer("steps", torch.zeros((), device=device, dtype=torch.int64))
        self.register_buffer("realigned", torch.zeros((), device=device, dtype=torch.bool))
        self._pool = torch.zeros(3, channels, device=device, dtype=dtype)
        self.phase = 0
        self.loaded = False  # whether a controller has to read steps and realigned again

    @property
    def pool(self) -> Tensor:
        """Return count, mean and sum of squared deviations of the input since the last optimizer step, (3, C)."""
        device = self._buffers["running_mean"].device  # type: ignore[union-attr]  # faster than attribute access
        if self._pool.device != device:  # fully_shard and to_empty() move parameters and buffers, but not this tensor
            self._pool = torch.zeros_like(self._pool, device=device) if self._pool.is_meta else self._pool.to(device)
        return self._pool

    def is_unfinished(self) -> bool:
        """Return whether Phase I has started but not ended."""
        return not self.steps.is_meta and bool(self.steps) and not self.realigned

    @torch.no_grad()
    def reset(self) -> None:
        """Clear all statistics. A controller then starts Phase I again."""
        for state in (*self.buffers(), self.pool):
            state.zero_()
        self.loaded, self.phase = True, min(self.phase, 1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "InputStatistics":
        before = {name: getattr(self, name) for name in (*_FLOATING, "_pool")}
        super()._apply(fn, recurse)
        self._pool = fn(self._pool)
        # Move the statistics with the model, but keep them in float32: in 16 bits, updates by a tenth would be rounded away.
        for name, wide in before.items():
            moved = getattr(self, name)
            if moved.dtype in (torch.bfloat16, torch.float16):
                setattr(self, name, wide.to(moved.device, torch.float32))
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no controller to end Phase I.
        return {**super().__getstate__(), "phase": 0, "loaded": False}

    def get_extra_state(self) -> Tensor:
        """Return the pool, for the state dict."""
        return self.pool

    @torch.no_grad()
    def set_extra_state(self, state: Any) -> None:
        """Load the pool from a state dict."""
        if not isinstance(state, Tensor) or state.shape != self._pool.shape:
            found = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
            raise RuntimeError(
                f"size mismatch for the pool of a PWLU: {found} in the state dict, {tuple(self._pool.shape)} in the model. "
                "Convert the model with the same arguments as the saved one, then load the state dict"
            )
        if self._pool.is_meta:
            self._pool = torch.empty_like(self._pool, device=self.running_mean.device)
        self.pool.copy_(state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        found = any(key.startswith(prefix) for key in state_dict)
        if not found and self._at_start():
            return  # weights from before the conversion: the unit keeps its initial function
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.loaded |= found  # if not found, super() has listed the missing keys
        if found and self.phase and not self.realigned.is_meta:
            self.phase = 2 if self.realigned else 1

    def _at_start(self) -> bool:
        return not self.steps.is_meta and not self.steps


@torch.no_grad()
def advance_(statistics: Sequence[InputStatistics], group: "dist.ProcessGroup | None" = None) -> None:
    """Update the running statistics of all units once, and count the step.

    One all-reduce covers all units (one per device and dtype, if there are several). All ranks get bitwise equal results.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[InputStatistics]] = {}
    for each in statistics:
        mean: Any = each._buffers["running_mean"]
        alike.setdefault((mean.device, mean.dtype), []).append(each)
    for (device, _), together in alike.items():
        _advance(together, torch.float32 if device.type == "mps" else torch.float64, group)


def _advance(statistics: list[InputStatistics], wide: torch.dtype, group: "dist.ProcessGroup | None") -> None:
    # This runs at every step, for hundreds of units: use few operators and avoid attribute access on modules, which is slow.
    buffers: list[Any] = [s._buffers for s in statistics]
    pools = [s.pool for s in statistics]
    averages, counts = ([b[name] for name in names for b in buffers] for names in (_FLOATING, _COUNTS))
    mu, sigma = torch.cat(averages).to(wide).chunk(2)
    updates, dropped = torch.cat(counts).chunk(2)
    count, mean, m2 = _merge_over_ranks(torch.cat(pools, 1).to(wide), mu, group)
    finite = mean.isfinite() & m2.isfinite()
    good = finite & (count > 0)
    std = (m2 / count).sqrt()
    first = updates == 0
    mu = torch.where(good, torch.where(first, mean, (1 - MOMENTUM) * mu + MOMENTUM * mean), mu)
    sigma = torch.where(good, torch.where(first, std, (1 - MOMENTUM) * sigma + MOMENTUM * std), sigma)
    sizes = 2 * [pool.shape[1] for pool in pools]
    for targets, values in ((averages, (mu, sigma)), (counts, (updates + good, dropped + ~finite))):
        torch._foreach_copy_(targets, list(torch.cat(values).to(targets[0].dtype).split(sizes)))  # one dtype: one launch
    torch._foreach_add_([b["steps"] for b in buffers], 1)
    torch._foreach_zero_(pools)


def _merge_over_ranks(pools: Tensor, shift: Tensor, group: "dist.ProcessGroup | None") -> Tensor:
    """Merge the pools (3, C) of all ranks by an all-reduce of sums of deviations from `shift`, which is equal on all ranks.

    The sums are in float64, and `shift` is the running mean, so that cancellation is harmless.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1):
        return pools
    count, mean, m2 = pools
    distance = mean - shift
    sums = torch.stack([count, count * distance, m2 + count * distance * distance])
    dist.all_reduce(sums, group=group)
    count = sums[0]
    distance, square = sums[1:] / count.clamp(min=1)
    return torch.stack([count, shift + distance, count * (square - distance * distance).clamp(min=0)])
