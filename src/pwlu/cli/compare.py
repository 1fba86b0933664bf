"""``pwlu compare``: train with several activations and seeds, and make tables and charts of what came out."""

import argparse
import io
import os
import sys
from pathlib import Path

from pwlu import files
from pwlu.cli.train import add_runs, add_settings, given
from pwlu.lab.compare.presets import BASELINE, PRESETS, Comparison, comparison
from pwlu.lab.compare.table import Table
from pwlu.lab.recipes.settings import Settings, UserError
from pwlu.text import install


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Recipes, what to compare, a flag for each setting, and where things lie."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False  # --seed would be --seeds
    parser.description = (
        "Train recipes with several activations and seeds, and make a table, CSV files and a chart of what came out.\n"
        "What is finished is not done again, what was stopped goes on: the same command may be stopped and started at any time."
    )
    parser.epilog = (
        "examples:\n"
        "  pwlu compare digits --acts relu,pwlu --seeds 3\n"
        "  pwlu compare cifar100/resnet18 cifar100/mobilenet_v2 --data DIR --jobs 4\n"
        "  pwlu compare cifar100/resnet18 --data DIR --preset bounds --holdout 5000 --dry-run\n"
        "  torchrun --nproc-per-node 8 -m pwlu compare imagenet/resnet18 --data DIR --precision bf16\n"
        "  pwlu compare --document docs/results.md           make the tables of a page anew, from results/ alone"
    )
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="as in pwlu train; several may be given")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--acts", metavar="NAMES", help="activations to compare, with commas: relu,swish,pwlu")
    what.add_argument("--preset", metavar="NAME", help=f"one of {', '.join(PRESETS)} (default: activations)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each, with the seeds 0 to N-1 (default: 3)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at the same time (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="say what is finished and what would run, and stop")
    parser.add_argument("--document", type=Path, metavar="FILE", help="make the tables of this page anew; nothing is trained")
    parser.add_argument("--check", action="store_true", help="with --document: change nothing, fail if it is not up to date")
    add_runs(parser)
    parser.add_argument(
        "--results", type=Path, default=Path("results"), metavar="DIR", help="where results are kept (default: results)"
    )
    add_settings(parser, leave_out=("activation", "seed"))


def run(options: argparse.Namespace) -> int:
    """Bring about what is missing, then show it."""
    try:
        if options.document:
            return _document(options)
        return _in_step(options) if int(os.environ.get("WORLD_SIZE", 1)) > 1 else _compare(options)
    except KeyboardInterrupt:
        print("\nstopped. What is finished is kept: the same command goes on", file=sys.stderr)
        return 130
    except (UserError, OSError) as error:  # such as a full disk
        print(f"pwlu compare: {error}", file=sys.stderr)
        return 2


def _compare(options: argparse.Namespace) -> int:
    comparisons, asked = _asked(options)
    if options.dry_run:
        return 0
    from pwlu.lab.compare.comparison import complete_runs, title
    from pwlu.lab.compare.subprocesses import ended_by_signals

    with ended_by_signals():
        failures = complete_runs(asked, options.runs, options.results, options.jobs)
    _show(comparisons, options.results)
    if failures:
        print(f"\n{len(failures)} of {len(asked)} runs failed:", file=sys.stderr)
    for failure in failures:
        print(f"\n{title(failure.settings)}: {failure.why}", file=sys.stderr)
    return 1 if failures else 0


def _in_step(options: argparse.Namespace) -> int:
    """Under torchrun: no children, all processes train each run together. The first speaks."""
    if options.jobs > 1:
        raise UserError(f"--jobs {options.jobs}: the processes of torchrun train one run after the other. Leave --jobs out")
    from pwlu.lab.runs.processes import joined

    with joined(options.device) as processes:
        comparisons, asked = _asked(options, silent=not processes.is_main)
        if options.dry_run:
            return 0
        from pwlu.lab.compare.comparison import bring_about_in_step

        bring_about_in_step(asked, options.runs, options.results, processes)
        if processes.is_main:
            _show(comparisons, options.results)
    return 0


def _asked(options: argparse.Namespace, silent: bool = False) -> tuple[list[Comparison], list[Settings]]:
    """What is compared, and the runs that takes; says which of them there are."""
    if options.check:
        raise UserError("--check is about a page: write --document FILE --check")
    if not options.recipes:
        raise UserError("name a recipe, for example: pwlu compare digits --acts relu,pwlu")
    for flag in ("seeds", "jobs"):
        if getattr(options, flag) < 1:
            raise UserError(f"--{flag} must be at least 1, not {getattr(options, flag)}")
    what = next((text for text in (options.acts, options.preset) if text is not None), "activations")
    comparisons = [comparison(recipe, what, given(options)) for recipe in dict.fromkeys(options.recipes)]
    try:
        from pwlu.lab.compare.comparison import find, title, wanted
    except ImportError as error:
        raise UserError(f"training needs more packages ({error}): {install('train')}") from None
    asked, found = wanted(comparisons, options.seeds), find(options.results, options.runs)
    if silent:
        return comparisons, asked
    for complaint in found.complaints:
        print(f"skipped: {complaint}", file=sys.stderr)
    states = {"finished": 0, "stopped": 0, "missing": 0}
    for settings in asked:
        run = found.of(settings)
        state = "missing" if run is None else "stopped" if run.result is None else "finished"
        states[state] += 1
        if options.dry_run:
            done = (
                "" if run is None else f" ({run.path}" + (")" if run.result else f", {run.epochs} of {settings.epochs} epochs)")
            )
            print(f"{state:8}  {title(settings)}{done}")
    print(f"{len(asked)} runs: " + ", ".join(f"{count} {state}" for state, count in states.items()), flush=True)
    return comparisons, asked


def _document(options: argparse.Namespace) -> int:
    from pwlu.lab.compare import results_page
    from pwlu.lab.runs.results import find_runs

    if options.recipes or options.acts or options.preset or given(options):
        raise UserError("--document makes the tables that the page asks for: leave recipes, --acts, --preset and settings out")
    runs, complaints = find_runs(options.results)
    for complaint in complaints:
        print(f"skipped: {complaint}", file=sys.stderr)
    before, after = results_page.with_tables(options.document, runs)
    if options.check and before != after:
        print(f"{options.document} is not up to date: run pwlu compare --document {options.document}", file=sys.stderr)
        return 1
    if before != after:
        files.write(options.document, after.encode())
    print(f"{options.document} is up to date" + ("" if before == after else " now"))
    return 0


# What is shown and saved.


def _show(comparisons: list[Comparison], results: Path) -> None:
    from pwlu.lab.runs.results import find_runs

    runs, _ = find_runs(results)
    tables = [Table(compared, runs) for compared in comparisons]
    for table in tables:
        compared = table.comparison
        text = f"# {compared.recipe}: {compared.stem}\n\n{table.markdown()}\n"
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
    """The chart of gains, one group of bars a table; nothing without a baseline and something to compare with it."""
    drawn = {table.comparison.recipe: table for table in tables if table.baseline is not None and len(table.measured) > 1}
    if not drawn:
        return False
    from pwlu.plotting.gain_chart import plot_improvements

    statistics = {recipe: table.statistics() for recipe, table in drawn.items()}
    try:
        theirs = {recipe: table.paper_gains() for recipe, table in drawn.items()}
        named = f"the paper, same network, {next(iter(drawn.values())).papers_data}"
        figure = plot_improvements(statistics, BASELINE, theirs, named)
    except ImportError as error:
        print(f"no chart was made. {error}", file=sys.stderr)
        return False
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    files.write(path, picture.getvalue())
    return True
