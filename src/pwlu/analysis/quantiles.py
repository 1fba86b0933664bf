"""Compute quantiles of a stream of inputs per channel, in one pass and bounded memory, by a histogram with fixed bins.

With W = B_R - B_L, an input x has the position v = (x - B_L)/W - 1/2. So the bounds are at -1/2 and 1/2. The edges of the bins
are at |v| + 1/2 = 2^e (1 + k/256)/2. These are 512 equal bins between the bounds. Outside, the width doubles every 256 bins.
Hence:

- A bin is W/512 wide inside and at most (W/2 + |x - centre|)/256 outside. The computed quantile lies in the bin of the exact
  quantile, so its error is at most the width of that bin.
- Both bounds are edges, and the union in IOU([B_L, B_R], [p5, p95]) is at least W. So p5 and p95 each add an error of at most
  1/512 inside the bounds and 1/256 outside: 1/128 in all. With many inputs the error is much smaller, because positions
  within a bin are interpolated.

The range of the bins is fixed. An input more than 2047.5 W from the centre is counted at that distance.
"""

import torch
from torch import Tensor

from pwlu import reference

_OCTAVES, _PER_OCTAVE = 12, 256
_HALF = _OCTAVES * _PER_OCTAVE
BINS = 2 * _HALF
_SHIFT = 15  # 8 of the 23 bits of a float's mantissa give the bin within an octave
_FIRST = 126 << 23  # the bits of 1/2, the smallest |v| + 1/2
_LAST = 2.0 ** (_OCTAVES - 1) * (1 - 2.0**-24)
_MOST_COUNTED = 2**31 - 1


def bin_width(left: Tensor, right: Tensor, x: Tensor) -> Tensor:
    """Return the width of the bin that holds x. Inputs whose 5 % and 95 % quantiles are closer may all be equal."""
    left, width = _frame(left, right)
    place = ((x - left) / width - 0.5).abs() + 0.5
    return width * torch.ldexp(torch.ones_like(place), place.frexp().exponent) / (2 * _PER_OCTAVE)


def _frame(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return B_L and W. Bounds that are not usable are replaced, so that the bins are centred on B_L and W = 2."""
    width = right - left
    usable = (width > 0) & width.isfinite()
    left = torch.where(usable, left, left.nan_to_num(0.0, 0.0, 0.0) - 1)
    return left, torch.where(usable, width, torch.full_like(width, 2))


class QuantileSketch:
    """Counts of the inputs of C channels. The bins depend on the bounds, (C,) or (1,) if all channels share them.

    Adding inputs does not synchronize with the device. Memory: 24 kB per channel.
    """

    def __init__(self, left: Tensor, right: Tensor, channels: int) -> None:
        self.left, self.width = _frame(left, right)
        # the last column counts non-finite inputs
        self.counts = torch.zeros(channels, BINS + 1, dtype=torch.int32, device=left.device)
        self.added = 0  # an upper bound on the number of elements per channel

    @property
    def channels(self) -> int:
        """Return the number of channels, C."""
        return self.counts.shape[0]

    def pool(self) -> None:
        """Merge all channels into one, for past and future inputs. All channels must have the same bounds."""
        self.added *= self.channels
        self._widen()
        self.counts = self.counts.sum(0, keepdim=True, dtype=self.counts.dtype)

    def add(self, x: Tensor, channel_dim: int) -> None:
        """Count the elements of x, with C entries along `channel_dim`. If C = 1, count all elements together."""
        self.added += x.numel() // self.channels
        self._widen()
        if self.channels == 1:
            x, channel_dim = x.reshape(-1), 0
        elements = 2**18 if x.device.type == "cpu" else 2**22  # per step: fits a CPU's cache, limits memory on a GPU
        whole = self.channels > 1 and channel_dim % x.ndim == 0
        for part in (x,) if whole else x.split(max(1, elements * len(x) // max(1, x.numel()))):
            index = self._bins(part, channel_dim).reshape(-1)
            one = torch.ones((), dtype=self.counts.dtype, device=x.device)
            self.counts.view(-1).scatter_add_(0, index, one.expand_as(index))

    def _bins(self, x: Tensor, channel_dim: int) -> Tensor:
        """Return, for every element, the index of its bin in the flat table of counts."""
        wide = x.to(self.left.dtype)
        left, width = (reference.along(t, x, channel_dim) for t in (self.left, self.width))
        v = (wide - left).div_(width).sub_(0.5)  # exact at both bounds
        # The bits of positive floats sort like the floats. A right shift rounds down, for negative numbers too.
        bits = v.abs().add_(0.5).float().clamp_(max=_LAST).view(torch.int32).sub_(_FIRST)
        index = torch.where(v < 0, -bits, bits).bitwise_right_shift_(_SHIFT).add_(_HALF)
        rows = torch.arange(self.channels, device=x.device) * (BINS + 1)
        return torch.where(x.isfinite(), index, BINS) + reference.along(rows, x, channel_dim)

    def _widen(self) -> None:
        if self.added > _MOST_COUNTED:
            self.counts = self.counts.long()

    def distribution(self) -> "Distribution":
        """Return the distribution of the inputs so far."""
        step = torch.arange(_HALF + 1, dtype=torch.float64, device="cpu")
        place = 2 ** (step // _PER_OCTAVE) * (1 + step % _PER_OCTAVE / _PER_OCTAVE) / 2
        edges = torch.cat([1 - place[1:].flip(0), place])  # edges of v + 1/2, which is the distance from B_L in units of W
        left, width = (t.to("cpu", torch.float64)[:, None] for t in (self.left, self.width))
        return Distribution((left + width * edges).expand(self.channels, -1), self.counts.cpu())


class Distribution:
    """Edges of the bins (C, M+1) and the number of inputs in each (C, M); ``total`` and ``nonfinite`` are (C,)."""

    def __init__(self, edges: Tensor, counts: Tensor) -> None:
        self.edges = edges.contiguous()
        self.counts, self.nonfinite = counts[:, :-1].long(), counts[:, -1].long()
        self.below = torch.nn.functional.pad(self.counts.cumsum(1), (1, 0))  # number of inputs below each edge
        self.total = self.below[:, -1]

    def quantile(self, share: float) -> Tensor:
        """Return the ceil(share * n)-th smallest of n inputs, to within its bin; NaN for a channel without inputs."""
        rank, bin_ = self._rank_and_bin(share)
        low, high = self.edges.gather(1, bin_), self.edges.gather(1, bin_ + 1)
        part = (rank - self.below.gather(1, bin_) - 0.5) / self.counts.gather(1, bin_)
        return torch.where(self.total > 0, (low + (high - low) * part)[:, 0], torch.nan)

    def outside(self) -> Tensor:
        """Return the share of inputs with x < B_L or x >= B_R. It is exact except for inputs that round to a bound."""
        ends = self.below[:, [_HALF - _PER_OCTAVE, _HALF + _PER_OCTAVE]]
        return (self.total - ends.diff(dim=1)[:, 0]).double() / self.total  # 0/0 is NaN

    def histogram(self, bars: int, tail: float = 0.001) -> tuple[Tensor, Tensor, Tensor]:
        """Return low and high (C,), with at most a share `tail` beyond either, and shares (C, bars) in between."""
        low = self.edges.gather(1, self._rank_and_bin(tail)[1])
        high = self.edges.gather(1, self._rank_and_bin(1 - tail)[1] + 1)
        ends = low + (high - low) * torch.linspace(0, 1, bars + 1, dtype=torch.float64, device="cpu")
        bin_ = (torch.searchsorted(self.edges, ends, right=True) - 1).clamp(0, self.counts.shape[1] - 1)
        start, stop = self.edges.gather(1, bin_), self.edges.gather(1, bin_ + 1)
        below = self.below.gather(1, bin_) + self.counts.gather(1, bin_) * (ends - start) / (stop - start)
        low, high = (torch.where(self.total > 0, end[:, 0], torch.nan) for end in (low, high))
        return low, high, below.diff(dim=1) / self.total[:, None]

    def _rank_and_bin(self, share: float) -> tuple[Tensor, Tensor]:
        """Return the rank of the quantile, counted from 1, and its bin, both (C, 1)."""
        rank = (share * self.total.double()).ceil().long().clamp(min=1)[:, None]
        return rank, torch.searchsorted(self.below, rank).clamp(max=self.counts.shape[1]) - 1
