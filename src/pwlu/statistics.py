"""Statistics of the input of a unit in Phase I, over calls, accumulation steps and processes.

Every training forward adds count, mean and M2 to the pool. Once per step of the optimizer, :func:`advance_` merges the pools
over processes, moves the running averages by one step, and empties the pools:

    mu = 0.9 mu + 0.1 mean,   sigma = 0.9 sigma + 0.1 sqrt(M2/count)

The first step takes mean and standard deviation as they are. A channel whose pool is not finite keeps its averages, and that is
counted; one whose pool is empty keeps them as well.
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
    """Hold what Phase I measures of a unit's input. Everything here is in the state dict.

    Buffers: ``running_mean`` and ``running_std`` (C,); ``updates`` and ``dropped`` (C,), how often they were updated or found
    not to be finite; ``steps``, of Phase I; ``realigned``. Extra state: ``pool`` (3, C), count, mean and sum of squared
    deviations since the last step of the optimizer. The pool is no buffer, because every process has its own until they are
    merged, and DistributedDataParallel would overwrite all of them with that of the first.

    ``phase`` is 0 without a controller, else 1 or 2.
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
        self.loaded = False  # a controller that has counted steps must look again

    @property
    def pool(self) -> Tensor:
        """Count, mean and sum of squared deviations of the input since the last step of the optimizer: (3, C)."""
        device = self._buffers["running_mean"].device  # type: ignore[union-attr]  # through attributes it would take longer
        if self._pool.device != device:  # fully_shard moves parameters and buffers, one by one; others give them memory
            self._pool = torch.zeros_like(self._pool, device=device) if self._pool.is_meta else self._pool.to(device)
        return self._pool

    def is_unfinished(self) -> bool:
        """Return whether Phase I was begun and not ended."""
        return not self.steps.is_meta and bool(self.steps) and not self.realigned

    @torch.no_grad()
    def reset(self) -> None:
        """Forget everything. A controller begins anew with it."""
        for state in (*self.buffers(), self.pool):
            state.zero_()
        self.loaded, self.phase = True, min(self.phase, 1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "InputStatistics":
        before = {name: getattr(self, name) for name in (*_FLOATING, "_pool")}
        super()._apply(fn, recurse)
        self._pool = fn(self._pool)
        # moved with the model, but not rounded to 16 bits with it: steps of a tenth would vanish
        for name, wide in before.items():
            moved = getattr(self, name)
            if moved.dtype in (torch.bfloat16, torch.float16):
                setattr(self, name, wide.to(moved.device, torch.float32))
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no controller, which would let it out of Phase I.
        return {**super().__getstate__(), "phase": 0, "loaded": False}

    def get_extra_state(self) -> Tensor:
        """Return the pool, for the state dict."""
        return self.pool

    @torch.no_grad()
    def set_extra_state(self, state: Any) -> None:
        """Take the pool from a state dict."""
        if not isinstance(state, Tensor) or state.shape != self._pool.shape:
            found = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
            raise RuntimeError(f"size mismatch for the pool of a PWLU: {found} in the state, {tuple(self._pool.shape)} here.")
        if self._pool.is_meta:
            self._pool = torch.empty_like(self._pool, device=self.running_mean.device)
        self.pool.copy_(state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        of_unit = prefix.removesuffix("statistics.")
        if self._at_start() and not any(key.startswith(of_unit) for key in state_dict):
            return  # weights from before the conversion: the unit stays as it is, at its start
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if not any(key.startswith(of_unit) for key in state_dict):
            return  # a part of a model: all that is missing has been listed
        self.loaded = True
        if self.phase and not self.realigned.is_meta:
            self.phase = 2 if self.realigned else 1

    def _at_start(self) -> bool:
        return not self.steps.is_meta and not self.steps


@torch.no_grad()
def advance_(statistics: Sequence[InputStatistics], group: "dist.ProcessGroup | None" = None) -> None:
    """Move the running averages of all units by one step, and count it.

    One collective call serves all of them (one for each device and type, if there are several). Every process ends with the
    same bits.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[InputStatistics]] = {}
    for each in statistics:
        mean: Any = each._buffers["running_mean"]
        alike.setdefault((mean.device, mean.dtype), []).append(each)
    for (device, _), together in alike.items():
        _advance(together, torch.float32 if device.type == "mps" else torch.float64, group)


def _advance(statistics: list[InputStatistics], wide: torch.dtype, group: "dist.ProcessGroup | None") -> None:
    # There may be hundreds of units, and this runs at every step: few operators, and no attributes of modules, which are slow.
    buffers: list[Any] = [s._buffers for s in statistics]
    pools = [s.pool for s in statistics]
    averages, counts = ([b[name] for name in names for b in buffers] for names in (_FLOATING, _COUNTS))
    mu, sigma = torch.cat(averages).to(wide).chunk(2)
    updates, dropped = torch.cat(counts).chunk(2)
    count, mean, m2 = _over_processes(torch.cat(pools, 1).to(wide), mu, group)
    finite = mean.isfinite() & m2.isfinite()
    good = finite & (count > 0)
    std = (m2 / count).sqrt()
    first = updates == 0
    mu = torch.where(good, torch.where(first, mean, (1 - MOMENTUM) * mu + MOMENTUM * mean), mu)
    sigma = torch.where(good, torch.where(first, std, (1 - MOMENTUM) * sigma + MOMENTUM * std), sigma)
    sizes = 2 * [pool.shape[1] for pool in pools]
    for targets, values in ((averages, (mu, sigma)), (counts, (updates + good, dropped + ~finite))):
        torch._foreach_copy_(targets, list(torch.cat(values).to(targets[0].dtype).split(sizes)))  # of one type: one launch
    torch._foreach_add_([b["steps"] for b in buffers], 1)
    torch._foreach_zero_(pools)


def _over_processes(pools: Tensor, shift: Tensor, group: "dist.ProcessGroup | None") -> Tensor:
    """Return the pools (3, C) of all processes as one: sums of deviations from `shift`, which is the same everywhere.

    The sums are of doubles, and `shift` is the mean so far: nothing is lost to cancellation.
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
