"""How the work of an operator is shared out: which kernel, how many blocks and threads, what each of them takes.

Plans follow from shapes and the device alone, so the same call gives the same bits. Nothing here touches a GPU.

    planes   the elements of a channel lie in `outer` stretches of `inner` (NCHW, or one channel for everything); a block takes one
             channel, and of it some planes, or a piece of one
    rows     neighbours belong to different channels (channels_last, (B, T, C)); a block takes a panel of channels and some rows
"""

import struct
from typing import NamedTuple

from pwlu.kernels.cuda import compile as kernels

_MOST_UNITS = 1 << 30  # a block counts in 32 bits
_BLOCK_RESERVE = 1024  # shared memory the system keeps for every block
_MAP_STEPS = 16  # vectors a thread of a map takes when there is enough work for everyone
_PANEL_BYTES = 40 << 10  # shared memory for the tables of a panel of channels


class Processor(NamedTuple):
    """What a plan has to know of a GPU."""

    architecture: str
    count: int  # of multiprocessors
    threads: int  # each
    shared: int  # bytes of shared memory, each
    shared_of_block: int


class Plan(NamedTuple):
    """One launch. ``numbers`` ends the kernel's arguments; partial results are (splits, channels, ...)."""

    kernel: str
    blocks: int
    threads: int
    shared: int
    splits: int
    numbers: bytes


class _Numbers(NamedTuple):
    """The end of ``struct Arguments`` in element.cuh, in its order."""

    outer: int
    inner: int
    rows_of_split: int
    per_channel: int
    channels: int
    intervals: int
    splits: int
    kind: int
    planes: int = 1
    pieces: int = 1
    width: int = 1
    panels: int = 1
    piece_units: int = 1
    magic: int = 0
    shift: int = 0
    reserved: int = 0

    def pack(self) -> bytes:
        return struct.pack("4q8i4I", *self)


NUMBERS_BYTES = struct.calcsize("4q8i4I")


def divider(divisor: int) -> tuple[int, int]:
    """(magic, shift) with n // divisor == (high half of n * magic + n) >> shift for n < 2^31 (Granlund and Montgomery)."""
    shift = (divisor - 1).bit_length()
    return ((1 << 32) * ((1 << shift) - divisor)) // divisor + 1, shift


def share_out(blocks: int, steps: float, slots: int, overhead: float, most_steps: float) -> int:
    """Into how many splits to cut work of `steps` a thread: that which ends first, when `slots` blocks run at a time.

    A round of blocks lasts `overhead` and its share of the steps. The last round may be half empty, and many splits have to be
    added up afterwards.
    """
    least = max(1, round(steps / most_steps))
    candidates = {least, *(max(least, slots * rounds // blocks) for rounds in (1, 2, 3, 4, 6, 8))}
    candidates = {min(c, max(least, int(steps))) for c in candidates}  # at least one step each
    return min(sorted(candidates), key=lambda splits: -(-blocks * splits // slots) * (overhead + steps / splits))


def _resident(processor: Processor, threads: int, shared: int) -> int:
    """Blocks of that kind that a GPU runs at a time."""
    each = min(processor.threads // threads, processor.shared // (shared + _BLOCK_RESERVE), 32)
    return max(1, each) * processor.count


def _threads(processor: Processor, most: int, fixed: int, of_thread: int) -> int | None:
    """The number of threads with the most of them resident; None if no block fits into shared memory."""
    options = [most, most // 2, most // 4]
    fitting = [t for t in options if fixed + t * of_thread <= processor.shared_of_block]
    return max(fitting, key=lambda t: t * _resident(processor, t, fixed + t * of_thread), default=None)


def _planes(
    numbers: _Numbers, kernel: str, processor: Processor, threads: int, shared: int, overhead: float, most_steps: float
) -> Plan:
    """Numbers come with inner in vectors."""
    units = numbers.outer * numbers.inner
    while threads > 32 and 2 * units <= threads:
        threads //= 2
    slots = _resident(processor, threads, shared)
    splits = share_out(numbers.channels, units / threads, slots, overhead, most_steps)
    splits = max(splits, -(-units // _MOST_UNITS))
    planes, pieces = max(1, -(-numbers.outer // splits)), -(-splits // numbers.outer)
    piece_units = -(-numbers.inner // pieces)
    pieces = -(-numbers.inner // piece_units)
    while planes * piece_units > _MOST_UNITS:
        planes = -(-planes // 2)
    splits = -(-numbers.outer // planes) * pieces
    magic, shift = divider(numbers.inner) if planes > 1 else (0, 0)
    numbers = numbers._replace(
        splits=splits, planes=planes, pieces=pieces, piece_units=piece_units, magic=magic, shift=shift
    )
    return Plan(kernel, splits * numbers.channels, threads, shared, splits, numbers.pack())


def _rows(
    numbers: _Numbers, kernel: str, processor: Processor, threads: int, shared: int, overhead: float, most_steps: float
) -> Plan:
    """Numbers come with width and panels."""
    at_once = threads // numbers.width
    slots = _resident(processor, threads, shared)
    splits = share_out(numbers.panels, numbers.outer / at_once, slots, overhead, most_steps)
    rows = min(-(-numbers.outer // splits), _MOST_UNITS)
    splits = -(-numbers.outer // rows)
    numbers = numbers._replace(splits=splits, rows_of_split=rows)
    return Plan(kernel, splits * numbers.panels, threads, shared, splits, numbers.pack())


def _vector(widths: tuple[int, ...], length: int, aligned: bool) -> int:
    return next(w for w in widths if w == 1 or (aligned and length % w == 0))


def plan_map(
    what: str, dtype: str, geometry: tuple[int, int, int], intervals: int, kind: int, aligned: bool, processor: Processor
) -> Plan | None:
    """forward, lookup, moments, or observe (forward with moments); None if N is too large for the device."""
    outer, channels, inner = geometry
    threads, segments, moments = kernels.MAP_THREADS, intervals + 2, what in ("observe", "moments")
    has_table = what != "moments"
    overhead, most_steps = (8.0, 1e9) if moments else (2.0, float(_MAP_STEPS))
    if inner == 1 and channels > 1:
        vector = _vector(kernels.VECTORS[dtype], channels, aligned)
        across = channels // vector
        of_column = segments * vector * 8 if has_table else 1
        width = max(1, min(across, 32, _PANEL_BYTES // of_column))
        panels = -(-across // width)
        width = -(-across // panels)
        shared = max(width * segments * vector * 8 if has_table else 0, threads * vector * 12 if moments else 0)
        if shared > processor.shared_of_block:
            return None
        numbers = _Numbers(outer, 1, 0, outer, channels, intervals, 1, kind, width=width, panels=panels)
        return _rows(numbers, f"{what}_rows_{dtype}_{vector}", processor, threads, shared, overhead, most_steps)
    vector = _vector(kernels.VECTORS[dtype], inner, aligned)
    shared = segments * 8 if has_table else 0
    if shared > processor.shared_of_block:
        return None
    numbers = _Numbers(outer, inner // vector, 0, outer * inner, channels, intervals, 1, kind)
    return _planes(numbers, f"{what}_planes_{dtype}_{vector}", processor, threads, shared, overhead, most_steps)


def plan_backward(
    sums: bool, dtype: str, geometry: tuple[int, int, int], intervals: int, kind: int, aligned: bool, processor: Processor
) -> Plan | None:
    """The gradient of x and, with sums, those of the parameters; None if N is too large for the device."""
    outer, channels, inner = geometry
    segments, what = intervals + 2, "backward" if sums else "backward_input"
    overhead, most_steps = (float(segments), 1e9) if sums else (4.0, float(_MAP_STEPS))
    most = kernels.BACKWARD_THREADS
    if inner == 1 and channels > 1:
        widths = kernels.ROW_VECTORS[dtype]
        for vector in (w for w in widths if w == 1 or (aligned and channels % w == 0)):
            across = channels // vector
            width = max(1, min(across, 32, _PANEL_BYTES // (segments * vector * 4)))
            panels = -(-across // width)
            width = -(-across // panels)
            fixed, of_thread = width * segments * vector * 4, segments * vector * 8 if sums else 0
            threads = _threads(processor, most, fixed, of_thread)
            if threads is None:
                continue
            numbers = _Numbers(outer, 1, 0, outer, channels, intervals, 1, kind, width=width, panels=panels)
            shared = fixed + threads * of_thread
            kernel = f"{what}_rows_{dtype}_{vector}"
            return _rows(numbers, kernel, processor, threads, shared, overhead / vector, most_steps)
        return None
    vector = _vector(kernels.VECTORS[dtype], inner, aligned)
    fixed, of_thread = segments * 4, segments * 8 if sums else 0
    threads = _threads(processor, most, fixed, of_thread)
    if threads is None:
        return None
    numbers = _Numbers(outer, inner // vector, 0, outer * inner, channels, intervals, 1, kind)
    plan = _planes(
        numbers, f"{what}_planes_{dtype}_{vector}", processor, threads, fixed + threads * of_thread, overhead / vector, most_steps
    )
    return plan._replace(shared=fixed + plan.threads * of_thread)


def plan_finish(plan: Plan, channels: int, intervals: int, processor: Processor) -> Plan:
    """The sum over a backward's splits: a block a channel."""
    segments = intervals + 2
    warps = min(kernels.FINISH_THREADS // 32, max(1, -(-plan.splits // 8)))
    warps = max(1, min(warps, processor.shared_of_block // (segments * 16)))
    return Plan("finish_gradients", channels, 32 * warps, warps * segments * 16, plan.splits, plan.numbers)


def plan_finish_moments(plan: Plan, channels: int) -> Plan:
    """The sum over a map's splits: a warp a channel."""
    return Plan("finish_moments", -(-channels // 4), 128, 0, plan.splits, plan.numbers)
