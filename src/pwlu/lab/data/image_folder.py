"""Images in files, one folder per class, as torchvision's ImageFolder reads them."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms import InterpolationMode

from pwlu.lab.data import keyed_random
from pwlu.lab.data.image_file import UnreadableImage, read_image
from pwlu.lab.data.images import Batch
from pwlu.lab.recipes.settings import UserError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # the usual values for ImageNet


class _FileDataset(Dataset):
    """A data set whose items are requested by (index, random keys of the augmentation, or None for a test image)."""

    def __init__(self, folder: ImageFolder, numbers: list[int], train: Any, test: Any) -> None:
        self.folder, self.numbers, self.train, self.test = folder, numbers, train, test

    def __getitem__(self, item: tuple[int, tuple[int, ...] | None]) -> tuple[Tensor, int]:
        index, keys = item
        path, label = self.folder.samples[self.numbers[index]]
        try:
            image = read_image(path)
        except UnreadableImage as error:
            raise UserError(
                f"the image {path} cannot be read: {error}. Replace it in all copies of the data set, then continue with "
                "--resume"
            ) from None
        if keys is None:
            return self.test(image), label
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(keyed_random.hash_keys(*keys, self.numbers[index])))
            return self.train(image), label


class FolderImages:
    """A data set on disk or a part of it, read by worker processes and normalised on the device."""

    def __init__(self, files: _FileDataset, device: torch.device, workers: int) -> None:
        self.files, self.device, self.workers = files, device, workers
        self.mean, self.std = (torch.tensor(v, device=device)[:, None, None] * 255 for v in (MEAN, STD))
        self.requests: list[list[tuple[int, tuple[int, ...] | None]]] = []  # the loader reads it when an iteration starts
        self.loader = DataLoader(
            files,
            batch_sampler=self.requests,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
            multiprocessing_context="spawn" if workers else None,  # torch's threads do not survive a fork
        )

    def __len__(self) -> int:
        return len(self.files.numbers)

    def part(self, indices: Tensor) -> "FolderImages":
        """Return these images only."""
        files = self.files
        numbers = [files.numbers[i] for i in indices.tolist()]
        return FolderImages(_FileDataset(files.folder, numbers, files.train, files.test), self.device, self.workers)

    def batches(self, plan: Iterable[Tensor], keys: tuple[int, ...] | None = None) -> Iterator[Batch]:
        """Yield the images, float32, and their labels for each tensor of indices.

        Args:
            plan: the indices of each batch.
            keys: the random keys of the augmentation, such as seed and epoch. None: no augmentation.
        """
        self.requests[:] = [[(index, keys) for index in indices.tolist()] for indices in plan]
        pinned = self.device.type == "cuda"
        try:
            for images, labels in self.loader:
                images = images.to(self.device, non_blocking=pinned).float()
                yield (images - self.mean) / self.std, labels.to(self.device, non_blocking=pinned)
        except Exception as error:
            if "UserError" in str(error):  # raised in a worker, and wrapped with its traceback
                raise UserError(str(error).rpartition("UserError: ")[2].strip()) from None
            raise


def load_image_folder(
    root: Path, device: torch.device, pixels: int, augmentation: str, workers: int
) -> tuple[FolderImages, FolderImages, list[str]]:
    """Return training images from `root`/train/CLASS, test images from `root`/val/CLASS, and the names of the classes."""
    parts = []
    for name in ("train", "val"):
        if not (root / name).is_dir():
            raise UserError(
                f"no images at {root / name}. Expected {root}/train/CLASS/*.jpg and {root}/val/CLASS/*.jpg, as torchvision's "
                "ImageFolder reads them. Write --data DIR with the right folder"
            )
        try:
            parts.append(ImageFolder(str(root / name)))
        except FileNotFoundError as error:
            raise UserError(f"{root / name} must have one folder of images per class: {error}") from None
    if parts[0].classes != parts[1].classes:
        different = sorted(set(parts[0].classes) ^ set(parts[1].classes))
        raise UserError(f"{root}/train and {root}/val have different classes: {', '.join(different[:5])} in one of them only")
    train = _training_transform(pixels, augmentation)
    test = transforms.Compose(
        [transforms.Resize(round(pixels * 8 / 7)), transforms.CenterCrop(pixels), transforms.PILToTensor()]
    )
    loaded = [FolderImages(_FileDataset(part, list(range(len(part))), train, test), device, workers) for part in parts]
    return loaded[0], loaded[1], parts[0].classes


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
