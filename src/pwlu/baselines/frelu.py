"""Funnel ReLU."""

from typing import Any

import torch
from torch import Tensor, nn

from pwlu.baselines.arguments import channels_and_dim

_MOST_GROUPS, _LEAST_CHANNELS = 32, 8  # group norm: as in detectors' heads of 256 channels


class FReLU(nn.Module):
    r"""Funnel ReLU (Ma et al. 2020, arXiv 2007.11824): ReLU whose threshold is what a window around each pixel says.

    .. math:: y = \max(x, T(x)), \qquad T = \text{norm of a depthwise } 3 \times 3 \text{ convolution}

    Args:
        channels: C, of x.
        channel_dim: 1 for images (B, C, H, W), -1 for (B, H, W, C).
        norm: "batch", as its authors have it; or "group", for a place that runs several times in a pass, as in a head on five
            levels of a pyramid. There a batch norm normalises each level by itself in training, and all of them by one mixture
            of their statistics in evaluation, which is another function. Group norm is the same in both.

    Parameters: ``conv.weight`` (C, 1, 3, 3), which starts normal with mean 0 and deviation 0.01, as its authors advise;
    ``norm.weight`` and ``norm.bias`` (C,), which start as 1 and 0. There is no ``conv.bias``: the norm has one. With group norm
    the weights start as 0.1: the heads it is for have no norm of their own and small inputs at first. Of size 1, T would be all
    that is left of them, gradients would be a hundred times as large, and a RetinaNet diverges.

    Shape: four-dimensional, output as input.
    """

    def __init__(
        self,
        channels: int,
        channel_dim: int = 1,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        self.channels, self.channel_dim = channels_and_dim("FReLU", channels, channel_dim)
        if norm not in ("batch", "group"):
            raise ValueError(f"FReLU: norm must be 'batch', or 'group' where it runs several times in a pass, not {norm!r}")
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False, device=device, dtype=dtype)
        self.norm: Any  # one of them, or SyncBatchNorm later
        if norm == "batch":
            self.norm = nn.BatchNorm2d(channels, device=device, dtype=dtype)
        else:
            self.norm = _GroupNorm(_groups(channels), channels, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the windows anew, and forget the statistics."""
        nn.init.normal_(self.conv.weight, std=0.01)
        self.norm.reset_parameters()
        if isinstance(self.norm, nn.GroupNorm):
            nn.init.constant_(self.norm.weight, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """y."""
        if x.ndim != 4 or x.shape[self.channel_dim] != self.channels:
            raise ValueError(
                f"FReLU: x must be a map with {self.channels} channels in dimension {self.channel_dim} of four, not of shape "
                f"{tuple(x.shape)}. Where there is no map, write nn.ReLU()"
            )
        threshold = self.norm(self.conv(x.movedim(self.channel_dim, 1))).movedim(1, self.channel_dim)
        # x comes first: y is then in the order of x in memory, which group norm does not keep on GPUs
        if torch.is_grad_enabled():  # so that for this step backward needs a mask alone, not x and T(x)
            return torch.where(x >= threshold, x, threshold)
        return torch.maximum(x, threshold)

    def extra_repr(self) -> str:
        """For print."""
        norm = ", norm='group'" if isinstance(self.norm, nn.GroupNorm) else ""
        return f"channels={self.channels}, channel_dim={self.channel_dim}{norm}"


class _GroupNorm(nn.GroupNorm):
    """torch's, in the type of its input under autocast too, as batch norm is, and without its error for a single number."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.group_norm(x, self.num_groups, self.weight, self.bias, self.eps).to(x.dtype)


def _groups(channels: int) -> int:
    """Up to 32 of equal size, each of 8 channels at least, so that there is something to normalise in a map of one pixel."""
    most = max(1, min(_MOST_GROUPS, channels // _LEAST_CHANNELS))
    return next(groups for groups in range(most, 0, -1) if channels % groups == 0)
