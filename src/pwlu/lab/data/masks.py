"""Masks in COCO's formats: polygons, or run lengths down the columns of an image, compressed or not."""

import math
from typing import Any

import torch
from torch import Tensor

from pwlu.lab.recipes.settings import needs_packages

with needs_packages("detection", "train", "detection"):
    from faster_coco_eval import mask as rle
    from faster_coco_eval.mask_api_new_cpp import toUncompressedRLE as uncompressed

# Reject polygons that reach further than this many image sizes: COCO's code uses memory for each pixel along a polygon.
_MAX_REACH = 10


def run_lengths(segmentation: Any, height: int, width: int) -> dict[str, Any] | None:
    """Return a mask in any of COCO's formats as compressed run lengths; None if it is invalid or has another size."""
    try:
        if isinstance(segmentation, list):
            polygons = [polygon for polygon in segmentation if len(polygon) >= 6]  # at least three points
            near = all(_within(polygon, _MAX_REACH * max(height, width)) for polygon in polygons)
            return rle.merge(rle.frPyObjects(polygons, height, width)) if polygons and near else None
        if segmentation["size"] != [height, width]:
            return None
        if isinstance(segmentation["counts"], list):
            code = rle.frPyObjects(segmentation, height, width)
        else:
            code = {"size": [height, width], "counts": segmentation["counts"].encode()}
        lengths = uncompressed([code])[0]["counts"]  # raises if a length is negative or the sum exceeds the image
        return code if sum(lengths) == height * width else None
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError):  # RuntimeError: truncated run lengths
        return None


def _within(polygon: list[float], most: float) -> bool:
    return max(map(abs, polygon)) <= most and not math.isnan(sum(polygon))


def area(code: dict[str, Any]) -> int:
    """Return the number of pixels of a mask."""
    return int(rle.area(code))


def encode_runs(codes: list[dict[str, Any]]) -> Tensor:
    """Return compressed masks of one size as runs for :func:`decode_runs`: int64 (2, runs), much smaller than the masks.

    Number the pixels of all objects consecutively, down the columns of each object. A run of mask pixels is stored as
    (number of its first pixel - mask pixels before it, length). Repeat each first value by its length and add 0, 1, 2, ...:
    this gives the numbers of all mask pixels.
    """
    lengths = []  # runs outside and inside of the mask alternate; each object has as many of both, the last may have length 0
    for code in uncompressed(codes):
        lengths += code["counts"] + [0] * (len(code["counts"]) % 2)
    clear, length = torch.tensor(lengths, dtype=torch.int64).view(-1, 2).unbind(1)
    return torch.stack([clear.cumsum(0), length])


def decode_runs(runs: Tensor, pixels: int, objects: int, height: int, width: int) -> Tensor:
    """Return the masks of :func:`encode_runs` on the device of `runs`, uint8 (objects, height, width).

    `pixels`: the number of mask pixels of all objects together.
    """
    shift, length = runs
    numbers = shift.repeat_interleave(length, output_size=pixels) + torch.arange(pixels, device=runs.device)
    masks = torch.zeros(objects, width, height, dtype=torch.uint8, device=runs.device)
    masks.view(-1).index_fill_(0, numbers, 1)
    return masks.transpose(1, 2)
