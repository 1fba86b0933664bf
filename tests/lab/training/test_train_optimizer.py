"""What a step of the optimizer does: groups, schedule, accumulation, averages, penalties, phases."""

import copy

import pytest
import torch
import torch.nn.functional as F
from lab_helpers import after, batches_of, same_state, take_steps, task_of, trainer_of, write_cifar
from networks import assert_equal_to_rounding, bounds_of_rounding, of_units, same, values

from pwlu import baselines
from pwlu.lab.recipes.catalog import RECIPES
from pwlu.learning.curvature import curvature
from pwlu.units.module import PWLU, units_of

SHORT = {"epochs": 3, "realign_epochs": 1.0, "batch": 128}  # 7 steps per epoch


def gradients(trainer):
    """Those with which the next step is taken, by name of the parameter."""
    seen = {}
    names = {id(p): name for name, p in trainer.network.named_parameters()}

    def keep(optimizer, *_):
        for group in optimizer.param_groups:
            seen.update({names[id(p)]: p.grad.clone() for p in group["params"] if p.grad is not None})

    handle = trainer.optimizer.register_step_pre_hook(keep)
    take_steps(trainer, 1)
    handle.remove()
    return seen


# Learning rates and decay.


@pytest.mark.parametrize("activation", ["pwlu", "prelu", "apl", "pau"])
def test_functions_have_no_weight_decay_and_a_rate_of_their_own(activation):
    trainer = trainer_of(task_of(activation=activation, unit_lr=0.5))
    kinds = (PWLU, baselines.PReLU, baselines.APL, baselines.PAU)
    expected = [p for module in trainer.network.modules() if isinstance(module, kinds) for p in module.parameters()]
    weights, functions = trainer.optimizer.param_groups
    assert {id(p) for p in functions["params"]} == {id(p) for p in expected}
    assert len(weights["params"]) + len(functions["params"]) == len(list(trainer.network.parameters()))
    assert (weights["weight_decay"], functions["weight_decay"]) == (RECIPES["digits"].weight_decay, 0.0)
    assert functions["lr"] == 0.5 * weights["lr"]
    assert functions["max_lr"] == 0.5 * weights["max_lr"]


@pytest.mark.parametrize("activation", ["pwlu", "relu"])
def test_normalisation_may_have_a_decay_of_its_own(activation):
    trainer = trainer_of(task_of(activation=activation, norm_weight_decay=0.25))
    weights, norms, *functions = trainer.optimizer.param_groups
    expected = [p for m in trainer.network.modules() if isinstance(m, torch.nn.BatchNorm2d) for p in m.parameters()]
    assert expected
    assert {id(p) for p in norms["params"]} == {id(p) for p in expected}
    assert [g["weight_decay"] for g in (weights, norms, *functions)] == [5e-4, 0.25, *([0.0] if functions else [])]
    assert norms["max_lr"] == weights["max_lr"]
    assert sum(len(g["params"]) for g in (weights, norms, *functions)) == len(list(trainer.network.parameters()))


def test_weight_decay_does_not_move_functions():
    """What a step with momentum makes of a function depends on its gradient alone; weights shrink."""
    settings = {"fix_init": 3.0, "precision": "float64"}
    decaying, plain = (after(1, **settings, weight_decay=decay).network.state_dict() for decay in (0.5, 0.0))
    assert all(torch.equal(decaying[key], plain[key]) for key in plain if key.startswith(("2.", "5.", "8.")))
    assert decaying["0.weight"].norm() < plain["0.weight"].norm()


@pytest.mark.parametrize("batch", [32, 64, 128])
def test_the_learning_rate_follows_the_batch(batch):
    (group,) = trainer_of(task_of(activation="relu", batch=batch)).optimizer.param_groups
    assert group["max_lr"] == pytest.approx(RECIPES["digits"].lr * batch / RECIPES["digits"].batch)


@pytest.mark.parametrize(("warm_up", "peak"), [(0.2, 9), (0.5, 24), (0.0, 0), (0.98, 47)])
def test_the_learning_rate_peaks_where_the_recipe_says(warm_up, peak):
    """49 steps: it rises for `warm_up` of them from a 25th, and falls to nothing."""
    task = task_of(activation="relu", epochs=7, batch=128, lr=0.1, warm_up=warm_up)
    trainer = trainer_of(task)
    rates = []
    for _ in range(49):
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        trainer.optimizer.step()
        trainer.schedule.step()
    highest = 0.1 * 128 / 64
    assert rates.index(max(rates)) == peak
    assert max(rates) == pytest.approx(highest, rel=1 / 49 if warm_up < 1 / 49 else 0.02)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    if peak:
        assert rates[0] == pytest.approx(highest / 25)
    assert rates[-1] < highest / 1e4


def test_the_learning_rate_rises_in_one_step():
    """A fifth of 5: it begins at the peak."""
    trainer = trainer_of(task_of(activation="relu", epochs=1, batch=179, warm_up=0.2))
    (group,) = trainer.optimizer.param_groups
    assert trainer.schedule.total_steps == 5
    assert group["lr"] == pytest.approx(group["max_lr"])


# One step.


def test_seeds():
    state = after(3, **SHORT).network.state_dict()
    assert same_state(state, after(3, **SHORT).network.state_dict())
    other = after(3, **SHORT, seed=1).network.state_dict()
    assert not torch.equal(other["0.weight"], state["0.weight"])
    first, second = (trainer_of(task_of(seed=seed)).network[0].weight for seed in (0, 1))
    assert not torch.equal(first, second)
    orders = [next(batches_of(task_of(seed=seed, augmentation="none")))[0][1] for seed in (0, 1, 0)]
    assert torch.equal(orders[0], orders[2])
    assert not torch.equal(orders[0], orders[1])


@pytest.fixture(scope="module")
def exact():
    """A training in float64 without batch norm, and how far rounding may take another of the same.

    The longest sums are of gradients of a convolution's weights: over a batch and its 8 x 8 positions.
    """
    settings = {"norm": "group", "precision": "float64", **SHORT}

    def run(before_step):
        trainer = trainer_of(task_of(**settings))
        return take_steps(trainer, 10, lambda number: before_step(trainer.network)).network.state_dict()

    return settings, run(lambda model: None), bounds_of_rounding(run, 128 * 64)


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulation(exact, parts):
    settings, expected, bounds = exact
    task = task_of(**settings, accumulate=parts)
    assert [len(labels) for _, labels in next(batches_of(task))] == [128 // parts] * parts
    found = take_steps(trainer_of(task), 10).network.state_dict()
    assert found["2.statistics.realigned"]
    assert_equal_to_rounding(found, expected, bounds)
    assert 0 < bounds["2.weight"] < 1e-8 * expected["2.weight"].abs().max()  # the bounds say something


def test_moving_average():
    """That of torch's documentation: the first is copied, then d times the average and (1 - d) times the weights."""
    trainer = trainer_of(task_of(**SHORT, ema=0.9, precision="float64"))
    assert trainer.measured is not trainer.network
    kept = None

    def update(number):
        nonlocal kept
        if number == 0:
            return
        now = {name: p.detach().clone() for name, p in trainer.network.named_parameters()}
        if kept is None:
            kept = now
        elif number == 7:  # the step that ended Phase I: where functions now are is no place between old and new
            units = units_of(trainer.network)
            kept = {n: p if n.removesuffix(".weight") in units else 0.9 * kept[n] + 0.1 * p for n, p in now.items()}
        else:
            kept = {n: 0.9 * kept[n] + 0.1 * p for n, p in now.items()}

    take_steps(trainer, 10, update)
    update(10)
    assert trainer.phase == 2
    for name, average in trainer.measured.named_parameters():
        torch.testing.assert_close(average, kept[name], rtol=1e-14, atol=1e-15)
    for (name, buffer), own in zip(trainer.measured.named_buffers(), trainer.network.buffers(), strict=True):
        assert torch.equal(buffer, own), name
    plain = after(10, **SHORT, precision="float64")
    assert same_state(plain.network.state_dict(), trainer.network.state_dict())  # it does not disturb the training
    assert trainer_of(task_of()).average is None


def test_label_smoothing():
    """It applies to the training loss, not to what is measured."""
    task = task_of(label_smoothing=0.1)
    (batch,) = next(batches_of(task))
    network = trainer_of(task).network
    loss, sums = task.loss(network, batch)
    logs = F.log_softmax(network(batch[0]), 1)
    expected = -(0.9 * logs[range(64), batch[1]] + 0.1 * logs.mean(1)).mean()
    torch.testing.assert_close(loss, expected)
    assert sums[0] == pytest.approx(64 * loss.item())
    assert sums[2] == 64
    measured = [task_of(label_smoothing=s).measure(copy.deepcopy(network), torch.no_grad()) for s in (0.0, 0.1)]
    assert measured[0] == measured[1]


def test_what_is_measured():
    task = task_of()
    network = trainer_of(task).network.eval()
    test = task.data.test
    outputs = network((test.images.float() - test.mean) / test.std).double()
    expected = -F.log_softmax(outputs, 1)[range(899), test.labels].mean().item()
    found = task.measure(network, torch.no_grad())
    assert found["test_loss"] == pytest.approx(expected, rel=1e-6)
    assert found["accuracy"] == 100 * (outputs.argmax(1) == test.labels).sum().item() / 899
    assert network.training


# What is peculiar to PWLUs.


def test_curvature_is_penalised_in_phase_two():
    settings = {**SHORT, "fix_init": 3.0, "precision": "float64"}
    plain, penalised = (trainer_of(task_of(**settings, curvature=factor)) for factor in (0.0, 0.25))
    penalty = curvature(penalised.network)
    expected = torch.autograd.grad(0.25 * penalty, [unit.weight for unit in penalised.units.values()])
    without, with_it = gradients(plain), gradients(penalised)
    for name, gradient in zip(penalised.units, expected, strict=True):
        assert gradient.abs().max() > 1e-4
        torch.testing.assert_close(with_it[f"{name}.weight"] - without[f"{name}.weight"], gradient, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(with_it["0.weight"], without["0.weight"])


def test_curvature_does_not_matter_without_pwlus():
    """Ignore it, as other settings of PWLUs, so that one comparison can train ReLU as well. It raised an error."""
    plain, penalised = (after(2, **SHORT, activation="relu", curvature=factor).network.state_dict() for factor in (0.0, 0.25))
    assert same_state(plain, penalised)


def test_curvature_is_not_penalised_in_phase_one():
    for count, equal in ((7, True), (8, False)):  # the 8th step is the first of Phase II
        plain, penalised = (after(count, **SHORT, curvature=factor).network.state_dict() for factor in (0.0, 0.25))
        assert same_state(plain, penalised) == equal


def test_phases():
    """Functions stand still for T' epochs of steps, at least for one step, then lie where their inputs are, and learn."""
    trainer = trainer_of(task_of(**{**SHORT, "realign_epochs": 1.5}))  # 10.5 steps: 10, to the even one
    seen = []
    take_steps(trainer, 12, lambda number: seen.append(values(of_units(trainer.network))))
    assert all(same(seen[0], later) for later in seen[1:10])
    assert not same(seen[0], seen[10])
    assert not same(seen[10], seen[11])
    assert trainer.phase == 2
    assert all(unit.statistics.steps == 10 for unit in trainer.units.values())
    assert trainer_of(task_of(**{**SHORT, "realign_epochs": 0.01})).phases.realign_at == 1


def test_fixed_initialisation():
    """No Phase I: functions learn from the first step, from where they were put."""
    trainer = trainer_of(task_of(fix_init=2.0))
    assert trainer.phases is None
    assert trainer.phase == 2
    for unit in trainer.units.values():
        assert (unit.left == -2).all()
        assert (unit.right == 2).all()
    before = values(of_units(trainer.network))
    take_steps(trainer, 1)
    assert not same(before, values(of_units(trainer.network)))


def test_what_functions_are():
    by_layer = trainer_of(task_of(granularity="layer", intervals=8, init="silu")).units
    assert [(unit.channels, unit.intervals, unit.init) for unit in by_layer.values()] == [(1, 8, "silu")] * 3
    by_channel = trainer_of(task_of()).units
    assert [(unit.channels, unit.intervals, unit.init) for unit in by_channel.values()] == [
        (c, 16, "relu") for c in (8, 16, 16)
    ]
    assert not trainer_of(task_of(activation="swish")).units


def test_a_recipe_with_adam(tmp_path):
    """Divide the learning rate by 10 for the last fifth of training."""
    data = str(write_cifar(tmp_path))
    trainer = trainer_of(task_of("cifar100/mobilenet_v1", data=data, activation="relu", width=0.125, batch=4, epochs=10))
    assert type(trainer.optimizer) is torch.optim.Adam
    (group,) = trainer.optimizer.param_groups
    assert (group["weight_decay"], group["initial_lr"]) == (0.0, 1e-3 * 4 / 64)
    (factor,) = trainer.schedule.lr_lambdas
    assert [factor(step) for step in (0, 23, 24, 29)] == pytest.approx([1, 1, 0.1, 0.1])
    maps = []
    trainer.network[-3].register_forward_hook(lambda module, inputs, output: maps.append(inputs[0].shape[-2:]))
    trainer.network(torch.zeros(2, 3, 32, 32))
    assert maps == [(2, 2)]
