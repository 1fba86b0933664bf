"""Random small networks for torture.py: converted, saved, loaded, trained, fused and restored, with the outputs to expect.

Activations are piecewise linear, so that a conversion with init="same" changes nothing but by rounding.
"""

import copy
import io
import random
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import pwlu

MODULES = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardtanh, lambda: nn.ReLU(inplace=True))


class Plain(nn.Module):
    """Convolution, norm, activation."""

    def __init__(self, rng, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), rng.choice(MODULES)())

    def forward(self, x):
        return self.layers(x)


class Functions(nn.Module):
    """A function, a method, and a function again."""

    def __init__(self, rng, width):
        super().__init__()
        self.a, self.b = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x):
        x = F.relu(self.a(x))
        return F.leaky_relu(self.b(x) + x).relu()


class Reused(nn.Module):
    """One module for two places, with a way around."""

    def __init__(self, rng, width):
        super().__init__()
        self.a, self.b, self.act = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1), rng.choice(MODULES[:4])()

    def forward(self, x):
        return self.act(x + self.b(self.act(self.a(x))))


class Gated(nn.Module):
    """Squeeze and excitation: its ReLU feeds a gate and stays."""

    def __init__(self, rng, width):
        super().__init__()
        self.a, self.b, self.act = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1), nn.ReLU()

    def forward(self, x):
        gate = self.b(F.relu(self.a(x.mean((2, 3), keepdim=True)))).sigmoid()
        return self.act(x * gate)


class Tokens(nn.Module):
    """Positions as a sequence, channels last."""

    def __init__(self, rng, width):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)
        tokens = tokens + self.b(torch.relu(self.a(self.norm(tokens))))
        return tokens.transpose(1, 2).reshape(x.shape)


BLOCKS = (Plain, Functions, Reused, Gated, Tokens)


def network(seed):
    """The same network for the same seed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    width = rng.choice([3, 4, 6])
    blocks = [rng.choice(BLOCKS)(rng, width) for _ in range(rng.randint(1, 5))]
    if rng.random() < 0.3:
        blocks.append(blocks[0])  # shared
    layers = [nn.Conv2d(3, width, 3), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2)]
    return nn.Sequential(*layers).double()


def case(seed):
    """Everything that can be done to one network."""
    rng = random.Random(seed + 1)
    x = torch.randn(4, 3, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    plain = network(seed).eval()
    before = plain(x)
    options = {"granularity": rng.choice(["channel", "layer"]), "intervals": rng.choice([8, 12, 16]), "init": "same"}
    model = network(seed).eval()
    report = pwlu.convert_(model, x, **options)
    units = pwlu.units.module.units_of(model)
    assert len(units) == len(report.converted) > 0
    _close(model(x), before, "converted")

    restored = copy.deepcopy(model)
    pwlu.restore_(restored)
    assert torch.equal(restored(x), before), "restored"
    assert [type(module) for module in restored.modules()] == [type(module) for module in plain.modules()]

    realign_at = rng.randint(1, 3)
    _train(model, x, realign_at, rng)
    after = model.eval()(x)
    assert after.isfinite().all()
    assert all(unit.statistics.realigned for unit in units.values())

    other = network(seed).eval()
    pwlu.convert_(other, x, **options)
    content = io.BytesIO()
    torch.save(model.state_dict(), content)
    content.seek(0)
    other.load_state_dict(torch.load(content, weights_only=True))
    assert torch.equal(other(x), after), "state dict"

    with tempfile.TemporaryDirectory() as folder:
        pwlu.save(model, Path(folder, "model.safetensors"))
        loaded = network(seed).eval()
        pwlu.load_into(loaded, Path(folder, "model.safetensors"))
    assert torch.equal(loaded(x), after), "saved"
    assert torch.equal(copy.deepcopy(model)(x), after), "copied"

    fused = copy.deepcopy(model)
    pwlu.fuse_(fused)
    _close(fused(x), after, "fused")
    simple = copy.deepcopy(model)
    pwlu.refine_(simple, 4 * options["intervals"])
    _close(simple(x), after, "refined")
    pwlu.simplify_(simple, tolerance=1e-6)
    assert (simple(x) - after).abs().max() <= 1e-2 * after.abs().max() + 1e-3, "simplified"


def _train(model, x, realign_at, rng):
    optimizer = rng.choice([torch.optim.SGD, torch.optim.AdamW])(pwlu.parameter_groups(model, lr=0.01))
    phases = pwlu.TwoPhase(model, optimizer, realign_at)
    model.train()
    for _ in range(realign_at + 3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert (phases.phase, phases.steps) == (2, realign_at)
    phases.remove()


def _close(found, expected, what):
    """To the rounding of doubles, of which there are some thousands of operations one after the other."""
    error = (found - expected).abs().max()
    assert error <= 1e-9 * (1 + expected.abs().max()), f"{what}: {error:.3g}"
