"""TwoPhase as an object: who holds it, how it lets go, what it refuses; and the functions for groups and freezing."""

import copy
import functools
import gc
import math
import os
import weakref

import networks
import pytest
import torch
from networks import data, network, of_units, same, train, units, values, weights
from torch import nn
from torch.optim.swa_utils import AveragedModel

import pwlu

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def controlled(realign_at=3, steps=0):
    model = network()
    optimizer = SGD(model.parameters())
    phases = pwlu.TwoPhase(model, optimizer, realign_at)
    train(model, optimizer, data(steps))
    return model, optimizer, phases


# Who holds it.


def test_it_does_not_hold_the_optimizer():
    """Nor what the optimizer holds: a model that nobody else has is freed without the garbage collector."""
    model, optimizer, phases = controlled(steps=1)
    alive = weakref.ref(optimizer)
    del optimizer
    assert alive() is None
    assert phases.phase == 0
    alive = weakref.ref(model)
    del model, phases
    assert alive() is None


@pytest.fixture
def nothing_collected():
    """Cycles of references stay, however long ago they were dropped."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("kind", ["alone", "scheduled", "in a cycle"])
def test_a_dropped_optimizer_allows_a_new_one(held, kind, nothing_collected):
    """As when a cell of a notebook is run again. In some versions of torch a scheduler and its optimizer hold each other."""
    model, optimizer, phases = controlled(steps=1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9) if kind == "scheduled" else None
    if kind == "in a cycle":
        optimizer.owner = [optimizer]
    alive = weakref.ref(optimizer)
    if not held:
        del phases
    del scheduler
    optimizer = SGD(model.parameters())
    assert kind != "in a cycle" or alive() is not None
    again = pwlu.TwoPhase(model, optimizer, realign_at=3)
    assert (again.phase, again.steps) == (1, 1)
    train(model, optimizer, data(2))
    assert (again.phase, again.steps) == (2, 3)


def test_the_repr_says_where_it_is():
    model, optimizer, phases = controlled(realign_at=2, steps=1)
    assert repr(phases) == "TwoPhase(2 PWLUs, Phase I, 1 of 2 steps of Phase I taken)"
    train(model, optimizer, data(2))
    assert repr(phases) == "TwoPhase(2 PWLUs, Phase II, 2 of 2 steps of Phase I taken)"
    phases.remove()
    assert repr(phases) == "TwoPhase(2 PWLUs, removed, 2 of 2 steps of Phase I taken)"


def test_fusing_in_phase_one_is_a_warning():
    model, *_ = controlled(steps=1)
    with pytest.warns(UserWarning, match="fuse_: 1, 3 is still in Phase I and has not learned"):
        pwlu.fuse_(copy.deepcopy(model))


@pytest.mark.parametrize(("steps", "warned"), [(0, False), (2, True), (3, False)])
def test_a_process_that_ends_in_phase_one_says_so(steps, warned, processes):
    code = f"""
import warnings, torch, pwlu
warnings.simplefilter("default")
model = torch.nn.Sequential(torch.nn.Linear(3, 3), pwlu.PWLU(3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pwlu.TwoPhase(model, optimizer, realign_at=3)
for _ in range({steps}):
    model(torch.randn(8, 3)).sum().backward()
    optimizer.step()
"""
    done = processes(["-c", code], dict(os.environ))
    assert not done.returncode, done.stderr
    assert ("the process ends in Phase I, after 2 of 3 steps" in done.stderr) == warned


def test_weight_decay_of_units_is_a_warning():
    model = network()
    with pytest.warns(UserWarning, match=r"weight decay of 0\.1, .*pwlu\.parameter_groups"):
        pwlu.TwoPhase(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1), 3)


def test_another_optimizer_that_takes_over_is_a_warning():
    """Its steps do not count; it says so once."""
    model, _optimizer, phases = controlled(realign_at=2, steps=1)
    other = SGD(model.parameters())
    with pytest.warns(UserWarning, match=r"another optimizer \(SGD\) that holds 1, 3 does not count.*Call remove\(\)") as said:
        train(model, other, data(3))
    assert len(said) == 1
    assert said[0].filename == networks.__file__
    assert (phases.phase, phases.steps) == (1, 1)


class Outer(torch.optim.SGD):
    """Takes its steps by another optimizer, which it holds under a name that nobody knows."""

    def __init__(self, inner):
        super().__init__(inner.param_groups)
        self.hidden = inner

    def step(self):
        self.hidden.step()


@pytest.mark.parametrize("given", ["inner", "outer"])
def test_an_optimizer_inside_another_is_the_same(given):
    model = network()
    inner = SGD(model.parameters())
    outer = Outer(inner)
    phases = pwlu.TwoPhase(model, inner if given == "inner" else outer, realign_at=2)
    train(model, outer, data(3))
    assert (phases.phase, phases.steps) == (2, 2)


def test_remove():
    """The units train from the next step on; another controller goes on counting where this one was."""
    model, optimizer, phases = controlled(steps=1)
    with pytest.warns(UserWarning, match="remove in Phase I, after 1 of 3 steps: the PWLUs have learned nothing yet"):
        phases.remove()
    phases.remove()
    assert [unit.phase for unit in units(model)] == [0, 0]
    before = values(of_units(model))
    train(model, optimizer, data(5))
    assert not same(before, of_units(model))
    assert not any(unit.statistics.realigned for unit in units(model))
    assert [unit.statistics.steps.item() for unit in units(model)] == [1, 1]
    again = pwlu.TwoPhase(model, optimizer, realign_at=3)
    train(model, optimizer, data(1))
    assert (again.phase, again.steps, units(model)[0].statistics.steps) == (1, 2, 2)
    train(model, optimizer, data(1))
    assert (again.phase, again.steps, units(model)[0].statistics.steps) == (2, 3, 3)


def test_the_optimizer_inside_a_wrapper():
    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    model = network()
    optimizer = SGD(model.parameters())
    phases = pwlu.TwoPhase(model, Wrapper(optimizer), realign_at=1)
    train(model, optimizer, data(1))
    assert phases.phase == 2


def test_two_parts_of_a_model_have_two():
    model = network()
    parts = model[:2], model[2:]
    optimizers = [SGD(part.parameters()) for part in parts]
    both = [pwlu.TwoPhase(part, o, realign_at=n) for part, o, n in zip(parts, optimizers, (1, 2), strict=True)]
    for x, _ in data(1):
        model(x).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [phases.phase for phases in both] == [2, 1]


# What it refuses.


def bad_steps(realign_at):
    model = network()
    return lambda: pwlu.TwoPhase(model, SGD(model.parameters()), realign_at)


def made_before_conversion():
    model = network(activation=nn.ReLU)
    optimizer = SGD(model.parameters())
    model[1] = pwlu.PWLU(8)
    return pwlu.TwoPhase(model, optimizer, 3)


def several_missing():
    model = nn.Sequential(*(pwlu.PWLU() for _ in range(5)))
    return pwlu.TwoPhase(model, SGD(model[4].parameters()), 3)


def no_units():
    model = nn.Linear(2, 2)
    return pwlu.TwoPhase(model, SGD(model.parameters()), 3)


def twice():
    model, optimizer, _phases = controlled()
    return pwlu.TwoPhase(model, optimizer, 3)


def twice_with_another():
    model, _optimizer, _phases = controlled()
    return pwlu.TwoPhase(model, SGD(model.parameters()), 3)


def several_optimizers():
    model = network()
    return pwlu.TwoPhase(model, [SGD(model.parameters())], 3)


def passed(after_loading):
    model, _optimizer, _phases = controlled(steps=2)
    other = network()
    optimizer = SGD(other.parameters())
    if after_loading:
        other.load_state_dict(model.state_dict())
        return pwlu.TwoPhase(other, optimizer, 2)
    pwlu.TwoPhase(other, optimizer, 2)
    other.load_state_dict(model.state_dict())
    return train(other, optimizer, data(1))


def mixed(after_loading):
    model, _optimizer, _phases = controlled(steps=2)
    other = network()
    optimizer = SGD(other.parameters())
    if after_loading:
        other[1].load_state_dict(model[1].state_dict())
        return pwlu.TwoPhase(other, optimizer, 3)
    phases = pwlu.TwoPhase(other, optimizer, 3)
    other[1].load_state_dict(model[1].state_dict())
    return phases.steps


def replicated():
    model = network()
    return pwlu.TwoPhase(nn.DataParallel(model), SGD(model.parameters()), 3)


def wrong_copy(other):
    model = network()
    return pwlu.TwoPhase(model, SGD(model.parameters()), 3, copies=[AveragedModel(other)])


ERRORS = {
    "not whole": (ValueError, bad_steps(2.0), r"an integer of at least 1.*such as 5 \* len\(loader\).*not 2.0"),
    "none": (ValueError, bad_steps(0), "at least 1.*to train without Phase I, do not use TwoPhase.*not 0"),
    "negative": (ValueError, bad_steps(-1), "at least 1.*not -1"),
    "truth": (ValueError, bad_steps(True), "an integer of at least 1.*not True"),
    "no units": (ValueError, no_units, "TwoPhase: Linear has no PWLU. Convert it first: pwlu.convert_"),
    "before": (ValueError, made_before_conversion, "does not hold the parameters of 1. Create it after pwlu.convert_"),
    "missing": (ValueError, several_missing, "parameters of 0, 1, 2 and 1 more.*call TwoPhase for each part"),
    "twice": (RuntimeError, twice, r"1, 3 already has a TwoPhase.*call its remove\(\) first"),
    "another": (RuntimeError, twice_with_another, "already has a TwoPhase. Keep that one"),
    "list": (TypeError, several_optimizers, "must be a torch.optim.Optimizer, not list. If there are several, pass the one"),
    "passed": (ValueError, lambda: passed(True), "realign_at=2 has passed.*taken 2 steps.*Write a realign_at above 2, or"),
    "passed, loaded later": (ValueError, lambda: passed(False), "taken 2 steps of Phase I and is not realigned"),
    "mixed": (ValueError, lambda: mixed(True), r"not at the same point.*\[\(0, False\), \(2, False\)\].*reset_parameters\(\)"),
    "mixed, loaded later": (ValueError, lambda: mixed(False), "not at the same point of training"),
    "copy without": (ValueError, lambda: wrong_copy(nn.Linear(2, 2)), "copies must have.*2 with.*but AveragedModel has 0"),
    "copy of others": (ValueError, lambda: wrong_copy(network()[:2]), "same shapes in the same order, but AveragedModel has 1"),
    "replicated": (ValueError, replicated, "nn.DataParallel runs copies of the model.*Use .*DistributedDataParallel"),
    "realign_ without units": (ValueError, lambda: pwlu.realign_(nn.ReLU()), "realign_: ReLU has no PWLU. Convert it first"),
    "realign_ without statistics": (RuntimeError, lambda: pwlu.realign_(network()), "no PWLU has statistics.*Train for"),
    "realign_ twice": (RuntimeError, lambda: pwlu.realign_(controlled(2, 2)[0]), r"1, 3 is already.*reset_parameters\(\)"),
    "groups without units": (ValueError, lambda: pwlu.parameter_groups(nn.Linear(2, 2), lr=0.1), "Linear has no PWLU"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors_say_what_to_do(error):
    kind, do, text = ERRORS[error]
    with pytest.raises(kind, match=text):
        do()


def test_an_error_leaves_the_model_free():
    model, other = network(), network()[:2]
    with pytest.raises(ValueError, match="copies must have"):
        pwlu.TwoPhase(model, SGD(model.parameters()), 3, copies=[other])
    assert [unit.phase for unit in units(model)] == [0, 0]
    optimizer = SGD(model.parameters())
    assert pwlu.TwoPhase(model, optimizer, 3, copies=[copy.deepcopy(model)]).phase == 1


def test_a_model_that_was_realigned_is_in_phase_two_at_once():
    model, optimizer, _ = controlled(realign_at=2, steps=2)
    other = copy.deepcopy(model)
    optimizer = SGD(other.parameters())
    phases = pwlu.TwoPhase(other, optimizer, realign_at=2)
    assert (phases.phase, phases.steps) == (2, 2)
    before = values(of_units(other))
    train(other, optimizer, data(1))
    assert not same(before, of_units(other))


# Groups and freezing.


def test_parameter_groups():
    model = network()
    groups = pwlu.parameter_groups(model, lr=0.1, weight_decay=0.01, lr_factor=0.5)
    assert [g["name"] for g in groups] == ["weights", "pwlu"]
    assert [g["lr"] for g in groups] == [0.1, 0.05]
    assert [g["weight_decay"] for g in groups] == [0.01, 0.0]
    for group, expected in zip(groups, (weights(model), of_units(model)), strict=True):
        assert {id(p) for p in group["params"]} == {id(p) for p in expected}
    optimizer = torch.optim.AdamW(groups)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.01, 0.0]
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.05]


def test_parameter_groups_of_normalisation():
    """They have a weight decay of their own if one is given; other parameters of one dimension do not."""

    class OwnNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

    norms = [
        nn.BatchNorm2d(4),
        nn.GroupNorm(2, 4),
        nn.LayerNorm(4),
        nn.InstanceNorm1d(4, affine=True),
        nn.RMSNorm(4),
        OwnNorm(),
    ]
    model = nn.Sequential(nn.Conv2d(1, 4, 3), *norms, nn.PReLU(4), pwlu.PWLU(4))
    groups = pwlu.parameter_groups(model, lr=0.1, weight_decay=0.01, lr_factor=0.5, norm_weight_decay=0.0)
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in groups] == [
        ("weights", 0.1, 0.01),
        ("norms", 0.1, 0.0),
        ("pwlu", 0.05, 0.0),
    ]
    expected = [[*model[0].parameters(), *model[7].parameters()], [p for n in norms for p in n.parameters()], of_units(model)]
    for group, parameters in zip(groups, expected, strict=True):
        assert {id(p) for p in group["params"]} == {id(p) for p in parameters}
    assert [g["name"] for g in pwlu.parameter_groups(model, lr=0.1)] == ["weights", "pwlu"]


@pytest.mark.parametrize("name", ["lr", "weight_decay", "lr_factor", "norm_weight_decay"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "0.1", True])
def test_parameter_groups_check_numbers(name, value):
    """Optimizers take a negative learning rate of a group and climb."""
    with pytest.raises(ValueError, match=f"parameter_groups: {name} must be a finite number of at least 0, not {value!r}"):
        pwlu.parameter_groups(pwlu.PWLU(2), **{"lr": 0.1} | {name: value})
    for good in (0, 0.1, torch.tensor(0.1)):
        pwlu.parameter_groups(pwlu.PWLU(2), **{"lr": 0.1} | {name: good})


def test_parameter_groups_leave_out_what_is_frozen():
    model = network()
    model[0].requires_grad_(False)
    weights_alone, learned = pwlu.parameter_groups(model, lr=0.1)
    assert {id(p) for p in weights_alone["params"]} == {id(p) for p in (*model[2].parameters(), *model[4].parameters())}
    pwlu.freeze_(model)
    assert [g["name"] for g in pwlu.parameter_groups(model, lr=0.1)] == ["weights"]
    assert len(learned["params"]) == 2


@pytest.mark.filterwarnings("ignore:TwoPhase. the PWLUs have a weight decay")
@pytest.mark.parametrize("make", [SGD, functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)])
def test_frozen_units_do_not_move(make):
    """Neither by momentum nor by decay, also where gradients are set to zero instead of taken away; and back again."""
    model = network()
    optimizer = make(model.parameters())
    pwlu.TwoPhase(model, optimizer, realign_at=1)
    train(model, optimizer, data(3))
    assert pwlu.freeze_(model) == ["1", "3"]
    frozen, before = values(of_units(model)), values(weights(model))
    for x, target in data(3):
        optimizer.zero_grad(set_to_none=False)
        (model(x) - target).square().mean().backward()
        optimizer.step()
    assert same(frozen, of_units(model))
    assert not same(before, weights(model))
    assert pwlu.freeze_(model, False) == ["1", "3"]
    train(model, optimizer, data(1))
    assert not same(frozen, of_units(model))


def test_what_is_frozen_in_phase_one_is_not_realigned():
    model, optimizer, phases = controlled(realign_at=2, steps=1)
    pwlu.freeze_(model[:2])
    before = values(of_units(model))
    train(model, optimizer, data(1))
    assert [(each.channels, each.kept) for each in phases.report] == [(8, 8), (1, 0)]
    assert same(before[:1], of_units(model)[:1])
    assert not same(before[1:], of_units(model)[1:])


def test_a_weight_that_cannot_be_realigned_is_refused_at_once():
    model = network()
    torch.nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Identity())
    with pytest.raises(RuntimeError, match="the weight is computed"):
        pwlu.TwoPhase(model, SGD(model.parameters()), realign_at=3)
    model = nn.Sequential(pwlu.PWLU(3), nn.Linear(3, 3), pwlu.PWLU(3))
    model[2].weight = model[0].weight
    with pytest.raises(ValueError, match=r"0 and 2 share one weight.*Share the module instead"):
        pwlu.TwoPhase(model, SGD(model.parameters()), realign_at=3)
