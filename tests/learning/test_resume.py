"""A training that is killed and resumed, wherever that happens, ends as if it never had been: to the bit."""

import os
import random
import signal

import pytest
import torch
from imported import SOURCES, SUPPORT
from networks import data, network, same
from resume_worker import BOUNDARY, REALIGN_AT, SKIPPED, STEPS

import pwlu

pytestmark = pytest.mark.filterwarnings("ignore:TwoPhase. the PWLUs have a weight decay")  # as somebody may write it


@pytest.fixture(scope="module")
def start(processes):
    """Run the worker to its end or death; return the exit status."""

    def start(folder, order, every, *death):
        command = ["-m", "resume_worker", folder, order, every, *death]
        done = processes(command, dict(os.environ), (SOURCES, SUPPORT))
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.returncode

    return start


def result(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, start):
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert start(folder, "before", STEPS) == 0
    return result(folder)


def anywhere(seed, every):
    """Two deaths at random, one after the other."""
    chosen = random.Random(seed)
    moments = lambda step: ["step"] if step % every else ["step", "write", "saved"]  # noqa: E731
    return [(step, chosen.choice(moments(step))) for step in sorted(chosen.sample(range(1, STEPS), 2))]


@pytest.mark.parametrize(
    ("order", "every", "deaths"),
    [
        # in Phase I with something in the pool, in the step that ends it, right after that, and in Phase II
        ("after", 1, [(SKIPPED, "saved"), (BOUNDARY, "step"), (BOUNDARY, "saved"), (6, "write")]),
        ("before", 1, [(SKIPPED, "saved"), (BOUNDARY, "saved")]),
        ("before", 3, anywhere(1, 3)),
    ],
)
def test_killed_and_resumed(tmp_path, start, uninterrupted, order, every, deaths):
    for death in deaths:
        assert start(tmp_path, order, every, *death) == -signal.SIGKILL
    assert start(tmp_path, order, every) == 0
    found = result(tmp_path)
    assert found["step"] == uninterrupted["step"] == STEPS
    assert found["model"].keys() == uninterrupted["model"].keys()
    assert same(found["model"].values(), uninterrupted["model"].values())
    assert found["scheduler"] == uninterrupted["scheduler"]
    assert found["scaler"] == uninterrupted["scaler"]
    momenta = [[s["momentum_buffer"] for s in r["optimizer"]["state"].values()] for r in (found, uninterrupted)]
    assert len(momenta[0]) == 8  # of 3 layers and 2 units
    assert same(*momenta)


def test_the_uninterrupted_run_went_through_both_phases(uninterrupted):
    """Or the comparison above would say little."""
    state = uninterrupted["model"]
    assert state["1.statistics.realigned"]
    assert state["4.statistics.steps"] == REALIGN_AT
    started = pwlu.PWLU(8).weight
    assert not torch.equal(state["1.weight"], started)
    assert (state["1.statistics.updates"] == REALIGN_AT).all()


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("saved_at", range(7))
def test_resumed_at_every_step(order, saved_at):
    """The same within one process, without dying."""

    def made(state=None):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if order == "before":
            pwlu.TwoPhase(model, optimizer, realign_at=REALIGN_AT)
        if state:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        if order == "after":
            pwlu.TwoPhase(model, optimizer, realign_at=REALIGN_AT)
        return model, optimizer

    def go_on(model, optimizer, batches):
        for x, target in batches:
            optimizer.zero_grad()
            (model(x) - target).square().mean().backward()
            optimizer.step()

    batches = data(6)
    whole = made()
    go_on(*whole, batches)
    first = made()
    go_on(*first, batches[:saved_at])
    second = made([part.state_dict() for part in first])
    go_on(*second, batches[saved_at:])
    assert same(whole[0].state_dict().values(), second[0].state_dict().values())
    assert second[0][1].statistics.realigned
