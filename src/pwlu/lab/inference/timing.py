"""Timing side by side: calls in turns, so that a slow moment of the machine meets them all, and percentiles."""

import time
from collections.abc import Callable, Mapping
from typing import Any


def interleaved(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    inner: int = 1,
    wait: Callable[[], None] | None = None,
    after_round: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Milliseconds of every call, in turns, so that a slow moment of the machine meets them all.

    Each is called once more just before, untimed, so that it does not suffer from what its neighbour left in the caches.

    Args:
        calls: by name.
        rounds: measurements of each.
        inner: calls in a measurement.
        wait: until the device has done what it was asked for.
        after_round: for a progress bar.
        clock: returns seconds; ``time.process_time`` leaves out what other programs on a busy machine take.
    """
    for call in calls.values():
        for _ in range(3):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            if wait:
                wait()
            begin = clock()
            for _ in range(inner):
                call()
            if wait:
                wait()
            times[name].append((clock() - begin) * 1e3 / inner)
        if after_round:
            after_round()
    return times


def percentiles(times: list[float]) -> dict[str, float]:
    """p20, p50 and p80."""
    ordered = sorted(times)
    return {f"p{p}_ms": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (20, 50, 80)}
