"""What the competitors' arguments must be."""

import operator
from typing import Any


def whole_number(owner: str, name: str, value: Any, hint: str, least: int | None = None) -> int:
    """The value as an int; ValueError if it is none, or too small."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        at_least = "" if least is None else f" of at least {least}"
        raise ValueError(f"{owner}: {name} must be a whole number{at_least} ({hint}), not {value!r}")
    return number


def channels_and_dim(owner: str, channels: Any, channel_dim: Any) -> tuple[int, int]:
    """Both, checked."""
    return (
        whole_number(owner, "channels", channels, "the size of channel_dim", 1),
        whole_number(owner, "channel_dim", channel_dim, "1 for images, -1 for the last"),
    )
