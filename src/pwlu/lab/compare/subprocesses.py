"""Run ``pwlu train`` in child processes, which always end with the process that started them."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pwlu.lab.runs.locks import try_lock

TIMEOUT = 10.0  # seconds to wait for a child to end before it is killed, and for another process to release a log
_LAST_LINES = 12  # of the output of a child, for messages

_RUN_MODULE = (  # like python -m MODULE
    "import runpy, sys; from pwlu.lab.compare.subprocesses import end_with_parent; end_with_parent(); "
    "del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of the processes of a run. The run itself may be unfinished.

    Attributes:
        why: the message if the run is not finished.
        output: the last lines of its output.
        died: whether it was killed or its machine was lost. If not, it would end in the same way again.
        succeeded: whether its exit status was 0.
    """

    why: str
    output: str = ""
    died: bool = False
    succeeded: bool = False


BUSY = Outcome("another process is training it")


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
    """A process that runs a Python module, such as ``pwlu``, and writes its output to a log file from :func:`open_log`.

    The child inherits the lock on the log. While it runs, no other process starts the same run.
    """

    def __init__(self, command: list[str], log: BinaryIO, environment: dict[str, str]) -> None:
        self.log, self.log_start = Path(log.name), log.tell()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _RUN_MODULE, *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment,
            start_new_session=True,  # Ctrl-C reaches only the parent, which then ends the child and its descendants
        )
        log.close()

    def status(self) -> int | None:
        """Return the exit status, or None while the child runs."""
        status = self.process.poll()
        if status is not None and self.process.stdin is not None:
            self.process.stdin.close()
        return status

    def outcome(self) -> Outcome | None:
        """Return how the child ended, or None while it runs."""
        status = self.status()
        if status is None:
            return None
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            output = "\n".join(file.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:])
        return Outcome(f"exit status {status}, {self.log}:\n{output}", output, died=status < 0, succeeded=status == 0)

    def signal(self, number: int) -> None:
        """Send a signal to the child and all processes that it started."""
        if self.process.poll() is None:
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, number)
            else:
                self.process.terminate()


def open_log(path: Path, patience: float = TIMEOUT) -> BinaryIO | None:
    """Open and lock a log to append to; return None if another process keeps it locked for `patience` seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab")
    deadline = time.monotonic() + patience
    while not try_lock(file):
        if time.monotonic() > deadline:
            file.close()
            return None
        time.sleep(0.1)  # children of a killed process may need a moment to end
    return file


class LocalPool:
    """Child processes of this process, at most `slots` at a time. A job has a method ``start``, as :class:`job.Job` has."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.children: list[tuple[Any, Child | None]] = []

    @property
    def running(self) -> int:
        """Return the number of started children that :meth:`wait` has not returned yet."""
        return len(self.children)

    def start(self, job: Any) -> None:
        """Start a child."""
        self.children.append((job, job.start(side_by_side=self.slots)))

    def wait(self) -> list[tuple[Any, Outcome]]:
        """Wait for a fraction of a second, and return the jobs that have ended."""
        if all(child is not None and child.status() is None for _, child in self.children):
            time.sleep(0.1)
        outcomes = [(job, BUSY if child is None else child.outcome()) for job, child in self.children]
        self.children = [pair for pair, (_, outcome) in zip(self.children, outcomes, strict=True) if outcome is None]
        return [(job, outcome) for job, outcome in outcomes if outcome is not None]

    def close(self) -> None:
        """End all children."""
        end_all([child for _, child in self.children if child is not None])


def end_all(children: list[Child]) -> None:
    """End children and the processes that they started: send SIGTERM, and SIGKILL after a timeout."""
    for child in children:
        child.signal(signal.SIGTERM)
    deadline = time.monotonic() + TIMEOUT
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
