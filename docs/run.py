"""Run the code of a page, from top to bottom, in one namespace.

    python docs/run.py docs/tutorial.md            runs its ```python blocks, and prints what they print
    python docs/run.py docs/tutorial.md --write    and puts that into the ```text block after each, and pictures into images/

The code runs in an empty folder that is deleted afterwards. Blocks with a title (```python title="train.py") are files of their
own, and are left out.
"""

import argparse
import contextlib
import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<shown>.*?)^```\n)?", re.DOTALL | re.MULTILINE)


class Ran(NamedTuple):
    """One block: what it printed, what the page shows below it (None: nothing), and where that stands in the page."""

    printed: str
    shown: str | None
    place: tuple[int, int]


def run(page: Path, names: dict[str, Any]) -> Iterator[Ran]:
    """Every block of the page, one after the other, in the namespace that is given and in the folder we are in."""
    text = page.read_text()
    for block in _BLOCK.finditer(text):
        # lines are numbered as in the page, so that a traceback points there
        code = "\n" * text.count("\n", 0, block.start("code")) + block["code"]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, str(page), "exec"), names)
        yield Ran(printed.getvalue(), block["shown"], block.span("shown"))


def main() -> None:
    """Parse the command line, run the page, print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--write", action="store_true", help="put what is printed, and pictures, into the documentation")
    options = parser.parse_args()
    page = options.page.resolve()
    text, ran = page.read_text(), []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for block in run(page, {"__name__": "__main__"}):
            print(block.printed, end="", flush=True)
            ran.append(block)
        if options.write:
            for block in reversed(ran):  # from the end, so that places before it stay where they are
                if block.shown is not None:
                    text = text[: block.place[0]] + block.printed + text[block.place[1] :]
            page.write_text(text)
            for picture in re.findall(r"\]\((images/[^)]+)\)", text):
                if Path(picture).name in os.listdir():
                    shutil.copy(Path(picture).name, page.parent / picture)
        os.chdir(page.parent)  # Windows deletes no folder that someone is in


if __name__ == "__main__":
    main()
