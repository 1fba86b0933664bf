"""Read data sets of small images into memory: CIFAR-100, Tiny-ImageNet, or image folders with images of the same size."""

from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import CIFAR100

from pwlu.lab.data.sources import Files, Folder, check_classes, read_all
from pwlu.lab.recipes.settings import UserError

DataSet = tuple[tuple[Tensor, Tensor, Tensor, Tensor], list[str]]  # images and labels for training and test, class names


def cifar100(root: Path) -> DataSet:
    """Return images of 32 x 32 pixels, from the authors' files or from image folders.

    torchvision reads the authors' files. It opens them only if they have the right checksums.
    """
    if (root / "train").is_dir():
        return image_folders(root, 32)
    try:
        train, test = (CIFAR100(root, train=part) for part in (True, False))
    except (OSError, RuntimeError):
        raise UserError(
            f"CIFAR-100 is not at {root / CIFAR100.base_folder}, or its files are damaged. Download it (169 MB) with\n"
            f"    python -c \"import torchvision; torchvision.datasets.CIFAR100('{root}', download=True)\"\n"
            "or write --data DIR, the folder that contains cifar-100-python, or train/CLASS/* and test/CLASS/*"
        ) from None
    images, test_images = (torch.from_numpy(part.data).movedim(-1, 1).contiguous() for part in (train, test))
    return (images, torch.tensor(train.targets), test_images, torch.tensor(test.targets)), train.classes


def tiny_imagenet(root: Path) -> DataSet:
    """Return images of 64 x 64 pixels, from image folders."""
    if not (root / "train").is_dir():
        raise UserError(
            f"Tiny-ImageNet is not at {root}. Unpack tiny-imagenet-200.zip (cs231n.stanford.edu/tiny-imagenet-200.zip) "
            "and write --data DIR, the folder that contains train and val"
        )
    return image_folders(root, 64)


def image_folders(root: Path, pixels: int) -> DataSet:
    """Return the images of train/ and of val/ or test/. Each contains one folder per class; any number of classes will do.

    The images of val/ may also be in one folder with ``val_annotations.txt``, as the authors of Tiny-ImageNet ship them.
    """
    train = Folder(root / "train")
    test = root / "val" if (root / "val").is_dir() else root / "test"
    return (*_read(train, pixels), *_read(_test_images(test, train.classes), pixels)), train.classes


def _test_images(folder: Path, classes: list[str]) -> Files:
    listed = folder / "val_annotations.txt"
    if not listed.exists():
        found = Folder(folder)
        check_classes(f"{folder.parent}/train and {folder}", classes, found.classes)
        return found
    labels = {name: label for label, name in enumerate(classes)}
    samples = []
    for number, line in enumerate(listed.read_text(errors="replace").splitlines(), start=1):
        name, label = (*line.split("\t"), "")[:2]
        if label not in labels:
            raise UserError(f"{listed}, line {number}: {label!r} is not a class of {folder.parent}/train")
        samples.append((str(folder / "images" / name), labels[label]))
    if not samples:
        raise UserError(f"{listed} is empty, but must have a line for each image. Unpack the data set again")
    return Files(samples, classes)


def _read(source: Files, pixels: int) -> tuple[Tensor, Tensor]:
    """Return the images, uint8 (n, 3, pixels, pixels), and their labels (n,)."""
    images, labels = torch.empty(len(source), pixels, pixels, 3, dtype=torch.uint8), []
    for number, (image, label) in enumerate(read_all(source)):
        height, width, _ = image.shape
        if height != pixels or width != pixels:
            raise UserError(
                f"the image {source.name(number)} has {width} x {height} pixels, but this recipe takes {pixels} x {pixels}. "
                "For other images, choose an imagenette or imagenet recipe"
            )
        images[number] = image
        labels.append(label)
    return images.movedim(-1, 1).contiguous(), torch.tensor(labels)
