"""Masks of detected objects put into their images, all of an image at once.

torchvision puts one after the other, and waits for the GPU to know the corners of each, of 400 in an image. The numbers are the
same but for rounding.
"""

import torch
from torch import Tensor
from torchvision.models.detection.roi_heads import expand_boxes, expand_masks
from torchvision.models.detection.transform import GeneralizedRCNNTransform


class Transform(GeneralizedRCNNTransform):
    """What a detector of torchvision does to images before and to detections after, masks by :func:`paste`."""

    def postprocess(
        self, result: list[dict[str, Tensor]], image_shapes: list[tuple[int, int]], original_image_sizes: list[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        """Detections in the original images."""
        if self.training:  # there are none
            return result
        masks = [found.pop("masks") for found in result]
        result = super().postprocess(result, image_shapes, original_image_sizes)
        for found, mask, size in zip(result, masks, original_image_sizes, strict=True):
            found["masks"] = paste(mask, found["boxes"], size)
        return result


def paste(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks (N, 1, M, M), stretched to their boxes (N, 4), in images of that height and width: (N, 1, height, width).

    Bilinear interpolation of a mask is R mask C^T: a row of R (height, M) has the weights of the mask's rows in a row of the
    image, C (width, M) those of its columns.
    """
    with torch.autocast(masks.device.type, enabled=False):
        masks, scale = expand_masks(masks.float(), padding=1)
        left, top, right, bottom = expand_boxes(boxes.float(), scale).long().unbind(1)
        rows = _weights(top, bottom, masks.shape[-2], size[0])
        columns = _weights(left, right, masks.shape[-1], size[1])
        return rows[:, None] @ masks @ columns[:, None].mT


def _weights(first: Tensor, last: Tensor, cells: int, length: int) -> Tensor:
    """Weights (N, length, cells) of a mask's cells in the pixels of a line, where it reaches from `first` to `last`, (N,).

    Pixels outside of the box get what is left of its outermost cells, if anything: they are padding, and 0.
    """
    pixel = torch.arange(length, device=first.device) - first[:, None]
    place = (pixel + 0.5) * (cells / (last - first + 1))[:, None] - 0.5  # of a pixel's middle, in cells from that of the first
    return (1 - (place[..., None] - torch.arange(cells, device=first.device)).abs()).clamp_(min=0)
