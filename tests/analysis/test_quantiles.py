"""The streaming histogram: its quantiles equal those of the sorted inputs within the width of a bin."""

import itertools
import math

import pytest
import torch

from pwlu.analysis import quantiles
from pwlu.analysis.quantiles import BINS, QuantileSketch

C = 8
LEFT = torch.tensor([-3.0, -3.0, 0.5, -1e-3, 100.0, -3.0, 2.0, -10.0])
RIGHT = torch.tensor([3.0, 3.0, 2.5, 1e-3, 101.0, 3.0, 8.0, 10.0])


def inputs(n=5000, dtype=torch.float32):
    """(n, C): within the bounds, left of them, right, much wider, narrow and far from 0, with outliers, constant, narrow."""
    normal, uniform = torch.randn(n, C, dtype=torch.float64), torch.rand(n, dtype=torch.float64)
    columns = [
        normal[:, 0],
        2 * normal[:, 1] - 9,
        normal[:, 2].exp() + 3,
        normal[:, 3],
        100.5 + 0.02 * normal[:, 4],
        torch.tan(math.pi * (uniform - 0.5)),
        torch.full((n,), 4.2, dtype=torch.float64),
        0.1 * normal[:, 7].abs(),
    ]
    return torch.stack(columns, 1).to(dtype)


def exact(x, share):
    """The ceil(share * n)-th smallest of each column."""
    return x.double().sort(0).values[max(1, math.ceil(share * len(x))) - 1]


def bin_width(value, left=LEFT, right=RIGHT):
    """As the file promises it, and what float32 loses of an input: x - B_L is rounded, and so is what follows, thrice."""
    left, right = left.double(), right.double()
    width, distance = right - left, (value - (left + right) / 2).abs()
    promised = torch.where((value >= left) & (value < right), width / 512, (width / 2 + distance) / 256)
    return promised + 2.0**-24 * (left.abs() + value.abs() + 4 * (distance + width))


def sketched(*parts, left=LEFT, right=RIGHT, channels=C, channel_dim=1):
    sketch = QuantileSketch(left, right, channels)
    for part in parts:
        sketch.add(part, channel_dim)
    return sketch


@pytest.mark.parametrize("n", [1, 19, 20, 21, 5000])
@pytest.mark.parametrize("share", [0.001, 0.05, 0.5, 0.95, 0.999, 1.0])
def test_quantiles_are_off_by_less_than_a_bin(n, share):
    x = inputs(n)
    found, wanted = sketched(*x.split(700)).distribution().quantile(share), exact(x, share)
    assert ((found - wanted).abs() <= bin_width(wanted)).all()
    assert torch.equal(found < LEFT, wanted < LEFT)
    assert torch.equal(found >= RIGHT, wanted >= RIGHT)


def test_in_practice_they_are_much_closer():
    """If inputs are spread evenly, quantiles are off by about the distance between two neighbouring inputs."""
    x = torch.linspace(-4, 4, 100_001, dtype=torch.float64)[:, None]
    distribution = sketched(x, left=torch.tensor([-3.0]), right=torch.tensor([3.0]), channels=1).distribution()
    for share in (0.05, 0.3, 0.95):
        assert abs(distribution.quantile(share).item() - exact(x, share).item()) < 3 * 8 / 100_000


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype(dtype):
    x = inputs(dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    found, wanted = sketched(x, left=LEFT.to(wide), right=RIGHT.to(wide)).distribution().quantile(0.95), exact(x, 0.95)
    assert ((found - wanted).abs() <= bin_width(wanted)).all()


LAYOUTS = {
    "last": lambda x: (x.reshape(40, 5, 25, C), -1),
    "images": lambda x: (x.reshape(40, 5, 25, C).permute(0, 3, 1, 2).contiguous(), 1),
    "channels_last": lambda x: (x.reshape(40, 5, 25, C).permute(0, 3, 1, 2), 1),
    "first": lambda x: (x.T.contiguous(), 0),
    "strided": lambda x: (x.repeat_interleave(2, 0)[::2], 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    x = inputs()
    arranged, channel_dim = LAYOUTS[layout](x)
    assert torch.equal(sketched(arranged, channel_dim=channel_dim).counts, sketched(x).counts)


@pytest.mark.parametrize("most", [100, quantiles._MOST_COUNTED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_on_the_device(dtype, most, device, monkeypatch):
    """The counts equal those of the CPU in every layout, in 32 and in 64 bits."""
    monkeypatch.setattr(quantiles, "_MOST_COUNTED", most)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    left, right = LEFT.to(wide), RIGHT.to(wide)
    x = inputs(dtype=dtype)
    x[::7, 2], x[::11, 3] = torch.nan, torch.inf
    wanted = sketched(x, left=left, right=right)
    for arrange in LAYOUTS.values():
        arranged, channel_dim = arrange(x)
        found = sketched(arranged.to(device), left=left.to(device), right=right.to(device), channel_dim=channel_dim)
        assert found.counts.device.type == device.type
        assert torch.equal(found.counts.cpu(), wanted.counts)
        assert torch.equal(found.distribution().quantile(0.95), wanted.distribution().quantile(0.95))
    one = sketched(x.to(device), left=left[:1].to(device), right=right[:1].to(device))
    one.pool()
    assert torch.equal(one.counts.cpu(), sketched(x.reshape(-1), left=left[:1], right=right[:1], channels=1).counts)


def test_more_than_is_counted_at_a_time_on_the_device(device):
    x = torch.randn(9, 3, 300, 600)
    left, right = torch.full((3,), -1.0), torch.full((3,), 1.0)
    assert x.numel() > 2**22
    found = sketched(x.to(device), left=left.to(device), right=right.to(device), channels=3)
    assert torch.equal(found.counts.cpu(), sketched(*x.split(1), left=left, right=right, channels=3).counts)


def test_many_inputs_are_counted_part_by_part():
    x = torch.randn(9, 3, 300, 200)
    left, right = torch.full((3,), -1.0), torch.full((3,), 1.0)
    sketch = sketched(x, left=left, right=right, channels=3)
    assert torch.equal(sketch.counts, sketched(*x.split(1), left=left, right=right, channels=3).counts)
    assert sketch.counts.sum(1).tolist() == [9 * 300 * 200] * 3
    first = x.movedim(1, 0)
    assert torch.equal(sketched(first, left=left, right=right, channels=3, channel_dim=-4).counts, sketch.counts)
    one = sketched(x, left=left[:1], right=right[:1], channels=1)
    assert torch.equal(one.counts, sketch.counts.sum(0, keepdim=True))


def test_the_share_outside_is_exact_also_on_the_bounds():
    """B_L counts as inside and B_R does not, even if B_R - B_L is rounded."""
    x = torch.cat([inputs(), LEFT[None], LEFT[None], RIGHT[None], LEFT[None] - 0.1, RIGHT[None] + 0.1])
    assert torch.equal(sketched(x).distribution().outside(), ((x < LEFT) | (x >= RIGHT)).double().mean(0))
    left, right = torch.tensor([0.1, -1 / 3]), torch.tensor([0.7, 1e4])
    x = torch.stack([left, left, left, right])
    assert sketched(x, left=left, right=right, channels=2).distribution().outside().tolist() == [0.25, 0.25]


def test_what_is_not_finite_is_counted_and_not_binned():
    x = inputs(100)
    spoiled = x.clone()
    spoiled[::10, 1], spoiled[::20, 2], spoiled[::50, 3] = torch.nan, torch.inf, -torch.inf
    found = sketched(spoiled).distribution()
    assert found.nonfinite.tolist() == [0, 10, 5, 2, 0, 0, 0, 0]
    assert found.total.tolist() == [100, 90, 95, 98, 100, 100, 100, 100]
    kept = torch.ones(100, dtype=torch.bool)
    kept[::10] = False
    assert found.quantile(0.95)[1] == sketched(x[kept]).distribution().quantile(0.95)[1]


def test_no_inputs():
    found = sketched(torch.full((3, C), torch.nan), torch.empty(0, C)).distribution()
    for values in (found.quantile(0.05), found.outside(), *found.histogram(32)):
        assert values.isnan().all()


@pytest.mark.parametrize(("left", "right"), [(3.0, -3.0), (1.0, 1.0), (math.nan, 1.0), (-math.inf, math.inf), (2.0, math.inf)])
def test_where_nothing_lies_between_the_bounds(left, right):
    """The bins then lie around B_L (0 if it is not finite), as wide as for bounds at a distance of 2."""
    x = torch.randn(1000, 1)
    found = sketched(x, left=torch.tensor([left]), right=torch.tensor([right]), channels=1).distribution().quantile(0.95)
    middle, wanted = (left if math.isfinite(left) else 0.0), exact(x, 0.95)
    assert (found - wanted).abs() <= bin_width(wanted, torch.tensor([middle - 1]), torch.tensor([middle + 1]))


def test_very_far_out():
    """Beyond 2047.5 widths from the centre, inputs count as being there; the last bin is 4 widths wide."""
    x = torch.tensor([[-3e38, 1e30], [-12_300.0, 6.0 * 2048]])
    found = sketched(x, left=torch.full((2,), -3.0), right=torch.full((2,), 3.0), channels=2).distribution()
    assert found.total.tolist() == [2, 2]
    assert -6 * 2047.5 <= found.quantile(0.05)[0] <= -6 * 2043.5
    assert 6 * 2043.5 <= found.quantile(0.95)[1] <= 6 * 2047.5


def test_pooled():
    x = inputs(100)
    left, right = torch.tensor([-3.0]), torch.tensor([3.0])
    sketch = sketched(x, left=left, right=right)
    sketch.pool()
    sketch.add(x[:, :3], 1)
    sketch.pool()
    everything = torch.cat([x.reshape(-1), x[:, :3].reshape(-1)])
    assert torch.equal(sketch.counts, sketched(everything, left=left, right=right, channels=1).counts)


def test_more_than_int32_can_count(monkeypatch):
    x = inputs(100)
    counts = sketched(x, x).counts
    assert counts.dtype == torch.int32
    monkeypatch.setattr(quantiles, "_MOST_COUNTED", 150)
    wide = sketched(x, x).counts
    assert wide.dtype == torch.int64
    assert torch.equal(wide, counts)
    pooled = sketched(x[:, :2], left=LEFT[:1], right=RIGHT[:1], channels=2)
    assert pooled.counts.dtype == torch.int32
    pooled.pool()
    assert pooled.counts.dtype == torch.int64


def test_histogram():
    """A share may be off by what lies in the two bins that its ends cut; but for tails, all inputs are in it."""
    x = inputs().double()
    found = sketched(x).distribution()
    low, high, shares = found.histogram(32)
    assert shares.shape == (C, 32)
    assert (shares >= 0).all()
    assert ((x < low).double().mean(0) <= 0.001).all()
    assert ((x > high).double().mean(0) <= 0.001).all()
    assert (shares.sum(1) >= 0.998 - 1e-12).all()
    for c in range(C):
        ends = torch.linspace(low[c].item(), high[c].item(), 33, dtype=torch.float64)
        wanted = torch.stack([((x[:, c] >= a) & (x[:, c] < b)).double().mean() for a, b in itertools.pairwise(ends)])
        cut = (torch.searchsorted(found.edges[c].contiguous(), ends, right=True) - 1).clamp(0, BINS - 1)
        loss = found.counts[c][cut] / found.total[c]
        assert ((shares[c] - wanted).abs() <= loss[1:] + loss[:-1] + 1e-12).all()
