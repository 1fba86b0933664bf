"""A run that is stopped, wherever that happens, and goes on, ends as if it never had been: to the bit."""

import json
import signal

import pytest
from lab_helpers import (
    NAME,
    SHORT,
    STEPS_AN_EPOCH,
    assert_same_run,
    short_run,
    start,
    stopped_run,
    train,
    train_until,
    train_until_report,
    write_images,
)

from pwlu.lab.runs.divergence import STATUS
from pwlu.lab.runs.run_folder import RunFolder
from pwlu.lab.training import loop
from pwlu.lab.training.trainer import Trainer

KILLED = -signal.SIGKILL


@pytest.fixture
def uninterrupted(digits_run):
    return digits_run


@pytest.fixture(scope="module")
def with_average(tmp_path_factory):
    return short_run(tmp_path_factory.mktemp("runs"), "--ema", "0.9")


@pytest.mark.slow
def test_killed(tmp_path, uninterrupted, with_average):
    """In Phase I, in Phase II, in the middle of an epoch, of writing a checkpoint, of writing the report."""
    first, second = tmp_path / NAME.format(""), tmp_path / NAME.format("ema-0.9-")
    begin, end_of_phase_one = [*SHORT, "--runs", tmp_path], f"checkpoints/step-{STEPS_AN_EPOCH:08d}"
    jobs = [
        {"arguments": begin, "die_at": 4},  # before there was any checkpoint
        {"arguments": ["--resume", first], "die_at": 2 * STEPS_AN_EPOCH + 2},
        {"arguments": ["--resume", first]},
        {"arguments": [*begin, "--ema", "0.9"], "die_at": 4, "often": True},
        {"arguments": ["--resume", second], "die_writing": end_of_phase_one, "often": True},
        {"arguments": ["--resume", second], "die_writing": "checkpoints/step-00000009", "often": True},
        {"arguments": ["--resume", second], "die_writing": "report.md"},
        {"arguments": ["--resume", second]},
    ]
    found, _ = start(tmp_path, jobs)
    assert found == [KILLED, KILLED, 0, KILLED, KILLED, KILLED, KILLED, 0]
    assert_same_run(RunFolder(first), uninterrupted)
    assert_same_run(RunFolder(second), with_average)
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("stopped", [[1], [3, 6], [7, 8, 20]])
def test_checkpoints_in_the_middle_of_an_epoch(tmp_path, uninterrupted, stopped):
    """The sums of the epoch go on too: its training loss and accuracy are those of the whole."""
    command = [*SHORT, "--runs", tmp_path]
    for step in stopped:
        train_until(step, *command, checkpoints=True)
        (path,) = tmp_path.iterdir()
        assert RunFolder(path).checkpoints()[-1].name.startswith(f"step-{step:08d}-")
        command = ["--resume", path]
    assert train(*command) == 0
    assert_same_run(RunFolder(path), uninterrupted)


@pytest.mark.parametrize("begun", ["on", "off"])
def test_whether_norms_are_fused_is_decided_once(tmp_path, monkeypatch, begun):
    """What auto came to is kept, although the machine that goes on would choose otherwise; the command line is obeyed."""
    found, begin = [], Trainer.__init__

    def noted(trainer, *arguments):
        begin(trainer, *arguments)
        found.append(trainer.fuse_norms)

    monkeypatch.setattr(Trainer, "__init__", noted)
    for number, pays, arguments in (
        (STEPS_AN_EPOCH + 1, begun == "on", [*SHORT, "--runs", tmp_path]),
        (STEPS_AN_EPOCH + 2, begun != "on", None),
        (STEPS_AN_EPOCH + 3, begun == "on", ["--fuse-norms", "off" if begun == "on" else "on"]),
    ):
        monkeypatch.setattr("pwlu.lab.training.trainer.warm_up", lambda device, pays=pays: int(pays))
        path = next(tmp_path.iterdir(), None)
        train_until(number, *(arguments if path is None else ["--resume", path, *(arguments or [])]))
    assert found == [begun, begun, "off" if begun == "on" else "on"]
    assert RunFolder(path).json("environment.json")["fuse_norms"] == begun


def test_on_any_device(tmp_path, device, uninterrupted):
    """A GPU repeats no bits, but a run that is stopped and goes on there learns what one on a CPU does."""
    path = stopped_run(tmp_path, STEPS_AN_EPOCH + 1, "--device", device)
    assert train("--resume", path, "--device", device) == 0
    rounding = 3 * STEPS_AN_EPOCH * 2**-11  # of every step: convolutions on a GPU may compute with 11 bits
    for row, other in zip(RunFolder(path).metrics(), uninterrupted.metrics(), strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=rounding)
        assert row["test_loss"] == pytest.approx(other["test_loss"], rel=rounding)


def test_no_checkpoint_before_it_is_time(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "STEPS_BETWEEN_CLOCK_CHECKS", 1)
    assert not RunFolder(stopped_run(tmp_path, 6)).checkpoints()


def test_another_number_of_processes(tmp_path, capsys):
    """What stays the same is said, and nothing if the number is the same."""
    path = stopped_run(tmp_path, STEPS_AN_EPOCH + 1)
    folder = RunFolder(path)
    train_until(STEPS_AN_EPOCH + 1, "--resume", path)
    assert "started with" not in capsys.readouterr().out
    folder.write_json("environment.json", folder.environment() | {"processes": 4})
    assert train("--resume", path) == 0
    said = capsys.readouterr().out
    assert "started with 4 processes, now 1. Unchanged: the images of every step, their augmentation, the batch" in said
    assert "Changed: the rounding of sums, the random numbers of dropout, the batch statistics" in said


def test_what_is_finished_is_not_done_again(uninterrupted, capsys):
    files = {p: p.stat().st_mtime_ns for p in uninterrupted.path.rglob("*")}
    assert train("--resume", uninterrupted.path) == 0
    printed = capsys.readouterr().out
    assert f"{uninterrupted.path} is finished: accuracy " in printed
    assert "epoch " not in printed.partition(" s per epoch")[0]
    assert files == {p: p.stat().st_mtime_ns for p in uninterrupted.path.rglob("*")}


def test_interrupted_from_the_keyboard(tmp_path, uninterrupted, capsys):
    """Metrics after the checkpoint are taken back, and a line that was cut off by the end of the program."""
    path = stopped_run(tmp_path, STEPS_AN_EPOCH + 1)
    assert f"stopped. To continue: pwlu train --resume {path}" in capsys.readouterr().err
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"epoch": 2, "step": 2 * STEPS_AN_EPOCH, "loss": 99.0}) + '\n{"epoch": 3, "st')
    assert train("--resume", path) == 0
    assert_same_run(RunFolder(path), uninterrupted)


def test_a_run_that_diverged_is_over(tmp_path, capsys):
    """Also when it was stopped before it could write its result: it does not go on training."""
    train_until_report(*SHORT, "--lr", "1e30", "--act", "relu", "--runs", tmp_path)
    (path,) = tmp_path.iterdir()
    before = RunFolder(path).metrics()
    assert before[-1]["loss"] is None
    assert len(before) < 3
    for _ in range(2):  # it ends, and it had ended
        assert train("--resume", path) == STATUS
        assert "The training diverged in epoch 1, at step " in capsys.readouterr().out
    assert RunFolder(path).metrics() == before
    assert RunFolder(path).json("result.json")["diverged"] is True
    assert "The training diverged in epoch 1, at step " in (path / "report.md").read_text()
    assert "NaN" not in (path / "metrics.jsonl").read_text()


def test_images_that_went_missing(tmp_path, capsys):
    """With one step less per epoch, it would end too early and count as finished."""
    data, runs = write_images(tmp_path / "data"), tmp_path / "runs"
    sizes = ("--pixels", 32, "--width", 0.125, "--batch", 4, "--epochs", 2, "--act", "relu", "--workers", 0)
    train_until(4, "imagenette/resnet18", "--data", data, "--runs", runs, *sizes)
    (path,) = runs.iterdir()
    image = data / "train/cat/0.jpg"
    content = image.read_bytes()
    image.unlink()
    assert train("--resume", path) == 2
    assert f"{path}: the data set has changed. An epoch had 3 steps and would now have 2" in capsys.readouterr().err
    image.write_bytes(content)
    assert train("--resume", path) == 0


def test_what_may_change_when_a_run_goes_on(tmp_path, capsys):
    """The device and the speed may change, not the results."""
    path = stopped_run(tmp_path, STEPS_AN_EPOCH + 1, "--norm", "group")
    capsys.readouterr()
    for arguments, named in (
        (["digits"], "leave out digits, or"),
        (["--lr", 1], "leave out --lr, or"),
        (["--act", "relu", "--epochs", 9], "leave out --act, --epochs, or"),
        (["digits", "--ema", 0.9], "leave out digits, --ema, or"),
        (["--runs", tmp_path], "leave out --runs, or"),
    ):
        assert train("--resume", path, *arguments) == 2
        text = capsys.readouterr().err
        assert text.startswith("pwlu train: --resume uses the settings of that run: ")
        assert named in text
    assert train("--resume", path, "--accumulate", 0) == 2
    assert "--accumulate must be at least 1, not 0" in capsys.readouterr().err
    assert train("--resume", path, "--accumulate", 2) == 0
