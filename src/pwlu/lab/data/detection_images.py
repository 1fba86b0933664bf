"""Images with objects in them, as detectors are trained on them: in memory where they fit, else from files, by workers."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pwlu.lab.data import keyed_random
from pwlu.lab.data.coco import Part
from pwlu.lab.data.image_file import Unreadable, read_image
from pwlu.lab.data.masks import painted

IN_MEMORY = 2**31  # bytes of images: what needs more is read from files again and again

Scene = tuple[Tensor, dict[str, Tensor], bool]  # the image, what is in it, whether it could be read
Keys = tuple[int, ...] | None


class _Scenes(Dataset):
    """Items are asked for by (index, trained on): whether what is in the image is wanted with it.

    All tensors are large and few, so that worker processes share their memory.
    """

    def __init__(self, part: Part, first_label: int) -> None:
        self.part = part
        self.labels = {category: label for label, category in enumerate(part.classes, start=first_label)}
        self.pixels: Tensor | None = None
        areas = part.sizes.prod(1) * 3
        self.begin = torch.cat([areas[:0].new_zeros(1), areas.cumsum(0)])
        if self.begin[-1] <= IN_MEMORY:
            self._hold()

    def _hold(self) -> None:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(self._read, range(len(self.part))))
        self.pixels = torch.empty(int(self.begin[-1]), dtype=torch.uint8)
        for index, (image, _) in enumerate(found):
            self.pixels[self.begin[index] : self.begin[index + 1]] = image.flatten()
        self.readable = torch.tensor([readable for _, readable in found], dtype=torch.bool)

    def _image(self, index: int) -> tuple[Tensor, bool]:
        if self.pixels is None:
            return self._read(index)
        shape = (3, *self.part.sizes[index].tolist())
        return self.pixels[self.begin[index] : self.begin[index + 1]].view(shape), bool(self.readable[index])

    def _read(self, index: int) -> tuple[Tensor, bool]:
        """uint8 (3, height, width). One that cannot be read, or is not of the size that its annotations are for, is black."""
        height, width = self.part.sizes[index].tolist()
        try:
            pixels = np.array(read_image(self.part.folder / self.part.names[index]))
        except Unreadable:
            pixels = np.empty((0, 0, 3))
        image = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
        if image.shape != (3, height, width):
            return torch.zeros(3, height, width, dtype=torch.uint8), False
        return image, True

    def __getitem__(self, item: tuple[int, bool]) -> Scene:
        index, trained_on = item
        image, readable = self._image(index)
        return image, self._objects(index, readable) if trained_on else {}, readable

    def _objects(self, index: int, readable: bool) -> dict[str, Tensor]:
        """Boxes (n, 4) as left, top, right, bottom; labels (n,); masks as runs. None in an image that is black."""
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


def _mirrored(image: Tensor, target: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    left, top, right, bottom = target["boxes"].unbind(1)
    width = image.shape[-1]
    changed = {"boxes": torch.stack([width - right, top, width - left, bottom], 1)}
    if "masks" in target:
        changed["masks"] = target["masks"].flip(-1)
    return image.flip(-1), target | changed


class DetectionImages:
    """A part of a data set: prepared by worker processes, and given out on the device."""

    def __init__(self, part: Part, first_label: int, flip: bool, device: torch.device, workers: int) -> None:
        self.part, self.flip, self.device = part, flip, device
        self.data = _Scenes(part, first_label)
        self.asked: list[list[tuple[int, bool]]] = []  # read by the loader at the start of every round
        self.loader = DataLoader(
            self.data,
            batch_sampler=self.asked,
            collate_fn=list,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
            multiprocessing_context="spawn" if workers else None,  # threads of torch do not survive a fork
        )

    def __len__(self) -> int:
        return len(self.part)

    @property
    def unreadable(self) -> int | None:
        """How many images could not be read; None if they are not in memory, and that is not known yet."""
        return None if self.data.pixels is None else int((~self.data.readable).sum())

    def batches(self, plan: Sequence[list[int]], keys: Keys = None) -> Iterator[list[Scene]]:
        """For each list of indices the images, uint8, and what is in them. `keys`, seed and epoch, augment; None does not."""
        self.asked[:] = [[(index, keys is not None) for index in indices] for indices in plan]
        for indices, scenes in zip(plan, self.loader, strict=True):
            mirrored = [False] * len(indices)
            if self.flip and keys is not None:
                mirrored = (keyed_random.uniform(*keys, self.part.image_ids[indices]) >= 0.5).tolist()
            yield list(map(self._on_device, scenes, mirrored))

    def _on_device(self, scene: Scene, mirrored: bool) -> Scene:
        """Masks are made there: of what is moved they would be nearly all, and decoding them most of what the CPU does."""
        image, target, readable = scene
        pinned = self.device.type == "cuda"
        image, moved = image.to(self.device, non_blocking=pinned), {}
        for name, value in target.items():
            moved[name] = value.to(self.device, non_blocking=pinned)
        if "runs" in target:
            pixels = int(target["runs"][1].sum())  # here: to ask the device is to wait for it
            moved["masks"] = painted(moved.pop("runs"), pixels, len(target["boxes"]), *image.shape[1:])
        return *(_mirrored(image, moved) if mirrored else (image, moved)), readable
