"""Images in files, a folder a class, as torchvision's ImageFolder reads them."""

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
from pwlu.lab.data.image_file import Unreadable, read_image
from pwlu.lab.data.images import Batch
from pwlu.lab.recipes.settings import UserError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as everyone uses them


class _Files(Dataset):
    """Items are asked for by (index, keys): keys of the random draws, or None for the image as it is tested."""

    def __init__(self, folder: ImageFolder, numbers: list[int], train: Any, test: Any) -> None:
        self.folder, self.numbers, self.train, self.test = folder, numbers, train, test

    def __getitem__(self, item: tuple[int, tuple[int, ...] | None]) -> tuple[Tensor, int]:
        index, keys = item
        path, label = self.folder.samples[self.numbers[index]]
        try:
            image = read_image(path)
        except Unreadable as error:
            raise UserError(
                f"the image {path} cannot be read: {error}. Replace it, in all copies of the data set alike, then go on with "
                "--resume"
            ) from None
        if keys is None:
            return self.test(image), label
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(keyed_random.mixed(*keys, self.numbers[index])))
            return self.train(image), label


class Folder:
    """A part of a data set on disk: read by worker processes, normalised on the device."""

    def __init__(self, files: _Files, device: torch.device, workers: int) -> None:
        self.files, self.device, self.workers = files, device, workers
        self.mean, self.std = (torch.tensor(v, device=device)[:, None, None] * 255 for v in (MEAN, STD))
        self.asked: list[list[tuple[int, tuple[int, ...] | None]]] = []  # read by the loader at the start of every round
        self.loader = DataLoader(
            files,
            batch_sampler=self.asked,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
            multiprocessing_context="spawn" if workers else None,  # threads of torch do not survive a fork
        )

    def __len__(self) -> int:
        return len(self.files.numbers)

    def part(self, indices: Tensor) -> "Folder":
        """Those images alone."""
        files = self.files
        numbers = [files.numbers[i] for i in indices.tolist()]
        return Folder(_Files(files.folder, numbers, files.train, files.test), self.device, self.workers)

    def batches(self, plan: Iterable[Tensor], keys: tuple[int, ...] | None = None) -> Iterator[Batch]:
        """For each tensor of indices the images, float32, and labels. `keys`, seed and epoch, augment; None does not."""
        self.asked[:] = [[(index, keys) for index in indices.tolist()] for indices in plan]
        pinned = self.device.type == "cuda"
        try:
            for images, labels in self.loader:
                images = images.to(self.device, non_blocking=pinned).float()
                yield (images - self.mean) / self.std, labels.to(self.device, non_blocking=pinned)
        except Exception as error:
            if "UserError" in str(error):  # a worker's, with its traceback around it
                raise UserError(str(error).rpartition("UserError: ")[2].strip()) from None
            raise


def load_image_folder(
    root: Path, device: torch.device, pixels: int, augmentation: str, workers: int
) -> tuple[Folder, Folder, list[str]]:
    """Training and test images under `root`/train/CLASS and `root`/val/CLASS, and the names of the classes."""
    parts = []
    for name in ("train", "val"):
        if not (root / name).is_dir():
            raise UserError(
                f"no images at {root / name}. Expected {root}/train/CLASS/*.jpg and {root}/val/CLASS/*.jpg, as torchvision's "
                "ImageFolder reads them. Say where they are: --data DIR"
            )
        try:
            parts.append(ImageFolder(str(root / name)))
        except FileNotFoundError as error:
            raise UserError(f"{root / name} is not a folder of classes with images in them: {error}") from None
    if parts[0].classes != parts[1].classes:
        different = sorted(set(parts[0].classes) ^ set(parts[1].classes))
        raise UserError(f"{root}/train and {root}/val have different classes: {', '.join(different[:5])} in one of them only")
    train = _training(pixels, augmentation)
    test = transforms.Compose(
        [transforms.Resize(round(pixels * 8 / 7)), transforms.CenterCrop(pixels), transforms.PILToTensor()]
    )
    made = [Folder(_Files(part, list(range(len(part))), train, test), device, workers) for part in parts]
    return made[0], made[1], parts[0].classes


def _training(pixels: int, augmentation: str) -> Any:
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
