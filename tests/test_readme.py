"""What README.md shows must work as it stands there."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_code_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_what_it_links_to_exists():
    targets = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert targets
    for target in targets:
        assert (Path(__file__).parent.parent / target).exists(), target
