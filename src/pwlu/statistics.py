"""Running mean and standard deviation of the input of every unit, over calls, accumulation steps and processes.

Every training forward in Phase I has added count, mean and M2 to the unit's pool. Here, once a step of the optimizer, the
pools are merged over processes, the averages take one step, and the pools are emptied:

    mu = 0.9 mu + 0.1 mean,   sigma = 0.9 sigma + 0.1 sqrt(M2/count)

The first step takes mean and standard deviation as they are. A channel whose pool is not finite keeps its averages, and that is
counted; one whose pool is empty keeps them as well.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pwlu import reference
from pwlu.module import PWLU

MOMENTUM = 0.1


@torch.no_grad()
def advance_(units: Sequence[PWLU], group: "dist.ProcessGroup | None" = None) -> None:
    """One step of the running averages of all units, and their count of steps.

    One collective call for all of them (one for each device and type, if there are several); every process ends with the same
    bits.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[PWLU]] = {}
    for unit in units:
        mean = unit.running_mean
        alike.setdefault((mean.device, mean.dtype), []).append(unit)
    for some in alike.values():
        _advance(some, group)


def _advance(units: list[PWLU], group: "dist.ProcessGroup | None") -> None:
    wide = torch.float32 if units[0].running_mean.device.type == "mps" else torch.float64
    mu, sigma = (torch.cat([getattr(u, name) for u in units]).to(wide) for name in ("running_mean", "running_std"))
    updates, dropped = (torch.cat([getattr(u, name) for u in units]) for name in ("updates", "dropped"))
    count, mean, m2 = _over_processes(_pools(units).to(wide), mu, group)
    finite = mean.isfinite() & m2.isfinite()
    good = finite & (count > 0)
    std = (m2 / count).sqrt()
    first = updates == 0
    mu = torch.where(good, torch.where(first, mean, (1 - MOMENTUM) * mu + MOMENTUM * mean), mu)
    sigma = torch.where(good, torch.where(first, std, (1 - MOMENTUM) * sigma + MOMENTUM * std), sigma)
    sizes = [u.channels for u in units]
    results = {"running_mean": mu, "running_std": sigma, "updates": updates + good, "dropped": dropped + ~finite}
    for name, values in results.items():
        targets = [getattr(u, name) for u in units]
        torch._foreach_copy_(targets, list(values.to(targets[0].dtype).split(sizes)))  # of one type: one launch
    torch._foreach_add_([u.steps for u in units], 1)
    torch._foreach_zero_([u._pool for u in units])


def _pools(units: list[PWLU]) -> Tensor:
    """All pools side by side, with what is pending, which is forgotten: the numbers of PWLU.pool, in fewer operations."""
    pools = [u._pool.to(u.running_mean.device) for u in units]  # one that was never called may lag behind
    number = 0
    while waiting := [k for k, u in enumerate(units) if number < len(u._pending)]:
        counts, means, m2s = zip(*(units[k]._pending[number] for k in waiting), strict=True)
        sizes = [units[k].channels for k in waiting]
        count = torch.cat([c.expand(size) for c, size in zip(counts, sizes, strict=True)])
        before = torch.cat([pools[k] for k in waiting], 1)
        merged = reference.merge(before, count.to(before.dtype), torch.cat(means), torch.cat(m2s))
        for k, part in zip(waiting, merged.split(sizes, 1), strict=True):
            pools[k] = part
        number += 1
    for unit in units:
        unit._pending.clear()
    return torch.cat(pools, 1)


def _over_processes(pools: Tensor, shift: Tensor, group: "dist.ProcessGroup | None") -> Tensor:
    """The pools (3, C) of all processes as one: sums of deviations from `shift`, which is the same everywhere.

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
