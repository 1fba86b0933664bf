"""Complete the runs of comparisons: find finished runs, resume interrupted ones, start missing ones."""

import dataclasses
import json
import os
from collections.abc import Hashable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pwlu.lab.compare.presets import Comparison
from pwlu.lab.compare.subprocesses import Child, open_log, run_concurrently
from pwlu.lab.recipes.experiment import label, reset_unused, run_key, run_name
from pwlu.lab.recipes.metrics import format_metrics
from pwlu.lab.recipes.settings import Settings, UserError, flag
from pwlu.lab.runs.environment import SIDE_BY_SIDE
from pwlu.lab.runs.processes import Processes
from pwlu.lab.runs.progress import Progress
from pwlu.lab.runs.results import Run, find_runs, keep, read_run
from pwlu.lab.training.loop import create_run, train


def required_runs(comparisons: Iterable[Comparison], seeds: int) -> list[Settings]:
    """Return the runs of all comparisons, each once, ordered by seed: if time runs out, all rows have as many runs."""
    experiments = [settings for comparison in comparisons for settings in comparison.experiments.values()]
    runs = [reset_unused(settings.replace(seed=seed)) for seed in range(seeds) for settings in experiments]
    return list({run_key(settings): settings for settings in runs}.values())


def title(settings: Settings) -> str:
    """Return the name of a run for messages."""
    return f"{settings.recipe} {label(settings)}, seed {settings.seed}"


@dataclass
class ExistingRuns:
    """The runs on disk, one per experiment and seed, and an error message for each folder that cannot be read."""

    runs: dict[Hashable, Run] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    def get(self, settings: Settings) -> Run | None:
        """Return the run of the same experiment and seed."""
        return self.runs.get(run_key(settings))

    def finished(self, settings: Settings) -> Run | None:
        """Return the run of the same experiment and seed if it is finished."""
        run = self.get(settings)
        return run if run is not None and run.result is not None else None


def find_existing(*roots: Path) -> ExistingRuns:
    """Find the runs below these folders. Of repeated runs, take the first finished one, else the one with most epochs."""
    existing = ExistingRuns()
    for root in roots:
        runs, complaints = find_runs(root)
        existing.complaints += complaints
        for run in runs:
            other = existing.get(run.settings)
            if other is None or (other.result is None and (run.result is not None or run.epochs > other.epochs)):
                existing.runs[run_key(run.settings)] = run
    return existing


@dataclass(frozen=True)
class Failure:
    """A run that failed, and why: the last lines of its output."""

    settings: Settings
    why: str


def complete_runs(required: list[Settings], runs: Path, results: Path, jobs: int) -> list[Failure]:
    """Train the missing runs, `jobs` at a time, and copy the small files of each run as soon as it is finished.

    A failed run does not stop the others, unless a second run fails with the same output.

    Args:
        required: the runs, from :func:`required_runs`.
        runs: the folder of run folders.
        results: the folder that the small files are copied to.
        jobs: how many processes train at the same time.
    """
    missing = _missing(required, runs, results)
    return _Scheduler(required, missing, runs, results, jobs).run() if missing else []


def complete_runs_with_torchrun(required: list[Settings], runs: Path, results: Path, processes: Processes) -> None:
    """Train the missing runs one after the other, each on all processes that torchrun started.

    Any error ends the comparison. Started again, it continues there.
    """
    plan: list[tuple[int, str]] = []  # index of a run, and the folder to resume or ""; rank 0 decides
    if processes.is_main:
        existing = find_existing(runs)
        for settings in _missing(required, runs, results):
            stopped = existing.get(settings)
            plan.append((required.index(settings), str(stopped.path) if stopped else ""))
    for number, stopped_in in json.loads(processes.broadcast_text(json.dumps(plan)) or ""):
        path = Path(stopped_in) if stopped_in else create_run(runs, required[number], processes, again=True)
        result = train(required[number], path, processes)
        if processes.is_main:
            keep(read_run(path), results)
            print(f"{title(required[number])}: {_describe(result)}", flush=True)


def _missing(required: list[Settings], runs: Path, results: Path) -> list[Settings]:
    """Return the runs that are not finished. Copy finished runs to `results` if they are not there yet."""
    kept, existing = find_existing(results), find_existing(runs)
    missing = []
    for settings in required:
        if kept.finished(settings) is None:
            if run := existing.finished(settings):
                keep(run, results)
            else:
                missing.append(settings)
    return missing


def _describe(result: dict[str, Any]) -> str:
    return format_metrics(result) + (", diverged" if result["diverged"] else "")


class _Scheduler:
    """Trains the missing runs in child processes, and reports each one."""

    def __init__(self, required: list[Settings], missing: list[Settings], runs: Path, results: Path, jobs: int) -> None:
        self.missing, self.runs, self.results = missing, runs, results
        self.jobs = min(jobs, len(missing))
        self.failures: list[Failure] = []
        self.failed_outputs: set[str] = set()
        self.count, self.total = len(required) - len(missing), len(required)
        self.progress = Progress("runs", self.total, done=self.count, unit="run")

    def run(self) -> list[Failure]:
        try:
            with closing(run_concurrently(self.missing, self.jobs, self._start)) as ended:
                for settings, child in ended:
                    if run := find_existing(self.runs).finished(settings):
                        self._finished(run)
                    else:
                        self._failed(settings, f"exit status {child.status()}, {child.log}:\n{child.last_lines()}")
                        self._stop_if_repeated(child.last_lines())
        finally:
            self.progress.close()
        return self.failures

    def _start(self, settings: Settings) -> Child | None:
        log = open_log(self.runs / "logs" / f"{run_name(settings)}.txt")
        if log is None:
            self._failed(settings, "another process is training it")
            return None
        run = find_existing(self.runs).get(settings)  # after the lock: another process may have trained it until now
        if run is None:
            arguments = [settings.recipe, *flags(settings), f"--runs={self.runs}", "--again"]  # also if a folder is damaged
        else:
            arguments = [f"--resume={run.path}", *flags(settings, machine_only=True)]
        return Child(arguments, log, _environment(self.jobs))

    def _finished(self, run: Run) -> None:
        if find_existing(self.results).finished(run.settings) is None:
            keep(run, self.results)
        if run.result is not None:
            measured = _describe(run.result).removeprefix("accuracy ")
            self._report(f"{title(run.settings)}: {measured}, {run.result['seconds_per_epoch']:.3g} s per epoch")

    def _stop_if_repeated(self, output: str) -> None:
        """Stop if two runs fail with the same output, such as a missing data set: all others would fail too."""
        if output and output in self.failed_outputs:
            raise UserError(f"two runs failed with the same output, so no other run was started:\n{output}")
        self.failed_outputs.add(output)

    def _failed(self, settings: Settings, why: str) -> None:
        self.failures.append(Failure(settings, why))
        self._report(f"{title(settings)}: failed")

    def _report(self, text: str) -> None:
        self.count += 1
        self.progress.step()
        self.progress.say(f"[{self.count}/{self.total}] {text}")


def flags(settings: Settings, machine_only: bool = False) -> list[str]:
    """Return the settings as flags of ``pwlu train``, without the recipe.

    Args:
        settings: the settings of the run.
        machine_only: return only machine settings that differ from the default. A resumed run may change only these.
    """
    written = []
    for setting in dataclasses.fields(settings):
        value = getattr(settings, setting.name)
        if setting.name == "recipe" or value is None:
            continue
        if machine_only and (not setting.metadata["machine"] or value == setting.default):
            continue
        name = flag(setting.name)
        if isinstance(value, bool):
            written.append(name if value else "--no-" + name.removeprefix("--"))
        else:
            written.append(f"{name}={value}")
    return written


def _environment(jobs: int) -> dict[str, str]:
    """Return environment variables for a child process. The children share the cores; by default each would use all."""
    variables = {SIDE_BY_SIDE: str(jobs)}
    if jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        variables["OMP_NUM_THREADS"] = str(max(1, cores // jobs))
    return variables
