"""Read and write files of ``torch.save`` without executing code in them."""

import io
from pathlib import Path
from typing import Any

import torch


def tensors(file: Path | io.BytesIO, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the dictionary that ``torch.save`` wrote to a file. Raise ValueError if there is none."""
    try:
        content = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # torch raises many types of errors; only their first line is about the file
        raise ValueError((str(error).strip().splitlines() or ["it is empty"])[0]) from None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"expected a dictionary of names, not {type(content).__name__}")
    return content


def serialised(content: Any) -> bytes:
    """Return the contents of a file that ``torch.load(weights_only=True)`` reads."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()
