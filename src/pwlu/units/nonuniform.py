"""The module :class:`NonUniformPWLU`, whose knots learn."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pwlu import ops, reference
from pwlu.common import checks
from pwlu.initial_functions import InitialFunction, find_initial_function
from pwlu.ops import nonuniform as nonuniform_ops
from pwlu.reference import nonuniform as nonuniform_reference
from pwlu.units.deferred_norm import Deferred
from pwlu.units.module import PWLU, block_view, exact_blocks
from pwlu.units.sharding import full_values

_MAX_INTERVALS = 512  # the most intervals that to_uniform tries
_SHOWN_INTERVALS = 128  # of the functions in figures and reports


class ToUniform(NamedTuple):
    """The result of :meth:`NonUniformPWLU.to_uniform`.

    Attributes:
        unit: the :class:`pwlu.PWLU`.
        error: the largest absolute difference between the two functions, over all channels.
        relative: the largest difference divided by the range max Y - min Y of its channel.
    """

    unit: PWLU
    error: float
    relative: float


class NonUniformPWLU(PWLU):
    """A PWLU whose knots are not equally spaced and learn: N intervals of widths exp(w_0), ..., exp(w_{N-1})::

        x <  b_0              y = (x - b_0) K_L + Y_0
        b_i <= x < b_{i+1}    y = (x - b_i) (Y_{i+1} - Y_i)/(b_{i+1} - b_i) + Y_i
        x >= b_N              y = (x - b_N) K_R + Y_N

    The knots b_k = b_0 + exp(w_0) + ... + exp(w_{k-1}) are in order for all values of the parameters. See
    :mod:`pwlu.reference.nonuniform`. The input may have any shape. The output has the shape, dtype and memory layout of the
    input.

    The module has one parameter, ``weight`` (C (2N + 4),). Its blocks are views of it: ``left`` (C,), which is b_0;
    ``log_widths`` (C, N), which are w; ``heights`` (C, N+1), ``left_slope`` (C,) and ``right_slope`` (C,). Read and write them
    as those of :class:`PWLU`. ``knots`` (C, N+1) and ``right`` (C,) are computed from them. A new unit has equally spaced knots
    and equals a PWLU. So does a unit right after realignment.

    Args:
        channels: the number of functions C, as for :class:`PWLU`. Default: 1, one function for all elements.
        intervals: the number of intervals N. Default: 4.
        bounds: the first and last knot, as for :class:`PWLU`. Default: (-3, 3).
        init: the initial function, as for :class:`PWLU`. Default: ``"relu"``.
        channel_dim: the channel dimension of the input. Default: 1, for images (B, C, H, W); use -1 for sequences (B, T, C).
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Raises:
        ValueError: if an argument is not valid, or no knots can lie on the kinks of the initial function.

    Example::

        act = pwlu.NonUniformPWLU(channels=64)
        y = act(torch.randn(8, 64, 32, 32))  # equals relu(x) before training, up to rounding
    """

    _layout: Any = nonuniform_reference
    _version = 1
    log_widths = block_view("log_widths", "(C, N)")

    def __init__(
        self,
        channels: int = 1,
        intervals: int = 4,
        bounds: tuple[float, float] = (-3.0, 3.0),
        *,
        init: str | Callable[[Tensor], Tensor] | InitialFunction = "relu",
        channel_dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, intervals, bounds, init=init, channel_dim=channel_dim, device=device, dtype=dtype)

    @property
    def knots(self) -> Tensor:
        """Return the knots (C, N+1), computed from ``left`` and ``log_widths`` in the compute dtype."""
        blocks = self.blocks()
        return nonuniform_reference.knots_of(blocks.left, blocks.log_widths)

    @knots.setter
    def knots(self, value: Any) -> None:
        _refuse_to_write("knots")

    @property
    def right(self) -> Tensor:
        """Return the last knots (C,), computed from ``left`` and ``log_widths``."""
        return self.knots[:, -1]

    @right.setter
    def right(self, value: Any) -> None:
        _refuse_to_write("right")

    def initial_weight(self) -> Tensor:
        """Return the initial weight, ``init`` between ``bounds``, in float64 on the CPU."""
        return nonuniform_reference.pack(*from_uniform_blocks(self.initial_blocks()))

    def start_between(self, left: Tensor, right: Tensor, kept: Tensor) -> nonuniform_reference.Blocks:
        """Return the blocks of the initial function between new bounds, in float64 on the CPU. Realignment uses them.

        `left` and `right` are the first and last knots (C,). Intervals that the mask `kept` (C, N) marks keep their widths.
        """
        widths = torch.where(kept, exact_blocks(self).log_widths, ((right - left) / self.intervals).log()[:, None])
        knots = nonuniform_reference.knots_of(left, widths)
        function = find_initial_function(self.init).function
        outer = torch.cat([2 * knots[:, :1] - knots[:, 1:2], knots, 2 * knots[:, -1:] - knots[:, -2:-1]], 1)
        values = function(outer)
        slopes = values.diff(dim=1) / outer.diff(dim=1)
        return nonuniform_reference.Blocks(left, widths, values[:, 1:-1], slopes[:, 0], slopes[:, -1])

    def forward(self, x: Tensor) -> Tensor:
        """Return y."""
        if not isinstance(x, Tensor) and isinstance(x, Deferred):
            x = x.value_for("NonUniformPWLU (its knots are not equally spaced)")
        if not isinstance(x, Tensor):
            checks.check_input(x)
        weight = self.effective_weight()
        statistics: Any = self._modules["statistics"]
        if statistics.phase == 1 and self.training:
            ops.moments(x, self.channel_dim, statistics.pool)
            # The gradient is exactly 0, not None: DistributedDataParallel waits for it.
            weight = weight.detach() + weight[:0].sum()
        packed = nonuniform_reference.to_knots(weight, self.intervals)
        return apply(x, packed, self.intervals, self.channel_dim)

    @classmethod
    @torch.no_grad()
    def from_uniform(cls, unit: PWLU) -> "NonUniformPWLU":
        """Return a non-uniform PWLU with the functions and input statistics of a PWLU.

        The functions are equal up to the rounding of the knots. Factors of :meth:`PWLU.scale_gradients` are not kept, because
        the blocks differ.

        Args:
            unit: the PWLU. Its bounds must not have crossed.

        Raises:
            TypeError: if it is not a PWLU.
            ValueError: if bounds have crossed, because a crossed interval has no positive width; or if it has a constraint.

        Example::

            act = pwlu.NonUniformPWLU.from_uniform(pwlu.PWLU(channels=64, intervals=16))
        """
        if type(unit) is not PWLU:
            raise TypeError(
                f"NonUniformPWLU.from_uniform: expected a pwlu.PWLU, not {type(unit).__name__}. To create a unit without a "
                "PWLU, write pwlu.NonUniformPWLU(channels=...)"
            )
        if unit.constraint is not None:
            raise ValueError(
                f"NonUniformPWLU.from_uniform: the PWLU is constrained to be {unit.constraint}, and the projections need "
                "equally spaced knots. Remove the constraint first: pwlu.constrain_(act)"
            )
        blocks = exact_blocks(unit)
        if not bool((blocks.left < blocks.right).all()):
            raise ValueError(
                f"NonUniformPWLU.from_uniform: the bounds must satisfy left < right, but channel "
                f"{int((blocks.left >= blocks.right).nonzero()[0])} has crossed bounds. Assign other bounds first: "
                "act.assign(right=...)"
            )
        new: NonUniformPWLU = _converted(unit, cls, unit.intervals, from_uniform_blocks(blocks))
        new.weight.requires_grad_(unit.weight.requires_grad)
        return new

    @torch.no_grad()
    def to_uniform(self, tolerance: float = 1e-3) -> ToUniform:
        """Return a PWLU with nearly the same functions, with as few intervals as the tolerance allows.

        The PWLU has the same first and last knot, and the same outer slopes. In between, it interpolates the functions at its
        own knots. So the error is 0 left of the first and right of the last knot.
        Factors of :meth:`PWLU.scale_gradients` are not kept, because the blocks differ.

        Args:
            tolerance: the largest error, as a share of the range max Y - min Y of the channel. Default: 1e-3.

        Returns:
            The PWLU, the largest error, and the largest error relative to the range.

        Raises:
            ValueError: if ``tolerance`` is not between 0 and 1, 512 intervals are not enough, or the weight is not finite.

        Example::

            unit, error, relative = pwlu.NonUniformPWLU(channels=64).to_uniform(1e-3)
        """
        checks.check_share("NonUniformPWLU.to_uniform", tolerance)
        given = exact_knots(self)
        if not all(bool(block.isfinite().all()) for block in given):
            raise ValueError(
                "NonUniformPWLU.to_uniform: the weight has values that are not finite. Write finite ones with assign"
            )
        ranges = given.heights.amax(1) - given.heights.amin(1)
        error = relative = torch.zeros_like(ranges)
        for intervals in range(1, _MAX_INTERVALS + 1):
            blocks = _interpolated(given, intervals)
            # Both functions are linear between the knots of either, so the largest error is at one of the old knots.
            error = (reference.forward(given.knots, *blocks, channel_dim=0) - given.heights).abs().amax(1)
            relative = torch.where(error == 0, 0.0, error / ranges)
            if bool((relative <= tolerance).all()):
                break
        else:
            raise ValueError(
                f"NonUniformPWLU.to_uniform: {_MAX_INTERVALS} equal intervals have an error of {float(relative.max()):.2g} of "
                f"the range, more than tolerance={tolerance:g}. Write a larger tolerance"
            )
        unit = _converted(self, PWLU, blocks.heights.shape[1] - 1, blocks)
        return ToUniform(unit, float(error.max()), float(relative.max()))


def exact_knots(unit: NonUniformPWLU) -> nonuniform_reference.Knots:
    """Return knots, heights and outer slopes of a unit in float64 on the CPU, detached from autograd."""
    weight = full_values(unit.weight).to("cpu", torch.float64)
    return nonuniform_reference.unpack_knots(nonuniform_reference.to_knots(weight, unit.intervals), unit.intervals)


def _converted(unit: PWLU, kind: type[PWLU], intervals: int, blocks: Any) -> Any:
    """Return a unit of another kind with these blocks and the settings and statistics of a unit."""
    options: dict[str, Any] = {"channel_dim": unit.channel_dim, "device": unit.weight.device, "dtype": unit.weight.dtype}
    new = kind(unit.channels, intervals, init="identity", **options)
    new.init, new.bounds = unit.init, unit.bounds
    new.assign(**blocks._asdict())
    new.statistics.load_state_dict(unit.statistics.state_dict())
    return new.train(unit.training)


def _refuse_to_write(name: str) -> None:
    raise AttributeError(
        f"{name} is computed from left and log_widths and cannot be replaced. Write act.assign(left=..., log_widths=...)"
    )


def blocks_to_show(unit: PWLU) -> Any:
    """Return the blocks of a unit. For a :class:`NonUniformPWLU`, they are those of a PWLU that interpolates its functions."""
    return _interpolated(exact_knots(unit), _SHOWN_INTERVALS) if isinstance(unit, NonUniformPWLU) else unit.blocks()


def _interpolated(given: nonuniform_reference.Knots, intervals: int) -> reference.Blocks:
    """Return the blocks of a PWLU that has the values of functions at equally spaced knots."""
    left, right = given.knots[:, 0], given.knots[:, -1]
    x = left[:, None] + (right - left)[:, None] * torch.linspace(0, 1, intervals + 1, dtype=torch.float64, device="cpu")
    x[:, -1] = right
    heights = nonuniform_reference.forward(x, *given, channel_dim=0)
    heights[:, -1] = given.heights[:, -1]
    return reference.Blocks(left, right, heights, given.left_slope, given.right_slope)


def from_uniform_blocks(blocks: reference.Blocks) -> nonuniform_reference.Blocks:
    """Return the blocks of a non-uniform PWLU with the functions of a PWLU."""
    intervals = blocks.heights.shape[1] - 1
    widths = ((blocks.right - blocks.left) / intervals).log()[:, None].expand(-1, intervals)
    return nonuniform_reference.Blocks(blocks.left, widths, blocks.heights, blocks.left_slope, blocks.right_slope)


def apply(x: Tensor, packed: Tensor, intervals: int, channel_dim: int) -> Tensor:
    """Apply the functions of a knot weight. While exporting, use only operators that other runtimes have."""
    if ops.is_exporting():
        return nonuniform_reference.forward(x, *nonuniform_reference.unpack_knots(packed, intervals), channel_dim)
    y: Tensor = nonuniform_ops.forward(x, packed, intervals, channel_dim)
    return y
