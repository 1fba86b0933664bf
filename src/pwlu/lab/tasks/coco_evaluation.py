"""COCO's average precision, of detections in COCO's results format.

The evaluator is faster-coco-eval: COCO's own, with its loops in C++.

A detection is ``{"image_id", "category_id", "score"}`` with ``"bbox": [x, y, width, height]``, ``"segmentation"`` or both.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from faster_coco_eval import COCO, COCOeval_faster
from faster_coco_eval import mask as rle
from torch import Tensor

from pwlu.lab.data.coco import Part, integer, numbers
from pwlu.lab.data.masks import run_lengths
from pwlu.lab.recipes.settings import UserError
from pwlu.text import counted

_KINDS = {"box": "bbox", "mask": "segm"}
_FIELDS = {"box": "bbox", "mask": "segmentation"}


def names(kind: str) -> list[str]:
    """What is measured of "box" or "mask": the mean, at two thresholds, below 32 x 32 pixels, up to 96 x 96, above."""
    return [f"{kind}_ap{name}" for name in ("", "50", "75", "_small", "_medium", "_large")]


def detections(image_id: int, found: dict[str, Tensor], categories: list[int], first_label: int) -> list[dict[str, Any]]:
    """What a detector of torchvision found in an image, ready for JSON.

    Boxes have two digits after the point and scores six: what is saved and evaluated elsewhere is what is evaluated here.
    """
    left, top, right, bottom = found["boxes"].double().cpu().unbind(1)
    boxes = torch.stack([left, top, right - left, bottom - top], 1).tolist()
    rows = [
        {
            "image_id": image_id,
            "category_id": categories[label - first_label],
            "bbox": [round(v, 2) for v in box],
            "score": round(score, 6),
        }
        for box, label, score in zip(boxes, found["labels"].tolist(), found["scores"].double().tolist(), strict=True)
    ]
    if "masks" in found and rows:
        # turned on the device: the evaluator wants an array (height, width, objects) whose first index varies fastest
        masks = (found["masks"][:, 0] > 0.5).byte().transpose(1, 2).contiguous().cpu().numpy().transpose(2, 1, 0)
        for row, code in zip(rows, rle.encode(np.asfortranarray(masks)), strict=True):
            row["segmentation"] = {"size": code["size"], "counts": code["counts"].decode()}
    return rows


def average_precision(part: Part, rows: list[dict[str, Any]], kind: str, most: int) -> dict[str, float]:
    """AP in percent, as COCO defines it: the mean over ten thresholds of overlap from 0.5 to 0.95, 101 recalls, all classes.

    Args:
        part: what is to be found; detections in crowds count neither for nor against.
        rows: what was found, in images of `part`, each image's once, with boxes or masks as `kind` says.
        kind: "box" or "mask": whose overlap counts. Objects are small, medium or large by the areas in the annotation file.
        most: so many detections of a class in an image, those with the best scores, count.

    Returns:
        By the :func:`names` of `kind`; nan where there is nothing of that size to be found.
    """
    evaluator = COCOeval_faster(_truth(part), _found(part, rows, kind), _KINDS[kind])
    evaluator.params.maxDets = [most]
    evaluator.evaluate()
    evaluator.accumulate()
    precision = evaluator.eval["precision"][..., -1]  # (thresholds, recalls, classes, areas)
    everything = precision[..., 0]
    parts = (everything, everything[0], everything[5], *(precision[..., k] for k in (1, 2, 3)))
    return dict(zip(names(kind), map(_mean, parts), strict=True))


def _mean(precision: Any) -> float:
    """-1 stands for classes that are not there."""
    there = precision[precision > -1]
    return 100 * float(there.mean()) if there.size else math.nan


def _truth(part: Part) -> Any:
    columns = (part.categories, part.boxes, part.areas, part.crowd.long())
    objects = list(zip(*(column.tolist() for column in columns), strict=True))
    annotations = []
    for image, number in enumerate(part.image_ids.tolist()):
        here = part.objects(image)
        for index, (category, box, area, crowd) in enumerate(objects[here], start=here.start):
            row = {"id": index + 1, "image_id": number, "category_id": category, "bbox": box, "area": area, "iscrowd": crowd}
            annotations.append(row | ({"segmentation": part.code(image, index)} if part.with_masks else {}))
    return _indexed(part, annotations)


def _found(part: Part, rows: list[dict[str, Any]], kind: str) -> Any:
    annotations = []
    for number, row in enumerate(rows, start=1):
        area = math.prod(row["bbox"][2:]) if kind == "box" else float(rle.area(row["segmentation"]))
        annotations.append(row | {"id": number, "area": area, "iscrowd": 0})
    return _indexed(part, annotations)


def _indexed(part: Part, annotations: list[dict[str, Any]]) -> Any:
    coco = COCO()
    sizes = part.sizes.tolist()
    coco.dataset = {
        "images": [{"id": n, "height": h, "width": w} for n, (h, w) in zip(part.image_ids.tolist(), sizes, strict=True)],
        "categories": [{"id": number, "name": name} for number, name in part.classes.items()],
        "annotations": annotations,
    }
    coco.createIndex()
    return coco


def saved(path: Path) -> tuple[list[Any], list[str]]:
    """What a file of detections holds, and whether these are boxes, masks or both, to be :func:`checked`."""
    try:
        rows = json.loads(path.read_bytes())
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("expected a list of detections")
    except (OSError, ValueError) as error:
        raise _no_detections(path, error) from None
    kinds = [kind for kind, field in _FIELDS.items() if any(row.get(field) is not None for row in rows)]
    return rows, kinds or ["box"]


def checked(path: Path, rows: list[Any], kinds: Sequence[str], part: Part) -> list[dict[str, Any]]:
    """What was :func:`saved`, as :func:`average_precision` takes it, if it belongs to these images."""
    sizes = dict(zip(part.image_ids.tolist(), part.sizes.tolist(), strict=True))
    found = []
    for number, row in enumerate(rows, start=1):
        try:
            detection = _detection(row, kinds)
            image, category = detection["image_id"], detection["category_id"]
            if image not in sizes or category not in part.classes:
                raise UserError(
                    f"{path} has a detection of category {category} in image {image}, which the annotations do not have: is it "
                    "of another data set?"
                )
            if "mask" in kinds:
                detection["segmentation"] = _mask(row, *sizes[image])
        except ValueError as error:
            raise _no_detections(path, f"in detection {number} of {len(rows)}, {error}") from None
        found.append(detection)
    return found


def _no_detections(path: Path, why: object) -> UserError:
    return UserError(f"{path} does not hold detections in COCO's results format: {why}")


def _detection(row: Any, kinds: Sequence[str]) -> dict[str, Any]:
    for name in ("image_id", "category_id", "score", *(_FIELDS[kind] for kind in kinds)):
        if row.get(name) is None:
            raise ValueError(f"there is no {name}")
    detection: dict[str, Any] = {"image_id": integer(row, "image_id"), "category_id": integer(row, "category_id")}
    (detection["score"],) = _numbers("score", [row["score"]], 1)
    if "box" in kinds:
        detection["bbox"] = _numbers("bbox", row["bbox"], 4)
    return detection


def _numbers(name: str, values: Any, count: int) -> list[float]:
    try:
        found = numbers(values)
    except (TypeError, ValueError, OverflowError):
        found = []
    if len(found) != count or not all(map(math.isfinite, found)):
        raise ValueError(f"{name} must be {counted(count, 'finite number')}, not {values}")
    return found


def _mask(row: Any, height: int, width: int) -> dict[str, Any]:
    code = run_lengths(row["segmentation"], height, width)
    if code is None:
        raise ValueError(
            f"segmentation is damaged, or not of an image of height {height} and width {width}: expected polygons, or run "
            "lengths, as COCO writes them"
        )
    return code
