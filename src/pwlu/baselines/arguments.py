"""The arguments that the baselines share."""

from typing import Any

import torch
from torch import nn

from pwlu.common.checks import check_integer

Device = torch.device | str | None
DType = torch.dtype | None


def check_channels_and_dim(owner: str, channels: Any, channel_dim: Any) -> tuple[int, int]:
    """Check that both arguments are integers, and return them."""
    return (
        check_integer(owner, "channels", channels, "the size of channel_dim", 1),
        check_integer(owner, "channel_dim", channel_dim, "1 for images, -1 for the last dimension"),
    )


class ChannelActivation(nn.Module):
    """An activation with ``channels`` along ``channel_dim``."""

    def __init__(self, channels: int, channel_dim: int) -> None:
        super().__init__()
        self.channels, self.channel_dim = check_channels_and_dim(type(self).__name__, channels, channel_dim)

    def extra_repr(self) -> str:
        """Return the arguments, for repr."""
        return f"channels={self.channels}, channel_dim={self.channel_dim}"
