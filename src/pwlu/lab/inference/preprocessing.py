"""What a trained network expects of its input: how an image becomes the numbers that it was trained on."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torchvision.datasets.folder import find_classes

from pwlu.lab.data import datasets
from pwlu.lab.data.image_folder import MEAN, STD
from pwlu.lab.inference.trained_network import TrainedNetwork
from pwlu.lab.recipes.catalog import find
from pwlu.lab.recipes.settings import UserError


@dataclass(frozen=True)
class Preprocessing:
    """An input is (x - mean)/std, channel by channel, for pixels x between 0 and 1.

    ``image``: what those pixels are of, in words. ``mean``, ``std`` and the ``names`` of classes are empty where they are not
    known, and ``unknown`` says why.
    """

    image: str
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    names: tuple[str, ...] = ()
    unknown: str = ""

    def __str__(self) -> str:
        if not self.mean:
            return f"{self.image}, minus the mean of the training pixels, divided by their standard deviation ({self.unknown})"
        mean, std = (", ".join(f"{value:.4g}" for value in values) for values in (self.mean, self.std))
        return f"{self.image}, pixels from 0 to 1, minus {mean}, divided by {std}"


def preprocessing(trained: TrainedNetwork, data: Path | None = None) -> Preprocessing:
    """What the network of a run expects.

    Args:
        trained: the network.
        data: the folder of the data set, which knows the names of the classes, and the mean of the pixels where they are kept
            in memory; by default that of the run, if it is still there.
    """
    kind, pixels = find(trained.settings.recipe).data, trained.settings.pixels
    if kind == "coco":
        return Preprocessing(f"RGB images scaled and padded to {pixels} x {pixels}", MEAN, STD)
    image = {
        "folder": f"RGB images, their shorter side scaled to {round(pixels * 8 / 7)}, the {pixels} x {pixels} in the middle",
        "cifar100": "RGB images of 32 x 32",
        "digits": "grey images of 8 x 8, scikit-learn's numbers times 15/255",
    }[kind]
    root = data or Path(trained.settings.data)
    try:
        mean, std, names = _of_files(root) if kind == "folder" else _of_memory(trained, root)
        if len(names) != trained.classes:
            raise UserError(f"{root} has {len(names)} classes, the network has {trained.classes}. Is it another data set?")
    except UserError as error:
        if data is not None:
            raise
        mean, std = (MEAN, STD) if kind == "folder" else ((), ())
        return Preprocessing(image, mean, std, unknown=f"{str(error).splitlines()[0]}; write --data DIR for the numbers")
    return Preprocessing(image, mean, std, names)


Known = tuple[tuple[float, ...], tuple[float, ...], tuple[str, ...]]


def _of_files(root: Path) -> Known:
    try:
        return MEAN, STD, tuple(find_classes(str(root / "train"))[0])
    except FileNotFoundError:
        raise UserError(f"there are no classes at {root / 'train'}") from None


def _of_memory(trained: TrainedNetwork, root: Path) -> Known:
    data = datasets.load(trained.settings.replace(data=str(root), holdout=0), torch.device("cpu"))
    mean, std = (tuple((values / 255).tolist()) for values in (data.train.mean, data.train.std))
    return mean, std, tuple(data.classes)
