"""Show docstrings, which are written for Python's help() and for Sphinx, as Markdown."""

import re
import textwrap
from typing import Any

import griffe
from latex2mathml.converter import convert

_FORMULA = re.compile(r"^\.\. math::(?P<first>.*)\n(?P<rest>(?:[ \t]+\S.*\n?)*)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Turn formulas into MathML, which browsers draw without a script, and other roles of reStructuredText into code."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring:
            text = _FORMULA.sub(lambda found: _formula(found["first"] + " " + found["rest"], "block"), obj.docstring.value)
            text = re.sub(r":math:`([^`]+)`", lambda found: _formula(found[1], "inline"), text)
            text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
            obj.docstring.value = re.sub(r"::(?=\n\n)", ":", text)


def _formula(latex: str, display: str) -> str:
    return convert(" ".join(textwrap.dedent(latex).split()), display=display)
