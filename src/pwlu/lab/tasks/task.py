"""What the loop needs to know of what is trained, and what tasks have in common."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pwlu.conversion.conversion_report import Report
from pwlu.lab.recipes.catalog import find, total_steps
from pwlu.lab.recipes.settings import Settings, UserError
from pwlu.lab.runs.network_info import NetworkInfo
from pwlu.lab.runs.processes import Processes


class Task(Protocol):
    """Data, a network for it, a loss, a measurement.

    ``metric``: what a table compares, in percent; more is better. ``total_steps`` need not be a whole number of epochs.
    """

    metric: str
    measured_on: str
    measured_images: int
    steps_per_epoch: int
    total_steps: int
    dtype: torch.dtype
    layout: torch.memory_format

    @property
    def reported(self) -> Sequence[str]:
        """What result.json has beside the metric, of what :meth:`measure` says."""

    @property
    def notes(self) -> Sequence[str]:
        """What is to be known of the data."""

    def network(self) -> nn.Module:
        """The architecture with new weights, and with its own activations."""

    def sample(self) -> Any:
        """What the network is called with, for :func:`pwlu.convert_`."""

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[list[Any]]:
        """The steps of an epoch from `first_step` on: this process's parts of each batch."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """The mean loss of a part of a batch, and sums that an epoch adds up."""

    def summary(self, sums: Tensor) -> dict[str, float]:
        """What an epoch's sums say, the loss under the name "loss"."""

    def measure(self, model: nn.Module, autocast: AbstractContextManager[Any]) -> dict[str, float]:
        """The metric and more, over all processes, each image once."""

    def files(self, model: nn.Module, autocast: AbstractContextManager[Any]) -> dict[str, bytes]:
        """What the run folder gets at the end, by name. All processes are asked, the first is answered."""

    def network_info(self, report: Report) -> NetworkInfo:
        """Return what the run folder says about the network, given the report of its conversion."""

    def some_images(self) -> Iterator[Any]:
        """What the network is called with to see the inputs of its activations."""


class ImageTask(ABC):
    """Of a :class:`Task`, what is the same for every data set of images: types, and which images come in which step."""

    def __init__(self, settings: Settings, processes: Processes) -> None:
        self.settings, self.processes, self.recipe = settings, processes, find(settings.recipe)
        self.dtype = torch.float64 if settings.precision == "float64" else torch.float32
        self.layout = torch.channels_last if settings.channels_last else torch.contiguous_format

    def cut(self, images: int) -> None:
        """Cut a training set of so many images into steps, and those into what one process takes in one forward pass."""
        self.share = _share(self.settings, self.processes.count, images)
        self.steps_per_epoch = images // self.settings.batch
        self.total_steps = total_steps(self.settings, self.steps_per_epoch)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[list[Any]]:
        """The steps of an epoch from `first_step` on: this process's parts of each batch.

        The order depends on seed and epoch alone, and the last images that do not fill a batch wait for another epoch.
        """
        last_step = min(self.steps_per_epoch, self.total_steps - epoch * self.steps_per_epoch)
        parts = self.settings.accumulate, self.processes.count, self.share
        mine = self.order(epoch)[first_step:last_step].unflatten(1, parts)[:, :, self.processes.rank]
        batches = self.read(list(mine.flatten(0, 1)), (self.settings.seed, epoch, 2))
        for _ in range(len(mine)):
            yield [next(batches) for _ in range(self.settings.accumulate)]

    @abstractmethod
    def order(self, epoch: int) -> Tensor:
        """Numbers of training images, (steps, batch)."""

    @abstractmethod
    def read(self, parts: list[Tensor], keys: tuple[int, ...]) -> Iterator[Any]:
        """For each part, numbers of training images, what :meth:`Task.loss` takes; augmented by draws from the keys."""


def _share(settings: Settings, processes: int, images: int) -> int:
    """Images in one forward pass of one process, or an error if the batch cannot be shared so.

    Args:
        images: in the training set.
    """
    parts = processes * settings.accumulate
    if settings.batch % parts:
        raise UserError(
            f"a batch of {settings.batch} cannot be shared by {processes} processes in {settings.accumulate} parts each. Write "
            f"--batch {max(1, round(settings.batch / parts)) * parts}"
        )
    if settings.batch > images:
        raise UserError(f"a batch of {settings.batch} is more than all {images} training images: write a smaller --batch")
    return settings.batch // parts
