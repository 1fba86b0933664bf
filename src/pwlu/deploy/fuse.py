"""Fuse PWLUs for inference, into a table lookup and a multiply-add."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from pwlu import ops, reference
from pwlu.common import checks
from pwlu.common.text import abbreviate
from pwlu.reference import nonuniform as nonuniform_reference
from pwlu.units.deferred_norm import is_compiled
from pwlu.units.dynamic import DynamicPWLU
from pwlu.units.module import PWLU, exact_blocks, require_units
from pwlu.units.nonuniform import NonUniformPWLU, apply
from pwlu.units.sharding import full_values


class _Fused(nn.Module):
    channels: int
    intervals: int
    channel_dim: int

    def _check_mode(self) -> None:
        if self.training:
            raise RuntimeError(
                "a fused PWLU is for inference: call model.eval() first. To train, use the model from before pwlu.fuse_."
            )

    def extra_repr(self) -> str:
        return f"channels={self.channels}, intervals={self.intervals}, channel_dim={self.channel_dim}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if any(prefix + name in state_dict for name in ("weight", "heights")):
            *_, error_msgs = rest
            error_msgs.append(
                f"{prefix or 'the state'} holds the parameters of a PWLU, but this model is fused. Load them into the model "
                "before pwlu.fuse_, then fuse it."
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)


class FusedPWLU(_Fused):
    """The inference form of a :class:`PWLU`: y = x S_j + O_j with j = clip(floor((x - B_L)/d), -1, N).

    :func:`fuse_` creates it. It has no parameters and no backward pass. When traced or exported, it consists of aten operators
    only, so the result runs without pwlu.

    The buffers are ``left`` (C,), ``inv_step`` (C,), ``slopes`` (C, N+2) and ``offsets`` (C, N+2). They are float32, or float64
    for a unit in float64, even in a 16-bit model. Neighbouring lines that are rounded to 16 bits would not meet at the knots.
    So call :func:`fuse_` after ``.half()``.
    """

    left: Tensor
    inv_step: Tensor
    slopes: Tensor
    offsets: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self._check_mode()
        buffers: dict[str, Any] = self._buffers  # attribute access on modules takes microseconds
        tables = (buffers["left"], buffers["inv_step"], buffers["slopes"], buffers["offsets"])
        if torch.jit.is_tracing():
            with warnings.catch_warnings():  # about table sizes that become constants, as they should
                warnings.simplefilter("ignore", torch.jit.TracerWarning)
                return reference.lookup(x, *tables, self.channel_dim)
        if _is_traced(x):
            return reference.lookup(x, *tables, self.channel_dim, unchecked=is_compiled())
        if not isinstance(x, Tensor):  # the operator checks tensors
            checks.check_input(x)
        return ops.lookup(x, *tables, self.channel_dim)


class FusedNonUniformPWLU(_Fused):
    """The inference form of a :class:`NonUniformPWLU`: the knots are computed once.

    :func:`fuse_` creates it. It has no parameters and no backward pass. The buffer ``knot_weight`` (C (2N + 4),) is what
    :func:`pwlu.reference.nonuniform.pack_knots` returns.
    """

    knot_weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self._check_mode()
        checks.check_input(x)
        return apply(x, self.knot_weight, self.intervals, self.channel_dim)


def _is_traced(x: Tensor) -> bool:
    """Return whether the call is exported or compiled, so that it must consist of aten operators.

    Return False when a compiled model is trained, because only the operator raises an error in the backward pass.
    """
    if is_compiled():
        return not (torch.is_grad_enabled() and x.requires_grad)
    return torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None  # for example under make_fx


@torch.no_grad()
def fuse_(model: nn.Module) -> list[str]:
    """Replace every PWLU of a model by its table form for inference, in place.

    A :class:`pwlu.DynamicPWLU` is not replaced: its tables differ between samples, so every call would have to compute them.
    The fused modules are the same Python objects, so hooks and other references remain valid. The tables are computed in
    float64 and rounded once. A fused model has no PWLU weights and cannot be trained further.

    Args:
        model: a trained model with PWLUs. Call ``model.eval()`` to run it afterwards.

    Returns:
        The names of the fused PWLUs.

    Raises:
        ValueError: if the model has no PWLU.
        TypeError: if a unit is an instance of a subclass of PWLU.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), pwlu.PWLU(8)).eval()
        >>> pwlu.fuse_(model)
        ['1']
    """
    found = require_units("fuse_", model)
    units = {name: unit for name, unit in found.items() if not isinstance(unit, DynamicPWLU)}
    if subclassed := [name for name, unit in units.items() if type(unit) not in (PWLU, NonUniformPWLU)]:
        raise TypeError(
            f"fuse_: {abbreviate(subclassed)} is an instance of a subclass of PWLU, whose forward may do more than a table. "
            "Replace it by a PWLU first"
        )
    if untrained := [name for name, unit in units.items() if unit.statistics.is_unfinished()]:
        warnings.warn(
            f"fuse_: {abbreviate(untrained)} is still in Phase I and has not learned. "
            "Train for more than realign_at steps of pwlu.TwoPhase first",
            stacklevel=3,
        )
    tables = {name: _tables(unit) for name, unit in units.items()}  # all tables, before the model changes: one may fail
    for name, unit in units.items():
        _fuse(unit, tables[name])
    return list(units)


def _tables(unit: PWLU) -> dict[str, Tensor]:
    device, dtype = unit.weight.device, reference.compute_dtype(unit.weight)
    if isinstance(unit, NonUniformPWLU):
        return {"knot_weight": nonuniform_reference.to_knots(full_values(unit.weight), unit.intervals).to(device, dtype)}
    left, *others = exact_blocks(unit)
    inv_step, slopes, offsets = reference.tables(left, *others)
    tables = {"left": left, "inv_step": inv_step, "slopes": slopes, "offsets": offsets}
    return {name: table.to(device, dtype) for name, table in tables.items()}


def _fuse(unit: PWLU, tables: dict[str, Tensor]) -> None:
    for name in ("weight", "statistics", "gradient_scale", "bounds", "init", "constraint"):
        delattr(unit, name)
    unit.__class__ = FusedNonUniformPWLU if isinstance(unit, NonUniformPWLU) else FusedPWLU  # type: ignore[assignment]
    for name, table in tables.items():
        unit.register_buffer(name, table)
