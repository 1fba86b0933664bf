"""Run folders: how they are found, what is said about damaged ones, and what is kept of them."""

import errno
import json
import re
import threading

import filelock
import pytest
from example_runs import example_run, files_in

from pwlu.cli import main
from pwlu.common import files
from pwlu.lab.recipes.settings import UserError
from pwlu.lab.runs.records import read_records
from pwlu.lab.runs.results import find_runs, keep, read_run
from pwlu.lab.runs.run_folder import RunFolder


def test_a_line_per_run(tmp_path):
    """It says all that the folder said, but for what is the machine's."""
    example_run(
        tmp_path / "runs" / "a", 70.0, granularity="layer", seed=2, data="/of/this/machine", device="cuda:1", iou=(0.1, 0.4)
    )
    run = read_run(tmp_path / "runs" / "a")
    kept = keep(run, tmp_path / "results")
    assert kept == tmp_path / "results" / "cifar100" / "resnet18" / "pwlu-layer-seed2"
    assert not kept.exists()  # functions are those of seed 0
    file = kept.parent / "runs.jsonl"
    (record,) = map(json.loads, file.read_text().splitlines())
    assert record["run"] == "pwlu-layer-seed2"
    assert set(record["settings"]) == set(run.settings.identity())
    assert "machine" not in file.read_text()
    again = read_run(kept)
    assert again.settings == run.settings.replace(data="data", device=None)
    assert (again.result, again.environment, again.epochs, again.iou) == (run.result, run.environment, 2, 0.25)
    assert RunFolder(kept).metrics() == RunFolder(run.path).metrics()
    assert find_runs(tmp_path / "results") == ([again], [])


def test_two_experiments_of_one_name(tmp_path):
    """As if the recipe had been another when the first was made; a folder of an older version has its name, too."""
    example_run(tmp_path / "a", 70.0, seed=2)
    example_run(tmp_path / "results" / "cifar100" / "resnet18" / "pwlu-seed2-2", 70.0)
    run = read_run(tmp_path / "a")
    assert [keep(run, tmp_path / "results").name for _ in range(3)] == ["pwlu-seed2", "pwlu-seed2-3", "pwlu-seed2-4"]


def test_functions_of_seed_0(tmp_path):
    example_run(tmp_path / "a", 70.0, iou=(0.5,))
    kept = keep(read_run(tmp_path / "a"), tmp_path / "results")
    assert files_in(kept) == ["alignment.json", "functions.pt"]
    assert all((kept / name).read_bytes() == (tmp_path / "a" / name).read_bytes() for name in files_in(kept))
    runs, complaints = find_runs(tmp_path / "results")
    assert ([run.path for run in runs], complaints) == ([kept], [])


def test_a_full_disk_leaves_the_other_lines(tmp_path, monkeypatch):
    for seed in (1, 2):
        example_run(tmp_path / "runs" / str(seed), 70.0, seed=seed)
    kept = keep(read_run(tmp_path / "runs" / "1"), tmp_path / "results")

    def full_disk(*_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(files.CannotWrite, match=r"no space left on the disk for .*runs\.jsonl"):
        keep(read_run(tmp_path / "runs" / "2"), tmp_path / "results")
    runs, complaints = find_runs(tmp_path / "results")
    assert ([run.path for run in runs], complaints) == ([kept], [])


def test_two_processes_add_lines(tmp_path):
    """One waits while the other reads the file and writes it, so that no line is lost."""
    for seed in (1, 2):
        example_run(tmp_path / "runs" / str(seed), 70.0, seed=seed)
    first, second = (read_run(tmp_path / "runs" / str(seed)) for seed in (1, 2))
    folder = keep(first, tmp_path / "results").parent
    thread = threading.Thread(target=keep, args=(second, tmp_path / "results"))
    with filelock.FileLock(folder / ".runs.jsonl.lock"):
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        assert len(read_records(folder)[0]) == 1
    thread.join(30)
    assert list(read_records(folder)[0]) == ["pwlu-seed1", "pwlu-seed2"]


def test_lines_that_cannot_be_read(tmp_path):
    """Each is named; the others count."""
    example_run(tmp_path / "runs" / "a", 70.0)
    kept = keep(read_run(tmp_path / "runs" / "a"), tmp_path / "results")
    file = kept.parent / "runs.jsonl"
    good = json.loads(file.read_text())
    lines = ["{", "[]", json.dumps(good | {"run": "../a"}), json.dumps(good), json.dumps({"run": "bare"})]
    lines += [json.dumps(good | {"run": "b", "result": {"accuracy": "high"}}), json.dumps(good | {"run": "c", "metrics": [3]})]
    lines += [json.dumps(good | {"run": "d", "metrics": 7})]
    file.write_text("\n".join([json.dumps(good), *lines]))  # and no end of the last line
    runs, complaints = find_runs(tmp_path / "results")
    assert [run.path for run in runs] == [kept]
    expected = [
        rf"line 2 of {file} is damaged: ",
        rf'line 3 of {file} is damaged: expected {{"run": "pwlu-seed0", ...}}',
        rf"line 4 of {file} is damaged: expected ",
        rf"line 5 of {file} is damaged: pwlu-seed0 is the name of an earlier line",
        rf"'settings' of bare in {file} is damaged: expected {{...}}, not null",
        rf"'result' of b in {file} is damaged: accuracy must be a number, not 'high'",
        rf"line 1 of 'metrics' of c in {file} is damaged: it must be the numbers of an epoch",
        rf"line 1 of 'metrics' of d in {file} is damaged: it must be the numbers of an epoch",
    ]
    assert len(complaints) == len(expected)
    for complaint, text in zip(complaints, expected, strict=True):
        assert text in complaint
    example_run(tmp_path / "runs" / "b", 71.0, seed=1)
    keep(read_run(tmp_path / "runs" / "b"), tmp_path / "results")
    assert [run.settings.seed for run in find_runs(tmp_path / "results")[0]] == [0, 1]


def test_a_folder_takes_precedence_over_a_line(tmp_path):
    """A run that is being trained is not finished because another one with its name is."""
    example_run(tmp_path / "runs" / "a", 70.0, seed=1)
    kept = keep(read_run(tmp_path / "runs" / "a"), tmp_path / "results")
    example_run(kept, None, seed=1)
    assert not RunFolder(kept).finished


def test_an_iou_that_is_not_a_number(tmp_path):
    example_run(tmp_path / "a", 70.0, seed=1)
    kept = keep(read_run(tmp_path / "a"), tmp_path)
    file = kept.parent / "runs.jsonl"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"iou": "wide"}) + "\n")
    with pytest.raises(UserError, match=r"'iou' of pwlu-seed1 in .*runs.jsonl must be a number, not 'wide'"):
        read_run(kept).iou  # noqa: B018


def test_reports_of_lines(tmp_path, capsys):
    for seed in (0, 1):
        example_run(tmp_path / "runs" / str(seed), 70.0 + seed, seed=seed, activation="relu")
        keep(read_run(tmp_path / "runs" / str(seed)), tmp_path / "results")
    folder = tmp_path / "results" / "cifar100" / "resnet18"
    assert main(["report", str(folder / "relu-seed0"), str(folder / "relu-seed1"), "-o", str(tmp_path / "page.html")]) == 0
    assert "70.50 ± 0.71" in (tmp_path / "page.html").read_text()
    assert main(["report", str(folder / "relu-seed0")]) == 2
    assert "relu-seed0 is a line of runs.jsonl and has no folder for the page. Write -o FILE" in capsys.readouterr().err


def test_missing_settings_get_the_value_of_the_recipe(tmp_path):
    """So it is for settings that were added after a run was made."""
    settings = example_run(tmp_path / "a", 70.0)
    (tmp_path / "a" / "config.json").write_text(json.dumps({"recipe": settings.recipe, "seed": 0}))
    assert read_run(tmp_path / "a").settings == settings


def test_half_written_folders_are_named(tmp_path):
    """Each is named with what is wrong; folders of other kinds are passed over."""
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
