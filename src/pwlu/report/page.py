"""Assemble the page: one file, whose content security policy forbids it to load anything else."""

import base64
import hashlib
import json
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from pwlu.report import sections
from pwlu.report.gallery import gallery
from pwlu.report.run_data import RunData
from pwlu.report.shape_table import shape_table
from pwlu.report.side_by_side import Comparison
from pwlu.version import __version__

_SCRIPTS = ("decode.js", "draw.js", "gallery.js", "main.js")


def page(run: RunData, comparison: Comparison | None = None) -> str:
    """Return the report as HTML. `comparison`: the comparison of the run with others."""
    script = '"use strict";\n' + "\n".join(_read_part(name) for name in _SCRIPTS)
    parts = _sections(run, comparison)
    ids = {title: title.lower() for title in parts}
    data: dict[str, Any] | None = gallery(run) if run.functions else None
    return Template(_read_part("page.html")).substitute(
        title=escape(run.title),
        headline=escape(sections.headline(run, comparison.verdict() if comparison else "")),
        version=__version__,
        style=_read_part("page.css"),
        script=script,
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
        navigation="".join(f'<a href="#{ids[title]}">{title}</a>' for title in parts),
        sections="\n".join(
            f'<section id="{ids[title]}" aria-labelledby="{ids[title]}-title"><h2 id="{ids[title]}-title">{title}</h2>{content}'
            "</section>"
            for title, content in parts.items()
        ),
        # A name with </script> must not end the script element.
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    )


def _sections(run: RunData, comparison: Comparison | None) -> dict[str, str]:
    """Return the sections that have content, by title."""
    parts = {"Result": sections.summary(run)}
    if comparison is not None:
        parts["Comparison"] = comparison.section()
    if charts := sections.curves(run):
        parts["Training"] = charts
    if run.alignment is not None:
        parts["Alignment"] = sections.alignment(run.alignment, run.functions or [unit.name for unit in run.alignment])
    if run.shapes is not None:
        parts["Shapes"] = shape_table(run.shapes, run.alignment)
        parts["Functions"] = _read_part("functions.html")
    return parts


def _read_part(name: str) -> str:
    return (files("pwlu.report") / name).read_text(encoding="utf-8")
