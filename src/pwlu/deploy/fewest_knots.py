"""Find the smallest subset of a function's knots within a tolerance, by dynamic programming.

The new function equals the old one at the kept knots, and has the same outer slopes. Both functions are linear between the old
knots, and their difference is constant beyond the outermost ones. So the error is largest at a dropped knot. Among all such
functions, the result has the fewest knots. Among those with this number of knots, it has the smallest error.

All computations run in float64 on the CPU. A unit needs at least two knots.
"""

import torch
from torch import Tensor

from pwlu.reference.nonuniform import Knots


def dropped_errors(functions: Knots) -> Tensor:
    """Return the largest error (C, J + 2, J + 2) at the dropped knots between two neighbouring kept knots, for J knots.

    Knot k has the index k + 1. The indices 0 and J + 1 mean that no knot is kept on that side: there, the outer line continues.
    """
    knots, heights, left_slope, right_slope = functions
    channels, count = knots.shape
    errors = torch.full((channels, count + 2, count + 2), torch.inf, dtype=torch.float64)
    number = torch.arange(count)
    for i in range(-1, count):
        first = max(i, 0)
        if i < 0:
            lines = heights[:, :, None] + left_slope[:, None, None] * (knots[:, None, :] - knots[:, :, None])
        else:
            widths = knots - knots[:, i : i + 1]
            slopes = torch.where(widths > 0, (heights - heights[:, i : i + 1]) / widths, 0.0)
            lines = heights[:, i, None, None] + slopes[:, :, None] * (knots - knots[:, i : i + 1])[:, None, :]
        difference = (lines - heights[:, None, :]).abs()
        between = (number[None, :] > i) & (number[None, :] < number[:, None])  # (end, dropped knot)
        largest = torch.where(between, difference, 0.0).amax(2)
        errors[:, i + 1, first + (i >= 0) + 1 : -1] = largest[:, first + (i >= 0) :]
        if i >= 0:
            outer = heights[:, i : i + 1] + right_slope[:, None] * (knots - knots[:, i : i + 1])
            after = torch.where(number > i, (outer - heights).abs(), 0.0)
            errors[:, i + 1, -1] = after.amax(1)
    return errors


def least_errors(functions: Knots) -> tuple[Tensor, Tensor, Tensor]:
    """Return the least errors (C, J + 1) with exactly k of J knots, infinite for k < 2, and the knots that give them.

    These are the last kept knots (C, J + 1), and the predecessors (J + 1, C, J + 2): the k-th maps the (k + 1)-th kept knot to
    the one before.
    """
    cost = dropped_errors(functions)
    channels, count = functions.knots.shape
    best = torch.full((channels, count + 2), torch.inf, dtype=torch.float64)
    best[:, 0] = 0
    least, last, before = [], [], []
    for _ in range(count + 1):
        found, index = torch.maximum(best, cost[:, :, -1]).min(1)
        least.append(found)
        last.append(index)
        best, chosen = torch.maximum(best[:, :, None], cost).min(1)  # for each index, as the last kept knot
        best[:, -1] = torch.inf
        before.append(chosen)
    return torch.stack(least, 1).index_fill_(1, torch.arange(2), torch.inf), torch.stack(last, 1), torch.stack(before)


def keep_fewest_knots(functions: Knots, allowed: Tensor) -> Knots:
    """Return functions with the smallest number of knots that suffices for an error of `allowed` (C,) in every channel.

    A channel that needs fewer knots gets those that give its smallest error with at most this number. Knots on its own lines,
    which do not change the function, are added to reach the number.
    """
    least, last, before = least_errors(functions)
    knots, heights, left_slope, right_slope = functions
    most = int((least <= allowed[:, None]).int().argmax(1).max())
    if most == knots.shape[1]:
        return functions
    new = []
    for c, number in enumerate(least[:, : most + 1].argmin(1).tolist()):
        path = [int(last[c, number])]
        for k in range(number - 1, 0, -1):
            path.append(int(before[k, c, path[-1]]))
        kept = torch.tensor(path[::-1]) - 1
        new.append(_add_knots(knots[c][kept], heights[c][kept], most))
    return Knots(torch.stack([k for k, _ in new]), torch.stack([y for _, y in new]), left_slope, right_slope)


def _add_knots(knots: Tensor, heights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the same function with `count` knots: split the widest interval until there are enough."""
    while len(knots) < count:
        i = int(knots.diff().argmax())
        middle, height = (knots[i] + knots[i + 1]) / 2, (heights[i] + heights[i + 1]) / 2
        knots = torch.cat([knots[: i + 1], middle[None], knots[i + 1 :]])
        heights = torch.cat([heights[: i + 1], height[None], heights[i + 1 :]])
    return knots, heights
