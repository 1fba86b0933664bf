"""Build torchvision's Mask R-CNN and RetinaNet on ResNets with feature pyramids, with new weights.

A normalization layer follows every convolution of the ResNet and of the feature pyramid, except in the extra levels P6 and P7.
Batch norms are trained with the network and synchronized over all GPUs; fine-tuned detectors freeze them instead. As in
torchvision, heads have no normalization. It would mix the statistics of the five levels on which a head runs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

from pwlu.lab.models import networks
from pwlu.lab.models.mask_pasting import Transform

SIZES = (32, 64, 128, 256, 512)  # the sizes of anchors in pixels of the resized image, from the finest level to the coarsest
RATIOS = (0.5, 1.0, 2.0)


def sample(network: str, pixels: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return a sample for :func:`pwlu.convert_`: two images with one object each, because batch norm needs several values."""
    inside = slice(pixels // 4, pixels // 2)
    mask = torch.zeros(1, pixels, pixels, dtype=torch.uint8)
    mask[:, inside, inside] = 1
    box = torch.tensor([[inside.start, inside.start, inside.stop, inside.stop]], dtype=torch.float32)
    target = {"boxes": box, "labels": torch.tensor([first_label(network)]), "masks": mask}
    return [torch.rand(3, pixels, pixels) for _ in range(2)], [target, target]


def first_label(network: str) -> int:
    """Return the label of the first class: 1 for Mask R-CNN, which uses 0 for the background, else 0."""
    return 1 if network.startswith("maskrcnn") else 0


def build(network: str, classes: int, *, pixels: int, width: float, norm: str, anchors: float, detections: int) -> nn.Module:
    """Return a detector such as "maskrcnn_resnet50_fpn" with new weights.

    The labels of Mask R-CNN start at 1, those of RetinaNet at 0. The shorter side of resized images has `pixels` pixels. The
    longer side is at most 5/3 of it, as in 800 x 1333. `width`: a factor on the number of channels of all layers. `anchors`: a
    factor on the sizes of anchors. `detections`: the largest number of detections per image.
    """
    detector, body = network.removesuffix("_fpn").split("_")
    sizes = tuple(round(size * anchors) for size in SIZES)
    common: dict[str, Any] = {"min_size": pixels, "max_size": round(pixels * 5 / 3)}
    if detector == "retinanet":
        backbone = _backbone(body, width, norm, p6_p7=True)
        thirds = tuple(tuple(int(size * 2 ** (k / 3)) for k in range(3)) for size in sizes)
        generator = AnchorGenerator(thirds, (RATIOS,) * len(sizes))
        return RetinaNet(backbone, classes, anchor_generator=generator, detections_per_img=detections, **common)
    backbone = _backbone(body, width, norm, p6_p7=False)
    channels, hidden = backbone.out_channels, max(1, round(1024 * width))
    model = MaskRCNN(
        backbone,
        rpn_anchor_generator=AnchorGenerator(tuple((size,) for size in sizes), (RATIOS,) * len(sizes)),
        box_head=TwoMLPHead(channels * 7 * 7, hidden),
        box_predictor=FastRCNNPredictor(hidden, classes + 1),
        box_detections_per_img=detections,
        mask_head=MaskRCNNHeads(channels, (channels,) * 4, 1),
        mask_predictor=MaskRCNNPredictor(channels, channels, classes + 1),
        **common,
    )
    original = model.transform
    model.transform = Transform(**common, image_mean=original.image_mean, image_std=original.image_std)
    return model


def _backbone(body: str, width: float, norm: str, p6_p7: bool) -> Any:
    """Return a ResNet without its classifier, with a feature pyramid on its last four maps, or on three and P6 and P7."""
    resnet: Any = networks.build(body, 1, width=width, norm=norm)
    last_blocks = [getattr(resnet, f"layer{k}")[-1] for k in range(1, 5)]
    channels = [(block.conv3 if hasattr(block, "conv3") else block.conv2).out_channels for block in last_blocks]
    first, out = (2 if p6_p7 else 1), max(1, round(256 * width))
    return BackboneWithFPN(
        resnet,
        {f"layer{k}": str(k - first) for k in range(first, 5)},
        channels[first - 1 :],
        out,
        LastLevelP6P7(out, out) if p6_p7 else LastLevelMaxPool(),
        networks.normalisation(norm),
    )
