"""Summarize a run for readers: report.md and functions.png."""

import io
from collections.abc import Sequence
from typing import Any

from torch import nn

from pwlu.analysis.alignment import Alignment
from pwlu.lab.recipes.metrics import format_metrics
from pwlu.lab.recipes.settings import Settings
from pwlu.lab.runs.divergence import describe_divergence
from pwlu.lab.runs.run_folder import RunFolder
from pwlu.plotting.functions import plot_functions

_SAME_SCALE = 3  # up to this many layers are drawn in one row with the same axes


def write_report(
    folder: RunFolder,
    settings: Settings,
    result: dict[str, Any],
    sites: str,
    network: nn.Module,
    aligned: Alignment | None,
    *,
    notes: Sequence[str] = (),
) -> None:
    """Write report.md and, if there are PWLUs, functions.png."""
    lines = [f"# {settings.recipe}, {settings.activation}, seed {settings.seed}", "", headline(result, settings.as_dict()), ""]
    if aligned is not None:
        image = io.BytesIO()
        same_scale = len(aligned) <= _SAME_SCALE
        plot_functions(network, alignment=aligned, same_scale=same_scale).savefig(image, format="png", dpi=120)
        folder.write("functions.png", image.getvalue())
        learned = "functions" if result["diverged"] else "learned functions"
        lines += [f"![the {learned}](functions.png)", ""]
    lines += (
        _table("result", result) + _table("setting", settings.as_dict()) + _table("made with", folder.json("environment.json"))
    )
    if notes:
        lines += ["## Data", "", *(f"- {note}" for note in notes), ""]
    lines += ["## Activation sites", "", "```", sites, "```", ""]
    if aligned is not None:
        lines += ["## Bounds and inputs", "", "```", str(aligned), "```", ""]
    folder.write("report.md", "\n".join(lines).encode())


def headline(result: dict[str, Any], config: dict[str, Any]) -> str:
    """Return the result in one sentence. For a diverged run, return what happened and what to try."""
    if result["diverged"]:
        return describe_divergence(result, config)
    return (
        f"{format_metrics(result)} on {result['measured_images']:,} {result['measured_on']}, "
        f"{result['parameters']:,} parameters, {result['seconds_per_epoch']:.3g} s per epoch"
    )


def _table(title: str, values: dict[str, Any]) -> list[str]:
    return [f"| {title} | |", "|---|---|", *(f"| {name.replace('_', ' ')} | {value} |" for name, value in values.items()), ""]
