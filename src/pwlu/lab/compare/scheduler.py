"""Schedule the runs of a comparison: choose the next run, try runs again that died, and report finished runs."""

import dataclasses
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pwlu.lab.compare.job import Job, find_existing
from pwlu.lab.compare.ray_pool import RayPool
from pwlu.lab.compare.subprocesses import LocalPool, Outcome
from pwlu.lab.recipes.experiment import label
from pwlu.lab.recipes.metrics import format_metrics
from pwlu.lab.recipes.settings import Settings, UserError
from pwlu.lab.runs.progress import Progress
from pwlu.lab.runs.results import Run, keep

TRIES = 3  # how often to start a run that dies each time before it has finished another epoch
PATIENCE = 120.0  # seconds in which a file server releases the locks of a machine that died

Pool = LocalPool | RayPool


@dataclass(frozen=True)
class Failure:
    """A run that failed. ``why`` has the last lines of its output."""

    settings: Settings
    why: str


def title(settings: Settings) -> str:
    """Return the name of a run for messages."""
    return f"{settings.recipe} {label(settings)}, seed {settings.seed}"


def describe(result: dict[str, Any]) -> str:
    """Return the metrics of a run as text, and whether it diverged."""
    return format_metrics(result) + (", diverged" if result["diverged"] else "")


class Scheduler:
    """Trains the missing runs of a comparison in a pool, in this order, and reports each one.

    Small files of finished runs are copied to the folder `results`. `total` counts all runs, including finished ones.
    """

    def __init__(self, jobs: list[Job], pool: Pool, results: Path, total: int) -> None:
        self.waiting, self.pool, self.results = deque(jobs), pool, results
        self.failures: list[Failure] = []
        self.failed_outputs: set[str] = set()
        self.deaths: dict[Settings, tuple[int, int]] = {}  # consecutive deaths of a run, and its epochs at the last one
        self.count, self.total = total - len(jobs), total
        self.progress = Progress("runs", total, done=self.count, unit="run")

    def run(self) -> list[Failure]:
        """Train all runs, and return those that failed."""
        try:
            while self.waiting or self.pool.running:
                while self.waiting and self.pool.running < self.pool.slots:
                    self.pool.start(self.waiting.popleft())
                for job, outcome in self.pool.wait():
                    self._handle(job, outcome)
        finally:
            self.pool.close()
            self.progress.close()
        return self.failures

    def _handle(self, job: Job, outcome: Outcome) -> None:
        run = find_existing(job.runs).get(job.settings)
        if run is not None and run.result is not None:
            self._finished(run)
        elif outcome.died and self._try_again(job.settings, 0 if run is None else run.epochs):
            self.progress.say(f"{title(job.settings)}: died and will be tried again. {outcome.why.splitlines()[0]}")
            self.waiting.append(dataclasses.replace(job, patience=PATIENCE))
        else:
            self.failures.append(Failure(job.settings, outcome.why))
            self._report(f"{title(job.settings)}: failed")
            self._stop_if_repeated(outcome.output)

    def _try_again(self, settings: Settings, epochs: int) -> bool:
        """Return whether to try a run again that died. Give up if it dies repeatedly without finishing another epoch."""
        deaths, before = self.deaths.get(settings, (0, epochs))
        deaths = deaths + 1 if epochs <= before else 1
        self.deaths[settings] = deaths, epochs
        return deaths < TRIES

    def _finished(self, run: Run) -> None:
        if find_existing(self.results).finished(run.settings) is None:
            keep(run, self.results)
        if run.result is not None:
            measured = describe(run.result).removeprefix("accuracy ")
            self._report(f"{title(run.settings)}: {measured}, {run.result['seconds_per_epoch']:.3g} s per epoch")

    def _stop_if_repeated(self, output: str) -> None:
        """Stop if two runs fail with the same output, such as a missing data set: all others would fail too."""
        if output and output in self.failed_outputs:
            raise UserError(f"two runs failed with the same output, so no other run was started:\n{output}")
        self.failed_outputs.add(output)

    def _report(self, text: str) -> None:
        self.count += 1
        self.progress.step()
        self.progress.say(f"[{self.count}/{self.total}] {text}")
