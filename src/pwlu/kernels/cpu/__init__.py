"""The CPU kernel: find or build the library of ``cpu.c``, and call its functions on tensors."""

import ctypes
import functools
import os
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pwlu.kernels import build, eager, layout
from pwlu.reference import compute_dtype

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_POINTER, _LONG, _UNSIGNED, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint, ctypes.c_double
_WEIGHT = (_LONG, _POINTER)  # intervals, weight
_SIGNATURES: dict[str, tuple[int, tuple[Any, ...]]] = {  # pointers before the sizes of x, and what follows; as CpuKernel in C++
    "forward": (2, (_LONG, *[_POINTER] * 5)),
    "lookup": (2, (_LONG, *[_POINTER] * 4)),
    "backward": (3, (_LONG, *[_POINTER] * 10)),
    "moments": (1, (_POINTER,)),
    "normalization": (1, (*[_POINTER] * 5, _DOUBLE, _DOUBLE, _POINTER, _POINTER)),
    "norm_forward": (3, (_POINTER, *_WEIGHT, _POINTER)),
    "norm_backward": (4, (_POINTER, _POINTER, *_WEIGHT, _POINTER)),
    "norm_input": (3, (_POINTER, _POINTER, _DOUBLE, ctypes.c_int, *_WEIGHT)),
    "nonuniform_forward": (2, _WEIGHT),
    "nonuniform_backward": (3, (*_WEIGHT, _POINTER)),
}
_WORKER = ctypes.CFUNCTYPE(None, _POINTER)
_PARALLEL = ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _UNSIGNED, _UNSIGNED)


@_PARALLEL
def python_threads(worker: int, data: int, threads: int, _flags: int) -> None:
    """Implement GOMP_parallel with Python threads, for platforms without it. The C code runs without the GIL."""
    work = _WORKER(worker)
    helpers = []
    for _ in range(threads - 1):
        helper = threading.Thread(target=work, args=(data,))
        try:
            helper.start()
        except RuntimeError:  # cannot start more threads: continue with those we have
            break
        helpers.append(helper)
    work(data)
    for helper in helpers:
        helper.join()


def torch_threads() -> Any:
    """Return GOMP_parallel of the OpenMP runtime that PyTorch uses, or None if it has no such function.

    A second OpenMP runtime would have its own threads, and the threads of both runtimes would compete for the same cores.
    """
    try:
        return ctypes.CDLL(torch._C.__file__).GOMP_parallel  # resolved among the dependencies of torch
    except (OSError, AttributeError):
        return None


class Kernel:
    """One compiled variant of ``cpu.c``. The methods take the arguments of the operators, with all tensors on the CPU."""

    def __init__(self, variant: str, path: Path, parallel: Any = None) -> None:
        self.variant, self.path = variant, path
        library = ctypes.CDLL(str(path))
        if not hasattr(library, "pwlu_source_id"):
            raise OSError(f"{path.name} is not a library of pwlu")
        library.pwlu_source_id.restype = ctypes.c_uint32
        if library.pwlu_source_id() != build.source_id():
            raise OSError(f"{path.name} was built from another version of {build.SOURCE.name}")
        self._parallel = ctypes.cast(parallel or torch_threads() or python_threads, _POINTER)
        self._functions = {name: getattr(library, f"pwlu_{name}") for name in _SIGNATURES}
        for name, (before, after) in _SIGNATURES.items():
            start = (_POINTER, _UNSIGNED, ctypes.c_int, *[_POINTER] * before)
            self._functions[name].argtypes = [*start, _LONG, _LONG, _LONG, *after]

    def _call(
        self, name: str, x: Tensor, sizes: tuple[int, int, int], before: Sequence[Any], after: Sequence[Any], intervals: int = 0
    ) -> None:
        """Call a function of ``cpu.c``, whose arguments are `before` and `after` the `sizes` of x."""
        eager.register_cpu(self, self._parallel, self._functions.values())
        start = (self._parallel, torch.get_num_threads(), _DTYPES[x.dtype])
        status = self._functions[name](*start, *before, *sizes, *after)
        if status == 1:
            raise MemoryError("the CPU kernel of pwlu could not allocate scratch memory (channels x intervals x threads)")
        if status:
            raise ValueError(
                f"pwlu: the CPU kernel supports fewer than 2^24 intervals, and channels x intervals below 2^30, not {sizes[1]} "
                f"channels with {intervals} intervals. Use fewer of them, or set PWLU_CPU_KERNEL=reference"
            )

    def forward(self, x: Tensor, weight: Tensor, intervals: int, channel_dim: int) -> Tensor:
        """Return y."""
        return self._forward("forward", x, weight, intervals, channel_dim)

    def nonuniform_forward(self, x: Tensor, weight: Tensor, intervals: int, channel_dim: int) -> Tensor:
        """Return y of non-uniform PWLUs."""
        return self._forward("nonuniform_forward", x, weight, intervals, channel_dim)

    def per_sample_forward(self, x: Tensor, weight: Tensor, intervals: int, channel_dim: int) -> Tensor:
        """Return y of functions that differ between samples."""
        return self._forward("forward", x, weight, intervals, channel_dim, x.shape[0])

    def _forward(self, what: str, x: Tensor, weight: Tensor, intervals: int, channel_dim: int, samples: int = 1) -> Tensor:
        weight = _for_compute(x, weight)
        functions, blocks = layout.channels_and_blocks(what, weight, intervals, _whole)
        return self._map(what, x, [weight], blocks(weight.data_ptr()), functions, intervals, channel_dim, samples)

    def lookup(self, x: Tensor, *rest: Any) -> Tensor:
        """Return y in the inference form."""
        *tables, channel_dim = rest
        channels, columns = tables[2].shape
        tables = [_for_compute(x, table) for table in tables]
        return self._map("lookup", x, tables, [t.data_ptr() for t in tables], channels, columns - 2, channel_dim, 1)

    def _map(self, what: str, x: Tensor, held: list[Tensor], parameters: list[int], *sizes: int) -> Tensor:
        """Call a function that maps x to y. `held` are the tensors whose addresses are in `parameters`."""
        y = torch.empty_like(x)
        if x.numel():
            x = layout.laid_out_as(y, x)
            source, *_ = layout.addresses([x, *held])
            self._call_per_sample(what, x, [source, y.data_ptr()], parameters, *sizes)
        return y

    def _call_per_sample(self, name: str, x: Tensor, before: list[int], after: list[int], *sizes: int) -> None:
        """Call a function for each sample, or once. `before` are addresses of tensors like x, `after` those of blocks, or 0."""
        functions, intervals, channel_dim, samples = sizes
        geometry = layout.geometry(x, functions // samples, channel_dim, samples)
        of_x = x.numel() // samples * x.itemsize
        of_block = functions // samples * compute_dtype(x).itemsize
        for sample in range(samples):
            tensors = [address and address + sample * of_x for address in before]
            blocks = [a and a + sample * of_block * (intervals + 1 if i % 5 == 2 else 1) for i, a in enumerate(after)]
            self._call(name, x, geometry, tensors, (intervals, *blocks), intervals)

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        intervals: int,
        channel_dim: int,
        *need: bool,
        what: str = "backward",
        samples: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the weight; an empty tensor for a gradient that is not needed."""
        need_input, need_weight = need
        like = torch.empty_like(x, device="meta")
        grad_x = torch.empty_like(x) if need_input else x.new_empty(0)
        if not x.numel():
            return grad_x, weight.new_zeros(weight.shape if need_weight else 0)
        x, grad = layout.laid_out_as(like, x), layout.laid_out_as(like, grad.to(x.dtype))
        packed = _for_compute(x, weight)
        functions, blocks = layout.channels_and_blocks(what, packed, intervals, _whole)
        grad_weight = torch.empty_like(packed) if need_weight else packed.new_empty(0)
        of_grad, source, address = layout.addresses([grad, x, packed])
        parameters = blocks(address)
        gradients = blocks(grad_weight.data_ptr()) if need_weight else [0] * len(parameters)
        before, after = [of_grad, source, grad_x.data_ptr() if need_input else 0], [*parameters, *gradients]
        self._call_per_sample(what, x, before, after, functions, intervals, channel_dim, samples)
        return grad_x, grad_weight.to(weight.dtype)

    def per_sample_backward(self, grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the weight; see :meth:`per_sample_forward`."""
        return self.backward(grad, x, *rest, samples=x.shape[0])

    def nonuniform_backward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the knot weight; an empty tensor for a gradient that is not needed."""
        return self.backward(*arguments, what="nonuniform_backward")

    def observe(self, x: Tensor, weight: Tensor, intervals: int, channel_dim: int, pool: Tensor) -> Tensor:
        """Return y, and add the moments of x to the pool in place."""
        done = self.moments(x, channel_dim, pool)
        return NotImplemented if done is NotImplemented else self.forward(x, weight, intervals, channel_dim)

    def moments(self, x: Tensor, channel_dim: int, pool: Tensor) -> Any:
        """Add the moments of x to the pool in place.

        Return NotImplemented if the pool is not contiguous, or does not have the compute dtype.
        """
        if not layout.is_plain(pool, compute_dtype(x)):
            return NotImplemented
        if x.numel():
            x = layout.dense(x)
            source, target = layout.addresses([x, pool])
            self._call("moments", x, layout.geometry(x, pool.shape[1], channel_dim), [source], [target])
            torch.autograd.graph.increment_version(pool)  # as every in-place operation does
        return None

    # A batch norm followed by a PWLU.

    def normalization(self, x: Tensor, *rest: Any) -> Tensor:
        """Return the norm (4, C): in training that of the batch, which updates the state, else that of the running statistics.

        Return NotImplemented if x is empty, or a vector is not contiguous or does not have the compute dtype.
        """
        state = layout.NormState(*rest)
        vectors = (state.gamma, state.beta, state.running_mean, state.running_var, state.pool)
        dtype = compute_dtype(x)
        if not x.numel() or not all(layout.is_plain(v, dtype) for v in vectors):
            return NotImplemented
        x, norm = layout.dense(x), x.new_empty(4, x.shape[1], dtype=dtype)
        source = layout.addresses([x])[0] if state.training else None
        *of_vectors, pool = layout.optional_addresses(*vectors)
        (batches,) = layout.optional_addresses(state.batches)
        after = (*of_vectors, batches, state.factor, state.eps, pool, norm.data_ptr())
        self._call("normalization", x, layout.geometry(x, x.shape[1], 1), [source], after)
        layout.note_changes(state)
        return norm

    def norm_forward(
        self, x: Tensor, residual: Tensor | None, norm: Tensor, weight: Tensor, intervals: int, pool: Tensor | None
    ) -> Tensor:
        """Return y of the normalized x. If there is a pool, add the moments of z to it in place."""
        y = torch.empty_like(x)
        if not x.numel():
            return y
        if not layout.is_plain(pool, norm.dtype):
            return NotImplemented
        x, residual = layout.laid_out_as(y, x), residual if residual is None else layout.laid_out_as(y, residual)
        packed = _for_compute(x, weight)
        source, of_norm, of_weight = layout.addresses([x, norm, packed])
        added, of_pool = layout.optional_addresses(residual, pool)
        before, after = (source, added, y.data_ptr()), (of_norm, intervals, of_weight, of_pool)
        self._call("norm_forward", x, layout.geometry(x, x.shape[1], 1), before, after, intervals)
        if pool is not None:
            torch.autograd.graph.increment_version(pool)
        return y

    def norm_backward(
        self, grad: Tensor, x: Tensor, residual: Tensor | None, norm: Tensor, weight: Tensor, intervals: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient of z (empty without a residual), the sums of the norm, and the gradient of the weight."""
        grad_z, sums = x.new_empty(0) if residual is None else torch.empty_like(x), norm.new_zeros(3, norm.shape[1])
        if not x.numel():
            return grad_z, sums, torch.zeros_like(weight)
        x = layout.laid_out_as(grad_z, x) if residual is not None else layout.dense(x)
        grad = layout.laid_out_as(x, grad.to(x.dtype))
        residual = residual if residual is None else layout.laid_out_as(x, residual)
        packed = _for_compute(x, weight)
        grad_weight = torch.empty_like(packed)
        of_grad, source, of_norm, of_weight = layout.addresses([grad, x, norm, packed])
        (added,) = layout.optional_addresses(residual)
        before = (of_grad, source, added, grad_z.data_ptr() if added else None)
        after = (of_norm, sums.data_ptr(), intervals, of_weight, grad_weight.data_ptr())
        self._call("norm_backward", x, layout.geometry(x, x.shape[1], 1), before, after, intervals)
        return grad_z, sums, grad_weight.to(weight.dtype)

    def norm_input(self, *arguments: Any) -> Tensor:
        """Return the gradient of x, the input of the norm; see :class:`pwlu.kernels.layout.NormInput`."""
        grad, x, norm, weight, intervals, sums, count, grad_is_of_z = layout.NormInput(*arguments)
        grad_x = torch.empty_like(x)
        if not x.numel():
            return grad_x
        x, grad = layout.laid_out_as(grad_x, x), layout.laid_out_as(grad_x, grad.to(x.dtype))
        packed = _for_compute(x, weight)
        of_grad, source, of_norm, of_weight = layout.addresses([grad, x, norm, packed])
        (of_sums,) = layout.optional_addresses(sums)
        before, after = (of_grad, source, grad_x.data_ptr()), (of_norm, of_sums, count, grad_is_of_z, intervals, of_weight)
        self._call("norm_input", x, layout.geometry(x, x.shape[1], 1), before, after, intervals)
        return grad_x


def _for_compute(x: Tensor, parameter: Tensor) -> Tensor:
    """Return a parameter as the C code needs it: float64 if x is float64, else float32, and contiguous."""
    return parameter.to(compute_dtype(x)).contiguous()


def _whole(weight: int, **_: int) -> list[int]:
    """Return the only address that the C functions of non-uniform PWLUs need."""
    return [weight]


def usable_variants() -> list[str]:
    """Return the variants that this CPU can run, according to PyTorch, fastest first."""
    capability = torch.backends.cpu.get_cpu_capability().lower()
    best = next((v for v in build.variants() if capability.startswith(v)), "portable")
    return list(build.variants()[build.variants().index(best) :])


def installed(variant: str) -> Kernel | None:
    """Return the kernel of a variant that was installed with the package, or None."""
    for path in sorted(Path(__file__).parent.glob(f"_cpu_{variant}.*")):
        try:
            return Kernel(variant, path)
        except OSError:  # from another version or platform: build it instead
            continue
    return None


@functools.cache
def load(variant: str) -> Kernel:
    """Return the kernel of a variant, from the installed package or compiled on first use; raise OSError if that fails."""
    if variant not in usable_variants():
        raise OSError(f"unknown or unusable CPU kernel {variant!r}: this processor can run {', '.join(usable_variants())}")
    if kernel := installed(variant):
        return kernel
    path = build.build(variant)
    try:
        return Kernel(variant, path)
    except OSError:  # built on another machine that shares the cache: build it again
        path.unlink(missing_ok=True)
        return Kernel(variant, build.build(variant))


@functools.cache
def choose() -> tuple[Kernel | None, str]:
    """Return the kernel to use on the CPU, or None for plain PyTorch, and the reason.

    ``PWLU_CPU_KERNEL`` selects one by name: reference, portable, avx2 or avx512.

    Raises:
        OSError: if the selected kernel is not available.
    """
    if named := os.environ.get("PWLU_CPU_KERNEL"):
        why = f"PWLU_CPU_KERNEL={named}"
        return (None, why) if named == "reference" else (load(named), why)
    reasons = []
    for variant in usable_variants():
        try:
            kernel = load(variant)
        except OSError as error:
            reasons.append(f"{variant}: {error}")
        else:
            return kernel, "; ".join(["the fastest variant for this processor, according to torch", *reasons])
    return None, "; ".join(reasons)


def kernel() -> Kernel | None:
    """Return the kernel that :func:`choose` selects; warn if there is none."""
    chosen, why = choose()
    if chosen is None and "PWLU_CPU_KERNEL" not in os.environ:
        warnings.warn(
            f"pwlu runs without its compiled CPU kernel, which is correct but many times slower ({why}). "
            "Install a C compiler (gcc or clang) and restart, or set PWLU_CPU_KERNEL=reference to silence this warning. "
            "`pwlu info` shows which kernels are in use.",
            stacklevel=2,
        )
    return chosen
