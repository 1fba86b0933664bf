"""Funnel ReLU."""

import torch
from torch import Tensor, nn

from pwlu.baselines.arguments import channels_and_dim


class FReLU(nn.Module):
    r"""Funnel ReLU (Ma et al. 2020, arXiv 2007.11824): ReLU whose threshold is what a window around each pixel says.

    .. math:: y = \max(x, T(x)), \qquad T = \text{batch norm of a depthwise } 3 \times 3 \text{ convolution}

    Args:
        channels: C, of x.
        channel_dim: 1 for images (B, C, H, W), -1 for (B, H, W, C).

    Parameters: ``conv.weight`` (C, 1, 3, 3), which starts normal with mean 0 and deviation 0.01, as its authors advise;
    ``norm.weight`` and ``norm.bias`` (C,), which start as 1 and 0. There is no ``conv.bias``: the batch norm would take it out.

    Shape: four-dimensional, output as input.
    """

    def __init__(
        self,
        channels: int,
        channel_dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels, self.channel_dim = channels_and_dim("FReLU", channels, channel_dim)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False, device=device, dtype=dtype)
        self.norm = nn.BatchNorm2d(channels, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the windows anew, and forget the statistics."""
        nn.init.normal_(self.conv.weight, std=0.01)
        self.norm.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """y."""
        if x.ndim != 4 or x.shape[self.channel_dim] != self.channels:
            raise ValueError(
                f"FReLU: x must be a map with {self.channels} channels in dimension {self.channel_dim} of four, not of shape "
                f"{tuple(x.shape)}. Where there is no map, write nn.ReLU()"
            )
        threshold = self.norm(self.conv(x.movedim(self.channel_dim, 1))).movedim(1, self.channel_dim)
        if torch.is_grad_enabled():  # so that for this step backward needs a mask alone, not x and T(x)
            return torch.where(threshold <= x, x, threshold)
        return torch.maximum(x, threshold)

    def extra_repr(self) -> str:
        """For print."""
        return f"channels={self.channels}, channel_dim={self.channel_dim}"
