"""`pwlu compare` under torchrun: its processes train one run after the other, together."""

import subprocess
import sys

import pytest
import torch.distributed as dist
from example_runs import example_run
from imported import MOST_SECONDS, plain_environment

from pwlu.cli import main
from pwlu.lab.runs.records import read_records
from pwlu.lab.runs.run_folder import RunFolder

COMMAND = ["compare", "digits", "--acts", "relu,pwlu", "--seeds", "1", "--epochs", "2", "--realign-epochs", "1"]


def by_two(folder, *arguments):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pwlu"]
    return subprocess.run(
        [*launcher, *arguments], env=plain_environment(), cwd=folder, capture_output=True, text=True, timeout=MOST_SECONDS
    )


@pytest.mark.slow
@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
def test_two_processes(tmp_path, monkeypatch, capsys):
    """Unfinished runs are resumed in place, missing runs are trained, and then both are finished."""
    begun = tmp_path / "runs" / "begun"
    example_run(begun, None, "digits", activation="pwlu", epochs=2, realign_epochs=1.0, epochs_done=0)
    done = by_two(tmp_path, *COMMAND, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 runs: 0 finished, 1 stopped, 1 missing") == 1
    assert done.stdout.count("digits relu-epochs-2, seed 0: accuracy ") == 1
    assert done.stdout.count("| PWLU | ") == 1
    names = ["begun", "digits-relu-epochs-2-seed0"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == names
    for name in names:
        folder = RunFolder(tmp_path / "runs" / name)
        assert folder.finished
        assert folder.json("environment.json")["processes"] == 2
    assert {name.partition("-")[0] for name in read_records(tmp_path / "results" / "digits")[0]} == {"pwlu", "relu"}
    monkeypatch.chdir(tmp_path)
    assert main([*COMMAND, "--dry-run"]) == 0
    assert "2 runs: 2 finished, 0 stopped, 0 missing" in capsys.readouterr().out


def test_side_by_side_and_together(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*COMMAND, "--jobs", "2"]) == 2
    assert "--jobs 2: under torchrun, all processes train one run at a time. Leave out --jobs" in capsys.readouterr().err
