"""``pwlu report``: a run as one page of HTML."""

import argparse
import sys
from pathlib import Path

from pwlu import files
from pwlu.lab.recipes.settings import UserError

NAME = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and where the page goes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Write the report of a run: result, curves, alignment, shapes, and all learned functions, in one HTML file that needs\n"
        "neither a network nor the data set. Works for unfinished runs too, and for what pwlu compare keeps under results/."
    )
    parser.epilog = (
        "examples:\n"
        "  pwlu report runs/digits-pwlu-seed0                 writes runs/digits-pwlu-seed0/report.html\n"
        "  pwlu report results/digits/pwlu-seed0 -o page.html\n"
        "  pwlu report runs/digits-pwlu-seed* --baseline runs/digits-relu-seed*    what the functions are worth"
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="folders of runs; of the first all is shown, the others beside it"
    )
    parser.add_argument(
        "--baseline", type=Path, nargs="+", default=[], metavar="RUN", help="the same with ReLU, say, in one or several seeds"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help=f"the page; replaced if it exists (default: {NAME} in the first RUN)"
    )


def run(options: argparse.Namespace) -> int:
    """Write the page, and say what it cannot show."""
    from pwlu.lab.runs.records import FILE as RECORDS
    from pwlu.lab.runs.run_folder import RunFolder
    from pwlu.report.page import page
    from pwlu.report.run_data import read_run_data
    from pwlu.report.side_by_side import compared

    output = options.output or options.runs[0] / NAME
    try:
        if options.output is None and not output.parent.is_dir() and RunFolder(options.runs[0]).has("config.json"):
            raise UserError(f"{options.runs[0]} has no folder, only a line of {RECORDS}. Write -o FILE for the page")
        if output.is_dir():
            raise UserError(f"-o must be a file, not the folder {output}. Write -o {output / NAME}")
        runs, baseline = ([read_run_data(path) for path in paths] for paths in (options.runs, options.baseline))
        beside = compared(runs, baseline) if len(runs) > 1 or baseline else None
        content = page(runs[0], beside).encode()
        files.write(output, content)
    except (UserError, OSError) as error:
        print(f"pwlu report: {error}", file=sys.stderr)
        return 2
    for note in (*runs[0].notes, *(note for other in (*runs[1:], *baseline) for note in other.damaged)):
        print(note, file=sys.stderr)
    if beside is not None and beside.baseline is not None:
        print(beside.verdict())
    print(f"{output}: {len(content) / 1e6:.2f} MB. Open it in a browser")
    if beside is None and runs[0].functions:
        print("what the functions are worth is seen beside the same training with --act relu: add --baseline RUN")
    return 0
