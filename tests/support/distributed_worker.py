"""What every process does in the tests of several processes. Each function saves what test_distributed.py looks at."""

import copy
import multiprocessing
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
import torch.nn.functional as F
from networks import of_units, same, units, values
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import pwlu

PROCESSES, STEPS, REALIGN_AT, BATCH = 2, 6, 3, 8


def launch(start, *arguments):
    """Run start(rank, *arguments) in every process. Where that is possible they are copies of one that has torch imported."""
    multiprocessing.set_forkserver_preload(["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"])
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    torch.multiprocessing.start_processes(start, arguments, nprocs=PROCESSES, start_method=method)


def network():
    """No batch normalization, whose statistics would differ between one process and two."""
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), pwlu.PWLU(8)]
    layers += [nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), pwlu.PWLU(init="silu")]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).double()


def data():
    """The whole batches of all steps."""
    generator = torch.Generator().manual_seed(2)
    random = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(random(BATCH, 3, 6, 6) + 0.5, random(BATCH, 4)) for _ in range(STEPS)]


def made_optimizer(model):
    return torch.optim.SGD(pwlu.parameter_groups(model, lr=0.1, weight_decay=0.01), momentum=0.9)


def train(model, optimizer, batches, before_step=lambda model: None):
    for x, target in batches:
        before_step(model)
        optimizer.zero_grad()
        F.mse_loss(model(x), target).backward()
        optimizer.step()


def share(rank, batches):
    """The part of every batch that is this process's."""
    part = slice(rank * BATCH // PROCESSES, (rank + 1) * BATCH // PROCESSES)
    return [(x[part], target[part]) for x, target in batches]


def start(rank, folder, scenario):
    """The entry of every process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=PROCESSES)
    try:
        torch.save(SCENARIOS[scenario](rank, Path(folder)), Path(folder, f"{rank}.pt"))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def data_parallel(rank, folder, wrap=lambda model: model):
    model = network()
    wrapped = wrap(DistributedDataParallel(model))
    optimizer = made_optimizer(model)
    phases = pwlu.TwoPhase(wrapped, optimizer, REALIGN_AT)
    train(wrapped, optimizer, share(rank, data()))
    return {"state": model.state_dict(), "phase": phases.phase}


def compiled(rank, folder):
    return data_parallel(rank, folder, partial(torch.compile, backend="aot_eager"))


def unequal(rank, folder):
    """3 of 8 samples here, 5 there; then a step in which the units of the second process see none at all."""
    model = network()
    wrapped = DistributedDataParallel(model)
    optimizer = made_optimizer(model)
    pwlu.TwoPhase(model, optimizer, REALIGN_AT)
    ((x, target), *_) = data()
    part = slice(0, 3) if rank == 0 else slice(3, 8)
    train(wrapped, optimizer, [(x[part], target[part])])
    first = copy.deepcopy(model.state_dict())
    for unit in units(model):
        unit.train(rank == 0)
    F.mse_loss(wrapped(x[part]), target[part]).backward()
    pools = values(unit.statistics.pool for unit in units(model))
    optimizer.step()
    return {"state": first, "second": model.state_dict(), "pools": pools}


def accumulated(rank, folder):
    """Two passes a step without no_sync: DistributedDataParallel broadcasts buffers before each."""
    model = network()
    wrapped = DistributedDataParallel(model)
    optimizer = made_optimizer(model)
    phases = pwlu.TwoPhase(model, optimizer, REALIGN_AT)
    ((x, target),) = share(rank, data()[:1])
    for part in (slice(0, 1), slice(1, 4)):
        F.mse_loss(wrapped(x[part]), target[part]).backward()
    pools = values(unit.statistics.pool for unit in units(model))
    optimizer.step()
    return {"state": model.state_dict(), "pools": pools, "steps": phases.steps}


def alone(rank, folder):
    """Every process trains a model of its own, and says so."""
    groups = [dist.new_group([r]) for r in range(PROCESSES)]
    model = network()
    optimizer = made_optimizer(model)
    pwlu.TwoPhase(model, optimizer, REALIGN_AT, process_group=groups[rank])
    train(model, optimizer, share(rank, data()))
    return {"state": model.state_dict()}


def uneven(rank, folder):
    """The second process has fewer batches, inside join()."""
    results = {}
    for given in ("wrapped", "inner"):
        model = network()
        wrapped = DistributedDataParallel(model)
        optimizer = made_optimizer(model)
        pwlu.TwoPhase(wrapped if given == "wrapped" else model, optimizer, REALIGN_AT)
        before = values(model.parameters())
        try:
            with wrapped.join():
                train(wrapped, optimizer, share(rank, data())[: STEPS - rank])
        except RuntimeError as error:
            results[given] = str(error), same(before, model.parameters())
        dist.barrier()
    model = network()
    wrapped = DistributedDataParallel(model)
    optimizer = made_optimizer(model)
    phases = pwlu.TwoPhase(wrapped, optimizer, REALIGN_AT)
    train(wrapped, optimizer, share(rank, data())[:REALIGN_AT])
    with wrapped.join():
        train(wrapped, optimizer, share(rank, data())[REALIGN_AT : STEPS - rank])
    results["later"] = phases.phase, model.state_dict()
    # ZeRO takes its steps in every process, and so does Phase I.
    model = network()
    wrapped = DistributedDataParallel(model)
    groups = pwlu.parameter_groups(model, lr=0.1)
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=0.1, momentum=0.9)
    phases = pwlu.TwoPhase(model, optimizer, REALIGN_AT)
    with Join([wrapped, optimizer]):
        train(wrapped, optimizer, share(rank, data())[: REALIGN_AT - 1 + 2 * (1 - rank)])
    results["zero"] = (phases.phase, phases.steps), model.state_dict()
    return results


def shard(model):
    """Split every layer over the processes."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded(rank, folder):
    def whole(model):
        return [p.full_tensor() for p in of_units(model)]

    model = shard(network())
    full = StateDictOptions(full_state_dict=True)
    optimizer = made_optimizer(model)
    phases = pwlu.TwoPhase(model, optimizer, REALIGN_AT)
    batches, seen = share(rank, data()), []
    before = values(whole(model))
    parameters = of_units(model)
    for step, batch in enumerate(batches, start=1):
        train(model, optimizer, [batch])
        seen.append((phases.phase, same(before, whole(model))))
        if step == REALIGN_AT - 1:
            in_phase_one = copy.deepcopy(get_model_state_dict(model, options=full))
            dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder / "dcp")
        if step == REALIGN_AT:
            before = values(whole(model))
    kept = all(a is b for a, b in zip(parameters, of_units(model), strict=True))
    result = {"state": get_model_state_dict(model, options=full), "seen": seen, "same objects": kept}
    optimizer.zero_grad()
    penalty = pwlu.curvature(model)
    penalty.backward()
    result["curvature"] = penalty.detach(), [p.grad.full_tensor() for p in of_units(model)]
    for name in ("full", "sharded"):  # two ways to load what was saved in Phase I into a model that is sharded already
        other = shard(network())
        phases = pwlu.TwoPhase(other, other_optimizer := made_optimizer(other), REALIGN_AT)
        if name == "full":
            set_model_state_dict(other, dict(in_phase_one), options=full)  # which changes the dict
        else:
            saved = {"model": get_model_state_dict(other)}
            dcp.load(saved, checkpoint_id=folder / "dcp")
            set_model_state_dict(other, saved["model"])
        result[name] = copy.deepcopy(get_model_state_dict(other, options=full)), (phases.phase, phases.steps)
        train(other, other_optimizer, batches[2:3])
        result[name] += ((phases.phase, phases.steps),)
    return {**result, "in phase one": in_phase_one}


OPTIMIZERS = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


def made(kind, optimizer, rule="paper"):
    """A model, what trains it, its optimizer and its controller."""
    model = network()
    cls, options = OPTIMIZERS[optimizer]
    wrapped = shard(model) if kind == "sharded" else DistributedDataParallel(model)
    groups = pwlu.parameter_groups(model, lr=options["lr"])
    optimizer = ZeroRedundancyOptimizer(groups, cls, **options) if kind == "zero" else cls(groups, **options)
    return wrapped, optimizer, pwlu.TwoPhase(wrapped, optimizer, REALIGN_AT, rule=rule)


def zero_state(rank, optimizer):
    """The state of a ZeroRedundancyOptimizer, in the first process alone."""
    optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if rank == 0 else None


def checkpoints(rank, folder):
    """By torch's API, in both phases: what is resumed, and what was not interrupted."""
    results = {}
    batches = share(rank, data())
    full = StateDictOptions(full_state_dict=True)
    for kind in ("replicated", "sharded", "zero"):
        for which in OPTIMIZERS:
            model, optimizer, _ = made(kind, which)
            train(model, optimizer, batches)
            undisturbed = get_model_state_dict(model, options=full)
            for steps in (REALIGN_AT - 1, REALIGN_AT + 1):
                place = folder / f"{kind}-{which}-{steps}"
                model, optimizer, phases = made(kind, which)
                train(model, optimizer, batches[:steps])
                other, other_optimizer, other_phases = made(kind, which)
                if kind == "zero":  # torch's functions do not know its state: it has methods of its own
                    saved = copy.deepcopy([(get_model_state_dict(model), zero_state(rank, optimizer))])
                    dist.broadcast_object_list(saved, 0)
                    set_model_state_dict(other, saved[0][0])
                    other_optimizer.load_state_dict(saved[0][1])
                    zero_state(rank, other_optimizer)  # and once more
                else:
                    weights, state = get_state_dict(model, optimizer)
                    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=place)
                    weights, state = get_state_dict(other, other_optimizer)
                    loaded = {"model": weights, "optimizer": state}
                    dcp.load(loaded, checkpoint_id=place)
                    options = {"model_state_dict": loaded["model"], "optim_state_dict": loaded["optimizer"]}
                    set_state_dict(other, other_optimizer, **options)
                where = [(each.phase, each.steps) for each in (phases, other_phases)]
                for trained, its_optimizer in ((model, optimizer), (other, other_optimizer)):
                    train(trained, its_optimizer, batches[steps:])
                ends = [get_model_state_dict(each, options=full) for each in (model, other)]
                results[kind, which, steps] = where, undisturbed, *ends
    return results


def shared_rule(rank, folder):
    """The end of training by the rule, for every kind of parallelism and optimizer."""
    results = {}
    for kind in ("replicated", "sharded", "zero"):
        for which in OPTIMIZERS:
            model, optimizer, _ = made(kind, which, "shared")
            train(model, optimizer, share(rank, data()))
            results[kind, which] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return results


SCENARIOS = {
    f.__name__: f for f in (data_parallel, compiled, unequal, accumulated, alone, uneven, sharded, checkpoints, shared_rule)
}
SCENARIOS["replicated"] = lambda rank, folder: {
    f.__name__: f(rank, folder) for f in (data_parallel, unequal, accumulated, alone)
}
