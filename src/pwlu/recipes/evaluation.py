"""COCO's average precision, of detections in COCO's results format.

The evaluator is faster-coco-eval: COCO's own, with its loops in C++.

A detection is ``{"image_id", "category_id", "bbox": [x, y, width, height], "score"}`` and, with a mask, ``"segmentation"``.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from faster_coco_eval import COCO, COCOeval_faster
from faster_coco_eval import mask as rle
from torch import Tensor

from pwlu.recipes.coco import Part
from pwlu.recipes.settings import UserError

_AREAS = ("", "_small", "_medium", "_large")  # below 32 x 32 pixels, up to 96 x 96, above
_KINDS = {"box": "bbox", "mask": "segm"}


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
        rows: what was found, in images of `part`, each image's once.
        kind: "box" or "mask": whose overlap counts. Objects are small, medium or large by the areas in the annotation file.
        most: so many detections of an image, those with the best scores, count.

    Returns:
        ``box_ap``, ``box_ap50`` and ``box_ap75`` (one threshold), ``box_ap_small``, ``box_ap_medium``, ``box_ap_large``, or
        the same with mask; nan where there is nothing of that size to be found.
    """
    evaluator = COCOeval_faster(_truth(part), _found(part, rows, kind), _KINDS[kind])
    evaluator.params.maxDets = [most]
    evaluator.evaluate()
    evaluator.accumulate()
    precision = evaluator.eval["precision"][..., -1]  # (thresholds, recalls, classes, areas)
    values = {f"{kind}_ap{area}": _mean(precision[..., k]) for k, area in enumerate(_AREAS)}
    values |= {f"{kind}_ap{threshold}": _mean(precision[k, ..., 0]) for threshold, k in ((50, 0), (75, 5))}
    return {f"{kind}_ap{name}": values[f"{kind}_ap{name}"] for name in ("", "50", "75", *_AREAS[1:])}


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


def read(path: Path, part: Part) -> list[dict[str, Any]]:
    """Detections that were saved, if they are such and belong to these images."""
    try:
        rows = json.loads(path.read_bytes())
        images, masks = set(part.image_ids.tolist()), 0
        for row in rows:
            if row["image_id"] not in images or row["category_id"] not in part.classes:
                raise UserError(
                    f"{path} has a detection of category {row['category_id']} in image {row['image_id']}, which the "
                    "annotations do not have: is it of another data set?"
                )
            if len(row["bbox"]) != 4 or not all(math.isfinite(v) for v in (*row["bbox"], row["score"])):
                raise ValueError(f"box {row['bbox']}, score {row['score']}")
            masks += "segmentation" in row
        if masks not in (0, len(rows)):
            raise ValueError(f"{masks} of {len(rows)} detections have masks")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} does not hold detections in COCO's results format: {error}") from None
    return rows
