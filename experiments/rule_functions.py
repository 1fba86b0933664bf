"""The mathematics of the learning rules, as functions of tables.

A table has one row per function of the network: B_L, B_R, K_L, K_R, Y_0, ..., Y_N. ``d`` is the length of an interval. A rise
is Y_{k+1} - Y_k; outside of the bounds it is the slope times d. A bend is the difference of two neighbouring rises. F is the
number of functions.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pwlu import reference
from pwlu.initial_functions import InitialFunction, initial_parameters

LEFT, RIGHT, LEFT_SLOPE, RIGHT_SLOPE, HEIGHTS = range(5)  # columns of a table; HEIGHTS is the first of N + 1


class Layers(NamedTuple):
    """The layer of each row of a table.

    Attributes:
        index: the layer of each row, (F,).
        channels: the number of rows of that layer, (F, 1).
        number: the number of layers.
    """

    index: Tensor
    channels: Tensor
    number: int

    @classmethod
    def of(cls, channels: list[int], device: torch.device | None = None) -> "Layers":
        """Return consecutive layers with these numbers of channels."""
        counts = torch.tensor(channels)
        index = torch.arange(len(channels)).repeat_interleave(counts)
        return cls(index.to(device), counts.repeat_interleave(counts)[:, None].float().to(device), len(channels))

    def sums(self, values: Tensor) -> Tensor:
        """Sum rows over each layer. Return the sum of its layer for each row."""
        return values.new_zeros(self.number, values.shape[1]).index_add_(0, self.index, values)[self.index]


def interval(table: Tensor) -> Tensor:
    """Return d, (F, 1)."""
    return (table[:, RIGHT, None] - table[:, LEFT, None]) / (table.shape[1] - 5)


def relative_interval(table: Tensor, layers: Layers) -> Tensor:
    """Return d divided by its RMS in the layer, (F, 1)."""
    d = interval(table)
    return d / (layers.sums(d.square()) / layers.channels).sqrt().clamp(min=1e-12)


def rises(table: Tensor) -> Tensor:
    """Return K_L d, Y_1 - Y_0, ..., Y_N - Y_{N-1}, K_R d: (F, N + 2)."""
    d = interval(table)
    return torch.cat([table[:, LEFT_SLOPE, None] * d, table[:, HEIGHTS:].diff(), table[:, RIGHT_SLOPE, None] * d], 1)


def squared_size(table: Tensor) -> Tensor:
    """Return the mean squared rise between the bounds, (F, 1), without a gradient."""
    return table.detach()[:, HEIGHTS:].diff().square().mean(1, keepdim=True).clamp(min=1e-12)


def initial_table(table: Tensor, start: InitialFunction) -> Tensor:
    """Return the table of the initial function `start` with the same bounds."""
    fixed = table.detach()
    heights, left, right = initial_parameters(start, fixed[:, LEFT], fixed[:, RIGHT], table.shape[1] - 5)
    return torch.cat([fixed[:, :LEFT_SLOPE], left[:, None], right[:, None], heights], 1)


# Gradients.


def shared(gradient: Tensor, table: Tensor, layers: Layers, strength: float, root: bool) -> Tensor:
    """Add `strength` times the sum over the layer to the gradient of each channel. `root` divides the sum by sqrt(C).

    This equals the parametrisation f_c = f_layer + g_c with two step sizes. Heights are shared in units of d: y = Y / d has the
    gradient d G, and a step in y is a step of d y in Y. So the matrix stays symmetric. Slopes have no unit. Bounds are not
    shared.
    """
    weight = relative_interval(table, layers)
    factor = strength / layers.channels.sqrt() if root else strength
    slopes = layers.sums(gradient[:, LEFT_SLOPE:HEIGHTS]) * factor
    heights = layers.sums(gradient[:, HEIGHTS:] * weight) * weight * factor
    return gradient + torch.cat([torch.zeros_like(gradient[:, :LEFT_SLOPE]), slopes, heights], 1)


def smoother(intervals: int, strength: float) -> Tensor:
    """Return (I + a D'D)^-1, float64 (N + 1, N + 1), with a = `strength`. It is symmetric and keeps constants unchanged."""
    identity = torch.eye(intervals + 1, dtype=torch.float64)
    difference = identity.diff(dim=0)
    return torch.linalg.inv(identity + strength * difference.T @ difference)


def preconditioned(gradient: Tensor, matrix: Tensor) -> Tensor:
    """Return the gradient with its heights smoothed along the knots."""
    return torch.cat([gradient[:, :HEIGHTS], gradient[:, HEIGHTS:] @ matrix], 1)


def natural_units(table: Tensor) -> Tensor:
    """Return a natural unit for each parameter, (F, N + 5): d for bounds, RMS slope for slopes, RMS rise for heights."""
    d, size = interval(table).abs().clamp(min=1e-12), squared_size(table).sqrt()
    return torch.cat([d.expand(-1, 2), (size / d).expand(-1, 2), size.expand(-1, table.shape[1] - HEIGHTS)], 1)


def relative_step(gradient: Tensor, table: Tensor, second: Tensor, number: int, decay: float = 0.99) -> Tensor:
    """Return the gradient in natural units, divided by its running RMS per function.

    Args:
        gradient: the table of gradients.
        table: the table of parameters.
        second: the running mean square (F, 1), updated in place.
        number: the number of this update, starting at 1.
        decay: the decay of the running mean square.
    """
    unit = natural_units(table)
    scaled = gradient * unit
    second.mul_(decay).add_(scaled.square().mean(1, keepdim=True), alpha=1 - decay)
    rms = (second / (1 - decay**number)).sqrt().clamp(min=1e-30)
    return scaled / rms * unit


# Penalties.


def penalty(name: str, table: Tensor, layers: Layers, start: InitialFunction | None = None) -> Tensor:
    """Return a penalty per function, (F,). With `start`, curv, relcurv and tv2 penalise the difference from it."""
    intervals = table.shape[1] - 5
    if name in ("curv", "relcurv", "tv2"):
        other = table if start is None else torch.cat([table[:, :2], table[:, 2:] - initial_table(table, start)[:, 2:]], 1)
        bends = rises(other).diff()
        if name == "tv2":
            return (bends.abs() / interval(table).detach()).sum(1)
        squares = bends.square().sum(1)
        return squares if name == "curv" else intervals * squares / squared_size(table)[:, 0]
    risen, d = rises(table), interval(table).detach()
    mean = layers.sums(risen.detach() / d) / layers.channels * d
    squares = (risen - mean).square().sum(1)
    return squares if name == "dev" else intervals * squares / squared_size(table)[:, 0]


def bending(intervals: int) -> tuple[Tensor, Tensor]:
    """Return eigenvectors and eigenvalues of M'M, float64. M maps v = (K_L d, Y_0, ..., Y_N, K_R d) to its bends."""
    v = torch.eye(intervals + 3, dtype=torch.float64)
    bends = torch.cat([v[:, :1], v[:, 1:-1].diff(), v[:, -1:]], 1).diff()  # M transposed
    values, vectors = torch.linalg.eigh(bends @ bends.T)
    return vectors, values.clamp(min=0)


def implicit_bend(
    table: Tensor,
    strength: Tensor,
    vectors: Tensor,
    values: Tensor,
    start: InitialFunction | None = None,
    layers: Layers | None = None,
    sharing: float = 0.0,
) -> Tensor:
    """Take the proximal step of strength / 2 * |bends|^2, with strength (F, 1): v becomes (I + strength M'M)^-1 v.

    It is stable at any strength. It keeps straight lines unchanged; with `start`, it keeps that function unchanged.

    With `sharing`, the gradient of the penalty is shared as by :func:`shared`: the strength is 1 + sharing C times as large for
    what the C functions of a layer have in common. Functions of a layer then have the same strength, the mean over the layer.
    """
    d = interval(table)

    def packed(t: Tensor) -> Tensor:
        return torch.cat([t[:, LEFT_SLOPE, None] * d, t[:, HEIGHTS:], t[:, RIGHT_SLOPE, None] * d], 1)

    base = packed(torch.zeros_like(table) if start is None else initial_table(table, start))
    modes = (packed(table) - base) @ vectors
    if layers is None or not sharing:
        kept = modes / (1 + strength * values)
    else:
        weight = relative_interval(table, layers)
        strength = layers.sums(strength) / layers.channels
        common = layers.sums(modes * weight) / layers.channels * weight
        faster = strength * (1 + sharing * layers.channels)
        kept = (modes - common) / (1 + strength * values) + common / (1 + faster * values)
    v = kept @ vectors.T + base
    safe = torch.where(d.abs() > 1e-12, d, torch.ones_like(d))
    return torch.cat([table[:, :LEFT_SLOPE], v[:, :1] / safe, v[:, -1:] / safe, v[:, 1:-1]], 1)


# Functions.


def input_fractions(table: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the fraction of normally distributed inputs in each of the N + 2 segments, (F, N + 2)."""
    knots = table[:, LEFT, None] + torch.arange(table.shape[1] - 4, device=table.device) * interval(table)
    below = 0.5 * (1 + torch.erf((knots - mean) / (std * math.sqrt(2)).clamp(min=1e-12)))
    return torch.cat([torch.zeros_like(mean), below, torch.ones_like(mean)], 1).diff()


def rms_slope(table: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the RMS slope over the inputs, (F, 1)."""
    slopes = rises(table) / interval(table).clamp(min=1e-12)
    return (input_fractions(table, mean, std) * slopes.square()).sum(1, keepdim=True).sqrt()


def with_gain(table: Tensor, target: Tensor | float, gain: Tensor) -> Tensor:
    """Multiply each function by a number so that its gain (F, 1) becomes the target. Keep the bounds."""
    factor = target / gain.clamp(min=1e-6)
    return torch.cat([table[:, :LEFT_SLOPE], table[:, LEFT_SLOPE:] * factor], 1)


def layer_gain(gain: Tensor, layers: Layers) -> Tensor:
    """Return the RMS of gains (F, 1) over each layer, for each function."""
    return (layers.sums(gain.square()) / layers.channels).sqrt()


def evaluate(table: Tensor, x: Tensor) -> Tensor:
    """Return the values of the functions at positions x (F, M)."""
    blocks = table[:, LEFT], table[:, RIGHT], table[:, HEIGHTS:], table[:, LEFT_SLOPE], table[:, RIGHT_SLOPE]
    return reference.forward(x, *blocks, channel_dim=0)


def regrid(
    table: Tensor, left: Tensor, right: Tensor, momentum: Tensor | None = None, per_interval: int = 8
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Fit the functions with new bounds (F, 1): heights by least squares on a regular grid, slopes over one more interval.

    Return the table, the momentum mapped as a change of the function (0 for bounds), and the relative RMS error (F,).
    """
    intervals = table.shape[1] - 5
    grid = torch.arange(intervals * per_interval + 1, dtype=torch.float64, device=table.device) / per_interval
    hats = (1 - (grid[:, None] - torch.arange(intervals + 1, device=table.device)).abs()).clamp(min=0)
    fit = torch.linalg.pinv(hats)  # (N + 1, M)
    old, left, right = table.double(), left.double(), right.double()
    d = (right - left) / intervals
    x = left + grid * d

    def fitted(t: Tensor) -> tuple[Tensor, Tensor]:
        at = evaluate(t, torch.cat([left - d, left, x, right, right + d], 1))
        slopes = [(at[:, 1:2] - at[:, :1]) / d, (at[:, -1:] - at[:, -2:-1]) / d]
        return torch.cat([left, right, *slopes, at[:, 2:-2] @ fit.T], 1), at[:, 2:-2]

    new, values = fitted(old)
    error = (evaluate(new, x) - values).square().mean(1).sqrt() / values.std(1).clamp(min=1e-12)
    moved = None
    if momentum is not None:
        moved = fitted(torch.cat([old[:, :LEFT_SLOPE], momentum.double()[:, LEFT_SLOPE:]], 1))[0].to(momentum)
        moved[:, :LEFT_SLOPE] = 0
    return new.to(table), moved, error
