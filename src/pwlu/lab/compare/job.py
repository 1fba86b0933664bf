"""Find the existing runs of a comparison, and start a missing one, on this machine or another."""

import dataclasses
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from pwlu.lab.compare.subprocesses import TIMEOUT, Child, open_log
from pwlu.lab.recipes.experiment import run_key, run_name
from pwlu.lab.recipes.settings import Settings, flag
from pwlu.lab.runs.environment import SIDE_BY_SIDE
from pwlu.lab.runs.results import Run, find_runs


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
    """Find the runs below these folders. If a run exists twice, take the first finished one, else the one with most epochs."""
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
class Job:
    """A run to train. It holds everything that the training machine needs.

    Attributes:
        settings: the settings of the run.
        runs: the folder of run folders.
        processes: the number of processes that train the run together. If there are several, torchrun starts them.
        patience: how many seconds to wait until another process releases the lock of the run.
        nodes: the number of nodes over which the processes are divided evenly.
    """

    settings: Settings
    runs: Path
    processes: int = 1
    patience: float = TIMEOUT
    nodes: int = 1

    def start(self, side_by_side: int = 1, cores: int | None = None) -> Child | None:
        """Start the run in a child process, or resume it if it exists. Return None if another process trains it."""
        log = self.open_log()
        return None if log is None else self.start_node(self.command(), log, side_by_side, cores)

    def open_log(self, node: int = 0) -> BinaryIO | None:
        """Open and lock the log of a node of the run. Return None if another process trains the run."""
        return open_log(self.runs / "logs" / f"{run_name(self.settings)}{f'.node-{node}' if node else ''}.txt", self.patience)

    def command(self) -> list[str]:
        """Return the command that trains or resumes the run. Call :meth:`open_log` first: its lock excludes other processes."""
        run = find_existing(self.runs).get(self.settings)
        if run is None:  # write --again, because a damaged folder of the same run may exist
            arguments = [self.settings.recipe, *flags(self.settings), f"--runs={self.runs}", "--again"]
        else:
            arguments = [f"--resume={run.path}", *flags(self.settings, machine_only=True)]
        return ["pwlu", "train", *arguments]

    def start_node(
        self,
        command: list[str],
        log: BinaryIO,
        side_by_side: int,
        cores: int | None,
        *,
        launcher: Sequence[str] = ("--standalone",),
    ) -> Child:
        """Start the processes of one node, with the log from :meth:`open_log`.

        Args:
            command: from :meth:`command`, the same on all nodes.
            side_by_side: how many runs share the device.
            cores: how many cores of the node the run may use. Default: its share of this machine's.
            launcher: the flags of torchrun for the rendezvous of the nodes.
        """
        if self.processes > 1:
            count = self.processes // self.nodes
            command = ["pwlu.lab.compare.launch", *launcher, f"--nproc-per-node={count}", "-m", *command]
        return Child(command, log, self._environment(side_by_side, cores))

    def _environment(self, side_by_side: int, cores: int | None) -> dict[str, str]:
        """Return environment variables for the child. They limit its threads: each process would use all cores otherwise."""
        variables = {SIDE_BY_SIDE: str(side_by_side)}
        sharing = side_by_side * self.processes > 1 or cores is not None
        if sharing and "OMP_NUM_THREADS" not in os.environ:
            share = machine_cores() // side_by_side if cores is None else cores
            variables["OMP_NUM_THREADS"] = str(max(1, share * self.nodes // self.processes))
        return variables


def machine_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def flags(settings: Settings, machine_only: bool = False) -> list[str]:
    """Return the settings as flags of ``pwlu train``, without the recipe.

    `machine_only`: return only machine settings that differ from the default. A resumed run may change only these.
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
