"""``pwlu train`` in processes of its own, several at a time, that never outlive the one that started them."""

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
_PATIENCE = 10.0  # seconds until a child that was asked to end is killed, and until a log that is in use counts as in use

_TRAIN = (
    "import runpy; from pwlu.lab.compare.subprocesses import end_with_parent; end_with_parent(); "
    "runpy.run_module('pwlu', run_name='__main__', alter_sys=True)"  # what python -m pwlu does
)


def end_with_parent() -> None:
    """In a child: end when the process that started it does, even if that was killed without a word.

    Nothing is ever written to a child's standard input; it comes to its end when nobody is left who could write to it.
    """

    def wait() -> None:
        while os.read(0, 1):
            pass
        if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGTERM)  # with the processes that read images
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class Child:
    """A ``pwlu train`` with its output in a file.

    The file is locked by whoever has it open for writing, and that is the child, too: as long as it lives, no other process
    begins the same run.
    """

    def __init__(self, arguments: list[str], log: BinaryIO, environment: dict[str, str]) -> None:
        self.log, self.begin = Path(log.name), log.tell()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TRAIN, "train", *arguments],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment,
            start_new_session=True,  # a Ctrl-C is for this process, which then ends the child and all that the child started
        )
        log.close()

    def status(self) -> int | None:
        """The exit status; None while it runs."""
        status = self.process.poll()
        if status is not None and self.process.stdin is not None:
            self.process.stdin.close()
        return status

    def last_lines(self, count: int = 12) -> str:
        """The end of its output."""
        with self.log.open("rb") as file:
            file.seek(self.begin)
            return "\n".join(file.read().decode(errors="replace").strip().splitlines()[-count:])

    def signal(self, number: int) -> None:
        """To the child and everything that it started."""
        if self.process.poll() is None:
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, number)
            else:
                self.process.terminate()


def open_log(path: Path) -> BinaryIO | None:
    """The file to append a child's output to; None if another process goes on using it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab")
    deadline = time.monotonic() + _PATIENCE
    while not locked(file):
        if time.monotonic() > deadline:
            file.close()
            return None
        time.sleep(0.1)  # the children of a process that was killed may need a moment to end
    return file


def side_by_side(tasks: Iterable[T], jobs: int, start: Callable[[T], Child | None]) -> Generator[tuple[T, Child], None, None]:
    """Start a child for each task, at most `jobs` at a time, and give back each task with its child when that has ended.

    A task for which `start` returns None needs no child. However this ends, no child goes on.
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
        _end([child for _, child in running.values()])


def _end(children: list[Child]) -> None:
    for child in children:
        child.signal(signal.SIGTERM)
    deadline = time.monotonic() + _PATIENCE
    while any(child.status() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    for child in children:
        child.signal(getattr(signal, "SIGKILL", signal.SIGTERM))
        child.process.wait()
        child.status()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process the way an exception does, so that it can end its children."""

    def stop(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # nohup lets SIGHUP be ignored
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
