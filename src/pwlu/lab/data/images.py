"""Images that lie in memory, on the device where they are used, and are augmented there, a batch at a time."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pwlu.lab.data import keyed_random

Batch = tuple[Tensor, Tensor]


@dataclass
class Images:
    """A data set in memory: uint8 images (n, C, H, W) with their labels (n,), and how to normalise them.

    ``numbers``: what an image's random draws are made from, its place in the whole data set.
    """

    images: Tensor
    labels: Tensor
    numbers: Tensor
    mean: Tensor
    std: Tensor
    padding: int = 0
    flip: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> "Images":
        """A copy there."""
        tensors: dict[str, Any] = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)

    def part(self, indices: Tensor) -> "Images":
        """Those images alone."""
        indices = indices.to(self.images.device)
        return replace(self, images=self.images[indices], labels=self.labels[indices], numbers=self.numbers[indices])

    def batches(self, plan: Iterable[Tensor], keys: tuple[int, ...] | None = None) -> Iterator[Batch]:
        """For each tensor of indices the images, float32, and labels. `keys`, seed and epoch, augment; None does not."""
        parts = list(plan)
        sizes = [len(part) for part in parts]
        # all at once: a copy in every step would wait for the device, and draws are a hundred small launches
        together = torch.cat(parts).to(self.images.device)
        draw = torch.stack([keyed_random.uniform(*(keys or ()), self.numbers[together], k) for k in range(3)], 1)
        for indices, drawn in zip(together.split(sizes), draw.split(sizes), strict=True):
            images = self.images[indices] if keys is None else self._augmented(indices, drawn)
            yield self._normalised(images), self.labels[indices]

    def _normalised(self, images: Tensor) -> Tensor:
        return (images.float() - self.mean[:, None, None]) / self.std[:, None, None]

    def _augmented(self, indices: Tensor, drawn: Tensor) -> Tensor:
        """A random crop of the image with a black border around it, flipped or not: one look-up for the whole batch."""
        height, width = self.images.shape[-2:]
        down, right, flip = drawn.split(1, dim=1)
        rows = torch.arange(height, device=indices.device) + (down * (2 * self.padding + 1)).long() - self.padding
        columns = torch.arange(width, device=indices.device).expand(len(indices), -1)
        if self.flip:
            columns = torch.where(flip < 0.5, columns, width - 1 - columns)
        columns = columns + (right * (2 * self.padding + 1)).long() - self.padding
        inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
        rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
        crops = self.images[indices[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # (batch, height, width, C)
        return (crops * inside[..., None]).movedim(-1, 1)


def in_memory(
    images: Tensor, labels: Tensor, test_images: Tensor, test_labels: Tensor, device: torch.device, padding: int, flip: bool
) -> tuple[Images, Images]:
    """Training and test images, on the device; mean and standard deviation are those of the training pixels."""
    mean, std = _pixel_statistics(images)
    made = []
    for x, y in ((images, labels), (test_images, test_labels)):
        numbers = torch.arange(len(y))
        made.append(Images(x, y.long(), numbers, mean, std, padding, flip).to(device))
    return made[0], made[1]


def _pixel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every channel, exact, from how often each of the 256 values occurs."""
    values = torch.arange(256, dtype=torch.float64)
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)]).double()
    mean = (counts @ values) / counts.sum(1)
    variance = (counts * (values - mean[:, None]) ** 2).sum(1) / counts.sum(1)
    return mean.float(), variance.sqrt().float()
