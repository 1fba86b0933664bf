"""The interface between the training loop and a task, and the code that tasks share."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from pwlu.lab.models import unconverted
from pwlu.lab.recipes.catalog import find, total_steps
from pwlu.lab.recipes.settings import Settings, UserError
from pwlu.lab.runs.network_info import NetworkInfo
from pwlu.lab.runs.processes import Processes


class Task(ABC):
    """A data set of images, a network for it, a loss, and a measurement.

    Attributes:
        metric: the main metric, in percent; larger is better.
        reported: the names of further values of :meth:`measure` for result.json.
        notes: lines that describe the data.
        classes: the names of the classes.
        channels: the number of channels of the images.
        measured_on: the kind of images that measurements use, such as "test images".
        measured_images: the number of these images.
        steps_per_epoch: the number of optimizer steps per epoch.
        total_steps: the number of optimizer steps of the run. It need not be a multiple of ``steps_per_epoch``.
        dtype: the type of parameters and images.
        layout: the memory format of images.
    """

    metric: str
    reported: Sequence[str]
    notes: Sequence[str] = ()
    classes: Sequence[str]
    channels: int = 3
    measured_on: str
    measured_images: int

    def __init__(self, settings: Settings, processes: Processes) -> None:
        self.settings, self.processes, self.recipe = settings, processes, find(settings.recipe)
        self.dtype = torch.float64 if settings.precision == "float64" else torch.float32
        self.layout = torch.channels_last if settings.channels_last else torch.contiguous_format

    def plan_steps(self, images: int) -> None:
        """Set the size of micro-batches and the number of steps for a training set of this many images."""
        batch, processes, accumulate = self.settings.batch, self.processes.count, self.settings.accumulate
        parts = processes * accumulate
        if batch % parts:
            raise UserError(
                f"--batch {batch} must be divisible by processes x --accumulate, {processes} x {accumulate}. "
                f"Write --batch {max(1, round(batch / parts)) * parts}"
            )
        if batch > images:
            raise UserError(f"--batch {batch} must be at most the number of training images, {images}")
        self.micro_batch, self.steps_per_epoch = batch // parts, images // batch
        self.total_steps = total_steps(self.settings, self.steps_per_epoch)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[list[Any]]:
        """Yield this process's micro-batches for each step of an epoch, from `first_step` on.

        The order depends only on seed and epoch. The last images of an epoch are dropped if they do not fill a batch.
        """
        last_step = min(self.steps_per_epoch, self.total_steps - epoch * self.steps_per_epoch)
        parts = self.settings.accumulate, self.processes.count, self.micro_batch
        mine = self.order(epoch)[first_step:last_step].unflatten(1, parts)[:, :, self.processes.rank]
        batches = self.read(list(mine.flatten(0, 1)), (self.settings.seed, epoch, 2))
        for _ in range(len(mine)):
            yield [next(batches) for _ in range(self.settings.accumulate)]

    def network(self) -> nn.Module:
        """Return the network with new weights and its original activations."""
        return unconverted.network(self.settings, len(self.classes), self.channels)

    def sample(self) -> Any:
        """Return a sample input of the network, for :func:`pwlu.convert_`."""
        return unconverted.sample(self.settings, self.channels)

    @abstractmethod
    def order(self, epoch: int) -> Tensor:
        """Return the indices of the training images of an epoch, (steps, batch)."""

    @abstractmethod
    def read(self, parts: list[Tensor], keys: tuple[int, ...]) -> Iterator[Any]:
        """Yield the input of :meth:`loss` for each tensor of image indices, augmented by the random keys."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the mean loss of a micro-batch, and sums to accumulate over the epoch."""

    @abstractmethod
    def summary(self, sums: Tensor) -> dict[str, float]:
        """Return the metrics of an epoch from its accumulated sums; the loss is named "loss"."""

    @abstractmethod
    def measure(self, model: nn.Module, autocast: AbstractContextManager[Any]) -> dict[str, float]:
        """Return the metric and further values, over all processes, each image counted once."""

    def files(self, model: nn.Module, autocast: AbstractContextManager[Any]) -> dict[str, bytes]:
        """Return further files for the finished run folder, by name. All ranks must call this; rank 0 writes the files."""
        return {}

    @abstractmethod
    def network_info(self, sites: dict[str, str]) -> NetworkInfo:
        """Return what the run folder says about the network and these activation sites."""

    @abstractmethod
    def alignment_inputs(self) -> Iterator[Any]:
        """Yield inputs of the network on which to measure the alignment of PWLUs."""
