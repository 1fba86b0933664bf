"""Train a small network with PWLUs on handwritten digits with Hugging Face Accelerate, on the CPU in half a minute.

The loop is as Accelerate wants it. pwlu.convert_ replaces the ReLUs of the network, pwlu.TwoPhase adds the two phases of the
paper: at first the PWLUs only watch their inputs, then they are realigned and learn. `accelerate launch` runs it on several
processes. The images are scikit-learn's: nothing is downloaded.
"""

import argparse

import torch
import torch.distributed.nn  # before there is a process group: default arguments in this module would keep the group alive
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed, tqdm
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pwlu


def network() -> nn.Sequential:
    """Two convolutions and a linear layer, with ReLU."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


def digits() -> tuple[DataLoader, DataLoader]:
    """1,797 scans of 8 x 8 pixels: half to train on, half to test."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    train, test = train_test_split(range(len(images)), test_size=0.5, random_state=0, stratify=data.target)
    sets = [TensorDataset(images[chosen], torch.tensor(data.target[chosen])) for chosen in (train, test)]
    return DataLoader(sets[0], batch_size=32, shuffle=True, drop_last=True), DataLoader(sets[1], batch_size=256)


def accuracy(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """In percent, over all processes."""
    model.eval()
    right = []
    with torch.no_grad():
        for images, labels in loader:
            right.append(accelerator.gather_for_metrics(model(images).argmax(1) == labels))
    return 100 * torch.cat(right).float().mean().item()


def main() -> None:
    """Parse the command line, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images (default: %(default)s)")
    parser.add_argument(
        "--realign-after", type=int, default=5, help="epochs of Phase I (default: %(default)s, as in the paper)"
    )
    parser.add_argument("--accumulate", type=int, default=2, help="batches of 32 for each step (default: %(default)s)")
    parser.add_argument("--precision", default="no", choices=["no", "bf16"], help="mixed precision (default: %(default)s)")
    options = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate, mixed_precision=options.precision)
    model = network()
    accelerator.print(pwlu.convert_(model, torch.randn(2, 1, 8, 8)))
    optimizer = torch.optim.AdamW(pwlu.parameter_groups(model, lr=0.01, weight_decay=0.01))
    model, optimizer, train, test = accelerator.prepare(model, optimizer, *digits())
    steps = -(-len(train) // options.accumulate)  # a step counts once, however many batches it takes
    phases = pwlu.TwoPhase(model, optimizer, realign_at=options.realign_after * steps)
    for epoch in range(1, options.epochs + 1):
        model.train()
        for images, labels in tqdm(train, desc=f"epoch {epoch}, phase {phases.phase}", leave=False):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        if epoch % 5 == 0 or epoch == options.epochs:
            accelerator.print(f"epoch {epoch}, phase {phases.phase}: test accuracy {accuracy(accelerator, model, test):.2f} %")
    accelerator.print(phases)
    # Free what holds the process group, then leave the group: that ends the threads of the gloo backend. A thread that still
    # runs when Python exits may abort the process.
    model, optimizer, train, test, phases = accelerator.free_memory(model, optimizer, train, test, phases)
    accelerator.end_training()


if __name__ == "__main__":
    main()
