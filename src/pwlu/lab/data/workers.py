"""How the worker processes that read images start and end."""

import multiprocessing
import os
import threading
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


def worker_options(workers: int) -> dict[str, Any]:
    """Return the arguments of ``DataLoader`` that concern its worker processes.

    Torch's threads do not survive a fork of this process. Where the system can, workers are forked from a server process that
    has imported the packages they need, and has no threads. Otherwise every worker imports them again.
    """
    if not workers:
        return {"num_workers": 0}
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["pwlu.lab.data.file_images", "pwlu.lab.data.detection_images"])
    return {
        "num_workers": workers,
        "persistent_workers": True,
        "multiprocessing_context": context,
        "worker_init_fn": _watch_parent,
    }


def requested_batches(data: Dataset, requests: list[Any], device: torch.device, workers: int, **options: Any) -> DataLoader:
    """Return a loader of the batches in `requests`, a list that it reads when an iteration starts."""
    pinned = device.type == "cuda"
    return DataLoader(data, batch_sampler=requests, pin_memory=pinned, **worker_options(workers), **options)


def _watch_parent(worker: int) -> None:
    """End this worker when the process that reads from it ends, even if that is killed: the server outlives it."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
