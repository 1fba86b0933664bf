"""The module: a learnable activation."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pwlu import functional, reference
from pwlu.starts import find_start, fit_bounds


class PWLU(nn.Module):
    r"""Piecewise Linear Unit: a learnable piecewise linear activation, one function a channel or one for all.

    See :func:`pwlu.functional.pwlu` for the formula.

    Args:
        channels: C functions, one for each entry of dimension ``channel_dim``; 1 means one function for everything.
        intervals: N; the paper recommends 8 to 16.
        bounds: where the N intervals begin and end. Where the start has a kink (ReLU at 0), they move a little, by up to half
            an interval (one, if there are two kinks as in ReLU6), so that a knot lies on it.
        init: the function to start as: a name such as ``"relu"``, ``"silu"``, ``"identity"`` (see
            ``pwlu.starts.STARTS``) or a function from tensor to tensor.
        channel_dim: 1 for images (B, C, H, W), -1 for sequences (B, T, C).

    Parameters: ``left`` (C,), ``right`` (C,), ``heights`` (C, N+1), ``left_slope`` (C,), ``right_slope`` (C,).

    Shape: any; output as input, in dtype and memory layout too.

    Example::

        act = pwlu.PWLU(channels=64)
        y = act(torch.randn(8, 64, 32, 32))  # equals relu(x) until it is trained
    """

    def __init__(
        self,
        channels: int = 1,
        intervals: int = 16,
        bounds: tuple[float, float] = (-3.0, 3.0),
        init: str | Callable[[Tensor], Tensor] = "relu",
        channel_dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels = _whole_number("channels", channels, "1 for one function for everything, or the size of channel_dim", 1)
        self.intervals = _whole_number("intervals", intervals, "8 to 16 work well", 1)
        self.channel_dim = _whole_number("channel_dim", channel_dim, "1 for images, -1 for the last")
        self.init = init
        self.bounds = fit_bounds(_check_bounds(bounds, dtype), self.intervals, find_start(init).kinks, init)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.left = nn.Parameter(torch.empty(self.channels, **options))
        self.right = nn.Parameter(torch.empty(self.channels, **options))
        self.heights = nn.Parameter(torch.empty(self.channels, self.intervals + 1, **options))
        self.left_slope = nn.Parameter(torch.empty(self.channels, **options))
        self.right_slope = nn.Parameter(torch.empty(self.channels, **options))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the start: ``init`` between ``bounds``."""
        left, right = (torch.full((self.channels,), b, dtype=torch.float64, device="cpu") for b in self.bounds)
        values = reference.start(find_start(self.init).function, left, right, self.intervals)
        for parameter, value in zip(self.unit_parameters(), (left, right, *values), strict=True):
            parameter.copy_(value)

    def unit_parameters(self) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter, nn.Parameter, nn.Parameter]:
        """left, right, heights, left_slope, right_slope: the order in which functions take them."""
        return self.left, self.right, self.heights, self.left_slope, self.right_slope

    def forward(self, x: Tensor) -> Tensor:
        return functional.pwlu(x, self.left, self.right, self.heights, self.left_slope, self.right_slope, self.channel_dim)

    def extra_repr(self) -> str:
        init = self.init if isinstance(self.init, str) else getattr(self.init, "__name__", repr(self.init))
        left, right = self.bounds
        return (
            f"channels={self.channels}, intervals={self.intervals}, bounds=({left:g}, {right:g}), init={init!r}, "
            f"channel_dim={self.channel_dim}"
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if any(prefix + name in state_dict for name in ("inv_step", "slopes", "offsets")):
            *_, error_msgs = rest
            error_msgs.append(
                f"{prefix or 'the state'} holds a fused PWLU, this model an unfused one. The parameters cannot be had back "
                "from the tables: load the weights saved before pwlu.fuse_, or fuse this model first: pwlu.fuse_(model)."
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _whole_number(name: str, value: Any, hint: str, least: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        at_least = "" if least is None else f" of at least {least}"
        raise ValueError(f"PWLU: {name} must be a whole number{at_least} ({hint}), not {value!r}")
    return number


def _check_bounds(bounds: Any, dtype: torch.dtype | None) -> tuple[float, float]:
    try:
        left, right = (float(b) for b in bounds)
    except (TypeError, ValueError):
        raise ValueError(f"PWLU: bounds must be two numbers such as (-3.0, 3.0), not {bounds!r}") from None
    ends = torch.tensor([left, right], dtype=dtype, device="cpu")  # as they will be stored
    if not (ends.diff().isfinite().item() and ends[0] < ends[1]):
        raise ValueError(f"PWLU: bounds must be finite with left < right, such as (-3.0, 3.0), not ({left:g}, {right:g})")
    return left, right
