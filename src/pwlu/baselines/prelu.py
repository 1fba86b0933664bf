"""PReLU, with its channels in any dimension."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pwlu import checks
from pwlu.baselines.arguments import channels_and_dim


class PReLU(nn.PReLU):
    """y = max(0, x) + a min(0, x), with a slope a for each channel: ``nn.PReLU``, for channels in any dimension.

    Args:
        channels: C slopes, one for each entry of dimension ``channel_dim``; 1 means one slope for everything.
        channel_dim: 1 for images (B, C, H, W), -1 for sequences (B, T, C).

    Parameters: ``weight`` (C,), at the start 0.25, as its authors have it (He et al. 2015), and torch.

    Shape: any; output as input. The slopes are rounded to the type of x.
    """

    def __init__(
        self,
        channels: int = 1,
        channel_dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        channels, self.channel_dim = channels_and_dim("PReLU", channels, channel_dim)
        super().__init__(channels, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """y."""
        weight = self.weight.to(x.dtype)
        if self.num_parameters == 1:
            return F.prelu(x, weight)
        checks.check_channels(x, self.num_parameters, self.channel_dim)
        if x.ndim == 1:
            return F.prelu(x[None], weight)[0]
        # torch's kernel goes through memory in the order of x, so that swapping dimensions costs nothing
        return F.prelu(x.transpose(self.channel_dim, 1), weight).transpose(self.channel_dim, 1)

    def extra_repr(self) -> str:
        """For print."""
        return f"channels={self.num_parameters}, channel_dim={self.channel_dim}"
