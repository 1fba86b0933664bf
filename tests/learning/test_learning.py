"""The two phases: nothing moves in Phase I but the weights, everything does in Phase II, in whatever loop."""

import functools

import pytest
import torch
import torch.nn.functional as F
from networks import assert_equal_to_rounding, bounds_of_rounding, data, network, of_units, same, train, units, values, weights
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pwlu

U = 2.0**-53
pytestmark = pytest.mark.filterwarnings(
    "ignore:TwoPhase. the PWLUs have a weight decay"
)  # to see that it does not move them in Phase I
SGD = functools.partial(optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1)
OPTIMIZERS = {
    "SGD": SGD,
    "AdamW": functools.partial(optim.AdamW, lr=0.01, weight_decay=0.1),
    "Adam": functools.partial(optim.Adam, lr=0.01, weight_decay=0.1),
    "RMSprop": functools.partial(optim.RMSprop, lr=0.01, weight_decay=0.1, momentum=0.9),
}
WAYS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
MADE = [
    pytest.param(functools.partial(make, **way), id=f"{name}-{how}")
    for name, make in OPTIMIZERS.items()
    for how, way in WAYS.items()
    if (name, how) != ("RMSprop", "fused")  # there is none
]
LBFGS = [
    pytest.param(functools.partial(optim.LBFGS, lr=0.1, max_iter=4, line_search_fn=search), id=f"LBFGS-{search}")
    for search in (None, "strong_wolfe")
]


def step(model, optimizer, batch, call="plain"):
    x, target = batch

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        return loss

    if call == "plain":
        closure()
        optimizer.step()
    elif call == "positional":
        optimizer.step(closure)
    else:
        optimizer.step(closure=closure)


# Phase I.


@pytest.mark.parametrize(
    ("make", "call"),
    [pytest.param(*m.values, call, id=f"{m.id}-{call}") for m in MADE for call in ("plain", "positional", "keyword")]
    + [pytest.param(*m.values, call, id=f"{m.id}-{call}") for m in LBFGS for call in ("positional", "keyword")],
)
def test_units_stand_still_in_phase_one_and_learn_in_phase_two(make, call):
    """Exactly still: not by momentum, not by weight decay. The optimizer knows nothing of them when Phase II begins."""
    model = network(init="silu")
    optimizer = make(model.parameters())
    phases = pwlu.TwoPhase(model, optimizer, realign_at=3)
    start, learned = values(of_units(model)), of_units(model)
    batches = data(5)
    for i in range(2):
        before = values(weights(model))
        step(model, optimizer, batches[i], call)
        assert (phases.phase, phases.steps) == (1, i + 1)
        assert same(start, learned)
        assert not any(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    step(model, optimizer, batches[2], call)
    assert (phases.phase, phases.steps) == (2, 3)
    assert not any(p in optimizer.state for p in learned)
    realigned = values(learned)
    assert not same(start, realigned)
    step(model, optimizer, batches[3], call)
    for unit, weight in zip(units(model), realigned, strict=True):
        before = pwlu.reference.unpack(weight, unit.intervals)
        assert not torch.equal(unit.heights, before.heights)
        assert not torch.equal(unit.left, before.left)
        assert not torch.equal(unit.right, before.right)
    assert phases.steps == 3


@pytest.mark.parametrize("make", MADE)
def test_weights_train_in_phase_one_as_with_relu(make):
    """To the bit: the units compute ReLU exactly, and every other operation is the same one."""
    models = network(), network(activation=nn.ReLU)
    for model in models:
        optimizer = make(model.parameters())
        if units(model):
            pwlu.TwoPhase(model, optimizer, realign_at=6)
        train(model, optimizer, data(5))
    assert same(weights(models[0]), weights(models[1]))
    assert not same(weights(models[0]), weights(network()))


def test_evaluation_between_steps_changes_nothing():
    models = network(), network()
    for model, evaluated in zip(models, (False, True), strict=True):
        optimizer = SGD(model.parameters())
        pwlu.TwoPhase(model, optimizer, realign_at=3)
        for batch in data(5):
            train(model, optimizer, [batch])
            if evaluated:
                model.eval()(100 * batch[0])
                model.train()
    assert same(models[0].state_dict().values(), models[1].state_dict().values())


# Loops of every kind, none of which says anything about phases.


def test_accumulated_gradients_are_one_step_with_the_statistics_of_the_whole_batch():
    """The same numbers in four calls: sums of up to 128 terms, and 8 operations for each call, are rounded differently."""
    whole, parts = (network(torch.float64) for _ in range(2))
    (x, target), *_ = data(1, dtype=torch.float64)
    largest = []
    for model, pieces in ((whole, [slice(None)]), (parts, [slice(0, 3), slice(3, 4), slice(4, 10), slice(10, 16)])):
        for unit in units(model):
            unit.register_forward_pre_hook(lambda _, inputs: largest.append(inputs[0].abs().max().item()))
        optimizer = SGD(model.parameters())
        phases = pwlu.TwoPhase(model, optimizer, realign_at=2)
        for piece in pieces:
            (F.mse_loss(model(x[piece]), target[piece], reduction="sum") / target.numel()).backward()
        optimizer.step()
        assert phases.steps == 1
    roundings = (128 + 4 * 8) * U * max(largest)
    for a, b in zip(units(whole), units(parts), strict=True):
        assert (b.statistics.updates == 1).all()
        torch.testing.assert_close(a.statistics.running_mean, b.statistics.running_mean, rtol=0, atol=4 * roundings)
        # sigma² is known to 4 (2 largest) `roundings`, as in the test of pools
        sigma = a.statistics.running_std.min().item()
        torch.testing.assert_close(
            a.statistics.running_std, b.statistics.running_std, rtol=0, atol=8 * max(largest) * roundings / sigma
        )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [optim.SGD, optim.AdamW])
def test_a_step_that_gradscaler_skips_does_not_count(make, fused):
    """What was pooled is kept for the next step: the inputs were seen all the same."""
    model = network()
    optimizer = make(model.parameters(), lr=0.05, fused=fused)
    phases = pwlu.TwoPhase(model, optimizer, realign_at=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def scaled_step(batch, factor=1.0):
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(batch[0]), batch[1]) * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    batches = data(5)
    scaled_step(batches[0])
    before = values(weights(model))
    scaled_step(batches[1], torch.inf)
    assert scaler.get_scale() == 4.0
    assert same(before, weights(model))
    assert (phases.phase, phases.steps) == (1, 1)
    assert (units(model)[0].statistics.pool[0] == 16).all()
    scaled_step(batches[2])
    assert phases.steps == 2
    assert not same(before, weights(model))
    assert (units(model)[0].statistics.updates == 2).all()
    scaled_step(batches[3], torch.inf)
    assert phases.phase == 1
    scaled_step(batches[4])
    assert phases.phase == 2
    assert [r.kept for r in phases.report] == [0, 0]


def test_the_norm_of_clipped_gradients_is_that_of_the_weights():
    """Units have gradients in Phase I, all zero: a norm of n numbers is known to n u."""
    model = network(torch.float64)
    optimizer = SGD(model.parameters())
    pwlu.TwoPhase(model, optimizer, realign_at=2)
    for x, target in data(1, dtype=torch.float64):
        F.mse_loss(model(x), target).backward()
    assert all(p.grad is not None and not p.grad.any() for p in of_units(model))
    size = sum(p.numel() for p in model.parameters())
    expected = torch.cat([p.grad.reshape(-1) for p in weights(model)]).norm()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert norm > 0.1
    torch.testing.assert_close(norm, expected, rtol=2 * size * U, atol=0)
    clipped = torch.cat([p.grad.reshape(-1) for p in weights(model)]).norm().item()
    assert clipped == pytest.approx(0.1, rel=1e-5)  # clip_grad_norm_ divides by norm + 1e-6


def test_an_average_of_models_is_realigned_with_its_model():
    """Between two functions with different bounds an average would be neither."""
    model = network()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = SGD(model.parameters())
    pwlu.TwoPhase(model, optimizer, realign_at=3, copies=[average])
    for i, batch in enumerate(data(5), start=1):
        train(model, optimizer, [batch])
        average.update_parameters(model)
        assert same(of_units(model), of_units(average)) == (i <= 3)
        assert all(bool(unit.statistics.realigned) == (i >= 3) for unit in units(average))
    assert not same(weights(model), weights(average))
    assert [unit.phase for unit in units(average)] == [0, 0]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_is_compiled_once_more_for_phase_two(backend):
    torch._dynamo.reset()
    compiler, graphs = torch._dynamo.lookup_backend(backend), []

    def counted(graph, inputs):
        graphs.append(graph)
        return compiler(graph, inputs)

    def run(before_step, compiled=False):
        model = network(torch.float64)
        optimizer = SGD(model.parameters())
        phases = pwlu.TwoPhase(model, optimizer, realign_at=3)
        called = torch.compile(model, backend=counted, fullgraph=True) if compiled else model
        for i, batch in enumerate(data(6, dtype=torch.float64), start=1):
            before_step(model)
            train(called, optimizer, [batch])
            assert phases.phase == (1 if i < 3 else 2)
            assert len(graphs) == compiled * (1 if i <= 3 else 2)
        return model.state_dict()

    bounds = bounds_of_rounding(run, 128)  # the longest sums are those of the second unit, over 16 times 8
    still = lambda model: None  # noqa: E731
    expected = run(still)
    assert_equal_to_rounding(run(still, compiled=True), expected, bounds)


def test_a_compiled_model_may_be_given_instead():
    torch._dynamo.reset()
    model = network()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = SGD(compiled.parameters())
    phases = pwlu.TwoPhase(compiled, optimizer, realign_at=2)
    train(compiled, optimizer, data(2))
    assert phases.phase == 2
    assert all(unit.statistics.realigned for unit in units(model))


SCHEDULERS = {
    "OneCycleLR": lambda o: optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=6),
    "CosineAnnealingLR": lambda o: optim.lr_scheduler.CosineAnnealingLR(o, T_max=6),
    "SequentialLR": lambda o: optim.lr_scheduler.SequentialLR(
        o, [optim.lr_scheduler.LinearLR(o, total_iters=2), optim.lr_scheduler.StepLR(o, 2)], [2]
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("first", ["scheduler", "phases"])
def test_schedules_need_no_change(schedule, first):
    """Made before or after: the same rates as without phases, and the same steps counted."""
    rates = {}
    for kind in (None, first):
        model = network()
        optimizer = SGD(model.parameters())
        if kind == "phases":
            phases = pwlu.TwoPhase(model, optimizer, realign_at=3)
        scheduler = SCHEDULERS[schedule](optimizer)
        if kind == "scheduler":
            phases = pwlu.TwoPhase(model, optimizer, realign_at=3)
        rates[kind] = []
        for i, batch in enumerate(data(6), start=1):
            rates[kind].append(optimizer.param_groups[0]["lr"])
            train(model, optimizer, [batch], scheduler if i < 6 else None)
            assert kind is None or phases.phase == (1 if i < 3 else 2)
    assert rates[None] == rates[first]
    assert len(set(rates[first])) > 1
