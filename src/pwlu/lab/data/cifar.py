"""Read CIFAR-100 with torchvision, which opens only files with the right checksums."""

from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import CIFAR100

from pwlu.lab.recipes.settings import UserError


def cifar100(root: Path) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], list[str]]:
    """Return 50,000 training and 10,000 test images of 32 x 32 pixels with labels, and the names of the 100 classes."""
    try:
        train, test = (CIFAR100(root, train=part) for part in (True, False))
    except (OSError, RuntimeError):
        raise UserError(
            f"CIFAR-100 is not at {root / CIFAR100.base_folder}, or its files are damaged. Download it (169 MB) with\n"
            f"    python -c \"import torchvision; torchvision.datasets.CIFAR100('{root}', download=True)\"\n"
            "or write --data DIR, the folder that contains cifar-100-python"
        ) from None
    images, test_images = (torch.from_numpy(part.data).movedim(-1, 1).contiguous() for part in (train, test))
    return (images, torch.tensor(train.targets), test_images, torch.tensor(test.targets)), train.classes
