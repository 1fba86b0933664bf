"""Decide whether APL and PAU use their Triton kernels, and limit the number of programs per launch."""

import functools
import os
import warnings

import torch
from torch import Tensor, nn

_MIN_CAPABILITY = (8, 0)  # the oldest capability that Triton supports, and the first with conversions to bfloat16
_PROGRAMS_PER_MULTIPROCESSOR = 8  # enough to hide the latency of memory


def can_use_kernels(x: Tensor, *parameters: Tensor) -> bool:
    """Return whether the Triton kernels can compute on these tensors.

    The tensors must be on a GPU that Triton supports. A compiler, a tracer, a transform or a tensor subclass must see PyTorch
    operators instead; torch.compile fuses these itself.
    """
    if not x.is_cuda or torch.compiler.is_compiling() or not x.numel():
        return False
    if torch._C._is_tracing() or torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    for tensor in (x, *parameters):
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.device != x.device:
            return False
    return _runs_triton(x.device.index)


def max_programs(device: torch.device) -> int:
    """Return the largest number of programs of a kernel that writes partial sums, one per program."""
    if device.type != "cuda":  # Triton's interpreter
        return _PROGRAMS_PER_MULTIPROCESSOR
    return _PROGRAMS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _runs_triton(index: int) -> bool:
    """Return whether Triton runs on a device; warn once if it does not, unless ``PWLU_CUDA_KERNEL=reference``."""
    if os.environ.get("PWLU_CUDA_KERNEL") == "reference":
        return False
    reason = _why_unavailable(index)
    if reason:
        warnings.warn(
            f"APL and PAU run without their Triton kernels, which is correct but several times slower ({reason}). "
            "Set PWLU_CUDA_KERNEL=reference to silence this warning.",
            stacklevel=2,
        )
    return not reason


def _why_unavailable(index: int) -> str:
    """Return the reason why Triton does not run on a device, or "" if it does."""
    if torch.version.hip:
        return "this is a build of torch for AMD GPUs and the kernels are for NVIDIA GPUs"
    if torch.cuda.get_device_capability(index) < _MIN_CAPABILITY:
        name, minimum = torch.cuda.get_device_name(index), ".".join(map(str, _MIN_CAPABILITY))
        return f"{name} is older than compute capability {minimum}"
    try:
        import triton

        triton.runtime.driver.active.get_current_device()  # compiles a C extension, which needs a C compiler
    except Exception as error:  # a missing Triton or compiler raises various types
        return f"Triton, which comes with torch on Linux, does not work: {type(error).__name__}: {error}"
    return ""
