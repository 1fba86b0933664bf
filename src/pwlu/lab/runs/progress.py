"""What a person sees of a run: a bar on a terminal, a line an epoch elsewhere, nothing from any process but the first."""

import sys
import time
from typing import Any

from tqdm import tqdm


class Progress:
    """Shows steps and epochs.

    Args:
        title: what is being done.
        total: steps of the whole run, or whatever is counted.
        done: steps that were done before, in a run that goes on.
        silent: say nothing: another process speaks.
        unit: what is counted.
    """

    def __init__(self, title: str, total: int, *, done: int = 0, silent: bool = False, unit: str = "step") -> None:
        self.silent, self.total, self.done, self.begun_at, self.begin = silent, total, done, done, time.monotonic()
        on_terminal = sys.stderr.isatty() and not silent
        self.bar: Any = tqdm(total=total, initial=done, desc=title, unit=unit, dynamic_ncols=True) if on_terminal else None

    def step(self, **shown: Any) -> None:
        """One more step; `shown` is displayed beside the bar."""
        self.done += 1
        if self.bar is not None:
            self.bar.set_postfix(shown, refresh=False)
            self.bar.update()

    def say(self, text: str) -> None:
        """A line of text."""
        if self.bar is not None:
            self.bar.write(text, file=sys.stdout)
        elif not self.silent:
            print(text, flush=True)

    def left(self) -> str:
        """The time that the rest will take at the speed so far."""
        steps = max(self.done - self.begun_at, 1)
        seconds = (time.monotonic() - self.begin) / steps * (self.total - self.done)
        return f"{int(seconds // 3600)}:{int(seconds // 60 % 60):02d}:{int(seconds % 60):02d}"

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.bar is not None:
            self.bar.close()
