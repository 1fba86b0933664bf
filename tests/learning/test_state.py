"""The state dict in every phase: always the same keys, and strict loading from any phase into any other."""

import copy
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from networks import data, network, of_units, same, train, units, values
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import pwlu

REALIGN_AT = 3
STATISTICS = ("running_mean", "running_std", "updates", "dropped", "steps", "realigned", "_extra_state")


def trained(steps, controlled=True):
    """A model after that many steps, its optimizer and its controller."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    phases = pwlu.TwoPhase(model, optimizer, REALIGN_AT) if controlled else None
    train(model, optimizer, data(steps))
    return model, optimizer, phases


def test_the_keys_are_the_same_in_every_phase():
    expected = {f"{n}.{key}" for n in (1, 3) for key in ("weight", *(f"statistics.{s}" for s in STATISTICS))}
    expected |= {f"{n}.{key}" for n in (0, 2, 4) for key in ("weight", "bias")}
    for steps, controlled in ((0, False), (2, False), (0, True), (2, True), (REALIGN_AT, True), (5, True)):
        assert set(trained(steps, controlled)[0].state_dict()) == expected


@pytest.mark.parametrize("steps", [0, 2, REALIGN_AT, 5])
@pytest.mark.parametrize("assign", [False, True])
def test_into_a_fresh_model(steps, assign):
    """Also without a TwoPhase: then it computes the same, and trains from where it is."""
    model, *_ = trained(steps)
    if steps == 2:
        model(data(1)[0][0])  # something in the pools
    other = network()
    other.load_state_dict(model.state_dict(), assign=assign)
    assert same(model.state_dict().values(), other.state_dict().values())
    assert [unit.phase for unit in units(other)] == [0, 0]
    x = data(1, seed=9)[0][0]
    assert torch.equal(model.eval()(x), other.eval()(x))
    before = values(of_units(other))
    train(other.train(), torch.optim.SGD(other.parameters(), lr=0.1), data(1))
    assert not same(before, of_units(other))


def test_a_loaded_pool_is_a_copy():
    model, *_ = trained(2)
    other = network()
    other.load_state_dict(model.state_dict())
    model(data(1)[0][0])
    assert units(model)[0].statistics.pool.any()
    assert not units(other)[0].statistics.pool.any()


@pytest.mark.parametrize("source", [0, 2, REALIGN_AT, 5])
@pytest.mark.parametrize("target", [0, 1, REALIGN_AT, 5])
def test_from_any_phase_into_any_other(source, target):
    """Phase and steps are those of the state that was loaded; training goes on from there as if it had been there all along."""
    model, optimizer, _ = trained(source)
    other, other_optimizer, phases = trained(target)
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert phases.phase == (1 if source < REALIGN_AT else 2)
    assert phases.steps == min(source, REALIGN_AT)
    for m, o in ((model, optimizer), (other, other_optimizer)):
        train(m, o, data(4, seed=9))
    assert same(model.state_dict().values(), other.state_dict().values())
    assert phases.phase == 2


OPTIMIZERS = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.01, weight_decay=0.1),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process
@pytest.mark.filterwarnings("ignore:TwoPhase. the PWLUs have a weight decay")  # which must not act while a state is made
@pytest.mark.parametrize("made", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 1, 2, REALIGN_AT, 5])
def test_a_checkpoint_of_torch(steps, made, tmp_path):
    """get_state_dict and set_state_dict, strictly, in both phases: training goes on to the last bit as without them.

    Both take a step with a learning rate of 0 to make the optimizer's state, which is no step of Phase I.
    """

    def begin():
        model = network()
        optimizer = OPTIMIZERS[made](model.parameters())
        return model, optimizer, pwlu.TwoPhase(model, optimizer, REALIGN_AT)

    batches = data(8)
    undisturbed, optimizer, _ = begin()
    train(undisturbed, optimizer, batches)
    model, optimizer, phases = begin()
    train(model, optimizer, batches[:steps])
    weights, state = get_state_dict(model, optimizer)
    assert phases.steps == min(steps, REALIGN_AT)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    other, other_optimizer, other_phases = begin()
    weights, state = get_state_dict(other, other_optimizer)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_state_dict(other, other_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert (other_phases.phase, other_phases.steps) == (phases.phase, phases.steps)
    for continued, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        train(continued, its_optimizer, batches[steps:])
    assert same(model.state_dict().values(), other.state_dict().values())
    if steps:  # before the first, torch's own step counts in the state of Adam
        assert same(undisturbed.state_dict().values(), model.state_dict().values())


def test_phase_two_goes_on_without_a_controller():
    """Weights and units train as they would have with one."""
    model, optimizer, _ = trained(5)
    other = network()
    other.load_state_dict(model.state_dict())
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (other, other_optimizer)):
        train(m, o, data(3, seed=9))
    assert same(model.state_dict().values(), other.state_dict().values())


def test_weights_from_before_the_units():
    """They load strictly while the units are at their start, which they keep."""
    plain = network(activation=torch.nn.ReLU)
    for model in (network(), trained(0)[0]):
        before = values(of_units(model))
        with torch.no_grad():
            model[0].weight.zero_()
        model.load_state_dict(plain.state_dict())
        assert torch.equal(model[0].weight, plain[0].weight)
        assert same(before, of_units(model))
    x = data(1)[0][0]
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("steps", [1, REALIGN_AT, 5])
def test_weights_from_before_the_units_are_too_little_for_units_that_learned(steps):
    model, *_ = trained(steps)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"1.weight\""):
        model.load_state_dict(network(activation=torch.nn.ReLU).state_dict())


def test_weights_from_before_the_units_are_too_little_without_a_controller_too():
    model, *_ = trained(1, controlled=False)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"1.weight\""):
        model.load_state_dict(network(activation=torch.nn.ReLU).state_dict())


@pytest.mark.parametrize("key", ["1.weight", "1.statistics.running_mean", "1.statistics._extra_state", "3.statistics.steps"])
def test_a_missing_key_is_named(key):
    state = trained(2)[0].state_dict()
    del state[key]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{key}"'):
        network().load_state_dict(state)


def test_an_unexpected_key_is_named():
    state = network().state_dict() | {"1.tool": torch.zeros(3)}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*\"1.tool\""):
        network().load_state_dict(state)


def test_a_state_of_a_later_version(monkeypatch):
    state = pwlu.PWLU(4).state_dict()
    assert state._metadata[""]["version"] == 1
    monkeypatch.setattr(pwlu.PWLU, "_version", 2)
    later = pwlu.PWLU(4).state_dict()
    monkeypatch.undo()
    with pytest.raises(
        RuntimeError, match=r"written by a later version of pwlu, in format 2\. .* reads formats up to 1: update it"
    ):
        pwlu.PWLU(4).load_state_dict(later)
    pwlu.PWLU(4).load_state_dict(state)


def test_pools_of_another_size():
    state = network().state_dict()
    state["1.statistics._extra_state"] = torch.zeros(3, 4)
    with pytest.raises(
        RuntimeError, match=r"size mismatch for the pool of a PWLU: \(3, 4\) in the state dict, \(3, 8\) in the model"
    ):
        network().load_state_dict(state)


def test_what_is_loaded_in_part_keeps_the_rest():
    """Not a key of the units: what they have pooled since the last step is theirs still."""
    model, *_ = trained(2)
    model(data(1)[0][0])
    before = [unit.statistics.pool.clone() for unit in units(model)]
    assert model.load_state_dict({"0.weight": torch.zeros(8, 5)}, strict=False).unexpected_keys == []
    assert same(before, [unit.statistics.pool for unit in units(model)])


def test_units_on_the_meta_device_are_loaded_by_assignment():
    model, *_ = trained(5)
    with torch.device("meta"):
        other = network()
    other.load_state_dict(model.state_dict(), assign=True)
    assert same(model.state_dict().values(), other.state_dict().values())
    x = data(1)[0][0]
    assert torch.equal(model.eval()(x), other.eval()(x))


def test_units_that_begin_anew():
    """reset_parameters takes back all that Phase I has left behind, for the controller too."""
    model, optimizer, phases = trained(2)
    for unit in units(model):
        unit.reset_parameters()
    assert phases.steps == 0
    assert phases.phase == 1
    train(model, optimizer, data(REALIGN_AT))
    assert phases.phase == 2
    assert all(unit.statistics.steps == REALIGN_AT for unit in units(model))
    for unit in units(model):
        unit.reset_parameters()
    assert phases.phase == 1


# Version stamps.

LATER = r"by a later version( of|,) pwlu.*, in format 2\. This is pwlu .*, which reads formats up to 1: update it"


def test_a_state_dict_of_a_later_version(tmp_path, monkeypatch):
    """torch keeps the number in the metadata of a state dict, also in a file."""
    model = network()
    with monkeypatch.context() as later:
        later.setattr(pwlu.PWLU, "_version", 2)
        torch.save(model.state_dict(), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    with pytest.raises(RuntimeError, match=rf"1\. was written {LATER}"):
        model.load_state_dict(state)
    model.load_state_dict(dict(state))  # without the metadata, as other tools write it


def test_a_pickle_of_a_later_version(monkeypatch):
    unit = pwlu.PWLU(3)
    assert "_written_by" not in pickle.loads(pickle.dumps(unit)).__dict__
    assert "_written_by" not in copy.deepcopy(unit).__dict__
    state = unit.__getstate__()
    del state["_written_by"]  # as pwlu 0.1.0 wrote them at first
    pwlu.PWLU(3).__setstate__(state)
    with monkeypatch.context() as later:
        later.setattr(pwlu.PWLU, "_version", 2)
        content = pickle.dumps(unit)
    with pytest.raises(RuntimeError, match=rf"PWLU: the pickle was written {LATER}"):
        pickle.loads(content)
