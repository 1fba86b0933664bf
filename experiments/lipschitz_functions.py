"""Fit three 1-Lipschitz functions of one variable by 1-Lipschitz networks 1-10-10-10-1 with different activations.

All linear layers are orthogonal (torch.nn.utils.parametrizations.orthogonal). All networks of an activation train at once, as
batched matrices. Run: python experiments/lipschitz_functions.py
"""

import argparse
import itertools
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

import pwlu

WIDTH = 10


def _sines(x: Tensor) -> Tensor:
    return torch.sin(3 * x) / 6 + torch.sin(9 * x) / 18  # the derivative is at most 1/2 + 1/2


def _sawtooth(x: Tensor) -> Tensor:
    return (torch.remainder(x, 0.5) - 0.25).abs()


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"absolute value": torch.abs, "sines": _sines, "sawtooth": _sawtooth}


class Linear(nn.Module):
    """One orthogonal linear layer per network: (networks, batch, ins) becomes (networks, batch, outs)."""

    def __init__(self, networks: int, ins: int, outs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(networks, outs, ins))
        self.bias = nn.Parameter((2 * torch.rand(networks, 1, outs) - 1) / ins**0.5)
        orthogonal(self)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer of every network to its batch."""
        return x @ self.weight.mT + self.bias


class GroupSort(nn.Module):
    """Sort pairs of channels."""

    def forward(self, x: Tensor) -> Tensor:
        """Sort."""
        return x.unflatten(-1, (-1, 2)).sort(-1).values.flatten(-2)


class PReLU(nn.Module):
    """One slope per channel, from -1 to 1."""

    def __init__(self, networks: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.full((networks, 1, WIDTH), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        """Clip the slope, and apply it left of 0."""
        return torch.where(x > 0, x, self.slope.clamp(-1, 1) * x)


class Absolute(nn.Module):
    """The absolute value."""

    def forward(self, x: Tensor) -> Tensor:
        """Return |x|."""
        return x.abs()


class PerNetwork(nn.Module):
    """One PWLU function per network and channel."""

    def __init__(self, networks: int, init: Callable[[Tensor], Tensor] | str) -> None:
        super().__init__()
        self.unit = pwlu.PWLU(networks * WIDTH, bounds=(-1.0, 1.0), init=init, channel_dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        """Put networks and channels side by side."""
        networks, batch, width = x.shape
        return self.unit(x.transpose(0, 1).reshape(batch, networks * width)).view(batch, networks, width).transpose(0, 1)


ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    "ReLU": lambda networks: nn.ReLU(),
    "absolute value": lambda networks: Absolute(),
    "PReLU": PReLU,
    "GroupSort": lambda networks: GroupSort(),
    "PWLU from the identity": lambda networks: PerNetwork(networks, "identity"),
    "PWLU from the absolute value": lambda networks: PerNetwork(networks, torch.abs),
}


def errors(activation: str, function: str, networks: int, steps: int, seed: int) -> Tensor:
    """Train networks that differ in their start and batches; return the mean squared error of each on a fine grid."""
    torch.manual_seed(seed)
    sizes = [1, WIDTH, WIDTH, WIDTH, 1]
    layers: list[nn.Module] = []
    for ins, outs in itertools.pairwise(sizes):
        layers += [Linear(networks, ins, outs), ACTIVATIONS[activation](networks)]
    model = nn.Sequential(*layers[:-1])
    if "PWLU" in activation:
        pwlu.constrain_(model, lipschitz=1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    target = FUNCTIONS[function]
    for _ in range(steps):
        x = 2 * torch.rand(networks, 100, 1) - 1
        optimizer.zero_grad()
        (model(x) - target(x)).square().mean((1, 2)).sum().backward()
        optimizer.step()
        schedule.step()
    grid = torch.linspace(-1, 1, 2001)[:, None].expand(networks, -1, -1)
    with torch.no_grad():
        y = model(grid)
        assert (y.diff(dim=1).abs() <= 1e-3 + 1e-5).all(), "a network is not 1-Lipschitz"
        return (y - target(grid)).square().mean((1, 2))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=25, help="networks per activation and function")
    parser.add_argument("--steps", type=int, default=1000, help="steps of Adam")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    print(f"| activation | {' | '.join(FUNCTIONS)} |\n|---|{'---:|' * len(FUNCTIONS)}", flush=True)
    for activation in ACTIVATIONS:
        cells = []
        for function in FUNCTIONS:
            found = 1e4 * errors(activation, function, options.networks, options.steps, options.seed)
            cells.append(f"{found.mean():.3g} ± {found.std():.2g} ({found.median():.2g})")
        print(f"| {activation} | {' | '.join(cells)} |", flush=True)
    print(
        f"1e-4 mean squared error ± standard deviation (median), torch {torch.__version__}, {time.perf_counter() - begun:.0f} s"
    )


if __name__ == "__main__":
    main()
