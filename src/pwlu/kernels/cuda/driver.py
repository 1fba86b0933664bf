"""Load a kernel, and launch it on the current stream of PyTorch, through the CUDA driver.

Launches use ctypes and one packed struct. The launch of cuda-core is slower, because it converts every argument separately.
"""

import ctypes
import functools
import struct
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch

from pwlu.kernels.cuda import compile as kernels
from pwlu.kernels.cuda.plan import NUMBERS_BYTES, Plan

_POINTER, _UNSIGNED = ctypes.c_void_p, ctypes.c_uint
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_INVALID_CONTEXT = 201

ADDRESSES = 34  # the 64-bit words at the start of struct Arguments: 33 pointers, and two floats
_LIMIT = 4096  # bytes of arguments per launch
_PACK = struct.Struct(f"{ADDRESSES}Q{NUMBERS_BYTES}s")


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    library.cuLaunchKernel.argtypes = [_POINTER, *[_UNSIGNED] * 7, *[_POINTER] * 3]
    library.cuKernelSetAttribute.argtypes = [ctypes.c_int, ctypes.c_int, _POINTER, ctypes.c_int]
    library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return library


def launcher() -> Any:
    """Return cuLaunchKernel of the CUDA driver."""
    return _library().cuLaunchKernel


class _Buffers(threading.local):
    """A buffer for the arguments of a launch, one per thread. The driver copies them before it returns."""

    def __init__(self) -> None:
        self.arguments = ctypes.create_string_buffer(_LIMIT)
        self.pointers = (_POINTER * 1)(ctypes.addressof(self.arguments))


_buffers = _Buffers()


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"pwlu: CUDA could not {what}: {(text.value or b'unknown error').decode()} ({status})")


def bind(index: int) -> None:
    """Make the context of PyTorch for a device current: a thread that never called CUDA has no context."""
    kernels.core().Device(index).set_current()


def refuse_during_capture(what: str, index: int) -> None:
    """Raise RuntimeError if the current stream of the current device is being captured."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"pwlu: {what} happens during the capture of a CUDA graph, when no kernel can be loaded. "
            f"Run the model once before the capture, or call pwlu.warm_up('cuda:{index}') first."
        )


class Loaded:
    """One kernel on one device. Call it to launch it."""

    def __init__(self, name: str, index: int, architecture: str, shared_of_block: int) -> None:
        self.index = index
        with torch.cuda.device(index):
            refuse_during_capture(f"the first use of kernel {name}", index)
            bind(index)
            self._code = kernels.compile_functions([kernels.functions()[name]], architecture)  # unloaded with this object
            self._kernel = self._code.get_kernel(name)
            self.handle = int(self._kernel.handle)
            most = shared_of_block - self._kernel.attributes.shared_size_bytes
            _check(_library().cuKernelSetAttribute(_MAX_DYNAMIC_SHARED, most, self.handle, index), f"prepare {name}")

    def resident(self, threads: int, shared: int) -> int:
        """Return the number of blocks that a multiprocessor runs at a time."""
        with torch.cuda.device(self.index):
            bind(self.index)
            return int(self._kernel.occupancy.max_active_blocks_per_multiprocessor(threads, shared))

    def __call__(self, plan: Plan, addresses: Sequence[int], units: bytes = b"") -> None:
        """Launch the kernel on the current stream of its device, which must be the current device.

        `units` are the rest of the arguments, after ``struct Arguments``; see rule.cu.
        """
        buffers = _buffers
        _PACK.pack_into(buffers.arguments, 0, *addresses, plan.numbers)
        if units:
            ctypes.memmove(ctypes.byref(buffers.arguments, _PACK.size), units, len(units))
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        launch = launcher()
        status = launch(self.handle, *plan.blocks, plan.threads, 1, 1, plan.shared, stream, buffers.pointers, None)
        if status == _INVALID_CONTEXT:
            bind(self.index)
            status = launch(self.handle, *plan.blocks, plan.threads, 1, 1, plan.shared, stream, buffers.pointers, None)
        if status:
            _check(status, f"launch {plan.kernel} with {plan.blocks} blocks of {plan.threads} threads")
