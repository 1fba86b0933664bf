"""Launch the CUDA kernels on tensors."""

import functools
import itertools
import struct
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pwlu.kernels import eager, layout
from pwlu.kernels.cuda.compile import RULE_UNITS
from pwlu.kernels.cuda.driver import Loaded, launcher
from pwlu.kernels.cuda.plan import (
    Gpu,
    Plan,
    Processor,
    Sizes,
    plan_backward,
    plan_dynamic_backward,
    plan_dynamic_forward,
    plan_dynamic_input,
    plan_finish,
    plan_finish_channels,
    plan_map,
    plan_rule,
    plan_running_norm,
    sum_lines,
)
from pwlu.reference import dynamic as dynamic_reference

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_PLANS = 4096  # size of the caches of plans
_NONE = [0] * 5
_UNIT = struct.Struct("QQii")  # addresses of weight and gradient; `first` and `channels` in rule.cu
_LARGEST = 1e38  # so that numbers of the learning rule are numbers in float32, too


def _arguments(
    x: int = 0,
    grad: int = 0,
    out: int = 0,
    parameters: Sequence[int] = _NONE,
    gradients: Sequence[int] = _NONE,
    partial: int = 0,
    pool: int = 0,
    residual: int = 0,
    norm: int = 0,
    sums: int = 0,
    network: Sequence[int] = [0] * 15,
    factor: float = 0.0,
    eps: float = 0.0,
) -> list[int]:
    """Return the first fields of ``struct Arguments`` in element.cuh: 33 addresses, and two floats in one 64-bit word."""
    (numbers,) = struct.unpack("Q", struct.pack("2f", factor, eps))
    return [x, grad, out, *parameters, *gradients, partial, pool, residual, norm, sums, *network, numbers]


class _DynamicCall:
    """A call of a dynamic unit: x with its samples first, the parameters as kernels need them, and sizes.

    `inner` is the number of elements that follow each other in memory and have the same mean.
    """

    def __init__(self, x: Tensor, parameters: Sequence[Tensor], intervals: int, channel_dim: int) -> None:
        self.x, self.intervals, self.channel_dim = x, intervals, channel_dim
        self.parameters = [p.to(torch.float32).contiguous() for p in parameters]
        weight, directions, first, _, second, _ = self.parameters
        outputs, (hidden, features) = second.shape[0], first.shape
        functions = weight.shape[0] // (intervals + 5)
        count = directions.shape[0] // (functions * (intervals + 1))
        self.sizes = Sizes(x.shape[0], functions, outputs // count, count, features, hidden)
        self.form, self.samples = layout.sample_geometry(x, self.sizes.of_sample(), channel_dim)
        self.inner = x.numel() // x.shape[0] if features == 1 else x.stride(channel_dim)


class Kept(NamedTuple):
    """What the learning rule keeps from before an optimizer's step until after it."""

    channels: Sequence[int]
    intervals: int
    weights: list[int]  # their addresses
    units: list[bytes]  # the units of each launch
    memory: Tensor
    arguments: dict[str, Any]  # addresses in the memory, and `sharing`


class Kernel:
    """The kernels on one device. The methods take the arguments of the operators.

    They return NotImplemented if plain PyTorch has to run instead: for float64, and if no plan fits. For example, the table of
    very many intervals exceeds shared memory.
    """

    def __init__(self, index: int, processor: Processor | None = None) -> None:
        self.index = index
        self.processor = processor or _processor(index)
        self._loaded: dict[str, Loaded] = {}
        self._lock = threading.Lock()
        # A plan is computed once per shape.
        gpu = Gpu(self.processor, lambda name, threads, shared: self.load(name).resident(threads, shared))
        self._map_plan = functools.lru_cache(_PLANS)(functools.partial(plan_map, gpu=gpu))
        self._backward_plan = functools.lru_cache(_PLANS)(functools.partial(plan_backward, gpu=gpu))
        self._finish_plan = functools.lru_cache(_PLANS)(plan_finish)
        self._finish_channels_plan = functools.lru_cache(_PLANS)(plan_finish_channels)
        self._dynamic_plans = {
            "dynamic_forward": functools.lru_cache(_PLANS)(functools.partial(plan_dynamic_forward, gpu=gpu)),
            "dynamic_backward": functools.lru_cache(_PLANS)(functools.partial(plan_dynamic_backward, gpu=gpu)),
            "dynamic_input": functools.lru_cache(_PLANS)(functools.partial(plan_dynamic_input, gpu=gpu)),
        }
        self._rule_plan = functools.lru_cache(_PLANS)(functools.partial(plan_rule, processor=self.processor))

    def load(self, name: str) -> Loaded:
        """Return the kernel with this name; compile and load it on first use."""
        if name not in self._loaded:
            loaded = Loaded(name, self.index, self.processor.architecture, self.processor.shared_of_block)
            with self._lock:  # several threads may load it at the same time: keep the first
                self._loaded.setdefault(name, loaded)
        return self._loaded[name]

    def _launch(self, plan: Plan, addresses: Sequence[int], units: bytes = b"") -> None:
        kernel = self.load(plan.kernel)
        if torch._C._cuda_getDevice() == self.index:
            kernel(plan, addresses, units)
        else:
            with torch.cuda.device(self.index):
                kernel(plan, addresses, units)

    def _run(
        self, x: Tensor, key: tuple[Any, ...], plans: Sequence[Plan | None], of_split: int, arguments: dict[str, Any]
    ) -> None:
        """Launch kernels one after another. With several, the first may write partial results: `of_split` floats per split.

        `key` identifies the call for eager.cpp, so that later calls need no Python. `arguments` are for :func:`_arguments`.
        """
        chosen = [plan for plan in plans if plan]
        if eager.is_new(key):
            eager.register_gpu(key, [self._described(plan) for plan in chosen], chosen[0].splits, launcher())
        partial = None
        if len(chosen) > 1 and of_split:
            partial = x.new_empty(chosen[0].splits * of_split, dtype=torch.float32)
            arguments["partial"] = partial.data_ptr()
        addresses = _arguments(**arguments)
        for plan in chosen:
            self._launch(plan, addresses)

    def _described(self, plan: Plan) -> eager.Launch:
        return eager.Launch(self.load(plan.kernel).handle, plan.blocks, plan.threads, plan.shared, tuple(plan.numbers))

    # Maps.

    def forward(self, x: Tensor, weight: Tensor, intervals: int, channel_dim: int) -> Tensor:
        """Return y."""
        return self._map("forward", x, weight, intervals, channel_dim)

    def nonuniform_forward(self, x: Tensor, weight: Tensor, intervals: int, channel_dim: int) -> Tensor:
        """Return y of non-uniform PWLUs."""
        return self._map("nonuniform_forward", x, weight, intervals, channel_dim)

    def observe(self, x: Tensor, weight: Tensor, intervals: int, channel_dim: int, pool: Tensor) -> Tensor:
        """Return y, and add the moments of x to the pool in place, reading x once."""
        return self._map("observe", x, weight, intervals, channel_dim, pool)

    def norm_forward(
        self, x: Tensor, residual: Tensor | None, norm: Tensor, weight: Tensor, intervals: int, pool: Tensor | None
    ) -> Tensor:
        """Return y of the normalized x. If there is a pool, add the moments of z to it in place."""
        what = f"norm_{'' if residual is None else 'add_'}{'forward' if pool is None else 'observe'}"
        return self._map(what, x, weight, intervals, 1, pool, residual, norm)

    def moments(self, x: Tensor, channel_dim: int, pool: Tensor) -> Any:
        """Add the moments of x to the pool in place."""
        found = self._run_map("moments", x, None, _NONE, pool.shape[1], 1, channel_dim, pool)
        return NotImplemented if found is NotImplemented else None

    def lookup(self, x: Tensor, *rest: Any) -> Tensor:
        """Return y in the inference form."""
        *tables, channel_dim = rest
        channels, columns = tables[2].shape
        dtype = tables[0].dtype
        if dtype not in _KINDS or any(t.dtype != dtype or not t.is_contiguous() for t in tables):
            tables, dtype = [t.to(torch.float32).contiguous() for t in tables], torch.float32
        parameters = [*layout.addresses(tables), 0]
        return self._run_map("lookup", x, dtype, parameters, channels, columns - 2, channel_dim)

    def _map(self, what: str, x: Tensor, weight: Tensor, intervals: int, channel_dim: int, *others: Tensor | None) -> Tensor:
        weight = _for_kernel(weight)
        (address,) = layout.addresses([weight])
        channels, blocks = layout.channels_and_blocks(what, weight, intervals)
        return self._run_map(what, x, weight.dtype, blocks(address), channels, intervals, channel_dim, *others)

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
        residual: Tensor | None = None,
        norm: Tensor | None = None,
    ) -> Tensor:
        """Launch a kernel that maps x to y, or one that only adds to the pool.

        `dtype` and `parameters` are the dtype and the addresses of the parameters. If `dtype` is None, no y is computed.
        """
        if x.dtype not in _KINDS or not layout.is_plain(pool):
            return NotImplemented
        y = torch.empty_like(x) if dtype else x
        if not x.numel():
            return y
        x = layout.laid_out_as(y, x) if dtype else layout.dense(x)
        residual = residual if residual is None else layout.laid_out_as(x, residual)
        source, added = layout.optional_addresses(x, residual)
        target = y.data_ptr() if dtype else 0
        aligned = not (source | target | added) & 15
        form = layout.geometry(x, channels, channel_dim)
        plan = self._map_plan(what, NAMES[x.dtype], form, intervals, _KINDS[dtype] if dtype else 0, aligned)
        if plan is None:
            return NotImplemented
        second = None if pool is None else self._finish_channels_plan("moments", plan, channels)
        key = (what, self.index, x.dtype, dtype or torch.float32, intervals, *form, aligned)
        of_pool, of_norm = layout.optional_addresses(pool, norm)
        tensors = {"x": source, "out": target, "parameters": parameters, "pool": of_pool, "residual": added, "norm": of_norm}
        self._run(x, key, [plan, second], 3 * channels, tensors)
        if pool is not None:
            torch.autograd.graph.increment_version(pool)  # as every in-place operation does
        return y

    # Backward passes.

    def backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, intervals: int, channel_dim: int, *need: bool, what: str = "backward"
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the weight; an empty tensor for a gradient that is not needed."""
        need_input, need_weight = need
        found = self._backward(what if need_weight else f"{what}_input", grad, x, weight, intervals, channel_dim)
        if found is NotImplemented or need_input:
            return found
        return x.new_empty(0), found[1]  # the kernels always compute the gradient of x

    def nonuniform_backward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the knot weight; an empty tensor for a gradient that is not needed."""
        return self.backward(*arguments, what="nonuniform_backward")

    def norm_backward(
        self, grad: Tensor, x: Tensor, residual: Tensor | None, norm: Tensor, weight: Tensor, intervals: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient of z (empty without a residual), the sums of the norm, and the gradient of the weight."""
        sums = norm.new_empty(3, norm.shape[1])
        what = "norm_backward" if residual is None else "norm_add_backward"
        found = self._backward(what, grad, x, weight, intervals, 1, residual, norm, sums)
        if found is NotImplemented:
            return NotImplemented
        return found[0], sums, found[1]

    def norm_input(self, *arguments: Any) -> Tensor:
        """Return the gradient of x, the input of the norm; see :class:`pwlu.kernels.layout.NormInput`."""
        grad, x, norm, weight, intervals, sums, count, grad_is_of_z = layout.NormInput(*arguments)
        what, factor = "norm_add_input" if grad_is_of_z else "norm_input", 1.0 / count if count else 0.0
        found = self._backward(what, grad, x, weight, intervals, 1, None, norm, sums, factor)
        return NotImplemented if found is NotImplemented else found[0]

    def _backward(
        self,
        what: str,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        intervals: int,
        channel_dim: int,
        residual: Tensor | None = None,
        norm: Tensor | None = None,
        sums: Tensor | None = None,
        factor: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Return the output, shaped like x, and the gradient of the weight. Each is empty if the kernel does not write it."""
        if x.dtype not in _KINDS:
            return NotImplemented
        lines, packed = sum_lines(what, intervals), _for_kernel(weight)
        channels, blocks = layout.channels_and_blocks(what, packed, intervals)
        out = x.new_empty(0) if what == "norm_backward" else torch.empty_like(x)
        if not x.numel():
            return out, weight.new_zeros(weight.shape if lines else 0)
        x = layout.laid_out_as(out, x) if out.numel() else layout.dense(x)
        grad = layout.laid_out_as(x, grad.to(x.dtype))
        residual = residual if residual is None else layout.laid_out_as(x, residual)
        source, of_grad, address = layout.addresses([x, grad, packed])
        added, of_norm, of_sums = layout.optional_addresses(residual, norm, sums)
        aligned = not (source | of_grad | out.data_ptr() | added) & 15
        form = layout.geometry(x, channels, channel_dim)
        plan = self._backward_plan(what, NAMES[x.dtype], form, intervals, _KINDS[packed.dtype], aligned)
        if plan is None:
            return NotImplemented
        second = self._finish_plan(what, plan, form[1], lines) if lines and plan.splits > 1 else None
        grad_weight = torch.empty_like(packed) if lines else packed.new_empty(0)
        tensors = {
            "x": source,
            "grad": of_grad,
            "out": out.data_ptr(),
            "parameters": blocks(address),
            "gradients": blocks(grad_weight.data_ptr()) if lines else _NONE,
            "residual": added,
            "norm": of_norm,
            "sums": of_sums,
            "factor": factor,
        }
        key = (what, self.index, x.dtype, packed.dtype, intervals, *form, aligned)
        self._run(x, key, [plan, second], 2 * lines * channels, tensors)
        return out, grad_weight.to(weight.dtype)

    # Dynamic units.

    def dynamic_forward(self, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """Return y and the state. Return NotImplemented if x is empty or float64, or a kernel does not fit."""
        *parameters, intervals, channel_dim = rest
        if x.dtype not in _KINDS or not x.numel():
            return NotImplemented
        like, x = torch.empty_like(x), layout.samples_first(x)
        call = _DynamicCall(x, parameters, intervals, channel_dim)
        of_sample = call.sizes.features + call.sizes.hidden + call.sizes.outputs()
        state, y = x.new_empty(call.sizes.samples * of_sample, dtype=torch.float32), torch.empty_like(x)
        if not self._run_dynamic("dynamic_forward", call, state, y):
            return NotImplemented
        return layout.laid_out_as(like, y), state

    def dynamic_backward(self, grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        """Return the gradients of x and of the parameters."""
        *parameters, state, intervals, channel_dim = rest
        if x.dtype not in _KINDS or not x.numel():
            return NotImplemented
        like, x = torch.empty_like(x), layout.samples_first(x)
        grad, grad_x = layout.laid_out_as(x, grad.to(x.dtype)), torch.empty_like(x)
        call = _DynamicCall(x, parameters, intervals, channel_dim)
        samples, functions, rates, count, features, hidden = call.sizes
        own = call.sizes.of_sample()
        sizes = (intervals + 5) * own, count * own * (intervals + 1)
        of_weight, of_directions = (x.new_empty(size, dtype=torch.float32) for size in sizes)
        of_network = [torch.empty_like(p) for p in call.parameters[2:]]
        within = [x.new_empty(samples * size, dtype=torch.float32) for size in (call.sizes.outputs(), hidden, features)]
        of_coefficients = x.new_empty(samples * count * own if rates < own else 0, dtype=torch.float32)
        gradients = [*layout.addresses([of_directions, *of_network, *within]), of_coefficients.data_ptr()]
        tensors: dict[str, Any] = {
            "gradients": layout.blocks(of_weight.data_ptr(), own, intervals, 4),
            "gradients_of_network": gradients,
            "factor": features * samples / x.numel(),
        }
        lines = sum_lines("dynamic_backward", intervals)
        if not self._run_dynamic("dynamic_backward", call, state, grad_x, grad, 2 * lines * samples * own, **tensors):
            return NotImplemented
        if rates < own:  # all channels have the same coefficients
            torch.sum(of_coefficients.view(-1, own), 1, out=within[0])
        if not self._run_dynamic("dynamic_input", call, state, grad_x, grad, **tensors):
            return NotImplemented
        if functions < own:  # all channels have the same function
            outer, heights = of_weight.split([4 * own, own * (intervals + 1)])
            of_weight = torch.cat([outer.view(4, own).sum(1), heights.view(own, -1).sum(0)])
            of_directions = of_directions.view(count, own, -1).sum(1).flatten()
        found = (g.to(p.dtype) for g, p in zip((of_weight, of_directions, *of_network), parameters, strict=True))
        return layout.laid_out_as(like, grad_x), *found

    def _run_dynamic(
        self,
        what: str,
        call: "_DynamicCall",
        state: Tensor,
        out: Tensor,
        grad: Tensor | None = None,
        of_split: int = 0,
        gradients_of_network: Sequence[int] = [0] * 9,
        **tensors: Any,
    ) -> bool:
        """Launch the kernels of a step; return whether they fit."""
        x, intervals, sizes, (weight, directions, *_) = call.x, call.intervals, call.sizes, call.parameters
        of_weight, *network = layout.addresses([*call.parameters, state])
        (source, target), (of_grad,) = layout.addresses([x, out]), layout.optional_addresses(grad)
        aligned = not (source | target | of_grad) & 15
        plans = self._dynamic_plans[what](NAMES[x.dtype], call.form, intervals, aligned, call.samples, sizes, call.inner)
        if plans is None:
            return False
        if what == "dynamic_forward" and len(plans) == 3:  # no kernel computes the means
            means = dynamic_reference.means(x, sizes.features, call.channel_dim)
            state[: means.numel()].view_as(means).copy_(means)
        of_unit = weight.shape[0], directions.shape[0], sizes.features, sizes.hidden, sizes.outputs()
        # As dynamic_key_of in eager_dynamic.h.
        key = (what, self.index, x.dtype, torch.float32, intervals, x.shape[0], x.numel(), call.inner, aligned, *of_unit)
        parameters = layout.blocks(of_weight, sizes.functions, intervals, 4)
        tensors |= {"x": source, "grad": of_grad, "out": target, "parameters": parameters}
        tensors["network"] = [*network, *gradients_of_network]
        self._run(x, key, plans, of_split, tensors)
        return True

    # Norms.

    def normalization(self, x: Tensor, *rest: Any) -> Tensor:
        """Return the norm (4, C): in training that of the batch, which updates the state, else that of the running statistics.

        Return NotImplemented if x is empty or float64, or a vector is not contiguous float32.
        """
        state = layout.NormState(*rest)
        vectors = (state.gamma, state.beta, state.running_mean, state.running_var, state.pool)
        if x.dtype not in _KINDS or not x.numel() or not all(map(layout.is_plain, vectors)):
            return NotImplemented
        channels = x.shape[1]
        norm = torch.empty(4, channels, dtype=torch.float32, device=x.device)
        of_gamma, of_beta, of_mean, of_var, of_pool, of_batches = layout.optional_addresses(*vectors, state.batches)
        tensors: dict[str, Any] = {
            "parameters": [of_gamma, of_beta, 0, 0, 0],
            "gradients": [of_mean, of_var, of_batches, 0, 0],
            "norm": norm.data_ptr(),
            "factor": state.factor,
            "eps": state.eps,
        }
        if not state.training:
            key = ("running_norm", self.index, torch.float32, torch.float32, 1, 0, channels, 1, True)
            self._run(x, key, [plan_running_norm(channels)], 0, tensors)
            return norm
        x = layout.dense(x)
        (tensors["x"],) = layout.addresses([x])
        tensors["pool"] = of_pool
        form, aligned = layout.geometry(x, channels, 1), not tensors["x"] & 15
        plan = self._map_plan("moments", NAMES[x.dtype], form, 1, 0, aligned)
        if plan is None:
            return NotImplemented
        second = self._finish_channels_plan("norm", plan, channels)
        key = ("batch_norm", self.index, x.dtype, torch.float32, 1, *form, aligned)
        self._run(x, key, [plan, second], 3 * channels, tensors)
        layout.note_changes(state)
        return norm

    # The learning rule "shared". Both kernels change tensors in place.

    def share_gradients(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        channels: Sequence[int],
        intervals: int,
        sharing: float,
        measure: bool,
    ) -> Kept:
        """Share the gradients of units with these numbers of functions. Return what :meth:`smooth` needs.

        `measure` says that it will have to measure the rate, from copies of the heights and of their gradients.
        """
        units = _pack_units(weights, gradients, channels, intervals)
        if units is None or self._rule_plan("share_gradients", 1, intervals) is None:
            return NotImplemented
        functions = sum(channels)
        heights = functions * (intervals + 1)
        words = functions + (heights if measure else (heights + 1) // 2)  # of 8 bytes: w is float64, heights are float32
        memory = torch.empty(words, dtype=torch.float64, device=weights[0].device)
        start = memory.data_ptr()
        out = start + 8 * functions
        tensors = {"partial": start, "out": out, "sums": out + 4 * heights if measure else 0, "eps": min(sharing, _LARGEST)}
        kept = Kept(channels, intervals, layout.addresses(weights), units, memory, tensors)
        self._run_rule("share_gradients", kept, gradients)
        return kept

    def smooth(self, weights: Sequence[Tensor], kept: Kept, strength: float, rate: Tensor | None, scale: Tensor | None) -> Any:
        """Take the implicit step on the weights; see ``smooth`` in rule.cu for the arguments."""
        if layout.addresses(weights) != kept.weights:  # the optimizer has replaced some
            units = _pack_units(weights, weights, kept.channels, kept.intervals)
            if units is None:
                return NotImplemented
            kept = kept._replace(units=units)
        of_rate, of_scale = layout.optional_addresses(rate, scale)
        self._run_rule("smooth", kept, weights, pool=of_rate, norm=of_scale, factor=min(strength, _LARGEST))
        return None

    def _run_rule(self, what: str, kept: Kept, changed: Sequence[Tensor], **others: Any) -> None:
        for units in kept.units:
            plan = self._rule_plan(what, len(units) // _UNIT.size, kept.intervals)
            assert plan is not None  # share_gradients has checked
            self._launch(plan, _arguments(**kept.arguments, **others), units)
        torch.autograd.graph.increment_version(changed)  # as every in-place operation does


def _pack_units(
    weights: Sequence[Tensor], gradients: Sequence[Tensor], channels: Sequence[int], intervals: int
) -> list[bytes] | None:
    """Return the units of each launch, as rule.cu reads them. None if a tensor cannot be changed in place."""
    size = intervals + 5
    for tensor, count in zip((*weights, *gradients), (*channels, *channels), strict=True):
        if tensor.numel() != count * size or not layout.is_plain(tensor):
            return None
    firsts = itertools.accumulate(channels[:-1], initial=0)
    units = [*map(_UNIT.pack, layout.addresses(weights), layout.addresses(gradients), firsts, channels)]
    return [b"".join(units[start : start + RULE_UNITS]) for start in range(0, len(units), RULE_UNITS)]


def _processor(index: int) -> Processor:
    """Return the properties of a device."""
    found = torch.cuda.get_device_properties(index)
    return Processor(
        f"sm_{found.major}{found.minor}",
        found.multi_processor_count,
        found.max_threads_per_multi_processor,
        found.shared_memory_per_multiprocessor,
        found.shared_memory_per_block_optin,
    )


def _for_kernel(weight: Tensor) -> Tensor:
    """Return the weight itself if it is contiguous and has a supported dtype, else a copy that a kernel can read."""
    return (weight if weight.dtype in _KINDS else weight.to(torch.float32)).contiguous()
