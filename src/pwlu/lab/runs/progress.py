"""Show the progress of a run: a bar on a terminal, otherwise one line per epoch. Only rank 0 prints."""

import sys
import time
from typing import Any

from tqdm import tqdm


class Progress:
    """A progress bar, or lines of text if the output is not a terminal. `silent`: print nothing, because another process does.

    `total` counts the steps of the whole run, and `done` those of an earlier process, if the run is resumed.
    """

    def __init__(self, title: str, total: int, *, done: int = 0, silent: bool = False, unit: str = "step") -> None:
        self.silent, self.total, self.done, self.begun_at, self.begin = silent, total, done, done, time.monotonic()
        on_terminal = sys.stderr.isatty() and not silent
        self.bar: Any = tqdm(total=total, initial=done, desc=title, unit=unit, dynamic_ncols=True) if on_terminal else None

    def step(self, **shown: Any) -> None:
        """Count one more step, and display `shown` beside the bar."""
        self.done += 1
        if self.bar is not None:
            self.bar.set_postfix(shown, refresh=False)
            self.bar.update()

    def say(self, text: str) -> None:
        """Print a line of text."""
        if self.bar is not None:
            self.bar.write(text, file=sys.stdout)
        elif not self.silent:
            print(text, flush=True)

    def left(self) -> str:
        """Return the time that the remaining steps will take at the average speed so far."""
        steps = max(self.done - self.begun_at, 1)
        seconds = (time.monotonic() - self.begin) / steps * (self.total - self.done)
        return f"{int(seconds // 3600)}:{int(seconds // 60 % 60):02d}:{int(seconds % 60):02d}"

    def close(self) -> None:
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()
