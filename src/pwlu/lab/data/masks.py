"""Masks as COCO writes them: polygons, or run lengths down the columns of an image, compressed or not."""

import math
from typing import Any

import torch
from torch import Tensor

from pwlu.lab.recipes.settings import UserError
from pwlu.text import install

try:
    from faster_coco_eval import mask as rle
    from faster_coco_eval.mask_api_new_cpp import toUncompressedRLE as uncompressed
except ImportError:
    raise UserError(f"detection needs one more package, COCO's tools: {install('train', 'detection')}") from None

_FARTHEST = 10  # times the image: COCO's code needs memory for every pixel along a polygon, inside of the image or not


def run_lengths(segmentation: Any, height: int, width: int) -> dict[str, Any] | None:
    """A mask as compressed run lengths, from all that COCO knows; None if it is nothing of that, or not of this size."""
    try:
        if isinstance(segmentation, list):
            polygons = [polygon for polygon in segmentation if len(polygon) >= 6]  # three points
            near = all(_within(polygon, _FARTHEST * max(height, width)) for polygon in polygons)
            return rle.merge(rle.frPyObjects(polygons, height, width)) if polygons and near else None
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


def _within(polygon: list[float], most: float) -> bool:
    return max(map(abs, polygon)) <= most and not math.isnan(sum(polygon))


def area(code: dict[str, Any]) -> int:
    """How many pixels are set."""
    return int(rle.area(code))


def runs(codes: list[dict[str, Any]]) -> Tensor:
    """Compressed masks of one size as :func:`painted` takes them: int64 (2, runs), far less than the masks.

    The pixels of all objects are numbered through, those of an object down its columns. A run of pixels that are set is
    (number of its first pixel - pixels set before it, its length): added to 0, 1, 2, ... this numbers all that are set.
    """
    lengths = []  # of pixels that are not set, set, not set, ...: those of an object begin so, and are made to end set
    for code in uncompressed(codes):
        lengths += code["counts"] + [0] * (len(code["counts"]) % 2)
    clear, length = torch.tensor(lengths, dtype=torch.int64).view(-1, 2).unbind(1)
    return torch.stack([clear.cumsum(0), length])


def painted(runs: Tensor, pixels: int, objects: int, height: int, width: int) -> Tensor:
    """Masks, uint8 (objects, height, width), of :func:`runs`, on their device. `pixels`: how many are set in all."""
    shift, length = runs
    numbers = shift.repeat_interleave(length, output_size=pixels) + torch.arange(pixels, device=runs.device)
    masks = torch.zeros(objects, width, height, dtype=torch.uint8, device=runs.device)
    masks.view(-1).index_fill_(0, numbers, 1)
    return masks.transpose(1, 2)
