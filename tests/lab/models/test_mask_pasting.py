"""Masks of detections in their images, held against torchvision's own, which puts one after the other."""

import pytest
import torch
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from pwlu.lab.models import detectors
from pwlu.lab.models.mask_pasting import Transform, paste

CELLS = 28
# The place of a pixel in the mask, up to 30 cells, is rounded three times; a mask's values change by at most 1 per cell, along
# both axes; and it is summed up in another order.
ROUNDING = 2 * 3 * 32 * torch.finfo(torch.float32).eps


def boxes_in(height, width, count):
    """Of all sizes, some over the edges of the image, some of no area."""
    corners = torch.rand(count, 2, 2) * torch.tensor([width, height])
    found = torch.cat([corners.amin(1), corners.amax(1)], 1)
    found[::5, 2:] = found[::5, :2] + 30 * torch.rand(len(found[::5]), 2)  # small ones
    found[1::5] += 40 * (torch.rand(len(found[1::5]), 1) - 0.5)
    found[2::20, 2:] = found[2::20, :2]
    found[3] = torch.tensor([0, 0, width, height])
    found[4] = torch.tensor([-3.0 * width, -height, 4.0 * width, 2.0 * height])
    return found


@pytest.mark.parametrize("size", [(61, 97), (200, 133)])
def test_as_torchvision(device, size):
    masks, boxes = torch.rand(100, 1, CELLS, CELLS, device=device), boxes_in(*size, 100).to(device)
    expected = paste_masks_in_image(masks, boxes, size)
    assert expected.count_nonzero() > 1000
    torch.testing.assert_close(paste(masks, boxes, size), expected, rtol=0, atol=ROUNDING)


def test_none(device):
    assert paste(torch.rand(0, 1, CELLS, CELLS, device=device), torch.rand(0, 4, device=device), (5, 7)).shape == (0, 1, 5, 7)


def test_in_float32_under_autocast(device):
    """Masks are cut at 0.5, where steps of bfloat16 are 1/256."""
    masks, boxes = torch.rand(20, 1, CELLS, CELLS, device=device), boxes_in(61, 97, 20).to(device)
    expected = paste(masks, boxes, (61, 97))
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(paste(masks, boxes, (61, 97)), expected)


def test_detector_uses_it():
    """The same detections as with torchvision's; images of two sizes, scaled on their way in and boxes on their way out."""
    model = detectors.build(
        "maskrcnn_resnet18_fpn", 3, pixels=96, width=0.125, norm="batch", anchors=0.25, detections=20
    ).eval()
    model.roi_heads.score_thresh = 0.0
    images = [torch.rand(3, 64, 96), torch.rand(3, 80, 50)]
    with torch.no_grad():
        found = model(images)
        own = model.transform
        assert type(own) is Transform
        model.transform = GeneralizedRCNNTransform(own.min_size, own.max_size, own.image_mean, own.image_std).eval()
        expected = model(images)
    for ours, theirs, image in zip(found, expected, images, strict=True):
        assert ours["masks"].shape == (20, 1, *image.shape[1:])
        assert ours.keys() == theirs.keys()
        for name in ("boxes", "labels", "scores"):
            assert torch.equal(ours[name], theirs[name])
        torch.testing.assert_close(ours["masks"], theirs["masks"], rtol=0, atol=ROUNDING)
