"""A ReLU that can replace any other activation."""

import torch.nn.functional as F
from torch import Tensor, nn


class ReLU(nn.ReLU):
    """ReLU that saves its input for the backward pass.

    ``nn.ReLU`` saves its output, so its backward pass fails if the next layer works in place. Hard swish saves its input, so
    models that use it may have such a layer: torchvision's MobileNet-V3 has an in-place dropout there.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return max(0, x)."""
        return F.threshold(x, 0.0, 0.0)
