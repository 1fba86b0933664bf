"""How the worker processes that read images start and end."""

import multiprocessing
import os
import threading
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


def requested_batches(data: Dataset, requests: list[Any], device: torch.device, workers: int, **options: Any) -> DataLoader:
    """Return a loader of the batches in `requests`, a list that it reads when an iteration starts.

    Torch's threads do not survive a fork of this process. Where the system can, workers are forked from a server process that
    has imported the module of the data, and has no threads. Otherwise every worker imports it again.
    """
    if workers:
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload([type(data).__module__])
        options |= {"persistent_workers": True, "multiprocessing_context": context, "worker_init_fn": _watch_parent}
    pinned = device.type == "cuda"
    return DataLoader(data, batch_sampler=requests, num_workers=workers, pin_memory=pinned, **options)


def _watch_parent(worker: int) -> None:
    """End this worker when the process that reads from it ends, even if that is killed: the server outlives it."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
