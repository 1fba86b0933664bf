"""Run folders: how they are found, what is said about damaged ones, and what is kept of them."""

import json
import re

import pytest
from example_runs import LIGHT, example_run, files_in

from pwlu.lab.runs import results
from pwlu.lab.runs.results import find_runs, keep, read_run


def test_light_files_are_kept(tmp_path):
    example_run(tmp_path / "runs" / "a", 70.0, granularity="layer", seed=2, data="/of/this/machine", device="cuda:1")
    run = read_run(tmp_path / "runs" / "a")
    kept = keep(run, tmp_path / "results")
    assert kept == tmp_path / "results" / "cifar100" / "resnet18" / "pwlu-layer-seed2"
    assert files_in(kept) == [name for name in LIGHT if name != "functions.pt"]  # which are those of seed 0
    assert (kept / "result.json").read_bytes() == (run.path / "result.json").read_bytes()
    config = json.loads((kept / "config.json").read_text())
    assert set(config) == set(run.settings.identity())
    assert "machine" not in (kept / "config.json").read_text()
    again = read_run(kept)
    assert again.settings == run.settings.replace(data="data", device=None)
    assert (again.result, again.environment) == (run.result, run.environment)
    config["epochs"] = 31  # as if the recipe had been another then
    (kept / "config.json").write_text(json.dumps(config))
    assert keep(run, tmp_path / "results").name == "pwlu-layer-seed2-2"
    assert sorted(path.name for path in kept.parent.iterdir()) == ["pwlu-layer-seed2", "pwlu-layer-seed2-2"]


def test_held_out_runs_are_kept_apart(tmp_path):
    example_run(tmp_path / "a", 70.0, holdout=5000)
    kept = keep(read_run(tmp_path / "a"), tmp_path / "results")
    assert kept == tmp_path / "results" / "cifar100" / "resnet18" / "held-out" / "pwlu-holdout-5000-seed0"


def test_a_copy_is_complete_or_not_there(tmp_path, monkeypatch):
    example_run(tmp_path / "a", 70.0)

    def full_disk(*_):
        assert find_runs(tmp_path / "results") == ([], [])
        raise OSError("no space")

    monkeypatch.setattr(results.shutil, "copyfile", full_disk)
    with pytest.raises(OSError, match="no space"):
        keep(read_run(tmp_path / "a"), tmp_path / "results")
    assert files_in(tmp_path / "results") == []


def test_what_is_not_known_of_a_setting_is_as_the_recipe_has_it(tmp_path):
    """So it is for settings that were added after a run was made."""
    settings = example_run(tmp_path / "a", 70.0)
    (tmp_path / "a" / "config.json").write_text(json.dumps({"recipe": settings.recipe, "seed": 0}))
    assert read_run(tmp_path / "a").settings == settings


def test_half_written_folders_are_named(tmp_path):
    assert find_runs(tmp_path / "nowhere") == find_runs(tmp_path) == ([], [])
    example_run(tmp_path / "good", 70.0)
    example_run(tmp_path / ".partial-x" / "run", 70.0)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.txt").touch()
    (tmp_path / "empty").mkdir()
    for name in ("no-config", "cut-off", "other", "no-accuracy", "no-environment", "gone"):
        example_run(tmp_path / name, 70.0)
    (tmp_path / "no-config" / "config.json").unlink()
    (tmp_path / "cut-off" / "result.json").write_text('{"accuracy": 7')
    (tmp_path / "other" / "config.json").write_text('{"recipe": "digits", "colour": 3}')
    (tmp_path / "no-accuracy" / "result.json").write_text('{"measured_on": "test images"}')
    (tmp_path / "no-environment" / "environment.json").unlink()
    (tmp_path / "gone" / "config.json").write_text('{"recipe": "a recipe of old"}')
    runs, complaints = find_runs(tmp_path)
    assert [run.path.name for run in runs] == ["good"]
    texts = {
        "cut-off": "result.json is damaged",
        "empty": "is not a run folder: it has no config.json",
        "gone": "there is no recipe 'a recipe of old'",
        "no-accuracy": "does not say accuracy, measured_images",
        "no-config": "is not a run folder: it has no config.json",
        "no-environment": "it has no environment.json",
        "other": "does not hold the settings of a run: .*colour",
    }
    assert len(complaints) == len(texts)
    for complaint, (name, text) in zip(complaints, texts.items(), strict=True):
        assert str(tmp_path / name) in complaint
        assert re.search(text, complaint)
