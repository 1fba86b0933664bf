"""Tables of means over seeds and of gains over ReLU, with their uncertainties."""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from pwlu.common.text import counted
from pwlu.lab.compare import paper
from pwlu.lab.compare.presets import BASELINE, Comparison
from pwlu.lab.recipes import catalog
from pwlu.lab.recipes.experiment import experiment_key, format_value, label, method
from pwlu.lab.recipes.metrics import TITLES
from pwlu.lab.recipes.settings import Settings, flag
from pwlu.lab.runs.results import Run

NOT_MEASURED = "not measured yet"
_PAPER_TITLES = {
    "accuracy": "paper (ImageNet), %",
    "box_ap": "paper (COCO, ResNet-50): box AP",
    "mask_ap": "paper (COCO, ResNet-50): mask AP",
}


@dataclass(frozen=True)
class Row:
    """One row of a table: the finished runs of one experiment, one per seed."""

    title: str
    settings: Settings
    runs: list[Run]

    def values(self, name: str) -> list[Any]:
        """Return the value with this name in the result of each run."""
        return [run.result[name] for run in self.runs if run.result is not None]

    def mean_of(self, metric: str) -> float:
        """Return the mean over all runs."""
        return mean(self.values(metric))

    def std_of(self, metric: str) -> float | None:
        """Return the sample standard deviation, sqrt(sum_i (a_i - mean)^2 / (n - 1)); None for one run."""
        return stdev(self.values(metric)) if len(self.runs) > 1 else None

    @property
    def diverged(self) -> int:
        """Return the number of runs that diverged."""
        return sum(self.values("diverged"))

    @property
    def side_by_side(self) -> list[int]:
        """Return how many runs shared the device, with this row's run counted: one number per distinct value."""
        return sorted({run.environment.get("side_by_side", 1) for run in self.runs})

    @property
    def iou(self) -> float | None:
        """Return the mean over runs of the median IOU of bounds and inputs; None if no run has it."""
        found = [iou for run in self.runs if (iou := run.iou) is not None]
        return mean(found) if found else None

    def paper(self, metric: str) -> tuple[float | None, float | None]:
        """Return the paper's value and its gain over ReLU, for the same network and method."""
        named = catalog.find(self.settings.recipe).network, method(self.settings)
        return paper.value(metric, *named), paper.gain(*named, metric)


class Table:
    """The table of a comparison, filled from runs."""

    def __init__(self, comparison: Comparison, runs: Iterable[Run]) -> None:
        self.comparison = comparison
        found: dict[Any, dict[int, Run]] = {}
        for run in runs:
            if run.result is not None:
                found.setdefault(experiment_key(run.settings), {}).setdefault(run.settings.seed, run)
        self.rows = [
            Row(title, settings, [run for _, run in sorted(found.get(experiment_key(settings), {}).items())])
            for title, settings in comparison.experiments.items()
        ]
        self.metrics = catalog.find(comparison.recipe).metrics  # charts show the first
        self.measured = [row for row in self.rows if row.runs]
        self.baseline = next((row for row in self.measured if row.title == BASELINE), None)
        ious = {row.title: iou for row in self.measured if (iou := row.iou) is not None}
        self.ious = ious if len(ious) > 1 else {}  # leave out the column if only one row has a value

    def gain(self, row: Row, metric: str) -> tuple[float, float | None] | None:
        """Return the :func:`difference` to ReLU; None for ReLU itself."""
        if self.baseline is None or row is self.baseline:
            return None
        return difference(row.values(metric), self.baseline.values(metric))

    # Markdown.

    def markdown(self) -> str:
        """Return the table with a caption, or a note that nothing is measured yet."""
        if not self.measured:
            return NOT_MEASURED
        head = [""]
        for metric in self.metrics:
            head += [TITLES[metric], f"gain over {BASELINE}"]
        head += [*(["median IOU"] if self.ious else []), "parameters"]
        if any(row.paper(self.metrics[0])[0] is not None for row in self.rows):
            for metric in self.metrics:
                head += [_PAPER_TITLES[metric], "paper's gain"]
        return f"{markdown(head, map(self._cells, self.rows))}\n\n{self._caption()}"

    def _cells(self, row: Row) -> list[str]:
        theirs = []
        for value, gain in map(row.paper, self.metrics):
            theirs += ["" if value is None else f"{value:.2f}", "" if gain is None else f"{gain:+.2f}"]
        if not row.runs:
            return [row.title, NOT_MEASURED, *[""] * (2 * len(self.metrics) + bool(self.ious)), *theirs]
        count = f" ({len(row.runs)}" + (f", {row.diverged} diverged)" if row.diverged else ")")
        ours = []
        for metric in self.metrics:
            better = self.gain(row, metric)
            ours.append(f"{row.mean_of(metric):.2f}{uncertainty(row.std_of(metric))}{count}")
            ours.append("" if better is None else signed(*better))
        if self.ious:
            ours.append(f"{self.ious[row.title]:.2f}" if row.title in self.ious else "")
        return [row.title, *ours, join(sorted({f"{n:,}" for n in row.values("parameters")})), *theirs]

    def _caption(self) -> str:
        changes = " ".join(f"{flag(name)} {format_value(value)}" for name, value in self.comparison.differences().items())
        runs = [run for row in self.measured for run in row.runs]
        parts = [
            f"`{self.comparison.recipe}`" + (f" with `{changes}`" if changes else ""),
            join(sorted({_length(run.settings) for run in runs})),
            describe_images(runs),
            *(["diverged runs count with their final result"] if any(row.diverged for row in self.measured) else []),
        ]
        return f"{', '.join(parts)}. {describe_environments(run.environment for run in runs)}."

    def legend(self) -> str:
        """Return what the columns of the table mean."""
        return (
            "Mean ± standard deviation over seeds (number of seeds); gain ± its standard error."
            + " Median IOU: of the bounds and the middle 90 % of the inputs, over channels." * bool(self.ious)
        )

    # CSV.

    def csv(self) -> str:
        """Return one line per measured row of the table."""
        return _csv(self._lines())

    def _lines(self) -> Iterator[dict[str, Any]]:
        for row in self.measured:
            first, *others = (self._numbers(row, metric) for metric in self.metrics)
            theirs = {name: first.pop(name) for name in ("paper", "paper_gain")}
            yield {
                "recipe": self.comparison.recipe,
                "row": row.title,
                "label": label(row.settings),
                "runs": len(row.runs),
                "diverged": row.diverged,
                **{name: value for numbers in (first, *others) for name, value in numbers.items()},
                "iou": self.ious.get(row.title),
                "seconds_per_epoch": mean(row.values("seconds_per_epoch")),
                "side_by_side": join(row.side_by_side),
                "parameters": join(sorted(set(row.values("parameters")))),
                **theirs,
            }

    def _numbers(self, row: Row, metric: str) -> dict[str, float | None]:
        """Return the columns of a metric. The names of all but the first metric are in front of the names of their columns."""
        gain, error = self.gain(row, metric) or (None, None)
        value, paper_gain = row.paper(metric)
        own = "" if metric == self.metrics[0] else f"{metric}_"
        values = {metric: row.mean_of(metric), f"{own}std": row.std_of(metric), f"{own}gain": gain}
        return values | {f"{own}gain_error": error, f"{own}paper": value, f"{own}paper_gain": paper_gain}

    def runs_csv(self) -> str:
        """Return one line per run."""
        environment = ("side_by_side", "device", "torch", "pwlu", "revision")
        return _csv(
            {"recipe": self.comparison.recipe, "row": row.title, "label": label(row.settings), "seed": run.settings.seed}
            | (run.result or {})
            | {name: run.environment.get(name, "") for name in environment}
            for row in self.measured
            for run in row.runs
        )

    # The chart.

    def statistics(self) -> dict[str, tuple[float, float | None, int]]:
        """Return mean, standard deviation and number of runs by title."""
        first = self.metrics[0]
        return {row.title: (row.mean_of(first), row.std_of(first), len(row.runs)) for row in self.measured}

    @property
    def paper_dataset(self) -> str:
        """Return the data set on which the paper measured."""
        return "ImageNet" if self.metrics == ("accuracy",) else "COCO"

    def paper_gains(self) -> dict[str, float]:
        """Return the paper's gains by title, for the measured rows."""
        gains = {row.title: row.paper(self.metrics[0])[1] for row in self.measured}
        return {title: gain for title, gain in gains.items() if gain is not None}


def _length(settings: Settings) -> str:
    return counted(settings.iterations, "iteration") if settings.iterations else counted(settings.epochs, "epoch")


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float | None]:
    """Return the difference of the means, and its standard error sqrt(s^2/n + s_0^2/n_0) if both have several."""
    squares = [stdev(values) ** 2 / len(values) for values in (ours, theirs) if len(values) > 1]
    return mean(ours) - mean(theirs), math.sqrt(sum(squares)) if len(squares) == 2 else None


def uncertainty(value: float | None) -> str:
    """Return a standard deviation or error as text behind a number; empty if it is not known."""
    return "" if value is None else f" ± {value:.2f}"


def signed(gain: float, error: float | None) -> str:
    """Return a :func:`difference` as text."""
    return f"{gain:+.2f}{uncertainty(error)}"


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    """Return a Markdown table, right-aligned except for the first column. Cells beyond the header are dropped."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *(row[: len(head)] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def describe_images(runs: Iterable[Run]) -> str:
    """Return which images the runs were measured on, and how many."""
    return join(sorted({f"{run.result['measured_images']:,} {run.result['measured_on']}" for run in runs if run.result}))


def join(values: Iterable[Any]) -> str:
    """Return values as a list in words: "1, 2 and 3"."""
    return " and ".join(", ".join(map(str, values)).rsplit(", ", 1))


def describe_environments(environments: Iterable[dict[str, Any]]) -> str:
    """Return the distinct devices, versions and revisions."""
    formats = {"device": "{}", "torch": "torch {}", "pwlu": "pwlu {}", "revision": "revision {}"}
    known = list(environments)
    seen = {name: dict.fromkeys(each[name] for each in known if each.get(name)) for name in formats}
    return ", ".join(formats[name].format(join(values)) for name, values in seen.items() if values)


def _csv(lines: Iterable[dict[str, Any]]) -> str:
    lines = list(lines)
    text = io.StringIO()
    names = list(dict.fromkeys(name for line in lines for name in line))
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: round(v, 6) if isinstance(v, float) else v for name, v in line.items()} for line in lines)
    return text.getvalue()
