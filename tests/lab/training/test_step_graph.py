"""`pwlu train --cuda-graphs`."""

import pytest
import torch
from lab_helpers import ALONE, Trainer, take_steps, task_of, train

from pwlu.lab.recipes.catalog import settings
from pwlu.lab.recipes.settings import UserError
from pwlu.lab.runs.processes import Processes
from pwlu.lab.training.trainer import check_cuda_graphs

ONE, TWO = (Processes(0, count, torch.device("cuda")) for count in (1, 2))


def trained(device, steps, **changes):
    """Return a trainer of the digits' network after some steps, 5 of them in Phase I."""
    changes = {"epochs": 3, "realign_epochs": 0.7, "batch": 128} | changes
    task = task_of(processes=Processes(0, 1, device), **changes)
    return take_steps(Trainer(task, task.settings, task.processes), steps)


@pytest.mark.parametrize("changes", [{}, {"accumulate": 2}, {"rule": "shared", "ema": 0.9}, {"activation": "pau"}], ids=str)
def test_same_training_as_without_graphs(changes, device):
    """Compare in float64, in which steps do not magnify rounding beyond the tolerance."""
    if device.type != "cuda":
        pytest.skip("needs --device cuda")
    changes = {"steps": 20, "precision": "float64"} | changes
    graphed, expected = trained(device, cuda_graphs=True, **changes), trained(device, **changes)
    assert graphed.graph.captures == (1 if "activation" in changes else 2)  # one in each phase
    for name in ("network", "measured"):
        found, wanted = (dict(getattr(each, name).state_dict()) for each in (graphed, expected))
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("steps", [4, 12])  # the next step is in Phase I, in Phase II
def test_gradients_of_a_replay(steps, device):
    """Compare with gradients of the same kernels without a graph: no element is a sum of more than 128 x 64 terms."""
    if device.type != "cuda":
        pytest.skip("needs --device cuda")
    trainer = trained(device, steps, cuda_graphs=True)
    assert trainer.phase == (1 if steps < 5 else 2)
    batches = next(iter(trainer.task.epoch(2)))
    trainer.graph(batches, trainer.phase)
    found = [parameter.grad.clone() for parameter in trainer.network.parameters()]
    trainer.optimizer.zero_grad()
    trainer._backward(batches)
    for gradient, parameter in zip(found, trainer.network.parameters(), strict=True):
        slack = 128 * 64 * 2.0**-24 * parameter.grad.abs().max().item()
        torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=slack)


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
