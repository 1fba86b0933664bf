"""A run that diverges says so, when it did and what to try, and is no success."""

import pytest
import torch
from lab_helpers import SHORT, STEPS_AN_EPOCH, train

from pwlu.lab.runs.divergence import STATUS, describe_divergence, divergence
from pwlu.lab.runs.run_folder import RunFolder
from pwlu.lab.training import loop
from pwlu.lab.training.trainer import Trainer


def test_divergence_in_the_last_epoch(tmp_path):
    assert train("--epochs", 1, "--lr", "1e30", "--act", "relu", "--runs", tmp_path) == STATUS
    (path,) = tmp_path.iterdir()
    assert RunFolder(path).json("result.json")["diverged"] is True


def test_a_run_that_diverged_says_so(tmp_path, capsys):
    """It reports neither an accuracy nor learned functions."""
    assert train(*SHORT, "--lr", "1000", "--runs", tmp_path, draw=True) == STATUS
    (path,) = tmp_path.iterdir()
    result = RunFolder(path).json("result.json")
    step = result["diverged_at_step"]
    assert (result["diverged"], result["diverged_at_epoch"]) == (True, (step - 1) // STEPS_AN_EPOCH + 1)
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last[0].startswith(f"The training diverged in epoch {result['diverged_at_epoch']}, at step {step}: ")
    assert "Try the recipe's --lr 0.2 instead of 1000, or let functions learn more slowly with --unit-lr 0.1." in last[0]
    assert last[1] == f"run folder: {path}"


def test_the_step_of_the_divergence(tmp_path, monkeypatch):
    """It is the first step whose loss was not finite, also if the run was stopped in between."""
    step, stops = Trainer.step, iter([12])

    def poisoned(trainer, number, batches):
        if number == 10:
            with torch.no_grad():
                next(trainer.network.parameters()).fill_(torch.nan)
        if number == 12 and next(stops, None):
            raise KeyboardInterrupt
        return step(trainer, number, batches)

    monkeypatch.setattr(Trainer, "step", poisoned)
    monkeypatch.setattr(loop, "STEPS_BETWEEN_CLOCK_CHECKS", 4)
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_CHECKPOINTS", -1)
    assert train(*SHORT, "--act", "relu", "--runs", tmp_path) == 130
    (path,) = tmp_path.iterdir()
    assert train("--resume", path) == STATUS
    assert RunFolder(path).json("result.json")["diverged_at_step"] == 11
    assert RunFolder(path).metrics()[-1]["diverged_at"] == 11


def row(epoch, loss):
    return {"epoch": epoch, "loss": loss}


@pytest.mark.parametrize(
    ("losses", "first", "epoch"),
    [
        ([2.0, 1.0], 2.3, None),
        ([99.0, 1.0], 2.3, None),  # it came down again
        ([2.0, 22.9], 2.3, None),
        ([2.0, 23.1], 2.3, 2),
        ([1e9, 1.0, 1e9, 1e8], 2.3, 3),
        ([1e9, None], 2.3, 2),
        ([1e9, 1e9], None, None),  # of a run that an older version began
        ([1e9, None], None, 2),
    ],
)
def test_what_is_a_divergence(losses, first, epoch):
    found = divergence([row(number, loss) for number, loss in enumerate(losses, start=1)], first)
    assert found["diverged"] is (epoch is not None)
    assert found.get("diverged_at_epoch") == epoch


def test_a_very_large_finite_loss(tmp_path, capsys):
    assert train(*SHORT, "--lr", "100", "--act", "relu", "--runs", tmp_path) == STATUS
    (path,) = tmp_path.iterdir()
    assert RunFolder(path).json("result.json")["train_loss"] > 1e3
    assert ": the loss rose to " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "advice"),
    [
        ({}, "Try a smaller --lr."),
        ({"recipe": "digits", "lr": 0.2, "activation": "relu"}, "Try a smaller --lr, such as 0.02."),
        (
            {"recipe": "digits", "lr": 0.4, "activation": "relu", "precision": "fp16"},
            "Try the recipe's --lr 0.2 instead of 0.4, or compute in --precision bf16.",
        ),
    ],
)
def test_advice(config, advice):
    assert describe_divergence({"diverged": True}, config) == f"The training diverged: the loss was no longer finite. {advice}"
