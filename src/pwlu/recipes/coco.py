"""Objects in images, annotated as COCO does: found on disk, checked, and held in tensors that processes can share.

DIR/train2017/*.jpg, DIR/val2017/*.jpg, DIR/annotations/instances_train2017.json, instances_val2017.json    as COCO ships it
DIR/images/*, DIR/annotations/instances_train.json, instances_val.json                                   images in one folder
"""

import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pwlu.recipes.settings import UserError

try:
    from faster_coco_eval import mask as rle
    from faster_coco_eval.mask_api_new_cpp import toUncompressedRLE as uncompressed
except ImportError:
    raise UserError("detection needs one more package, COCO's tools: pip install 'pwlu[train,detection]'") from None

# What is left out, in the order in which an annotation is asked about it.
UNKNOWN_IMAGE = "objects in images that the file does not name"
UNKNOWN_CATEGORY = "objects of unknown categories"
NO_AREA = "boxes without area in their image"
NO_MASK = "objects without a mask"
_LEAST = 0.01  # pixels of height and width: with less, a box is a point in float32 after it is scaled with its image


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
    left_out: Counter[str]

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
        """The masks of these objects of an image as :func:`painted` takes them: int64 (2, runs), far less than the masks.

        The pixels of all objects are numbered through, those of an object down its columns. A run of pixels that are set is
        (number of its first pixel - pixels set before it, its length): added to 0, 1, 2, ... this numbers all that are set.
        """
        lengths = []  # of pixels that are not set, set, not set, ...: those of an object begin so, and are made to end set
        for code in uncompressed([self.code(image, index) for index in indices.tolist()]):
            lengths += code["counts"] + [0] * (len(code["counts"]) % 2)
        clear, length = torch.tensor(lengths, dtype=torch.int64).view(-1, 2).unbind(1)
        return torch.stack([clear.cumsum(0), length])

    def trained_on(self) -> Tensor:
        """Numbers of the images with objects that are no crowd."""
        counted = torch.zeros(len(self.crowd) + 1, dtype=torch.int64)
        counted[1:] = (~self.crowd).cumsum(0)
        return (counted[self.first[1:]] > counted[self.first[:-1]]).nonzero().flatten()

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
        )

    def __str__(self) -> str:
        crowds, empty = int(self.crowd.sum()), len(self) - len(self.trained_on())
        text = f"{len(self):,} images ({empty:,} without objects), {len(self.crowd) - crowds:,} objects, {crowds:,} crowds"
        return text + "".join(f", left out: {count:,} {what}" for what, count in self.left_out.items() if count)


def painted(runs: Tensor, pixels: int, objects: int, height: int, width: int) -> Tensor:
    """Masks, uint8 (objects, height, width), of :meth:`Part.runs`, on their device. `pixels`: how many are set in all."""
    shift, length = runs
    numbers = shift.repeat_interleave(length, output_size=pixels) + torch.arange(pixels, device=runs.device)
    masks = torch.zeros(objects, width, height, dtype=torch.uint8, device=runs.device)
    masks.view(-1).index_fill_(0, numbers, 1)
    return masks.transpose(1, 2)


def load(root: Path, with_masks: bool) -> tuple[Part, Part]:
    """What to train on and what to measure on."""
    train, test = (read(*_found(root, part), with_masks) for part in ("train", "val"))
    if train.classes != test.classes:
        different = sorted(str(c) for c in set(train.classes.items()) ^ set(test.classes.items()))
        raise UserError(
            f"the annotation files for training and for validation under {root} have different categories: "
            f"{', '.join(different[:5])} in one of them only"
        )
    for name, part in (("train", train), ("val", test)):
        if not len(part.trained_on()):
            raise UserError(f"the {name} annotations under {root} have no object that could be used: {part}")
        if not any((part.folder / file).exists() for file in part.names[:100]):
            raise UserError(f"the images of the {name} annotations are not in {part.folder}: it has no {part.names[0]}")
    return train, test


def _found(root: Path, part: str) -> tuple[Path, Path]:
    """The annotation file of a part, and the folder with its images."""
    files = sorted((root / "annotations").glob(f"instances_{part}*.json"))
    if len(files) != 1:
        found = f"{len(files)} files: {', '.join(f.name for f in files)}" if files else "none"
        raise UserError(
            f"expected one file {root}/annotations/instances_{part}*.json, there is {found}. Expected {root}/annotations/"
            "instances_train2017.json and instances_val2017.json with images in train2017/ and val2017/, as COCO ships "
            "them, or instances_train.json and instances_val.json with images in images/. Say where they are: --data DIR"
        )
    folders = [root / files[0].stem.removeprefix("instances_"), root / "images"]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        raise UserError(f"{files[0]} has no images: expected them in {folders[0]} or {folders[1]}")
    return files[0], folder


def read(path: Path, folder: Path, with_masks: bool) -> Part:
    """One annotation file. What cannot be used of it is left out, and counted."""
    try:
        content = json.loads(path.read_bytes())
        classes = {int(c["id"]): str(c["name"]) for c in sorted(content["categories"], key=lambda c: int(c["id"]))}
        images = {int(i["id"]): (str(i["file_name"]), int(i["height"]), int(i["width"])) for i in content["images"]}
        by_image: dict[int, list[Any]] = {number: [] for number in images}
        left_out = Counter[str]()
        for annotation in content["annotations"]:
            if int(annotation["image_id"]) not in images:
                left_out[UNKNOWN_IMAGE] += 1
            else:
                by_image[int(annotation["image_id"])].append(annotation)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} does not hold annotations as COCO writes them: {error!r}") from None
    if len(images) != len(content["images"]):
        raise UserError(f"{path}: {len(content['images']) - len(images)} images have the number of another image")
    objects, codes, counts = [], [], []
    for number, (_, height, width) in images.items():
        kept = 0
        for annotation in by_image[number]:
            wrong, values, code = _checked(annotation, classes, height, width, with_masks)
            if wrong:
                left_out[wrong] += 1
            else:
                objects.append(values)
                codes.append(code)
                kept += 1
        counts.append(kept)
    columns = torch.tensor(objects, dtype=torch.float64).reshape(-1, 7)
    return Part(
        folder,
        names=[name for name, _, _ in images.values()],
        image_ids=torch.tensor(list(images), dtype=torch.int64),
        sizes=torch.tensor([size for _, *size in images.values()], dtype=torch.int64).reshape(-1, 2),
        first=_starts(counts),
        boxes=columns[:, :4].clone(),
        areas=columns[:, 4].clone(),
        categories=columns[:, 5].long(),
        crowd=columns[:, 6].bool(),
        codes=torch.frombuffer(bytearray(b"".join(codes) or b"\0"), dtype=torch.uint8)[: sum(map(len, codes))],
        begin=_starts([len(code) for code in codes]),
        classes=classes,
        left_out=left_out,
    )


def _checked(
    annotation: Any, classes: dict[int, str], height: int, width: int, with_masks: bool
) -> tuple[str, list[float], bytes]:
    """What is wrong with an annotation, or "" with its numbers: box, area, category, crowd; and its mask."""
    if annotation.get("category_id") not in classes:
        return UNKNOWN_CATEGORY, [], b""
    try:
        x, y, w, h = (float(v) for v in annotation["bbox"])
    except (LookupError, TypeError, ValueError):
        return NO_AREA, [], b""
    inside = min(x + w, width) - max(x, 0), min(y + h, height) - max(y, 0)
    if not all(map(math.isfinite, (x, y, w, h))) or min(w, h, *inside) < _LEAST:
        return NO_AREA, [], b""
    code = b""
    if with_masks:
        found = _run_lengths(annotation.get("segmentation"), height, width)
        if found is None or not rle.area(found):
            return NO_MASK, [], b""
        code = found["counts"]
    area = annotation.get("area")
    area = float(area) if isinstance(area, (int, float)) else w * h
    return "", [x, y, w, h, area, annotation["category_id"], float(bool(annotation.get("iscrowd", 0)))], code


def _run_lengths(segmentation: Any, height: int, width: int) -> Any:
    """A mask as compressed run lengths, from polygons or run lengths, compressed or not; None if it is nothing of these."""
    try:
        if isinstance(segmentation, list):
            polygons = [polygon for polygon in segmentation if len(polygon) >= 6]  # three points
            return rle.merge(rle.frPyObjects(polygons, height, width)) if polygons else None
        if segmentation["size"] != [height, width]:
            return None
        if isinstance(segmentation["counts"], list):
            code = rle.frPyObjects(segmentation, height, width)
        else:
            code = {"size": [height, width], "counts": segmentation["counts"].encode()}
        lengths = uncompressed([code])[0]["counts"]  # an error if one is negative, or they are more than the image
        return code if sum(lengths) == height * width else None
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError):  # the last: compressed lengths that break off
        return None


def _starts(counts: list[int]) -> Tensor:
    """0, then the sums of the first, the first two, ... of them."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64).cumsum(0)])
