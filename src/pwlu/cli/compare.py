"""``pwlu compare``: train with several activations and seeds, and tabulate the results."""

import argparse
import io
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from pwlu.cli import add_number, check_positive
from pwlu.cli.train import add_runs, add_settings, changed_settings
from pwlu.common import files
from pwlu.lab.compare.presets import BASELINE, PRESETS, Comparison, comparison
from pwlu.lab.compare.table import Table
from pwlu.lab.recipes.settings import Settings, UserError, needs_packages

if TYPE_CHECKING:
    from pwlu.lab.compare.scheduler import Pool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the recipes, what to compare, a flag for each setting, and the folders."""
    parser.allow_abbrev = False  # otherwise argparse would accept --seed for --seeds
    parser.description = (
        "Train recipes with several activations and seeds, and write a table, CSV files and a chart of the results.\n"
        "You can stop and restart the command at any time: it keeps finished runs and continues interrupted ones."
    )
    parser.epilog = (
        "examples:\n"
        "  pwlu compare digits --acts relu,pwlu --seeds 3\n"
        "  pwlu compare cifar100/resnet18 cifar100/mobilenet_v2 --data DIR --precision bf16 --jobs 16 --mps\n"
        "  pwlu compare cifar100/resnet18 --data DIR --preset bounds --holdout 5000 --dry-run\n"
        "  pwlu compare cifar100/resnet18 --data DIR --on ray --gpus-per-run 0.25   on all nodes of a Ray cluster\n"
        "  pwlu compare imagenet/resnet18 --data DIR --precision bf16 --on ray --processes-per-run 8\n"
        "  torchrun --nproc-per-node 8 -m pwlu compare imagenet/resnet18 --data DIR --precision bf16\n"
        "  pwlu compare --document docs/results.md           update the tables of a page from results/"
    )
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="train these recipes; pwlu train --help lists them")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--acts",
        metavar="NAMES",
        help="compare these activations, separated by commas: relu,swish,pwlu (default: those of --preset)",
    )
    what.add_argument(
        "--preset", metavar="NAME", help=f"run a prepared comparison: {', '.join(PRESETS)} (default: activations)"
    )
    add_number(parser, "--seeds", "train each row of the table with seeds 0 to N-1 (default: 3)", 3)
    add_number(
        parser, "--jobs", "train N runs at the same time (default: 1; with --on ray: as many as the cluster has room for)"
    )
    parser.add_argument(
        "--on",
        metavar="CLUSTER",
        help="train on a Ray cluster whose nodes share the folder of --runs: ray for the cluster of this machine, or "
        "ray://HOST:10001 (default: train on this machine only)",
    )
    add_number(parser, "--processes-per-run", "train each run with N processes that torchrun starts (default: 1)", 1)
    nodes = "divide processes, GPUs and cores of each run over N nodes; only with --on ray (default: 1)"
    add_number(parser, "--nodes-per-run", nodes, 1)
    parser.add_argument(
        "--gpus-per-run",
        type=float,
        metavar="X",
        help="give each run X GPUs; with 0.25, four runs share a GPU; only with --on ray (default: 1 for each process "
        "if the cluster has GPUs, else 0)",
    )
    add_number(parser, "--cores-per-run", "give each run N cores; only with --on ray (default: 1 for each process)")
    parser.add_argument(
        "--mps",
        action="store_true",
        help="run NVIDIA's multi-process service, so that several runs use a GPU at the same time (default: they take turns)",
    )
    parser.add_argument("--dry-run", action="store_true", help="list finished and missing runs without training (default: off)")
    parser.add_argument(
        "--document", type=Path, metavar="FILE", help="update the tables of this page, train nothing (default: no page)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="fail if the page of --document is out of date, instead of updating it (default: off)",
    )
    add_runs(parser)
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("results"),
        metavar="DIR",
        help="keep tables, and small files of finished runs, in DIR (default: results)",
    )
    add_settings(parser, leave_out=("activation", "seed"))


def run(options: argparse.Namespace) -> int:
    """Train the missing runs, then show all results."""
    try:
        if options.document:
            return _update_page(options)
        return _compare_with_torchrun(options) if int(os.environ.get("WORLD_SIZE", 1)) > 1 else _compare(options)
    except KeyboardInterrupt:
        print("\nstopped. Finished runs are kept: run the same command to continue", file=sys.stderr)
        return 130
    except OSError as error:  # such as a full disk
        raise UserError(str(error)) from None


def _compare(options: argparse.Namespace) -> int:
    comparisons, required = _plan(options)
    if options.dry_run:
        return 0
    from pwlu.lab.compare.comparison import complete_runs
    from pwlu.lab.compare.mps import multi_process_service
    from pwlu.lab.compare.scheduler import title
    from pwlu.lab.compare.subprocesses import exit_on_signals

    with exit_on_signals(), multi_process_service() if options.mps else nullcontext():
        failures = complete_runs(
            required,
            options.runs,
            options.results,
            lambda missing: _pool(options, missing),
            processes=options.processes_per_run,
            nodes=options.nodes_per_run,
        )
    _show(comparisons, options.results)
    if failures:
        print(f"\n{len(failures)} of {len(required)} runs failed:", file=sys.stderr)
    for failure in failures:
        print(f"\n{title(failure.settings)}: {failure.why}", file=sys.stderr)
    return 1 if failures else 0


def _pool(options: argparse.Namespace, missing: int) -> "Pool":
    """Return a pool of processes on this machine, or of tasks on a cluster."""
    if options.on is None:
        from pwlu.lab.compare.subprocesses import LocalPool

        return LocalPool(min(options.jobs or 1, missing))
    from pwlu.lab.compare.ray_pool import RayPool

    cores = options.cores_per_run or options.processes_per_run
    return RayPool(
        options.on, options.runs, options.jobs, options.gpus_per_run, cores, options.processes_per_run, options.nodes_per_run
    )


def _compare_with_torchrun(options: argparse.Namespace) -> int:
    """Train one run after another, each with all processes that torchrun started. Rank 0 prints."""
    given = {"--jobs": options.jobs, "--on": options.on, "--processes-per-run": options.processes_per_run}
    for name, value in given.items():
        if value not in (None, 1):
            raise UserError(f"{name} {value}: under torchrun, all processes train one run at a time. Leave out {name}")
    from pwlu.lab.runs.processes import join_process_group

    with join_process_group(options.device) as processes:
        comparisons, required = _plan(options, silent=not processes.is_main)
        if options.dry_run:
            return 0
        from pwlu.lab.compare.comparison import complete_runs_with_torchrun

        complete_runs_with_torchrun(required, options.runs, options.results, processes)
        if processes.is_main:
            _show(comparisons, options.results)
    return 0


def _plan(options: argparse.Namespace, silent: bool = False) -> tuple[list[Comparison], list[Settings]]:
    """Return the comparisons and the runs that they need. Print how many of these are finished, stopped and missing."""
    if options.check:
        raise UserError("--check compares a page with the results: write --document FILE --check")
    if not options.recipes:
        raise UserError("name a recipe, for example: pwlu compare digits --acts relu,pwlu")
    check_positive(options, "seeds", "jobs", "processes_per_run", "nodes_per_run", "cores_per_run")
    _check_gpus(options.gpus_per_run, options.processes_per_run)
    for name in ("processes_per_run", "cores_per_run"):
        if (value := getattr(options, name)) is not None and value % options.nodes_per_run:
            raise UserError(f"--{name.replace('_', '-')} {value} must be divisible by --nodes-per-run {options.nodes_per_run}")
    if options.mps and options.on is not None:
        raise UserError("--mps works only on this machine: leave it out, or leave out --on")
    for name, usual in (("gpus_per_run", None), ("cores_per_run", None), ("nodes_per_run", 1)):
        if options.on is None and getattr(options, name) != usual:
            raise UserError(f"--{name.replace('_', '-')} works only on a cluster: add --on ray, or write --jobs N instead")
    what = next((text for text in (options.acts, options.preset) if text is not None), "activations")
    comparisons = [comparison(recipe, what, changed_settings(options)) for recipe in dict.fromkeys(options.recipes)]
    with needs_packages("training", "train"):
        from pwlu.lab.compare.comparison import required_runs
        from pwlu.lab.compare.job import find_existing
        from pwlu.lab.compare.scheduler import title
    required, existing = required_runs(comparisons, options.seeds), find_existing(options.results, options.runs)
    if silent:
        return comparisons, required
    for complaint in existing.complaints:
        print(f"skipped: {complaint}", file=sys.stderr)
    states = {"finished": 0, "stopped": 0, "missing": 0}
    for settings in required:
        run = existing.get(settings)
        state = "missing" if run is None else "stopped" if run.result is None else "finished"
        states[state] += 1
        if options.dry_run:
            epochs = "" if run is None or run.result else f", {run.epochs} of {settings.epochs} epochs"
            print(f"{state:8}  {title(settings)}" + (f" ({run.path}{epochs})" if run else ""))
    print(f"{len(required)} runs: " + ", ".join(f"{count} {state}" for state, count in states.items()), flush=True)
    return comparisons, required


def _check_gpus(gpus: float | None, processes: int) -> None:
    """Raise an error unless a run has 0 GPUs, one per process, or, for one process, a fraction of a GPU."""
    if gpus is not None and not (0 <= gpus < 1 and processes == 1) and gpus not in (0, processes):
        several = f"0, or {processes} for {processes} processes" if processes > 1 else "from 0 to 1, such as 0.25"
        raise UserError(f"--gpus-per-run must be {several}, not {gpus:g}")


def _update_page(options: argparse.Namespace) -> int:
    from pwlu.lab.compare import results_page
    from pwlu.lab.runs.results import find_runs

    if options.recipes or options.acts or options.preset or changed_settings(options):
        raise UserError("--document updates the tables in the page: leave out recipes, --acts, --preset and settings")
    runs, complaints = find_runs(options.results)
    for complaint in complaints:
        print(f"skipped: {complaint}", file=sys.stderr)
    before, after = results_page.update(options.document, runs)
    if options.check and before != after:
        print(f"{options.document} is not up to date: run pwlu compare --document {options.document}", file=sys.stderr)
        return 1
    if before != after:
        files.write(options.document, after.encode())
    print(f"{options.document} is up to date" + ("" if before == after else " now"))
    return 0


# Output.


def _show(comparisons: list[Comparison], results: Path) -> None:
    from pwlu.lab.runs.results import find_runs

    runs, _ = find_runs(results)
    tables = [Table(compared, runs) for compared in comparisons]
    for table in tables:
        compared = table.comparison
        text = f"# {compared.recipe}: {compared.stem}\n\n{table.markdown()}\n" + (
            f"\n{table.legend()}\n" if table.measured else ""
        )
        print(f"\n{text}")
        if table.measured:
            folder = results / compared.recipe
            folder.mkdir(parents=True, exist_ok=True)
            stem = folder / compared.stem
            drawn = _draw([table], Path(f"{stem}.png"))
            picture = f"\n![improvement over {BASELINE}]({compared.stem}.png)\n" if drawn else ""
            for end, content in ((".md", text + picture), (".csv", table.csv()), ("-runs.csv", table.runs_csv())):
                files.write(f"{stem}{end}", content.encode())
            print(f"saved: {stem}.md, .csv, -runs.csv" + (", .png" if drawn else ""))
    together = results / f"{comparisons[0].stem}.png"
    if len(tables) > 1 and _draw(tables, together):
        print(f"saved: {together}")


def _draw(tables: list[Table], path: Path) -> bool:
    """Draw the chart of gains, with one group of bars per table. Return False if no table has a gain to draw."""
    drawn = {table.comparison.recipe: table for table in tables if table.baseline is not None and len(table.measured) > 1}
    if not drawn:
        return False
    from pwlu.plotting.gain_chart import plot_improvements

    statistics = {recipe: table.statistics() for recipe, table in drawn.items()}
    try:
        theirs = {recipe: table.paper_gains() for recipe, table in drawn.items()}
        named = f"the paper, same network, {next(iter(drawn.values())).paper_dataset}"
        figure = plot_improvements(statistics, BASELINE, theirs, paper_name=named)
    except ImportError as error:
        print(f"no chart was made. {error}", file=sys.stderr)
        return False
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    files.write(path, picture.getvalue())
    return True
