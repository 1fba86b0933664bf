"""A ReLU that can replace any other activation."""

import torch.nn.functional as F
from torch import Tensor, nn


class ReLU(nn.ReLU):
    """ReLU that saves its input for the backward pass.

    ``nn.ReLU`` saves its output, so its backward pass fails if the next layer works in place. After an activation that saves
    its input, such as hard swish, a model may have an in-place layer: torchvision's MobileNet-V3 has an in-place dropout.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return max(0, x)."""
        return F.threshold(x, 0.0, 0.0)
