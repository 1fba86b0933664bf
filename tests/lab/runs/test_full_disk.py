"""Damaged checkpoints, full disks, folders that cannot be written: what is said, and that the run goes on afterwards."""

import errno
import json
import re
from pathlib import Path

import pytest
from lab_helpers import NAME, SHORT, assert_same_run, train, train_until_report

import pwlu
from pwlu.lab.recipes.catalog import settings
from pwlu.lab.recipes.settings import UserError
from pwlu.lab.runs.run_folder import RunFolder


@pytest.fixture
def finished(digits_run):
    return digits_run


@pytest.fixture
def stopped(tmp_path):
    train_until_report(*SHORT, "--runs", tmp_path / "runs")
    (path,) = (tmp_path / "runs").iterdir()
    return RunFolder(path)


# Damage.


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_checkpoint(stopped, finished, capsys, damage):
    previous, last = stopped.checkpoints()
    content = bytearray(last.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    last.write_bytes({"truncated": content[:-100], "flipped": content}[damage])
    assert train("--resume", stopped.path) == 2
    text = capsys.readouterr().err
    assert f"the checkpoint {last} is damaged" in text
    assert f"Remove or rename it. Then --resume continues from {previous.name}" in text
    last.rename(last.with_suffix(".pt.bad"))
    assert train("--resume", stopped.path) == 0
    assert_same_run(stopped, finished)


def test_the_only_checkpoint_is_damaged(stopped, finished, capsys):
    previous, last = stopped.checkpoints()
    previous.unlink()
    last.write_bytes(b"nonsense")
    assert train("--resume", stopped.path) == 2
    assert "--resume continues from the beginning" in capsys.readouterr().err
    last.unlink()
    assert train("--resume", stopped.path) == 0
    assert_same_run(stopped, finished)


AGAIN = "Copy it again from where it was trained, or train again"
MORE = "weight_decay, label_smoothing, augmentation, warm_up, width, pixels, realign_epochs"


def changed(**changes):
    return json.dumps(settings("digits").as_dict() | changes)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "is not a run folder: it has no config.json"),
        ("{", f"line 1 column 2 (char 1). {AGAIN}"),
        ("[1, 2]", f"config.json is damaged: expected {{...}}, not [1, 2]. {AGAIN}"),
        ('{"recipe": "digits", "colour": 3}', f"of a run: colour is not a setting of pwlu {pwlu.__version__}. {AGAIN}"),
        ('{"recipe": "nope"}', f"does not hold the settings of a run: it does not say epochs, batch, lr, {MORE}. {AGAIN}"),
        ('{"epochs": 3}', "it does not say recipe, batch, "),
        (changed(epochs="three"), f"does not hold the settings of a run: epochs must be an integer, not 'three'. {AGAIN}"),
        (changed(lr=[1]), "lr must be a number, not [1]"),
        (changed(init=None), "it does not say init. "),
        (changed(epochs=0), "--epochs must be at least 1, not 0"),
        (changed(recipe="digit"), "Did you mean digits, "),
    ],
)
def test_paths_without_a_run(tmp_path, capsys, content, text):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert train("--resume", tmp_path) == 2
    assert text in capsys.readouterr().err


# No place to write.


class Full:
    """A file on a disk that has no space for all of it."""

    def __init__(self, file, error):
        self.file, self.error = file, error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, content):
        self.file.write(content[: len(content) // 2])
        raise OSError(self.error, "the disk does not want it")


@pytest.mark.parametrize(
    ("where", "saved", "error"),
    [
        ("config.json", None, errno.ENOSPC),
        ("environment.json", None, errno.ENOSPC),
        ("snapshots/step-00000000.pt", None, errno.EDQUOT),
        ("metrics.jsonl", None, errno.ENOSPC),  # a line of the first epoch
        ("checkpoints/step-00000014", 7, errno.ENOSPC),
        ("checkpoints/step-00000014", 7, errno.EACCES),
        ("model.safetensors", 21, errno.ENOSPC),
        ("result.json", 21, errno.EROFS),
    ],
)
def test_no_space_left(tmp_path, monkeypatch, capsys, finished, where, saved, error):
    """Half of a file is written, then no more: nothing of it stays, and the run goes on once there is space."""
    opened = Path.open

    def limited(path, mode="r", *rest, **options):
        folder, _, name = where.rpartition("/")
        if mode == "wb" and path.name.startswith(name) and path.parents[1].name.endswith(folder):
            return Full(opened(path, mode), error)
        return opened(path, mode, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", limited)
        assert train(*SHORT, "--runs", tmp_path) == 2
    text = capsys.readouterr().err
    (path,) = tmp_path.iterdir()
    full = error in (errno.ENOSPC, errno.EDQUOT)
    assert text.startswith("pwlu train: " + ("no space left on the disk for " if full else f"{path}/"))
    assert full or "cannot be written: the disk does not want it" in text
    assert f"{path}/{where}" in text
    if where == "config.json":
        assert text.endswith("then start again\n")
        return
    assert text.endswith(f"then continue with pwlu train --resume {path}\n")
    if saved is None:
        assert "No checkpoint is saved yet" in text
    else:
        assert re.search(rf"The last checkpoint is step-{saved:08d}-\w{{8}}.pt", text)
    assert not list(tmp_path.rglob("*.partial"))
    assert train("--resume", path) == 0
    assert_same_run(RunFolder(path), finished)


@pytest.mark.parametrize("obstacle", ["file", "link"])
def test_a_folder_that_cannot_be_made(tmp_path, capsys, obstacle):
    runs = tmp_path / "runs"
    if obstacle == "file":
        runs.touch()
    else:
        runs.symlink_to(tmp_path / "nowhere")
    assert train(*SHORT, "--runs", runs) == 2
    assert f"the run folder {runs}/{NAME.format('')} cannot be made: " in capsys.readouterr().err


def test_a_file_is_whole_or_not_there(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write("a", b"old")
    with pytest.raises(UserError):
        folder.write("a/b", b"new")  # where a file is in the way
    assert (tmp_path / "a").read_bytes() == b"old"
    folder.write("a", b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"new")]
