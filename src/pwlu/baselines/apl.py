"""Adaptive Piecewise Linear units."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pwlu import reference
from pwlu.baselines import fused
from pwlu.baselines.arguments import ChannelActivation, Device, DType
from pwlu.common import checks


class APL(ChannelActivation):
    """Adaptive Piecewise Linear unit (Agostinelli et al. 2014, arXiv 1412.6830)::

        y = max(0, x) + sum over i = 1..S of a_i max(0, b_i - x)

    The input may have any shape. The output has the shape and dtype of the input. The computation runs in float32 (float64 for
    float64). The backward pass saves only x and the parameters.

    The parameters are ``slopes`` (C, S), the a_i, and ``offsets`` (C, S), the b_i. They are initialized at random as in the
    authors' code: a_i uniform in [-0.5/S, 0.5/S], b_i normal with mean 0 and standard deviation 0.5. The authors use a weight
    decay of 0.001 for both.

    On NVIDIA GPUs, forward and backward are one Triton kernel each. Set ``PWLU_CUDA_KERNEL=reference`` to use PyTorch operators
    instead.

    Args:
        channels: the number of functions C, one per entry of dimension ``channel_dim``. Default: 1, one function for all
            elements. (The networks of APL's authors have one function per channel and position. The PWLU paper uses one per
            channel.)
        hinges: the number S of hinges. Default: 3, as in the PWLU paper, because training on ImageNet failed with 5, the
            largest S of APL's authors.
        channel_dim: the channel dimension. Default: 1, for images (B, C, H, W); use -1 for sequences (B, T, C).
        device: the device of the parameters.
        dtype: the dtype of the parameters.
    """

    def __init__(
        self, channels: int = 1, hinges: int = 3, channel_dim: int = 1, *, device: Device = None, dtype: DType = None
    ) -> None:
        super().__init__(channels, channel_dim)
        self.hinges = checks.check_integer("APL", "hinges", hinges, "S, 3 in the paper", 1)
        self.slopes = nn.Parameter(torch.empty(self.channels, self.hinges, device=device, dtype=dtype))
        self.offsets = nn.Parameter(torch.empty(self.channels, self.hinges, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters at random."""
        nn.init.uniform_(self.slopes, -0.5 / self.hinges, 0.5 / self.hinges)
        nn.init.normal_(self.offsets, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return y."""
        checks.check_input(x)
        checks.check_channels(x, self.channels, self.channel_dim)
        y: Tensor = _APL.apply(x, self.slopes, self.offsets, self.channel_dim)
        return y

    def extra_repr(self) -> str:
        """Return the arguments, for repr."""
        return f"channels={self.channels}, hinges={self.hinges}, channel_dim={self.channel_dim}"


class _APL(torch.autograd.Function):
    """Run the Triton kernels if possible. Else loop over the hinges, so that no tensor has S times the size of x."""

    @staticmethod
    def forward(x: Tensor, slopes: Tensor, offsets: Tensor, channel_dim: int) -> Tensor:
        if fused.can_use_kernels(x, slopes, offsets):
            from pwlu.baselines import apl_kernels

            return apl_kernels.forward(x, slopes, offsets, channel_dim)
        wide, *hinges = _in_compute_type(x, slopes, offsets, channel_dim)
        # a max(0, b - x) = a b - a min(x, b), which saves one pass over memory
        constant = (slopes.to(wide.dtype) * offsets.to(wide.dtype)).sum(1)
        y = wide.clamp_min(0).add_(reference.along(constant, x, channel_dim))
        for slope, offset in zip(*hinges, strict=True):
            y.addcmul_(slope, torch.minimum(wide, offset), value=-1)
        return y.to(x.dtype).detach()  # torch.compile of torch 2.11 loses the gradient of the result of an in-place operation

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.channel_dim = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, slopes, offsets = ctx.saved_tensors
        need_x, *need_parameters, _ = ctx.needs_input_grad
        if fused.can_use_kernels(x, grad, slopes, offsets):
            from pwlu.baselines import apl_kernels

            need = need_x, any(need_parameters)
            grad_x, found = apl_kernels.backward(grad, x, slopes, offsets, ctx.channel_dim, *need)
            if found is None:
                return grad_x, None, None, None
            return grad_x, found[0].to(slopes.dtype), found[1].to(offsets.dtype), None
        wide, *hinges = _in_compute_type(x, slopes, offsets, ctx.channel_dim)
        grad = grad.to(wide.dtype)
        grad_x = torch.where(wide > 0, grad, 0) if need_x else None
        sums, moments = [], []  # for each hinge: sums of g and of g x over the elements left of it
        for slope, offset in zip(*hinges, strict=True):
            left = torch.where(wide < offset, grad, 0)
            if grad_x is not None:
                grad_x.addcmul_(slope, left, value=-1)
            if any(need_parameters):
                sums.append(_channel_sums(left, slopes.shape[0], ctx.channel_dim))
                moments.append(_channel_sums(left * wide, slopes.shape[0], ctx.channel_dim))
        if grad_x is not None:
            grad_x = grad_x.to(x.dtype)
        if not any(need_parameters):
            return grad_x, None, None, None
        total, moment = torch.stack(sums, 1), torch.stack(moments, 1)
        return grad_x, (offsets * total - moment).to(slopes.dtype), (slopes * total).to(offsets.dtype), None


def _in_compute_type(x: Tensor, slopes: Tensor, offsets: Tensor, channel_dim: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return x, and a_i and b_i of each hinge in a shape that broadcasts against x, in the compute dtype."""
    wide = x.to(reference.compute_dtype(x))
    slope, offset = (
        [reference.along(p, x, channel_dim) for p in parameter.to(wide.dtype).unbind(1)] for parameter in (slopes, offsets)
    )
    return wide, slope, offset


def _channel_sums(terms: Tensor, channels: int, channel_dim: int) -> Tensor:
    """Return the sum of each channel: (C,)."""
    if channels == 1:
        return terms.sum().reshape(1)
    others = [d for d in range(terms.ndim) if d != channel_dim % terms.ndim]
    return terms.sum(others) if others else terms  # sum([]) would sum over all dimensions
