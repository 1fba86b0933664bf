"""Small networks with units, data for them, and the plainest training loop: what the tests of the learning method share."""

import torch
import torch.nn.functional as F
from torch import nn

import pwlu
from pwlu.units.module import units_of


def network(dtype=torch.float32, init="relu", activation=None):
    """One function a channel, then one for everything; always the same weights. `activation`: instead of both units."""
    torch.manual_seed(1)
    first, second = (activation(), activation()) if activation else (pwlu.PWLU(8, init=init), pwlu.PWLU(init=init))
    return nn.Sequential(nn.Linear(5, 8), first, nn.Linear(8, 8), second, nn.Linear(8, 2)).to(dtype)


def data(steps, batch=16, dtype=torch.float32, seed=2):
    """Inputs and targets of that many steps."""
    generator = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    return [(2 * random(batch, 5) + 0.5, random(batch, 2)) for _ in range(steps)]


def train(model, optimizer, batches, scheduler=None):
    """The loop as anyone writes it."""
    for x, target in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), target).backward()
        optimizer.step()
        if scheduler:
            scheduler.step()


def units(model):
    return list(units_of(model).values())


def of_units(model):
    """The parameters of all units."""
    return [unit.weight for unit in units(model)]


def weights(model):
    """All other parameters."""
    learned = {id(p) for p in of_units(model)}
    return [p for p in model.parameters() if id(p) not in learned]


def values(tensors):
    """Copies of them as they are now."""
    return [t.detach().clone() for t in tensors]


def same(first, second):
    """Whether these tensors are equal bit by bit, one by one."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def watching(unit):
    """The unit in Phase I, without a controller: its training forwards fill the pool."""
    unit.phase = 1
    return unit.train()


def shake(model):
    """Change every weight by a relative 2^-30 or so."""
    with torch.no_grad():
        for p in weights(model):
            p.mul_(1 + 2.0**-30 * torch.randn_like(p))


def bounds_of_rounding(run, roundings):
    """How far a training in float64 may come out elsewhere by rounding alone: one bound for each tensor of the state.

    `run` trains, calling its argument on the model before every step, and returns the state. A training whose weights are
    shaken by 2^-30 shows how much the steps that follow make of it. What is rounded `roundings` times, each time by at most
    2^-53, is shaken by no more than `roundings` * 2^-53; and so is the value itself. Whole numbers are not rounded.
    """
    still, shaken = run(lambda model: None), run(shake)
    bounds = {}
    for key, value in still.items():
        magnified = (shaken[key].double() - value.double()).abs().max().item() / 2.0**-30
        size = value.abs().max().item() if value.is_floating_point() else 0.0
        bounds[key] = roundings * 2.0**-53 * (magnified + size)
    return bounds


def assert_equal_to_rounding(found, expected, bounds):
    """Of two states, tensor by tensor."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        difference = (found[key].double() - value.double()).abs().max().item()
        assert difference <= bounds[key], f"{key} differs by {difference:.3g}, rounding makes at most {bounds[key]:.3g}"
