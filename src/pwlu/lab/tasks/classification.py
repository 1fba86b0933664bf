"""Image classification, as the loop sees a task: batches, a loss, a measurement."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pwlu.conversion.conversion_report import Report
from pwlu.lab.data import keyed_random
from pwlu.lab.data.datasets import load
from pwlu.lab.data.images import Batch
from pwlu.lab.models import networks
from pwlu.lab.recipes.settings import Settings, UserError
from pwlu.lab.runs.network_info import NetworkInfo
from pwlu.lab.runs.processes import Processes
from pwlu.lab.tasks.task import ImageTask

ALIGNMENT_IMAGES = 2048
IMAGES = {  # what the pixels of an input show, by kind of data set
    "folder": "RGB images, their shorter side scaled to {shorter}, the {pixels} x {pixels} in the middle",
    "cifar100": "RGB images of 32 x 32",
    "digits": "grey images of 8 x 8, scikit-learn's numbers times 15/255",
}


class Classification(ImageTask):
    """A data set of images with labels. ``metric``: what a table compares, in percent; more is better."""

    metric = "accuracy"
    reported = ("test_loss",)
    notes: tuple[str, ...] = ()

    def __init__(self, settings: Settings, processes: Processes) -> None:
        super().__init__(settings, processes)
        self.data = load(settings, processes.device)
        self.cut(len(self.data.train))
        if self.share < 2 and settings.norm == "batch":
            parts = processes.count * settings.accumulate
            raise UserError(
                f"a batch of {settings.batch} leaves 1 image for each of {parts} parts, too few for batch norm: write --batch "
                f"{2 * parts} or more, or --norm group"
            )
        self.measured_on, self.measured_images = self.data.measured_on, len(self.data.test)

    def network(self) -> nn.Module:
        """The architecture with new weights, and with its own activations."""
        return networks.of_recipe(self.settings, len(self.data.classes), self.data.channels)

    def sample(self) -> Tensor:
        """What the network is called with, for :func:`pwlu.convert_`."""
        return networks.sample(self.settings, self.data.channels)

    def order(self, epoch: int) -> Tensor:
        """Numbers of training images, (steps, batch)."""
        order = torch.randperm(len(self.data.train), generator=keyed_random.generator(self.settings.seed, epoch, 1))
        return order[: self.steps_per_epoch * self.settings.batch].view(self.steps_per_epoch, -1)

    def read(self, parts: list[Tensor], keys: tuple[int, ...]) -> Iterator[Batch]:
        """Their images, in the type and layout of the network, and labels."""
        for batch in self.data.train.batches(parts, keys):
            yield self._prepared(*batch)

    def _prepared(self, images: Tensor, labels: Tensor) -> Batch:
        return images.to(self.dtype).contiguous(memory_format=self.layout), labels

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean loss, and the sums that an epoch adds up: loss, right answers, images."""
        images, labels = batch
        outputs = model(images)
        loss = F.cross_entropy(outputs, labels, label_smoothing=self.settings.label_smoothing)
        right = (outputs.detach().argmax(1) == labels).sum()
        return loss, torch.stack([loss.detach().double() * len(labels), right.double(), right.new_tensor(len(labels)).double()])

    def summary(self, sums: Tensor) -> dict[str, float]:
        """Training loss and accuracy of an epoch."""
        loss, right, count = sums.tolist()
        return {"loss": loss / max(count, 1), "train_accuracy": 100 * right / max(count, 1)}

    def test_batches(self) -> Iterator[Batch]:
        """This process's share of the images to measure on, each once."""
        indices = torch.arange(len(self.data.test))[self.processes.rank :: self.processes.count]
        if not len(indices):  # fewer images than processes
            return
        for batch in self.data.test.batches(indices.split(max(self.share, 256))):
            yield self._prepared(*batch)

    @torch.no_grad()
    def measure(self, model: nn.Module, autocast: AbstractContextManager[Any]) -> dict[str, float]:
        """Loss and accuracy on the images to measure on, over all processes."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.processes.device)
        model.eval()
        for images, labels in self.test_batches():
            with autocast:
                outputs = model(images)
            losses = F.cross_entropy(outputs.double(), labels, reduction="sum")
            right = (outputs.argmax(1) == labels).sum()
            sums += torch.stack([losses, right.double(), right.new_tensor(len(labels)).double()])
        model.train()
        loss, right_answers, count = self.processes.all_reduce(sums).tolist()
        return {"test_loss": loss / count, "accuracy": 100 * right_answers / count}

    def files(self, model: nn.Module, autocast: AbstractContextManager[Any]) -> dict[str, bytes]:
        """None but those of every run."""
        return {}

    def network_info(self, report: Report) -> NetworkInfo:
        """Return what the run folder says about the network, given the report of its conversion."""
        pixels, data = self.settings.pixels, self.data
        mean, std = ((values.flatten() / 255).tolist() for values in (data.train.mean, data.train.std))
        sites = {site.name: site.was for site in report.converted}
        image = IMAGES[self.recipe.data].format(pixels=pixels, shorter=round(pixels * 8 / 7))
        return NetworkInfo((data.channels, pixels, pixels), image, tuple(mean), tuple(std), tuple(data.classes), sites)

    def some_images(self) -> Iterator[Tensor]:
        """To see the inputs of activations."""
        seen = 0
        for images, _ in self.test_batches():
            if seen >= ALIGNMENT_IMAGES:
                return
            seen += len(images)
            yield images
