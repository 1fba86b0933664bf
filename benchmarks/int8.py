"""Measure speed and accuracy of 8-bit networks with ReLUs and with PWLUs on the CPU, quantised by PyTorch's PT2E.

Without arguments, time a ResNet-18 on images of 224 x 224 pixels in float32 and in 8 bits, compiled by Inductor. With --runs,
measure the accuracy of trained networks from run folders of `pwlu train`. Print tables, and write rows with versions as CSV.

PWLUs in 8 bits   in float32      X86InductorQuantizer alone: only convolutions are in 8 bits
                  between         inputs of PWLUs are in 8 bits as well: dequantise, PWLU, quantise
                  as tables       the same after pwlu.tabulate_; outputs are bitwise equal
                  by channel      tables, with one scale per channel of the input
                  none negative   tables of PWLUs that are still ReLUs, the fastest case: oneDNN's convolutions are slower on
                                  inputs with a nonzero zero point, which negative outputs of PWLUs cause
"""

import argparse
import copy
import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch._inductor.config
import torchvision
from timing import RESULTS, keep_memory, machine, write
from torch import Tensor, fx, nn
from torchao.quantization.pt2e.observer import PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import QuantizationSpec, Quantizer
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)
from tqdm import tqdm

import pwlu
from pwlu.deploy.int8_tables import tabulate_
from pwlu.integrations.pt2e import PWLUQuantizer
from pwlu.lab.data import datasets
from pwlu.lab.inference import trained_network
from pwlu.lab.inference.timing import interleaved, percentiles

Row = dict[str, Any]
BATCHES = (1, 16)
CALIBRATION = 512  # training images
BY_CHANNEL = QuantizationSpec(
    dtype=torch.uint8,
    quant_min=0,
    quant_max=255,
    qscheme=torch.per_channel_affine,
    ch_axis=1,
    observer_or_fake_quant_ctr=PerChannelMinMaxObserver,
)


def x86() -> Quantizer:
    """Return PyTorch's quantizer for x86 CPUs."""
    return X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())


def quantised(model: nn.Module, quantizer: Quantizer, images: Iterable[Tensor]) -> fx.GraphModule:
    """Return the model in 8 bits, calibrated on these batches."""
    batches = list(images)
    sizes = {len(batch) for batch in batches}
    shapes = ({0: torch.export.Dim("batch")},) if len(sizes) > 1 else None
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The input of maxpool2d is not quantized", UserWarning)
        # strict, because torchvision's blocks call one ReLU twice, and the quantizer would treat both calls as one activation
        program = torch.export.export(model, (batches[0],), dynamic_shapes=shapes, strict=True)
        prepared = prepare_pt2e(program.module(), quantizer)
        for batch in batches:
            prepared(batch)
        return convert_pt2e(prepared)


def forms(model: nn.Module, images: Iterable[Tensor]) -> dict[str, nn.Module]:
    """Return the 8-bit forms of a network that is not fused: one form for ReLUs, all forms for PWLUs."""
    batches = list(images)
    if not any(isinstance(module, pwlu.PWLU) for module in model.modules()):
        return {"int8, relu": quantised(model, x86(), batches)}
    between = quantised(model, PWLUQuantizer(x86()), batches)
    found: dict[str, nn.Module] = {
        "int8, pwlu in float32": quantised(model, x86(), batches),
        "int8, pwlu between": between,
        "int8, pwlu as tables": copy.deepcopy(between),
        "int8, pwlu as tables by channel": quantised(model, PWLUQuantizer(x86(), BY_CHANNEL), batches),
    }
    for name, each in found.items():
        if "tables" in name and isinstance(each, fx.GraphModule):
            report = tabulate_(each)
            if len(report.tabulated) < len(report):
                raise RuntimeError(f"{name}: not all PWLUs are tables\n{report}")
    return found


# Speed.


def resnet18(converted: bool, moved: float = 0.05) -> nn.Module:
    """Return a ResNet-18 with ReLUs, or with PWLUs whose heights have random changes of size `moved`."""
    model: nn.Module = torchvision.models.resnet18()
    if converted:
        pwlu.convert_(model, torch.randn(2, 3, 64, 64))
    with torch.no_grad():
        for unit in model.modules():
            if isinstance(unit, pwlu.PWLU):
                unit.heights.add_(moved * torch.randn_like(unit.heights))
    return model.eval()


def speed(batch: int, rounds: int) -> list[Row]:
    """Return the rows of one batch size, in milliseconds per batch."""
    x = torch.randn(batch, 3, 224, 224)
    relu, unit = resnet18(False), resnet18(True)
    models = {"float32, relu": relu, "float32, pwlu": copy.deepcopy(unit)}
    pwlu.fuse_(models["float32, pwlu"])
    models |= forms(relu, [x]) | forms(unit, [x])
    still = quantised(resnet18(True, moved=0.0), PWLUQuantizer(x86()), [x])
    tabulate_(still)
    models["int8, pwlu as tables, none negative"] = still
    calls: dict[str, Callable[[], Any]] = {}
    with torch.no_grad():
        for name, model in tqdm(models.items(), desc=f"compiling for batches of {batch}"):
            torch._dynamo.reset()
            calls[name] = partial(torch.compile(model, dynamic=False), x)
            calls[name]()
        if not torch.equal(calls["int8, pwlu between"](), calls["int8, pwlu as tables"]()):
            raise RuntimeError("the outputs of the tables differ from those of the PWLUs")
        times = interleaved(calls, rounds)
    base = percentiles(times["int8, relu"])["p50_ms"]
    return [
        {"network": "ResNet-18", "form": name, "batch": batch}
        | percentiles(each)
        | {"x_int8_relu": percentiles(each)["p50_ms"] / base}
        | versions()
        for name, each in times.items()
    ]


# Accuracy.


def accuracy(folder: Path) -> Iterator[Row]:
    """Yield the rows of one run. Operators compute the 8-bit arithmetic in float32.

    ``accuracy``: correct answers in percent. ``same``: answers equal to those of the float32 network, in percent. ``error``:
    root mean square difference of the outputs from those of the float32 network, relative to their root mean square.
    """
    run = trained_network.load(folder)
    data: Any = datasets.load(run.settings, torch.device("cpu"))
    chosen = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))[:CALIBRATION]
    images = [batch for batch, _ in data.train.batches(chosen.split(200))]  # the last is smaller, so the batch size is dynamic
    plain = f"float32, {run.settings.activation}"
    models = {plain: run.network} | forms(run.network, images)
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        parts = list(data.test.batches(torch.arange(len(data.test)).split(200)))
        labels = torch.cat([part for _, part in parts])
        for name, model in models.items():
            found[name] = torch.cat([model(part) for part, _ in parts])
    for name, outputs in found.items():
        answers, truth = outputs.argmax(1), found[plain]
        yield {
            "recipe": run.settings.recipe,
            "form": name,
            "seed": run.settings.seed,
            "accuracy": 100 * float((answers == labels).float().mean()),
            "same": 100 * float((answers == truth.argmax(1)).float().mean()),
            "error": float((outputs - truth).norm() / truth.norm()),
            "images": len(labels),
            **versions(),
        }


def versions() -> dict[str, str]:
    """Return the hardware and versions of a measurement."""
    return {"torchao": importlib.import_module("torchao").__version__, **machine("cpu")}


def show(rows: list[Row], column: str, value: str) -> None:
    """Print a Markdown table with a row per form and a column per value of `column`: means, and their number in brackets."""
    columns = list(dict.fromkeys(row[column] for row in rows))
    print(f"\n| {value} | " + " | ".join(f"{column} {each}" for each in columns) + " |\n|---|" + "---|" * len(columns))
    for form in dict.fromkeys(row["form"] for row in rows):
        cells = []
        for each in columns:
            found = [row[value] for row in rows if (row["form"], row[column]) == (form, each)]
            cells.append(f"{mean(found):.4g} ({len(found)})")
        print(f"| {form} | " + " | ".join(cells) + " |")


def main() -> None:
    """Parse the command line, measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs",
        type=Path,
        nargs="+",
        help="measure the accuracy of these finished runs, and no times (default: time a ResNet-18)",
    )
    parser.add_argument("--rounds", type=int, default=15, help="measure each variant this many times (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="use this many CPU threads (default: %(default)s)")
    parser.add_argument(
        "--output",
        type=Path,
        help="write results to this file (default: int8-cpu.csv, or int8-accuracy.csv with --runs, in benchmarks/results)",
    )
    options = parser.parse_args()
    if not options.runs:
        keep_memory()
    torch._inductor.config.freezing = True  # otherwise Inductor does not compute in 8 bits
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.runs:
        rows = [row for folder in tqdm(options.runs) for row in accuracy(folder)]
        for value in ("accuracy", "same", "error"):
            show(rows, "recipe", value)
        write(options.output or RESULTS / "int8-accuracy.csv", rows)
        return
    rows = [row for batch in BATCHES for row in speed(batch, options.rounds)]
    for value in ("p50_ms", "x_int8_relu"):
        show(rows, "batch", value)
    write(options.output or RESULTS / "int8-cpu.csv", rows)


if __name__ == "__main__":
    main()
