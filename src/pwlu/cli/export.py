"""``pwlu export``: write the network of a run as a file that runs without pwlu."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from pwlu.cli import add_number
from pwlu.common.text import abbreviate
from pwlu.deploy.onnx_forms import FASTEST, FORMS
from pwlu.deploy.simplify import simplify_
from pwlu.lab.recipes.settings import UserError, needs_packages
from pwlu.lab.runs.run_folder import RunFolder
from pwlu.units.module import units_of
from pwlu.version import __version__

if TYPE_CHECKING:
    from pwlu.lab.inference.trained_network import TrainedNetwork

SUFFIXES = {".onnx": "standard ONNX operators, for ONNX Runtime and others", ".pt2": "for torch.export.load"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run, the file, and the options of the export."""
    parser.description = (
        "Write the trained network of a run as a file that runs without pwlu. PWLUs are fused, batch norms are folded into\n"
        "convolutions, and any batch size works. The outputs of the file on random inputs are compared with those of the\n"
        "network, and the largest difference is printed. If rounding cannot explain it, no file is written. The input\n"
        "format, the pixel mean and standard deviation, and the class names are printed and stored in the file's metadata."
    )
    parser.epilog = (
        "examples:\n"
        "  pwlu export runs/digits-pwlu-seed0 model.onnx\n"
        "  pwlu export runs/digits-pwlu-seed0 model.onnx --simplify 0.01\n"
        "  pwlu export runs/cifar100-resnet18-pwlu-seed0 model.pt2\n"
        "  pwlu export runs/nuclei-maskrcnn_resnet18_fpn-pwlu-seed0 backbone.onnx --backbone"
    )
    kinds = "; ".join(f"{suffix}: {what}" for suffix, what in SUFFIXES.items())
    parser.add_argument("run", type=Path, metavar="RUN", help="read this finished run, a folder that pwlu train wrote")
    parser.add_argument("file", type=Path, metavar="FILE", help=f"write this file; its suffix selects the format: {kinds}")
    parser.add_argument(
        "--simplify",
        type=float,
        metavar="TOLERANCE",
        help="reduce each PWLU to fewer intervals, a ReLU or a line, with an error of at most this fraction of the range of "
        "its outputs, such as 0.001 (default: do not simplify)",
    )
    add_number(parser, "--opset", "write this ONNX opset version, 18 or later (default: 18)")
    parser.add_argument(
        "--form",
        choices=tuple(FORMS),
        help=f"write PWLUs in this form in ONNX; clips is for runtimes without Gather (default: {FASTEST}, the fastest)",
    )
    parser.add_argument(
        "--backbone",
        action="store_true",
        help="export only the backbone of a detector: the ResNet with its feature pyramid (default: off)",
    )


def run(options: argparse.Namespace) -> int:
    """Write the file, and describe it."""
    _check(options)
    with needs_packages("loading a run", "train", "onnx"):
        from pwlu.lab.inference import exporting
        from pwlu.lab.inference.trained_network import load

        trained = load(options.run)
    trained = _select(trained, options.backbone)
    lines = [_simplify(trained, options.simplify)] if options.simplify is not None else []
    onnx = {name: value for name in ("opset", "form") if (value := getattr(options, name)) is not None}
    try:
        if options.file.suffix == ".onnx":
            lines.append(exporting.write_onnx(trained.network, trained.sample(2), options.file, _metadata(trained), **onnx))
        else:
            lines.append(exporting.write_pt2(trained.network, trained.sample(2), options.file, _metadata(trained)))
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        raise UserError(str(error)) from None
    print(*lines, f"input: float32, batch x {' x '.join(map(str, trained.info.shape))}: {trained.info}", sep="\n")
    print(_output(trained))
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.file.suffix not in SUFFIXES:
        kinds = "; ".join(f"model{suffix}, {what}" for suffix, what in SUFFIXES.items())
        raise UserError(f"the suffix of {options.file} does not select a format. Write {kinds}")
    if options.file.is_dir():
        raise UserError(f"{options.file} is a folder. Name a file in it, such as {options.file / 'model.onnx'}")
    if not options.file.parent.is_dir():
        raise UserError(f"the folder {options.file.parent} does not exist: create it, or choose another")
    if options.file.suffix != ".onnx" and (options.opset is not None or options.form is not None):
        raise UserError(f"--opset and --form are for ONNX: leave them out, or write {options.file.with_suffix('.onnx')}")


def _select(trained: "TrainedNetwork", backbone: bool) -> "TrainedNetwork":
    """Return the network, or the backbone of a detector."""
    if backbone and not trained.detects:
        raise UserError(f"{trained.path} is a run of {trained.settings.recipe}, which is not a detector: leave out --backbone")
    if backbone or not trained.detects:
        return trained.backbone() if backbone else trained
    raise UserError(
        f"{trained.path} is a run of {trained.settings.recipe}, a detector. torch.export cannot trace a whole detector of "
        "torchvision, because non-maximum suppression depends on the values of the detections. Add --backbone to export the "
        f"ResNet with its feature pyramid, which has {len(trained.backbone().info.sites)} of the {len(trained.info.sites)} "
        "activations. The complete detector runs in PyTorch: "
        f"pwlu.lab.inference.trained_network.load(Path({str(trained.path)!r})).network"
    )


def _simplify(trained: "TrainedNetwork", tolerance: float) -> str:
    if not units_of(trained.network):
        raise UserError(f"{trained.path} is a run of {trained.settings.activation}, without PWLUs: leave out --simplify")
    try:
        return str(simplify_(trained.network, tolerance))
    except ValueError as error:
        raise UserError(f"--simplify {tolerance:g}: {error}") from None


def _metadata(trained: "TrainedNetwork") -> dict[str, str]:
    """Return the metadata that a program needs to use the file."""
    settings, folder = trained.settings, RunFolder(trained.path)
    result = {"result": json.dumps(folder.json("result.json"))} if folder.finished else {}
    return {
        "pwlu": __version__,
        "recipe": settings.recipe,
        "activation": settings.activation,
        "seed": str(settings.seed),
        "input": str(trained.info),
        "mean": json.dumps(trained.info.mean),
        "std": json.dumps(trained.info.std),
        "classes": str(len(trained.info.classes)),
        "class_names": json.dumps(trained.info.classes, ensure_ascii=False),
    } | result


def _output(trained: "TrainedNetwork") -> str:
    classes = trained.info.classes
    if trained.detects:
        return f"output: the maps of the feature pyramid, for a detector of {len(classes)} classes"
    return f"output: batch x {len(classes)}, one score per class before softmax: {abbreviate(classes, 10)}"
