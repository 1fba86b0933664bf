"""Read and check annotations in COCO's format, and hold them in tensors that processes can share.

Two layouts of the data set are supported, COCO's own and one with all images in one folder::

    DIR/train2017/*.jpg, DIR/val2017/*.jpg, DIR/annotations/instances_train2017.json, instances_val2017.json
    DIR/images/*, DIR/annotations/instances_train.json, instances_val.json
"""

import json
import math
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pwlu.common.text import abbreviate, counted
from pwlu.lab.data import masks
from pwlu.lab.recipes.settings import UserError

# Reasons to leave out an object, in the order in which they are checked.
UNKNOWN_IMAGE = "without an image in the file"
UNKNOWN_CATEGORY = "of unknown category"
NO_AREA = "without a box of positive area in the image"
NO_MASK = "without a mask"
_MIN_SIDE = 0.01  # pixels; a smaller box becomes a point in float32 when it is scaled with its image
_MAX_AREA = 1e10  # pixels; COCO's evaluator ignores larger objects
_MAX_PIXELS = 2**20  # the longest side allowed; the product of two such numbers does not overflow
_MAX_ASPECT = 100  # longer side / shorter side; scaled to 64 x 107 pixels, a narrower image could lose its shorter side


@dataclass
class Annotations:
    """The images of one annotation file and their objects, ordered by image.

    Image k has the objects ``first[k]`` to ``first[k + 1] - 1``. Crowds are among the objects: training leaves them out, and
    evaluation ignores detections there.

    Attributes:
        folder: the folder of the images.
        names: the file name of each image.
        image_ids: the id of each image in the annotation file.
        sizes: height and width of each image, (images, 2).
        first: the index of the first object of each image, and the number of objects, (images + 1,).
        boxes: x, y, width and height as in the file, (objects, 4).
        areas: the area of each object.
        categories: the category id of each object in the annotation file.
        crowd: whether an object is a crowd, bool.
        codes: the masks of all objects as COCO's compressed run lengths, uint8.
        begin: the mask of object i is ``codes[begin[i] : begin[i + 1]]``.
        classes: the name of each category by id, ordered by id.
        left_out: for each reason, the number of objects left out per image. Objects of unknown images count for image 0.
    """

    folder: Path
    names: list[str]
    image_ids: Tensor
    sizes: Tensor
    first: Tensor
    boxes: Tensor
    areas: Tensor
    categories: Tensor
    crowd: Tensor
    codes: Tensor
    begin: Tensor
    classes: dict[int, str]
    left_out: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def with_masks(self) -> bool:
        """Return whether masks were read."""
        return len(self.codes) > 0

    def objects(self, image: int) -> slice:
        """Return the indices of the objects of an image."""
        return slice(int(self.first[image]), int(self.first[image + 1]))

    def code(self, image: int, index: int) -> dict[str, Any]:
        """Return the mask of an object in the format of COCO's tools."""
        counts = self.codes[self.begin[index] : self.begin[index + 1]].numpy().tobytes()
        return {"size": self.sizes[image].tolist(), "counts": counts}

    def runs(self, image: int, indices: Tensor) -> Tensor:
        """Return the masks of these objects of an image as runs, for :func:`pwlu.lab.data.masks.decode_runs`."""
        return masks.encode_runs([self.code(image, index) for index in indices.tolist()])

    def fits(self) -> Tensor:
        """Return which images a detector can take, bool: those that are not too long and narrow."""
        shorter, longer = self.sizes.aminmax(dim=1)
        return longer <= _MAX_ASPECT * shorter

    def with_objects(self) -> Tensor:
        """Return which images have objects other than crowds, bool."""
        before = torch.zeros(len(self.crowd) + 1, dtype=torch.int64)
        before[1:] = (~self.crowd).cumsum(0)
        return before[self.first[1:]] > before[self.first[:-1]]

    def training_images(self) -> Tensor:
        """Return the indices of the images that fit and have objects."""
        return (self.with_objects() & self.fits()).nonzero().flatten()

    def part(self, images: Tensor) -> "Annotations":
        """Return the annotations of these images only, in this order."""
        objects = torch.cat([torch.arange(*self.first[k : k + 2].tolist()) for k in images.tolist()])
        counts = self.first.diff()[images]
        spans = [self.codes[self.begin[i] : self.begin[i + 1]] for i in objects.tolist()] if self.with_masks else []
        return replace(
            self,
            names=[self.names[k] for k in images.tolist()],
            image_ids=self.image_ids[images],
            sizes=self.sizes[images],
            first=_offsets(counts.tolist()),
            boxes=self.boxes[objects],
            areas=self.areas[objects],
            categories=self.categories[objects],
            crowd=self.crowd[objects],
            codes=torch.cat(spans) if spans else self.codes[:0],
            begin=_offsets([len(span) for span in spans]),
            left_out={reason: counts[images] for reason, counts in self.left_out.items()},
        )

    def __str__(self) -> str:
        crowds, empty, narrow = (int(which.sum()) for which in (self.crowd, ~self.with_objects(), ~self.fits()))
        parts = [f"{counted(len(self), 'image')} ({empty:,} without objects)"]
        parts += [counted(len(self.crowd) - crowds, "object"), counted(crowds, "crowd")]
        if narrow:
            parts.append(f"{counted(narrow, 'image')} too long and narrow for a detector")
        for reason, counts in self.left_out.items():
            if counts.any():
                parts.append(f"left out: {counted(int(counts.sum()), 'object')} {reason}")
        return ", ".join(parts)


def load(root: Path, with_masks: bool) -> tuple[Annotations, Annotations]:
    """Return the training and validation annotations of a data set, and check that there are images."""
    train, test = (load_annotations(root, name, with_masks) for name in ("train", "val"))
    if train.classes != test.classes:
        different = sorted(str(c) for c in set(train.classes.items()) ^ set(test.classes.items()))
        raise UserError(
            f"the annotation files for training and for validation under {root} must have the same categories, but only one of "
            f"them has {abbreviate(different, 5)}"
        )
    for name, part in (("train", train), ("val", test)):
        if not any((part.folder / file).is_file() for file in part.names):
            raise UserError(
                f"the images of the {name} annotations are missing: expected {part.names[0]} and the others in "
                f"{' or '.join(map(str, _folders(_file(root, name))))}"
            )
    return train, test


def load_annotations(root: Path, name: str, with_masks: bool) -> Annotations:
    """Return the annotations for "train" or "val", whether or not the images exist."""
    part = read(_file(root, name), with_masks)
    if not len(part.training_images()):
        raise UserError(f"the {name} annotations under {root} have no usable object: {part}")
    return part


def _file(root: Path, name: str) -> Path:
    files = sorted((root / "annotations").glob(f"instances_{name}*.json"))
    if len(files) != 1:
        found = f"{len(files)} files: {', '.join(f.name for f in files)}" if files else "none"
        raise UserError(
            f"expected one file {root}/annotations/instances_{name}*.json, found {found}. Expected {root}/annotations/"
            "instances_train2017.json and instances_val2017.json with images in train2017/ and val2017/, as in COCO, or "
            "instances_train.json and instances_val.json with images in images/. Write --data DIR with the right folder"
        )
    return files[0]


def _folders(path: Path) -> tuple[Path, Path]:
    """Return the two folders in which the images of an annotation file may be."""
    root = path.parent.parent
    return root / path.stem.removeprefix("instances_"), root / "images"


def read(path: Path, with_masks: bool) -> Annotations:
    """Read an annotation file. Leave out and count the objects that cannot be used."""
    try:
        content = json.loads(path.read_bytes())
        classes = {number: str(row["name"]) for number, row in sorted(_by_id(content, "categories").items())}
        images = {number: (str(row["file_name"]), *_size(row)) for number, row in _by_id(content, "images").items()}
        by_image: dict[int, list[tuple[int, bool, Any]]] = {number: [] for number in images}
        lost: list[tuple[int, bool, Any]] = []
        for row in content["annotations"]:
            crowd = bool(row.get("iscrowd")) and integer(row, "iscrowd") != 0
            by_image.get(integer(row, "image_id"), lost).append((integer(row, "category_id"), crowd, row))
    except (OSError, LookupError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} does not contain annotations in COCO's format: {error!r}") from None
    except ValueError as error:
        raise UserError(f"{path} does not contain annotations in COCO's format: {error}") from None
    left_out = {reason: [0] * max(1, len(images)) for reason in (UNKNOWN_IMAGE, UNKNOWN_CATEGORY, NO_AREA, NO_MASK)}
    left_out[UNKNOWN_IMAGE][0] = len(lost)
    described: list[list[float]] = []
    categories, crowds, codes, counts = [], [], [], []
    for place, (number, (_, height, width)) in enumerate(images.items()):
        before = len(described)
        for category, crowd, row in by_image[number]:
            wrong, values, code = UNKNOWN_CATEGORY, list[float](), b""
            if category in classes:
                wrong, values, code = _check_object(row, height, width, with_masks)
            if wrong:
                left_out[wrong][place] += 1
                continue
            described.append(values)
            categories.append(category)
            crowds.append(crowd)
            codes.append(code)
        counts.append(len(described) - before)
    columns = torch.tensor(described, dtype=torch.float64).reshape(-1, 5)
    return Annotations(
        folder=next((folder for folder in _folders(path) if folder.is_dir()), _folders(path)[-1]),
        names=[name for name, _, _ in images.values()],
        image_ids=torch.tensor(list(images), dtype=torch.int64),
        sizes=torch.tensor([size for _, *size in images.values()], dtype=torch.int64).reshape(-1, 2),
        first=_offsets(counts),
        boxes=columns[:, :4].clone(),
        areas=columns[:, 4].clone(),
        categories=torch.tensor(categories, dtype=torch.int64),
        crowd=torch.tensor(crowds, dtype=torch.bool),
        codes=torch.frombuffer(bytearray(b"".join(codes) or b"\0"), dtype=torch.uint8)[: sum(map(len, codes))],
        begin=_offsets([len(code) for code in codes]),
        classes=classes,
        left_out={reason: torch.tensor(counts) for reason, counts in left_out.items()},
    )


def integer(row: Any, name: str) -> int:
    """Return an integer field of a row of the file. The field may also be a string."""
    value = row.get(name)
    try:
        number = int(value)
        if (not isinstance(value, str) and number != value) or not -(2**63) <= number < 2**63:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a 64-bit integer, not {_abbreviated(value)}, in {_abbreviated(row)}") from None
    return number


def numbers(values: Any) -> list[float]:
    """Return a list of numbers of the file as floats."""
    if not isinstance(values, list):
        raise TypeError(f"expected a list of numbers, not {_abbreviated(values)}")
    return [float(value) for value in values]


def _abbreviated(value: Any) -> str:
    return textwrap.shorten(repr(value), 150)


def _by_id(content: Any, what: str) -> dict[int, Any]:
    """Return the rows of a section of the file by their ids."""
    rows: dict[int, Any] = {}
    for row in content[what]:
        if (number := integer(row, "id")) in rows:
            raise ValueError(f"two of its {what} have the id {number}")
        rows[number] = row
    return rows


def _size(row: Any) -> tuple[int, int]:
    height, width = integer(row, "height"), integer(row, "width")
    if min(height, width) < 1 or max(height, width) > _MAX_PIXELS:
        raise ValueError(
            f"height and width must be from 1 to {_MAX_PIXELS:,}, not {height} and {width}, in {_abbreviated(row)}"
        )
    return height, width


def _check_object(row: Any, height: int, width: int, with_masks: bool) -> tuple[str, list[float], bytes]:
    """Return the reason to leave out an object, or "" with its box and area, and its mask."""
    try:
        x, y, w, h = numbers(row["bbox"])
    except (LookupError, TypeError, ValueError, OverflowError):
        return NO_AREA, [], b""
    inside = min(x + w, width) - max(x, 0), min(y + h, height) - max(y, 0)
    if not all(map(math.isfinite, (x, y, w, h))) or min(w, h, *inside) < _MIN_SIDE:
        return NO_AREA, [], b""
    area = _area(row.get("area"))
    code = masks.run_lengths(row.get("segmentation"), height, width) if with_masks or not area else None
    set_pixels = masks.area(code) if code else 0
    if with_masks and not (code and set_pixels):
        return NO_MASK, [], b""
    return "", [x, y, w, h, area or set_pixels or math.prod(inside)], code["counts"] if code and with_masks else b""


def _area(value: Any) -> float:
    """Return the area that the file states, or 0 if it is not valid."""
    try:
        area = float(value)
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return area if 0 < area <= _MAX_AREA else 0.0


def _offsets(counts: list[int]) -> Tensor:
    """Return the cumulative sums of the counts, with a leading 0."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64).cumsum(0)])
