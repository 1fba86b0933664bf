"""The CUDA kernels: finds out whether a device can run them. Calls are in ``calls.py``."""

import functools
import os
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch

from pwlu.kernels.cuda import compile as kernels
from pwlu.kernels.cuda.calls import NAMES, Kernel
from pwlu.kernels.cuda.driver import refuse_during_capture
from pwlu.text import install

_OLDEST = (7, 5)


@functools.cache
def choose(index: int) -> tuple[Kernel | None, str]:
    """The kernels that serve the device, or None for plain torch, and why.

    ``PWLU_CUDA_KERNEL=reference`` asks for plain torch, ``PWLU_CUDA_KERNEL=cuda`` for the kernels: that they cannot run is then
    an error.
    """
    named = os.environ.get("PWLU_CUDA_KERNEL")
    if named not in (None, "", "cuda", "reference"):
        raise OSError(f"unknown CUDA kernel PWLU_CUDA_KERNEL={named!r}: there are cuda and reference")
    if named == "reference":
        return None, "PWLU_CUDA_KERNEL=reference"
    try:
        return _try(index), "compiled by NVRTC at first use"
    except _Impossible as error:
        if named == "cuda":
            raise OSError(f"PWLU_CUDA_KERNEL=cuda, but {error}") from error
        return None, str(error)


class _Impossible(Exception):
    """Why a device cannot run the kernels."""


def _try(index: int) -> Kernel:
    if torch.version.hip:
        raise _Impossible("this is a build of torch for AMD; the kernels are for NVIDIA")
    if torch.cuda.get_device_capability(index) < _OLDEST:
        raise _Impossible(f"{torch.cuda.get_device_name(index)} is older than compute capability 7.5")
    try:
        kernels.core()
    except ImportError as error:
        raise _Impossible(f"cuda-core is missing ({error}): {install('cuda')}") from error
    with torch.cuda.device(index):
        refuse_during_capture("its first use on this device", index)
    kernel = Kernel(index)
    try:
        # The smallest: if it compiles and loads, the others do.
        kernel.load("finish_moments")
    except Exception as error:  # whatever NVRTC, its absence, or the driver may raise
        if "out of memory" in str(error).lower():  # that passes
            raise
        raise _Impossible(f"NVRTC or the driver failed: {type(error).__name__}: {error}") from error
    return kernel


def kernel(index: int) -> Kernel | None:
    """As :func:`choose`, with a warning when there is none."""
    chosen, why = choose(index)
    if chosen is None and not os.environ.get("PWLU_CUDA_KERNEL"):
        warnings.warn(
            f"pwlu runs without its CUDA kernels, correct but many times slower ({why}). "
            "`pwlu info` shows the state; PWLU_CUDA_KERNEL=reference silences this.",
            stacklevel=2,
        )
    return chosen


def warm_up(index: int, dtypes: tuple[torch.dtype, ...]) -> int:
    """Compile and load all kernels for these types; return how many there are."""
    if unknown := [dtype for dtype in dtypes if dtype not in NAMES]:
        raise TypeError(f"pwlu: there are CUDA kernels for float32, bfloat16 and float16, not for {unknown[0]}")
    chosen = kernel(index)
    if chosen is None:
        return 0
    wanted = [n for n in kernels.functions() if n.startswith("finish") or any(f"_{NAMES[d]}_" in n for d in dtypes)]
    with torch.cuda.device(index):
        refuse_during_capture("warming up", index)
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # NVRTC lets other threads run
        list(threads.map(chosen.load, wanted))
    return len(wanted)
