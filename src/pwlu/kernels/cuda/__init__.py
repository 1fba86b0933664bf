"""The CUDA kernels: decide whether a device can run them. ``calls.py`` calls them."""

import functools
import os
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch

from pwlu.common.text import install
from pwlu.kernels.cuda import compile as kernels
from pwlu.kernels.cuda.calls import NAMES, Kernel
from pwlu.kernels.cuda.driver import refuse_during_capture

_MIN_CAPABILITY = (7, 5)


@functools.cache
def choose(index: int) -> tuple[Kernel | None, str]:
    """Return the kernels to use on a device, or None for plain PyTorch, and the reason.

    ``PWLU_CUDA_KERNEL=reference`` selects plain PyTorch, ``PWLU_CUDA_KERNEL=cuda`` the kernels.

    Raises:
        OSError: if ``PWLU_CUDA_KERNEL=cuda``, but the kernels cannot run.
    """
    named = os.environ.get("PWLU_CUDA_KERNEL")
    if named not in (None, "", "cuda", "reference"):
        raise OSError(f"PWLU_CUDA_KERNEL must be cuda or reference, not {named!r}")
    if named == "reference":
        return None, "PWLU_CUDA_KERNEL=reference"
    try:
        return _load(index), "compiled by NVRTC at first use"
    except OSError as error:
        if named == "cuda":
            raise OSError(f"PWLU_CUDA_KERNEL=cuda, but {error}") from error
        return None, str(error)


def _load(index: int) -> Kernel:
    """Return the kernels of a device after loading one of them; raise OSError if the device cannot run them."""
    if torch.version.hip:
        raise OSError("this is a build of torch for AMD GPUs and the kernels are for NVIDIA GPUs")
    if torch.cuda.get_device_capability(index) < _MIN_CAPABILITY:
        raise OSError(f"{torch.cuda.get_device_name(index)} is older than compute capability 7.5")
    try:
        kernels.core()
    except ImportError as error:
        raise OSError(f"cuda-core is missing ({error}): {install('cuda')}") from error
    with torch.cuda.device(index):
        refuse_during_capture("its first use on this device", index)
    kernel = Kernel(index)
    try:
        # If the smallest kernel compiles and loads, all do.
        kernel.load("finish_moments")
    except Exception as error:  # NVRTC and the driver raise various types
        if "out of memory" in str(error).lower():  # a temporary problem
            raise
        raise OSError(f"NVRTC or the driver failed: {type(error).__name__}: {error}") from error
    return kernel


def kernel(index: int) -> Kernel | None:
    """Return the kernels that :func:`choose` selects; warn if there are none."""
    chosen, why = choose(index)
    if chosen is None and not os.environ.get("PWLU_CUDA_KERNEL"):
        warnings.warn(
            f"pwlu runs without its CUDA kernels, which is correct but many times slower ({why}). "
            "`pwlu info` shows which kernels are in use. Set PWLU_CUDA_KERNEL=reference to silence this warning.",
            stacklevel=2,
        )
    return chosen


def warm_up(index: int, dtypes: tuple[torch.dtype, ...]) -> int:
    """Compile and load all kernels for these dtypes; return their number."""
    if unknown := [dtype for dtype in dtypes if dtype not in NAMES]:
        raise TypeError(f"pwlu: the CUDA kernels support float32, bfloat16 and float16, not {unknown[0]}")
    chosen = kernel(index)
    if chosen is None:
        return 0
    wanted = [
        n
        for n in kernels.functions()
        if n.startswith(("finish", "rule", "network")) or any(f"_{NAMES[d]}_" in n for d in dtypes)
    ]
    with torch.cuda.device(index):
        refuse_during_capture("warming up", index)
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # NVRTC releases the GIL
        list(threads.map(chosen.load, wanted))
    return len(wanted)
