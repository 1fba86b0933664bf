"""Complete the runs of comparisons: find finished runs, resume interrupted ones, start missing ones."""

from collections.abc import Callable, Iterable
from pathlib import Path

from pwlu.lab.compare.job import Job, find_existing
from pwlu.lab.compare.presets import Comparison
from pwlu.lab.compare.scheduler import Failure, Pool, Scheduler, describe, title
from pwlu.lab.recipes.experiment import reset_unused, run_key
from pwlu.lab.recipes.settings import Settings
from pwlu.lab.runs.processes import Processes
from pwlu.lab.runs.results import keep, read_run
from pwlu.lab.training.loop import create_run, train


def required_runs(comparisons: Iterable[Comparison], seeds: int) -> list[Settings]:
    """Return the runs of all comparisons without repetitions, ordered by seed.

    So if the comparison is stopped early, all rows of a table have nearly the same number of runs.
    """
    experiments = [settings for comparison in comparisons for settings in comparison.experiments.values()]
    runs = [reset_unused(settings.replace(seed=seed)) for seed in range(seeds) for settings in experiments]
    return list({run_key(settings): settings for settings in runs}.values())


def complete_runs(
    required: list[Settings],
    runs: Path,
    results: Path,
    make_pool: Callable[[int], Pool],
    *,
    processes: int = 1,
    nodes: int = 1,
) -> list[Failure]:
    """Train the missing runs. When a run finishes, copy its small files to the results.

    If a run fails, the others continue, unless a second run fails with the same output. If a run is killed or its machine is
    lost, it is tried again and continues from its last checkpoint.

    `make_pool`: a function from the number of missing runs to the pool that trains them, with this number of processes and
    nodes for each run. It is not called if no run is missing.
    """
    missing = _missing(required, runs, results)
    if not missing:
        return []
    jobs = [Job(settings, runs, processes, nodes=nodes) for settings in missing]
    return Scheduler(jobs, make_pool(len(missing)), results, len(required)).run()


def complete_runs_with_torchrun(required: list[Settings], runs: Path, results: Path, processes: Processes) -> None:
    """Train the missing runs one after another, each on all processes that torchrun started.

    Any error ends the comparison. To continue, run the same command again.
    """
    plan: list[tuple[Settings, Path | None]] = []  # the missing runs and the folders to resume; rank 0 decides
    if processes.is_main:
        existing = find_existing(runs)
        stopped = ((settings, existing.get(settings)) for settings in _missing(required, runs, results))
        plan = [(settings, run.path if run else None) for settings, run in stopped]
    for settings, folder in processes.broadcast_object(plan):
        path = folder or create_run(runs, settings, processes, again=True)
        result = train(settings, path, processes)
        if processes.is_main:
            keep(read_run(path), results)
            print(f"{title(settings)}: {describe(result)}", flush=True)


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
