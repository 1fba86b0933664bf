"""What a person sees of a run: lines, a bar, TensorBoard."""

import io
import re
import sys
from contextlib import redirect_stderr
from functools import partial

import pytest
from lab_helpers import SHORT, short_run, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

from pwlu.lab.runs.progress import Progress
from pwlu.lab.runs.run_folder import RunFolder


class Terminal(io.StringIO):
    """Takes what is written, and says that it is a terminal."""

    def isatty(self):
        return True


def test_lines(tmp_path, capsys):
    """Outside a terminal there is one line per epoch, with the phase in which it began, and nothing moves the cursor."""
    folder = short_run(tmp_path)  # T' is one epoch of three
    assert [row["phase"] for row in folder.metrics()] == [1, 2, 2]
    printed = capsys.readouterr()
    assert printed.err == ""
    assert all(c.isprintable() or c == "\n" for c in printed.out)
    number = r"\d+(?:\.\d+)?"
    line = rf"epoch   (\d)/3: loss {number}, train {number} %, test {number} %, Phase (I|II), \d+ images/s, 0:00:\d\d left"
    found = [re.fullmatch(line, text) for text in printed.out.splitlines()[:3]]
    assert [match and (match[1], match[2]) for match in found] == [("1", "I"), ("2", "II"), ("3", "II")]
    assert len(printed.out.splitlines()) == 5


def test_a_bar_on_a_terminal(tmp_path, capsys):
    with redirect_stderr(Terminal()) as terminal:
        short_run(tmp_path, "--batch", "32")
    shown = terminal.getvalue()
    assert "\r" in shown
    assert re.search(r"digits pwlu, seed 0: 100%\|.*\| 84/84 \[", shown)
    last = shown[shown.rindex("84/84") :]
    assert re.search(r"epoch=3/3, loss=[\d.]+, train_accuracy=[\d.]+, phase=II, images/s=\d+", last)
    assert len(re.findall(r"epoch   \d/3: loss", capsys.readouterr().out)) == 3


def test_the_bar_of_a_run_that_goes_on():
    with redirect_stderr(Terminal()) as terminal:
        progress = Progress("title", total=10, done=4)
        for _ in range(6):
            progress.step(loss=1.0)
        progress.close()
    assert re.search(r"title: 100%\|.*\| 10/10 \[.*loss=1", terminal.getvalue())
    assert progress.left() == "0:00:00"


def test_phases_are_shown(monkeypatch, tmp_path):
    """While they last: here the bar is drawn at every step."""
    monkeypatch.setattr("pwlu.lab.runs.progress.tqdm", partial(tqdm, mininterval=0))
    with redirect_stderr(Terminal()) as terminal:
        short_run(tmp_path, "--batch", "32")
    assert set(re.findall(r"phase=(\w+)", terminal.getvalue())) == {"I", "II"}


def test_silence(capsys):
    """All processes but the first print nothing."""
    with redirect_stderr(Terminal()) as terminal:
        progress = Progress("title", total=2, silent=True)
        progress.step()
        progress.say("something")
        progress.close()
    assert capsys.readouterr().out == terminal.getvalue() == ""


def test_time_that_is_left(monkeypatch, capsys):
    now = iter([0.0, 100.0])
    monkeypatch.setattr("pwlu.lab.runs.progress.time.monotonic", lambda: next(now))
    progress = Progress("title", total=400, done=30)
    for _ in range(10):
        progress.step()
    assert progress.left() == "1:00:00"  # 10 s per step since it was resumed, 360 steps


# TensorBoard.


def test_tensorboard(tmp_path, capsys):
    folder = short_run(tmp_path, "--act", "relu", "--tensorboard")
    assert "Phase" not in capsys.readouterr().out  # a network without PWLUs has none
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    rows = folder.metrics()
    names = set(rows[0]) - {"epoch", "step"}
    assert set(events.Tags()["scalars"]) == names
    for name in names:
        scalars = events.Scalars(name)
        assert [s.step for s in scalars] == [row["step"] for row in rows]
        assert [s.value for s in scalars] == pytest.approx([row[name] for row in rows], rel=1e-6)


def test_without_the_package(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert train(*SHORT, "--act", "relu", "--tensorboard", "--runs", tmp_path) == 2
    error = capsys.readouterr().err
    assert re.search(r"--tensorboard needs more packages \(.*tensorboard.*\): pip install '\.\[tensorboard\]'", error)
    monkeypatch.undo()
    (path,) = tmp_path.iterdir()
    assert train("--resume", path) == 0
    assert (RunFolder(path).path / "tensorboard").exists()
