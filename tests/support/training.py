"""A small training for the tests of frameworks, and what is to be seen in it."""

import re
import runpy
import sys
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pwlu

ROOT = Path(__file__).parents[2]
REALIGN_AT = 3
X = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()
BATCHES = DataLoader(TensorDataset(X, Y), batch_size=8)  # four an epoch


class Network(nn.Module):
    """As Hugging Face wants it: arguments by name, a loss in the result. Always the same weights."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(4, 8), pwlu.PWLU(8, channel_dim=-1), nn.Linear(8, 2))

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def optimizer_of(model):
    """With a weight decay for PWLUs too, which moves whatever has a gradient, if only one of zero."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


class Watch:
    """What the PWLU saw before each step of the optimizer, and its parameters after it."""

    def __init__(self, model, optimizer):
        (self.unit,) = (m for m in model.modules() if isinstance(m, pwlu.PWLU))
        self.start = self.parameters()
        self.inputs, self.after = [[]], []
        self.unit.register_forward_pre_hook(lambda unit, inputs: self.inputs[-1].append(inputs[0].detach().double()))
        optimizer.register_step_post_hook(lambda *_: (self.after.append(self.parameters()), self.inputs.append([])))

    def parameters(self):
        return self.unit.weight.detach().clone()

    def check(self, steps, accumulate=1):
        """Still in Phase I; realigned where the inputs of its steps say, all batches of a step as one; learning in Phase II."""
        assert len(self.after) == steps > REALIGN_AT
        assert all(torch.equal(parameters, self.start) for parameters in self.after[: REALIGN_AT - 1])
        mean = std = None
        for batches in self.inputs[:REALIGN_AT]:
            assert len(batches) == accumulate
            x = torch.cat(batches)
            now, spread = x.mean(0), x.std(0, correction=0)
            mean, std = (now, spread) if mean is None else (0.9 * mean + 0.1 * now, 0.9 * std + 0.1 * spread)
        bounds = self.after[REALIGN_AT - 1][:16].double()
        torch.testing.assert_close(bounds, torch.cat([mean - 3 * std, mean + 3 * std]), rtol=1e-5, atol=1e-5)
        later = self.after[REALIGN_AT - 1 :]
        assert all(not torch.equal(before, after) for before, after in pairwise(later))
        assert self.unit.phase in (0, 2)  # 0: the controller has let go
        assert self.unit.statistics.steps == REALIGN_AT


def equal(state, other):
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def trained_in_a_plain_loop(epochs, accumulate=1):
    model = Network()
    optimizer = optimizer_of(model)
    phases = pwlu.TwoPhase(model, optimizer, REALIGN_AT)
    for _ in range(epochs):
        for number, (x, y) in enumerate(BATCHES, 1):
            (model(x, y)["loss"] / accumulate).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert phases.phase == 2
    return model.state_dict()


def run_example(name, arguments, monkeypatch, folder):
    """In this process: the framework need not be imported anew."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.chdir(folder)
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


def accuracy(printed):
    return float(re.findall(r"test accuracy (\S+) %", printed)[-1])
