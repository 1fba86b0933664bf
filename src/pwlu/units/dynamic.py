"""The module :class:`DynamicPWLU`, whose functions depend on the sample."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pwlu import ops
from pwlu.common import checks
from pwlu.initial_functions import InitialFunction
from pwlu.kernels import dispatch
from pwlu.ops import dynamic as dynamic_ops
from pwlu.reference import dynamic as dynamic_reference
from pwlu.units.deferred_norm import Deferred, has_hooks
from pwlu.units.module import PWLU
from pwlu.units.sharding import gathered, write_parameter
from pwlu.units.squeeze import PARAMETERS, Squeeze


class DynamicPWLU(PWLU):
    """A PWLU whose heights depend on the input: Y + sum over m = 1..M of a_m(x) D_m.

    A small network computes the coefficients a_m(x) in (-1, 1) from p, the mean of each channel of a sample. As in
    squeeze-and-excitation, a(x) = tanh(W_2 relu(W_1 p + b_1) + b_2). See :mod:`pwlu.reference.dynamic`. All samples share the
    bounds, the outer slopes and the directions D_m. The directions start at 0, so a new DynamicPWLU equals a PWLU.

    The input is (B, ...), with the samples in dimension 0. The output has the shape, dtype and memory layout of the input. A
    NaN makes its whole sample NaN. A value that is not finite never affects other samples.

    The parameters are ``weight``, as in :class:`PWLU`; ``direction_weight`` (M C (N + 1),), whose view is
    :meth:`direction_heights`; and the four of ``squeeze``. In Phase I of :class:`pwlu.TwoPhase`, none of them changes. At
    realignment, the directions are reset to 0.

    If ``squeeze`` has hooks, they run, and plain PyTorch computes the output, which is slower. To look at coefficients, call
    :meth:`coefficients`.

    Args:
        channels: the number of functions C, as for :class:`PWLU`. Default: 1, one function for all channels.
        intervals: the number of intervals N. Default: 16.
        bounds: the left and right bound, as for :class:`PWLU`. Default: (-3, 3).
        directions: the number of directions M. Default: 2.
        reduction: the hidden layer has the size F / reduction, at least 4. Default: 8.
        mixing: ``"channel"`` for separate coefficients per channel, ``"layer"`` for common ones. Default: ``"channel"``.
        features: the number of channels F of the input. Default: None, the number of functions C. With ``channels=1``, pass
            ``features``: the channels then share Y and D but have their own coefficients. Without ``features``, the network
            sees only the mean over all channels.
        init: the initial function, as for :class:`PWLU`. Default: ``"relu"``.
        channel_dim: the channel dimension of the input. Default: 1, for images (B, C, H, W); use -1 for sequences (B, T, C).
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Raises:
        ValueError: if an argument is not valid.

    Example::

        act = pwlu.DynamicPWLU(channels=64)
        y = act(torch.randn(8, 64, 32, 32))  # equals relu(x) before training
    """

    _version = 1

    def __init__(
        self,
        channels: int = 1,
        intervals: int = 16,
        bounds: tuple[float, float] = (-3.0, 3.0),
        *,
        directions: int = 2,
        reduction: int = 8,
        mixing: str = "channel",
        features: int | None = None,
        init: str | Callable[[Tensor], Tensor] | InitialFunction = "relu",
        channel_dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, intervals, bounds, init=init, channel_dim=channel_dim, device=device, dtype=dtype)
        owner = "DynamicPWLU"
        self.directions = checks.check_integer(owner, "directions", directions, "1 to 4 work well", 1)
        self.reduction = checks.check_integer(owner, "reduction", reduction, "4 to 16 work well", 1)
        features = self.channels if features is None else features
        self.features = checks.check_integer(owner, "features", features, "the number of channels of the input", 1)
        if self.channels not in (1, self.features):
            raise ValueError(
                f"DynamicPWLU: channels must be 1 or the number of features, {self.features}, not {self.channels}. Leave out "
                "features, or write channels=1"
            )
        if mixing not in ("channel", "layer"):
            raise ValueError(f"DynamicPWLU: mixing must be 'channel' or 'layer', not {mixing!r}")
        self.mixing = mixing
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.direction_weight = nn.Parameter(torch.zeros(self.directions * self.channels * (self.intervals + 1), **options))
        hidden = max(4, self.features // self.reduction)
        outputs = self.directions * (self.features if mixing == "channel" else 1)
        self.squeeze = _UnitSqueeze(self.features, hidden, outputs, self.channel_dim, **options)

    def reset_parameters(self) -> None:
        """Reset the weight to ``init`` between ``bounds`` and the directions to 0; initialize ``squeeze``; clear statistics."""
        super().reset_parameters()
        if "squeeze" in self._modules:  # not while PWLU.__init__ runs
            self.squeeze.reset_parameters()
            nn.init.zeros_(self.direction_weight)

    def direction_heights(self) -> Tensor:
        """Return the directions D (M, C, N+1), a view of ``direction_weight``."""
        return gathered(self.direction_weight).view(self.directions, self.channels, self.intervals + 1)

    def coefficients(self, x: Tensor) -> Tensor:
        """Return the coefficients a(x), (B, M, R) in the compute dtype, with R = 1 for ``mixing="layer"``, else F."""
        return self.squeeze(x).tanh().unflatten(1, (self.directions, -1))

    @torch.no_grad()
    def forget_directions(self, channels: Tensor) -> None:
        """Set the directions to 0 in the channels of a mask (C,)."""
        mask = channels.to(self.direction_weight.device)[:, None].expand(self.directions, self.channels, self.intervals + 1)
        write_parameter(self.direction_weight, self.direction_heights().masked_fill(mask, 0.0).reshape(-1))

    def forward(self, x: Tensor) -> Tensor:
        """Return y."""
        if not isinstance(x, Tensor) and isinstance(x, Deferred):
            x = x.value_for("DynamicPWLU (its heights depend on the sample)")
        checks.check_input(x)
        statistics: Any = self._modules["statistics"]
        network: Any = self._modules["squeeze"]
        in_phase_one = statistics.phase == 1 and self.training
        # Hooks of the network may replace its output, which the operator does not return, or compute its parameters.
        output = network(x, detach_parameters=in_phase_one) if has_hooks(network) else None
        parameters = [self.effective_weight(), self.direction_weight, *(getattr(network, name) for name in PARAMETERS)]
        parameters = [gathered(p) for p in parameters]
        if in_phase_one:
            ops.moments(x, self.channel_dim, statistics.pool)
            # The gradients are exactly 0, not None: DistributedDataParallel waits for them.
            zero = torch.cat([p.reshape(-1)[:0] for p in parameters]).sum()
            parameters = [p.detach() for p in parameters]
            parameters[0] = parameters[0] + zero
        if output is not None:
            weight, directions, *_ = parameters
            mixed = dynamic_reference.mix(weight, directions, output.tanh(), self.intervals)
            # A copy, because fully_shard warns of modules that return views.
            return dispatch.PER_SAMPLE.plain_forward(x, mixed, self.intervals, self.channel_dim).clone()
        if ops.is_exporting():
            return dynamic_reference.apply(dispatch.PER_SAMPLE.apply, x, *parameters, self.intervals, self.channel_dim)[0]
        y: Tensor = dynamic_ops.forward(x, *parameters, self.intervals, self.channel_dim)[0]
        return y

    def extra_repr(self) -> str:
        """Return the arguments, for repr."""
        return (
            f"{super().extra_repr()}, directions={self.directions}, reduction={self.reduction}, mixing={self.mixing!r}, "
            f"features={self.features}"
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        _, _, missing, *_ = rest
        if any(key.startswith(prefix) for key in state_dict):  # _UnitSqueeze does not report missing keys itself
            names = [f"{prefix}squeeze.{name}" for name, _ in self.squeeze.named_parameters()]
            missing += [name for name in names if name not in state_dict]


class _UnitSqueeze(Squeeze):
    """The network of a DynamicPWLU. It keeps its parameters unless the state dict has all of them.

    So a state dict from before the conversion loads with ``strict=True``.
    """

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if all(prefix + name in state_dict for name, _ in self.named_parameters()):
            super()._load_from_state_dict(state_dict, prefix, *rest)
