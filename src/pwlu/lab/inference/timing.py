"""Time several functions in turn, so that other load on the machine affects all of them."""

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
    """Return the milliseconds per call of every function, measured in turn.

    Each function is called once just before its measurement, so that the caches hold its data and not those of another.

    Args:
        calls: the functions by name.
        rounds: number of measurements of each function.
        inner: number of calls per measurement.
        wait: waits until the device has finished its work.
        after_round: a function to call after each round, for example to update a progress bar.
        clock: returns seconds; ``time.process_time`` excludes the time of other programs on a busy machine.
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
    """Return the percentiles p20, p50 and p80."""
    ordered = sorted(times)
    return {f"p{p}_ms": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (20, 50, 80)}
