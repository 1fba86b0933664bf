"""Variants of PyTorch's ReLU and PReLU that can replace other activations."""

import torch.nn.functional as F
from torch import Tensor, nn

from pwlu.baselines.arguments import Device, DType, check_channels_and_dim
from pwlu.common import checks


class ReLU(nn.ReLU):
    """ReLU that saves its input for the backward pass.

    ``nn.ReLU`` saves its output, so its backward pass fails if the next layer works in place. After an activation that saves
    its input, such as hard swish, a model may have an in-place layer: torchvision's MobileNet-V3 has an in-place dropout.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return max(0, x)."""
        return F.threshold(x, 0.0, 0.0)


class PReLU(nn.PReLU):
    """``nn.PReLU`` with the channels in any dimension: y = max(0, x) + a min(0, x), with one slope a per channel.

    The input may have any shape. The output has the shape and dtype of the input. The slopes are cast to the dtype of the
    input. The parameter ``weight`` (C,) starts at 0.25, as in the paper (He et al. 2015) and in PyTorch.

    Args:
        channels: the number of slopes C, one per entry of dimension ``channel_dim``. Default: 1, one slope for all elements.
        channel_dim: the channel dimension. Default: 1, for images (B, C, H, W); use -1 for sequences (B, T, C).
        device: the device of the parameters.
        dtype: the dtype of the parameters.
    """

    def __init__(self, channels: int = 1, channel_dim: int = 1, device: Device = None, dtype: DType = None) -> None:
        channels, self.channel_dim = check_channels_and_dim("PReLU", channels, channel_dim)
        super().__init__(channels, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return y."""
        weight = self.weight.to(x.dtype)
        if self.num_parameters == 1:
            return F.prelu(x, weight)
        checks.check_channels(x, self.num_parameters, self.channel_dim)
        if x.ndim == 1:
            return F.prelu(x[None], weight)[0]
        # PyTorch's kernel visits elements in the memory order of x, so that transposing costs nothing.
        return F.prelu(x.transpose(self.channel_dim, 1), weight).transpose(self.channel_dim, 1)

    def extra_repr(self) -> str:
        """Return the arguments, for repr."""
        return f"channels={self.num_parameters}, channel_dim={self.channel_dim}"
