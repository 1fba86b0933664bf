"""Describe the network of a run besides its weights: its input, its classes, and the places of its activations."""

from dataclasses import asdict, dataclass
from typing import Any

from pwlu.lab.runs.run_folder import RunFolder

FILE = "network.json"


@dataclass(frozen=True)
class NetworkInfo:
    """The contents of network.json.

    Args:
        shape: the shape of an input image, (C, H, W).
        image: a description of the input, such as "RGB images of 32 x 32".
        mean: the mean of the pixels per channel. An input is (x - mean)/std for pixels x between 0 and 1.
        std: the standard deviation of the pixels per channel.
        classes: the names of the classes.
        sites: the name of every activation that the run inserted, and the original there, such as ``ReLU()`` or ``F.relu``.
    """

    shape: tuple[int, int, int]
    image: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]
    sites: dict[str, str]

    def __str__(self) -> str:
        mean, std = (", ".join(f"{value:.4g}" for value in values) for values in (self.mean, self.std))
        return f"{self.image}, pixels from 0 to 1, minus {mean}, divided by {std}"

    def write(self, folder: RunFolder) -> None:
        """Write the file."""
        folder.write_json(FILE, asdict(self))


def read_network_info(folder: RunFolder) -> NetworkInfo:
    """Read the file. Raise an error that says what is wrong with it."""
    content = folder.json(FILE)
    try:
        return NetworkInfo(
            shape=_shape(content["shape"]),
            image=str(content["image"]),
            mean=tuple(float(value) for value in content["mean"]),
            std=tuple(float(value) for value in content["std"]),
            classes=tuple(str(name) for name in content["classes"]),
            sites={str(name): str(was) for name, was in content["sites"].items()},
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise folder.unreadable(f"{folder.path / FILE} does not describe a network: {error!r}") from None


def _shape(sizes: Any) -> tuple[int, int, int]:
    channels, height, width = (int(size) for size in sizes)
    if min(channels, height, width) < 1:
        raise ValueError(f"the shape must be three sizes above 0, not {sizes!r}")
    return channels, height, width
