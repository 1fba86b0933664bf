"""Read and write parameters that fully_shard may have sharded."""

from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor | None) -> bool:
    """Return whether a tensor is sharded by fully_shard; False for None."""
    return hasattr(tensor, "placements")


def gathered(parameter: Tensor) -> Tensor:
    """Return the full tensor of a parameter that fully_shard may have sharded. The all-gather is differentiable."""
    return parameter.full_tensor() if is_sharded(parameter) else parameter  # type: ignore[attr-defined]


def full_values(parameter: Tensor) -> Tensor:
    """Return the full values of a parameter that fully_shard may have sharded, detached from autograd."""
    return gathered(parameter.detach())


@torch.no_grad()
def write_parameter(parameter: Any, value: Tensor) -> None:
    """Write a parameter in place. If it is sharded, each rank writes its own shard."""
    if is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor

        value = value.to(parameter.device, parameter.dtype)
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)
