"""ReLU for places where another activation stood."""

import torch.nn.functional as F
from torch import Tensor, nn


class ReLU(nn.ReLU):
    """y = max(0, x), keeping x for backward; torch's keeps y, and fails if the next layer writes into it.

    After hard swish, which keeps x, a layer may do that: the dropout of torchvision's MobileNet-V3 does.
    """

    def forward(self, x: Tensor) -> Tensor:
        """y."""
        return F.threshold(x, 0.0, 0.0)
