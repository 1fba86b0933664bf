"""Funnel ReLU."""

from typing import Any

import torch
from torch import Tensor, nn

from pwlu.baselines.arguments import ChannelActivation, Device, DType

_MAX_GROUPS, _MIN_CHANNELS = 32, 8  # limits for group norm: 32 groups of 8, as in detection heads with 256 channels


class FReLU(ChannelActivation):
    """Funnel ReLU (Ma et al. 2020, arXiv 2007.11824): a ReLU whose threshold depends on a window around each pixel::

        y = max(x, T(x)),  T = norm of a depthwise 3 x 3 convolution

    The input has four dimensions. The output has the shape and dtype of the input.

    The parameters are ``conv.weight`` (C, 1, 3, 3), ``norm.weight`` (C,) and ``norm.bias`` (C,). The first is initialized
    from a normal distribution with mean 0 and standard deviation 0.01, as the authors advise; the others to 1 and 0. There is
    no ``conv.bias``, because the norm has a bias.

    With group norm, ``norm.weight`` is initialized to 0.1. Group norm is meant for detection heads without norms, whose inputs
    are small at first. With a weight of 1, T would dominate these inputs: gradients were a hundred times as large, and a
    RetinaNet diverged.

    Args:
        channels: the number of channels C of the input.
        channel_dim: the channel dimension. Default: 1, for images (B, C, H, W); use -1 for (B, H, W, C).
        device: the device of the parameters.
        dtype: the dtype of the parameters.
        norm: "batch", as the authors use it, or "group". Default: "batch". Use "group" for a module that runs several times per
            forward pass, such as a head on five levels of a pyramid. In training, batch norm would normalize each level by its
            own statistics, but in evaluation all levels by their mixed running statistics. Group norm has no such difference.
    """

    def __init__(
        self, channels: int, channel_dim: int = 1, *, device: Device = None, dtype: DType = None, norm: str = "batch"
    ) -> None:
        super().__init__(channels, channel_dim)
        if norm not in ("batch", "group"):
            raise ValueError(f"FReLU: norm must be 'batch', or 'group' if it runs several times per forward pass, not {norm!r}")
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False, device=device, dtype=dtype)
        self.norm: Any  # BatchNorm2d or GroupNorm; users may convert it to SyncBatchNorm
        if norm == "batch":
            self.norm = nn.BatchNorm2d(channels, device=device, dtype=dtype)
        else:
            self.norm = _GroupNorm(_groups(channels), channels, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters, and reset the running statistics of the norm."""
        nn.init.normal_(self.conv.weight, std=0.01)
        self.norm.reset_parameters()
        if isinstance(self.norm, nn.GroupNorm):
            nn.init.constant_(self.norm.weight, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return y."""
        if x.ndim != 4 or x.shape[self.channel_dim] != self.channels:
            raise ValueError(
                f"FReLU: x must have four dimensions, with {self.channels} channels in dimension {self.channel_dim}, not the "
                f"shape {tuple(x.shape)}. If x is not an image, write nn.ReLU()"
            )
        threshold = self.norm(self.conv(x.movedim(self.channel_dim, 1))).movedim(1, self.channel_dim)
        # Pass x as the first operand, so that y has the memory layout of x. Group norm does not keep it on GPUs.
        if torch.is_grad_enabled():  # torch.where saves only a mask for the backward pass, not x and T(x)
            return torch.where(x >= threshold, x, threshold)
        return torch.maximum(x, threshold)

    def extra_repr(self) -> str:
        """Return the arguments, for repr."""
        return super().extra_repr() + (", norm='group'" if isinstance(self.norm, nn.GroupNorm) else "")


class _GroupNorm(nn.GroupNorm):
    """Group norm that keeps the dtype of its input under autocast, like batch norm, and accepts one value per group."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.group_norm(x, self.num_groups, self.weight, self.bias, self.eps).to(x.dtype)


def _groups(channels: int) -> int:
    """Return the number of groups, at most 32, of equal size.

    A group has at least 8 channels, so that it can be normalized even if the image has one pixel.
    """
    limit = max(1, min(_MAX_GROUPS, channels // _MIN_CHANNELS))
    return next(groups for groups in range(limit, 0, -1) if channels % groups == 0)
