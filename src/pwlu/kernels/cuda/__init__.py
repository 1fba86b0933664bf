"""The CUDA kernels: finds out whether a device can run them, and calls them on torch tensors."""

import functools
import os
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from pwlu.kernels import eager, layout
from pwlu.kernels.cuda import compile as kernels
from pwlu.kernels.cuda.driver import Loaded, launcher, refuse_during_capture
from pwlu.kernels.cuda.plan import Gpu, Plan, Processor, plan_backward, plan_finish, plan_finish_moments, plan_map, plan_pool

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_OLDEST = (7, 5)
_PLANS = 4096  # shapes remembered
# What is not there, in the order of struct Arguments: parameters and their gradients; sums of the splits, count, mean and M2.
_NONE, _NO_MOMENTS = [0] * 10, [0] * 4


class Kernel:
    """The kernels on one device. The methods take the operators' arguments; None means: not for these, use plain torch.

    That is so for float64, and where no plan fits: so many intervals that a table or a warp's sums exceed shared memory, say.
    """

    def __init__(self, index: int) -> None:
        found = torch.cuda.get_device_properties(index)
        self.index = index
        self.processor = Processor(
            f"sm_{found.major}{found.minor}",
            found.multi_processor_count,
            found.max_threads_per_multi_processor,
            found.shared_memory_per_multiprocessor,
            found.shared_memory_per_block_optin,
        )
        self._loaded: dict[str, Loaded] = {}
        self._lock = threading.Lock()
        self.make_plans()

    def make_plans(self) -> None:
        """Plans are made once for every shape and kept."""
        gpu = Gpu(self.processor, lambda name, threads, shared: self.load(name).resident(threads, shared))
        self._map_plan = functools.lru_cache(_PLANS)(functools.partial(plan_map, gpu=gpu))
        self._backward_plan = functools.lru_cache(_PLANS)(functools.partial(plan_backward, gpu=gpu))
        self._finish_plan = functools.lru_cache(_PLANS)(plan_finish)
        self._finish_moments_plan = functools.lru_cache(_PLANS)(plan_finish_moments)
        self._pool_plan = functools.lru_cache(_PLANS)(plan_pool)

    def load(self, name: str) -> Loaded:
        """The kernel of that name, compiled and loaded once."""
        if name not in self._loaded:
            loaded = Loaded(name, self.index, self.processor.architecture, self.processor.shared_of_block)
            with self._lock:  # several threads may come here at once: one of them wins
                self._loaded.setdefault(name, loaded)
        return self._loaded[name]

    def _launch(self, plan: Plan, addresses: Sequence[int]) -> None:
        kernel = self._loaded.get(plan.kernel) or self.load(plan.kernel)
        if torch._C._cuda_getDevice() == self.index:
            kernel(plan, addresses)
        else:
            with torch.cuda.device(self.index):
                kernel(plan, addresses)

    def _teach(self, key: tuple[Any, ...], plan: Plan, second: Plan | None) -> None:
        """Later calls of this kind need no Python."""
        if eager.new(key):
            eager.learn_gpu(key, self._described(plan), second and self._described(second), plan.splits, launcher())

    def _described(self, plan: Plan) -> eager.Launch:
        return eager.Launch(self.load(plan.kernel).handle, plan.blocks, plan.threads, plan.shared, tuple(plan.numbers))

    def forward(self, x: Tensor, *rest: Any) -> Tensor | None:
        """As ``reference.forward``."""
        *parameters, channel_dim = rest
        found = self._map("forward", x, parameters, parameters[2].shape[-1] - 1, channel_dim)
        return None if found is None else found[0]

    def lookup(self, x: Tensor, *rest: Any) -> Tensor | None:
        """As ``reference.lookup``."""
        *tables, channel_dim = rest
        found = self._map("lookup", x, tables, tables[2].shape[-1] - 2, channel_dim)
        return None if found is None else found[0]

    def observe(self, x: Tensor, *rest: Any) -> tuple[Tensor, ...] | None:
        """y, count, mean and M2, reading x once."""
        *parameters, channel_dim = rest
        return self._map("observe", x, parameters, parameters[2].shape[-1] - 1, channel_dim)

    def moments(self, x: Tensor, channels: int, channel_dim: int) -> tuple[Tensor, ...] | None:
        """Count, mean and M2."""
        layout.check_channels(x, channels, channel_dim)
        found = self._map("moments", x, [], 1, channel_dim, channels)
        return None if found is None else found[1:]

    def _map(
        self, what: str, x: Tensor, parameters: list[Tensor], intervals: int, channel_dim: int, channels: int = 0
    ) -> tuple[Tensor, ...] | None:
        if parameters:
            channels = layout.check(x, parameters, intervals, channel_dim)
        if x.dtype not in _KINDS:
            return None
        y = torch.empty_like(x) if parameters else x
        results = self._room_for_moments(x, channels) if what in ("observe", "moments") else ()
        if not x.numel():
            return (y, *(r.zero_() for r in results))
        originals = parameters
        kind, parameters = _for_kernel(parameters)
        x = layout.laid_out_as(y, x) if parameters else layout.dense(x)
        source, *addresses = layout.addresses([x, *parameters])
        target = y.data_ptr() if parameters else 0
        aligned = not (source | target) & 15
        form = layout.geometry(x, channels, channel_dim)
        plan = self._map_plan(what, _NAMES[x.dtype], form, intervals, kind, aligned)
        if plan is None:
            return None
        second = self._finish_moments_plan(plan, channels) if results else None
        if parameters and parameters is originals:
            self._teach((what, self.index, x.dtype, parameters[0].dtype, intervals, *form, aligned), plan, second)
        addresses = [source, 0, target, *addresses, *_NONE[len(parameters) :]]
        if second is None:
            self._launch(plan, addresses + _NO_MOMENTS)
            return (y,)
        partial = x.new_empty(plan.splits * channels * 3, dtype=torch.float32)
        addresses += [partial.data_ptr(), *[r.data_ptr() for r in results]]
        self._launch(plan, addresses)
        self._launch(second, addresses)
        return (y, *results)

    @staticmethod
    def _room_for_moments(x: Tensor, channels: int) -> tuple[Tensor, ...]:
        count = torch.empty((), dtype=torch.int64, device=x.device)
        return count, *(x.new_empty(channels, dtype=torch.float32) for _ in range(2))

    def pool(self, pool: Tensor, count: Tensor, mean: Tensor, m2: Tensor) -> bool:
        """``reference.merge`` in place, bit for bit; False where it was not done: not in float32, or in no ordinary shape."""
        channels = mean.numel()
        if pool.shape != (3, channels) or mean.shape != (channels,) or m2.shape != (channels,) or count.shape != ():
            return False
        if count.dtype is not torch.int64 or not pool.device == count.device == mean.device == m2.device:
            return False
        for tensor in (pool, mean, m2):
            if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
                return False
        torch.autograd.graph.increment_version(pool)  # as every change in place does
        addresses = (0, 0, pool.data_ptr(), *[0] * 11, count.data_ptr(), mean.data_ptr(), m2.data_ptr())
        self._launch(self._pool_plan(channels), addresses)
        return True

    def backward(self, grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor | None, list[Tensor] | None] | None:
        """As ``reference.backward``: the gradients of x and of the parameters, each None unless asked for."""
        *parameters, channel_dim, need_input, need_parameters = rest
        intervals = parameters[2].shape[-1] - 1
        channels = layout.check(x, parameters, intervals, channel_dim)
        layout.check_grad(grad, x)
        if x.dtype not in _KINDS:
            return None
        grad_x = torch.empty_like(x)  # the kernels always write it
        if not x.numel():
            return grad_x if need_input else None, [torch.zeros_like(p) for p in parameters] if need_parameters else None
        x = layout.laid_out_as(grad_x, x)
        grad = layout.laid_out_as(x, grad if grad.dtype is x.dtype else grad.to(x.dtype))
        originals = parameters
        kind, parameters = _for_kernel(parameters)
        addresses = layout.addresses([x, grad, grad_x, *parameters])
        aligned = not (addresses[0] | addresses[1] | addresses[2]) & 15
        form = layout.geometry(x, channels, channel_dim)
        plan = self._backward_plan(need_parameters, _NAMES[x.dtype], form, intervals, kind, aligned)
        if plan is None:
            return None
        second = self._finish_plan(plan, channels, intervals) if need_parameters and plan.splits > 1 else None
        if parameters is originals:
            what = "backward" if need_parameters else "backward_input"
            self._teach((what, self.index, x.dtype, parameters[0].dtype, intervals, *form, aligned), plan, second)
        if not need_parameters:
            self._launch(plan, [*addresses, *_NONE[5:], *_NO_MOMENTS])
            return grad_x, None
        gradients = [torch.empty_like(p) for p in parameters]
        addresses += [g.data_ptr() for g in gradients]
        if second is None:
            self._launch(plan, addresses + _NO_MOMENTS)
        else:
            partial = x.new_empty(plan.splits * channels * (intervals + 3) * 2, dtype=torch.float32)
            addresses += [partial.data_ptr(), 0, 0, 0]
            self._launch(plan, addresses)
            self._launch(second, addresses)
        if parameters is not originals:
            gradients = [g.to(p.dtype) for g, p in zip(gradients, originals, strict=True)]
        return grad_x if need_input else None, gradients


def _for_kernel(parameters: list[Tensor]) -> tuple[int, list[Tensor]]:
    """Their type as a kernel knows it, and the parameters: themselves, wherever they are contiguous and of one such type."""
    dtype = parameters[0].dtype if parameters else torch.float32
    for parameter in parameters:
        if parameter.dtype is not dtype or dtype not in _KINDS or not parameter.is_contiguous():
            return 0, [p.to(torch.float32).contiguous() for p in parameters]
    return _KINDS[dtype], parameters


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
        raise _Impossible(f"cuda-core is missing ({error}): pip install 'pwlu[cuda]'") from error
    with torch.cuda.device(index):
        refuse_during_capture("its first use on this device", index)
    kernel = Kernel(index)
    try:
        # The smallest: if they compile and load, the others do. Eager code needs the second in captures only, too late to load.
        for name in ("finish_moments", "finish_pool"):
            kernel.load(name)
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
    if unknown := [dtype for dtype in dtypes if dtype not in _NAMES]:
        raise TypeError(f"pwlu: there are CUDA kernels for float32, bfloat16 and float16, not for {unknown[0]}")
    chosen = kernel(index)
    if chosen is None:
        return 0
    wanted = [n for n in kernels.functions() if n.startswith("finish") or any(f"_{_NAMES[d]}_" in n for d in dtypes)]
    with torch.cuda.device(index):
        refuse_during_capture("warming up", index)
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # NVRTC lets other threads run
        list(threads.map(chosen.load, wanted))
    return len(wanted)
