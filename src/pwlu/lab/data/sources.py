"""Images for classification: in folders, or decoded in memory. :mod:`pwlu.lab.data.shards` reads them from tar files."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets import ImageFolder

from pwlu.common.text import abbreviate
from pwlu.lab.data.image_file import UnreadableImage, read_image
from pwlu.lab.recipes.settings import UserError
from pwlu.lab.runs.processes import launched_rank
from pwlu.lab.runs.progress import Progress

IN_MEMORY = 2**31  # bytes; larger data sets are read from files in every epoch
_SAMPLE = 64  # images from which the size of a data set is estimated
_SHARED = Path("/dev/shm")  # where Linux keeps the memory that processes share


class Source(ABC):
    """Numbered images with labels."""

    classes: list[str]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, number: int) -> tuple[Image.Image, int]:
        """Return an image in mode RGB, and its label."""


class Stored(Source):
    """Images in files."""

    @abstractmethod
    def image(self, number: int) -> tuple[str | BinaryIO, int]:
        """Return the file of an image, and its label."""

    @abstractmethod
    def name(self, number: int) -> str:
        """Return the name of an image for messages."""

    def read(self, number: int) -> tuple[Image.Image, int]:
        """Return an image in mode RGB, and its label."""
        file, label = self.image(number)
        try:
            return read_image(file), label
        except UnreadableImage as error:
            raise UserError(
                f"the image {self.name(number)} cannot be read: {error}. Replace it in all copies of the data set, then run "
                "the command again"
            ) from None


class Files(Stored):
    """Images in files, as pairs of a path and a label."""

    def __init__(self, samples: list[tuple[str, int]], classes: list[str]) -> None:
        self.samples, self.classes = samples, classes

    def __len__(self) -> int:
        return len(self.samples)

    def image(self, number: int) -> tuple[str, int]:
        """Return the path of an image, and its label."""
        return self.samples[number]

    def name(self, number: int) -> str:
        """Return the path of an image."""
        return self.samples[number][0]


class Folder(Files):
    """The images of a folder with one folder per class."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            parent = root.parent
            raise UserError(
                f"no images at {root}. Expected {parent}/train/CLASS/*.jpg and {parent}/val/CLASS/*.jpg, as torchvision's "
                "ImageFolder reads them. Write --data DIR with the right folder, or --data 'NAME-{000..146}.tar'"
            )
        try:
            found = ImageFolder(str(root))
        except FileNotFoundError as error:
            raise UserError(f"{root} must have one folder of images per class: {error}") from None
        super().__init__(found.samples, found.classes)


def read_all(source: Source) -> Iterator[tuple[Tensor, int]]:
    """Yield all images, uint8 (height, width, 3), with their labels. Threads read them, and a bar shows the progress."""
    progress = Progress("reading images", len(source), silent=launched_rank() != 0, unit="image")
    with ThreadPoolExecutor(8) as pool, closing(progress):  # Pillow decodes without Python's lock
        for image, label in pool.map(source.read, range(len(source))):
            yield torch.from_numpy(np.array(image)), label
            progress.step()


class PackedImages:
    """Images of different sizes in one uint8 tensor, whose memory worker processes share."""

    def __init__(self, images: Sequence[Tensor]) -> None:
        self.shapes = torch.tensor([image.shape for image in images])
        self.ends = self.shapes.prod(1).cumsum(0)
        self.pixels = torch.cat([image.flatten() for image in images])

    def __getitem__(self, number: int) -> Tensor:
        shape = self.shapes[number].tolist()
        end = int(self.ends[number])
        return self.pixels[end - shape[0] * shape[1] * shape[2] : end].view(shape)


class Decoded(Source):
    """The images of another source, decoded and in memory."""

    def __init__(self, source: Source) -> None:
        self.classes = source.classes
        images, self.labels = zip(*read_all(source), strict=True)
        self.images = PackedImages(images)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, number: int) -> tuple[Image.Image, int]:
        """Return an image, and its label."""
        return Image.fromarray(self.images[number].numpy()), self.labels[number]


def decoded_if_small(source: Source) -> Source:
    """Return the source, decoded if its images fit into memory. Decoding takes most of the time of reading an image."""
    count, sampled = len(source), min(_SAMPLE, len(source))
    sample = [np.array(source.read(i * count // sampled)[0]).nbytes for i in range(sampled)]
    free = shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else IN_MEMORY  # containers may have little
    return Decoded(source) if count * sum(sample) / sampled <= min(IN_MEMORY, free / 4) else source


def check_classes(places: str, train: list[str], test: list[str]) -> None:
    """Raise an error if training and test images have other classes. `places` says where they are."""
    if different := sorted(set(train) ^ set(test)):
        raise UserError(f"{places} must have the same classes, but only one of them has {abbreviate(different, 5)}")
