"""Dynamic ReLU, and ReLU with squeeze-and-excitation."""

import torch
from torch import Tensor, nn

from pwlu import reference
from pwlu.baselines.arguments import ChannelActivation, Device, DType
from pwlu.units.dynamic import DynamicPWLU
from pwlu.units.squeeze import Squeeze, along_samples


class DyReLU(ChannelActivation):
    """Dynamic ReLU B (Chen et al. 2020, arXiv 2003.10027), the larger of two lines per sample and channel::

        y = max over k = 1, 2 of (a_k x + b_k),   a = (1, 0) + 2 sigmoid(t) - 1,   b = (2 sigmoid(u) - 1) / 2

    A small network computes t and u from the means of each sample: W_2 relu(W_1 p + b_1) + b_2. Its hidden layer has C / 8
    units, at least 4.

    The input is (B, ...), with the samples in dimension 0. The output has the shape and dtype of the input. The computation
    runs in float32 (float64 for float64). W_2 and b_2 start at 0, so that y starts as ReLU.

    Args:
        channels: the number of channels C of the input. Default: 1, one function per sample.
        channel_dim: the channel dimension. Default: 1, for images (B, C, H, W); use -1 for sequences (B, T, C).
        reduction: the hidden layer has C / reduction units. Default: 8.
        device: the device of the parameters.
        dtype: the dtype of the parameters.
    """

    def __init__(
        self, channels: int = 1, channel_dim: int = 1, *, reduction: int = 8, device: Device = None, dtype: DType = None
    ) -> None:
        super().__init__(channels, channel_dim)
        hidden = max(4, self.channels // reduction)
        self.squeeze = Squeeze(self.channels, hidden, 4 * self.channels, self.channel_dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters."""
        self.squeeze.reset_parameters()
        nn.init.zeros_(self.squeeze.second)

    def forward(self, x: Tensor) -> Tensor:
        """Return y."""
        shifts = 2 * torch.sigmoid(self.squeeze(x)) - 1
        a1, a2, b1, b2 = (along_samples(s, x, self.channel_dim) for s in shifts.chunk(4, 1))
        value = x.to(reference.compute_dtype(x))
        return torch.maximum((1 + a1) * value + b1 / 2, a2 * value + b2 / 2).to(x.dtype)


class SEReLU(ChannelActivation):
    """ReLU followed by squeeze-and-excitation (Hu et al. 2018, arXiv 1709.01507), to compare with other dynamic functions::

        y = s relu(x),   s = sigmoid(W_2 relu(W_1 p + b_1) + b_2),   p = mean of each sample per channel

    The input is (B, ...), with the samples in dimension 0. The output has the shape and dtype of the input.

    Args:
        channels: the number of channels C of the input. Default: 1, one factor per sample.
        channel_dim: the channel dimension. Default: 1, for images (B, C, H, W); use -1 for sequences (B, T, C).
        hidden: the size of the hidden layer. Default: None, which gives about as many parameters as a
            :class:`pwlu.DynamicPWLU` with default arguments has.
        device: the device of the parameters.
        dtype: the dtype of the parameters.
    """

    def __init__(
        self, channels: int = 1, channel_dim: int = 1, *, hidden: int | None = None, device: Device = None, dtype: DType = None
    ) -> None:
        super().__init__(channels, channel_dim)
        if hidden is None:
            like = DynamicPWLU(self.channels, device="meta")
            hidden = max(1, round((sum(p.numel() for p in like.parameters()) - self.channels) / (2 * self.channels + 1)))
        self.squeeze = Squeeze(self.channels, hidden, self.channels, self.channel_dim, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Initialize the parameters."""
        self.squeeze.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Return y."""
        scale = along_samples(torch.sigmoid(self.squeeze(x)), x, self.channel_dim)
        return (x.to(scale.dtype).clamp(min=0) * scale).to(x.dtype)
