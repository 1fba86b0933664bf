"""Train a small network with PWLUs on handwritten digits in Lightning, on the CPU in half a minute.

A network with ReLU is converted, and one line in configure_optimizers adds the two phases of the paper: at first the PWLUs only
watch their inputs, then they are realigned and learn. The progress bar shows the phase. A run that was stopped goes on with
--resume and the checkpoint whose path it printed. The images are scikit-learn's: nothing is downloaded.
"""

import argparse
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pwlu


class Digits(L.LightningModule):
    """Two convolutions and a linear layer; the first `realign_after_epochs` epochs are Phase I."""

    def __init__(self, realign_after_epochs: int, lr: float = 0.01) -> None:
        super().__init__()
        self.realign_after_epochs = realign_after_epochs
        self.lr = lr
        self.network = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
        )
        print(pwlu.convert_(self.network, torch.randn(2, 1, 8, 8)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer, with the two phases attached to it."""
        optimizer = torch.optim.AdamW(pwlu.parameter_groups(self.network, lr=self.lr, weight_decay=0.01))
        steps = int(self.trainer.estimated_stepping_batches) // (self.trainer.max_epochs or 1)
        self.phases = pwlu.TwoPhase(self.network, optimizer, realign_at=self.realign_after_epochs * steps)
        return optimizer

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        loss = F.cross_entropy(self.network(images), labels)
        self.log_dict({"loss": loss, "phase": float(self.phases.phase)}, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Log the accuracy on a batch."""
        images, labels = batch
        right = (self.network(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, prog_bar=True, batch_size=len(labels))

    def on_fit_end(self) -> None:
        """So that this module can be fitted again."""
        print(f"{self.phases}; {len(self.phases.report)} PWLUs were realigned in this run")
        self.phases.remove()


def digits() -> tuple[DataLoader, DataLoader]:
    """1,797 scans of 8 x 8 pixels: half to train on, half to test."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    train, test = train_test_split(range(len(images)), test_size=0.5, random_state=0, stratify=data.target)
    sets = [TensorDataset(images[chosen], torch.tensor(data.target[chosen])) for chosen in (train, test)]
    return DataLoader(sets[0], batch_size=64, shuffle=True, drop_last=True), DataLoader(sets[1], batch_size=256)


def main() -> None:
    """Parse the command line, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images (default: %(default)s)")
    parser.add_argument(
        "--realign-after", type=int, default=5, help="epochs of Phase I (default: %(default)s, as in the paper)"
    )
    parser.add_argument("--precision", default="32-true", help="as Lightning takes it, e.g. bf16-mixed (default: %(default)s)")
    parser.add_argument("--resume", metavar="CHECKPOINT", help="go on from this file, in whichever phase it is")
    parser.add_argument("--folder", type=Path, default=Path("runs/lightning"), help="for checkpoints (default: %(default)s)")
    options = parser.parse_args()
    L.seed_everything(0, verbose=False)
    train, test = digits()
    checkpoint = ModelCheckpoint(options.folder, save_last=True)
    trainer = L.Trainer(max_epochs=options.epochs, precision=options.precision, logger=False, callbacks=[checkpoint])
    trainer.fit(Digits(options.realign_after), train, test, ckpt_path=options.resume)
    print(f"test accuracy {100 * trainer.callback_metrics['accuracy'].item():.2f} %")
    print(f"the last checkpoint is {checkpoint.last_model_path}")


if __name__ == "__main__":
    main()
