"""What the tests of convert_ share: a module of given children, images, and a report in short."""

import torch
from torch import nn

import pwlu

# No two sizes are the same, so that a wrong dimension gives a wrong number of channels.
IMAGES = torch.randn(2, 3, 7, 5, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """The children given by name; a subclass has the forward."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def conv(inputs=3, outputs=4):
    return nn.Conv2d(inputs, outputs, 1)


def converted(model, sample=IMAGES, **options):
    """Convert; the channels of every site that was converted, by name, in order."""
    return {site.name: site.channels for site in pwlu.convert_(model, sample, **options).converted}


def reasons(model, sample=IMAGES, action="impossible", **options):
    """Convert; why the sites with that action were not converted."""
    return [site.reason for site in pwlu.convert_(model, sample, **options).of(action)]


def units(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, pwlu.PWLU)}
