"""Several processes train as one does."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from imported import MOST_SECONDS, PRINT_THREADS, plain_environment
from lab_helpers import (
    NAME,
    SHORT,
    STEPS_AN_EPOCH,
    assert_same_run,
    short_run,
    start,
    take_steps,
    task_of,
    trainer_of,
    without_times,
)
from networks import assert_equal_to_rounding, bounds_of_rounding
from safetensors.torch import load_file
from torch import nn

from pwlu.baselines import FReLU
from pwlu.lab.recipes.settings import UserError
from pwlu.lab.runs.processes import Processes
from pwlu.lab.runs.run_folder import RunFolder
from pwlu.lab.training import trainer

EXACT = ("--norm", "group", "--precision", "float64")
STEPS = 3 * STEPS_AN_EPOCH


def part_of(rank, count):
    return Processes(rank, count, torch.device("cpu"))


def test_every_test_image_is_measured_once():
    """Also if processes have different numbers of images, or none."""
    for holdout, count in ((0, 2), (0, 3), (5, 7), (1, 2)):
        seen = []
        for rank in range(count):
            task = task_of(processes=part_of(rank, count), holdout=holdout, batch=42)
            seen += [image.sum().item() for images, _ in task.test_batches() for image in images.double()]
        everything = [image.sum().item() for images, _ in task_of(holdout=holdout).test_batches() for image in images.double()]
        assert sorted(seen) == sorted(everything)
        assert len(seen) == (holdout or 899)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_processes_share_every_batch(accumulate):
    """The same images in the same step, however many processes share it, augmented in the same way."""
    whole = [torch.cat([images for images, _ in parts]) for parts in task_of(batch=64).epoch(3)]
    shares = [task_of(batch=64, accumulate=accumulate, processes=part_of(rank, 4)).epoch(3, first_step=2) for rank in range(4)]
    for expected, parts in zip(whole[2:], zip(*shares, strict=True), strict=True):
        found = torch.cat([images for share in parts for images, _ in share])
        assert [len(images) for share in parts for images, _ in share] == [16 // accumulate] * 4 * accumulate
        assert torch.equal(*(x.flatten(1).double().sort(0).values for x in (found, expected)))


@pytest.mark.parametrize(
    ("count", "device", "expected"), [(2, "cuda", nn.SyncBatchNorm), (1, "cuda", nn.BatchNorm2d), (2, "cpu", nn.BatchNorm2d)]
)
def test_batch_norm_is_over_all_gpus(monkeypatch, count, device, expected):
    """That of FReLU too, and of the average. No GPU is needed to see it: nothing is moved there, nothing computed."""
    monkeypatch.setattr(nn.Module, "to", lambda self, *_, **__: self)
    monkeypatch.setattr(trainer, "DistributedDataParallel", lambda network, devices: network)
    task = task_of(activation="frelu", ema=0.9)
    made = trainer.Trainer(task, task.settings, Processes(0, count, torch.device(device)))
    for network in (made.network, made.measured):
        norms = [module for module in network.modules() if hasattr(module, "running_mean")]
        funnels = [module for module in network.modules() if isinstance(module, FReLU)]
        assert [type(norm) for norm in norms] == [expected] * 6
        assert [type(funnel.norm) for funnel in funnels] == [expected] * 3
    optimized = {id(p) for group in made.optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in made.network.parameters()}


def test_a_batch_that_cannot_be_shared():
    with pytest.raises(UserError, match=r"--batch 65 must be divisible by processes x --accumulate, 2 x 1\. Write --batch 64"):
        task_of(batch=65, processes=part_of(0, 2))
    with pytest.raises(
        UserError, match="gives each of 4 micro-batches 1 image, but batch norm needs at least 2: write --batch 8 or more"
    ):
        task_of(batch=4, accumulate=2, processes=part_of(0, 2))


# Two processes that torchrun starts.

needs_gloo = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


ONE_GROUP = """
from pwlu.lab.runs.processes import join_process_group
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel
with join_process_group("cpu"):
    DistributedDataParallel(Linear(1, 1))
"""


@needs_gloo
@pytest.mark.slow
def test_no_thread_of_gloo_is_left(tmp_path):
    """End these threads: one that waits for Python's lock at the exit aborts the process."""
    (tmp_path / "group.py").write_text(ONE_GROUP + PRINT_THREADS)
    command = [sys.executable, *TORCHRUN[:-1], "1", tmp_path / "group.py"]
    done = subprocess.run(command, env=plain_environment(), capture_output=True, text=True, timeout=MOST_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "threads:" in done.stdout
    assert "gloo" not in done.stdout


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Runs of two processes, and all that they said."""
    runs = tmp_path_factory.mktemp("runs")
    command = [*SHORT, "--runs", runs]
    exact = NAME.format("norm-group-precision-float64-")
    names = exact, NAME.format("ema-0.5-").replace("seed0", "seed1"), f"{exact}-2"
    jobs = [
        {"arguments": [*command, *EXACT]},
        {"arguments": [*command, "--seed", "1", "--ema", "0.5"]},  # with batch norm
        {"arguments": [*command, *EXACT, "--again"], "die_at": STEPS_AN_EPOCH + 4, "often": True},
        {"arguments": ["--resume", runs / names[2]]},
    ]
    statuses, printed = start(tmp_path_factory.mktemp("meetings"), jobs, *TORCHRUN)
    assert [status == 0 for status in statuses] == [True, True, False, True]
    return [RunFolder(runs / name) for name in names], printed


@pytest.mark.slow
@needs_gloo
def test_two_processes_do_what_one_does(two, tmp_path):
    """To rounding: the sums over a batch of 128 and 8 x 8 positions are made in another order."""
    ((found, *_), _), expected = two, short_run(tmp_path, *EXACT)

    def run(before_step):
        trainer = trainer_of(task_of(norm="group", precision="float64", epochs=3, realign_epochs=1.0, batch=128))
        return take_steps(trainer, STEPS, lambda number: before_step(trainer.network)).network.state_dict()

    bounds = bounds_of_rounding(run, 128 * 64)
    states = [load_file(folder.path / "model.safetensors") for folder in (found, expected)]
    assert_equal_to_rounding(*states, bounds)
    assert 0 < bounds["2.weight"] < 1e-8 * states[0]["2.weight"].abs().max()  # the bounds say something
    for row, other in zip(without_times(found.metrics()), without_times(expected.metrics()), strict=True):
        assert row == pytest.approx(other, rel=2e-7)  # metrics have seven digits
        assert row["accuracy"] == other["accuracy"]
    assert found.json("environment.json")["processes"] == 2
    assert found.json("result.json")["measured_images"] == 899


@pytest.mark.slow
@needs_gloo
def test_batch_norm(two):
    """What is measured is the model that is saved, though each process has its own statistics of batches."""
    (_, folder, _), _ = two
    rows = folder.metrics()
    assert rows[-1]["loss"] < rows[0]["loss"]
    trainer = trainer_of(task_of(batch=128))
    trainer.network.load_state_dict(load_file(folder.path / "model.safetensors"))
    measured = trainer.task.measure(trainer.network, torch.no_grad())
    assert measured["accuracy"] == pytest.approx(rows[-1]["accuracy"], rel=1e-6)
    assert measured["test_loss"] == pytest.approx(rows[-1]["test_loss"], rel=1e-5)


@pytest.mark.slow
@needs_gloo
def test_one_speaks_for_all(two):
    folders, printed = two
    assert len([line for line in printed if line.startswith("epoch ")]) == 3 + 3 + 1 + 2
    ends = [line for line in printed if line.startswith("run folder: ")]
    assert [line.split(",")[0] for line in ends] == [f"run folder: {folder.path}" for folder in folders]
    assert len(printed) == 9 + 3 * 2


@pytest.mark.slow
@needs_gloo
def test_a_killed_run_of_two_processes_goes_on(two):
    """From the middle of an epoch in Phase II, to the bit."""
    (whole, _, killed), _ = two
    assert_same_run(killed, whole)
