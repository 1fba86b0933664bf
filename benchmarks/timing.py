"""Shared code of the benchmarks: time the GPU's work alone, keep the allocator stable, describe the machine, write CSV."""

import csv
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import pwlu
from pwlu.kernels import eager
from pwlu.lab.runs.environment import processor, revision

RESULTS = Path(__file__).parent / "results"


def keep_memory() -> None:
    """Restart Python with an allocator that keeps freed memory, as it does in a network with much memory in use.

    Otherwise glibc returns large blocks to the system after some calls but not after others, depending on a few bytes, and
    page faults dominate the times.
    """
    settings = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
    if sys.platform == "linux" and not settings.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | settings)


def time_on_gpu(calls: Mapping[str, Callable[[], Any]], rounds: int, inner: int = 1) -> dict[str, list[float]]:
    """Return the milliseconds of each call on the GPU: captured `inner` times as a CUDA graph, and replayed in turns.

    This times neither Python nor launches. Small tensors stay in the GPU's cache, for all calls alike.
    """
    graphs = {name: _capture(call, inner) for name, call in calls.items()}
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for graph in graphs.values():
        graph.replay()
    for _ in range(rounds):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: [begin.elapsed_time(end) / inner for begin, end in each] for name, each in events.items()}


def gpu_busy_ms(call: Callable[[], Any], inner: int = 3) -> float:
    """Return the milliseconds for which a call keeps the GPU busy, by the profiler. Call this last: it slows later launches."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(inner):
            call()
        torch.cuda.synchronize()
    # An annotation, such as that of a compiled graph, spans kernels that are events themselves.
    work = [e for e in found.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    busy, until = 0.0, float("-inf")
    for begin, end in sorted((e.time_range.start, e.time_range.end) for e in work):  # kernels of two streams may overlap
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy / inner / 1e3


def _capture(call: Callable[[], Any], inner: int) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            call()
    return graph


def machine(device: str = "cpu") -> dict[str, str]:
    """Return the hardware and versions of a measurement."""
    return {
        "device": processor() if device == "cpu" else torch.cuda.get_device_name(),
        "threads": str(torch.get_num_threads()),
        "vector": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "pwlu": pwlu.__version__,
        "eager": "python" if eager.library is None else "compiled",
        "revision": revision(),
        "date": time.strftime("%Y-%m-%d"),
    }


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"written to {path}")
