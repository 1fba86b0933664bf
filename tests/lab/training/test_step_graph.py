"""`pwlu train --cuda-graphs`."""

import pytest
import torch
from lab_helpers import ALONE, Trainer, take_steps, task_of, train

from pwlu.lab.recipes.catalog import settings
from pwlu.lab.recipes.settings import UserError
from pwlu.lab.runs.processes import Processes
from pwlu.lab.training.trainer import check_cuda_graphs

ONE, TWO = (Processes(0, count, torch.device("cuda")) for count in (1, 2))


def trained(device, **changes):
    """What 20 steps, 5 of them in Phase I, make of the digits' network in float64."""
    changes = {"epochs": 3, "realign_epochs": 0.7, "batch": 128, "precision": "float64"} | changes
    task = task_of(processes=Processes(0, 1, device), **changes)
    return take_steps(Trainer(task, task.settings, task.processes), 20)


@pytest.mark.parametrize("changes", [{}, {"accumulate": 2}, {"rule": "shared", "ema": 0.9}, {"activation": "pau"}], ids=str)
def test_graphs_compute_what_steps_without_them_do(changes, device):
    if device.type != "cuda":
        pytest.skip("needs --device cuda")
    graphed, expected = trained(device, cuda_graphs=True, **changes), trained(device, **changes)
    assert graphed.graph.captures == (1 if "activation" in changes else 2)  # one in each phase
    torch.testing.assert_close(graphed.state(), expected.state(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("recipe", "processes", "why"),
    [
        ("digits", ALONE, "--cuda-graphs: it needs a GPU, and this run computes on cpu. Leave it out"),
        ("digits", TWO, "--cuda-graphs: it needs one process, and this run has 2. Leave it out"),
        ("nuclei/retinanet_resnet18_fpn", ONE, "needs images of one size, and detection has many"),
    ],
)
def test_what_cannot_be_captured(recipe, processes, why):
    with pytest.raises(UserError, match=why):
        check_cuda_graphs(settings(recipe, cuda_graphs=True), processes)


def test_the_command_says_what_cannot_be_captured(tmp_path, capsys):
    assert train("digits", "--cuda-graphs", "--runs", tmp_path) == 2
    assert "--cuda-graphs: it needs a GPU, and this run computes on cpu. Leave it out" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
