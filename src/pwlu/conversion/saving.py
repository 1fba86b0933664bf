"""Save a converted model, and load it into a model that was not converted: weights and conversion in one safetensors file.

The conversion is JSON in the file's metadata: every PWLU by name, and the rewritten calls. Nothing is pickled.
"""

import functools
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pwlu import checks, reference
from pwlu.conversion import rewrite
from pwlu.conversion.convert import check_unwrapped, insert_, inserted_modules
from pwlu.files import atomic_write
from pwlu.initial_functions import INITIAL_FUNCTIONS, InitialFunction, find_initial_function
from pwlu.module import PWLU, require_units, units_of, unwrapped
from pwlu.text import abbreviate, install
from pwlu.version import __version__

FORMAT = 1  # version of the conversion's format


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the weights of a model with PWLUs, and its conversion, to a safetensors file.

    :func:`load_into` reads the file. The weights keep their usual names, so other tools can read them too. Only PWLUs can be
    saved: call ``save`` before :func:`pwlu.fuse_` and :func:`pwlu.simplify_`, and call these after loading.

    Args:
        model: A model with PWLUs.
        path: The file to write. An existing file is replaced atomically.

    Raises:
        ValueError: If the model has no PWLU, or has fused units or other activations in their place.
        TypeError: If the state dict has entries that are not plain tensors, such as those of a sharded model.
        ImportError: If safetensors is not installed.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        >>> report = pwlu.convert_(model, torch.randn(2, 4))
        >>> pwlu.save(model, "model.safetensors")
        >>> fresh = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        >>> pwlu.load_into(fresh, "model.safetensors")
        ['1']
    """
    safetensors = _safetensors("save")
    model = unwrapped(model)
    conversion = conversion_of(model)
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    for key, value in model.state_dict().items():
        if not isinstance(value, Tensor) or type(value).__name__ == "DTensor":
            raise TypeError(
                f"save: {key} is a {type(value).__name__}, but a safetensors file holds plain tensors only. Gather a sharded "
                "model with torch.distributed.checkpoint.state_dict.get_model_state_dict, load it into a plain one, and save it"
            )
        same = value.data_ptr(), value.dtype, value.shape, value.stride()
        if value.numel() and first.setdefault(same, key) != key:
            tied[key] = first[same]
        else:
            tensors[key] = value.detach().clone(memory_format=torch.contiguous_format)
    written = json.dumps({**conversion, "tied": tied})
    with atomic_write(path) as partial:
        safetensors.save_file(tensors, str(partial), {"format": "pt", "pwlu": written})


def load_into(model: nn.Module, path: str | os.PathLike[str]) -> list[str]:
    """Convert a model like the one in a file, without a sample, and load its weights, in place.

    Args:
        model: A model of the same class, before or after its conversion.
        path: A file written by :func:`save`.

    Returns:
        The names of the PWLUs that were inserted.

    Raises:
        ValueError: If the file is damaged, was not written by :func:`save`, or does not fit the model. All names and shapes
            are checked first, so the model is unchanged.
        ImportError: If safetensors is not installed.

    Example:
        See :func:`save`.
    """
    _safetensors("load_into")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            written = (file.metadata() or {}).get("pwlu")
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            state = {key: file.get_tensor(key) for key in shapes} if written else {}
    except SafetensorError as error:
        raise ValueError(f"load_into: {path} is not a safetensors file, or is damaged: {error}") from error
    if written is None:
        raise ValueError(
            f"load_into: {path} has no record of a conversion, so pwlu.save did not write it. Convert the model as before, "
            "then call model.load_state_dict(safetensors.torch.load_file(path))"
        )
    units = _plan_units("load_into", model, conversion := _parse_conversion("load_into", written))
    for key, other in conversion.get("tied", {}).items():
        if other in state:  # else _check_shapes reports it
            state[key], shapes[key] = state[other], shapes[other]
    _check_shapes(model, {unit.name: unit.module for unit in units}, shapes)
    _insert(model, units)
    model.load_state_dict(state, assign=any(value.is_meta for value in model.state_dict().values()))
    return [unit.name for unit in units]


def conversion_of(model: nn.Module) -> dict[str, Any]:
    """Return the conversion of a model in JSON types. :func:`convert_as_` repeats it on another model."""
    units = require_units("save", model)
    others = [name for name, module in (inserted_modules(model) | units).items() if type(module) is not PWLU]
    if others:
        kinds = ", ".join(sorted({type(model.get_submodule(name)).__name__ for name in others}))
        raise ValueError(
            f"save: {abbreviate(others)} ({kinds}) is not a PWLU. Save before pwlu.fuse_ and pwlu.simplify_, and call these "
            "after loading. For other activations, save model.state_dict(), and convert with the same to= before loading it"
        )
    edits = {
        f"{name}.{edit.child}" if name else edit.child: edit
        for name, module in model.named_modules()
        for edit in getattr(type(module), "_pwlu_edits", ())
    }
    rows = [_describe_unit(name, unit, edits.get(name)) for name, unit in units.items() if name]
    return {"format": FORMAT, "version": __version__, "model": type(model).__name__, "units": rows}


def convert_as_(model: nn.Module, conversion: dict[str, Any]) -> list[str]:
    """Repeat a conversion, as :func:`conversion_of` returns it, on a model. Return the names of the inserted PWLUs."""
    units = _plan_units("convert_as_", model, conversion)
    _insert(model, units)
    return [unit.name for unit in units]


class _Unit(NamedTuple):
    name: str
    module: PWLU
    edit: rewrite.Edit | None


def _describe_unit(name: str, unit: PWLU, edit: rewrite.Edit | None) -> dict[str, Any]:
    start = find_initial_function(unit.init)
    if INITIAL_FUNCTIONS.get(start.name) == start:
        init: Any = start.name
    else:  # the user's own function: save its line segments
        rows = torch.cat(
            [block.reshape(unit.channels, -1) for block in reference.unpack(unit.initial_weight(), unit.intervals)], 1
        )
        rows = rows[:1] if bool((rows == rows[0]).all()) else rows
        init = {"name": start.name, "lines": rows.tolist()}
    return {
        "name": name,
        "channels": unit.channels,
        "intervals": unit.intervals,
        "bounds": list(unit.bounds),
        "init": init,
        "channel_dim": unit.channel_dim,
        "dtype": str(unit.weight.dtype).removeprefix("torch."),
        "edit": edit and list(edit),
    }


class _Lines:
    """An initial function given by its line segments: left, right, heights and slopes, per channel or for all channels."""

    def __init__(self, rows: list[list[float]]) -> None:
        table = torch.tensor(rows, dtype=torch.float64, device="cpu")
        self.blocks = table[:, 0], table[:, 1], table[:, 2:-2], table[:, -2], table[:, -1]

    def __call__(self, x: Tensor) -> Tensor:
        left, right, heights, left_slope, right_slope = (block.to(x.device) for block in self.blocks)
        return reference.forward(x, left, right, heights, left_slope, right_slope, channel_dim=0)


def _parse_conversion(caller: str, written: str) -> dict[str, Any]:
    try:
        conversion = json.loads(written)
        later, version = conversion["format"] > FORMAT, conversion["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{caller}: the conversion in the file is damaged: {error!r}") from error
    if later:
        raise ValueError(
            f"{caller}: the file was written by pwlu {version}, but this is the older pwlu {__version__}. Update pwlu"
        )
    return conversion


def _plan_units(caller: str, model: nn.Module, conversion: dict[str, Any]) -> list[_Unit]:
    """Return the units to insert. Raise ValueError, before anything is changed, if one does not fit."""
    check_unwrapped(caller, model)
    there = units_of(model)
    try:
        made = [_build_unit(row, model, row["name"] in there) for row in conversion["units"] if not _already_there(row, there)]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{caller}: the conversion in the file is damaged: {error!r}") from error
    for unit in made:
        owner, _, key = unit.name.rpartition(".")
        try:
            module = model.get_submodule(owner)
        except AttributeError:
            module = None
        if module is None or (unit.edit is None) != (key in module._modules):
            raise ValueError(
                f"{caller}: {type(model).__name__} has no place for {unit.name}. The file holds a {conversion.get('model')}: "
                "create the model as it was before its conversion"
            )
        if unit.edit is not None:
            edits = sorted(other.edit for other in made if other.edit and other.name.rpartition(".")[0] == owner)
            try:
                rewrite.rewritten_class(rewrite.original_class(type(module)), tuple(edits))
            except rewrite.CannotRewrite as error:
                raise ValueError(f"{caller}: {unit.name} cannot be inserted into {type(module).__name__}: {error}") from error
    return made


def _already_there(row: dict[str, Any], units: dict[str, PWLU]) -> bool:
    unit = units.get(row["name"])
    return unit is not None and _describe_unit(row["name"], unit, None) == {**row, "edit": None}


def _build_unit(row: dict[str, Any], model: nn.Module, again: bool) -> _Unit:
    tensor = next(model.parameters(), next(model.buffers(), None))
    dtype = getattr(torch, row["dtype"])
    if dtype not in checks.FLOATS:
        raise ValueError(f"a PWLU cannot have the dtype {dtype}")
    # Set the saved bounds afterwards: the constructor would fit them to the initial function again.
    device = None if tensor is None else tensor.device
    unit = PWLU(row["channels"], row["intervals"], init="identity", channel_dim=row["channel_dim"], device=device, dtype=dtype)
    left, right = row["bounds"]
    unit.bounds = float(left), float(right)
    init = row["init"]
    unit.init = (
        find_initial_function(init).name
        if isinstance(init, str)
        else InitialFunction(_Lines(init["lines"]), name=str(init["name"]))
    )
    unit.reset_parameters()
    edit = None if again else row["edit"]  # the call of a PWLU that is there was already rewritten
    if edit is not None:
        method, (line, column), child, of_tensor, digest = edit
        edit = rewrite.Edit(str(method), (int(line), int(column)), str(child), bool(of_tensor), str(digest))
        if not child.isidentifier() or row["name"].rpartition(".")[2] != child:
            raise ValueError(f"{child!r} is not the name of a child module")
    return _Unit(str(row["name"]), unit, edit)


def _insert(model: nn.Module, units: Sequence[_Unit]) -> None:
    insert_(model, {unit.name: (unit.module, unit.edit) for unit in units})


def _check_shapes(model: nn.Module, new: dict[str, PWLU], found: dict[str, tuple[int, ...]]) -> None:
    everywhere: dict[str, PWLU] = {}  # by all names: the owner of a new child may have several
    names = list(model.named_modules(remove_duplicate=False))
    for name, unit in new.items():
        owner, _, key = name.rpartition(".")
        owning = model.get_submodule(owner)
        everywhere |= {f"{alias}.{key}" if alias else key: unit for alias, module in names if module is owning}
    old = model.state_dict().items()
    parts = {key: value for key, value in old if not any(key.startswith(f"{name}.") for name in everywhere)}
    parts |= {f"{name}.{key}": value for name, unit in everywhere.items() for key, value in unit.state_dict().items()}
    expected = {key: tuple(value.shape) if isinstance(value, Tensor) else None for key, value in parts.items()}
    wrong = [f"{key} is missing" for key in expected if key not in found]
    wrong += [f"{key} is not in the model" for key in found if key not in expected]
    wrong += [
        f"{key} has the shape {found[key]}, not {expected[key]}"
        for key in expected
        if found.get(key, expected[key]) != expected[key]
    ]
    if wrong:
        raise ValueError(
            f"load_into: the file does not fit {type(model).__name__}: {abbreviate(wrong)}. Create the model as it was when "
            "it was saved"
        )


@functools.cache
def _safetensors(caller: str) -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"{caller} needs the package safetensors ({error}): {install('save')}") from error
    return safetensors.torch
