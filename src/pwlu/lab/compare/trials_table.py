"""A table of everything that was tried with some recipes: what settings were chosen from."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any

from pwlu.lab.compare.presets import TITLES
from pwlu.lab.compare.table import NOT_MEASURED, images_of, listed, made_with, markdown
from pwlu.lab.recipes import catalog
from pwlu.lab.recipes.experiment import differences, short
from pwlu.lab.recipes.metrics import TITLES as MEASURES
from pwlu.lab.recipes.settings import flag
from pwlu.lab.runs.results import Run

_LOSSES = {"train_loss": "training loss", "test_loss": "loss"}

Cell = list[dict[str, Any]]  # the results of an experiment in order of seeds


def trials_table(recipes: Sequence[str], changes: dict[str, Any], runs: Iterable[Run]) -> str:
    """Markdown: a row an experiment, and for each recipe what every seed measured, with the means of the losses.

    Args:
        recipes: of ``pwlu.lab.recipes.catalog.RECIPES``.
        changes: of settings, by name; runs that have others are left out.
        runs: all there are. One that diverged says so.
    """
    wanted = [run for run in runs if run.result is not None and run.settings.recipe in recipes and _has(run, changes)]
    if not wanted:
        return NOT_MEASURED
    table: dict[str, dict[str, Cell]] = defaultdict(lambda: defaultdict(list))
    for run in sorted(
        wanted, key=lambda run: (list(TITLES).index(run.settings.activation), _name(run, changes), run.settings.seed)
    ):
        table[_name(run, changes)][run.settings.recipe].append(run.result or {})
    losses = {name: title for name, title in _LOSSES.items() if all(name in (run.result or {}) for run in wanted)}
    head = [""]
    for recipe in recipes:
        head += [f"{recipe}: {MEASURES[catalog.find(recipe).metrics[0]]}", *losses.values()]
    lines = [[name] for name in table]
    for line, cells in zip(lines, table.values(), strict=True):
        for recipe in recipes:
            line += _cells(cells.get(recipe, []), catalog.find(recipe).metrics[0], list(losses))
    parts = [
        f"Measured on {images_of(wanted)} at the end of training, one number a seed",
        *([f"{listed(losses.values())}: means over seeds"] if losses else []),
        *made_with(run.environment for run in wanted),
    ]
    return f"{markdown(head, lines)}\n\n{'; '.join(parts)}."


def _has(run: Run, changes: dict[str, Any]) -> bool:
    return all(getattr(run.settings, name) == value for name, value in changes.items())


def _name(run: Run, changes: dict[str, Any]) -> str:
    """The activation, and what was changed of the recipe as one writes it; a learning rate of its own in any case."""
    changed = differences(run.settings) | ({"unit_lr": run.settings.unit_lr} if run.settings.unit_lr != 1 else {})
    flags = [f"{flag(name)} {short(value)}" for name, value in changed.items() if name not in changes]
    return TITLES[run.settings.activation] + (f" `{' '.join(flags)}`" if flags else "")


def _cells(results: Cell, metric: str, losses: list[str]) -> list[str]:
    measured = [f"{result[metric]:.2f}" + (" (diverged)" if result["diverged"] else "") for result in results]
    means = []
    for loss in losses:
        known = [result[loss] for result in results if result[loss] is not None]
        means.append(f"{mean(known):.2f}" if known else "")
    return [", ".join(measured), *means]
