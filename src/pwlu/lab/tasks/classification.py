"""The task of image classification: batches, a loss, a measurement."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pwlu.lab.data import keyed_random
from pwlu.lab.data.datasets import load
from pwlu.lab.data.images import Batch
from pwlu.lab.recipes.settings import Settings, UserError
from pwlu.lab.runs.network_info import NetworkInfo
from pwlu.lab.runs.processes import Processes
from pwlu.lab.tasks.task import Task

ALIGNMENT_IMAGES = 2048
MEASURED_IMAGES, MEASURED_PIXELS = 256, 2**21  # at least so many are measured at a time: of small images many, for speed
IMAGES = {  # descriptions of an input, by kind of data set
    "folder": "RGB images, their shorter side scaled to {shorter}, the {pixels} x {pixels} in the middle",
    "cifar100": "RGB images of 32 x 32",
    "tinyimagenet": "RGB images of 64 x 64",
    "digits": "grey images of 8 x 8, scikit-learn's numbers times 15/255",
}


class Classification(Task):
    """Classification of images, measured by accuracy in percent."""

    metric = "accuracy"
    reported = ("test_loss",)

    def __init__(self, settings: Settings, processes: Processes) -> None:
        super().__init__(settings, processes)
        self.data = load(settings, processes.device)
        self.plan_steps(len(self.data.train))
        if self.micro_batch < 2 and settings.norm == "batch":
            parts = processes.count * settings.accumulate
            raise UserError(
                f"--batch {settings.batch} gives each of {parts} micro-batches 1 image, but batch norm needs at least 2: write "
                f"--batch {2 * parts} or more, or --norm group"
            )
        self.classes, self.channels = self.data.classes, self.data.channels
        self.measured_on, self.measured_images = self.data.measured_on, len(self.data.test)

    def order(self, epoch: int) -> Tensor:
        """Return the indices of the training images of an epoch, (steps, batch)."""
        order = torch.randperm(len(self.data.train), generator=keyed_random.generator(self.settings.seed, epoch, 1))
        return order[: self.steps_per_epoch * self.settings.batch].view(self.steps_per_epoch, -1)

    def read(self, parts: list[Tensor], keys: tuple[int, ...]) -> Iterator[Batch]:
        """Yield images, in the type and layout of the network, and labels, for each tensor of indices."""
        for batch in self.data.train.batches(parts, keys):
            yield self._prepare(*batch)

    def _prepare(self, images: Tensor, labels: Tensor) -> Batch:
        return images.to(self.dtype).contiguous(memory_format=self.layout), labels

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the mean loss, and sums to accumulate over the epoch: loss, correct answers, images."""
        images, labels = batch
        outputs = model(images)
        loss = F.cross_entropy(outputs, labels, label_smoothing=self.settings.label_smoothing)
        correct = (outputs.detach().argmax(1) == labels).sum()
        # Not correct.new_tensor(...): a CUDA graph cannot copy from the CPU.
        count = torch.full_like(correct, len(labels), dtype=torch.float64)
        return loss, torch.stack([loss.detach().double() * len(labels), correct.double(), count])

    def summary(self, sums: Tensor) -> dict[str, float]:
        """Return the training loss and accuracy of an epoch."""
        loss, correct, count = sums.tolist()
        return {"loss": loss / max(count, 1), "train_accuracy": 100 * correct / max(count, 1)}

    def test_batches(self) -> Iterator[Batch]:
        """Yield this process's share of the images to measure on, each once."""
        indices = torch.arange(len(self.data.test))[self.processes.rank :: self.processes.count]
        if not len(indices):  # fewer images than processes
            return
        size = max(self.micro_batch, MEASURED_IMAGES, MEASURED_PIXELS // self.settings.pixels**2)
        for batch in self.data.test.batches(indices.split(size)):
            yield self._prepare(*batch)

    @torch.no_grad()
    def measure(self, model: nn.Module, autocast: AbstractContextManager[Any]) -> dict[str, float]:
        """Return loss and accuracy on the images to measure on, over all processes."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.processes.device)
        model.eval()
        for images, labels in self.test_batches():
            with autocast:
                outputs = model(images)
            losses = F.cross_entropy(outputs.double(), labels, reduction="sum")
            correct = (outputs.argmax(1) == labels).sum()
            sums += torch.stack([losses, correct.double(), correct.new_tensor(len(labels)).double()])
        model.train()
        loss, total_correct, count = self.processes.all_reduce(sums).tolist()
        return {"test_loss": loss / count, "accuracy": 100 * total_correct / count}

    def network_info(self, sites: dict[str, str]) -> NetworkInfo:
        """Return what the run folder says about the network and these activation sites."""
        pixels, data = self.settings.pixels, self.data
        mean, std = ((values.flatten() / 255).tolist() for values in (data.train.mean, data.train.std))
        image = IMAGES[self.recipe.data].format(pixels=pixels, shorter=round(pixels * 8 / 7))
        return NetworkInfo((self.channels, pixels, pixels), image, tuple(mean), tuple(std), tuple(self.classes), sites)

    def alignment_inputs(self) -> Iterator[Tensor]:
        """Yield inputs of the network on which to measure the alignment of PWLUs."""
        seen = 0
        for images, _ in self.test_batches():
            if seen >= ALIGNMENT_IMAGES:
                return
            seen += len(images)
            yield images
