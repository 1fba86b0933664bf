"""``pwlu export``: the network of a run as a file that runs where pwlu is not installed."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pwlu.deploy.onnx_forms import FASTEST, FORMS
from pwlu.deploy.simplify import simplify_
from pwlu.lab.recipes.settings import UserError
from pwlu.lab.runs.run_folder import RunFolder
from pwlu.module import units_of
from pwlu.text import install
from pwlu.version import __version__

if TYPE_CHECKING:
    from pwlu.lab.inference.trained_network import TrainedNetwork

SUFFIXES = {".onnx": "standard operators of ONNX, for ONNX Runtime and others", ".pt2": "for torch.export.load"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, the file, and what of it can be chosen."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Write the trained network of a run as a file that needs nothing of pwlu: PWLUs fused, batch norm folded into\n"
        "convolutions, any batch size. The file is run beside the network on random inputs before it appears, and the\n"
        "largest difference is printed; what rounding does not explain is an error. What an input is, mean and standard\n"
        "deviation of its pixels and the names of the classes are printed, and are in the file's metadata."
    )
    parser.epilog = (
        "examples:\n"
        "  pwlu export runs/digits-pwlu-seed0 model.onnx\n"
        "  pwlu export runs/digits-pwlu-seed0 model.onnx --simplify 0.01\n"
        "  pwlu export runs/cifar100-resnet18-pwlu-seed0 model.pt2\n"
        "  pwlu export runs/nuclei-maskrcnn_resnet18_fpn-pwlu-seed0 backbone.onnx --backbone"
    )
    kinds = "; ".join(f"{suffix}: {what}" for suffix, what in SUFFIXES.items())
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run of pwlu train")
    parser.add_argument("file", type=Path, metavar="FILE", help=kinds)
    parser.add_argument(
        "--simplify",
        type=float,
        metavar="TOLERANCE",
        help="first give every PWLU as few intervals as its function needs, or make it the ReLU or line that it has become, to "
        "within this share of the function's range, such as 0.001",
    )
    parser.add_argument("--opset", type=int, metavar="N", help=".onnx: version of the operators, 18 or later (default: 18)")
    parser.add_argument(
        "--form",
        choices=tuple(FORMS),
        help=f".onnx: how a PWLU is written; clips for runtimes that cannot gather (default: {FASTEST}, the fastest)",
    )
    parser.add_argument("--backbone", action="store_true", help="of a detector: the ResNet with its feature pyramid alone")


def run(options: argparse.Namespace) -> int:
    """Write the file, and say what it is."""
    try:
        print(_exported(options))
    except UserError as error:
        print(f"pwlu export: {error}", file=sys.stderr)
        return 2
    return 0


def _exported(options: argparse.Namespace) -> str:
    _check(options)
    try:
        from pwlu.lab.inference import shipping
        from pwlu.lab.inference.trained_network import load

        trained = load(options.run)
    except ImportError as error:
        raise UserError(f"a run is made again with more packages ({error}): {install('train', 'onnx')}") from None
    trained = _part(trained, options.backbone)
    said = [_simplified(trained, options.simplify)] if options.simplify is not None else []
    onnx = {name: value for name in ("opset", "form") if (value := getattr(options, name)) is not None}
    try:
        if options.file.suffix == ".onnx":
            said.append(shipping.write_onnx(trained.network, trained.sample(2), options.file, _metadata(trained), **onnx))
        else:
            said.append(shipping.write_pt2(trained.network, trained.sample(2), options.file, _metadata(trained)))
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        raise UserError(str(error)) from None
    return "\n".join(
        [*said, f"an input is float32, batch x {' x '.join(map(str, trained.info.shape))}: {trained.info}", _output(trained)]
    )


def _check(options: argparse.Namespace) -> None:
    if options.file.suffix not in SUFFIXES:
        kinds = "; ".join(f"model{suffix}, {what}" for suffix, what in SUFFIXES.items())
        raise UserError(f"{options.file} does not say what to write. Name it {kinds}")
    if options.file.is_dir():
        raise UserError(f"{options.file} is a folder. Name a file in it, such as {options.file / 'model.onnx'}")
    if not options.file.parent.is_dir():
        raise UserError(f"there is no folder {options.file.parent}: make it first, or write to another")
    if options.file.suffix != ".onnx" and (options.opset is not None or options.form is not None):
        raise UserError(f"--opset and --form are for ONNX: leave them out, or write {options.file.with_suffix('.onnx')}")


def _part(trained: "TrainedNetwork", backbone: bool) -> "TrainedNetwork":
    """The whole, or of a detector its backbone."""
    if backbone and not trained.detects:
        raise UserError(f"{trained.path} is a run of {trained.settings.recipe}, which is no detector: leave --backbone out")
    if backbone or not trained.detects:
        return trained.backbone() if backbone else trained
    raise UserError(
        f"{trained.path} is a run of {trained.settings.recipe}. The course of a detector depends on what it finds, and "
        "torch.export cannot follow torchvision's through the suppression of overlapping boxes. What can be written is the "
        f"ResNet with its feature pyramid, which has {len(trained.backbone().sites)} of its {len(trained.sites)} activations: "
        "add --backbone. The whole runs in PyTorch: "
        f"pwlu.lab.inference.trained_network.load(Path({str(trained.path)!r})).network"
    )


def _simplified(trained: "TrainedNetwork", tolerance: float) -> str:
    if not units_of(trained.network):
        raise UserError(f"{trained.path} is a run of {trained.settings.activation}, without PWLUs: leave --simplify out")
    try:
        return str(simplify_(trained.network, tolerance))
    except ValueError as error:
        raise UserError(f"--simplify {tolerance:g}: {error}") from None


def _metadata(trained: "TrainedNetwork") -> dict[str, str]:
    """For the file: what a program needs to know of it."""
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
        return f"the output is the maps of the pyramid, for a detector of {len(classes)} classes"
    names = f"{', '.join(classes[:10])}{', ...' if len(classes) > 10 else ''}"
    return f"the output is batch x {len(classes)}, a score for each class before softmax: {names}"
