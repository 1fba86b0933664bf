"""A run on disk: what is in its folder, and that no other run writes into it."""

import json
import re
from pathlib import Path

import pytest
import torch
from example_runs import every_setting_changed
from lab_helpers import SHORT, STEPS_AN_EPOCH, same_state, short_run, train
from safetensors.torch import load_file

from pwlu import reference
from pwlu.analysis.alignment import Alignment
from pwlu.lab.recipes.catalog import RECIPES, settings
from pwlu.lab.recipes.experiment import run_name
from pwlu.lab.recipes.settings import UserError
from pwlu.lab.runs.environment import revision
from pwlu.lab.runs.results import no_run_error, settings_of
from pwlu.lab.runs.run_folder import FORMAT, KEPT, RunFolder, new_folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return short_run(tmp_path_factory.mktemp("runs"), "--seed", "5", draw=True)


def loaded(path):
    return torch.load(path, weights_only=True)


# What is in it.


def test_contents(finished):
    names = {str(p.relative_to(finished.path)) for p in finished.path.rglob("*") if p.is_file()}
    steps = [k * STEPS_AN_EPOCH for k in range(4)]
    expected = {"config.json", "environment.json", "metrics.jsonl", "result.json", "report.md", "functions.png"}
    expected |= {"model.safetensors", "network.json", "functions.pt", "alignment.json", "inputs.json"} | {
        f"snapshots/step-{s:08d}.pt" for s in steps
    }
    checkpoints = {name for name in names if name.startswith("checkpoints/")}
    assert names - checkpoints == expected
    found = [re.fullmatch(r"checkpoints/step-(\d{8})-[0-9a-f]{8}\.pt", name)[1] for name in sorted(checkpoints)]
    assert [int(step) for step in found] == steps[-KEPT:]
    assert finished.path.name == "digits-pwlu-epochs-3-batch-128-realign-epochs-1-seed5"  # what differs from the recipe


def test_what_was_asked_for(finished):
    asked = finished.settings()
    assert (asked.recipe, asked.seed, asked.epochs, asked.realign_epochs, asked.batch) == ("digits", 5, 3, 1.0, 128)
    assert asked == settings("digits", seed=5, epochs=3, realign_epochs=1.0, batch=128, device="cpu")
    assert finished.json("config.json") == asked.as_dict()


def test_environment(finished):
    found = finished.json("environment.json")
    assert found["torch"] == torch.__version__
    assert found["revision"] == revision()
    assert found["python"]
    assert found["pwlu"]
    assert found["format"] == FORMAT
    assert found["torchvision"]
    assert found["device"]
    assert (found["threads"], found["processes"], found["side_by_side"]) == (1, 1, 1)


def test_the_revision_of_a_copy(monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.delenv("PWLU_REVISION", raising=False)
    assert revision() == ""
    monkeypatch.setenv("PWLU_REVISION", "1f2e3d4c")
    assert revision() == "1f2e3d4c"


def test_metrics(finished):
    rows = [json.loads(line) for line in (finished.path / "metrics.jsonl").read_text().splitlines()]
    assert rows == finished.metrics()
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert [row["step"] for row in rows] == [STEPS_AN_EPOCH, 2 * STEPS_AN_EPOCH, 3 * STEPS_AN_EPOCH]
    keys = {"epoch", "step", "loss", "train_accuracy", "test_loss", "accuracy", "lr", "phase", "seconds", "images_per_second"}
    assert all(set(row) == keys for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert all(row["images_per_second"] == pytest.approx(896 / row["seconds"], rel=1e-5) for row in rows)


def test_result(finished):
    result, rows = finished.json("result.json"), finished.metrics()
    assert result["accuracy"] == rows[-1]["accuracy"]
    assert result["best_accuracy"] == max(row["accuracy"] for row in rows)
    assert (result["test_loss"], result["train_loss"]) == (rows[-1]["test_loss"], rows[-1]["loss"])
    assert (result["measured_on"], result["measured_images"], result["diverged"]) == ("test images", 899, False)
    assert result["sites"] == 3
    weights = 9 * 8 + 9 * 8 * 16 + 9 * 16 * 16 + 2 * (8 + 16 + 16) + 17 * 10
    assert result["parameters"] == weights + (8 + 16 + 16) * 21


def test_report(finished):
    text = (finished.path / "report.md").read_text()
    result = finished.json("result.json")
    assert text.startswith(
        f"# digits, pwlu, seed 5\n\naccuracy {result['accuracy']:.2f} % on 899 test images, 4,618 parameters"
    )
    assert "![the learned functions](functions.png)" in text
    assert "| weight decay | 0.0005 |" in text
    assert f"| torch | {torch.__version__} |" in text
    assert "3 converted" in text
    assert "median IOU" in text
    assert (finished.path / "functions.png").read_bytes().startswith(b"\x89PNG")
    assert len(Alignment.from_json((finished.path / "alignment.json").read_text()).units) == 3


def test_functions_and_snapshots(finished):
    """Of all units, before, on the way and after; those in Phase I are all the same."""
    steps = sorted((finished.path / "snapshots").iterdir())
    snapshots = [loaded(path) for path in steps]
    model, functions = load_file(finished.path / "model.safetensors"), loaded(finished.path / "functions.pt")
    assert set(functions) == {"2", "5", "8"}
    for unit, parameters in functions.items():
        assert set(parameters) == {"left", "right", "heights", "left_slope", "right_slope"}
        for name, value in parameters.items():
            assert torch.equal(value, getattr(reference.unpack(model[f"{unit}.weight"], 16), name))
            assert torch.equal(value, snapshots[-1][unit][name])
    assert (snapshots[0]["2"]["left"] == -3).all()
    assert not torch.equal(snapshots[0]["2"]["left"], snapshots[1]["2"]["left"])
    assert not torch.equal(snapshots[1]["2"]["heights"], snapshots[2]["2"]["heights"])


def test_checkpoints_need_no_pickle(finished):
    for path in finished.checkpoints():
        state = loaded(path)
        assert state["step"] == int(path.name[5:13])
        assert set(state["trainer"]) == {"network", "optimizer", "schedule", "scaler"}
        assert state["trainer"]["network"]["2.weight"].shape == (8 * 21,)


def test_every_setting_survives(tmp_path):
    """config.json -> Settings -> the same, also with every field changed."""
    folder = RunFolder(tmp_path)
    for name in RECIPES:
        folder.write_json("config.json", settings(name).as_dict())
        assert folder.settings() == settings(name)
    changed = every_setting_changed()
    folder.write_json("config.json", changed.as_dict())
    assert folder.settings() == changed
    types = [{name: type(value) for name, value in each.as_dict().items()} for each in (folder.settings(), changed)]
    assert types[0] == types[1]


def test_a_run_without_a_rule_is_by_that_of_the_paper(tmp_path):
    """It was trained before there were others, whatever the default is today."""
    folder = RunFolder(tmp_path)
    config = settings("digits", rule="shared").as_dict()
    folder.write_json("config.json", config)
    assert folder.settings().rule == "shared"
    del config["rule"]
    folder.write_json("config.json", config)
    assert folder.settings().rule == "paper"


# Half written, or damaged.


@pytest.mark.parametrize("line", ["5", "null", '{"foo": 1}', '{"step": "one"}', '{"step": 0}', '{"step": 7, "loss": "low"}'])
def test_metrics_of_another_kind(tmp_path, line):
    """A line that was cut off is as if it were not there; a whole one that holds something else is an error."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 4, "loss": null}\n' + line + "\n")
    expected = (
        f'it must be the numbers of an epoch, such as {{"epoch": 1, "step": 98, "loss": 2.5}}, not {line}. Correct it or '
    )
    with pytest.raises(UserError, match=re.escape(f"line 2 of {path} is damaged: {expected}")):
        RunFolder(tmp_path).metrics()
    path.write_text('{"step": 4, "loss": null}\n{"step": 8, "lo')
    assert RunFolder(tmp_path).metrics() == [{"step": 4, "loss": None}]


def test_runs_nearby_are_suggested(tmp_path):
    """In the folder itself, or down to where results/ has them; beside what is absent, no further than the next folder."""
    deep = tmp_path / "results" / "cifar100" / "resnet18" / "pwlu-seed0"
    shallow = tmp_path / "results" / "digits" / "relu-seed0"
    for path in (deep, shallow):
        path.mkdir(parents=True)
        (path / "config.json").touch()
    (deep / "model.safetensors").touch()
    with pytest.raises(UserError, match=rf"only cifar100, digits\. Runs nearby: {shallow}$"):
        settings_of(tmp_path / "results")
    assert str(no_run_error(tmp_path / "results", "config.json")).endswith(f"only cifar100, digits. Runs nearby: {shallow}")
    assert str(no_run_error(tmp_path / "results", "config.json", "model.safetensors")).endswith(f". Runs nearby: {deep}")
    assert str(no_run_error(tmp_path / "results" / "digits" / "pwlu-seed0", "config.json")).endswith(
        f". Runs nearby: {shallow}"
    )
    assert str(no_run_error(tmp_path / "results" / "digit", "config.json")).endswith(
        ". pwlu train creates run folders, with config.json"
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "runs.jsonl").write_text('{"run": "pwlu-seed0"}\n')
    assert str(no_run_error(tmp_path / "other", "config.json")).endswith(f". Runs nearby: {tmp_path / 'other' / 'pwlu-seed0'}")
    assert str(no_run_error(tmp_path / "other" / "pwlu-seed1", "config.json")).endswith(
        f". Runs nearby: {tmp_path / 'other' / 'pwlu-seed0'}"
    )
    assert str(no_run_error(tmp_path / "other", "config.json", "model.safetensors")).endswith(
        "with config.json and model.safetensors"
    )


# Never overwritten.


def test_a_second_run_has_a_folder_of_its_own(tmp_path):
    for number in ("", "-2", "-3"):
        path = new_folder(tmp_path / "a" / "b", "run")
        assert path == tmp_path / "a" / "b" / f"run{number}"
        (path / "file").touch()


def test_the_same_command_twice(tmp_path, capsys):
    """Says that there is such a run and how to go on; other settings, or another seed, are another run."""
    runs = tmp_path / "my runs"
    command = (*SHORT, "--act", "relu", "--runs", runs)
    path = short_run(runs, "--act", "relu").path
    assert train(*command) == 2
    words = f"{path} is a run with the same settings. It is finished: view it with pwlu report '{path}', or start a new run"
    assert words in capsys.readouterr().err
    (path / "result.json").unlink()
    assert train(*command, "--workers", "1") == 2
    words = f"{path} is a run with the same settings. It stopped after 3 epochs: continue it with pwlu train --resume '{path}'"
    assert words in capsys.readouterr().err
    with RunFolder(path).lock():
        assert train(*command) == 2
    words = f"{path} is a run with the same settings. Another process is training it: wait for it, or start a new run"
    assert words in capsys.readouterr().err
    assert [folder.name for folder in runs.iterdir()] == [path.name]
    assert train(*command, "--seed", "1") == 0
    (path / "config.json").write_text("{")  # what cannot be read is in nobody's way
    assert train(*command) == 0
    assert train(*command, "--again") == 0
    name = "digits-relu-epochs-3-batch-128-seed"
    assert {folder.name for folder in runs.iterdir()} == {f"{name}0", f"{name}0-2", f"{name}0-3", f"{name}1"}
    assert not list(runs.glob("*/functions.png")) + list(runs.glob("*/snapshots"))
    assert same_state(load_file(path / "model.safetensors"), load_file(runs / f"{name}0-2" / "model.safetensors"))


def test_a_name_is_never_too_long():
    every = {"epochs": 7, "batch": 9, "lr": 0.123456789, "weight_decay": 0.000123456, "norm_weight_decay": 0.000123456}
    every |= {"label_smoothing": 0.0123456, "warm_up": 0.123456, "width": 0.123456, "holdout": 123, "intervals": 7}
    names = {run_name(settings("digits", **every, unit_lr=1 / k)) for k in range(3, 20)}
    assert len(names) == 17
    assert max(map(len, names)) < 200


def test_two_processes_do_not_train_the_same_run(tmp_path):
    """The lock is the process's: another that opens the file does not get it, and it ends with its holder."""
    folder, other = RunFolder(tmp_path), RunFolder(tmp_path)
    folder.write_json("config.json", {})
    with folder.lock(), pytest.raises(UserError, match="is being trained by another process"), other.lock():
        pass
    with other.lock():
        pass


# Other lengths.


@pytest.mark.parametrize(("batch", "steps"), [(64, 10), (128, 5), (32, 20)])
def test_iterations(tmp_path, batch, steps):
    """Of the recipe's batch of 64: twice as many with half of it. The last epoch need not be a whole one."""
    assert train("--iterations", 10, "--batch", batch, "--act", "relu", "--runs", tmp_path) == 0
    (path,) = tmp_path.iterdir()
    (row,) = RunFolder(path).metrics()
    assert row["step"] == steps
    assert row["images_per_second"] == pytest.approx(steps * batch / row["seconds"], rel=1e-5)


def test_the_last_epoch_is_always_measured(tmp_path):
    folder = short_run(tmp_path, "--act", "relu", "--measure-every", "2")
    assert ["accuracy" in row for row in folder.metrics()] == [False, True, True]
    assert folder.json("result.json")["best_accuracy"] == max(row["accuracy"] for row in folder.metrics()[1:])
