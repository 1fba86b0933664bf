"""What a training leaves to look at on the way: snapshots of the functions, and TensorBoard's pictures of them."""

import io

import pytest
import torch
from lab_helpers import STEPS_AN_EPOCH, short_run, train
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pwlu.lab.training import loop
from pwlu.report.run_data import read_run_data


def snapshots_of(folder):
    return sorted((folder.path / "snapshots").glob("*.pt"))


def steps_of(folder):
    return [int(path.stem.removeprefix("step-")) for path in snapshots_of(folder)]


@pytest.mark.parametrize(("epochs", "wanted", "after"), [(3, 20, [0, 1, 2, 3]), (5, 2, [0, 3, 5]), (4, 1, [0, 4])])
def test_snapshots_are_spread_over_the_run(tmp_path, epochs, wanted, after):
    """At most one per epoch, and one at the end."""
    folder = short_run(tmp_path, "--epochs", epochs, "--snapshots", wanted)
    assert steps_of(folder) == [STEPS_AN_EPOCH * epoch for epoch in after]
    last, functions = (torch.load(path, weights_only=True) for path in (snapshots_of(folder)[-1], folder.path / "functions.pt"))
    assert all(torch.equal(last[unit][key], value) for unit, values in functions.items() for key, value in values.items())


def test_snapshots_are_small(digits_run):
    """Four bytes a parameter, and some 250 for each tensor."""
    parameters = (8 + 16 + 16) * 21
    sizes = [path.stat().st_size for path in snapshots_of(digits_run)]
    assert len(sizes) == 4
    assert max(sizes) < 4 * parameters + 350 * 15


def test_no_snapshots(tmp_path, capsys):
    folder = short_run(tmp_path, "--snapshots", 0)
    assert not (folder.path / "snapshots").exists()
    assert list(read_run_data(folder.path).snapshots) == [3 * STEPS_AN_EPOCH]
    assert train("--snapshots", -1, "--runs", tmp_path) == 2
    assert "--snapshots must be at least 0, not -1" in capsys.readouterr().err


def test_a_real_run_is_read(digits_run):
    """Nothing that a report wants is missing from what a training writes."""
    run = read_run_data(digits_run.path)
    assert run.notes == []
    assert list(run.snapshots) == [STEPS_AN_EPOCH * epoch for epoch in range(4)]
    assert run.realigned_after == STEPS_AN_EPOCH
    assert run.starts == dict.fromkeys(("2", "5", "8"), "relu")
    assert [unit.name for unit in run.alignment] == ["2", "5", "8"]
    assert all(unit.histogram for unit in run.alignment)


def pictures_of(folder):
    events = EventAccumulator(str(folder.path / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    return events.Images("functions") if "functions" in events.Tags()["images"] else []


def test_tensorboard_has_pictures_of_the_functions(tmp_path, monkeypatch):
    """A few in a run, each of the functions as they are then, and few kilobytes."""
    monkeypatch.setattr(loop, "FIGURES", 2)
    folder = short_run(tmp_path, "--tensorboard")
    pictures = pictures_of(folder)
    assert [picture.step for picture in pictures] == [2 * STEPS_AN_EPOCH, 3 * STEPS_AN_EPOCH]
    first, last = (picture.encoded_image_string for picture in pictures)
    assert first != last
    with Image.open(io.BytesIO(last)) as image:
        assert image.width > 600
        assert len(image.convert("RGB").getcolors(1 << 24)) > 20  # lines of several colours, not an empty sheet
    assert len(last) < 200_000


def test_no_pictures_without_functions(tmp_path):
    assert pictures_of(short_run(tmp_path, "--tensorboard", "--act", "relu")) == []
