"""``pwlu report``: a run as one page of HTML."""

import argparse
import sys
from pathlib import Path

from pwlu import files
from pwlu.recipes.settings import UserError

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
        "  pwlu report results/digits/pwlu-seed0 -o page.html"
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help=f"the page; replaced if it exists (default: RUN/{NAME})"
    )


def run(options: argparse.Namespace) -> int:
    """Write the page, and say what it cannot show."""
    from pwlu.report.evidence import read_evidence
    from pwlu.report.page import page

    output = options.output or options.run / NAME
    try:
        if output.is_dir():
            raise UserError(f"-o must be a file, not the folder {output}. Write -o {output / NAME}")
        evidence = read_evidence(options.run)
        content = page(evidence).encode()
        files.write(output, content)
    except (UserError, OSError) as error:
        print(f"pwlu report: {error}", file=sys.stderr)
        return 2
    for note in evidence.notes:
        print(note, file=sys.stderr)
    print(f"{output}: {len(content) / 1e6:.2f} MB. Open it in a browser")
    return 0
