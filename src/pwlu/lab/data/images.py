"""Images in the memory of the device, augmented there, one batch at a time."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pwlu.lab.data import keyed_random

Batch = tuple[Tensor, Tensor]


@dataclass
class Images:
    """A data set in memory.

    Attributes:
        images: uint8 (n, C, H, W).
        labels: int64 (n,).
        numbers: the index of each image in the complete data set, from which its random numbers derive, (n,).
        mean: mean of the pixels per channel, (C,).
        std: standard deviation of the pixels per channel, (C,).
        padding: the largest shift of random crops, in pixels.
        flip: whether to flip images at random.
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

    def part(self, indices: Tensor) -> "Images":
        """Return these images only."""
        indices = indices.to(self.images.device)
        return replace(self, images=self.images[indices], labels=self.labels[indices], numbers=self.numbers[indices])

    def batches(self, plan: Iterable[Tensor], keys: tuple[int, ...] | None = None) -> Iterator[Batch]:
        """Yield the images, float32, and their labels for each tensor of indices.

        `keys`: the random keys of the augmentation, such as seed and epoch. None: no augmentation.
        """
        parts = list(plan)
        sizes = [len(part) for part in parts]
        # Compute these for all batches at once: per step, they would synchronize and launch a hundred small kernels.
        together = torch.cat(parts).to(self.images.device)
        uniform = torch.stack([keyed_random.uniform(*(keys or ()), self.numbers[together], k) for k in range(3)], 1)
        for indices, drawn in zip(together.split(sizes), uniform.split(sizes), strict=True):
            images = self.images[indices] if keys is None else self._augment(indices, drawn)
            yield self._normalise(images), self.labels[indices]

    def _normalise(self, images: Tensor) -> Tensor:
        return (images.float() - self.mean[:, None, None]) / self.std[:, None, None]

    def _augment(self, indices: Tensor, uniform: Tensor) -> Tensor:
        """Return random crops of the images with a black border, flipped at random, in one indexing operation."""
        height, width = self.images.shape[-2:]
        down, right, flip = uniform.split(1, dim=1)
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
    """Return training and test images on the device, normalized by mean and standard deviation of the training pixels."""
    mean, std = (values.to(device) for values in _pixel_statistics(images))
    train, test = (
        Images(x.to(device), y.long().to(device), torch.arange(len(y), device=device), mean, std, padding, flip)
        for x, y in ((images, labels), (test_images, test_labels))
    )
    return train, test


def _pixel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return exact mean and standard deviation per channel, from histograms of the 256 values."""
    values = torch.arange(256, dtype=torch.float64)
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)]).double()
    mean = (counts @ values) / counts.sum(1)
    variance = (counts * (values - mean[:, None]) ** 2).sum(1) / counts.sum(1)
    return mean.float(), variance.sqrt().float()
