"""Fine-tune a pretrained timm network with PWLUs, on handwritten digits or on your own images.

pwlu.convert_ replaces the activations. Every PWLU starts as the activation it replaces, so the pretrained network
keeps working. pwlu.TwoPhase adds the two phases of the paper. The same network is fine-tuned with its own activations
for just as long, because more training helps without PWLUs too.

The weights come from timm's model hub. Without a network connection, use --no-pretrained. --data reads
DIR/train/CLASS/* and DIR/val/CLASS/*; without it, the images are scikit-learn's digits, enlarged. --tiny takes
seconds on a CPU.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import pwlu


def network(name: str, classes: int, pretrained: bool) -> nn.Module:
    """Return the network with a new classifier; exit with advice where the weights cannot be had."""
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=classes)
    except (OSError, RuntimeError) as error:
        if not pretrained:
            raise
        sys.exit(
            f"The pretrained weights of {name} could not be loaded: {type(error).__name__}: {error}\n"
            "Connect to the network once, so that they are cached, or use --no-pretrained to start from random weights."
        )


def digits(pixels: int, count: int | None) -> tuple[Dataset, Dataset, int]:
    """Return scikit-learn's scans of 8 x 8 pixels, enlarged and in three channels: half to train on, half to test."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))[:count]
    images = torch.tensor(data.images, dtype=torch.float32)[order].unsqueeze(1) / 8 - 1
    images = F.interpolate(images, size=(pixels, pixels), mode="bilinear").expand(-1, 3, -1, -1)
    labels, half = torch.tensor(data.target)[order], len(order) // 2
    return TensorDataset(images[:half], labels[:half]), TensorDataset(images[half:], labels[half:]), 10


def folders(root: Path, model_name: str, count: int | None) -> tuple[Dataset, Dataset, int]:
    """Return the images under train/ and val/, prepared as the pretrained network expects them."""
    config = timm.data.resolve_data_config({}, model=timm.create_model(model_name))
    train = timm.data.create_dataset(
        "", str(root), split="train", transform=timm.data.create_transform(**config, is_training=True)
    )
    test = timm.data.create_dataset("", str(root), split="val", transform=timm.data.create_transform(**config))
    classes = len(train.reader.class_to_idx)
    chosen = [Subset(part, range(min(len(part), count or len(part)))) for part in (train, test)]
    return chosen[0], chosen[1], classes


def batches(loader: DataLoader, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches on the device."""
    for images, labels in loader:
        yield images.to(device), labels.to(device)


def fine_tune(model: nn.Module, train: DataLoader, test: DataLoader, epochs: int, lr: float, device: str) -> float:
    """Train, with two phases if there are PWLUs; return the test accuracy in percent."""
    converted = any(isinstance(module, pwlu.PWLU) for module in model.modules())
    parameters: Any = pwlu.parameter_groups(model, lr=lr, weight_decay=1e-4) if converted else model.parameters()
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(train))
    phases = pwlu.TwoPhase(model, optimizer, realign_at=max(1, epochs // 4) * len(train)) if converted else None
    for _ in range(epochs):
        model.train()
        for images, labels in batches(train, device):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            scheduler.step()
    if phases is not None:
        phases.remove()
    model.eval()
    with torch.no_grad():
        right = [(model(images).argmax(1) == labels).float() for images, labels in batches(test, device)]
    return 100 * torch.cat(right).mean().item()


def main() -> None:
    """Parse the command line, fine-tune twice, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18", help="a name that timm knows (default: %(default)s)")
    parser.add_argument("--no-pretrained", action="store_true", help="start from random weights; nothing is downloaded")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="images in DIR/train/CLASS and DIR/val/CLASS (default: digits)"
    )
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training images (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a smaller network, 400 images of 32 pixels: seconds on a CPU")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = "resnet10t" if options.tiny and options.model == "resnet18" else options.model
    count = 400 if options.tiny else None
    if options.data:
        train_set, test_set, classes = folders(options.data, name, count)
    else:
        train_set, test_set, classes = digits(32 if options.tiny else 64, count)
    for kind in ("its own activations", "PWLUs"):
        torch.manual_seed(0)
        model = network(name, classes, not options.no_pretrained).to(device)
        train = DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True)
        test = DataLoader(test_set, batch_size=128)
        if kind == "PWLUs":
            report = pwlu.convert_(model, next(batches(train, device))[0][:2])
            print(f"{len(report.converted)} activations became PWLUs, {report.parameters:,} parameters were added")
        reached = fine_tune(model, train, test, options.epochs, options.lr, device)
        print(f"{name} with {kind}: test accuracy {reached:.2f} %", flush=True)


if __name__ == "__main__":
    main()
