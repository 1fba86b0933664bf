"""Paste the masks of detected objects into their image, all masks of an image at once.

torchvision pastes one mask at a time and synchronizes with the GPU for each, up to 400 times per image. The results are equal
up to rounding.
"""

import torch
from torch import Tensor
from torchvision.models.detection.roi_heads import expand_boxes, expand_masks
from torchvision.models.detection.transform import GeneralizedRCNNTransform


class Transform(GeneralizedRCNNTransform):
    """torchvision's pre- and postprocessing of a detector, with masks pasted by :func:`paste`."""

    def postprocess(
        self, result: list[dict[str, Tensor]], image_shapes: list[tuple[int, int]], original_image_sizes: list[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        """Return the detections in coordinates of the original images."""
        if self.training:  # in training, there are no detections
            return result
        masks = [found.pop("masks") for found in result]
        result = super().postprocess(result, image_shapes, original_image_sizes)
        for found, mask, size in zip(result, masks, original_image_sizes, strict=True):
            found["masks"] = paste(mask, found["boxes"], size)
        return result


def paste(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize masks (N, 1, M, M) to their boxes (N, 4), in images of size (height, width). Return (N, 1, height, width).

    Bilinear interpolation of a mask is R mask C^T. A row of R (height, M) has the weights of the mask's rows in one row of the
    image. A row of C (width, M) has the weights of the mask's columns in one column of the image.
    """
    with torch.autocast(masks.device.type, enabled=False):
        masks, scale = expand_masks(masks.float(), padding=1)
        left, top, right, bottom = expand_boxes(boxes.float(), scale).long().unbind(1)
        rows = _weights(top, bottom, masks.shape[-2], size[0])
        columns = _weights(left, right, masks.shape[-1], size[1])
        return rows[:, None] @ masks @ columns[:, None].mT


def _weights(first: Tensor, last: Tensor, cells: int, length: int) -> Tensor:
    """Return the interpolation weights (N, length, cells) of mask cells for the pixels of a line of the image.

    Mask n covers the pixels ``first[n]`` to ``last[n]``. Pixels just outside of the box may get weights of its outermost cells,
    which are padding with the value 0.
    """
    pixel = torch.arange(length, device=first.device) - first[:, None]
    position = (pixel + 0.5) * (cells / (last - first + 1))[:, None] - 0.5  # pixel centres, in cells from the first centre
    return (1 - (position[..., None] - torch.arange(cells, device=first.device)).abs()).clamp_(min=0)
