"""Time the ONNX forms of a fused PWLU beside ReLU, in ONNX Runtime and in PyTorch, on the CPU.

Time one activation at several sizes, then a ResNet-18 with 17 activations. Print medians with their ratio to ReLU in the same
runtime, and write p20/p50/p80 with device and versions as CSV. pwlu.export_onnx checks every file.
"""

import argparse
import importlib
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from timing import RESULTS, keep_memory, machine, write
from torch import Tensor, nn
from tqdm import tqdm

import pwlu
from pwlu.deploy.onnx_export import export_onnx
from pwlu.deploy.onnx_forms import FORMS
from pwlu.lab.inference.timing import interleaved, percentiles

runtime = importlib.import_module("onnxruntime")  # not an import statement, because it has no type annotations
Row = dict[str, Any]

SHAPES = [(32, 64, 56, 56), (1, 64, 56, 56), (1, 512, 7, 7)]  # in the first and the last stage of a ResNet-18
BATCHES = (1, 8)


def perturb_(model: nn.Module) -> nn.Module:
    """Change the heights of PWLUs at random, as training would, and switch to evaluation mode."""
    with torch.no_grad():
        for unit in model.modules():
            if isinstance(unit, pwlu.PWLU):
                unit.heights.add_(0.05 * torch.randn_like(unit.heights))
    return model.eval()


def resnet18(converted: bool) -> nn.Module:
    """Return a ResNet-18 with ReLUs or with PWLUs."""
    model: nn.Module = torchvision.models.resnet18()
    if converted:
        pwlu.convert_(model, torch.randn(2, 3, 64, 64))
    return perturb_(model)


def session(file: Path, threads: int) -> Callable[[Tensor], Any]:
    """Load an ONNX file as a function."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    loaded = runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    name = loaded.get_inputs()[0].name
    return lambda x: loaded.run(None, {name: x.numpy()})


def competitors(relu: nn.Module, unit: nn.Module, sample: Tensor, threads: int) -> dict[str, Callable[[Tensor], Any]]:
    """Return the calls to time: ReLU and all forms of PWLU in ONNX Runtime, ReLU and PWLU in PyTorch."""
    calls: dict[str, Callable[[Tensor], Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        batch = ({0: "batch"},)
        torch.onnx.export(relu, (sample,), file, dynamic_shapes=batch, external_data=False, dynamo=True, verbose=False)
        calls["ONNX Runtime, relu"] = session(file, threads)
        for form in tqdm(FORMS, desc="exporting"):
            export_onnx(unit, sample, file, form=form)
            calls[f"ONNX Runtime, pwlu as {form}"] = session(file, threads)
    pwlu.fuse_(unit)
    return calls | {"PyTorch, relu": relu, "PyTorch, pwlu fused": unit}


def measure(what: str, calls: dict[str, Callable[[Tensor], Any]], x: Tensor, rounds: int) -> list[Row]:
    """Return the rows of one input."""
    inner = 1 if x.numel() > 10**6 else 5
    with torch.inference_mode():
        times = interleaved({name: partial(call, x) for name, call in calls.items()}, rounds, inner=inner)
    rows = []
    for name, each in times.items():
        base = percentiles(times[name.partition(",")[0] + ", relu"])["p50_ms"]
        row: Row = {"what": what, "call": name, "shape": "x".join(map(str, x.shape))} | percentiles(each)
        row |= {"x_relu": percentiles(each)["p50_ms"] / base, "onnxruntime": runtime.__version__}
        rows.append(row | machine("cpu"))
    return rows


def show(rows: list[Row]) -> None:
    """Print a Markdown table with a row per call and a column per input."""
    columns = list(dict.fromkeys((row["what"], row["shape"]) for row in rows))
    cells = {
        (row["call"], row["what"], row["shape"]): f"{row['p50_ms']:.3g} [{row['p20_ms']:.3g}, {row['p80_ms']:.3g}] "
        f"({row['x_relu']:.2f})"
        for row in rows
    }
    print("\n| ms [p20, p80] (x ReLU) | " + " | ".join(f"{what} {shape}" for what, shape in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for call in dict.fromkeys(row["call"] for row in rows):
        print(f"| {call} | " + " | ".join(cells[call, *column] for column in columns) + " |")


def main() -> None:
    """Parse the command line, measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="measure each variant this many times (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="use this many CPU threads (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "onnx-cpu.csv", help="write results to this file (default: %(default)s)"
    )
    options = parser.parse_args()
    keep_memory()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    for shape in SHAPES:
        unit = perturb_(pwlu.PWLU(shape[1], init="silu"))
        calls = competitors(nn.ReLU().eval(), unit, torch.randn(2, *shape[1:]), options.threads)
        rows += measure("one activation", calls, 2 * torch.randn(shape), options.rounds)
    calls = competitors(resnet18(False), resnet18(True), torch.randn(2, 3, 224, 224), options.threads)
    for batch in BATCHES:
        rows += measure("ResNet-18", calls, torch.randn(batch, 3, 224, 224), options.rounds)
    show(rows)
    write(options.output, rows)


if __name__ == "__main__":
    main()
