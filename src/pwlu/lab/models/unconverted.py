"""The networks of recipes as they are before their conversion, and samples to convert them with."""

from typing import Any

import torch
from torch import nn

from pwlu.lab.models import detectors, networks
from pwlu.lab.recipes.catalog import find
from pwlu.lab.recipes.settings import Settings


def network(settings: Settings, classes: int, channels: int) -> nn.Module:
    """Return the network of a recipe with new weights and its original activations."""
    recipe, width, norm = find(settings.recipe), settings.width, settings.norm
    if not recipe.detects:
        return networks.build(recipe.network, classes, channels, width=width, small=recipe.small, norm=norm)
    limits: dict[str, Any] = {"anchors": recipe.anchors, "detections": recipe.detections}
    return detectors.build(recipe.network, classes, pixels=settings.pixels, width=width, norm=norm, **limits)


def sample(settings: Settings, channels: int) -> Any:
    """Return a sample input of the network, for :func:`pwlu.convert_`."""
    if find(settings.recipe).detects:
        return detectors.sample(find(settings.recipe).network, settings.pixels)
    return torch.zeros(2, channels, settings.pixels, settings.pixels)
