"""Argument checks that the baselines share."""

from typing import Any

from pwlu.common.checks import check_integer


def check_channels_and_dim(owner: str, channels: Any, channel_dim: Any) -> tuple[int, int]:
    """Check that both arguments are integers, and return them."""
    return (
        check_integer(owner, "channels", channels, "the size of channel_dim", 1),
        check_integer(owner, "channel_dim", channel_dim, "1 for images, -1 for the last dimension"),
    )
