"""Names and formats of the metrics. All are in percent, and larger is better."""

from collections.abc import Mapping
from typing import Any

TITLES = {"accuracy": "accuracy, %", "box_ap": "box AP", "mask_ap": "mask AP"}
_FORMATS = {"accuracy": "accuracy {:.2f} %", "box_ap": "box AP {:.2f}", "mask_ap": "mask AP {:.2f}"}


def format_metrics(result: Mapping[str, Any]) -> str:
    """Return the metrics of a result.json as text: ``accuracy 71.34 %``, ``box AP 39.06, mask AP 35.30``."""
    return ", ".join(text.format(result[name]) for name, text in _FORMATS.items() if name in result)
