"""Text for messages."""

import pytest

from pwlu.common.text import abbreviate


@pytest.mark.parametrize(
    ("names", "most", "text"),
    [
        (["a", "b", "c"], 3, "a, b, c"),
        (["a", "b", "c", "d"], 3, "a, b, c and 1 more"),
        (["", "b", "c"], 2, "the model, b and 1 more"),
        ([], 3, ""),
    ],
)
def test_abbreviate(names, most, text):
    assert abbreviate(names, most) == text
