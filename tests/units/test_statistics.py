"""The statistics of a unit's input: pooled over calls, then averaged over steps."""

import copy
import math
import pickle

import pytest
import torch
from helpers import unit as random_parameters
from networks import data, network, of_units, same, train, units, values, watching
from torch import nn

import pwlu
from pwlu import ops, reference
from pwlu.units import statistics

U = 2.0**-53
U32 = 2.0**-24
SHAPES = [((16, 3, 5), 1, 3), ((4, 7, 3), -1, 3), ((9, 3), 1, 3), ((16, 3, 5), 1, 1)]  # shape, channel_dim, channels


def by_channel(calls, channels, dim):
    """Everything a unit has seen, (channels, n) in float64."""
    rows = [x.reshape(1, -1) if channels == 1 else x.movedim(dim, 0).reshape(channels, -1) for x in calls]
    return torch.cat(rows, 1).double()


def calls_of_many_sizes(shape, dtype=torch.float64, scale=2.0, shift=1.0):
    return [scale * torch.randn(batch, *shape[1:], dtype=dtype) + shift for batch in (shape[0], 1, 5, 40, 2)]


# The pool: moments over calls.


@pytest.mark.parametrize(("shape", "dim", "channels"), SHAPES)
def test_moments_of_several_calls_are_those_of_everything(shape, dim, channels):
    """A sum of n terms loses up to n u of their sizes, each of the few operations that merge two calls another u."""
    act = watching(pwlu.PWLU(channels, channel_dim=dim, dtype=torch.float64))
    calls = calls_of_many_sizes(shape)
    for x in calls:
        act(x)
    rows = by_channel(calls, channels, dim)
    count, mean, m2 = act.statistics.pool
    n = rows.shape[1]
    roundings = n + 8 * len(calls)
    assert (count == n).all()
    torch.testing.assert_close(mean, rows.mean(1), rtol=0, atol=2 * roundings * U * rows.abs().max().item())
    squares = n * (2 * rows.abs().max().item()) ** 2  # no deviation from any element is larger
    torch.testing.assert_close(m2, rows.var(1, correction=0) * n, rtol=0, atol=4 * roundings * U * squares)


def test_a_large_mean_leaves_the_deviation_right():
    """E[x²] - E[x]² in float32 would be wrong by several here, where 1 is right.

    Every call's mean is rounded to u m, m = 10000, so the distance e of two means is known to 2 k u m after k calls; it enters
    M2/n as e². With n elements a call, e is some 1/sqrt(n).
    """
    act = watching(pwlu.PWLU(3))
    calls = [torch.randn(200, 3, 20) + 1e4 for _ in range(5)]
    for x in calls:
        act(x)
    statistics.advance_([act.statistics])
    rows = by_channel(calls, 3, 1)
    distance = 2 * len(calls) * U32 * 1e4
    means = torch.stack([by_channel([x], 3, 1).mean(1) for x in calls])
    e = (means.max() - means.min()).item()
    torch.testing.assert_close(act.statistics.running_mean.double(), rows.mean(1), rtol=0, atol=distance)
    loss = len(calls) * (2 * e * distance + distance**2) + 16 * U32
    assert loss < 0.02  # or the next line would say little
    torch.testing.assert_close(act.statistics.running_std.double(), rows.std(1, correction=0), rtol=loss, atol=0)


def test_moments_are_merged_as_the_reference_says(device):
    """Bit for bit, whatever adds them: the moments of a call, from a pool that is empty, into one that is not."""
    pool = torch.rand(3, 5, device=device) + 1
    x, alone = torch.randn(7, 5, 4, device=device), torch.zeros(3, 5, device=device)
    ops.moments(x, 1, alone)
    expected = reference.merge(pool, torch.tensor(28, device=device), *alone[1:])
    ops.moments(x, 1, pool)
    assert torch.equal(pool, expected)


def test_nothing_is_counted_unless_a_unit_trains_in_phase_one():
    act, x = pwlu.PWLU(3), torch.randn(4, 3)
    act(x)
    assert not act.statistics.pool.any()
    watching(act)
    act.eval()(x)
    assert not act.statistics.pool.any()
    act.train()
    act.phase = 2
    act(x)
    assert not act.statistics.pool.any()
    act.phase = 1
    act(x)
    assert (act.statistics.pool[0] == 4).all()


def test_units_that_were_called_a_different_number_of_times():
    """Together they advance to what each of them would alone."""
    together, alone = ([watching(pwlu.PWLU(channels)) for channels in (3, 1, 2, 3)] for _ in range(2))
    for i, pair in enumerate(zip(together, alone, strict=True)):
        for x in [torch.randn(4, pair[0].channels) for _ in range(i)]:
            for act in pair:
                act(x)
    statistics.advance_([act.statistics for act in together])
    for act in alone:
        statistics.advance_([act.statistics])
    assert [act.statistics.updates[0].item() for act in together] == [0, 1, 1, 1]
    for first, second in zip(together, alone, strict=True):
        assert same(first.state_dict().values(), second.state_dict().values())


def test_an_empty_batch_adds_nothing():
    act = watching(pwlu.PWLU(3))
    act(torch.randn(0, 3))
    assert not act.statistics.pool.any()
    act(torch.randn(4, 3))
    before = act.statistics.pool.clone()
    act(torch.randn(0, 3))
    assert torch.equal(act.statistics.pool, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_function_of_phase_one_is_that_of_the_parameters(dtype):
    act = pwlu.PWLU(3, intervals=5)
    with torch.no_grad():
        for p, value in zip(act.blocks(), random_parameters(3, 5), strict=True):
            p.copy_(value)
    x = 3 * torch.randn(50, 3).to(dtype)
    expected = act(x)
    assert torch.equal(watching(act)(x), expected)
    assert (act.statistics.pool[0] == 50).all()


# The running averages: one step of the optimizer each.


@pytest.mark.parametrize(("shape", "dim", "channels"), SHAPES)
def test_running_averages(shape, dim, channels):
    """The first step takes its values as they are, every other one a tenth of them; each rounds a few times."""
    act = watching(pwlu.PWLU(channels, channel_dim=dim, dtype=torch.float64))
    mu = sigma = None
    for step in range(1, 5):
        act(torch.randn(shape, dtype=torch.float64) * step + step**2)
        count, mean, m2 = act.statistics.pool.clone()
        std = (m2 / count).sqrt()
        mu = mean if mu is None else 0.9 * mu + 0.1 * mean
        sigma = std if sigma is None else 0.9 * sigma + 0.1 * std
        statistics.advance_([act.statistics])
        torch.testing.assert_close(act.statistics.running_mean, mu, rtol=8 * step * U, atol=0)
        torch.testing.assert_close(act.statistics.running_std, sigma, rtol=8 * step * U, atol=0)
        assert (act.statistics.updates == step).all()
        assert act.statistics.steps == step
        assert not act.statistics.dropped.any()
        assert not act.statistics.pool.any()


def test_an_empty_pool_changes_nothing_but_the_steps():
    act = watching(pwlu.PWLU(3))
    act(torch.randn(8, 3))
    statistics.advance_([act.statistics])
    before = values([act.statistics.running_mean, act.statistics.running_std, act.statistics.updates])
    statistics.advance_([act.statistics])
    assert same(before, [act.statistics.running_mean, act.statistics.running_std, act.statistics.updates])
    assert act.statistics.steps == 2
    assert not act.statistics.dropped.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_a_pool_that_is_not_finite_is_dropped(bad):
    """Channel by channel, and one step alone. 3e38 is finite, its square is not."""
    act, healthy = watching(pwlu.PWLU(3)), watching(pwlu.PWLU(3))
    for step in range(3):
        x = torch.randn(8, 3)
        healthy(x)
        if step == 1:
            x[5, 1] = bad
        act(x)
        act(torch.zeros(0, 3))
        before = act.statistics.running_mean[1].item(), act.statistics.running_std[1].item()
        statistics.advance_([act.statistics, healthy.statistics])
        assert not act.statistics.pool.any()
        if step == 1:
            assert (act.statistics.running_mean[1].item(), act.statistics.running_std[1].item()) == before
    assert act.statistics.dropped.tolist() == [0, 1, 0]
    assert act.statistics.updates.tolist() == [3, 2, 3]
    assert act.statistics.running_mean.isfinite().all()
    assert torch.equal(act.statistics.running_mean[::2], healthy.statistics.running_mean[::2])
    assert torch.equal(act.statistics.running_std[::2], healthy.statistics.running_std[::2])
    assert act.statistics.running_mean[1] != healthy.statistics.running_mean[1]


def test_the_first_finite_step_is_taken_as_it_is():
    act = watching(pwlu.PWLU(2))
    for x in (torch.tensor([[1.0, math.nan], [3.0, 1.0]]), torch.tensor([[1.0, 5.0], [3.0, 9.0]])):
        act(x)
        statistics.advance_([act.statistics])
    assert act.statistics.running_mean.tolist() == [2.0, 7.0]
    assert act.statistics.running_std.tolist() == [1.0, 2.0]
    assert act.statistics.updates.tolist() == [2, 1]


def test_units_of_different_types_advance_together():
    acts = [watching(pwlu.PWLU(2, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    x = torch.tensor([[1.0, 5.0], [3.0, 9.0]])
    for act in acts:
        act(x.to(act.left.dtype))
    statistics.advance_([act.statistics for act in acts])
    assert [act.statistics.running_mean.dtype for act in acts] == [torch.float32, torch.float64, torch.float32]
    assert all(act.statistics.running_mean.tolist() == [2.0, 7.0] for act in acts)


def test_the_group_of_processes_is_asked(monkeypatch):
    """As if there were two processes with the same numbers; that real ones agree is for test_distributed.py."""
    group, asked = object(), []
    pretended = {"is_initialized": lambda: True, "get_world_size": lambda group: asked.append(group) or 2}
    for name, function in pretended.items():
        monkeypatch.setattr(statistics.dist, name, function)
    monkeypatch.setattr(statistics.dist, "all_reduce", lambda sums, group: asked.append(group) or sums.mul_(2))
    act = watching(pwlu.PWLU(2, dtype=torch.float64))
    act(torch.tensor([[1.0, 5.0], [3.0, 9.0]], dtype=torch.float64))
    statistics.advance_([act.statistics], group)
    assert asked == [group, group]
    assert act.statistics.running_mean.tolist() == [2.0, 7.0]
    assert act.statistics.running_std.tolist() == [1.0, 2.0]


# Where they go with the model.


def in_phase_one(dtype=torch.float32):
    """A model two steps into Phase I, with something in the pools; the optimizer holds the controller."""
    model = network(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pwlu.TwoPhase(model, optimizer, realign_at=5)
    train(model, optimizer, data(2, dtype=dtype))
    model(data(1, dtype=dtype, seed=3)[0][0])
    return model, optimizer


def watched(model):
    return [
        s for unit in units(model) for s in (unit.statistics.running_mean, unit.statistics.running_std, unit.statistics.pool)
    ]


@pytest.mark.parametrize("half", ["bfloat16", "half"])
def test_a_model_in_half_precision_keeps_statistics_in_float32(half):
    model, optimizer = in_phase_one()
    before = values(watched(model))
    getattr(model, half)()
    assert all(s.dtype == torch.float32 for s in watched(model))
    assert all(p.dtype == getattr(torch, half) for p in model.parameters())
    assert same(before, watched(model))
    train(model, optimizer, data(3, dtype=getattr(torch, half)))
    assert all(unit.statistics.realigned for unit in units(model))


def test_statistics_move_with_the_model():
    model, _optimizer = in_phase_one()
    before = values(watched(model))
    model.double()
    assert all(s.dtype == torch.float64 for s in watched(model))
    assert same(before, [s.float() for s in watched(model)])
    model.to("meta")
    assert all(s.device.type == "meta" for s in watched(model))


def test_the_pool_follows_what_is_moved_one_by_one():
    """As fully_shard does it: parameters and buffers to the device of the mesh, without a call of `to`."""
    act, never_called = (watching(pwlu.PWLU(3)) for _ in range(2))
    for module in (*act.modules(), *never_called.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.to("meta")))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to("meta"))
    act(torch.empty(4, 3, device="meta"))
    statistics.advance_([act.statistics, never_called.statistics])
    assert act.statistics.pool.device.type == "meta"


@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_a_copy_has_the_statistics_and_trains_as_it_is(make):
    """It has no controller, which would let it out of Phase I."""
    model, _optimizer = in_phase_one()
    other = make(model)
    assert same(watched(model), watched(other))
    assert units(other)[0].statistics.pool[0].any()
    assert [unit.phase for unit in units(other)] == [0, 0]
    assert [unit.phase for unit in units(model)] == [1, 1]
    before = values(watched(other))
    model(data(1)[0][0])
    assert same(before, watched(other))
    learned = values(of_units(other))
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), data(1))
    assert not same(learned, of_units(other))
