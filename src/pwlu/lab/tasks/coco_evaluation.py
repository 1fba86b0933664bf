"""Compute COCO's average precision of detections in COCO's results format.

The evaluator is faster-coco-eval, which is COCO's evaluator with its loops in C++.

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

from pwlu.common.text import counted
from pwlu.lab.data.coco import Annotations, integer, numbers
from pwlu.lab.data.masks import run_lengths
from pwlu.lab.recipes.settings import UserError

_KINDS = {"box": "bbox", "mask": "segm"}
_FIELDS = {"box": "bbox", "mask": "segmentation"}


def names(kind: str) -> list[str]:
    """Return the names of the metrics for "box" or "mask".

    These are the mean over all IOU thresholds, and the values at the thresholds 0.5 and 0.75. Then come the means for small
    objects (below 32 x 32 pixels), medium ones (up to 96 x 96) and large ones.
    """
    return [f"{kind}_ap{name}" for name in ("", "50", "75", "_small", "_medium", "_large")]


def detections(image_id: int, found: dict[str, Tensor], categories: list[int], first_label: int) -> list[dict[str, Any]]:
    """Return the output of a torchvision detector for one image in COCO's results format.

    Boxes are rounded to two decimals and scores to six, so that saved detections evaluate to the same values.
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
        # Transpose on the device: the evaluator expects (height, width, objects) in Fortran order.
        masks = (found["masks"][:, 0] > 0.5).byte().transpose(1, 2).contiguous().cpu().numpy().transpose(2, 1, 0)
        for row, code in zip(rows, rle.encode(np.asfortranarray(masks)), strict=True):
            row["segmentation"] = {"size": code["size"], "counts": code["counts"].decode()}
    return rows


def average_precision(part: Annotations, rows: list[dict[str, Any]], kind: str, most: int) -> dict[str, float]:
    """Return COCO's AP in percent: the mean over ten IOU thresholds from 0.5 to 0.95, 101 recalls and all classes.

    Args:
        part: the annotations. Detections in crowds are ignored.
        rows: the detections in images of `part`, with boxes or masks according to `kind`.
        kind: "box" or "mask": which overlap counts. Objects are small, medium or large by the areas in the annotation file.
        most: how many detections count per class and image: those with the highest scores.

    Returns:
        The values by the :func:`names` of `kind`; nan if there are no objects of that size.
    """
    evaluator = COCOeval_faster(_ground_truth(part), _coco_detections(part, rows, kind), _KINDS[kind])
    evaluator.params.maxDets = [most]
    evaluator.evaluate()
    evaluator.accumulate()
    precision = evaluator.eval["precision"][..., -1]  # (thresholds, recalls, classes, areas)
    everything = precision[..., 0]
    parts = (everything, everything[0], everything[5], *(precision[..., k] for k in (1, 2, 3)))
    return dict(zip(names(kind), map(_mean, parts), strict=True))


def _mean(precision: Any) -> float:
    """Return the mean in percent over the classes that occur; -1 marks the others."""
    valid = precision[precision > -1]
    return 100 * float(valid.mean()) if valid.size else math.nan


def _ground_truth(part: Annotations) -> Any:
    columns = (part.categories, part.boxes, part.areas, part.crowd.long())
    objects = list(zip(*(column.tolist() for column in columns), strict=True))
    annotations = []
    for image, number in enumerate(part.image_ids.tolist()):
        here = part.objects(image)
        for index, (category, box, area, crowd) in enumerate(objects[here], start=here.start):
            row = {"id": index + 1, "image_id": number, "category_id": category, "bbox": box, "area": area, "iscrowd": crowd}
            annotations.append(row | ({"segmentation": part.code(image, index)} if part.with_masks else {}))
    return _make_coco(part, annotations)


def _coco_detections(part: Annotations, rows: list[dict[str, Any]], kind: str) -> Any:
    annotations = []
    for number, row in enumerate(rows, start=1):
        area = math.prod(row["bbox"][2:]) if kind == "box" else float(rle.area(row["segmentation"]))
        annotations.append(row | {"id": number, "area": area, "iscrowd": 0})
    return _make_coco(part, annotations)


def _make_coco(part: Annotations, annotations: list[dict[str, Any]]) -> Any:
    coco = COCO()
    sizes = part.sizes.tolist()
    coco.dataset = {
        "images": [{"id": n, "height": h, "width": w} for n, (h, w) in zip(part.image_ids.tolist(), sizes, strict=True)],
        "categories": [{"id": number, "name": name} for number, name in part.classes.items()],
        "annotations": annotations,
    }
    coco.createIndex()
    return coco


def read_detections(path: Path) -> tuple[list[Any], list[str]]:
    """Read a file of detections. Return its rows, unchecked, and which of "box" and "mask" they have."""
    try:
        rows = json.loads(path.read_bytes())
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("expected a list of detections")
    except (OSError, ValueError) as error:
        raise _invalid(path, error) from None
    kinds = [kind for kind, field in _FIELDS.items() if any(row.get(field) is not None for row in rows)]
    return rows, kinds or ["box"]


def check_detections(path: Path, rows: list[Any], kinds: Sequence[str], part: Annotations) -> list[dict[str, Any]]:
    """Check rows of :func:`read_detections`, and return them for :func:`average_precision`.

    Raises:
        UserError: if a row is not valid, or its image or category is not among these annotations.
    """
    sizes = dict(zip(part.image_ids.tolist(), part.sizes.tolist(), strict=True))
    found = []
    for number, row in enumerate(rows, start=1):
        try:
            detection = _detection(row, kinds)
            image, category = detection["image_id"], detection["category_id"]
            if image not in sizes or category not in part.classes:
                raise UserError(
                    f"{path} has a detection of category {category} in image {image}, which the annotations do not have. Write "
                    "--data DIR with the data set of these detections"
                )
            if "mask" in kinds:
                detection["segmentation"] = _mask(row, *sizes[image])
        except ValueError as error:
            raise _invalid(path, f"in detection {number} of {len(rows)}, {error}") from None
        found.append(detection)
    return found


def _invalid(path: Path, why: object) -> UserError:
    return UserError(f"{path} does not contain detections in COCO's results format: {why}")


def _detection(row: Any, kinds: Sequence[str]) -> dict[str, Any]:
    for name in ("image_id", "category_id", "score", *(_FIELDS[kind] for kind in kinds)):
        if row.get(name) is None:
            raise ValueError(f"{name} is missing")
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
            f"segmentation is damaged or does not fit the image of height {height} and width {width}: expected polygons or run "
            "lengths in COCO's format"
        )
    return code
