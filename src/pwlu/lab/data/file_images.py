"""Images that worker processes read and augment during training."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from pwlu.lab.data import keyed_random
from pwlu.lab.data.images import Batch
from pwlu.lab.data.shards import Shards, is_shards
from pwlu.lab.data.sources import Folder, Source, check_classes, decoded_if_small
from pwlu.lab.data.workers import requested_batches
from pwlu.lab.recipes.settings import Settings, UserError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # the usual values for ImageNet


class _FileDataset(Dataset):
    """A data set whose items are requested by (index, random seed of the augmentation, or None for a test image)."""

    def __init__(self, source: Source, numbers: list[int], train: Any, test: Any) -> None:
        self.source, self.numbers, self.train, self.test = source, numbers, train, test

    def __getitem__(self, item: tuple[int, int | None]) -> tuple[Tensor, int]:
        index, seed = item
        number = self.numbers[index]
        image, label = self.source.read(number)
        if seed is None:
            return self.test(image), label
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed takes longer: it also looks for GPUs
            return self.train(image), label


class FileImages:
    """A data set on disk or a part of it, read by worker processes and normalized on the device."""

    def __init__(self, files: _FileDataset, device: torch.device, workers: int) -> None:
        self.files, self.device, self.workers = files, device, workers
        self.mean, self.std = (torch.tensor(v, device=device)[:, None, None] * 255 for v in (MEAN, STD))
        self.requests: list[list[tuple[int, int | None]]] = []
        self.loader = requested_batches(files, self.requests, device, workers)

    def __len__(self) -> int:
        return len(self.files.numbers)

    def part(self, indices: Tensor) -> "FileImages":
        """Return these images only."""
        files = self.files
        numbers = [files.numbers[i] for i in indices.tolist()]
        return FileImages(_FileDataset(files.source, numbers, files.train, files.test), self.device, self.workers)

    def batches(self, plan: Iterable[Tensor], keys: tuple[int, ...] | None = None) -> Iterator[Batch]:
        """Yield the images, float32, and their labels for each tensor of indices.

        `keys`: the random keys of the augmentation, such as seed and epoch. None: no augmentation.
        """
        numbers = torch.tensor(self.files.numbers)
        self.requests[:] = []
        for indices in plan:
            seeds = [None] * len(indices) if keys is None else keyed_random.hash_keys(*keys, numbers[indices]).tolist()
            self.requests.append(list(zip(indices.tolist(), seeds, strict=True)))
        pinned = self.device.type == "cuda"
        try:
            for images, labels in self.loader:
                images = images.to(self.device, non_blocking=pinned).float()
                yield (images - self.mean) / self.std, labels.to(self.device, non_blocking=pinned)
        except Exception as error:
            if "UserError" in str(error):  # a worker raised it, and torch wrapped it with the worker's traceback
                raise UserError(str(error).rpartition("UserError: ")[2].strip()) from None
            raise


def load_files(settings: Settings, device: torch.device) -> tuple[FileImages, FileImages | None, list[str]]:
    """Return training images, test images and the names of the classes, from a folder or from shards.

    Shards without test shards have no test images. Then ``--holdout`` must be given.
    """
    train, test = _sources(settings)
    if test is not None and not (isinstance(train, Shards) and len(test.classes) <= len(train.classes)):  # numbers from 0
        data, other = settings.data, settings.test_data
        check_classes(f"{data} and {other}" if other else f"{data}/train and {data}/val", train.classes, test.classes)
    augment = _training_transform(settings.pixels, settings.augmentation)
    plain = transforms.Compose(
        [transforms.Resize(round(settings.pixels * 8 / 7)), transforms.CenterCrop(settings.pixels), transforms.PILToTensor()]
    )

    def images(source: Source) -> FileImages:
        source = decoded_if_small(source)
        return FileImages(_FileDataset(source, list(range(len(source))), augment, plain), device, settings.worker_count)

    return images(train), None if test is None else images(test), train.classes


def _sources(settings: Settings) -> tuple[Source, Source | None]:
    """Return where the training images and the test images are."""
    if not is_shards(settings.data):
        if settings.test_data is not None:
            raise UserError(
                f"--test-data is for shards, but --data {settings.data} is a folder, whose test images are in val: leave it out"
            )
        root = Path(settings.data)
        return Folder(root / "train"), Folder(root / "val")
    if settings.holdout:
        if settings.test_data is not None:
            raise UserError(f"--holdout {settings.holdout} measures on training images: leave out --test-data or --holdout")
        return Shards(settings.data), None
    if settings.test_data is None:
        raise UserError(
            f"--data {settings.data} has training images only. Write --test-data 'NAME-{{000..006}}.tar' with the shards to "
            "measure on, or --holdout N to measure on N training images"
        )
    return Shards(settings.data), Shards(settings.test_data)


def _training_transform(pixels: int, augmentation: str) -> Any:
    steps: list[Any] = []
    if augmentation == "none":
        steps = [transforms.Resize(pixels), transforms.CenterCrop(pixels)]
    else:
        steps = [transforms.RandomResizedCrop(pixels)]
    if augmentation in ("crop+flip", "autoaugment"):
        steps.append(transforms.RandomHorizontalFlip())
    if augmentation == "autoaugment":
        steps.append(transforms.AutoAugment(interpolation=InterpolationMode.BILINEAR))
    return transforms.Compose([*steps, transforms.PILToTensor()])
