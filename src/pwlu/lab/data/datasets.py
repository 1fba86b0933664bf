"""Load the data sets of recipes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pwlu.lab.data import keyed_random
from pwlu.lab.data.file_images import FileImages, load_files
from pwlu.lab.data.images import Images, in_memory
from pwlu.lab.data.small_images import cifar100, tiny_imagenet
from pwlu.lab.recipes.catalog import find
from pwlu.lab.recipes.settings import Settings, UserError, needs_packages


@dataclass
class Data:
    """A data set for classification: training images, images to measure on, and class names."""

    train: Images | FileImages
    test: Images | FileImages
    classes: list[str]
    channels: int
    measured_on: str  # "test images" or "held-out training images"


def load(settings: Settings, device: torch.device) -> Data:
    """Load the data set of a recipe. Small data sets are kept in the memory of the device."""
    kind = find(settings.recipe).data
    train: Images | FileImages
    test: Images | FileImages | None
    if kind == "folder":
        train, test, classes = load_files(settings, device)
    else:
        images, classes = _READERS[kind](Path(settings.data))
        crop = settings.augmentation != "none"
        train, test = in_memory(
            *images, device, padding=settings.pixels // 8 if crop else 0, flip=settings.augmentation == "crop+flip"
        )
    measured_on = "test images"
    if settings.holdout:
        train, test = split_holdout(train, settings.holdout)
        measured_on = "held-out training images"
    assert test is not None  # only shards may lack test images, and then --holdout has made some
    return Data(train, test, classes, 1 if kind == "digits" else 3, measured_on)


def split_holdout(train: Any, count: int) -> tuple[Any, Any]:
    """Split the training set into images to train on and held-out images. The split does not depend on the seed."""
    if count >= len(train):
        raise UserError(f"--holdout {count} must be less than the number of training images, {len(train)}")
    order = torch.randperm(len(train), generator=keyed_random.generator(0, 0))
    kept, held = order[count:].sort().values, order[:count].sort().values
    return train.part(kept), train.part(held)


def _digits(_: Path) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], list[str]]:
    """Return scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, in a fixed split of halves for training and test."""
    with needs_packages("the digits data set", "train"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    data = load_digits()
    split = train_test_split(data.images, data.target, test_size=0.5, random_state=0, stratify=data.target)
    images = [torch.tensor(x * 15, dtype=torch.uint8).unsqueeze(1) for x in split[:2]]  # 0 to 16 becomes 0 to 240
    labels = [torch.tensor(y) for y in split[2:]]
    return (images[0], labels[0], images[1], labels[1]), [str(name) for name in data.target_names]


_READERS = {"cifar100": cifar100, "tinyimagenet": tiny_imagenet, "digits": _digits}
