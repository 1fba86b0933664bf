"""Show docstrings, which are written for Python's help(), as Markdown."""

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Replace the roles of reStructuredText by code, and ``Example::`` by ``Example:``."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring:
            text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"::(?=\n\n)", ":", text)
