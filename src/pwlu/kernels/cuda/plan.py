"""Plan the launch of an operator: which kernel, how many blocks and threads, and which elements each of them processes.

A plan depends only on shapes and the device, so the same call gives the same bits. Nothing here touches a GPU. A tensor is
(outer, channels, inner) in memory order. There are three forms of kernels:

    planes   inner is large (NCHW, or one channel for all elements): a block processes planes of one channel, or pieces of
             them; a vector never crosses planes
    rows     inner is 1 (channels_last, (B, T, C)): a block processes a panel of channels in a range of rows
    mixed    inner is small or odd (7 x 7): like rows, but neighbouring elements may share a channel
"""

import math
import struct
from collections.abc import Callable
from typing import NamedTuple

from pwlu.kernels.cuda import compile as kernels

_MOST_UNITS = 1 << 30  # maximum number of vectors per block, because a block counts in 32 bits
_MOST_BLOCKS = 65535  # maximum number of blocks along y and z
_BLOCK_RESERVE = 1024  # bytes of shared memory that the system reserves per block
_MAP_STEPS = 16  # vectors per thread of a map, if there is enough work for all multiprocessors
_STATIC_BYTES = 96  # static shared memory of a map with planes
_TABLE_BYTES = 56 << 10  # limit for the tables of a panel
_COLUMN_BYTES = 1100  # limit for the columns of a thread
_PANEL_OVERHEAD = 8.0  # cost of filling the tables of a panel, in steps
_PANEL = 32  # PANEL in share.cuh
_ELEMENTS_FOR_WIDE_PANELS = 64  # minimum number of elements per thread of the GPU; with fewer, panels have half the width
_MANY_INTERVALS = 40  # from here on, few threads fit into shared memory, so each processes several vectors at a time
_CHUNK = 8192  # if there is one channel, its elements are cut into planes of this size
_ELEMENTS_OF_THREAD = 8  # minimum number of elements per thread for vectors of more than one element
_SMALL_PLANE = 1024  # elements; smaller planes use "mixed" if no vectors fit into them


class Processor(NamedTuple):
    """The properties of a GPU that a plan depends on."""

    architecture: str
    multiprocessors: int
    threads: int  # maximum per multiprocessor
    shared: int  # bytes of shared memory per multiprocessor
    shared_of_block: int  # maximum bytes of shared memory per block


class Gpu(NamedTuple):
    """A GPU, and a function from (kernel, threads, shared memory) to the number of resident blocks per multiprocessor."""

    processor: Processor
    resident: Callable[[str, int, int], int]

    def slots(self, kernel: str, threads: int, shared: int) -> int:
        """Return the number of such blocks that the GPU runs at a time."""
        return max(1, self.resident(kernel, threads, shared)) * self.processor.multiprocessors


class Plan(NamedTuple):
    """One launch. ``numbers`` are the last of the kernel's arguments; there are `splits` partial results per channel."""

    kernel: str
    blocks: tuple[int, int, int]
    threads: int
    shared: int
    splits: int
    numbers: bytes


class _Numbers(NamedTuple):
    """The numbers at the end of ``struct Arguments`` in element.cuh, in their order."""

    outer: int = 0
    inner: int = 1
    per_channel: int = 0
    of_split: int = 0
    channels: int = 0
    intervals: int = 0
    splits: int = 0
    kind: int = 0
    width: int = 1
    places: int = 1
    together: int = 1
    groups: int = 1
    piece: int = 1
    magic: int = 0
    shift: int = 0
    samples: int = 1
    functions: int = 0
    rates: int = 0
    directions: int = 0
    features: int = 0
    hidden: int = 0
    first: int = 0

    def pack(self) -> bytes:
        return struct.pack(_FORMAT, *self)


_FORMAT = "4q8i3I7i"
NUMBERS_BYTES = struct.calcsize(_FORMAT)


class Sizes(NamedTuple):
    """The sizes of a dynamic unit: B, C, R, M, F and H of :mod:`pwlu.reference.dynamic`."""

    samples: int
    functions: int
    rates: int
    directions: int
    features: int
    hidden: int

    def of_sample(self) -> int:
        """Return the number of functions of a sample."""
        return max(self.functions, self.rates)

    def outputs(self) -> int:
        """Return the number of coefficients of a sample, M R."""
        return self.directions * self.rates


class _Work(NamedTuple):
    """An operator: the start of its kernel's name, its use of shared memory, and costs in steps of a thread."""

    name: str
    dtype: str
    vectors: dict[str, dict[str, tuple[int, ...]]]
    threads: int
    lines: int
    table: int  # bytes per table entry; 0: no table
    staging: int  # bytes per height in the staging area; 0: the area is shared with other data
    column: int  # bytes per line in the column of a thread
    moments: int  # bytes per element that a thread holds
    overhead: float  # cost of a block
    most_steps: float  # maximum number of steps per block
    afterwards: float  # cost of the sum over splits


def divider(divisor: int) -> tuple[int, int]:
    """Return (magic, shift) with n // divisor == (high half of n * magic + n) >> shift, n < 2^31 (Granlund and Montgomery)."""
    shift = (divisor - 1).bit_length()
    return ((1 << 32) * ((1 << shift) - divisor)) // divisor + 1, shift


def by_shared_memory(processor: Processor, threads: int, shared: int) -> int:
    """Return the number of resident blocks per multiprocessor, ignoring registers; only the driver knows the exact number."""
    return max(1, min(processor.threads // threads, processor.shared // (shared + _BLOCK_RESERVE), 32))


def choose_splits(work: _Work, blocks: int, steps: float, slots: int) -> int:
    """Return the number of splits of `steps` that takes the least time, if `slots` blocks run at a time.

    Blocks run in rounds; the last round may not fill the GPU. A round takes the overhead of a block plus its share of the
    steps. More than one split may need a second kernel that adds the partial results.
    """
    least = max(1, round(steps / work.most_steps))
    candidates = {least, *(max(least, slots * rounds // blocks) for rounds in (1, 2, 3, 4, 6, 8))}
    candidates = {min(c, max(least, int(steps))) for c in candidates}  # at least one step each

    def cost(splits: int) -> float:
        rounds = -(-blocks * splits // slots)
        return rounds * (work.overhead + steps / splits) + (work.afterwards if splits > 1 else 0.0)

    return min(sorted(candidates), key=cost)


def _fitting(work: _Work, gpu: Gpu, fixed: int, of_thread: int) -> int | None:
    """Return the block size that keeps the most threads resident; None if no block fits into shared memory."""
    options = [t for t in (work.threads, work.threads // 2, work.threads // 4) if t >= 32]
    options = [t for t in options if fixed + t * of_thread <= gpu.processor.shared_of_block]
    return max(options, key=lambda t: t * by_shared_memory(gpu.processor, t, fixed + t * of_thread), default=None)


def _plan_planes(work: _Work, geometry: tuple[int, int, int], intervals: int, kind: int, vector: int, gpu: Gpu) -> Plan | None:
    outer, channels, inner = geometry
    units = inner // vector
    fixed, of_thread = work.lines * work.table, work.lines * work.column
    if work.moments and fixed + _STATIC_BYTES > gpu.processor.shared_of_block:
        return None
    threads = _fitting(work, gpu, fixed, of_thread)
    if threads is None:
        return None
    while threads > 32 and 2 * outer * units <= threads:
        threads //= 2
    name = f"{work.name}_many" if work.column and intervals >= _MANY_INTERVALS else work.name
    kernel, shared = f"{name}_planes_{work.dtype}_{vector}", fixed + threads * of_thread
    splits = choose_splits(work, channels, outer * units / threads, gpu.slots(kernel, threads, shared))
    along = min(splits, outer, _MOST_BLOCKS)
    pieces = min(-(-splits // outer), _MOST_BLOCKS) if outer <= _MOST_BLOCKS else 1
    pieces = max(pieces, -(-units // _MOST_UNITS))
    piece = -(-units // pieces)
    along = outer if pieces > 1 else max(along, -(-outer * piece // _MOST_UNITS))  # a block takes planes, or a piece of one
    if along > _MOST_BLOCKS:
        return None
    blocks = channels, along, -(-units // piece)
    magic, shift = divider(units) if along < outer else (0, 0)
    splits = blocks[1] * blocks[2]
    numbers = _Numbers(outer, inner, outer * inner, outer // along, channels, intervals, splits, kind)
    numbers = numbers._replace(piece=piece, magic=magic, shift=shift)
    return Plan(kernel, blocks, threads, shared, splits, numbers.pack())


def _plan_rows(
    work: _Work, geometry: tuple[int, int, int], intervals: int, kind: int, vector: int, gpu: Gpu, samples: int
) -> Plan | None:
    """Return a plan with "rows" or "mixed"; None if this vector width does not fit."""
    outer, channels, inner = geometry
    across, elements = channels * inner // vector, samples * outer * channels * inner
    resident_threads = gpu.processor.multiprocessors * gpu.processor.threads
    work = work._replace(overhead=max(work.overhead, _PANEL_OVERHEAD), most_steps=1e9)
    if inner == 1:
        # With half the width, a block fills half the tables, and there are half as many partial results to add.
        widest = _PANEL if elements >= _ELEMENTS_FOR_WIDE_PANELS * resident_threads else _PANEL // 2
        form, own, width = "rows", vector, -(-across // -(-across // widest))
        width = min(-(-width // 4) * 4, across)  # no two panels share a sector of 32 bytes
        places = vector * _PANEL
        staged = width * vector * ((intervals + 2) | 1) * work.staging
    else:
        work = work._replace(threads=kernels.MIXED_THREADS)
        period = math.lcm(inner, vector) // vector  # after so many vectors, a channel and a vector end at the same element
        if period > work.threads or (vector > 1 and inner < vector - 1):
            return None
        form, own, width = "mixed", min(2, vector), period * max(1, min(work.threads // period, -(-across // period)))
        places, staged = width * vector // inner | 1, 0
    fixed, of_thread = work.lines * places * work.table + staged, work.lines * own * work.column
    if vector > 1 and (fixed > _TABLE_BYTES or of_thread > _COLUMN_BYTES):
        return None
    if inner == 1 and vector > 1 and elements < _ELEMENTS_OF_THREAD * resident_threads:
        return None  # more threads with one element each fill their tables faster
    threads = _fitting(work, gpu, fixed, of_thread) if inner == 1 else work.threads
    if threads is None or threads < width or samples > _MOST_BLOCKS:
        return None
    shared = max(fixed + threads * of_thread, threads * max(own, 2) * work.moments)
    if shared > gpu.processor.shared_of_block:
        return None
    kernel, panels = f"{work.name}_{form}_{work.dtype}_{vector}", -(-across // width)
    splits = choose_splits(work, samples * panels, outer / (threads // width), gpu.slots(kernel, threads, shared))
    splits = max(min(splits, _MOST_BLOCKS), -(-outer // _MOST_UNITS))
    at_once = splits * (threads // width)  # rows
    if at_once < outer and at_once * across >= 1 << 32:  # a thread counts the vectors to its next row in 32 bits
        return None
    of_split = outer // at_once
    numbers = _Numbers(outer, inner, outer * inner, of_split, channels, intervals, splits, kind, width=width, places=places)
    return Plan(kernel, (panels, splits, samples), threads, shared, splits, numbers.pack())


def _plan(
    work: _Work, geometry: tuple[int, int, int], intervals: int, kind: int, aligned: bool, gpu: Gpu, samples: int
) -> Plan | None:
    _, channels, inner = geometry
    chunk = math.gcd(inner, _CHUNK)
    if channels == 1 and chunk >= _CHUNK // 8:  # cut into planes, so that neighbouring blocks read neighbouring memory
        geometry, inner = (inner // chunk, 1, chunk), chunk
    vector = next(v for v in work.vectors["planes"][work.dtype] if v == 1 or (aligned and inner % v == 0))
    if channels > 1 and inner * channels < 1 << 31 and (inner == 1 or (inner < _SMALL_PLANE and vector == 1)):
        form = "rows" if inner == 1 else "mixed"
        for narrower in work.vectors[form][work.dtype]:
            if narrower == 1 or (aligned and channels * inner % narrower == 0):
                found = _plan_rows(work, geometry, intervals, kind, narrower, gpu, samples)
                if found is not None:
                    return found
    if samples > 1:
        return None
    return _plan_planes(work, geometry, intervals, kind, vector, gpu)


def plan_map(
    what: str, dtype: str, geometry: tuple[int, int, int], intervals: int, kind: int, aligned: bool, gpu: Gpu, samples: int = 1
) -> Plan | None:
    """Return the plan of a map, by its name in ``compile.MAPS``; None if it does not fit on the device.

    With `samples`, each sample has the `geometry` and its own functions.
    """
    moments, has_table, knots = "MOMENTS" in kernels.MAPS[what], what != "moments", "KNOTS" in kernels.MAPS[what]
    lines = intervals + (2 if what == "lookup" or knots else 3)
    table, staging = (12, 8) if knots else (8, 4) if has_table else (0, 0)
    sizes = (lines, table, staging, 0, 12 if moments else 0)
    costs = (4.0, 1e9, 0.0) if moments else (2.0, _MAP_STEPS, 0.0)
    work = _Work(what, dtype, kernels.VECTORS, kernels.MAP_THREADS, *sizes, *costs)
    return _plan(work, geometry, intervals, kind, aligned, gpu, samples)


def sum_lines(what: str, intervals: int) -> int:
    """Return the pairs of sums per channel of a backward kernel: one per line, and one for a norm; 0 if it has no sums."""
    flags = kernels.BACKWARDS[what]
    return intervals + (2 if "KNOTS" in flags else 3) + ("NORM" in flags) if "SUMS" in flags else 0


def plan_backward(
    what: str, dtype: str, geometry: tuple[int, int, int], intervals: int, kind: int, aligned: bool, gpu: Gpu, samples: int = 1
) -> Plan | None:
    """Return the plan of a backward kernel, by its name in ``compile.BACKWARDS``; see :func:`plan_map`."""
    sums, knots = sum_lines(what, intervals), "KNOTS" in kernels.BACKWARDS[what]
    lines, table = sums or intervals + (2 if knots else 3), 8 if knots else 4
    sizes = (lines, table, 0 if sums else table, 8 if sums else 0, 0)
    costs = (sums / 8, 1e9, 4.0) if sums else (2.0, _MAP_STEPS, 0.0)
    work = _Work(what, dtype, kernels.BACKWARD_VECTORS, kernels.BACKWARD_THREADS, *sizes, *costs)
    return _plan(work, geometry, intervals, kind, aligned, gpu, samples)


def plan_finish(what: str, plan: Plan, channels: int, lines: int) -> Plan:
    """Return the plan of the sum over the splits of the backward kernel `what`. `lines` is the result of :func:`sum_lines`."""
    together = 4 if channels >= 4 else 1
    groups = max(1, min(plan.splits, kernels.FINISH_THREADS // (together * lines)))
    threads = min(kernels.FINISH_THREADS, -(-groups * lines * together // 32) * 32)
    numbers = _Numbers(*struct.unpack(_FORMAT, plan.numbers))._replace(together=together, groups=groups)
    shared = groups * lines * together * 16
    name = "finish_knots" if "KNOTS" in kernels.BACKWARDS[what] else "finish_gradients"
    return Plan(name, (-(-channels // together), 1, 1), threads, shared, plan.splits, numbers.pack())


def plan_finish_channels(what: str, plan: Plan, channels: int) -> Plan:
    """Return the plan of the sum of moments over the splits of a map, one warp per channel. `what` is "moments" or "norm"."""
    return Plan(f"finish_{what}", (-(-channels // 4), 1, 1), 128, 0, plan.splits, plan.numbers)


# Dynamic units: lists of kernels that run one after another with the same arguments.


def _with_sizes(plan: Plan, sizes: Sizes, **changes: int) -> Plan:
    numbers = _Numbers(*struct.unpack(_FORMAT, plan.numbers))
    return plan._replace(numbers=numbers._replace(**sizes._asdict(), **changes).pack())


def _plan_network(what: str, sizes: Sizes) -> Plan:
    """Return the plan of a layer of the network or of its gradients, one block per tile of a matrix product."""
    inputs, outputs = (sizes.features, sizes.hidden) if "first" in what else (sizes.hidden, sizes.outputs())
    products = [(sizes.samples, inputs), (outputs, inputs + 1)] if "backward" in what else [(sizes.samples, outputs)]
    tiles = sum(math.prod(-(-size // kernels.TILE) for size in product) for product in products)
    threads = kernels.TILE**2
    plan = Plan(f"network_{what}", (tiles, 1, 1), threads, 4 * threads * (kernels.TILE + 4), 1, _Numbers().pack())
    return _with_sizes(plan, sizes)


def plan_dynamic_forward(
    dtype: str, geometry: tuple[int, int, int], intervals: int, aligned: bool, samples: int, sizes: Sizes, inner: int, gpu: Gpu
) -> list[Plan] | None:
    """Return the plans of the means, the network and the map, for x (outer, channels, inner); None if the map does not fit.

    `samples` and the geometry are those of :func:`pwlu.kernels.layout.sample_geometry`. `inner` is the number of neighbours in
    memory with the same mean. If that is 1 and there are enough samples, the first plan computes the means. Else PyTorch does.
    """
    if max(sizes.samples, sizes.hidden) * max(sizes.features + 1, sizes.hidden, sizes.outputs()) >= 1 << 31:  # 32-bit places
        return None
    found = plan_map("dynamic_forward", dtype, geometry, intervals, 0, aligned, gpu, samples)
    means = _plan_means(dtype, samples * math.prod(geometry), aligned, sizes, inner, gpu)
    return found and [*means, *(_plan_network(what, sizes) for what in kernels.NETWORK[:2]), _with_sizes(found, sizes)]


def _plan_means(dtype: str, elements: int, aligned: bool, sizes: Sizes, inner: int, gpu: Gpu) -> list[Plan]:
    """Return the plan of the means; an empty list if PyTorch computes them."""
    positions, threads = elements // (sizes.samples * sizes.features), kernels.MEANS_THREADS
    vector = next(v for v in kernels.VECTORS["planes"][dtype] if v == 1 or (aligned and sizes.features % v == 0))
    across = sizes.features // vector
    panels = -(-across // _PANEL)
    enough = 2 * panels * sizes.samples > gpu.processor.multiprocessors and sizes.samples <= _MOST_BLOCKS
    if inner != 1 or positions == 1 or positions >= 1 << 30 or not enough:
        return []
    numbers = _Numbers(outer=positions, width=-(-across // panels))
    plan = Plan(f"means_{dtype}_{vector}", (panels, sizes.samples, 1), threads, 4 * vector * threads, 1, numbers.pack())
    return [_with_sizes(plan, sizes)]


def plan_dynamic_backward(
    dtype: str, geometry: tuple[int, int, int], intervals: int, aligned: bool, samples: int, sizes: Sizes, inner: int, gpu: Gpu
) -> list[Plan] | None:
    """Return the plans of the gradient of x and of the sums over all samples; see :func:`plan_dynamic_forward`."""
    found = plan_backward("dynamic_backward", dtype, geometry, intervals, 0, aligned, gpu, samples)
    channels = sizes.of_sample()
    of_channel = (sizes.directions + 1) * sum_lines("dynamic_backward", intervals)
    fitting = [
        t for t in (4, 2, 1) if t * gpu.processor.multiprocessors <= channels and t * of_channel <= kernels.FINISH_THREADS
    ]
    together = max(fitting, default=1)
    per_group = of_channel * together
    if found is None or 16 * per_group > gpu.processor.shared_of_block:
        return None
    groups = max(1, min(sizes.samples * found.splits, kernels.FINISH_THREADS // per_group))
    second = _with_sizes(found, sizes, together=together, groups=groups)
    blocks, shared = (-(-channels // together), 1, 1), 16 * groups * per_group
    second = Plan("finish_samples", blocks, kernels.FINISH_THREADS, shared, found.splits, second.numbers)
    return [_with_sizes(found, sizes), second]


def plan_dynamic_input(
    dtype: str, geometry: tuple[int, int, int], intervals: int, aligned: bool, samples: int, sizes: Sizes, inner: int, gpu: Gpu
) -> list[Plan] | None:
    """Return the plans of the gradients of the network and of the means; see :func:`plan_dynamic_forward`."""
    of_sample = samples * math.prod(geometry) // sizes.samples
    if of_sample >= 1 << 31:
        return None
    neighbours = sizes.features if inner == 1 else inner
    vector = next(v for v in kernels.VECTORS["planes"][dtype] if v == 1 or (aligned and neighbours % v == 0))
    threads = kernels.MAP_THREADS
    blocks = -(-of_sample // (4 * vector * threads)), min(sizes.samples, _MOST_BLOCKS), 1
    add = Plan(f"add_means_{dtype}_{vector}", blocks, threads, 0, 1, _Numbers(inner=inner, per_channel=of_sample).pack())
    return [*(_plan_network(what, sizes) for what in kernels.NETWORK[2:]), _with_sizes(add, sizes)]


def plan_rule(what: str, units: int, intervals: int, processor: Processor) -> Plan | None:
    """Return the plan of a kernel of the learning rule, one block per unit; None if either of them exceeds shared memory."""
    threads, columns = kernels.RULE_THREADS, intervals + 3
    groups = max(1, threads // columns)
    shared = 8 * (threads // 32 + 8 * columns + groups * columns)  # `smooth` needs a little less for its systems
    numbers = _Numbers(intervals=intervals, groups=groups)
    plan = Plan(f"rule_{what}", (units, 1, 1), threads, shared, 0, numbers.pack())
    return plan if shared <= processor.shared_of_block else None


def plan_running_norm(channels: int) -> Plan:
    """Return the plan of the kernel that computes a norm from running statistics."""
    return Plan("finish_norm", (-(-channels // 4), 1, 1), 128, 0, 0, _Numbers(channels=channels, intervals=1).pack())
