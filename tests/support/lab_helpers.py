"""What the tests of ``pwlu train`` share: short runs, small data sets, and what of a run can be compared."""

import hashlib
import io
import itertools
import json
import os
import pickle
import subprocess
import sys
import tarfile
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from imported import MOST_SECONDS, plain_environment
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import load_file
from torchvision.datasets import CIFAR100

from pwlu.cli import main
from pwlu.lab.recipes.catalog import settings
from pwlu.lab.runs.processes import Processes
from pwlu.lab.runs.run_folder import RunFolder
from pwlu.lab.tasks.classification import Classification
from pwlu.lab.training import loop, summary
from pwlu.lab.training.trainer import Trainer

ALONE = Processes(0, 1, torch.device("cpu"))
SHORT = ("--epochs", "3", "--realign-epochs", "1", "--batch", "128")  # of the digits: 7 steps an epoch
STEPS_AN_EPOCH = 7
NAME = "digits-pwlu-epochs-3-batch-128-realign-epochs-1-{}seed0"  # of the folder of such a run, with what else is changed
IMAGE_CLASSES = ("cat", "dog", "eel")


@contextmanager
def one_thread():
    """What is computed then does not depend on the machine, and small networks are fastest so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(*arguments, draw=False):
    """``pwlu train``, in this process; the exit status. The picture takes longer than a short training: `draw` it or not.

    It runs on the CPU unless the arguments name a device: only there do two trainings compute the same bits.
    """
    with one_thread(), nullcontext() if draw else patch.object(summary, "plot_functions", lambda *_, **__: Figure()):
        return main(["train", "--device", "cpu", *map(str, arguments)])


def short_run(runs, *arguments, draw=False):
    """A finished run of the digits under `runs`, which has no other."""
    assert train(*SHORT, *arguments, "--runs", runs, draw=draw) == 0
    (path,) = runs.iterdir()
    return RunFolder(path)


def train_until(step, *arguments, checkpoints=False):
    """``pwlu train``, interrupted from the keyboard before a step. With `checkpoints`, it saves one after every step."""

    def interrupted(trainer, number, batches):
        if number == step:
            raise KeyboardInterrupt
        return take(trainer, number, batches)

    take = Trainer.step
    often = {"STEPS_BETWEEN_CLOCK_CHECKS": 1, "SECONDS_BETWEEN_CHECKPOINTS": -1} if checkpoints else {}
    with patch.multiple(loop, **often) if often else nullcontext(), patch.object(Trainer, "step", interrupted):
        assert train(*arguments) == 130


def train_until_report(*arguments):
    """``pwlu train``, interrupted from the keyboard when it writes its report, so that the run is not finished."""

    def interrupted(folder, name, content):
        if name == "report.md":
            raise KeyboardInterrupt
        write(folder, name, content)

    write = RunFolder.write
    with patch.object(RunFolder, "write", interrupted):
        assert train(*arguments) == 130


def stopped_run(runs, step, *arguments, **options):
    """The folder of a short run of the digits that was interrupted before a step."""
    train_until(step, *SHORT, *arguments, "--runs", runs, **options)
    (path,) = runs.iterdir()
    return path


def task_of(recipe="digits", processes=ALONE, **changes):
    return Classification(settings(recipe, **{"channels_last": False} | changes), processes)


def trainer_of(task):
    with one_thread():
        return Trainer(task, task.settings, task.processes)


def batches_of(task):
    """Those of one epoch after the other."""
    return itertools.chain.from_iterable(task.epoch(epoch) for epoch in itertools.count())


def take_steps(trainer, count, before_step=lambda number: None):
    """The first steps of a training."""
    with one_thread():
        for number, batch in zip(range(count), batches_of(trainer.task), strict=False):
            before_step(number)
            trainer.step(number, batch)
    return trainer


def after(count, recipe="digits", **changes):
    """What so many steps make of a new network."""
    return take_steps(trainer_of(task_of(recipe, **changes)), count)


def without_times(rows):
    return [{key: value for key, value in row.items() if key not in ("seconds", "images_per_second")} for row in rows]


def same_state(first, second):
    """Of two state dicts: bit by bit."""
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def assert_same_run(found, expected):
    """Weights, functions and metrics, times aside."""
    assert found.finished
    assert expected.finished
    assert without_times(found.metrics()) == without_times(expected.metrics())
    assert same_state(*(load_file(folder.path / "model.safetensors") for folder in (found, expected)))
    states = [torch.load(folder.path / "functions.pt", weights_only=True) for folder in (found, expected)]
    assert same_state(*({(unit, key): p for unit, ps in state.items() for key, p in ps.items()} for state in states))


# Processes.


def start(folder, jobs, *launcher):
    """Have train_worker.py do these commands, by itself or by a launcher of several; the exit statuses, and all it printed."""
    worker = Path(__file__).with_name("train_worker.py")
    command = [sys.executable, *launcher, worker, folder, json.dumps(jobs, default=str)]
    with subprocess.Popen(
        command, env=plain_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, err = process.communicate(timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher then stops its processes
            raise
    assert process.returncode == 0, err
    *printed, statuses = out.splitlines()
    return json.loads(statuses), printed


def rank_of(folder, rank):
    """The process of this rank of a training whose working directory or command line names this folder."""
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            named = os.readlink(f"/proc/{entry}/cwd") == folder or f"{folder}/" in Path(f"/proc/{entry}/cmdline").read_text()
            if named and f"RANK={rank}" in Path(f"/proc/{entry}/environ").read_text().split("\0"):
                return int(entry)
        except (OSError, UnicodeDecodeError):  # it has ended, or belongs to somebody else
            continue
    raise AssertionError("no such process")


# Small data sets.


def write_cifar(root, train=12, test=5):
    """Random images, in files as the authors of CIFAR-100 ship them. torchvision gets their checksums."""
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, count in (("train", train), ("test", test)):
        content = {
            "data": random.integers(0, 256, (count, 3072), dtype=np.uint8),
            "fine_labels": random.integers(0, 100, count).tolist(),
            "coarse_labels": [0] * count,
        }
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    names = {"fine_label_names": [f"kind {k}" for k in range(100)], "coarse_label_names": []}
    (folder / "meta").write_bytes(pickle.dumps(names, protocol=2))
    sums = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in ("train", "test", "meta")}
    CIFAR100.train_list, CIFAR100.test_list = [["train", sums["train"]]], [["test", sums["test"]]]
    CIFAR100.meta = CIFAR100.meta | {"md5": sums["meta"]}
    return root


def write_images(root, train=4, test=2):
    """So many a class, JPEG and PNG, of different sizes, one of them grey."""
    random = np.random.default_rng(0)
    for part, count in (("train", train), ("val", test)):
        for label, name in enumerate(IMAGE_CLASSES):
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                size = (40 + 8 * label, 48 + number) + ((3,) if number or label else ())
                image = Image.fromarray(random.integers(0, 256, size, dtype=np.uint8))
                image.save(folder / f"{number}.{'png' if number % 2 else 'jpg'}")
    return root


def write_tiny_imagenet(root, annotated=True, pixels=64):
    """Write twelve training and six test images of three classes, one grey; `annotated`: in the layout of the authors."""
    random = np.random.default_rng(0)
    lines = []
    for part, count in (("train", 4), ("val", 2)):
        for label, name in enumerate(IMAGE_CLASSES):
            folder = root / part / ("" if annotated and part == "val" else name) / ("images" if annotated else "")
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                size = (pixels, pixels) + ((3,) if number or label else ())
                Image.fromarray(random.integers(0, 256, size, dtype=np.uint8)).save(folder / f"{name}_{number}.JPEG")
                lines += [f"{name}_{number}.JPEG\t{name}\t0\t0\t62\t62\n"] * (part == "val")
    if annotated:
        (root / "val" / "val_annotations.txt").write_text("".join(lines))
    return root


def write_shards(root, images=None):
    """The images of `write_images` as shards of five, in the WebDataset layout: patterns of the training and test shards."""
    folder = images or write_images(root / "images")
    patterns = []
    for part in ("train", "val"):
        paths = sorted((folder / part).glob("*/*"), key=lambda path: (path.stem, path.parent.name))
        for first in range(0, len(paths), 5):
            with tarfile.open(root / f"{part}-{first // 5:03}.tar", "w") as tar:
                for path in paths[first : first + 5]:
                    key, label = f"{path.parent.name}_{path.stem}", IMAGE_CLASSES.index(path.parent.name)
                    add_member(tar, f"{key}.cls", str(label).encode())
                    add_member(tar, f"{key}{path.suffix}", path.read_bytes())
                    add_member(tar, f"{key}.json", b"{}")
        patterns.append(str(root / f"{part}-{{000..{(len(paths) - 1) // 5:03}}}.tar"))
    return patterns


def add_member(tar, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
