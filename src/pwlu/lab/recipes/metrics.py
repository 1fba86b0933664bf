"""What is measured, in words. All of it is in percent, and more is better."""

from collections.abc import Mapping
from typing import Any

TITLES = {"accuracy": "accuracy, %", "box_ap": "box AP", "mask_ap": "mask AP"}
_SAID = {"accuracy": "accuracy {:.2f} %", "box_ap": "box AP {:.2f}", "mask_ap": "mask AP {:.2f}"}


def format_metrics(result: Mapping[str, Any]) -> str:
    """The numbers of a result.json that tables compare: ``accuracy 71.34 %``, ``box AP 39.06, mask AP 35.30``."""
    return ", ".join(words.format(result[name]) for name, words in _SAID.items() if name in result)
