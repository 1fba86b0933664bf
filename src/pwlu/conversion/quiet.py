"""Run a user's code without side effects."""

import logging
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules import module as modules


@contextmanager
def quiet() -> Iterator[None]:
    """Run without gradients, warnings and global module hooks, and restore the random state afterwards."""
    state, log = random.getstate(), logging.getLogger("torch._subclasses.fake_tensor")
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    enabled, log.disabled = not log.disabled, True  # FakeTensorMode also logs the errors that it raises
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    hooks = [
        (registered, dict(registered)) for registered in (modules._global_forward_hooks, modules._global_forward_pre_hooks)
    ]
    for registered, _ in hooks:
        registered.clear()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for registered, were in hooks:
            registered.update(were)
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)
        log.disabled = not enabled
