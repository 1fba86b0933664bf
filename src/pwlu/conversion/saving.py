"""Save a converted model, and load it into an unconverted model. One safetensors file holds the weights and the conversion.

The conversion is JSON in the file's metadata: every PWLU by name, and the calls that were rewritten. No pickle is used.
"""

import json
import os
from typing import Any

import torch
from torch import Tensor, nn

from pwlu import reference
from pwlu.common import checks, files
from pwlu.common.text import abbreviate
from pwlu.conversion import rewrite
from pwlu.conversion.convert import check_unwrapped
from pwlu.conversion.replacing import insert_, inserted_modules
from pwlu.conversion.safetensors_file import read_file, tensors_to_bytes
from pwlu.conversion.tracing import full_name, registrations, stateless_leaf
from pwlu.initial_functions import INITIAL_FUNCTIONS, InitialFunction, find_initial_function
from pwlu.learning.constraining import check_constraint
from pwlu.units.constraints import Constraint, keep_constrained
from pwlu.units.dynamic import DynamicPWLU
from pwlu.units.module import PWLU, require_model, require_units, unwrapped
from pwlu.units.nonuniform import NonUniformPWLU
from pwlu.version import __version__, later_version

FORMAT = 3  # the format of the conversion. 2 added dynamic PWLUs, 3 non-uniform ones; save writes the lowest possible format


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the weights of a model with PWLUs, and how it was converted, to a safetensors file.

    :func:`load_into` reads the file. The weights have their usual names, so other tools can read them as well. The metadata
    holds the format, and the version of pwlu that wrote the file. An older version rejects a format that it does not know.

    Args:
        model: a model that :func:`pwlu.convert_` converted to PWLUs, or that contains PWLUs of your own. Save it before you
            call :func:`pwlu.fuse_` or :func:`pwlu.simplify_`. Call these after loading.
        path: the file. An existing file is replaced once the new one is complete.

    Raises:
        ValueError: if the model has no PWLU, or if :func:`pwlu.convert_` inserted activations other than PWLUs.
        TypeError: if ``model`` is not a module, or the state dict holds anything but plain tensors, as that of a sharded model
            does.
        ImportError: if safetensors is not installed.

    Example::

        pwlu.convert_(model, sample)
        ...  # train
        pwlu.save(model, "model.safetensors")
    """
    require_model("save", model)
    files.write(path, serialise(model))


def serialise(model: nn.Module) -> bytes:
    """Return the contents of the file that :func:`save` writes."""
    model = unwrapped(model)
    return tensors_to_bytes(model.state_dict(), conversion_of(model))


def load_into(model: nn.Module, path: str | os.PathLike[str]) -> list[str]:
    """Convert a model in the same way as the saved model, and load the weights from the file.

    No sample is needed. Names and shapes are checked before the model changes. Weights that the model shares between modules
    stay shared, and the new PWLUs share the weights that they shared when they were saved.

    Args:
        model: the unconverted model, or the converted model. It may be on the meta device.
        path: a file that :func:`save` wrote.

    Returns:
        The names of the PWLUs that were inserted.

    Raises:
        ValueError: if the file was not written by :func:`save`, was written in a later format, is damaged, or does not fit
            the model.
        TypeError: if ``model`` is not a module.
        ImportError: if safetensors is not installed.

    Example::

        model = torchvision.models.resnet18()
        pwlu.load_into(model, "model.safetensors")
    """
    require_model("load_into", model)
    state, metadata = read_file("load_into", path)
    written = metadata.get("pwlu")
    if written is None:
        raise ValueError(
            f"load_into: {path} does not say how its model was converted, so pwlu.save did not write it. Convert the model in "
            "the same way as before, then write model.load_state_dict(safetensors.torch.load_file(path))"
        )
    conversion = _checked("load_into", written)
    units = _units("load_into", model, conversion)
    tied = {key: other for key, other in conversion.get("tied", {}).items() if other in state}
    state |= {key: state[other] for key, other in tied.items()}
    _check_shapes(model, units, {key: tuple(value.shape) for key, value in state.items()})
    insert_(model, units)
    _tie(model, units, tied)
    _materialise(model, state)
    model.load_state_dict(state)
    return list(units)


def conversion_of(model: nn.Module) -> dict[str, Any]:
    """Return the conversion of a model as a dictionary for JSON. :func:`convert_as_` repeats it on another model."""
    units = require_units("save", model)
    others = [name for name, module in (inserted_modules(model) | units).items() if type(module) not in _KINDS]
    if others:
        kinds = ", ".join(sorted({type(model.get_submodule(name)).__name__ for name in others}))
        raise ValueError(
            f"save: all replaced activations must be PWLUs, but {abbreviate(others)} is not ({kinds}). Save before "
            "pwlu.fuse_ and pwlu.simplify_, and call these after loading. For other activations, save model.state_dict(), "
            "and convert with the same to= before loading it"
        )
    edits = {
        full_name(name, edit.child): edit
        for name, module in model.named_modules()
        for edit in getattr(type(module), "_pwlu_edits", ())
    }
    rows = [_describe_unit(name, *place, edits.get(name)) for name, place in _places(model).items()]
    number = max(3 if "nonuniform" in row else 2 if "dynamic" in row else 1 for row in rows) if rows else 1
    return {"format": number, "version": __version__, "model": type(model).__name__, "units": rows}


def convert_as_(model: nn.Module, conversion: dict[str, Any]) -> list[str]:
    """Repeat the conversion of another model. Return the names of the inserted PWLUs.

    Args:
        model: the model to convert.
        conversion: the result of :func:`conversion_of` for the other model.
    """
    units = _units("convert_as_", model, _checked("convert_as_", conversion))
    insert_(model, units)
    return list(units)


_Units = dict[str, tuple[PWLU, rewrite.Edit | None]]  # by name, with the calls to rewrite
_KINDS = (PWLU, DynamicPWLU, NonUniformPWLU)
_AGAIN = "Save the model again with pwlu.save"
_DYNAMIC = ("directions", "reduction", "mixing", "features")


def _places(model: nn.Module) -> dict[str, tuple[PWLU, str]]:
    """Return the PWLU at every place of a model, in model order, and the name of the first place that has the same one."""
    there, first = registrations(model), dict[nn.Module, str]()
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name in there]
    units = {name: unit for name in names if isinstance(unit := there[name][2], PWLU)}
    return {name: (unit, first.setdefault(unit, name)) for name, unit in units.items()}


def _describe_unit(name: str, unit: PWLU, first: str, edit: rewrite.Edit | None) -> dict[str, Any]:
    start = find_initial_function(unit.init)
    if INITIAL_FUNCTIONS.get(start.name) == start:
        init: Any = start.name
    else:  # a user's function, or one that differs between channels: store the parameters of its PWLU
        rows = torch.cat([block.reshape(unit.channels, -1) for block in unit.initial_blocks()], 1)
        rows = rows[:1] if bool((rows == rows[0]).all()) else rows
        init = {"name": start.name, "lines": rows.tolist()}
    extras: dict[str, Any] = {}
    if isinstance(unit, DynamicPWLU):
        extras["dynamic"] = {name: getattr(unit, name) for name in _DYNAMIC}
    if isinstance(unit, NonUniformPWLU):
        extras["nonuniform"] = True
    if unit.constraint is not None:
        extras["constraint"] = json.loads(json.dumps(unit.constraint._asdict()))
    if first != name:  # it is the unit of an earlier row
        extras["same"] = first
    return {
        "name": name,
        "channels": unit.channels,
        "intervals": unit.intervals,
        "bounds": list(unit.bounds),
        "init": init,
        "channel_dim": unit.channel_dim,
        "dtype": str(unit.weight.dtype).removeprefix("torch."),
        "edit": edit and list(edit),
    } | extras


class _Lines:
    """An initial function that is stored as the parameters of a PWLU, per channel or for all channels."""

    def __init__(self, rows: list[list[float]]) -> None:
        table = torch.tensor(rows, dtype=torch.float64, device="cpu")
        self.blocks = table[:, 0], table[:, 1], table[:, 2:-2], table[:, -2], table[:, -1]

    def __call__(self, x: Tensor) -> Tensor:
        repeats = len(x) // len(self.blocks[0]) if len(self.blocks[0]) > 1 else 1  # x may hold the inputs of several units
        blocks = reference.Blocks(*(block.to(x.device).repeat(repeats, *[1] * (block.ndim - 1)) for block in self.blocks))
        return reference.forward(x, *blocks, channel_dim=0)


def _checked(caller: str, conversion: Any) -> dict[str, Any]:
    """Return a conversion, which may be JSON. Raise ValueError if a later version wrote it in a format that is unknown here."""
    try:
        conversion = json.loads(conversion) if isinstance(conversion, str) else conversion
        number, version = int(conversion["format"]), conversion["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{caller}: the conversion in the file is damaged: {error!r}. {_AGAIN}") from error
    if number > FORMAT:
        raise ValueError(later_version(f"{caller}: the file", version, (number, FORMAT)))
    return conversion


def _units(caller: str, model: nn.Module, conversion: dict[str, Any]) -> _Units:
    """Return the PWLUs to insert into the model. Raise ValueError, before anything is changed, if they do not fit."""
    check_unwrapped(caller, model)
    there = _places(model)
    made: _Units = {}
    try:
        for row in conversion["units"]:
            if not _has_unit(row, there):
                same = row.get("same")
                unit = _make_unit(row, model) if same is None else (made.get(same) or there[same])[0]
                # If there is a PWLU, its call was rewritten before.
                made[str(row["name"])] = unit, None if row["name"] in there else _read_edit(row)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{caller}: the conversion in the file is damaged: {error!r}. {_AGAIN}") from error
    for name, (_, edit) in made.items():
        owner, _, key = name.rpartition(".")
        try:
            module = model.get_submodule(owner)
        except AttributeError:
            module = None
        if module is None or (edit is None) != (key in module._modules):
            raise ValueError(
                f"{caller}: {type(model).__name__} has no place for {name}. The file holds a {conversion.get('model')}: "
                "create the model as it was before its conversion"
            )
        if edit is not None:
            edits = sorted(other for place, (_, other) in made.items() if other and place.rpartition(".")[0] == owner)
            try:
                rewrite.rewritten_class(rewrite.original_class(type(module)), tuple(edits))
            except rewrite.CannotRewrite as error:
                raise ValueError(f"{caller}: {name} cannot be put into {type(module).__name__}: {error}") from error
    return made


def _has_unit(row: dict[str, Any], there: dict[str, tuple[PWLU, str]]) -> bool:
    name = row["name"]
    return name in there and _describe_unit(name, *there[name], None) == {**row, "edit": None}


def _make_unit(row: dict[str, Any], model: nn.Module) -> PWLU:
    tensor = next(model.parameters(), next(model.buffers(), None))
    dtype = getattr(torch, row["dtype"])
    if dtype not in checks.FLOATS:
        raise ValueError(f"a PWLU cannot have the dtype {dtype}")
    # Set the bounds after construction, because the constructor would fit them to the initial function again.
    device = None if tensor is None else tensor.device
    options: dict[str, Any] = {"channel_dim": row["channel_dim"], "device": device, "dtype": dtype}
    options |= {name: row["dynamic"][name] for name in _DYNAMIC} if "dynamic" in row else {}
    kind = DynamicPWLU if "dynamic" in row else NonUniformPWLU if "nonuniform" in row else PWLU
    unit = kind(row["channels"], row["intervals"], init="identity", **options)
    left, right = row["bounds"]
    unit.bounds = float(left), float(right)
    init = row["init"]
    unit.init = (
        find_initial_function(init).name
        if isinstance(init, str)
        else InitialFunction(_Lines(init["lines"]), name=str(init["name"]), channels=len(init["lines"]))
    )
    if (constraint := row.get("constraint")) is not None:
        unit.constraint = check_constraint(Constraint(**constraint))
        keep_constrained(unit)
    unit.reset_parameters()
    return unit


def _read_edit(row: dict[str, Any]) -> rewrite.Edit | None:
    if row["edit"] is None:
        return None
    method, (line, column), child, on_tensor, digest = row["edit"]
    expected = row["name"].rpartition(".")[2]
    if not child.isidentifier() or child != expected:
        raise ValueError(f"the edit of {row['name']!r} must name the child {expected!r}, not {child!r}")
    return rewrite.Edit(str(method), (int(line), int(column)), str(child), bool(on_tensor), str(digest))


def _tie(model: nn.Module, units: _Units, tied: dict[str, str]) -> None:
    """Give the new PWLUs the parameters that they shared, with each other or with other modules, when they were saved."""
    new = {module for unit, _ in units.values() for module in unit.modules()}
    groups: dict[str, list[str]] = {}
    for key, first in tied.items():
        groups.setdefault(first, [first]).append(key)
    for keys in groups.values():
        places = [(model.get_submodule(owner), name) for owner, _, name in (key.rpartition(".") for key in keys)]
        places = sorted((place for place in places if place[1] in place[0]._parameters), key=lambda place: place[0] in new)
        for owner, name in places[1:]:
            if owner in new:  # the model itself decides what its other modules share
                setattr(owner, name, getattr(*places[0]))


def _materialise(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Replace each tensor on the meta device by that of the file, once, because load_state_dict would separate shared ones."""
    own = model.state_dict(keep_vars=True)
    made = {
        id(old): nn.Parameter(state[key], old.requires_grad) if isinstance(old, nn.Parameter) else state[key]
        for key, old in own.items()
        if old.is_meta
    }
    if made:
        model.load_state_dict({key: made.get(id(old), old) for key, old in own.items()}, assign=True)


def _check_shapes(model: nn.Module, units: _Units, found: dict[str, tuple[int, ...]]) -> None:
    """Raise ValueError if the file does not have the tensors that the converted model needs.

    This does not copy the model, which may hold what cannot be copied, such as a lock.
    """
    everywhere: dict[str, PWLU] = {}  # the new PWLUs by all of their names, because a shared parent has several
    names = list(model.named_modules(remove_duplicate=False))
    for name, (unit, _) in units.items():
        path, _, key = name.rpartition(".")
        owner = model.get_submodule(path)
        # A stateless parent gets a copy for each of its names: see insert_.
        paths = [path] if stateless_leaf(owner) else [alias for alias, module in names if module is owner]
        everywhere |= {full_name(alias, key): unit for alias in paths}
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
            f"load_into: the file does not fit {type(model).__name__}: {abbreviate(wrong)}. Create the model as it was when it "
            "was saved"
        )
