"""The activations ACON-C and Meta-ACON."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pwlu import reference
from pwlu.baselines.arguments import ChannelActivation, Device, DType
from pwlu.common import checks
from pwlu.units.squeeze import Squeeze, along_samples, sample_means

_REDUCTION, _MIN_HIDDEN = 16, 16  # the hidden layer of Meta-ACON has max(16, C / 16) units, as in the authors' code


class ACONC(ChannelActivation):
    """ACON-C (Ma et al. 2021, arXiv 2009.04759), with three parameters per channel::

        y = (p1 - p2) x sigmoid(beta (p1 - p2) x) + p2 x

    The input may have any shape. The output has the shape and dtype of the input. The computation runs in float32 (float64 for
    float64). The parameters are ``p1``, ``p2`` and ``beta``, each (C,). As in the authors' code, ``p1`` and ``p2`` are
    initialized from a standard normal distribution, and ``beta`` to 1.

    Args:
        channels: the number of channels C of the input. Default: 1, one function for all elements.
        channel_dim: the channel dimension. Default: 1, for images (B, C, H, W); use -1 for sequences (B, T, C).
        device: the device of the parameters.
        dtype: the dtype of the parameters.
    """

    def __init__(self, channels: int = 1, channel_dim: int = 1, *, device: Device = None, dtype: DType = None) -> None:
        super().__init__(channels, channel_dim)
        self.p1 = nn.Parameter(torch.empty(self.channels, device=device, dtype=dtype))
        self.p2 = nn.Parameter(torch.empty(self.channels, device=device, dtype=dtype))
        self._register_beta(device, dtype)
        self.reset_parameters()

    def _register_beta(self, device: Any, dtype: Any) -> None:
        self.beta = nn.Parameter(torch.empty(self.channels, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Initialize the parameters."""
        nn.init.normal_(self.p1)
        nn.init.normal_(self.p2)
        if "beta" in self._parameters:
            nn.init.ones_(self.beta)

    def switch(self, x: Tensor) -> Tensor:
        """Return beta in the compute dtype, so that it broadcasts against x."""
        return reference.along(self.beta.to(reference.compute_dtype(x)), x, self.channel_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return y."""
        checks.check_input(x)
        checks.check_channels(x, self.channels, self.channel_dim)
        value, beta = x.to(reference.compute_dtype(x)), self.switch(x)
        p1, p2 = (reference.along(p.to(value.dtype), x, self.channel_dim) for p in (self.p1, self.p2))
        gated = (p1 - p2) * value
        return (gated * torch.sigmoid(beta * gated) + p2 * value).to(x.dtype)


class MetaACON(ACONC):
    """Meta-ACON (Ma et al. 2021, arXiv 2009.04759): :class:`ACONC` with beta computed from the means p of each sample::

        beta = sigmoid(norm(W_2 norm(W_1 p + b_1) + b_2))

    The norms are batch norms, as in the authors' code, so a batch in training needs at least two samples. The hidden layer has
    max(16, C / 16) units. The input is (B, ...), with the samples in dimension 0. The arguments are those of :class:`ACONC`.
    """

    def _register_beta(self, device: Any, dtype: Any) -> None:
        hidden = max(_MIN_HIDDEN, self.channels // _REDUCTION)
        self.squeeze = _NormedSqueeze(self.channels, hidden, self.channels, self.channel_dim, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Initialize the parameters."""
        super().reset_parameters()
        self.squeeze.reset_parameters()

    def switch(self, x: Tensor) -> Tensor:
        """Return beta in the compute dtype, so that it broadcasts against x."""
        return along_samples(torch.sigmoid(self.squeeze(x)), x, self.channel_dim)


class _NormedSqueeze(Squeeze):
    """A squeeze with a batch norm after each layer and no ReLU."""

    def __init__(self, features: int, hidden: int, outputs: int, channel_dim: int = 1, **options: Any) -> None:
        super().__init__(features, hidden, outputs, channel_dim, **options)
        self.first_norm = nn.BatchNorm1d(hidden, **options)
        self.second_norm = nn.BatchNorm1d(outputs, **options)

    def reset_parameters(self) -> None:
        """Initialize the parameters."""
        super().reset_parameters()
        if "second_norm" in self._modules:  # not while Squeeze.__init__ runs
            self.first_norm.reset_parameters()
            self.second_norm.reset_parameters()

    def compute(self, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Return the outputs without autocast."""
        first, first_bias, second, second_bias = parameters
        p = sample_means(x, self.features, self.channel_dim)
        hidden = self.first_norm(p @ first.to(p.dtype).T + first_bias.to(p.dtype))
        normed: Tensor = self.second_norm(hidden @ second.to(p.dtype).T + second_bias.to(p.dtype))
        return normed
