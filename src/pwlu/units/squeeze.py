"""A small network on the means of each sample, for activations that depend on the whole input."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pwlu import ops
from pwlu.common import checks
from pwlu.reference import dynamic as dynamic_reference
from pwlu.reference.dynamic import along_samples

PARAMETERS = ("first", "first_bias", "second", "second_bias")


class Squeeze(nn.Module):
    """Compute W_2 relu(W_1 p + b_1) + b_2, where p is the mean of each sample per channel.

    See :mod:`pwlu.reference.dynamic`. The computation runs in float32 (float64 for float64), also under autocast.

    The parameters are ``first`` (H, F), ``first_bias`` (H,), ``second`` (O, H) and ``second_bias`` (O,). The weights are
    initialized from normal distributions with variances 2/F and 1/H, so that outputs are about as large as the means. The
    biases start at 0.

    Args:
        features: the number of channels F of the input. With 1, p is the mean over all elements of a sample.
        hidden: the size H of the hidden layer.
        outputs: the number of outputs O.
        channel_dim: the channel dimension of the input.
        device: the device of the parameters.
        dtype: the dtype of the parameters.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        outputs: int,
        channel_dim: int = 1,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.features, self.hidden, self.outputs, self.channel_dim = features, hidden, outputs, channel_dim
        self.first = nn.Parameter(torch.empty(hidden, features, device=device, dtype=dtype))
        self.first_bias = nn.Parameter(torch.empty(hidden, device=device, dtype=dtype))
        self.second = nn.Parameter(torch.empty(outputs, hidden, device=device, dtype=dtype))
        self.second_bias = nn.Parameter(torch.empty(outputs, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters."""
        nn.init.normal_(self.first, std=(2 / self.features) ** 0.5)
        nn.init.normal_(self.second, std=self.hidden**-0.5)
        nn.init.zeros_(self.first_bias)
        nn.init.zeros_(self.second_bias)

    def forward(self, x: Tensor, detach_parameters: bool = False) -> Tensor:
        """Return the outputs (B, O) in the compute dtype. `detach_parameters`: treat the parameters as constants."""
        checks.check_samples(x, self.features, self.channel_dim)
        parameters = [getattr(self, name) for name in PARAMETERS]
        if detach_parameters:
            parameters = [p.detach() for p in parameters]
        found: Tensor = dynamic_reference.without_autocast(x, self.compute, x, parameters)
        return found

    def compute(self, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Return the outputs without autocast."""
        return dynamic_reference.squeeze(sample_means(x, self.features, self.channel_dim), *parameters)[1]

    def extra_repr(self) -> str:
        """Return the arguments, for repr."""
        return f"features={self.features}, hidden={self.hidden}, outputs={self.outputs}, channel_dim={self.channel_dim}"


class _Means(torch.autograd.Function):
    """Compute the means of samples. The gradient of x is an expanded tensor, so that PyTorch does not write it to memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, features: int, channel_dim: int) -> Tensor:
        ctx.like, ctx.channel_dim = x.new_empty(()).expand(x.shape), channel_dim
        return dynamic_reference.means(x, features, channel_dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        like = ctx.like
        positions = like.numel() // max(grad.numel(), 1)
        return along_samples((grad / max(positions, 1)).to(like.dtype), like, ctx.channel_dim).expand_as(like), None, None


def sample_means(x: Tensor, features: int, channel_dim: int) -> Tensor:
    """Return the means of each sample; see :func:`pwlu.reference.dynamic.means`."""
    if ops.transform_is_active() or ops.is_exporting():
        return dynamic_reference.means(x, features, channel_dim)
    found: Tensor = _Means.apply(x, features, channel_dim)
    return found


def function_parameters(activations: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the parameters that describe the functions of activations: all except those of Squeeze networks."""
    every = nn.ModuleList(activations)
    others = {id(p) for module in every.modules() if isinstance(module, Squeeze) for p in module.parameters()}
    return {id(p) for p in every.parameters()} - others
