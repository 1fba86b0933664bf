"""Write files that run without pwlu. Each file is loaded and compared with the network before it replaces the target."""

import copy
import importlib
import io
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils._pytree import tree_leaves

from pwlu.common import files
from pwlu.deploy.fuse import fuse_
from pwlu.deploy.onnx_check import Inputs, agreement
from pwlu.deploy.onnx_export import export, start_session
from pwlu.units.module import units_of

METADATA = "metadata.json"  # extra file in a .pt2
_TORCH_2_11_WARNINGS = r"`isinstance\(treespec, LeafSpec\)`|The given buffer is not writable"  # caused by torch itself


def write_onnx(network: nn.Module, sample: Tensor, path: Path, metadata: Mapping[str, str], **options: Any) -> str:
    """Write a network in evaluation mode with standard ONNX operators, and return a description of the file.

    The file takes any batch size. Batch norms are folded into convolutions. The sample must have a batch of at least 2. The
    arguments are those of :func:`pwlu.export_onnx`, but the network need not have PWLUs.
    """
    report = export(network, sample, path, metadata, **options)
    model = importlib.import_module("onnx").load(path, load_external_data=False)
    sides = ((side, ", ".join(value.name for value in getattr(model.graph, side))) for side in ("input", "output"))
    return "\n".join([str(report), ", ".join(f"{side} {names}" for side, names in sides)])


def session(file: Path, threads: int = 0) -> Callable[[Tensor], list[Any]]:
    """Return a function that runs an ONNX file with one input. `threads`: CPU threads; 0 lets ONNX Runtime choose."""
    loaded = start_session(importlib.import_module("onnxruntime"), file, threads)
    name = loaded.get_inputs()[0].name
    return lambda x: loaded.run(None, {name: x.numpy()})


def write_pt2(network: nn.Module, sample: Tensor, path: Path, metadata: Mapping[str, str]) -> str:
    """Write a file for ``torch.export.load`` with aten operators only, and return a description of it.

    The file takes any batch size. Batch norms are folded into convolutions. The arguments are those of :func:`write_onnx`. The
    metadata is JSON in the extra file ``metadata.json``.
    """
    written = copy.deepcopy(network)
    if units_of(written):
        fuse_(written)
    content = io.BytesIO()  # not a path: torch aborts the process if it writes to a full disk
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", _TORCH_2_11_WARNINGS)
        folded = fold_batch_norm_(written, sample)
        batch = torch.export.Dim("batch", min=1)
        program = torch.export.export(written, (sample,), dynamic_shapes=({0: batch},))
        torch.export.save(program, content, extra_files={METADATA: json.dumps(dict(metadata), indent=1)})
        content.seek(0)
        checked = _compared(network, torch.export.load(content).module(), sample)
    files.write(path, content.getvalue())
    size = len(content.getvalue())
    return f"{path}: {size / 1e6:.2f} MB, any batch size, {folded} batch norms folded\ntorch.export and PyTorch, {checked}"


def fold_batch_norm_(model: nn.Module, sample: Tensor) -> int:
    """Fold every batch norm into the convolution before it, in place; return how many were folded.

    A batch norm is folded only if it alone uses the output of the convolution. The graph of torch.export shows that.
    """
    program = torch.export.export(model, (sample,))
    parameters = program.graph_signature.inputs_to_parameters
    folded = 0
    for norm in program.graph.nodes:
        if norm.target != torch.ops.aten.batch_norm.default or norm.args[0].target != torch.ops.aten.conv2d.default:
            continue
        convolution = norm.args[0]
        weights = (convolution.args[1], norm.args[1])  # each must be used once: a layer may run on several maps
        if len(convolution.users) > 1 or any(weight is None or len(weight.users) > 1 for weight in weights):
            continue
        names = [parameters[weight.name].rpartition(".")[0] for weight in weights]
        layers: list[Any] = [model.get_submodule(name) for name in names]
        model.set_submodule(names[0], fuse_conv_bn_eval(*layers))
        model.set_submodule(names[1], nn.Identity())
        folded += 1
    return folded


def _compared(network: nn.Module, run: Callable[[Tensor], Any], sample: Tensor) -> str:
    """Run both on random batches of several sizes; raise an error if rounding does not explain the difference."""
    inputs = Inputs.of(sample)
    found = agreement(network, lambda drawn: tree_leaves(run(*drawn.tensors)), inputs, any_batch=True, terms=2, tolerance=None)
    if not found.closest.allowed:
        raise RuntimeError(
            f"the exported network differs from the original by {found.closest.difference:.3g}, but rounding explains only "
            f"{found.closest.tolerance:.3g}. Nothing was written"
        )
    return f"on random batches of {', '.join(map(str, found.batches))}: {found.largest}"
