"""Export models to ONNX, and check the files in ONNX Runtime."""

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

from pwlu.common import checks, files
from pwlu.common.text import abbreviate, counted, install
from pwlu.conversion.sample_runs import could_not_run
from pwlu.deploy.fuse import FusedNonUniformPWLU, FusedPWLU, fuse_
from pwlu.deploy.onnx_check import Difference, Inputs, agreement, outputs
from pwlu.deploy.onnx_file import finish, write_units_alone
from pwlu.deploy.onnx_forms import FASTEST, FORMS, Form, set_form_
from pwlu.deploy.onnx_units import UnitsCheck, calls_of, check_units
from pwlu.units.module import require_model, units_of

_OLDEST_OPSET = 18  # torch's default opset; ONNX Runtime reads it since 1.14
_LARGEST_FILE = 2**31 - 2**24  # the limit of protobuf; the weights of larger models are in a second file

_ELEMENT_TYPES = {torch.float32: 1, torch.float16: 10, torch.float64: 11, torch.bfloat16: 16}  # the numbers of types in ONNX


@dataclass
class OnnxReport:
    """The report of :func:`export_onnx`: the file, and how it was checked in ONNX Runtime.

    Attributes:
        path: the file.
        size: its size in bytes.
        opset: version of the operators.
        form: how PWLUs are written.
        units: names of the PWLUs in the file.
        unreached: names of the PWLUs that are not in the file, because the sample does not reach them.
        operators: number of operators of each kind.
        any_batch: whether any batch size works.
        runtime: version of ONNX Runtime.
        difference: largest difference between the outputs of ONNX Runtime and PyTorch, on random inputs.
        share: ``difference`` divided by the largest number in that output.
        tolerance: the largest ``difference`` that rounding can explain. Every output was within its own tolerance.
        batches: batch sizes of the random inputs.
        unit_difference: largest difference of a single PWLU, on inputs chosen for every segment.
        unit_share: ``unit_difference`` divided by the largest number in that output.
        unit_tolerance: the largest ``unit_difference`` that rounding can explain.
        reached: fraction of all segments of all functions, including the outer ones, that these inputs cover.
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
        units = f"{counted(len(self.units), 'PWLU')} as {self.form}" if self.units else "no fused PWLUs"
        lines = [
            f"{self.path}: {self.size / 1e6:.2f} MB, opset {self.opset}, {batch}, {units}",
            "operators: " + ", ".join(f"{name} {count}" for name, count in self.operators.items()),
            f"ONNX Runtime {self.runtime} and PyTorch, on random batches of {', '.join(map(str, self.batches))}: "
            f"{Difference(self.difference, self.share, self.tolerance)}",
        ]
        if self.units:
            alone = Difference(self.unit_difference, self.unit_share, self.unit_tolerance)
            lines.append(f"each PWLU alone, on {100 * self.reached:.4g} % of all segments: {alone}")
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
    """Write a model as an ONNX file of standard operators, and check the file in ONNX Runtime.

    The model does not change, because a copy is fused and exported. If the check fails, no file is written. Weights may be
    float32 or float16. PWLUs compute in float32 in both cases.

    Args:
        model: a model with PWLUs, fused or not, in evaluation mode.
        sample: an input of the model: a tensor, a tuple of arguments, or a dictionary of keyword arguments. It determines the
            shapes and the spread of random inputs. Parts of the model that it does not reach are not in the file.
        path: the file to write.
        form: how PWLUs are written. ``"elements"``: two tables read by GatherElements, the fastest in ONNX Runtime.
            ``"gather"``: one long table, as torch exports it. ``"clips"``: a sum of N + 2 clipped lines, without an index.
            Default: ``"elements"``.
        opset: version of the operators, 18 or later. Default: 18.
        dynamic_batch: whether dimension 0 of the inputs may have any size. This applies to all inputs whose dimension 0 has the
            same size as that of the first. Default: True.
        tolerance: largest allowed difference, as a share of the largest output. Default: None, which derives it from the
            rounding errors of the model, in comparison with a copy in float64.
        metadata: names and strings to store in the file as ``metadata_props``.

    Returns:
        A report of the file and of how it was checked.

    Raises:
        ValueError: if an argument is wrong, the model has no PWLU, is in training mode, or is in bfloat16 or float64.
        RuntimeError: if the model does not run on the sample, cannot be exported, or fails the check.
        FileNotFoundError: if the folder does not exist.
        ImportError: if onnx, onnxscript or onnxruntime is not installed.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), pwlu.PWLU(8)).eval()
        >>> report = pwlu.export_onnx(model, torch.randn(2, 4), "model.onnx")
        >>> report.units
        ['1']
    """
    require_model("export_onnx", model)
    fused = (FusedPWLU, FusedNonUniformPWLU)
    if not units_of(model) and not any(isinstance(module, fused) for module in model.modules()):
        kinds = Counter(type(module).__name__ for module in model.modules() if not list(module.children()))
        raise ValueError(
            f"export_onnx: {type(model).__name__} has no PWLU, only {', '.join(f'{n} {kind}' for kind, n in kinds.items())}. "
            "Export it without pwlu: torch.onnx.export(model, args, path)"
        )
    return export(model, sample, Path(path), metadata or {}, form, opset, dynamic_batch, tolerance)


def export(
    model: nn.Module,
    sample: Any,
    target: Path,
    metadata: Mapping[str, str],
    form: str = FASTEST,
    opset: int = _OLDEST_OPSET,
    dynamic_batch: bool = True,
    tolerance: float | None = None,
) -> OnnxReport:
    """Do what :func:`export_onnx` does, also for a model without PWLUs."""
    opset = checks.check_integer("export_onnx", "opset", opset, "18 is the default", _OLDEST_OPSET)
    _check_arguments(model, target, form)
    onnx, runtime = _packages()
    inputs = Inputs.of(sample).map(lambda t: t.detach().cpu())
    plain = copy.deepcopy(model).to("cpu")
    inputs = _in_declared_order(plain, inputs)
    try:
        outputs(plain, inputs)
    except Exception as error:
        raise could_not_run("export_onnx: the model does not run on the sample", error) from error
    written = copy.deepcopy(plain)
    if units_of(written):
        fuse_(written)
    units = set_form_(written, form)
    with files.atomic_write(target) as file:
        _write(written, inputs, file, opset, dynamic_batch)
        alone = _check_units_alone(onnx, runtime, file, plain, units, inputs, dynamic_batch)
        operators = finish(onnx, file, opset, metadata)
        terms = max((units[name].terms for name in alone.units), default=2)
        found = agreement(plain, _runner(runtime, file, inputs), inputs, dynamic_batch, terms, tolerance)
        for each, what in ((alone, f"of the PWLU {alone.unit!r}, on inputs of every segment,"), (found, "of the model")):
            if not each.closest.allowed:
                allowed = "the tolerance allows" if each is found and tolerance is not None else "rounding explains"
                other = f" Try another form: form={' or '.join(repr(f) for f in FORMS if f != form)}." if units else ""
                raise RuntimeError(
                    f"export_onnx: the result {what} in ONNX Runtime differs from PyTorch's by {each.closest.difference:.3g}, "
                    f"but {allowed} only {each.closest.tolerance:.3g}. Nothing was written to {target}.{other}"
                )
        size = sum(finished.stat().st_size for finished in file.parent.iterdir())
    unreached = [name for name in units if name not in alone.units]
    checked = (runtime.__version__, *found.largest, found.batches, *alone.largest, alone.reached)
    return OnnxReport(target, size, opset, form, alone.units, unreached, operators, dynamic_batch, *checked)


def _check_arguments(model: nn.Module, target: Path, form: str) -> None:
    if form not in FORMS:
        raise ValueError(f"export_onnx: form must be one of {', '.join(map(repr, FORMS))}, not {form!r}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"export_onnx: the folder {target.parent} does not exist: create it first, or write to another")
    if target.is_dir():
        raise IsADirectoryError(f"export_onnx: {target} is a folder. Pass a file in it, such as {target / 'model.onnx'}")
    if training := [name for name, module in model.named_modules() if module.training]:
        raise ValueError(f"export_onnx: {abbreviate(training)} is in training mode. Call model.eval() first")
    types = {str(t.dtype).removeprefix("torch.") for t in model.parameters() if t.is_floating_point()}
    if wrong := types & {"bfloat16", "float64"}:
        raise ValueError(
            f"export_onnx: the model is in {wrong.pop()}, for which ONNX Runtime has no convolution on the CPU, so the file "
            "could not be checked. Export a copy in float32: "
            "pwlu.export_onnx(copy.deepcopy(model).float(), sample.float(), path)"
        )


def _packages() -> tuple[Any, Any]:
    """Return the modules onnx and onnxruntime. Check onnxscript too, which torch.onnx needs."""
    try:
        importlib.import_module("onnxscript")
        return importlib.import_module("onnx"), importlib.import_module("onnxruntime")
    except ImportError as error:
        raise ImportError(f"export_onnx needs onnx, onnxscript and onnxruntime ({error}): {install('onnx')}") from error


def _in_declared_order(model: nn.Module, inputs: Inputs) -> Inputs:
    """Sort keyword arguments by the model's signature, because the file has its inputs in that order."""
    declared = list(inspect.signature(model.forward).parameters)
    kwargs = sorted(inputs.kwargs, key=lambda name: declared.index(name) if name in declared else len(declared))
    return Inputs(inputs.args, {name: inputs.kwargs[name] for name in kwargs})


def _write(model: nn.Module, inputs: Inputs, file: Path, opset: int, dynamic_batch: bool) -> None:
    """Write the file that torch makes of a model."""
    if dynamic_batch and inputs.batch == 1:  # torch.export treats a size of 1 as a constant
        inputs = inputs.map(lambda t: torch.cat([t, t]) if inputs.batched(t) else t)
    weights = sum(t.nbytes for t in model.state_dict().values() if isinstance(t, Tensor))
    try:
        with warnings.catch_warnings():
            # Ignore expected warnings: if several inputs share one batch size, or arguments are not tensors, the name "batch"
            # is missing in the file. Torch 2.11 causes the third warning itself.
            warnings.filterwarnings("ignore", "# The axis name: batch will not be used", UserWarning)
            warnings.filterwarnings("ignore", "# ONNX model has different number of inputs", UserWarning)
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
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
        hint = "\nIf the model needs a fixed batch size, pass dynamic_batch=False." if dynamic_batch else ""
        raise RuntimeError(f"export_onnx: torch.onnx.export failed: {type(error).__name__}: {error}{hint}") from error
    assert program is not None
    program.save(file, external_data=weights > _LARGEST_FILE)


def _check_units_alone(
    onnx: Any, runtime: Any, file: Path, model: nn.Module, forms: dict[str, Form], sample: Inputs, dynamic_batch: bool
) -> UnitsCheck:
    """Compare every PWLU of the file separately with that of the model, except dynamic and non-uniform PWLUs."""
    if not forms:
        nothing = Difference(0.0, 0.0, 0.0)
        return UnitsCheck(nothing, "", nothing, [], 0.0)
    inputs = sample.random(sample.large_batch if dynamic_batch else None, 1.0, torch.Generator().manual_seed(0))
    calls = calls_of(model, inputs)
    if not calls:
        raise ValueError(
            f"export_onnx: the sample reaches none of the model's PWLUs, such as {next(iter(forms))!r}. Pass a sample that does"
        )
    alone = file.with_name("units.onnx")
    names = write_units_alone(onnx, file, alone, [_ELEMENT_TYPES[call.x.dtype] for call in calls])
    if names != [call.unit for call in calls]:
        raise RuntimeError(f"export_onnx: the file calls the PWLUs {names}, but PyTorch calls {[call.unit for call in calls]}")
    run = _runner(runtime, alone, inputs.with_tensors([call.x for call in calls]))
    alone.unlink()
    return check_units(model, forms, calls, lambda given: run(inputs.with_tensors(given)))


def start_session(runtime: Any, file: Path, threads: int = 0) -> Any:
    """Open a file in ONNX Runtime. `threads`: CPU threads; 0 lets ONNX Runtime choose."""
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors only
    options.intra_op_num_threads = threads
    return runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def _runner(runtime: Any, file: Path, inputs: Inputs) -> Callable[[Inputs], list[Tensor]]:
    """Return a function that runs the file in ONNX Runtime."""

    def run(drawn: Inputs) -> list[Tensor]:
        given = {each.name: tensor.numpy() for each, tensor in zip(session.get_inputs(), drawn.tensors, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, given)]

    try:
        session = start_session(runtime, file)
        run(inputs)
    except Exception as error:
        raise RuntimeError(f"export_onnx: ONNX Runtime cannot run the model: {type(error).__name__}: {error}") from error
    return run
