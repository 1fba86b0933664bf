"""``pwlu report``: write a report of a run as one HTML page."""

import argparse
import sys
from pathlib import Path

from pwlu.common import files
from pwlu.lab.recipes.settings import UserError

NAME = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the runs and the path of the page."""
    parser.description = (
        "Write the report of a run as one HTML file: result, curves, alignment, shapes, and all learned functions. The page\n"
        "works offline and does not need the data set. Unfinished runs and the folders under results/ work too."
    )
    parser.epilog = (
        "examples:\n"
        "  pwlu report runs/digits-pwlu-seed0                 writes runs/digits-pwlu-seed0/report.html\n"
        "  pwlu report results/digits/pwlu-seed0 -o page.html\n"
        "  pwlu report runs/digits-pwlu-seed* --baseline runs/digits-relu-seed*    compare with ReLU"
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="show the first run in full, and compare the others with it"
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUN",
        help="compare with these runs of another activation, such as ReLU, one or several seeds (default: no comparison)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=f"write the page to this file, replacing it if it exists (default: {NAME} in the first RUN)",
    )


def run(options: argparse.Namespace) -> int:
    """Write the page, and print what it cannot show."""
    from pwlu.lab.runs.records import FILE as RECORDS
    from pwlu.lab.runs.run_folder import RunFolder
    from pwlu.report.page import page
    from pwlu.report.run_data import read_run_data
    from pwlu.report.side_by_side import make_comparison

    output = options.output or options.runs[0] / NAME
    try:
        if options.output is None and not output.parent.is_dir() and RunFolder(options.runs[0]).has("config.json"):
            raise UserError(f"{options.runs[0]} is a line of {RECORDS} and has no folder for the page. Write -o FILE")
        if output.is_dir():
            raise UserError(f"-o must be a file, not the folder {output}. Write -o {output / NAME}")
        runs, baseline = ([read_run_data(path) for path in paths] for paths in (options.runs, options.baseline))
        comparison = make_comparison(runs, baseline) if len(runs) > 1 or baseline else None
        content = page(runs[0], comparison).encode()
        files.write(output, content)
    except OSError as error:
        raise UserError(str(error)) from None
    for note in (*runs[0].notes, *(note for other in (*runs[1:], *baseline) for note in other.damaged)):
        print(note, file=sys.stderr)
    if comparison is not None and comparison.baseline is not None:
        print(comparison.verdict())
    print(f"{output}: {len(content) / 1e6:.2f} MB. Open it in a browser")
    if comparison is None and runs[0].functions:
        print("To see the gain over ReLU, train the same recipe with --act relu and add --baseline RUN")
    return 0
