"""Tables of all experiments on given recipes, from which settings were chosen."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any

from pwlu.lab.compare.presets import TITLES
from pwlu.lab.compare.table import NOT_MEASURED, describe_environments, describe_images, markdown
from pwlu.lab.recipes import catalog
from pwlu.lab.recipes.experiment import differences, format_value
from pwlu.lab.recipes.metrics import TITLES as METRIC_TITLES
from pwlu.lab.recipes.settings import flag
from pwlu.lab.runs.results import Run

_LOSSES = {"train_loss": "training loss", "test_loss": "loss on these images"}

Cell = list[dict[str, Any]]  # the results of one experiment, ordered by seed


def trials_table(recipes: Sequence[str], changes: dict[str, Any], runs: Iterable[Run]) -> str:
    """Return a Markdown table with one row per experiment: per recipe, the metric of every seed and the mean losses.

    Runs whose settings differ from `changes` are left out. Diverged runs are marked.
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
        head += [f"{recipe}: {METRIC_TITLES[catalog.find(recipe).metrics[0]]}", *losses.values()]
    lines = [[name] for name in table]
    for line, cells in zip(lines, table.values(), strict=True):
        for recipe in recipes:
            line += _cells(cells.get(recipe, []), catalog.find(recipe).metrics[0], list(losses))
    numbers = f"{describe_images(wanted)}, one number per seed" + ("; losses are means over seeds" if losses else "")
    return f"{markdown(head, lines)}\n\n{numbers}. {describe_environments(run.environment for run in wanted)}."


def _has(run: Run, changes: dict[str, Any]) -> bool:
    return all(getattr(run.settings, name) == value for name, value in changes.items())


def _name(run: Run, changes: dict[str, Any]) -> str:
    """Return the activation and the flags that differ from the recipe. Show --unit-lr also if the recipe sets it."""
    changed = differences(run.settings) | ({"unit_lr": run.settings.unit_lr} if run.settings.unit_lr != 1 else {})
    flags = [f"{flag(name)} {format_value(value)}" for name, value in changed.items() if name not in changes]
    return TITLES[run.settings.activation] + (f" `{' '.join(flags)}`" if flags else "")


def _cells(results: Cell, metric: str, losses: list[str]) -> list[str]:
    measured = [f"{result[metric]:.2f}" + (" (diverged)" if result["diverged"] else "") for result in results]
    means = []
    for loss in losses:
        known = [result[loss] for result in results if result[loss] is not None]
        means.append(f"{mean(known):.2f}" if known else "")
    return [", ".join(measured), *means]
