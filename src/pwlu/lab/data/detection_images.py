"""Images with their objects, for detectors: in memory if they fit, else read from files by worker processes."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from pwlu.lab.data import keyed_random
from pwlu.lab.data.coco import Annotations
from pwlu.lab.data.image_file import UnreadableImage, read_image
from pwlu.lab.data.masks import decode_runs
from pwlu.lab.data.sources import IN_MEMORY, PackedImages
from pwlu.lab.data.workers import requested_batches

Example = tuple[Tensor, dict[str, Tensor], bool]  # the image, its objects, whether it could be read
Keys = tuple[int, ...] | None


class _DetectionDataset(Dataset):
    """A data set whose items are requested by (index, whether to return the objects as well).

    It has few, large tensors, so that worker processes share their memory.
    """

    def __init__(self, part: Annotations, first_label: int) -> None:
        self.part = part
        self.labels = {category: label for label, category in enumerate(part.classes, start=first_label)}
        self.images: PackedImages | None = None
        if 3 * part.sizes.prod(1).sum() <= IN_MEMORY:
            self._read_all()

    def _read_all(self) -> None:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(self._read, range(len(self.part))))
        self.images = PackedImages([image for image, _ in found])
        self.readable = torch.tensor([readable for _, readable in found], dtype=torch.bool)

    def _image(self, index: int) -> tuple[Tensor, bool]:
        if self.images is None:
            return self._read(index)
        return self.images[index], bool(self.readable[index])

    def _read(self, index: int) -> tuple[Tensor, bool]:
        """Return an image, uint8 (3, height, width), and whether it is readable.

        If it is unreadable, or its size is not the annotated size, return a black image.
        """
        height, width = self.part.sizes[index].tolist()
        try:
            pixels = np.array(read_image(self.part.folder / self.part.names[index]))
        except UnreadableImage:
            pixels = np.empty((0, 0, 3))
        image = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
        if image.shape != (3, height, width):
            return torch.zeros(3, height, width, dtype=torch.uint8), False
        return image, True

    def __getitem__(self, item: tuple[int, bool]) -> Example:
        index, with_objects = item
        image, readable = self._image(index)
        return image, self._objects(index, readable) if with_objects else {}, readable

    def _objects(self, index: int, readable: bool) -> dict[str, Tensor]:
        """Return boxes (n, 4) as left, top, right, bottom; labels (n,); masks as runs. Unreadable images have no objects."""
        part, objects = self.part, self.part.objects(index)
        kept = torch.arange(objects.start, objects.stop)[~part.crowd[objects] & readable]
        height, width = part.sizes[index].tolist()
        left, top, wide, high = part.boxes[kept].unbind(1)
        edges = [left.clamp(min=0), top.clamp(min=0), (left + wide).clamp(max=width), (top + high).clamp(max=height)]
        labels = [self.labels[category] for category in part.categories[kept].tolist()]
        target = {"boxes": torch.stack(edges, 1).float(), "labels": torch.tensor(labels, dtype=torch.int64)}
        if part.with_masks:
            target["runs"] = part.runs(index, kept)
        return target


def _flip(image: Tensor, target: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    left, top, right, bottom = target["boxes"].unbind(1)
    width = image.shape[-1]
    changed = {"boxes": torch.stack([width - right, top, width - left, bottom], 1)}
    if "masks" in target:
        changed["masks"] = target["masks"].flip(-1)
    return image.flip(-1), target | changed


class DetectionImages:
    """The images of a data set or of a part of it, prepared by worker processes and moved to the device."""

    def __init__(self, part: Annotations, first_label: int, flip: bool, device: torch.device, workers: int) -> None:
        self.part, self.flip, self.device = part, flip, device
        self.data = _DetectionDataset(part, first_label)
        self.requests: list[list[tuple[int, bool]]] = []
        self.loader = requested_batches(self.data, self.requests, device, workers, collate_fn=list)

    def __len__(self) -> int:
        return len(self.part)

    @property
    def unreadable(self) -> int | None:
        """Return the number of unreadable images; None if it is unknown, because images are read only when needed."""
        return None if self.data.images is None else int((~self.data.readable).sum())

    def batches(self, plan: Sequence[list[int]], keys: Keys = None) -> Iterator[list[Example]]:
        """Yield the images, uint8, and their objects for each list of indices.

        `keys`: the random keys of the augmentation, such as seed and epoch. None: no augmentation and no objects.
        """
        self.requests[:] = [[(index, keys is not None) for index in indices] for indices in plan]
        for indices, examples in zip(plan, self.loader, strict=True):
            flipped = [False] * len(indices)
            if self.flip and keys is not None:
                flipped = (keyed_random.uniform(*keys, self.part.image_ids[indices]) >= 0.5).tolist()
            yield list(map(self._to_device, examples, flipped))

    def _to_device(self, example: Example, flipped: bool) -> Example:
        """Move an example to the device and decode its masks there.

        Moving decoded masks would transfer many more bytes, and decoding them would take most of the CPU's time.
        """
        image, target, readable = example
        pinned = self.device.type == "cuda"
        image, moved = image.to(self.device, non_blocking=pinned), {}
        for name, value in target.items():
            moved[name] = value.to(self.device, non_blocking=pinned)
        if "runs" in target:
            pixels = int(target["runs"][1].sum())  # sum on the CPU, because reading a number from the device would synchronize
            moved["masks"] = decode_runs(moved.pop("runs"), pixels, len(target["boxes"]), *image.shape[1:])
        return *(_flip(image, moved) if flipped else (image, moved)), readable
