"""Brings about the runs of comparisons: finds what is finished, goes on with what was stopped, starts what is missing."""

import dataclasses
import json
import os
from collections.abc import Hashable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pwlu.lab.compare.presets import Comparison
from pwlu.lab.compare.subprocesses import Child, open_log, side_by_side
from pwlu.lab.recipes.experiment import essential, label, run_key, run_name
from pwlu.lab.recipes.metrics import format_metrics
from pwlu.lab.recipes.settings import Settings, UserError, flag
from pwlu.lab.runs.environment import SIDE_BY_SIDE
from pwlu.lab.runs.processes import Processes
from pwlu.lab.runs.progress import Progress
from pwlu.lab.runs.results import Run, find_runs, keep, read_run
from pwlu.lab.training.loop import begin, train


def wanted(comparisons: Iterable[Comparison], seeds: int) -> list[Settings]:
    """The runs of all comparisons, each once. Those of seed 0 come first: when time runs out, rows have as many runs."""
    experiments = [settings for comparison in comparisons for settings in comparison.experiments.values()]
    runs = [essential(settings.replace(seed=seed)) for seed in range(seeds) for settings in experiments]
    return list({run_key(settings): settings for settings in runs}.values())


def title(settings: Settings) -> str:
    """What people see of a run."""
    return f"{settings.recipe} {label(settings)}, seed {settings.seed}"


@dataclass
class Found:
    """What lies on the disk: a run for each experiment and seed, and a complaint about each folder that cannot be read."""

    runs: dict[Hashable, Run] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    def of(self, settings: Settings) -> Run | None:
        """The run of the same experiment and seed."""
        return self.runs.get(run_key(settings))

    def finished(self, settings: Settings) -> Run | None:
        """The same, if it came to its end."""
        run = self.of(settings)
        return run if run is not None and run.result is not None else None


def find(*roots: Path) -> Found:
    """Look below these folders. Of several runs of one experiment the first finished counts, or that which came furthest."""
    found = Found()
    for root in roots:
        runs, complaints = find_runs(root)
        found.complaints += complaints
        for run in runs:
            other = found.of(run.settings)
            if other is None or (other.result is None and (run.result is not None or run.epochs > other.epochs)):
                found.runs[run_key(run.settings)] = run
    return found


@dataclass(frozen=True)
class Failure:
    """A run that did not come to its end, and why: the end of what it said."""

    settings: Settings
    why: str


def complete_runs(asked: list[Settings], runs: Path, results: Path, jobs: int) -> list[Failure]:
    """Do what is missing, `jobs` at a time, and keep the light files of each run as soon as it is finished.

    A run that fails does not stop the others, unless a second one fails with the same words.

    Args:
        asked: what :func:`wanted` gave.
        runs: where run folders lie, and new ones are made.
        results: where light files are kept.
        jobs: how many processes train at once.
    """
    missing = _missing(asked, runs, results)
    return _Work(asked, missing, runs, results, jobs).done() if missing else []


def bring_about_in_step(asked: list[Settings], runs: Path, results: Path, processes: Processes) -> None:
    """The same by all processes that torchrun started: together they train one run after the other.

    Whatever goes wrong ends the comparison; started again, it goes on there.
    """
    plan: list[tuple[int, str]] = []  # the number of a run, and the folder in which it goes on: the first process decides
    if processes.is_main:
        made = find(runs)
        for settings in _missing(asked, runs, results):
            stopped = made.of(settings)
            plan.append((asked.index(settings), str(stopped.path) if stopped else ""))
    for number, stopped_in in json.loads(processes.broadcast_text(json.dumps(plan)) or ""):
        path = Path(stopped_in) if stopped_in else begin(runs, asked[number], processes, again=True)
        result = train(asked[number], path, processes)
        if processes.is_main:
            keep(read_run(path), results)
            print(f"{title(asked[number])}: {_measured(result)}", flush=True)


def _missing(asked: list[Settings], runs: Path, results: Path) -> list[Settings]:
    """What has not come to its end yet. What has, but was not kept, is kept now."""
    kept, made = find(results), find(runs)
    missing = []
    for settings in asked:
        if kept.finished(settings) is None:
            if run := made.finished(settings):
                keep(run, results)
            else:
                missing.append(settings)
    return missing


def _measured(result: dict[str, Any]) -> str:
    return format_metrics(result) + (", diverged" if result["diverged"] else "")


class _Work:
    def __init__(self, asked: list[Settings], missing: list[Settings], runs: Path, results: Path, jobs: int) -> None:
        self.missing, self.runs, self.results = missing, runs, results
        self.jobs = min(jobs, len(missing))
        self.failures: list[Failure] = []
        self.last_words: set[str] = set()  # of runs that failed
        self.count, self.total = len(asked) - len(missing), len(asked)
        self.progress = Progress("runs", self.total, done=self.count, unit="run")

    def done(self) -> list[Failure]:
        try:
            with closing(side_by_side(self.missing, self.jobs, self._start)) as ended:
                for settings, child in ended:
                    if run := find(self.runs).finished(settings):
                        self._finished(run)
                    else:
                        self._failed(settings, f"exit status {child.status()}, {child.log}:\n{child.last_lines()}")
                        self._stop_if_hopeless(child.last_lines())
        finally:
            self.progress.close()
        return self.failures

    def _start(self, settings: Settings) -> Child | None:
        log = open_log(self.runs / "logs" / f"{run_name(settings)}.txt")
        if log is None:
            self._failed(settings, "another process is training it")
            return None
        run = find(self.runs).of(settings)  # only now, for another process may have been at it until now
        if run is None:
            arguments = [settings.recipe, *flags(settings), f"--runs={self.runs}", "--again"]  # also where one is damaged
        else:
            arguments = [f"--resume={run.path}", *flags(settings, of_the_machine=True)]
        return Child(arguments, log, _environment(self.jobs))

    def _finished(self, run: Run) -> None:
        if find(self.results).finished(run.settings) is None:
            keep(run, self.results)
        if run.result is not None:
            measured = _measured(run.result).removeprefix("accuracy ")
            self._say(f"{title(run.settings)}: {measured}, {run.result['seconds_per_epoch']:.3g} s an epoch")

    def _stop_if_hopeless(self, words: str) -> None:
        """Where the same thing is wrong for two runs, such as data that are not there, it is for all."""
        if words and words in self.last_words:
            raise UserError(f"two runs ended alike, and no other was begun:\n{words}")
        self.last_words.add(words)

    def _failed(self, settings: Settings, why: str) -> None:
        self.failures.append(Failure(settings, why))
        self._say(f"{title(settings)}: failed")

    def _say(self, text: str) -> None:
        self.count += 1
        self.progress.step()
        self.progress.say(f"[{self.count}/{self.total}] {text}")


def flags(settings: Settings, of_the_machine: bool = False) -> list[str]:
    """The settings, but for the recipe, as ``pwlu train`` reads them.

    Args:
        settings: of the run.
        of_the_machine: only where and how fast to compute, as far as it was asked for: what a run that goes on may change.
    """
    written = []
    for setting in dataclasses.fields(settings):
        value = getattr(settings, setting.name)
        if setting.name == "recipe" or value is None:
            continue
        if of_the_machine and (not setting.metadata["machine"] or value == setting.default):
            continue
        words = flag(setting.name)
        if isinstance(value, bool):
            written.append(words if value else "--no-" + words.removeprefix("--"))
        else:
            written.append(f"{words}={value}")
    return written


def _environment(jobs: int) -> dict[str, str]:
    """Of a child. Each takes its share of the cores: otherwise all of them would take all."""
    variables = {SIDE_BY_SIDE: str(jobs)}
    if jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        variables["OMP_NUM_THREADS"] = str(max(1, cores // jobs))
    return variables
