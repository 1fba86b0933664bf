"""The learning rules of experiments/: their mathematics, the rules at work, and the table in the README."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lab_helpers import batches_of, one_thread, task_of, trainer_of
from torch import nn

import pwlu
from pwlu.initial_functions import find_initial_function

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
sys.path.insert(0, str(EXPERIMENTS))
import learning_rules  # noqa: E402
import rule_functions as functions  # noqa: E402
from rule_functions import HEIGHTS, LEFT_SLOPE, Layers  # noqa: E402
from rule_learner import Bank, Learner, Rule, input_statistics  # noqa: E402
from rule_training import RULE_FIELDS, SETTINGS, parse  # noqa: E402

N = 8


def tables(counts=(5, 3), intervals=N):
    """Random functions of layers with so many channels, float64."""
    rows = sum(counts)
    left, right = -1 - torch.rand(rows, 1), 1 + torch.rand(rows, 1)
    return torch.cat([left, right, torch.randn(rows, intervals + 3)], 1).double(), Layers.of(list(counts))


def units():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU())
    pwlu.convert_(model, torch.zeros(2, 3, 8, 8), intervals=N)
    found = [unit for unit in model.modules() if isinstance(unit, pwlu.PWLU)]
    for unit in found:
        unit.weight.data += 0.3 * torch.randn_like(unit.weight)
    return model, found


def scaled(table, **factors):
    """A copy with bounds, slopes and heights times numbers."""
    slices = {"bounds": slice(0, LEFT_SLOPE), "slopes": slice(LEFT_SLOPE, HEIGHTS), "heights": slice(HEIGHTS, None)}
    table = table.clone()
    for name, factor in factors.items():
        table[:, slices[name]] *= factor
    return table


def close(a, b, atol=1e-12):
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype).expand_as(a), rtol=1e-9, atol=atol)


def test_bank_there_and_back():
    _, (first, second) = units()
    bank = Bank([first, second])
    table = bank.values()
    row = table[6 + 2]
    expected = [second.left[2], second.right[2], second.left_slope[2], second.right_slope[2], *second.heights[2]]
    assert row.tolist() == [value.item() for value in expected]
    before = [weight.detach().clone() for weight in bank.weights]
    bank.write(bank.weights, table * 2)
    assert all(torch.equal(weight, old * 2) for weight, old in zip(bank.weights, before, strict=True))
    assert bank.layers.index.tolist() == [0] * 6 + [1] * 4
    assert bank.layers.channels[:, 0].tolist() == [6] * 6 + [4] * 4


def test_curv_is_the_curvature_of_the_package():
    model, found = units()
    bank = Bank(found)
    expected = pwlu.curvature(model)
    table = bank.values().requires_grad_()
    total = functions.penalty("curv", table, bank.layers).sum()
    torch.testing.assert_close(total, expected)
    gradients = torch.autograd.grad(expected, bank.weights)
    torch.testing.assert_close(torch.autograd.grad(total, table)[0], bank.table(gradients), rtol=1e-4, atol=1e-5)


def test_shared_gradients():
    table, layers = tables()
    table[:, 0], table[:, 1] = -1, 1  # equal bounds: plain sums
    gradient = torch.randn_like(table)
    roots = functions.shared(gradient, table, layers, 0.5, root=True)
    sums = functions.shared(gradient, table, layers, 0.1, root=False)
    assert torch.equal(roots[:, :2], gradient[:, :2])
    # channels are counted in float32
    torch.testing.assert_close(roots[0, 2:], gradient[0, 2:] + 0.5 * gradient[:5, 2:].sum(0) / 5**0.5, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(roots[6, 2:], gradient[6, 2:] + 0.5 * gradient[5:, 2:].sum(0) / 3**0.5, rtol=1e-6, atol=1e-6)
    close(sums[6, 2:], gradient[6, 2:] + 0.1 * gradient[5:, 2:].sum(0))


def test_shared_gradients_of_unequal_bounds():
    """The matrix is symmetric, and the size of inputs does not matter."""
    table, layers = tables()
    a, b = torch.randn_like(table), torch.randn_like(table)
    share = lambda gradient, table=table: functions.shared(gradient, table, layers, 0.5, root=True)  # noqa: E731
    close((share(a) * b).sum(), (a * share(b)).sum())
    close(share(a), share(a, scaled(table, bounds=7, heights=7)))


def test_smoother():
    matrix = functions.smoother(N, 4.0)
    values = torch.linalg.eigvalsh(matrix)
    close(matrix, matrix.T)
    close(matrix.sum(0), 1)
    assert 0 < values.min() < 0.1
    assert values.max() < 1 + 1e-12


@pytest.mark.parametrize(
    ("table_factors", "gradient_factors"),
    [
        ({"bounds": 3, "heights": 3}, {"bounds": 11 / 3, "slopes": 11, "heights": 11 / 3}),  # inputs x 3, loss x 11
        ({"slopes": 5, "heights": 5}, {"slopes": 1 / 5, "heights": 1 / 5}),  # outputs x 5, in front of a norm
    ],
)
def test_relative_steps_are_free_of_scale(table_factors, gradient_factors):
    table, _ = tables()
    gradient = torch.randn_like(table)

    def step(table, gradient):
        second = torch.zeros(len(table), 1, dtype=table.dtype)
        return functions.relative_step(gradient, table, second, 1) / functions.natural_units(table)

    close(step(table, gradient).square().mean(1), 1)
    close(step(scaled(table, **table_factors), scaled(gradient, **gradient_factors)), step(table, gradient))


def test_implicit_bend():
    vectors, values = functions.bending(N)
    assert values[1] < 1e-12 < 1e-6 < values[2]  # two directions have no bends: the straight lines
    table, _ = tables()
    bend = lambda table, strength, start=None: functions.implicit_bend(  # noqa: E731
        table, torch.full((len(table), 1), strength).double(), vectors, values, start
    )
    small = bend(table, 1e-7) - table  # a step of gradient descent in (K_L d, Y, K_R d)
    leaf = table.clone().requires_grad_()
    gradient = torch.autograd.grad(0.5 * functions.rises(leaf).diff().square().sum(), leaf)[0]
    d = functions.interval(table)
    step = float(torch.tensor(1e-7))  # as float32 has it
    torch.testing.assert_close(small[:, HEIGHTS:], -step * gradient[:, HEIGHTS:], rtol=1e-5, atol=1e-12)
    slopes = slice(LEFT_SLOPE, HEIGHTS)
    torch.testing.assert_close(small[:, slopes] * d, -step * gradient[:, slopes] / d, rtol=1e-5, atol=1e-12)
    assert not small[:, :LEFT_SLOPE].any()
    line = bend(table, 1e9)
    assert functions.rises(line).diff().abs().max() < 1e-6
    close(bend(line, 5.0), line, atol=1e-6)


def test_the_start_function_is_free_of_penalty():
    table, layers = tables()
    silu = find_initial_function("silu")
    start = functions.initial_table(table, silu)
    vectors, values = functions.bending(N)
    close(functions.implicit_bend(start, torch.full((len(table), 1), 5.0), vectors, values, silu), start)
    for name in ("curv", "relcurv", "tv2"):
        assert functions.penalty(name, start, layers, silu).max() < 1e-12
        assert functions.penalty(name, start, layers).min() > 1e-3


@pytest.mark.parametrize("name", ["relcurv", "reldev"])
def test_relative_penalties_are_free_of_scale(name):
    table, layers = tables()
    penalty = functions.penalty(name, table, layers)
    close(functions.penalty(name, scaled(table, bounds=3, heights=3), layers), penalty)
    close(functions.penalty(name, scaled(table, slopes=3, heights=3), layers), penalty)


def test_dev_is_zero_for_equal_shapes():
    table, layers = tables()
    d = functions.interval(table)
    table[:5, LEFT_SLOPE:HEIGHTS] = table[0, LEFT_SLOPE:HEIGHTS]
    table[:5, HEIGHTS:] = table[0, HEIGHTS:] / d[0] * d[:5]
    penalty = functions.penalty("dev", table, layers)
    assert penalty[:5].max() < 1e-20
    assert penalty[5:].min() > 1e-3


def test_regrid_keeps_the_function():
    table, _ = tables(intervals=16)
    left, right, d = table[:, :1], table[:, 1:2], functions.interval(table)
    same, _, error = functions.regrid(table, left, right)
    close(same, table)
    assert error.max() < 1e-12
    new, momentum, error = functions.regrid(table, left + 4 * d, left + 12 * d, table)  # half as wide: old knots stay
    x = left + 4 * d + 8 * d * torch.linspace(0, 1, 200)
    close(functions.evaluate(new, x), functions.evaluate(table, x), atol=1e-10)
    assert error.max() < 1e-10
    close(momentum[:, LEFT_SLOPE:], new[:, LEFT_SLOPE:])
    assert not momentum[:, :LEFT_SLOPE].any()
    knots = left + torch.arange(17) * d
    smooth = torch.cat([left, right, torch.tensor([[0.1, 0.9]]).expand(len(left), -1), F.silu(knots)], 1)
    new, _, error = functions.regrid(smooth, left - 0.7, right + 0.5)  # wider: the outer slopes stay
    close(new[:, LEFT_SLOPE:HEIGHTS], smooth[:, LEFT_SLOPE:HEIGHTS], atol=1e-7)
    assert error.max() < 0.02


def test_regrid_maps_the_momentum_as_a_change_of_the_function():
    table, _ = tables(intervals=16)
    left, right = table[:, :1] + 0.3, table[:, 1:2] - 0.1
    momentum = scaled(torch.randn_like(table), bounds=0)
    before, moved, _ = functions.regrid(table, left, right, momentum)
    after, _, _ = functions.regrid(table + 0.01 * momentum, left, right)
    close(before + 0.01 * moved, after)


def test_gain():
    table, layers = tables(intervals=16)
    mean, std = torch.zeros(len(table), 1).double(), torch.full((len(table), 1), 0.7).double()
    gain = functions.rms_slope(table, mean, std)
    out = functions.with_gain(table, 1.0, gain)
    assert torch.equal(out[:, :2], table[:, :2])
    close(functions.rms_slope(out, mean, std), 1)
    ratio = out[:, 2:] / table[:, 2:]
    close(ratio, ratio[:, :1])
    per_layer = functions.with_gain(table, 2.0, functions.layer_gain(gain, layers))
    for part in (slice(0, 5), slice(5, 8)):  # one factor for all channels of a layer
        close(functions.rms_slope(per_layer, mean, std)[part].square().mean(), 4)
        close(per_layer[part, 2:] / table[part, 2:], per_layer[part.start, 2] / table[part.start, 2])
    close(functions.input_fractions(table, mean, std).sum(1), 1)
    x = (0.7 * torch.randn(len(table), 100_000).double()).requires_grad_()  # the same by sampling
    functions.evaluate(table, x).sum().backward()
    sampled = x.grad.square().mean(1).sqrt()
    torch.testing.assert_close(sampled, functions.rms_slope(table, mean, std)[:, 0], rtol=0.02, atol=0)


def test_input_statistics():
    model, found = units()
    seen = []
    found[0].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].detach()))
    mean, std = input_statistics(Bank(found), model, (torch.randn(4, 3, 8, 8) for _ in range(3)))
    inputs = torch.cat(seen).transpose(0, 1).flatten(1)
    assert inputs.shape == (6, 3 * 4 * 36)
    torch.testing.assert_close(mean[:6, 0], inputs.mean(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(std[:6, 0], inputs.std(1, correction=0), rtol=1e-4, atol=1e-5)
    assert len(mean) == 10
    assert model.training
    model(torch.randn(4, 3, 8, 8))
    assert len(found[1]._forward_pre_hooks) == 0


# Rules at work.


def weights_after(rule, /, steps=10, **changes):
    """The weights of the PWLUs of the digits' network after some steps, the first of them Phase I."""
    task = task_of(batch=64, realign_epochs=3 / 14, fuse_norms="off", **changes)
    trainer = trainer_of(task)
    bank = Bank(trainer.units.values())
    learner = Learner(rule, bank, None, trainer, peak=0.2) if rule else None
    with one_thread():
        for number, batches in zip(range(steps), batches_of(task), strict=False):
            if learner:
                learner.begin(number % task.steps_per_epoch, task.steps_per_epoch)
            trainer.step(number, batches)
            if learner and learner.last_step:
                learner.end_epoch((number + 1) // task.steps_per_epoch, epochs=4)
    return torch.cat([weight.detach() for weight in bank.weights])


def test_scale_of_penalties():
    task = task_of(batch=64, fuse_norms="off")
    trainer = trainer_of(task)
    bank = Bank(trainer.units.values())
    learner = Learner(Rule(curv=0.1, mean=True, sigma=True), bank, None, trainer, peak=0.2)
    table = bank.values()
    assert torch.equal(learner._scale(table), 1 / bank.layers.channels)  # nothing was measured yet
    learner.std = torch.rand_like(table[:, :1])
    ratio = 6 * learner.std / (table[:, 1:2] - table[:, :1])
    close(learner._scale(table), ratio.square() / bank.layers.channels, atol=1e-6)

    learner = Learner(Rule(curv=0.1, rootmean=True, late=True), bank, None, trainer, peak=0.2)
    learner.group["lr"] = 0.05
    close(learner._scale(table), 0.75 / bank.layers.channels.sqrt(), atol=1e-6)

    learner = Learner(Rule(curv=0.1, information=True), bank, None, trainer, peak=0.2)
    learner.squares, learner.measured = 0.01 * (1 + bank.layers.index[:, None].float()), 1  # one step
    close(learner._scale(table), 1 + bank.layers.index[:, None].float(), atol=1e-5)


def test_rules_at_work():
    """The rule curv does as the setting curvature, no rule does nothing, and sharing does something."""
    plain = weights_after(None)
    assert torch.equal(weights_after(Rule()), plain)
    curved = weights_after(None, curvature=0.1)
    torch.testing.assert_close(weights_after(Rule(curv=0.1)), curved, rtol=1e-4, atol=1e-5)
    for other in (curved, weights_after(Rule(sharesum=1.0)), weights_after(Rule(curv=0.1, prox=True))):
        assert (other - plain).abs().max() > 1e-3
    shared, faded = weights_after(Rule(sharesum=1.0)), weights_after(Rule(sharesum=1.0, fade=True))
    assert not torch.equal(shared, faded)
    both = weights_after(Rule(sharesum=1.0, curv=0.1, shareall=True))
    assert not torch.equal(both, weights_after(Rule(sharesum=1.0, curv=0.1)))
    assert torch.equal(weights_after(Rule(sharesum=1.0, shareall=True)), shared)
    library = weights_after(Rule(lib=True, libshare=1.0, libbend=0.0))
    torch.testing.assert_close(library, shared, rtol=1e-4, atol=1e-5)
    library = weights_after(None, rule="shared")
    assert torch.equal(weights_after(Rule(lib=True)), library)
    in_words = weights_after(Rule(sharesum=0.1, shareall=True, curv=0.03, mean=True, prox=True))
    torch.testing.assert_close(in_words, library, rtol=1e-4, atol=1e-5)
    assert (weights_after(Rule(sharesum=0.1, curv=0.03, mean=True, prox=True)) - library).abs().max() > 1e-4


@pytest.mark.parametrize(
    "text",
    [
        "share=1 precond=4 relstep=0.003 decayB curv=0.002 relcurv=1e-4 prox mean regrid=1 gain=-1 jitter=0.5",
        "sharesum=0.1 fade curv=0.001 gain=-1 layergain",
        "shareall sharesum=0.1 curv=0.1 mean sigma",
        "shareall sharesum=0.1 curv=100 sigma prox",
        "shareall sharesum=0.1 curv=10 rootmean information late",
        "tv2=1e-4 dev=1e-3 reldev=1e-5 relcurv=1e-5 gain=1",
    ],
)
def test_rules_together(text):
    weights = weights_after(parse(text)[0], steps=16)
    assert weights.isfinite().all()
    assert weights.abs().max() < 100


def test_words():
    assert parse("layer curv=0.03 prox init=swish N=8") == (
        Rule(curv=0.03, prox=True),
        {"activation": "pwlu", "granularity": "layer", "init": "swish", "intervals": 8},
    )
    for text in ("curv", "prox=1", "curv=x", "N", "spline"):
        with pytest.raises(ValueError, match=f"'{text}' is not a word of rules. Write relu, "):
            parse(text)
    with pytest.raises(ValueError, match="curv works only for PWLUs: leave out relu"):
        parse("relu curv=1")


def test_readme():
    """The table is that of the results, all rules can be read, and every word is described."""
    text = (EXPERIMENTS / "README.md").read_text()
    assert learning_rules.table(learning_rules.read_results(learning_rules.TRIED)) in text
    for rules in learning_rules.blocks().values():
        assert all(map(parse, rules))
    assert [name for name in [*RULE_FIELDS, *SETTINGS] if f"- `{name}" not in text] == []
