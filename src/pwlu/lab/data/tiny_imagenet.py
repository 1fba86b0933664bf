"""Read Tiny-ImageNet from its image files into memory."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pwlu.lab.data.file_images import Folder, check_classes
from pwlu.lab.data.image_file import UnreadableImage, read_image
from pwlu.lab.recipes.settings import UserError

PIXELS = 64

Sample = tuple[str, int]  # a path and the number of a class


def tiny_imagenet(root: Path) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], list[str]]:
    """Return training and validation images of 64 x 64 pixels with labels, and the names of the classes.

    Any number of classes may be present. The validation images may be in one folder per class, or in one folder with
    ``val_annotations.txt``, as the authors ship them.
    """
    if not (root / "train").is_dir():
        raise UserError(
            f"Tiny-ImageNet is not at {root}. Unpack tiny-imagenet-200.zip (cs231n.stanford.edu/tiny-imagenet-200.zip) "
            "and write --data DIR, the folder that contains train and val"
        )
    train = Folder(root / "train")
    return (*_read(train.samples), *_read(_validation_samples(root / "val", train.classes))), train.classes


def _validation_samples(folder: Path, classes: list[str]) -> list[Sample]:
    listed = folder / "val_annotations.txt"
    if not listed.exists():
        found = Folder(folder)
        check_classes(f"{folder.parent}/train and {folder}", classes, found.classes)
        return found.samples
    labels = {name: label for label, name in enumerate(classes)}
    samples = []
    for number, line in enumerate(listed.read_text(errors="replace").splitlines(), start=1):
        name, label = (*line.split("\t"), "")[:2]
        if label not in labels:
            raise UserError(f"{listed}, line {number}: {label!r} is not a class of {folder.parent}/train")
        samples.append((str(folder / "images" / name), labels[label]))
    return samples


def _read(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Return the images, uint8 (n, 3, 64, 64), and their labels (n,)."""
    images = torch.empty(len(samples), PIXELS, PIXELS, 3, dtype=torch.uint8)
    with ThreadPoolExecutor(8) as pool:  # Pillow decodes without Python's lock
        for number, pixels in enumerate(pool.map(_pixels, (path for path, _ in samples))):
            images[number] = torch.from_numpy(pixels)
    return images.movedim(-1, 1).contiguous(), torch.tensor([label for _, label in samples])


def _pixels(path: str) -> "np.ndarray":
    try:
        pixels = np.array(read_image(path))
    except UnreadableImage as error:
        raise UserError(f"the image {path} cannot be read: {error}. Unpack Tiny-ImageNet again") from None
    if pixels.shape != (PIXELS, PIXELS, 3):
        height, width, _ = pixels.shape
        raise UserError(
            f"the image {path} has {width} x {height} pixels, but those of Tiny-ImageNet have {PIXELS} x {PIXELS}. For other "
            "images, choose an imagenette or imagenet recipe"
        )
    return pixels
