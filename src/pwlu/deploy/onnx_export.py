"""Export to ONNX, checked at once in ONNX Runtime."""

import copy
import importlib
import inspect
import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pwlu import files
from pwlu.deploy.fuse import FusedPWLU, fuse_
from pwlu.deploy.onnx_check import Inputs, Largest, agreement, outputs
from pwlu.deploy.onnx_file import finish, units_alone
from pwlu.deploy.onnx_forms import FASTEST, FORMS, Form, write_as_
from pwlu.deploy.onnx_units import UnitsChecked, calls_of, check_units
from pwlu.module import require_model, units_of
from pwlu.text import counted, install

_OLDEST_OPSET = 18  # what torch writes by itself; ONNX Runtime reads it since 1.14
_LARGEST_FILE = 2**31 - 2**24  # of protobuf; larger models keep their weights in a second file

_ELEMENT_TYPES = {torch.float32: 1, torch.float16: 10, torch.float64: 11, torch.bfloat16: 16}  # as ONNX numbers them


@dataclass
class OnnxReport:
    """What was written and how it was checked in ONNX Runtime.

    ``size`` in bytes; ``units``: the PWLUs in the file; ``unreached``: those that are not, since the sample does not reach
    them; ``operators``: how many of each; ``difference``: the largest between the model's outputs and PyTorch's, on random
    inputs in ``batches`` of these sizes; ``share``: the same as a share of the largest number in that output; ``tolerance``:
    what rounding can explain of it (every output was within its own). ``unit_difference``, ``unit_share`` and
    ``unit_tolerance``: likewise of the units, fed by hand with numbers from the share ``reached`` of all segments of all
    functions, tails included.
    """

    path: Path
    size: int
    opset: int
    form: str
    units: list[str]
    unreached: list[str]
    operators: dict[str, int]
    any_batch: bool
    runtime: str
    difference: float
    share: float
    tolerance: float
    batches: tuple[int, ...]
    unit_difference: float
    unit_share: float
    unit_tolerance: float
    reached: float

    def __str__(self) -> str:
        batch = "any batch size" if self.any_batch else f"batches of {self.batches[0]}"
        units = f"{counted(len(self.units), 'PWLU')} as {self.form}"
        lines = [
            f"{self.path}: {self.size / 1e6:.2f} MB, opset {self.opset}, {batch}, {units}",
            "operators: " + ", ".join(f"{name} {count}" for name, count in self.operators.items()),
            f"ONNX Runtime {self.runtime} and PyTorch, on random batches of {', '.join(map(str, self.batches))}: "
            f"{Largest(self.difference, self.share, self.tolerance)}",
            f"each PWLU alone, on {100 * self.reached:.4g} % of all segments: "
            f"{Largest(self.unit_difference, self.unit_share, self.unit_tolerance)}",
        ]
        if self.unreached:
            lines.append(f"not reached by the sample, so not in the file: {', '.join(self.unreached)}")
        return "\n".join(lines)


def export_onnx(
    model: nn.Module,
    sample: Any,
    path: str | os.PathLike[str],
    *,
    form: str = FASTEST,
    opset: int = _OLDEST_OPSET,
    dynamic_batch: bool = True,
    tolerance: float | None = None,
    metadata: Mapping[str, str] | None = None,
) -> OnnxReport:
    """Write the model as an ONNX file of standard operators, and run it in ONNX Runtime to see that it computes the same.

    The model itself is not changed: what is not fused is fused on a copy. Where the check fails, that is an error and nothing
    is written. Weights of float32 or float16; PWLUs compute in float32 in either case.

    Args:
        model: with PWLUs, fused or not, in evaluation mode.
        sample: what the model is called with: a tensor, a tuple of arguments or a dictionary of keyword arguments. It shows
            shapes, and the spread that inputs have. What it does not reach of the model is not in the file.
        path: of the file.
        form: how a PWLU is written: ``"elements"``, two tables read by GatherElements, the fastest in ONNX Runtime;
            ``"gather"``, one long table, as torch exports it; ``"clips"``, a sum of N + 2 clipped lines, without any index.
        opset: version of the operators, 18 or later.
        dynamic_batch: whether dimension 0 of the inputs may have any size; those that share the first one's size share it then.
        tolerance: the largest difference that passes, as a share of the largest output. By default it is derived from what
            rounding does to the model, whose results are compared with those of a copy in float64.
        metadata: names and texts that the file carries, its ``metadata_props``.

    Example::

        report = pwlu.export_onnx(model.eval(), torch.randn(1, 3, 224, 224), "model.onnx")
        print(report)
    """
    require_model("export_onnx", model)
    target = _checked(model, path, form, opset)
    onnx, runtime = _packages()
    inputs = Inputs.of(sample).map(lambda t: t.detach().cpu())
    plain = copy.deepcopy(model).to("cpu")
    inputs = _in_order(plain, inputs)
    try:
        outputs(plain, inputs)
    except Exception as error:
        raise RuntimeError(
            f"export_onnx: the model does not run on the sample: {type(error).__name__}: {error}\nThe sample is what the model "
            "is called with: a tensor, a tuple of arguments, or a dictionary of keyword arguments."
        ) from error
    written = copy.deepcopy(plain)
    if units_of(written):
        fuse_(written)
    units = write_as_(written, form)
    with files.atomic_write(target) as file:
        _write(written, inputs, file, opset, dynamic_batch)
        alone = _units(onnx, runtime, file, plain, units, inputs, dynamic_batch)
        operators = finish(onnx, file, opset, metadata or {})
        terms = max(units[name].terms for name in alone.units)
        found = agreement(plain, _runner(runtime, file, inputs), inputs, dynamic_batch, terms, tolerance)
        for each, what in ((alone, f"of the PWLU {alone.unit!r}, on inputs of every segment"), (found, "of the model")):
            if not each.difference <= each.tolerance:
                explained = "the tolerance allows" if each is found and tolerance is not None else "rounding explains"
                raise RuntimeError(
                    f"export_onnx: what ONNX Runtime makes {what}, differs from PyTorch's result by {each.difference:.3g}, and "
                    f"{explained} {each.tolerance:.3g}. Nothing was written to {target}. Another form may do: "
                    f"form={' or '.join(repr(f) for f in FORMS if f != form)}."
                )
        size = sum(finished.stat().st_size for finished in file.parent.iterdir())
    return OnnxReport(
        target,
        size,
        opset,
        form,
        alone.units,
        [name for name in units if name not in alone.units],
        operators,
        dynamic_batch,
        runtime.__version__,
        *found.largest,
        found.batches,
        *alone.largest,
        alone.reached,
    )


def _checked(model: nn.Module, path: str | os.PathLike[str], form: str, opset: int) -> Path:
    if form not in FORMS:
        raise ValueError(f"export_onnx: form must be one of {', '.join(map(repr, FORMS))}, not {form!r}")
    if isinstance(opset, bool) or not isinstance(opset, int) or opset < _OLDEST_OPSET:
        raise ValueError(f"export_onnx: opset must be a whole number of at least {_OLDEST_OPSET}, not {opset!r}")
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"export_onnx: there is no folder {target.parent}: make it first, or write to another")
    if target.is_dir():
        raise IsADirectoryError(f"export_onnx: {target} is a folder. Name a file in it, such as {target / 'model.onnx'}")
    if not units_of(model) and not any(isinstance(module, FusedPWLU) for module in model.modules()):
        kinds = Counter(type(module).__name__ for module in model.modules() if not list(module.children()))
        raise ValueError(
            f"export_onnx: {type(model).__name__} has no PWLU, only {', '.join(f'{n} {kind}' for kind, n in kinds.items())}. "
            "Such a model needs nothing of pwlu: torch.onnx.export(model, args, path)"
        )
    if training := [name for name, module in model.named_modules() if module.training]:
        some = ", ".join(name or "the model" for name in training[:3]) + (", ..." if len(training) > 3 else "")
        raise ValueError(f"export_onnx: {some} is in training mode. Call model.eval() first")
    types = {str(t.dtype).removeprefix("torch.") for t in model.parameters() if t.is_floating_point()}
    if wrong := types & {"bfloat16", "float64"}:
        raise ValueError(
            f"export_onnx: the model is in {wrong.pop()}, in which ONNX Runtime has no convolution on the CPU, so that "
            "nothing could be checked. Export a copy in another type: "
            "pwlu.export_onnx(copy.deepcopy(model).float(), sample.float(), path)"
        )
    return target


def _packages() -> tuple[Any, Any]:
    """onnx and onnxruntime; torch.onnx itself needs onnxscript."""
    try:
        importlib.import_module("onnxscript")
        return importlib.import_module("onnx"), importlib.import_module("onnxruntime")
    except ImportError as error:
        raise ImportError(f"export_onnx needs onnx, onnxscript and onnxruntime ({error}): {install('onnx')}") from error


def _in_order(model: nn.Module, inputs: Inputs) -> Inputs:
    """Keyword arguments in the order in which the model declares them: that is the order of the file's inputs."""
    declared = list(inspect.signature(model.forward).parameters)
    kwargs = sorted(inputs.kwargs, key=lambda name: declared.index(name) if name in declared else len(declared))
    return Inputs(inputs.args, {name: inputs.kwargs[name] for name in kwargs})


def _write(model: nn.Module, inputs: Inputs, file: Path, opset: int, dynamic_batch: bool) -> None:
    if dynamic_batch and inputs.batch == 1:  # torch.export takes a size of 1 for a constant
        inputs = inputs.map(lambda t: torch.cat([t, t]) if inputs.batched(t) else t)
    weights = sum(t.nbytes for t in model.state_dict().values() if isinstance(t, Tensor))
    try:
        with warnings.catch_warnings():
            # that the sizes of several inputs are one and the same, as they should be; and that, where an argument is no
            # tensor, the size is not named "batch" in the file
            warnings.filterwarnings("ignore", "# The axis name: batch will not be used", UserWarning)
            warnings.filterwarnings("ignore", "# ONNX model has different number of inputs", UserWarning)
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)  # torch 2.11's own
            program = torch.onnx.export(
                model,
                inputs.args,
                kwargs=inputs.kwargs,
                opset_version=opset,
                dynamo=True,
                dynamic_shapes=inputs.shapes() if dynamic_batch else None,
                verbose=False,
            )
    except Exception as error:
        hint = "\nA model that cannot take batches of any size is exported with dynamic_batch=False." if dynamic_batch else ""
        raise RuntimeError(f"export_onnx: torch.onnx.export failed: {type(error).__name__}: {error}{hint}") from error
    assert program is not None
    program.save(file, external_data=weights > _LARGEST_FILE)


def _units(
    onnx: Any, runtime: Any, file: Path, model: nn.Module, forms: dict[str, Form], sample: Inputs, dynamic_batch: bool
) -> UnitsChecked:
    """Run the PWLUs of the file alone, beside those of the model."""
    inputs = sample.drawn(sample.large_batch if dynamic_batch else None, 1.0, torch.Generator().manual_seed(0))
    calls = calls_of(model, inputs)
    if not calls:
        raise ValueError(
            f"export_onnx: the sample reaches none of the model's PWLUs, such as {next(iter(forms))!r}. Give one that does"
        )
    alone = file.with_name("units.onnx")
    names = units_alone(onnx, file, alone, [_ELEMENT_TYPES[call.x.dtype] for call in calls])
    if names != [call.unit for call in calls]:
        raise RuntimeError(f"export_onnx: the file calls the PWLUs {names}, PyTorch {[call.unit for call in calls]}")
    run = _runner(runtime, alone, inputs.plus([call.x for call in calls]))
    alone.unlink()
    return check_units(model, forms, calls, lambda given: run(inputs.plus(given)))


def _runner(runtime: Any, file: Path, inputs: Inputs) -> Callable[[Inputs], list[Tensor]]:
    """The file as a function of its inputs."""
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors alone

    def run(drawn: Inputs) -> list[Tensor]:
        given = {each.name: tensor.numpy() for each, tensor in zip(session.get_inputs(), drawn.tensors, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, given)]

    try:
        session = runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        run(inputs)
    except Exception as error:
        raise RuntimeError(f"export_onnx: ONNX Runtime cannot run the model: {type(error).__name__}: {error}") from error
    return run
