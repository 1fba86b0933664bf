"""``pwlu evaluate``: COCO's average precision of detections that were saved."""

import argparse
import math
import sys
from pathlib import Path

from pwlu.lab.recipes.catalog import find
from pwlu.lab.recipes.settings import UserError
from pwlu.lab.runs.run_folder import RunFolder
from pwlu.text import install

SAVED = "detections.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The detections, and what they are compared with."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Evaluate detections as COCO does: those that pwlu train --save-detections left in a run folder, or any file in\n"
        "COCO's results format, with boxes, masks or both. Of the data set, in COCO's layout, the annotations are enough."
    )
    parser.epilog = (
        "examples:\n"
        "  pwlu evaluate runs/nuclei-maskrcnn_resnet18_fpn-pwlu-seed0 --data DIR\n"
        "  pwlu evaluate detections.json --data DIR --most 300"
    )
    parser.add_argument("what", type=Path, metavar="RUN", help=f"a run folder with {SAVED}, or such a file")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of the data set (default: the run's)")
    parser.add_argument(
        "--most", type=int, metavar="N", help="detections of a class in an image that count (default: the run's, or 100)"
    )


def run(options: argparse.Namespace) -> int:
    """Print a line for boxes, and one for masks."""
    try:
        values = _evaluated(options)
    except UserError as error:
        print(f"pwlu evaluate: {error}", file=sys.stderr)
        return 2
    for kind in ("box", "mask"):
        if f"{kind}_ap" in values:
            numbers = (f"{_title(name)} {_number(value)}" for name, value in values.items() if name.startswith(kind))
            print(f"{kind:4}", *numbers, sep="  ")
    return 0


def _evaluated(options: argparse.Namespace) -> dict[str, float]:
    try:
        from pwlu.lab.data import coco
        from pwlu.lab.data.datasets import held_out
        from pwlu.lab.tasks import coco_evaluation
    except ImportError as error:
        raise UserError(f"evaluation needs more packages ({error}): {install('train', 'detection')}") from None
    if options.most is not None and options.most < 1:
        raise UserError(f"--most must be at least 1, not {options.most}")
    path, data, most, holdout = options.what, options.data, 100, 0
    if path.is_dir():
        settings = RunFolder(path).settings()
        if not find(settings.recipe).detects:
            raise UserError(f"{path} is a run of {settings.recipe}, which detects nothing: its accuracy is in result.json")
        data, most, holdout = data or Path(settings.data), find(settings.recipe).detections, settings.holdout
        path = path / SAVED
        if not path.exists():
            raise UserError(f"{options.what} has no {SAVED}: pwlu train writes it with --save-detections, at the end")
    elif data is None:
        raise UserError("which data set is it? Write --data DIR, the folder that holds annotations/instances_val*.json")
    rows, kinds = coco_evaluation.saved(path)
    part = coco.annotated(data, "train" if holdout else "val", with_masks="mask" in kinds)
    if holdout:
        part = held_out(part, holdout)[1]
    rows = coco_evaluation.checked(path, rows, kinds, part)
    values: dict[str, float] = {}
    for kind in kinds:
        values |= coco_evaluation.average_precision(part, rows, kind, options.most or most)
    return values


def _title(name: str) -> str:
    return name.partition("_")[2].replace("_", " ").replace("ap", "AP", 1)


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"
