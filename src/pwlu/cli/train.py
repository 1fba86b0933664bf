"""``pwlu train``: train an architecture on a data set with a chosen activation."""

import argparse
import dataclasses
import sys
import textwrap
from pathlib import Path
from typing import Any

from pwlu.lab.recipes.catalog import RECIPES, settings
from pwlu.lab.recipes.settings import Settings, UserError, flag
from pwlu.lab.runs.processes import joined
from pwlu.lab.runs.run_folder import RunFolder
from pwlu.text import install

RUNS = Path("runs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recipe, and a flag for each setting."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Train an architecture on a data set with a chosen activation; activations are put in by pwlu.convert_ and\n"
        "PWLUs learn in the two phases of the paper. Without arguments: handwritten digits, a minute on a CPU.\n\n"
        "recipes: " + textwrap.fill(", ".join(RECIPES), 110, subsequent_indent=" " * 9, break_on_hyphens=False)
    )
    parser.epilog = (
        "examples:\n"
        "  pwlu train                                        handwritten digits, built in\n"
        "  pwlu train cifar100/resnet18 --data DIR --act relu\n"
        "  pwlu train --resume runs/digits-pwlu-seed0        go on with a run that was stopped\n"
        "  torchrun --nproc-per-node 8 -m pwlu train imagenet/resnet18 --data DIR --precision bf16"
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="one of those above (default: digits)")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this folder, with its own settings")
    parser.add_argument("--again", action="store_true", help="train in a new folder, although a run has the same settings")
    add_settings(parser)
    add_runs(parser)


def add_settings(parser: argparse.ArgumentParser, leave_out: tuple[str, ...] = ()) -> None:
    """A flag for each setting but those left out."""
    what = parser.add_argument_group("what is trained")
    units = parser.add_argument_group("PWLUs")
    where = parser.add_argument_group("where and how fast")
    for field in dataclasses.fields(Settings):
        if "help" not in field.metadata or field.name in leave_out:
            continue
        group = where if field.metadata["machine"] else units if field.metadata["unit"] else what
        options: dict[str, Any] = {k: v for k, v in field.metadata["options"].items() if k != "flag"}
        text = field.metadata["help"]
        if "default" not in text:
            default = "as the recipe says" if field.default is None else field.default
            text += f" (default: {default})" if default not in (0.0, False) else ""
        if field.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = field.type
            if "choices" not in options:
                options.setdefault("metavar", {int: "N", float: "X"}.get(field.type, "NAME"))  # type: ignore[arg-type]
        group.add_argument(flag(field.name), dest=field.name, default=None, help=text.replace("%", "%%"), **options)


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Where run folders lie."""
    parser.add_argument("--runs", type=Path, default=RUNS, metavar="DIR", help=f"where run folders are made (default: {RUNS})")


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that were written on the command line."""
    names = {field.name for field in dataclasses.fields(Settings)} - {"recipe"}
    return {name: value for name, value in vars(options).items() if name in names and value is not None}


def run(options: argparse.Namespace) -> int:
    """Train, and say what came out."""
    try:
        return _run(options)
    except UserError as error:
        print(f"pwlu train: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    try:
        from pwlu.lab.training.loop import begin, train
    except ImportError as error:
        raise UserError(f"training needs more packages ({error}): {install('train')}") from None
    from pwlu.lab.runs.divergence import STATUS
    from pwlu.lab.runs.results import read_run
    from pwlu.lab.training.summary import headline

    changes = given(options)
    asked = settings(options.recipe or "digits", **changes) if options.resume is None else _resumed(options, changes)
    with joined(asked.device) as processes:
        path = begin(options.runs, asked, processes, options.again) if options.resume is None else options.resume
        if RunFolder(path).finished:
            result = read_run(path).result
            assert result is not None
            if processes.is_main:
                print(f"{path} is finished: {headline(result, asked.as_dict())}")
            return STATUS if result["diverged"] else 0
        try:
            result = train(asked, path, processes)
        except KeyboardInterrupt:
            if processes.is_main:
                print(f"\nstopped. To go on: pwlu train --resume {path}", file=sys.stderr)
            return 130
        if processes.is_main:
            print(headline(result, asked.as_dict()))
            picture = path / "functions.png"
            drawn = picture.exists() and not result["diverged"]
            print(f"run folder: {path}" + (f", the learned functions are drawn in {picture}" if drawn else ""))
    return STATUS if result["diverged"] else 0


def _resumed(options: argparse.Namespace, changes: dict[str, Any]) -> Settings:
    """The settings of the run; only where and how fast it goes on may be changed."""
    fixed = [
        flag(field.name) for field in dataclasses.fields(Settings) if field.name in changes and not field.metadata["machine"]
    ]
    if options.runs != RUNS:
        fixed.append("--runs")
    if options.recipe or fixed:
        written = ", ".join(([options.recipe] if options.recipe else []) + fixed)
        raise UserError(
            f"--resume goes on with the settings of that run: leave {written} out, or start a new run without --resume"
        )
    return RunFolder(options.resume).settings().replace(**changes)
