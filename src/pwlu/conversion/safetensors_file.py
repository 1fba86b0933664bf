"""Read and write safetensors files: tensors by name, and strings in the metadata."""

import functools
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pwlu.common.text import install
from pwlu.units.sharding import is_sharded


def tensors_to_bytes(state: Mapping[str, Any], conversion: dict[str, Any] | None = None) -> bytes:
    """Return a state dict as the contents of a safetensors file, with the conversion in its metadata.

    Tensors that share memory are stored once.
    """
    safetensors = require_safetensors("save")
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or is_sharded(value):
            raise TypeError(
                f"save: {key} is a {type(value).__name__}, but a safetensors file holds plain tensors only. For a sharded "
                "model, gather the state dict by torch.distributed.checkpoint.state_dict.get_model_state_dict, load it into a "
                "model that is not sharded, and save that one"
            )
        if value.is_meta:
            raise ValueError(
                f"save: {key} is on the meta device, which holds no values. Load or initialise the weights first, for example "
                "by pwlu.load_into"
            )
        same = value.device, value.data_ptr(), value.dtype, value.shape, value.stride()
        if value.numel() and first.setdefault(same, key) != key:
            tied[key] = first[same]
        else:
            tensors[key] = value.detach().clone(memory_format=torch.contiguous_format)
    metadata = {"format": "pt"}
    if conversion is not None:
        metadata["pwlu"] = json.dumps({**conversion, "tied": tied})
    elif tied:
        metadata["tied"] = json.dumps(tied)
    return safetensors.save(tensors, metadata)


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the state dict in a file that :func:`tensors_to_bytes` made, without its conversion."""
    state, metadata = read_file("read_tensors", path)
    return state | {key: state[other] for key, other in json.loads(metadata.get("tied", "{}")).items()}


def read_file(caller: str, path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file. Raise ValueError, on behalf of `caller`, if it is damaged."""
    require_safetensors(caller)
    from safetensors import SafetensorError, safe_open

    if os.path.isdir(path):
        raise IsADirectoryError(
            f"{caller}: {path} is a folder. Pass a file in it, such as {os.path.join(path, 'model.safetensors')}"
        )
    try:
        with safe_open(str(path), "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{caller}: {path} is not a safetensors file, or is damaged: {error}. Save it again") from error


@functools.cache
def require_safetensors(caller: str) -> Any:
    """Return ``safetensors.torch``; raise an error that names the extra if it is not installed."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"{caller} needs the package safetensors ({error}): {install('save')}") from error
    return safetensors.torch
