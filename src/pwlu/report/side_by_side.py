"""Compare runs with a baseline: state their gain in a sentence and a table, and draw their curves."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean, stdev
from typing import Any

from pwlu.common.text import counted
from pwlu.lab.compare import presets
from pwlu.lab.compare.table import difference, join, signed, uncertainty
from pwlu.lab.recipes import experiment
from pwlu.lab.recipes.metrics import TITLES
from pwlu.lab.recipes.settings import UserError
from pwlu.report.charts import Line, lines
from pwlu.report.run_data import RunData

_CLASSES = ("first", "third", "fourth")  # the CSS classes of lines, in turn; the baseline has "second"
_LONGEST = 9  # the longest name that fits beside a line, in characters


@dataclass(frozen=True)
class Group:
    """Runs of one experiment that differ only in their seeds."""

    name: str
    runs: list[RunData]

    def values(self, metric: str) -> list[float]:
        """Return the results of the finished runs."""
        return [run.result[metric] for run in self.runs if run.result.get(metric) is not None]

    @property
    def diverged(self) -> int:
        """Return the number of runs that diverged."""
        return sum(run.diverged for run in self.runs)


@dataclass(frozen=True)
class Comparison:
    """All runs of a page, as groups. The page shows the functions of the first run of the first group.

    ``metric``: the name of the compared metric in result.json.
    """

    metric: str
    groups: list[Group]
    baseline: Group | None

    def verdict(self) -> str:
        """Return a sentence on what the first group gains over the baseline; empty without a baseline."""
        first, base = self.groups[0], self.baseline
        if base is None:
            return ""
        found = self.gain(first)
        if found is None:
            return f"{first.name} has no result yet to compare with {base.name}."
        gain, error = found
        ours, theirs = (fmean(group.values(self.metric)) for group in (first, base))
        measure = TITLES[self.metric].removesuffix(", %")
        numbers = f"{measure} {ours:.2f} % against {theirs:.2f} %, {signed(gain, error)} points"
        seeds = f"{len(first.values(self.metric))} and {counted(len(base.values(self.metric)), 'seed')}"
        if error is None:
            words = f"{first.name} and {base.name}: {numbers} with {seeds}, too few to estimate the error"
        elif abs(gain) <= 2 * error:
            words = f"{first.name} is not clearly different from {base.name}: {numbers} with {seeds}, within 2 standard errors"
        else:
            better = "better" if gain > 0 else "worse"
            words = f"{first.name} is {better} than {base.name}: {numbers} with {seeds}, more than 2 standard errors"
        lost = [f"{group.diverged} of {group.name}" for group in (first, base) if group.diverged]
        return words + (f"; diverged: {', '.join(lost)}" if lost else "") + "."

    def gain(self, group: Group) -> tuple[float, float | None] | None:
        """Return the :func:`difference` to the baseline; None for the baseline itself, and without results."""
        if self.baseline is None or group is self.baseline or not (ours := group.values(self.metric)):
            return None
        return difference(ours, self.baseline.values(self.metric))

    def section(self) -> str:
        """Return the table and the curves as HTML."""
        every = [*self.groups, *([self.baseline] if self.baseline else [])]
        curves = [
            (self.metric, TITLES[self.metric].replace("AP", "AP, %"), False),
            ("loss", "training loss, logarithmic", True),
        ]
        charts = [
            f"<figure>{lines(series, 'epoch', title, log=log)}</figure>"
            for name, title, log in curves
            if (series := self._series(every, name))
        ]
        return self._table(every) + f'<div class="pair">{"".join(charts)}</div>'

    def _series(self, groups: Sequence[Group], name: str) -> list[Line]:
        series = []
        for number, group in enumerate(groups, start=1):
            css_class = "second" if group is self.baseline else _CLASSES[(number - 1) % len(_CLASSES)]
            label = group.name if len(group.name) <= _LONGEST else f"row {number}"
            drawn = [points for run in group.runs if (points := run.points(name))]
            series += [Line("" if place else label, css_class, points) for place, points in enumerate(drawn)]
        return series

    def _table(self, groups: Sequence[Group]) -> str:
        over = f"over {self.baseline.name}" if self.baseline else ""
        head = ["", "seeds", TITLES[self.metric], over, "training loss", "parameters", "s per epoch", "folders"]
        body = "".join(f"<tr>{self._row(number, group)}</tr>" for number, group in enumerate(groups, start=1))
        titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
        table = f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"
        below = "± is the standard deviation over seeds for a mean, and the standard error for a difference."
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="All runs">{table}</div><p class="caption">{below}</p>'
        )

    def _row(self, number: int, group: Group) -> str:
        values, gain = group.values(self.metric), self.gain(group)
        deviation = stdev(values) if len(values) > 1 else None
        mean = f"{fmean(values):.2f}{uncertainty(deviation)}" if values else "not finished"
        row = [
            ", ".join(str(run.config.get("seed", 0)) for run in group.runs),
            mean + (f" ({group.diverged} diverged)" if group.diverged else ""),
            "" if gain is None else signed(*gain),
            _mean(group, "train_loss", "{:.3g}"),
            _mean(group, "parameters", "{:,.0f}"),
            _mean(group, "seconds_per_epoch", "{:.3g}"),
            ", ".join(str(run.path) for run in group.runs),
        ]
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        return f'<th scope="row"><i>{number}</i> {escape(group.name)}</th>{cells}'


def make_comparison(runs: Sequence[RunData], baseline: Sequence[RunData]) -> Comparison:
    """Group runs by experiment. Raise UserError if they cannot be compared."""
    first = runs[0]
    for run in (*runs, *baseline):
        for name, known in (("recipe", run.config), ("measured_on", run.result), ("measured_images", run.result)):
            ours = (first.config if name == "recipe" else first.result).get(name)
            if known.get(name) not in (None, ours) and ours is not None:
                raise UserError(
                    f"{run.path} cannot be compared with {first.path}: {name.replace('_', ' ')} {known[name]}, not {ours}. "
                    "Leave out one of them"
                )
    metric = next((name for name in TITLES for run in (*runs, *baseline) if run.result.get(name) is not None), None)
    if metric is None:
        raise UserError(f"none of these runs is finished: {', '.join(str(run.path) for run in (*runs, *baseline))}")
    shared = _shared([*runs, *baseline])
    groups, bases = _grouped(runs, shared), _grouped(baseline, shared)
    if len(bases) > 1:
        names = join(base.name for base in bases)
        raise UserError(f"--baseline must be runs of one experiment that differ only in their seeds, not {names}")
    if bases and not bases[0].values(metric):
        raise UserError(f"the baseline {bases[0].runs[0].path} is not finished: it has no {metric} to compare with")
    if bases and bases[0].name in [group.name for group in groups]:
        raise UserError(f"--baseline is the same experiment as the run, {bases[0].name}: choose a run with another activation")
    return Comparison(metric, groups, bases[0] if bases else None)


def _shared(runs: Sequence[RunData]) -> set[str]:
    """Return the names of the settings that all runs share."""
    return {name for name in runs[0].config if all(run.config.get(name) == runs[0].config[name] for run in runs)}


def _grouped(runs: Iterable[RunData], shared: set[str]) -> list[Group]:
    groups: dict[str, Group] = {}
    for run in runs:
        name = _name(run, shared)
        group = groups.setdefault(name, Group(name, []))
        for other in group.runs:
            if other.config.get("seed") == run.config.get("seed"):
                raise UserError(f"{other.path} and {run.path} are the same experiment with the same seed: leave one out")
        group.runs.append(run)
    return list(groups.values())


def _name(run: RunData, shared: set[str]) -> str:
    """Return the activation and what differs from the recipe and between runs; the folder if the settings are unknown."""
    if (settings := run.settings) is None:
        return str(run.path)
    changes = {name: value for name, value in experiment.differences(settings).items() if name not in shared}
    words = [f"{name.replace('_', ' ')} {experiment.format_value(value)}" for name, value in changes.items()]
    return ", ".join([presets.TITLES.get(settings.activation, settings.activation), *words])


def _mean(group: Group, name: str, words: str) -> str:
    known: list[Any] = group.values(name)
    return words.format(fmean(known)) if known else "-"
