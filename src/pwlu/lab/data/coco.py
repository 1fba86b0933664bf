"""Objects in images, annotated as COCO does: found on disk, checked, and held in tensors that processes can share.

DIR/train2017/*.jpg, DIR/val2017/*.jpg, DIR/annotations/instances_train2017.json, instances_val2017.json    as COCO ships it
DIR/images/*, DIR/annotations/instances_train.json, instances_val.json                                   images in one folder
"""

import json
import math
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pwlu.lab.data import masks
from pwlu.lab.recipes.settings import UserError
from pwlu.text import counted

# Objects that are left out, in the order in which an annotation is asked about it.
UNKNOWN_IMAGE = "without an image in the file"
UNKNOWN_CATEGORY = "of unknown category"
NO_AREA = "without a box of some area in the image"
NO_MASK = "without a mask"
_LEAST = 0.01  # pixels of height and width: with less, a box is a point in float32 after it is scaled with its image
_LARGEST = 1e10  # pixels: COCO's evaluator takes no notice of an object with more
_MOST_PIXELS = 2**20  # of a side: no image has more, and products of two such numbers stay small
_LONGEST = 100  # times the shorter side: of images that are longer nothing is left when they are scaled to 64 x 107 pixels


@dataclass
class Part:
    """The images of one annotation file, and all that is annotated in them; object tensors are ordered by image.

    Object i of image k: ``first[k] <= i < first[k + 1]``. ``boxes`` (n, 4) are x, y, width, height as the file has them,
    ``categories`` and ``image_ids`` are the file's numbers, and the mask of object i is ``codes[begin[i] : begin[i + 1]]``, run
    lengths as COCO compresses them. Crowds are among the objects: training leaves them out, evaluation ignores what is there.
    """

    folder: Path
    names: list[str]
    image_ids: Tensor
    sizes: Tensor  # (images, 2): height, width
    first: Tensor
    boxes: Tensor
    areas: Tensor
    categories: Tensor
    crowd: Tensor
    codes: Tensor
    begin: Tensor
    classes: dict[int, str]  # by the file's number, in the order of numbers
    left_out: dict[str, Tensor]  # how many objects of each image, and why; those without an image are the first one's

    def __len__(self) -> int:
        return len(self.names)

    @property
    def with_masks(self) -> bool:
        """Whether masks were read."""
        return len(self.codes) > 0

    def objects(self, image: int) -> slice:
        """Those in an image."""
        return slice(int(self.first[image]), int(self.first[image + 1]))

    def code(self, image: int, index: int) -> dict[str, Any]:
        """The mask of an object of an image, as COCO's tools take it."""
        counts = self.codes[self.begin[index] : self.begin[index + 1]].numpy().tobytes()
        return {"size": self.sizes[image].tolist(), "counts": counts}

    def runs(self, image: int, indices: Tensor) -> Tensor:
        """The masks of these objects of an image, as :func:`pwlu.lab.data.masks.painted` takes them."""
        return masks.runs([self.code(image, index) for index in indices.tolist()])

    def fits(self) -> Tensor:
        """Which of the images a detector can take, bool: those that are not too long and narrow."""
        shorter, longer = self.sizes.aminmax(dim=1)
        return longer <= _LONGEST * shorter

    def with_objects(self) -> Tensor:
        """Which of the images have objects that are no crowd, bool."""
        before = torch.zeros(len(self.crowd) + 1, dtype=torch.int64)
        before[1:] = (~self.crowd).cumsum(0)
        return before[self.first[1:]] > before[self.first[:-1]]

    def trained_on(self) -> Tensor:
        """Numbers of the images that fit and have objects."""
        return (self.with_objects() & self.fits()).nonzero().flatten()

    def part(self, images: Tensor) -> "Part":
        """Those images alone, in this order."""
        objects = torch.cat([torch.arange(*self.first[k : k + 2].tolist()) for k in images.tolist()])
        counts = self.first.diff()[images]
        spans = [self.codes[self.begin[i] : self.begin[i + 1]] for i in objects.tolist()] if self.with_masks else []
        return replace(
            self,
            names=[self.names[k] for k in images.tolist()],
            image_ids=self.image_ids[images],
            sizes=self.sizes[images],
            first=_starts(counts.tolist()),
            boxes=self.boxes[objects],
            areas=self.areas[objects],
            categories=self.categories[objects],
            crowd=self.crowd[objects],
            codes=torch.cat(spans) if spans else self.codes[:0],
            begin=_starts([len(span) for span in spans]),
            left_out={what: counts[images] for what, counts in self.left_out.items()},
        )

    def __str__(self) -> str:
        crowds, empty, narrow = (int(which.sum()) for which in (self.crowd, ~self.with_objects(), ~self.fits()))
        parts = [f"{counted(len(self), 'image')} ({empty:,} without objects)"]
        parts += [counted(len(self.crowd) - crowds, "object"), counted(crowds, "crowd")]
        if narrow:
            parts.append(f"{counted(narrow, 'image')} too long and narrow for a detector")
        for what, counts in self.left_out.items():
            if counts.any():
                parts.append(f"left out: {counted(int(counts.sum()), 'object')} {what}")
        return ", ".join(parts)


def load(root: Path, with_masks: bool) -> tuple[Part, Part]:
    """What to train on and what to measure on, with their images."""
    train, test = (annotated(root, name, with_masks) for name in ("train", "val"))
    if train.classes != test.classes:
        different = sorted(str(c) for c in set(train.classes.items()) ^ set(test.classes.items()))
        raise UserError(
            f"the annotation files for training and for validation under {root} have different categories: "
            f"{', '.join(different[:5])} in one of them only"
        )
    for name, part in (("train", train), ("val", test)):
        if not any((part.folder / file).is_file() for file in part.names):
            raise UserError(
                f"the images of the {name} annotations are not there: expected {part.names[0]} and the others in "
                f"{' or '.join(map(str, _folders(_file(root, name))))}"
            )
    return train, test


def annotated(root: Path, name: str, with_masks: bool) -> Part:
    """What is annotated for "train" or "val", whether or not its images are there."""
    part = read(_file(root, name), with_masks)
    if not len(part.trained_on()):
        raise UserError(f"the {name} annotations under {root} have no object that could be used: {part}")
    return part


def _file(root: Path, name: str) -> Path:
    files = sorted((root / "annotations").glob(f"instances_{name}*.json"))
    if len(files) != 1:
        found = f"{len(files)} files: {', '.join(f.name for f in files)}" if files else "none"
        raise UserError(
            f"expected one file {root}/annotations/instances_{name}*.json, there is {found}. Expected {root}/annotations/"
            "instances_train2017.json and instances_val2017.json with images in train2017/ and val2017/, as COCO ships "
            "them, or instances_train.json and instances_val.json with images in images/. Say where they are: --data DIR"
        )
    return files[0]


def _folders(path: Path) -> tuple[Path, Path]:
    """Where the images of an annotation file may be."""
    root = path.parent.parent
    return root / path.stem.removeprefix("instances_"), root / "images"


def read(path: Path, with_masks: bool) -> Part:
    """One annotation file. What cannot be used of it is left out, and counted."""
    try:
        content = json.loads(path.read_bytes())
        classes = {number: str(row["name"]) for number, row in sorted(_numbered(content, "categories").items())}
        images = {number: (str(row["file_name"]), *_size(row)) for number, row in _numbered(content, "images").items()}
        by_image: dict[int, list[tuple[int, bool, Any]]] = {number: [] for number in images}
        lost: list[tuple[int, bool, Any]] = []
        for row in content["annotations"]:
            crowd = bool(row.get("iscrowd")) and integer(row, "iscrowd") != 0
            by_image.get(integer(row, "image_id"), lost).append((integer(row, "category_id"), crowd, row))
    except (OSError, LookupError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} does not hold annotations as COCO writes them: {error!r}") from None
    except ValueError as error:
        raise UserError(f"{path} does not hold annotations as COCO writes them: {error}") from None
    left_out = {what: [0] * max(1, len(images)) for what in (UNKNOWN_IMAGE, UNKNOWN_CATEGORY, NO_AREA, NO_MASK)}
    left_out[UNKNOWN_IMAGE][0] = len(lost)
    described: list[list[float]] = []
    categories, crowds, codes, counts = [], [], [], []
    for place, (number, (_, height, width)) in enumerate(images.items()):
        before = len(described)
        for category, crowd, row in by_image[number]:
            wrong, values, code = UNKNOWN_CATEGORY, list[float](), b""
            if category in classes:
                wrong, values, code = _checked(row, height, width, with_masks)
            if wrong:
                left_out[wrong][place] += 1
                continue
            described.append(values)
            categories.append(category)
            crowds.append(crowd)
            codes.append(code)
        counts.append(len(described) - before)
    columns = torch.tensor(described, dtype=torch.float64).reshape(-1, 5)
    return Part(
        folder=next((folder for folder in _folders(path) if folder.is_dir()), _folders(path)[-1]),
        names=[name for name, _, _ in images.values()],
        image_ids=torch.tensor(list(images), dtype=torch.int64),
        sizes=torch.tensor([size for _, *size in images.values()], dtype=torch.int64).reshape(-1, 2),
        first=_starts(counts),
        boxes=columns[:, :4].clone(),
        areas=columns[:, 4].clone(),
        categories=torch.tensor(categories, dtype=torch.int64),
        crowd=torch.tensor(crowds, dtype=torch.bool),
        codes=torch.frombuffer(bytearray(b"".join(codes) or b"\0"), dtype=torch.uint8)[: sum(map(len, codes))],
        begin=_starts([len(code) for code in codes]),
        classes=classes,
        left_out={what: torch.tensor(counts) for what, counts in left_out.items()},
    )


def integer(row: Any, name: str) -> int:
    """A whole number of a row of a file, also if it stands there as text."""
    value = row.get(name)
    try:
        number = int(value)
        if (not isinstance(value, str) and number != value) or not -(2**63) <= number < 2**63:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a whole number of 64 bits, not {_shown(value)}, in {_shown(row)}") from None
    return number


def numbers(values: Any) -> list[float]:
    """Those of a list in a file."""
    if not isinstance(values, list):
        raise TypeError(f"expected a list of numbers, not {_shown(values)}")
    return [float(value) for value in values]


def _shown(value: Any) -> str:
    return textwrap.shorten(repr(value), 150)


def _numbered(content: Any, what: str) -> dict[int, Any]:
    """Rows of the file by their numbers."""
    rows: dict[int, Any] = {}
    for row in content[what]:
        if (number := integer(row, "id")) in rows:
            raise ValueError(f"two of its {what} have the number {number}")
        rows[number] = row
    return rows


def _size(row: Any) -> tuple[int, int]:
    height, width = integer(row, "height"), integer(row, "width")
    if min(height, width) < 1 or max(height, width) > _MOST_PIXELS:
        raise ValueError(f"height and width must be from 1 to {_MOST_PIXELS:,}, not {height} and {width}, in {_shown(row)}")
    return height, width


def _checked(row: Any, height: int, width: int, with_masks: bool) -> tuple[str, list[float], bytes]:
    """What is wrong with an annotation, or "" with its box and its area; and its mask."""
    try:
        x, y, w, h = numbers(row["bbox"])
    except (LookupError, TypeError, ValueError, OverflowError):
        return NO_AREA, [], b""
    inside = min(x + w, width) - max(x, 0), min(y + h, height) - max(y, 0)
    if not all(map(math.isfinite, (x, y, w, h))) or min(w, h, *inside) < _LEAST:
        return NO_AREA, [], b""
    area = _area(row.get("area"))
    code = masks.run_lengths(row.get("segmentation"), height, width) if with_masks or not area else None
    set_pixels = masks.area(code) if code else 0
    if with_masks and not (code and set_pixels):
        return NO_MASK, [], b""
    return "", [x, y, w, h, area or set_pixels or math.prod(inside)], code["counts"] if code and with_masks else b""


def _area(value: Any) -> float:
    """As the file has it, if it is one; else 0."""
    try:
        area = float(value)
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return area if 0 < area <= _LARGEST else 0.0


def _starts(counts: list[int]) -> Tensor:
    """0, then the sums of the first, the first two, ... of them."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64).cumsum(0)])
