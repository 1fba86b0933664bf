"""Two processes train as one does: the same statistics, the same realignment, the same parameters up to rounding."""

import distributed_worker as worker
import pytest
import torch
import torch.distributed as dist
from networks import assert_equal_to_rounding, bounds_of_rounding, of_units, same, units
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pwlu

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
ROUNDINGS = worker.BATCH * 8 * 4 * 4  # the longest sum: all that the second unit sees in a step


def results(folder, scenario):
    """What the processes have to say, one after the other."""
    worker.launch(worker.start, str(folder), scenario)
    return [torch.load(folder / f"{rank}.pt") for rank in range(worker.PROCESSES)]


@pytest.fixture
def alone():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def replicated(tmp_path_factory):
    return results(tmp_path_factory.mktemp("replicated"), "replicated")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return results(tmp_path_factory.mktemp("sharded"), "sharded")


def one_process(before_step=lambda model: None, batches=None):
    model = worker.network()
    optimizer = worker.made_optimizer(model)
    pwlu.TwoPhase(model, optimizer, worker.REALIGN_AT)
    worker.train(model, optimizer, worker.data() if batches is None else batches, before_step)
    return model.state_dict()


@pytest.fixture(scope="module")
def expected():
    return one_process()


@pytest.fixture(scope="module")
def bounds():
    return bounds_of_rounding(one_process, ROUNDINGS)


def statistics(state):
    names = "running_mean", "running_std", "updates", "dropped", "steps"
    return {key: value for key, value in state.items() if key.split(".")[-1] in names}


def test_the_bounds_say_something(expected, bounds):
    """They are far below what the steps have changed, and integers have to be equal."""
    start = worker.network().state_dict()
    for name in ("2.weight", "5.weight", "5.statistics.running_mean", "0.weight"):
        assert 0 < bounds[name] < 1e-6 * (expected[name] - start[name]).abs().max()
    assert bounds["2.statistics.steps"] == bounds["2.statistics.updates"] == bounds["2.statistics.realigned"] == 0


def test_data_parallel(replicated, expected, bounds):
    first, second = (r["data_parallel"] for r in replicated)
    assert same(first["state"].values(), second["state"].values())
    assert_equal_to_rounding(first["state"], expected, bounds)
    assert first["phase"] == second["phase"] == 2


def test_batches_of_different_sizes_count_by_their_sizes(replicated, bounds):
    first, second = (r["unequal"] for r in replicated)
    assert same(first["state"].values(), second["state"].values())
    ((x, target), *_) = worker.data()
    found = statistics(first["state"])
    assert_equal_to_rounding(found, statistics(one_process(batches=[(x, target)])), bounds)
    parts = [one_process(batches=[(x[part], target[part])]) for part in (slice(0, 3), slice(3, 8))]
    unweighted = sum(part["2.statistics.running_mean"] for part in parts) / 2
    error = (unweighted - found["2.statistics.running_mean"]).abs().max()
    assert error > bounds["2.statistics.running_mean"]  # or it would not have been found out


def test_a_process_without_inputs_does_not_count(replicated):
    """The averages take the inputs of the other: a few operations, each rounded."""
    first, second = (r["unequal"] for r in replicated)
    assert same(first["second"].values(), second["second"].values())
    assert not any(pool.any() for pool in second["pools"])
    for name, (count, mean, m2) in zip(("2", "5"), first["pools"], strict=True):
        for key, value in (("running_mean", mean), ("running_std", (m2 / count).sqrt())):
            expected = 0.9 * first["state"][f"{name}.statistics.{key}"] + 0.1 * value
            size = value.abs().max().item() + 1  # deviations are taken from the mean so far, of the size of sigma = 1
            torch.testing.assert_close(first["second"][f"{name}.statistics.{key}"], expected, rtol=0, atol=32 * 2.0**-53 * size)


def test_accumulated_gradients(replicated, bounds):
    """No process's pool is overwritten by that of the first, which broadcasts its buffers before every forward."""
    first, second = (r["accumulated"] for r in replicated)
    whole = one_process(batches=worker.data()[:1])
    assert_equal_to_rounding(statistics(first["state"]), statistics(whole), bounds)
    assert same(statistics(first["state"]).values(), statistics(second["state"]).values())
    for of_first, of_second in zip(first["pools"], second["pools"], strict=True):
        assert (of_first[0] == of_second[0]).all()
        assert of_first[0, 0] == 4 * (36 if len(of_first[0]) == 8 else 8 * 4 * 4)
        assert not torch.equal(of_first[1], of_second[1])
    assert first["steps"] == second["steps"] == 1


def test_processes_that_train_alone(replicated, bounds):
    """With a group of its own, a process has the statistics of its own inputs."""
    for rank, result in enumerate(replicated):
        alone = one_process(batches=worker.share(rank, worker.data()))
        assert_equal_to_rounding(result["alone"]["state"], alone, bounds)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    return results(tmp_path_factory.mktemp("uneven"), "uneven")


@pytest.mark.slow
@pytest.mark.parametrize("given", ["wrapped", "inner"])
def test_uneven_processes_in_phase_one_are_refused_before_the_first_step(uneven, given):
    for result in uneven:
        message, untouched = result[given]
        assert "every step of Phase I needs all ranks" in message
        assert "join(throw_on_early_termination=True)" in message
        assert untouched


@pytest.mark.slow
def test_uneven_processes_in_phase_two(uneven):
    first, second = (result["later"] for result in uneven)
    assert first[0] == second[0] == 2
    assert same(first[1].values(), second[1].values())


@pytest.mark.slow
def test_uneven_processes_whose_optimizer_takes_part(uneven):
    """The process that has no more batches counts steps and realigns as the other does."""
    first, second = (result["zero"] for result in uneven)
    assert first[0] == second[0] == (2, worker.REALIGN_AT)
    assert same(first[1].values(), second[1].values())


@pytest.mark.slow
def test_data_parallel_and_compiled(tmp_path, expected, bounds):
    first, second = results(tmp_path, "compiled")
    assert same(first["state"].values(), second["state"].values())
    assert_equal_to_rounding(first["state"], expected, bounds)
    assert first["phase"] == 2


# Parameters split over the processes by fully_shard.


def test_fully_sharded(sharded, expected, bounds):
    first, second = sharded
    assert same(first["state"].values(), second["state"].values())
    assert_equal_to_rounding(first["state"], expected, bounds)
    assert first["same objects"]
    # still in Phase I; realigned with its last step; learning from the next on
    assert first["seen"] == [(1, True), (1, True), (2, False), (2, False), (2, False), (2, False)]


def test_the_curvature_of_a_sharded_model(sharded):
    """The penalty and its gradient are those of the whole, in every process: nothing is halved or counted twice."""
    model = worker.network()
    model.load_state_dict(sharded[0]["state"])
    penalty = pwlu.curvature(model)
    expected = torch.autograd.grad(penalty, of_units(model))
    assert penalty > 0
    for result in sharded:
        found, gradients = result["curvature"]
        assert torch.equal(found, penalty)
        assert same(gradients, expected)


def test_what_was_sharded_loads_into_a_plain_model(sharded):
    """Strictly, and it is whole: no part of a tensor, no tensor that knows of processes."""
    model = worker.network()
    model.load_state_dict(sharded[0]["state"])
    assert same(model.state_dict().values(), sharded[1]["state"].values())
    assert all(unit.statistics.realigned for unit in units(model))
    assert model.eval()(worker.data()[0][0]).isfinite().all()


@pytest.mark.parametrize("way", ["full", "sharded"])
def test_a_sharded_model_is_resumed(sharded, way):
    for result in sharded:
        loaded, before, after = result[way]
        assert same(loaded.values(), result["in phase one"].values())
        assert before == (1, worker.REALIGN_AT - 1)
        assert after == (2, worker.REALIGN_AT)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return results(tmp_path_factory.mktemp("checkpoints"), "checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize("steps", [worker.REALIGN_AT - 1, worker.REALIGN_AT + 1])
@pytest.mark.parametrize("optimizer", worker.OPTIMIZERS)
@pytest.mark.parametrize("kind", ["replicated", "sharded", "zero"])
def test_a_checkpoint_of_torch(checkpoints, kind, optimizer, steps):
    """get_state_dict and set_state_dict, strictly (for ZeRO, its own): training goes on to the last bit as without them."""
    for result in checkpoints:
        where, undisturbed, *ends = result[kind, optimizer, steps]
        assert where == 2 * [(1, steps) if steps < worker.REALIGN_AT else (2, worker.REALIGN_AT)]
        for end in ends:
            assert end.keys() == undisturbed.keys()
            assert same(end.values(), undisturbed.values())


def test_a_sharded_model_begins_without_memory(alone):
    """Made on the meta device, sharded, then given memory and its start: how a model too large for one device begins."""
    with torch.device("meta"):
        model = nn.Sequential(pwlu.PWLU(8, init="silu"), pwlu.PWLU())
    mesh = init_device_mesh("cpu", (1,))
    for unit in model:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for unit in model:
        unit.reset_parameters()
    expected = nn.Sequential(pwlu.PWLU(8, init="silu"), pwlu.PWLU()).state_dict()
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert found.keys() == expected.keys()
    assert same(found.values(), expected.values())


def test_the_network_of_a_dynamic_unit_is_sharded_separately(alone):
    def trained(shard):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), pwlu.DynamicPWLU(8))
        for part in (model[1].squeeze, *model, model) if shard else ():
            fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pwlu.TwoPhase(model, optimizer, 2)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))

    found, expected = trained(shard=True), trained(shard=False)
    assert expected["1.direction_weight"].any()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


@pytest.fixture(scope="module")
def by_shared_rule(tmp_path_factory):
    return results(tmp_path_factory.mktemp("shared_rule"), "shared_rule")


@pytest.mark.parametrize("which", worker.OPTIMIZERS)
@pytest.mark.parametrize("kind", ["replicated", "sharded", "zero"])
def test_the_shared_rule(by_shared_rule, kind, which):
    """All ranks end with the same bits, and up to rounding with those of one process."""

    def run(before_step, rule="shared"):
        model = worker.network()
        make, options = worker.OPTIMIZERS[which]
        optimizer = make(pwlu.parameter_groups(model, lr=options["lr"]), **options)
        pwlu.TwoPhase(model, optimizer, worker.REALIGN_AT, rule=rule)
        worker.train(model, optimizer, worker.data(), before_step)
        return model.state_dict()

    first, second = (result[kind, which] for result in by_shared_rule)
    assert same(first.values(), second.values())
    bounds = bounds_of_rounding(run, ROUNDINGS)
    assert_equal_to_rounding(first, run(lambda model: None), bounds)
    paper = run(lambda model: None, rule="paper")
    assert (paper["2.weight"] - first["2.weight"]).abs().max() > 1e3 * bounds["2.weight"]


@pytest.mark.parametrize("kind", [pwlu.PWLU, pwlu.NonUniformPWLU])
def test_a_sharded_unit_is_fused(alone, kind):
    model = nn.Sequential(nn.Linear(4, 8), kind(8, init="silu")).eval()
    x = torch.randn(4, 8)
    expected = model[1](x)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert pwlu.fuse_(model) == ["1"]
    torch.testing.assert_close(model[1](x), expected)
