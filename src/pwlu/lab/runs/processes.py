"""The processes of a training: a single one, or several that `torchrun` started. Each has a rank and a device."""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from pwlu.lab.recipes.settings import UserError

T = TypeVar("T")
# If one rank fails, the others lose their connection to it and fail too. They wait this long before they raise their errors, so
# that torchrun ends them first and reports the error of the rank that failed first.
SECONDS_BEFORE_RAISING = 5


@dataclass(frozen=True)
class Processes:
    """The rank of this process, the number of processes, and the device of this one."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, which alone prints and writes files."""
        return self.rank == 0

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place, and return it."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors of rank 0 to all other processes, in place."""
        if self.count > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def barrier(self) -> None:
        """Wait until all processes have called this method."""
        if self.count > 1:
            dist.barrier()

    def gather(self, items: list[Any]) -> list[Any]:
        """Return the items of all processes, ordered by rank, on rank 0. Other processes get their own items back."""
        if self.count == 1:
            return items
        parts: list[Any] | None = [None] * self.count if self.is_main else None
        dist.gather_object(items, parts)
        return items if parts is None else [item for part in parts for item in part]

    def broadcast_object(self, content: T) -> T:
        """Return the object of rank 0 on all processes."""
        objects = [content]
        if self.count > 1:
            dist.broadcast_object_list(objects, src=0)
        return objects[0]


def launched_rank() -> int:
    """Return the rank that torchrun gave this process; 0 without torchrun."""
    return int(os.environ.get("RANK", 0))


@contextmanager
def join_process_group(device: str | None) -> Iterator[Processes]:
    """Join the process group if torchrun started this process, and leave it at the end."""
    chosen = _device(device)
    rank, count = launched_rank(), int(os.environ.get("WORLD_SIZE", 1))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if "RANK" not in os.environ or dist.is_initialized():
        yield Processes(rank, count, chosen)
        return
    # Default arguments in this module would keep the group alive, and with it the threads of gloo, if DistributedDataParallel
    # imported it later. A thread of gloo that releases a tensor while Python exits aborts the process.
    from torch.distributed import nn  # noqa: F401

    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield Processes(rank, count, chosen)
    except Exception as error:
        if not isinstance(error, UserError):
            time.sleep(SECONDS_BEFORE_RAISING)
        get_error_handler().record_exception(error)
        raise
    finally:
        dist.destroy_process_group()


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name}: torch has no such device. Write cpu or cuda") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(f"--device {name}: torch {torch.__version__} sees no GPU here. Write --device cpu")
        number = int(os.environ.get("LOCAL_RANK", 0)) if device.index is None else device.index
        if number >= torch.cuda.device_count():
            raise UserError(
                f"there is no GPU for process {number} of this machine, which has {torch.cuda.device_count()} GPUs. Start "
                f"torchrun with --nproc-per-node {torch.cuda.device_count()}"
            )
        return torch.device("cuda", number)
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError):  # the type of the error depends on the device
        raise UserError(f"--device {name}: torch {torch.__version__} cannot use it here. Write --device cpu") from None
    return device
