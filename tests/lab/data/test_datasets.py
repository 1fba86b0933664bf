"""The data sets: what is in them, what is held out, and what is said when they are missing or damaged."""

import os
import pickle
import signal
import sys
import time

import pytest
import torch
from imported import MOST_SECONDS
from lab_helpers import IMAGE_CLASSES, batches_of, take_steps, task_of, train, trainer_of, write_cifar, write_images
from PIL import Image
from sklearn.datasets import load_digits

from pwlu.lab.data import sources
from pwlu.lab.recipes.settings import UserError
from pwlu.lab.runs.run_folder import RunFolder

NETTE = {"recipe": "imagenette/resnet18", "pixels": 32, "width": 0.125, "batch": 4, "workers": 0}


def refused(capsys, *arguments):
    """Return the error of a command that ends with status 2, without a traceback."""
    assert train(*arguments) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    assert printed.err.startswith("pwlu train: ")
    return printed.err


# In memory.


def test_digits():
    data = task_of().data
    assert (len(data.train), len(data.test), data.channels) == (898, 899, 1)
    assert data.classes == [str(k) for k in range(10)]
    assert data.measured_on == "test images"
    whole = torch.tensor(load_digits().images).sum((1, 2)).long().sort().values
    found = torch.cat([part.images for part in (data.train, data.test)]).long().sum((1, 2, 3)).sort().values
    assert torch.equal(found, 15 * whole)  # all of them, each once
    assert torch.bincount(data.test.labels).min() >= 87


@pytest.mark.parametrize("count", [1, 100, 897])
def test_holdout(count):
    """The held-out images are the same training images for every seed, and no test images."""
    whole = task_of().data
    first, second = (task_of(holdout=count, batch=1, norm="group", seed=seed).data for seed in (0, 1))
    assert first.measured_on == "held-out training images"
    assert len(first.test) == count
    for part, other in ((first.train, second.train), (first.test, second.test)):
        assert torch.equal(part.numbers, other.numbers)
        assert torch.equal(part.images, whole.train.images[part.numbers])
        assert torch.equal(part.labels, whole.train.labels[part.numbers])
    assert torch.cat([first.train.numbers, first.test.numbers]).sort().values.tolist() == list(range(898))
    assert torch.equal(first.test.mean, whole.test.mean)


def test_holdout_of_files(tmp_path):
    task = task_of(**NETTE, data=str(write_images(tmp_path)), holdout=5)
    numbers = task.data.train.files.numbers, task.data.test.files.numbers
    assert sorted(numbers[0] + numbers[1]) == list(range(12))
    assert len(numbers[1]) == 5
    assert task.data.test.files.source is task.data.train.files.source


def test_every_image_once_per_epoch():
    """The last ones that do not fill a batch are left out; they differ in every epoch."""
    task = task_of(augmentation="none", batch=64)
    task.data.train.images[:] = 0
    task.data.train.labels = torch.arange(898)
    epochs = [torch.cat([labels for ((_, labels),) in task.epoch(epoch)]) for epoch in (0, 1, 0)]
    assert len(set(epochs[0].tolist())) == len(epochs[0]) == 14 * 64
    assert not torch.equal(epochs[0], epochs[1])
    assert torch.equal(epochs[0], epochs[2])
    later = torch.cat([labels for ((_, labels),) in task.epoch(1, first_step=5)])
    assert torch.equal(later, epochs[1][5 * 64 :])


def test_cifar(tmp_path):
    task = task_of("cifar100/resnet18", data=str(write_cifar(tmp_path)), batch=4, width=0.125)
    assert (len(task.data.train), len(task.data.test), len(task.data.classes)) == (12, 5, 100)
    assert (task.data.train.padding, task.data.train.flip) == (4, True)
    stored = pickle.loads((tmp_path / "cifar-100-python" / "train").read_bytes())
    assert task.data.train.images[3, 1, 2, 5] == stored["data"][3, 1024 + 2 * 32 + 5]  # planes of red, green and blue
    assert task.data.train.labels.tolist() == stored["fine_labels"]
    take_steps(trainer_of(task), 2)


def test_cifar_by_the_command(tmp_path, capsys):
    data = write_cifar(tmp_path / "data")
    arguments = ("--data", data, "--batch", 4, "--width", 0.125, "--epochs", 1, "--act", "relu", "--runs", tmp_path / "runs")
    assert train("cifar100/resnet18", *arguments) == 0
    assert "on 5 test images" in capsys.readouterr().out
    assert RunFolder(tmp_path / "runs" / "cifar100-resnet18-relu-epochs-1-batch-4-width-0.125-seed0").finished


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("part", ["train", "test", "meta"])
@pytest.mark.parametrize("content", [b"", b"no pickle at all", pickle.dumps({"data": Harmful()}, protocol=2)])
def test_cifar_with_other_files(tmp_path, monkeypatch, capsys, part, content):
    """They are refused before any of their code is called."""
    monkeypatch.chdir(tmp_path)
    (write_cifar(tmp_path) / "cifar-100-python" / part).write_bytes(content)
    text = refused(capsys, "cifar100/resnet18", "--data", tmp_path, "--runs", tmp_path / "runs")
    assert f"CIFAR-100 is not at {tmp_path}/cifar-100-python, or its files are damaged" in text
    assert not (tmp_path / "harm").exists()


def test_missing_cifar(tmp_path, capsys):
    text = refused(capsys, "cifar100/resnet18", "--data", tmp_path / "none", "--runs", tmp_path / "runs")
    assert f"CIFAR-100 is not at {tmp_path}/none/cifar-100-python" in text
    assert f"torchvision.datasets.CIFAR100('{tmp_path}/none', download=True)" in text
    assert "--data DIR" in text


# In files.


def test_folders(tmp_path):
    task = task_of(**NETTE, data=str(write_images(tmp_path)))
    assert task.data.classes == list(IMAGE_CLASSES)
    assert (len(task.data.train), len(task.data.test)) == (12, 6)
    ((images, labels), *_) = next(batches_of(task))
    assert images.shape == (4, 3, 32, 32)
    assert set(labels.tolist()) <= {0, 1, 2}
    assert 0.5 < images.std() < 2
    take_steps(trainer_of(task), 2)
    tested = list(task.test_batches())
    assert torch.cat([labels for _, labels in tested]).tolist() == [0, 0, 1, 1, 2, 2]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(tested, task.test_batches(), strict=True))


@pytest.mark.parametrize("augmentation", ["none", "crop", "crop+flip", "autoaugment"])
def test_augmentation_of_files(tmp_path, augmentation):
    """A function of seed, epoch and image: not of the batch, and not of what else draws random numbers."""
    cats = write_images(tmp_path) / "train" / "cat"
    (cats / "8.png").write_bytes((cats / "1.png").read_bytes())
    folder = task_of(**NETTE, data=str(tmp_path), augmentation=augmentation).data.train

    def images(keys, *plan):
        return torch.cat([images for images, _ in folder.batches([torch.tensor(part) for part in plan], keys)])

    first = images((0, 1), [3, 4, 5, 6])
    torch.manual_seed(6)
    assert torch.equal(images((0, 1), [6, 5], [4, 3]).flip(0), first)
    for other in ((1, 1), (0, 2)):
        assert torch.equal(images(other, [3, 4, 5, 6]), first) == (augmentation == "none")
    assert torch.equal(*images((0, 1), [1, 4])) == (augmentation == "none")  # the same image twice, under two numbers


def test_workers(tmp_path, monkeypatch):
    """They read what one process reads, epoch for epoch, and what they cannot read is said as it is without them."""
    data = str(write_images(tmp_path))
    in_memory = task_of(**NETTE | {"workers": 2}, data=data)
    monkeypatch.setattr(sources, "IN_MEMORY", 0)
    by_workers, alone = (task_of(**NETTE | {"workers": workers}, data=data) for workers in (2, 0))
    kinds = [type(task.data.train.files.source) for task in (in_memory, by_workers, alone)]
    assert kinds == [sources.Decoded, sources.Folder, sources.Folder]
    for epoch in range(2):
        for ours, *others in zip(alone.epoch(epoch), by_workers.epoch(epoch), in_memory.epoch(epoch), strict=True):
            for theirs in others:
                assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
    broken = tmp_path / "train" / "cat" / "1.png"
    broken.write_bytes(broken.read_bytes()[:200])
    for task in (alone, by_workers):
        with pytest.raises(UserError, match=rf"^the image {broken} cannot be read: [^\n]*run the command again$"):
            list(task.epoch(2))
    for task in (by_workers, in_memory):
        task.data.train.loader._iterator._shutdown_workers()  # left to the garbage collector, it takes torch 5 s per worker


def test_workers_need_only_the_packages_of_their_data(tmp_path, processes):
    """Images of a classifier are read without the package that detection needs."""
    (tmp_path / "faster_coco_eval.py").write_text("raise ImportError('not installed')")
    code = """
import sys
from lab_helpers import task_of
task = task_of(recipe="imagenette/resnet18", pixels=16, batch=4, workers=1, data=sys.argv[1])
print(len(next(iter(task.epoch(0)))[0][0]))
task.data.train.loader._iterator._shutdown_workers()
"""
    data, paths = str(write_images(tmp_path / "data")), [str(tmp_path), *sys.path]
    done = processes(["-c", code, data], dict(os.environ) | {"PYTHONPATH": os.pathsep.join(paths)}, paths)
    assert done.stdout == "4\n", done.stderr


def is_running(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs SIGKILL")
def test_workers_end_with_a_process_that_is_killed(processes):
    code = """
import os, signal
import torch
from pwlu.lab.data.workers import requested_batches
batches = iter(requested_batches(range(4), [[0], [1], [2], [3]], torch.device("cpu"), 1))
next(batches)
print(batches._workers[0].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = processes(["-c", code], dict(os.environ))
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + MOST_SECONDS
    while is_running(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_as_many_workers_as_cores(tmp_path, monkeypatch):
    task = task_of(**NETTE | {"workers": None}, data=str(write_images(tmp_path)))
    assert task.data.train.workers == task.settings.worker_count
    for cores, workers in ((3, 3), (64, 8), (None, 1)):  # None: it is not known
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        assert task.settings.worker_count == workers
        assert task.settings.replace(workers=0).worker_count == 0


@pytest.mark.parametrize("place", ["memory", "files"])
def test_unreadable_image(tmp_path, capsys, monkeypatch, place):
    """Name the image in the error. A run that reads from files has begun, and goes on when the image is repaired."""
    if place == "files":
        monkeypatch.setattr(sources, "IN_MEMORY", 0)
        monkeypatch.setattr(sources, "_SAMPLE", 1)  # the first image
    data, runs = write_images(tmp_path / "data"), tmp_path / "runs"
    broken = data / "val" / "dog" / "0.jpg"
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2])
    sizes = ("--pixels", 32, "--width", 0.125, "--batch", 4, "--epochs", 1, "--act", "relu", "--workers", 0)
    text = refused(capsys, "imagenette/resnet18", "--data", data, "--runs", runs, *sizes)
    assert f"the image {broken} cannot be read: " in text
    assert "Replace it in all copies" in text
    broken.write_bytes(whole)
    command = (
        ("--resume", *runs.iterdir()) if place == "files" else ("imagenette/resnet18", "--data", data, "--runs", runs, *sizes)
    )
    assert train(*command) == 0
    assert len(list(runs.iterdir())) == 1


def test_missing_folders(tmp_path, capsys):
    command = ("imagenette/resnet18", "--data", tmp_path, "--runs", tmp_path / "runs")
    assert f"no images at {tmp_path}/train. Expected {tmp_path}/train/CLASS/*.jpg" in refused(capsys, *command)
    write_images(tmp_path)
    (tmp_path / "val").rename(tmp_path / "test")
    assert f"no images at {tmp_path}/val. Expected" in refused(capsys, *command)
    (tmp_path / "val").mkdir()
    assert f"{tmp_path}/val must have one folder of images per class" in refused(capsys, *command)
    (tmp_path / "val" / "cat").mkdir()
    assert f"{tmp_path}/val must have one folder of images per class" in refused(capsys, *command)
    Image.new("RGB", (9, 9)).save(tmp_path / "val" / "cat" / "a.png")
    text = refused(capsys, *command)
    assert f"{tmp_path}/train and {tmp_path}/val must have the same classes, but only one of them has dog, eel" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--augmentation", "autoaugment"], "--augmentation autoaugment is for image files: write crop+flip"),
        (["--pixels", 16], "the images of digits always have 8 pixels: leave out --pixels"),
        (["--holdout", 898], "--holdout 898 must be less than the number of training images, 898"),
        (["--batch", 899], "--batch 899 must be at most the number of training images, 898"),
        (["--holdout", 890], "--batch 64 must be at most the number of training images, 8"),
        (["--batch", 64, "--accumulate", 3], "must be divisible by processes x --accumulate, 1 x 3. Write --batch 63"),
        (["--batch", 1], "--batch 1 gives each of 1 micro-batches 1 image, but batch norm needs at least 2: write --batch 2"),
        (["--batch", 4, "--accumulate", 4], "each of 4 micro-batches 1 image, but batch norm needs at least 2"),
    ],
)
def test_what_the_data_cannot_be(tmp_path, capsys, arguments, text):
    assert text in refused(capsys, *arguments, "--runs", tmp_path)
