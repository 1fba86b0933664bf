"""The static sections of the page: result, training curves, alignment."""

import math
import statistics
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from pwlu.analysis.alignment import HEALTHY, Alignment, UnitAlignment, share_outside
from pwlu.lab.recipes import experiment
from pwlu.lab.recipes.metrics import TITLES, format_metrics
from pwlu.lab.runs.divergence import describe_divergence
from pwlu.report.charts import Line, histogram, lines, whisker_plot
from pwlu.report.run_data import RunData

_REALIGNED = "\u03bc \u00b1 3\u03c3"  # mu +- 3 sigma
_CURVES = {  # labels in the charts, by name in metrics.jsonl
    "measures": {"train_accuracy": "train", "accuracy": "test", "box_ap": "boxes", "mask_ap": "masks"},
    "losses": {"loss": "train", "test_loss": "test"},
}


def summary(run: RunData) -> str:
    """Return the result in large figures, the notes, and all settings."""
    result = run.result
    figures = "".join(f"<div><dt>{title}</dt><dd>{value}</dd></div>" for title, value in _figures(run))
    parts = []
    if run.diverged:
        words = "The training diverged. This page shows its last state, not a trained network."
        parts.append(f'<p class="warning">{words}</p>')
    parts.append(f'<dl class="figures">{figures}</dl>' if figures else "")
    if run.notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
        parts.append(f'<aside class="notes" role="note" aria-label="What this page cannot show"><ul>{items}</ul></aside>')
    if words := _settings(run):
        parts.append(f"<p>{escape(words)}</p>")
    for title, values in (("Settings", run.config), ("Environment", run.environment), ("Result", result)):
        if values:
            entries = "".join(
                f"<div><dt>{escape(_with_spaces(k))}</dt><dd>{escape(_format(v))}</dd></div>" for k, v in values.items()
            )
            parts.append(f'<details><summary>{title}</summary><dl class="all">{entries}</dl></details>')
    return "".join(parts)


def headline(run: RunData, verdict: str) -> str:
    """Return the sentence under the title: the verdict of a comparison, the metrics, and the number of functions."""
    result = {name: value for name, value in run.result.items() if value is not None}
    parts = []
    if run.diverged:
        return f"{describe_divergence(run.result, run.config)} {verdict}".strip()
    if format_metrics(result):
        parts.append(f"{format_metrics(result)} on {result.get('measured_images', 0):,} {result.get('measured_on', 'images')}")
    if run.functions:
        counts = [len(unit["left"]) for unit in run.functions.values()]
        granularity = "layer" if max(counts) == 1 else "channel"
        learned = "learned " if run.learned else ""
        when = "" if run.ended else f", at step {max(run.snapshots):,}"
        parts.append(f"{sum(counts):,} {learned}functions in {len(counts)} layers, one per {granularity}{when}")
    words = "; ".join(parts) + "."
    words = words[0].upper() + words[1:] if parts else "Nothing was measured yet."
    return f"{verdict} {words}".strip()


def curves(run: RunData) -> str:
    """Return charts of accuracy, or average precision, and of losses over epochs."""
    charts = []
    mark = None
    if run.realigned_after:
        mark = run.realigned_after / run.steps_per_epoch, f"realignment, step {run.realigned_after:,}"
    detects = any("box_ap" in row for row in run.metrics)
    titles = {"measures": "average precision, %" if detects else "accuracy, %", "losses": "loss, logarithmic"}
    for group, names in _CURVES.items():
        series = [
            Line(
                "held out" if label == "test" and run.config.get("holdout") else label,
                "first" if name in ("accuracy", "test_loss", "box_ap") else "second",
                points,
            )
            for name, label in names.items()
            if (points := run.points(name))
        ]
        if series:
            charts.append(f"<figure>{lines(series, 'epoch', titles[group], mark=mark, log=group == 'losses')}</figure>")
    if not charts:
        return ""
    return f'<div class="pair">{"".join(charts)}</div>' + _epochs(run.metrics)


def alignment(aligned: Alignment, names: Iterable[str]) -> str:
    """Return text and charts on how well bounds fit inputs, over all channels and per layer. `names`: all layers in order."""
    if not aligned.iou:
        return "<p>No input reached any PWLU.</p>"
    words = (
        f"<p>The median IOU of the bounds of a function and the middle 90 % of its inputs is "
        f"<strong>{statistics.median(aligned.iou):.2f}</strong>. {share_outside(aligned)} of all inputs lie outside the "
        "bounds; every input counts once, so layers with large feature maps have the most weight. "
        f"The dotted line at {HEALTHY:.2f} is the IOU of normally distributed inputs with the bounds {_REALIGNED}, which "
        "realignment sets.</p>"
    )
    if aligned.unreached:
        words += f"<p>No input reached {escape(', '.join(aligned.unreached))}.</p>"
    bars = histogram(aligned.iou, "IOU", "channels, %", (HEALTHY, _REALIGNED))
    spreads = {unit.name: _quantiles(unit) for unit in aligned if any(unit.count)}
    dots = whisker_plot([(name, spreads.get(name)) for name in names], "layer", "IOU", HEALTHY)
    return (
        f'{words}<div class="pair"><figure>{bars}<figcaption>All channels</figcaption></figure><figure>{dots}<figcaption>Per '
        "layer, in model order: median and middle 80 % of channels</figcaption></figure></div>"
    )


def _figures(run: RunData) -> list[tuple[str, str]]:
    result, found = run.result, []
    for name, title in TITLES.items():
        if result.get(name) is not None:
            found.append((title.removesuffix(", %"), f"{result[name]:.2f} %"))
    if result.get("parameters") is not None:
        found.append(("parameters", f"{result['parameters']:,}"))
    if run.metrics:
        found.append(("epochs", f"{len(run.metrics)}" if result else run.progress))
    if result.get("seconds_per_epoch") is not None:
        found.append(("time per epoch", f"{result['seconds_per_epoch']:.3g} s"))
    if run.metrics and 0 < run.realigned_after <= run.metrics[-1]["step"]:
        found.append(("realigned after", f"{run.realigned_after:,} steps"))
    return found


def _settings(run: RunData) -> str:
    """Return sentences on the most important settings and on what differs from the recipe."""
    config, where = run.config, run.environment
    sentences = []
    if run.functions and config:
        began = "the activations they replaced" if config.get("init") == "same" else config.get("init", "relu")
        intervals = sorted({unit["heights"].shape[1] - 1 for unit in run.functions.values()})
        sentences.append(f"PWLUs have {' or '.join(map(str, intervals))} intervals and started as {began}.")
    if where:
        revision = f" ({where['revision']})" if where.get("revision") else ""
        sentences.append(
            f"Trained with pwlu {where.get('pwlu')}{revision} and torch {where.get('torch')} on {where.get('device')}."
        )
    if run.settings and (changed := experiment.differences(run.settings)):
        named = ", ".join(f"{_with_spaces(name)} {experiment.format_value(value)}" for name, value in changed.items())
        sentences.append(f"Changed from the recipe: {named}.")
    return " ".join(sentences)


def _epochs(metrics: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in metrics for name in row))
    head = "".join(f'<th scope="col">{escape(_with_spaces(name))}</th>' for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_format(row.get(name)))}</td>" for name in names) + "</tr>" for row in metrics
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    scroll = f'<div class="scroll" tabindex="0" role="region" aria-label="Numbers per epoch">{table}</div>'
    return f"<details><summary>Numbers per epoch</summary>{scroll}</details>"


def _quantiles(unit: UnitAlignment) -> tuple[float, float, float]:
    known = sorted(value for value in unit.iou if not math.isnan(value))
    return known[round(0.1 * (len(known) - 1))], statistics.median(known), known[round(0.9 * (len(known) - 1))]


def _with_spaces(name: str) -> str:
    return name.replace("_", " ")


def _format(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
