"""Run several ``pwlu train`` in child processes, which always end with the process that started them."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pwlu.lab.runs.locks import locked

T = TypeVar("T")
_TIMEOUT = 10.0  # seconds to wait for a child to end before it is killed, and for another process to release a log

_TRAIN = (
    "import runpy; from pwlu.lab.compare.subprocesses import end_with_parent; end_with_parent(); "
    "runpy.run_module('pwlu', run_name='__main__', alter_sys=True)"  # like python -m pwlu
)


def end_with_parent() -> None:
    """End this child process when its parent ends, even if the parent is killed.

    The parent never writes to the child's standard input, so reading it returns only when the parent has ended.
    """

    def wait() -> None:
        while os.read(0, 1):
            pass
        if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGTERM)  # also ends the data loader's workers
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class Child:
    """A ``pwlu train`` process that writes its output to a log file.

    The child inherits the lock on the log. While it runs, no other process starts the same run.
    """

    def __init__(self, arguments: list[str], log: BinaryIO, environment: dict[str, str]) -> None:
        self.log, self.log_start = Path(log.name), log.tell()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TRAIN, "train", *arguments],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment,
            start_new_session=True,  # Ctrl-C reaches only the parent, which then ends the child and all that it started
        )
        log.close()

    def status(self) -> int | None:
        """Return the exit status, or None while the child runs."""
        status = self.process.poll()
        if status is not None and self.process.stdin is not None:
            self.process.stdin.close()
        return status

    def last_lines(self, count: int = 12) -> str:
        """Return the last lines of the output."""
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            return "\n".join(file.read().decode(errors="replace").strip().splitlines()[-count:])

    def signal(self, number: int) -> None:
        """Send a signal to the child and all processes that it started."""
        if self.process.poll() is None:
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, number)
            else:
                self.process.terminate()


def open_log(path: Path) -> BinaryIO | None:
    """Open and lock a log to append to; return None if another process keeps it locked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab")
    deadline = time.monotonic() + _TIMEOUT
    while not locked(file):
        if time.monotonic() > deadline:
            file.close()
            return None
        time.sleep(0.1)  # children of a killed process may need a moment to end
    return file


def run_concurrently(
    tasks: Iterable[T], jobs: int, start: Callable[[T], Child | None]
) -> Generator[tuple[T, Child], None, None]:
    """Start a child for each task, at most `jobs` at a time. Yield each task and its child when the child has ended.

    If `start` returns None, the task needs no child. All children have ended when this generator ends or is closed.
    """
    waiting, running = deque(tasks), dict[int, tuple[T, Child]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task = waiting.popleft()
                if child := start(task):
                    running[child.process.pid] = task, child
            ended = [pid for pid, (_, child) in running.items() if child.status() is not None]
            for pid in ended:
                yield running.pop(pid)
            if not ended:
                time.sleep(0.1)
    finally:
        _end_all([child for _, child in running.values()])


def _end_all(children: list[Child]) -> None:
    for child in children:
        child.signal(signal.SIGTERM)
    deadline = time.monotonic() + _TIMEOUT
    while any(child.status() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    for child in children:
        child.signal(getattr(signal, "SIGKILL", signal.SIGTERM))
        child.process.wait()
        child.status()


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that this process can end its children."""

    def stop(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    handled = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # under nohup, SIGHUP stays ignored
    before = {number: signal.signal(number, stop) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
