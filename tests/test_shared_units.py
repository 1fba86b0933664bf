"""PWLUs that share a weight, and one PWLU in several places: every function treats them alike, or says why it cannot."""

import copy
import pickle

import pytest
import torch
from networks import same
from torch import nn

import pwlu
from pwlu.units.constraints import Constraint


def tied(make=pwlu.PWLU):
    """Two units with one weight."""
    model = nn.Sequential(nn.Linear(4, 4), make(4), nn.Linear(4, 4), make(4))
    model[3].weight = model[1].weight
    return learned(model)


def twice():
    """Return a network with one unit in two places."""
    act = pwlu.PWLU(4)
    return learned(nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act))


def learned(model):
    with torch.no_grad():
        model[1].weight += 0.1 * torch.randn_like(model[1].weight)
    return model


X = torch.randn(64, 4)


def step(model, optimizer):
    optimizer.zero_grad()
    model(X).square().mean().neg().backward()
    optimizer.step()


OPERATIONS = {
    "simplify_": lambda model: pwlu.simplify_(model, 0.5),
    "refine_": lambda model: pwlu.refine_(model, 32),
    "realign_": pwlu.realign_,
    "TwoPhase": lambda model: pwlu.TwoPhase(model, torch.optim.SGD(model.parameters(), lr=0.1), realign_at=1),
    "regrid_": lambda model: pwlu.regrid_(model, pwlu.alignment(model, [X])),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_would_separate_a_weight_or_write_it_twice_is_refused(name):
    model = tied()
    model[1].statistics.updates.fill_(1)
    before = copy.deepcopy(list(model.state_dict().values()))
    with pytest.raises(ValueError, match=rf"{name}: 1 and 3 share one weight, but .* give each its own weight: act\.weight = "):
        OPERATIONS[name](model)
    assert model[1].weight is model[3].weight
    assert same(model.state_dict().values(), before)
    model[3].weight = nn.Parameter(model[3].weight.detach().clone())  # as the error says
    OPERATIONS[name](model)


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_unit_in_two_places_changes_in_both(name):
    model = twice()
    model[1].statistics.updates.fill_(1)
    OPERATIONS[name](model)
    assert model[1] is model[3]
    assert model(X).isfinite().all()


@pytest.mark.parametrize("name", ["simplify_", "refine_"])
def test_a_weight_that_another_module_holds(name):
    model = nn.Sequential(pwlu.PWLU(4), nn.Linear(4, 4))
    model[1].learned = model[0].weight
    with pytest.raises(ValueError, match=f"{name}: 0 and 1 share one weight"):
        OPERATIONS[name](model)
    pwlu.TwoPhase(model, torch.optim.SGD(model.parameters(), lr=0.1), realign_at=1)  # which writes it in place


# Constraints.


def test_units_that_share_a_weight_need_the_same_constraint():
    model = tied()
    pwlu.constrain_(model[1], lipschitz=1.0)
    before = model[1].weight.detach().clone()
    message = (
        r"3 shares its weight with another PWLU, so both need .* one has '1-Lipschitz' and another 'range \(-1, 1\)'\. "
        r"Constrain them in one call, such as pwlu\.constrain_\(model, lipschitz=1\.0\), or give each its own weight: act"
    )
    with pytest.raises(ValueError, match=message):
        pwlu.constrain_(nn.ModuleDict({"3": model[3]}), range=(-1.0, 1.0))
    assert model[3].constraint is None
    assert torch.equal(model[1].weight, before)
    pwlu.constrain_(model[3], lipschitz=1.0)
    pwlu.constrain_(model, range=(-0.5, 0.5))  # one call replaces both
    pwlu.constrain_(model[3])
    assert (model[1].constraint, model[3].constraint) == (Constraint(range=(-0.5, 0.5)), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(3):
        step(model, optimizer)
        assert "violated" not in str(pwlu.describe(model))


def test_constrained_units_that_share_a_weight_later():
    model = nn.Sequential(nn.Linear(4, 4), pwlu.PWLU(4), nn.Linear(4, 4), pwlu.PWLU(4))
    pwlu.constrain_(model[1], lipschitz=1.0)
    pwlu.constrain_(model[3], monotone=True)
    model[3].weight = model[1].weight
    other = learned(nn.Sequential(nn.Linear(4, 4), pwlu.PWLU(4)))
    step(other, torch.optim.SGD(other.parameters(), lr=0.1))  # has nothing to do with them
    with pytest.raises(ValueError, match=r"a PWLU shares its weight with .* '1-Lipschitz' and another 'monotone'"):
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("make", [tied, twice])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(make, copied):
    """Copies share what the model shares, and keep their constraint."""
    model = make()
    pwlu.constrain_(model, lipschitz=0.5)
    model = copied(model)
    assert model[1].weight is model[3].weight
    assert (model[1] is model[3]) == (make is twice)
    step(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert "violated" not in str(pwlu.describe(model))


# Everything counts a parameter once.


@pytest.mark.parametrize("make", [tied, twice])
def test_curvature_counts_a_function_once(make):
    model = make()
    assert torch.equal(pwlu.curvature(model), pwlu.curvature(model[1]))


def test_curvature_counts_every_function_of_dynamic_units():
    model = tied(pwlu.DynamicPWLU)
    with torch.no_grad():
        model[3].direction_weight.normal_()
    alone = pwlu.curvature(model[1]) + pwlu.curvature(model[3])
    torch.testing.assert_close(pwlu.curvature(model), alone)
    model[1].direction_weight = model[3].direction_weight
    torch.testing.assert_close(pwlu.curvature(model), pwlu.curvature(model[3]))


@pytest.mark.parametrize("make", [tied, twice])
def test_parameter_groups(make):
    groups = pwlu.parameter_groups(make(), lr=0.1)
    assert [(group["name"], len(group["params"])) for group in groups] == [("weights", 4), ("pwlu", 1)]


@pytest.mark.parametrize("rule", ["paper", "shared"])
def test_one_unit_in_two_places_trains_as_one(rule):
    """Compare it with the same network that calls one unit twice."""
    one = twice()
    two = copy.deepcopy(one)
    act = two[1]
    called = nn.ModuleList([two[0], act, two[2]])

    def forward(x):
        return act(called[2](act(called[0](x))))

    for model, call in ((one, one), (called, forward)):
        optimizer = torch.optim.SGD(pwlu.parameter_groups(model, lr=0.01), momentum=0.9)
        phases = pwlu.TwoPhase(model, optimizer, realign_at=2, rule=rule)
        for _ in range(4):
            optimizer.zero_grad()
            call(X).square().mean().backward()
            optimizer.step()
        assert [(unit.name, unit.kept) for unit in phases.report] == [("1", 0)]
        assert model[1].statistics.steps == 2
    assert torch.equal(one[1].weight, act.weight)


def test_shared_statistics_count_a_step_once():
    model = nn.Sequential(nn.Linear(4, 4), pwlu.PWLU(4), nn.Linear(4, 4), pwlu.PWLU(4))
    model[3].statistics = model[1].statistics
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    phases = pwlu.TwoPhase(model, optimizer, realign_at=3)
    step(model, optimizer)
    assert phases.steps == model[1].statistics.steps == 1


@pytest.mark.parametrize("make", [tied, twice])
def test_inference_and_norms(make):
    model = make().eval()
    expected = model(X)
    fused = copy.deepcopy(model)
    pwlu.fuse_(fused)
    torch.testing.assert_close(fused(X), expected)
    with_norms = nn.Sequential(model[0], nn.BatchNorm1d(4), model[1], model[2], nn.BatchNorm1d(4), model[3]).train()
    together = copy.deepcopy(with_norms)
    assert len(pwlu.fuse_norms_(together, X).fused) == 2
    for each in (with_norms, together):
        each(X).square().sum().backward()
    torch.testing.assert_close(together[2].weight.grad, with_norms[2].weight.grad, rtol=1e-4, atol=1e-4)
