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
from pwlu.kernels.cuda.plan import Gpu, Plan, Processor, plan_backward, plan_finish, plan_finish_moments, plan_map
from pwlu.text import install

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_OLDEST = (7, 5)
_PLANS = 4096  # shapes remembered


class Kernel:
    """The kernels on one device. The methods take the operators' arguments; NotImplemented means: use plain torch for these.

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

    def forward(self, x: Tensor, weight: Tensor, intervals: int, channel_dim: int) -> Tensor:
        """Return y."""
        return self._map("forward", x, weight, intervals, channel_dim)

    def observe(self, x: Tensor, weight: Tensor, intervals: int, channel_dim: int, pool: Tensor) -> Tensor:
        """Return y and add the moments of x to the pool, reading x once."""
        return self._map("observe", x, weight, intervals, channel_dim, pool)

    def moments(self, x: Tensor, channel_dim: int, pool: Tensor) -> Any:
        """Add the moments of x to the pool."""
        found = self._run_map("moments", x, None, [0] * 5, pool.shape[1], 1, channel_dim, pool)
        return NotImplemented if found is NotImplemented else None

    def lookup(self, x: Tensor, *rest: Any) -> Tensor:
        """Return y of the fused form."""
        *tables, channel_dim = rest
        channels, columns = tables[2].shape
        dtype = tables[0].dtype
        if dtype not in _KINDS or any(t.dtype != dtype or not t.is_contiguous() for t in tables):
            tables, dtype = [t.to(torch.float32).contiguous() for t in tables], torch.float32
        parameters = [*layout.addresses(tables), 0]
        return self._run_map("lookup", x, dtype, parameters, channels, columns - 2, channel_dim)

    def _map(
        self, what: str, x: Tensor, weight: Tensor, intervals: int, channel_dim: int, pool: Tensor | None = None
    ) -> Tensor:
        channels, weight = weight.shape[0] // (intervals + 5), _for_kernel(weight)
        (address,) = layout.addresses([weight])
        parameters = layout.blocks(address, channels, intervals, weight.itemsize)
        return self._run_map(what, x, weight.dtype, parameters, channels, intervals, channel_dim, pool)

    def _run_map(
        self,
        what: str,
        x: Tensor,
        dtype: torch.dtype | None,
        parameters: list[int],
        channels: int,
        intervals: int,
        channel_dim: int,
        pool: Tensor | None = None,
    ) -> Tensor:
        """Call a kernel from x to y, or to the pool alone. `dtype`, `parameters`: type and addresses of what it reads."""
        if x.dtype not in _KINDS or (pool is not None and (pool.dtype != torch.float32 or not pool.is_contiguous())):
            return NotImplemented
        y = torch.empty_like(x) if dtype else x
        if not x.numel():
            return y
        x = layout.laid_out_as(y, x) if dtype else layout.dense(x)
        (source,) = layout.addresses([x])
        target = y.data_ptr() if dtype else 0
        aligned = not (source | target) & 15
        form = layout.geometry(x, channels, channel_dim)
        plan = self._map_plan(what, _NAMES[x.dtype], form, intervals, _KINDS[dtype] if dtype else 0, aligned)
        if plan is None:
            return NotImplemented
        second = None if pool is None else self._finish_moments_plan(plan, channels)
        if dtype:
            self._teach((what, self.index, x.dtype, dtype, intervals, *form, aligned), plan, second)
        addresses = [source, 0, target, *parameters, *[0] * 5]
        if pool is None or second is None:
            self._launch(plan, [*addresses, 0, 0])
            return y
        partial = x.new_empty(plan.splits * channels * 3, dtype=torch.float32)
        addresses += [partial.data_ptr(), *layout.addresses([pool])]
        self._launch(plan, addresses)
        self._launch(second, addresses)
        torch.autograd.graph.increment_version(pool)  # as every change in place does
        return y

    def backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, intervals: int, channel_dim: int, need_input: bool, need_weight: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the weight; an empty tensor for one that is not needed."""
        if x.dtype not in _KINDS:
            return NotImplemented
        channels, grad_x = weight.shape[0] // (intervals + 5), torch.empty_like(x)  # the kernels always write it
        if not x.numel():
            return grad_x, weight.new_zeros(weight.shape if need_weight else 0)
        x = layout.laid_out_as(grad_x, x)
        grad = layout.laid_out_as(x, grad.to(x.dtype))
        packed = _for_kernel(weight)
        *addresses, address = layout.addresses([x, grad, grad_x, packed])
        aligned = not (addresses[0] | addresses[1] | addresses[2]) & 15
        form = layout.geometry(x, channels, channel_dim)
        plan = self._backward_plan(need_weight, _NAMES[x.dtype], form, intervals, _KINDS[packed.dtype], aligned)
        if plan is None:
            return NotImplemented
        second = self._finish_plan(plan, channels, intervals) if need_weight and plan.splits > 1 else None
        what = "backward" if need_weight else "backward_input"
        self._teach((what, self.index, x.dtype, packed.dtype, intervals, *form, aligned), plan, second)
        addresses += layout.blocks(address, channels, intervals, packed.itemsize)
        grad_weight = torch.empty_like(packed) if need_weight else packed.new_empty(0)
        addresses += layout.blocks(grad_weight.data_ptr(), channels, intervals, packed.itemsize) if need_weight else [0] * 5
        if second is None:
            self._launch(plan, [*addresses, 0, 0])
        else:
            partial = x.new_empty(plan.splits * channels * (intervals + 3) * 2, dtype=torch.float32)
            self._launch(plan, [*addresses, partial.data_ptr(), 0])
            self._launch(second, [*addresses, partial.data_ptr(), 0])
        return grad_x if need_input else x.new_empty(0), grad_weight.to(weight.dtype)


def _for_kernel(weight: Tensor) -> Tensor:
    """Return the weight as a kernel reads it: itself, wherever it is contiguous and of a type that kernels know."""
    return (weight if weight.dtype in _KINDS else weight.to(torch.float32)).contiguous()


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
