"""Whether APL and PAU run as kernels, one forward and one backward, and how large the grids of those are."""

import functools
import os
import warnings

import torch
from torch import Tensor, nn

_OLDEST = (8, 0)  # what Triton supports, and the first with conversions to bfloat16
_PROGRAMS = 8  # a multiprocessor: enough to hide the latency of memory


def usable(x: Tensor, *parameters: Tensor) -> bool:
    """Whether kernels take them: on a GPU that runs Triton, and where nobody but torch's autograd looks at what is computed.

    What the compiler, a tracer, a transform or a tensor of another class sees must be the plain operations; the compiler fuses
    those itself.
    """
    if not x.is_cuda or torch.compiler.is_compiling() or not x.numel():
        return False
    if torch._C._is_tracing() or torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    for tensor in (x, *parameters):
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.device != x.device:
            return False
    return _runs_triton(x.device.index)


def most_programs(device: torch.device) -> int:
    """Of a kernel that leaves sums: each of them is an entry of the last summation."""
    return _PROGRAMS * (
        _multiprocessors(device.index) if device.type == "cuda" else 1
    )  # Triton's interpreter has one processor


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def _runs_triton(index: int) -> bool:
    """``PWLU_CUDA_KERNEL=reference`` asks for plain operations here, too. Where nobody asked, a warning says so, once."""
    if os.environ.get("PWLU_CUDA_KERNEL") == "reference":
        return False
    why = _why_not(index)
    if why:
        warnings.warn(
            f"APL and PAU run as many small operations, correct but several times slower ({why}). "
            "PWLU_CUDA_KERNEL=reference silences this.",
            stacklevel=2,
        )
    return not why


def _why_not(index: int) -> str:
    """What keeps Triton from running on that device; empty if nothing does."""
    if torch.version.hip:
        return "this is a build of torch for AMD; the kernels are for NVIDIA"
    if torch.cuda.get_device_capability(index) < _OLDEST:
        return f"{torch.cuda.get_device_name(index)} is older than compute capability {'.'.join(map(str, _OLDEST))}"
    try:
        import triton

        triton.runtime.driver.active.get_current_device()  # builds what calls the driver, for which it needs a C compiler
    except Exception as error:  # whatever its absence or that of a compiler may raise
        return f"Triton, which comes with torch on Linux, does not work: {type(error).__name__}: {error}"
    return ""
