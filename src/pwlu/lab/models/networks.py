"""Build torchvision's classification networks, with fewer channels or for smaller images if a recipe says so."""

import math
from collections.abc import Callable
from typing import Any

import torchvision
from torch import nn
from torchvision.models.efficientnet import EfficientNet, MBConvConfig
from torchvision.models.resnet import BasicBlock

from pwlu.lab.recipes.settings import UserError

Norm = Callable[[int], nn.Module]


def build(
    network: str, classes: int, channels: int = 3, *, width: float = 1.0, small: bool = False, norm: str = "batch"
) -> nn.Module:
    """Return a network such as "resnet18" with new weights, for images with this number of channels.

    `width`: a factor on the number of channels of all layers. `small`: set the first strides to 1, for images of 32 pixels.
    `norm`: "batch", or "group" for group normalization with up to 8 groups.
    """
    return _BUILDERS[network](network, classes, channels, width, small, normalisation(norm))


def normalisation(norm: str) -> Norm:
    """Return a function that makes a normalization layer for a number of channels."""
    return nn.BatchNorm2d if norm == "batch" else _group_norm


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(math.gcd(channels, 8), channels)


def _convnet(_: str, classes: int, channels: int, width: float, small: bool, norm: Norm) -> nn.Module:
    """Return a network of three convolutions, each with normalization and ReLU, and a linear layer."""
    layers: list[nn.Module] = []
    for out, stride in ((8, 1), (16, 2), (16, 2)):
        out = max(1, round(out * width))
        layers += [nn.Conv2d(channels, out, 3, stride, padding=1, bias=False), norm(out), nn.ReLU()]
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def _resnet(name: str, classes: int, channels: int, width: float, small: bool, norm: Norm) -> nn.Module:
    model = torchvision.models.get_model(name, weights=None, num_classes=classes, norm_layer=norm)
    if width != 1:
        if name != "resnet18":
            raise UserError(f"--width does not work for {name}: leave it out, or choose a resnet18 recipe")
        model.inplanes = max(1, round(64 * width))
        for layer, (planes, stride) in enumerate(((64, 1), (128, 2), (256, 2), (512, 2)), start=1):
            setattr(model, f"layer{layer}", model._make_layer(BasicBlock, max(1, round(planes * width)), 2, stride))
        model.fc = nn.Linear(model.inplanes, classes)
        model.bn1 = norm(max(1, round(64 * width)))
    kernel, stride = (3, 1) if small else (7, 2)
    model.conv1 = nn.Conv2d(channels, model.bn1.weight.numel(), kernel, stride, padding=kernel // 2, bias=False)
    if small:
        model.maxpool = nn.Identity()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):  # torchvision's initialization, also for the replaced layers
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def _mobilenet_v1(_: str, classes: int, channels: int, width: float, small: bool, norm: Norm) -> nn.Module:
    """Return MobileNet (Howard et al., 2017): depthwise and pointwise convolutions in turn, each with norm and ReLU."""
    layers: list[nn.Module] = []

    def add(inputs: int, outputs: int, kernel: int, stride: int, groups: int = 1) -> None:
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        layers.extend([convolution, norm(outputs), nn.ReLU(inplace=True)])

    before = max(1, round(32 * width))
    add(channels, before, 3, 1 if small else 2)
    rows = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]
    for out, stride in rows:
        after = max(1, round(out * width))
        add(before, before, 3, stride, groups=before)
        add(before, after, 1, 1)
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def _mobilenet(name: str, classes: int, channels: int, width: float, small: bool, norm: Norm) -> nn.Module:
    # torchvision's MobileNet-V3 averages batch statistics over 100 steps. That is too long for short training on small images.
    options = {} if norm is nn.BatchNorm2d and not small else {"norm_layer": norm}
    model = torchvision.models.get_model(name, weights=None, num_classes=classes, width_mult=width, **options)
    return _adapt(model, channels, small)


def _efficientnet_b0(_: str, classes: int, channels: int, width: float, small: bool, norm: Norm) -> nn.Module:
    # expansion, kernel, stride, input and output channels, blocks; the last convolution multiplies the channels by four
    rows = [(1, 3, 1, 32, 16, 1), (6, 3, 2, 16, 24, 2), (6, 5, 2, 24, 40, 2), (6, 3, 2, 40, 80, 3)]
    rows += [(6, 5, 1, 80, 112, 3), (6, 5, 2, 112, 192, 4), (6, 3, 1, 192, 320, 1)]
    blocks: list[Any] = [MBConvConfig(*row, width_mult=width) for row in rows]
    return _adapt(EfficientNet(blocks, dropout=0.2, num_classes=classes, norm_layer=norm), channels, small)


def _adapt(model: nn.Module, channels: int, small: bool) -> nn.Module:
    """Set the stride of the first two strided convolutions to 1, for small images."""
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    if small:
        for convolution in [c for c in convolutions if c.stride == (2, 2)][:2]:
            convolution.stride = (1, 1)
    if channels != 3:
        raise ValueError(f"this network needs images with 3 channels, not {channels}. Use a ResNet, which accepts any number")
    return model


_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "convnet": _convnet,
    "resnet18": _resnet,
    "resnet50": _resnet,
    "mobilenet_v1": _mobilenet_v1,
    "mobilenet_v2": _mobilenet,
    "mobilenet_v3_small": _mobilenet,
    "efficientnet_b0": _efficientnet_b0,
}
