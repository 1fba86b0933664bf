"""What the competitors' arguments must be."""

from typing import Any

from pwlu.checks import whole_number


def channels_and_dim(owner: str, channels: Any, channel_dim: Any) -> tuple[int, int]:
    """Both, checked."""
    return (
        whole_number(owner, "channels", channels, "the size of channel_dim", 1),
        whole_number(owner, "channel_dim", channel_dim, "1 for images, -1 for the last"),
    )
