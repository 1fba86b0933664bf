"""Read CIFAR-100 from its original pickle files. Only arrays, lists, dictionaries, strings and numbers are unpickled."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pwlu.lab.recipes.settings import UserError

CLASSES = 100


def cifar100(root: Path) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], list[str]]:
    """Return 50,000 training and 10,000 test images of 32 x 32 pixels with labels, and the names of the 100 classes."""
    folder = root / "cifar-100-python"
    tensors: list[Tensor] = []
    for name in ("train", "test"):
        tensors += _read_images(folder / name)
    return (tensors[0], tensors[1], tensors[2], tensors[3]), _read_names(folder / "meta")


def _read_images(path: Path) -> tuple[Tensor, Tensor]:
    content = _unpickle(path)
    try:
        pixels, labels = torch.as_tensor(content["data"]), torch.tensor(content["fine_labels"])
        if pixels.dtype != torch.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3 * 32 * 32 or not len(pixels):
            raise ValueError(f"data must be uint8 of shape (images, 3072), not {pixels.dtype} of shape {tuple(pixels.shape)}")
        if labels.dtype != torch.int64 or labels.shape != pixels.shape[:1] or not 0 <= labels.min() <= labels.max() < CLASSES:
            raise ValueError(f"fine_labels must be one number from 0 to {CLASSES - 1} per image")
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise _damaged(path, error) from None
    return pixels.reshape(-1, 3, 32, 32), labels


def _read_names(path: Path) -> list[str]:
    names = _unpickle(path).get("fine_label_names")
    if not isinstance(names, list) or len(names) != CLASSES or not all(isinstance(name, str) for name in names):
        raise _damaged(path, ValueError(f"fine_label_names must be {CLASSES} strings"))
    return names


class _Unpickler(pickle.Unpickler):
    """An unpickler that creates arrays and pickle's built-in types only, so that a file cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        import numpy

        known = {
            ("numpy", "ndarray"): numpy.ndarray,
            ("numpy", "dtype"): numpy.dtype,
            ("_codecs", "encode"): _encode,  # Python 3 pickles bytes for Python 2 in this way
        }
        array: Any = numpy.empty(0).__reduce__()[0]  # numpy 2 renamed the module of this function
        known |= {(f"numpy.{core}.multiarray", "_reconstruct"): array for core in ("core", "_core")}
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it loads {module}.{name}, which the real CIFAR-100 does not: do not trust this file")
        return known[module, name]


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"expected bytes in latin1, not in {encoding}")
    return text.encode("latin1")


def _unpickle(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="latin1").load()
    except OSError as error:
        raise UserError(
            f'CIFAR-100 is not at {path} ({error.strerror}). Download it (169 MB) with\n    python -c "import torchvision; '
            f"torchvision.datasets.CIFAR100('{path.parent.parent}', download=True)\"\n"
            "or write --data DIR, the folder that contains cifar-100-python"
        ) from None
    except Exception as error:  # a damaged pickle can raise any error
        raise _damaged(path, error) from None
    if not isinstance(content, dict):
        raise _damaged(path, ValueError(f"expected a dictionary, not {type(content).__name__}"))
    return content


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is damaged ({error!r}): download CIFAR-100 again")
