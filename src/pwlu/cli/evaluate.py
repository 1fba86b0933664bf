"""``pwlu evaluate``: compute COCO's average precision of saved detections."""

import argparse
import math
from pathlib import Path

from pwlu.cli import add_number, check_positive
from pwlu.lab.recipes.catalog import find
from pwlu.lab.recipes.settings import UserError, needs_packages
from pwlu.lab.runs.results import settings_of

SAVED = "detections.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the detections and the data set to compare them with."""
    parser.description = (
        "Compute COCO's average precision of detections. They are read from a run of pwlu train --save-detections, or from\n"
        "a file in COCO's results format with boxes, masks or both. The data set must have COCO's layout; only its\n"
        "annotations are read, not its images."
    )
    parser.epilog = (
        "examples:\n"
        "  pwlu evaluate runs/nuclei-maskrcnn_resnet18_fpn-pwlu-seed0 --data DIR\n"
        "  pwlu evaluate detections.json --data DIR --most 300"
    )
    parser.add_argument(
        "what", type=Path, metavar="RUN", help=f"read detections from this run folder with {SAVED}, or from this JSON file"
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="read annotations from this data set (default: the data set of the run)"
    )
    add_number(
        parser,
        "--most",
        "count at most the N best detections per class and image (default: the number of the run's recipe, or 100)",
    )


def run(options: argparse.Namespace) -> int:
    """Print one line for boxes and one for masks."""
    values = _evaluate(options)
    for kind in ("box", "mask"):
        if f"{kind}_ap" in values:
            numbers = (f"{_title(name)} {_number(value)}" for name, value in values.items() if name.startswith(kind))
            print(f"{kind:4}", *numbers, sep="  ")
    return 0


def _evaluate(options: argparse.Namespace) -> dict[str, float]:
    with needs_packages("evaluation", "train", "detection"):
        from pwlu.lab.data import coco
        from pwlu.lab.data.datasets import split_holdout
        from pwlu.lab.tasks import coco_evaluation
    check_positive(options, "most")
    path, data, most, holdout = options.what, options.data, 100, 0
    if path.is_dir():
        settings = settings_of(path)
        if not find(settings.recipe).detects:
            raise UserError(f"{path} is a run of {settings.recipe}, which is not a detector. Its accuracy is in result.json")
        data, most, holdout = data or Path(settings.data), find(settings.recipe).detections, settings.holdout
        path = path / SAVED
        if not path.exists():
            raise UserError(f"{options.what} has no {SAVED}. To get one, train with pwlu train --save-detections")
    elif data is None:
        raise UserError("a file of detections needs its data set: write --data DIR, with DIR/annotations/instances_val*.json")
    rows, kinds = coco_evaluation.read_detections(path)
    part = coco.load_annotations(data, "train" if holdout else "val", with_masks="mask" in kinds)
    if holdout:
        part = split_holdout(part, holdout)[1]
    rows = coco_evaluation.check_detections(path, rows, kinds, part)
    values: dict[str, float] = {}
    for kind in kinds:
        values |= coco_evaluation.average_precision(part, rows, kind, options.most or most)
    return values


def _title(name: str) -> str:
    return name.partition("_")[2].replace("_", " ").replace("ap", "AP", 1)


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"
