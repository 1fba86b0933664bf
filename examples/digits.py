"""Train a small convolutional network on handwritten digits, once with ReLU and once with PWLU, on the CPU in a minute.

The PWLUs come from pwlu.convert_, and learn in the two phases of the paper: pwlu.TwoPhase.

Prints the test accuracy of both and draws the functions that the PWLUs have learned.
The images are scikit-learn's: 1,797 real 8 x 8 scans, inside the package, so nothing is downloaded.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

import pwlu

WIDTHS = (8, 16, 16)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9")  # told apart by colour-blind people too


def network() -> nn.Sequential:
    """Three convolutions, each with batch norm and ReLU, and a linear layer."""
    layers: list[nn.Module] = []
    before = 1
    for width in WIDTHS:
        convolution = nn.Conv2d(before, width, 3, padding=1, stride=1 if before == 1 else 2, bias=False)
        layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels; the split is always the same, half and half."""
    data = load_digits()
    split = train_test_split(data.images, data.target, test_size=0.5, random_state=0, stratify=data.target)
    train_x, test_x, train_y, test_y = split
    images = [torch.tensor(x, dtype=torch.float32).unsqueeze(1) / 8 - 1 for x in (train_x, test_x)]
    return images[0], torch.tensor(train_y), images[1], torch.tensor(test_y)


def train(model: nn.Module, data: tuple[Tensor, ...], epochs: int, seed: int, label: str) -> float:
    """Adam on a one-cycle schedule, PWLUs in two phases; returns the test accuracy in percent."""
    train_x, train_y, test_x, test_y = data
    batch = 64
    shuffle = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    steps = epochs * (len(train_x) // batch)
    if label == "PWLU":
        pwlu.TwoPhase(model, optimizer, realign_at=max(1, steps // 8))  # after 5 of 40 epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps)
    with tqdm(total=steps, desc=f"{label}, seed {seed}", unit="step", leave=False) as bar:
        for _ in range(epochs):
            model.train()
            for chosen in torch.randperm(len(train_x), generator=shuffle).split(batch):
                if len(chosen) < batch:
                    continue
                optimizer.zero_grad()
                loss = F.cross_entropy(model(train_x[chosen]), train_y[chosen])
                loss.backward()
                optimizer.step()
                schedule.step()
                bar.update()
            bar.set_postfix(loss=f"{loss.item():.3f}")
    model.eval()
    with torch.no_grad():
        return 100 * (model(test_x).argmax(1) == test_y).float().mean().item()


def draw(model: nn.Sequential, path: Path) -> None:
    """Five functions of every PWLU between its bounds, which dots mark, beside the ReLU they started as."""
    units = [module for module in model if isinstance(module, pwlu.PWLU)]
    figure, axes = plt.subplots(1, len(units), figsize=(3.2 * len(units), 2.8), layout="constrained")
    x = torch.linspace(-4.5, 4.5, 400)
    for number, (axis, unit) in enumerate(zip(axes, units, strict=True), start=1):
        with torch.no_grad():
            curves = unit(x[:, None].expand(-1, unit.channels)).T
            ends = torch.stack([unit.left, unit.right])
            heights = unit.heights[:, [0, -1]].T
        axis.plot(x, x.relu(), color="0.75", linewidth=3, label="start: ReLU")
        for channel, colour in enumerate(COLOURS):
            axis.plot(x, curves[channel], color=colour, linewidth=1.5)
            axis.plot(ends[:, channel], heights[:, channel], "o", color=colour, markersize=4)
        axis.set(title=f"PWLU {number}, {unit.channels} channels", xlabel="input", ylim=(-2.5, 4.5))
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("output")
    axes[0].legend(frameon=False, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Parse the command line, train, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40, help="passes over the training images (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each activation (default: %(default)s)")
    parser.add_argument("--picture", type=Path, default=Path("runs/digits.png"), help="where to draw (default: %(default)s)")
    options = parser.parse_args()
    data = digits()
    print(f"{len(data[0])} training and {len(data[2])} test images, {options.epochs} epochs, {options.seeds} seeds")
    for name in ("ReLU", "PWLU"):
        accuracies = []
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            model = network()
            if name == "PWLU":
                pwlu.convert_(model, data[0][:2])
            accuracies.append(train(model, data, options.epochs, seed, name))
        each = torch.tensor(accuracies)
        spread = each.std().item() if len(each) > 1 else 0.0
        weights = sum(p.numel() for p in model.parameters())
        print(f"{name}: test accuracy {each.mean():.2f} % +- {spread:.2f} (n = {len(each)}), {weights} parameters")
    draw(model, options.picture)
    print(f"the learned functions are drawn in {options.picture}")


if __name__ == "__main__":
    main()
