"""The form for inference: a table look-up and a multiply-add."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from pwlu import checks, ops, reference
from pwlu.deferred_norm import is_compiled
from pwlu.module import PWLU, require_units
from pwlu.text import abbreviate


class FusedPWLU(nn.Module):
    """y = x S_j + O_j with j = clip(floor((x - B_L)/d), -1, N): what :func:`fuse_` makes of a :class:`PWLU`.

    It has no parameters, and backward through it is an error. Traced or exported, it consists of aten operators alone
    and runs where pwlu is not installed.

    Buffers: ``left`` (C,), ``inv_step`` (C,), ``slopes`` (C, N+2), ``offsets`` (C, N+2), in float32 (float64 for a unit in
    float64) whatever the model's type: lines rounded to 16 bits would no longer meet at the knots. So fuse after ``.half()``.
    """

    channels: int
    intervals: int
    channel_dim: int
    left: Tensor
    inv_step: Tensor
    slopes: Tensor
    offsets: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise RuntimeError(
                "a fused PWLU is for inference: call model.eval() first. To train, use the model as it was before pwlu.fuse_."
            )
        buffers: dict[str, Any] = self._buffers  # by the way of attributes it would take microseconds
        tables = (buffers["left"], buffers["inv_step"], buffers["slopes"], buffers["offsets"])
        if torch.jit.is_tracing():
            with warnings.catch_warnings():  # that the sizes of the tables are recorded as constants, as they should be
                warnings.simplefilter("ignore", torch.jit.TracerWarning)
                return reference.lookup(x, *tables, self.channel_dim)
        if _recorded(x):
            return reference.lookup(x, *tables, self.channel_dim, unchecked=is_compiled())
        if not isinstance(x, Tensor):  # else the operator checks
            checks.check_input(x)
        return ops.lookup(x, *tables, self.channel_dim)

    def extra_repr(self) -> str:
        return f"channels={self.channels}, intervals={self.intervals}, channel_dim={self.channel_dim}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if any(prefix + name in state_dict for name in ("weight", "heights")):
            *_, error_msgs = rest
            error_msgs.append(
                f"{prefix or 'the state'} holds the parameters of a PWLU, this model is fused. Load them into the model "
                "before pwlu.fuse_, then fuse it."
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _recorded(x: Tensor) -> bool:
    """Return whether the call is being exported or compiled, and so should consist of aten operators.

    A compiled model that is being trained is the exception: only the operator can refuse the backward pass.
    """
    if is_compiled():
        return not (torch.is_grad_enabled() and x.requires_grad)
    return torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None  # make_fx is such a mode


@torch.no_grad()
def fuse_(model: nn.Module) -> list[str]:
    """Turn every PWLU of the model into its table form, in place, for inference; return their names.

    The modules stay the same objects, so hooks and other references to them hold. Tables are computed in float64 and
    rounded once. Nothing is cached: a fused model does not follow later changes of weights, it has none.
    """
    units = require_units("fuse_", model)
    if strange := [name for name, unit in units.items() if type(unit) is not PWLU]:
        raise TypeError(f"fuse_: {', '.join(strange)} is of a subclass of PWLU, whose forward may do more than the table can")
    if still := [name for name, unit in units.items() if unit.statistics.is_unfinished()]:
        warnings.warn(
            f"fuse_: {abbreviate(still)} ended in Phase I and learned nothing. "
            "Train past realign_at steps of pwlu.TwoPhase first",
            stacklevel=3,
        )
    tables = {name: _tables(unit) for name, unit in units.items()}  # all that can fail comes before the first change
    for name, unit in units.items():
        _fuse(unit, tables[name])
    return list(units)


def _tables(unit: PWLU) -> dict[str, Tensor]:
    device, dtype = unit.weight.device, reference.compute_dtype(unit.weight)
    left, *others = (block.detach().to("cpu", torch.float64) for block in unit.blocks())
    inv_step, slopes, offsets = reference.tables(left, *others)
    tables = {"left": left, "inv_step": inv_step, "slopes": slopes, "offsets": offsets}
    return {name: table.to(device, dtype) for name, table in tables.items()}


def _fuse(unit: PWLU, tables: dict[str, Tensor]) -> None:
    for name in ("weight", "statistics", "gradient_scale", "bounds", "init"):
        delattr(unit, name)
    unit.__class__ = FusedPWLU  # type: ignore[assignment]
    for name, table in tables.items():
        unit.register_buffer(name, table)
