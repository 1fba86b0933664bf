"""Reproduce the paper's table of inference times: a network with ReLU, Swish, PReLU, PWLU, FReLU, APL and PAU, side by side.

Print a table per network with the paper's milliseconds (on a V100) beside ours. Write p20/p50/p80 and the mean, with device and
versions, as CSV. On a GPU, also time the GPU's work alone by replaying CUDA graphs: if Python launches kernels more slowly than
the GPU runs them, wall-clock time hides the cost of an activation.

PWLUs are fused, as in the paper. FReLU has a second row, with its batch norm folded into its convolution.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torchvision
from timing import RESULTS, machine, time_on_gpu, write
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from tqdm import tqdm

import pwlu
from pwlu.baselines import FReLU
from pwlu.lab.inference.timing import interleaved, percentiles

Row = dict[str, Any]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# The paper's results: milliseconds for 64 images of 224 pixels on a V100, mean of 500 measurements.
PAPER: dict[str, dict[str, float]] = {
    "resnet18": {"relu": 17.1, "swish": 18.8, "pwlu": 19.9, "frelu": 23.3, "apl": 40.7, "pau": 64.2},
    "mobilenet_v3_small": {"relu": 15.4, "swish": 15.7, "pwlu": 16.2, "frelu": 18.1, "apl": 31.7, "pau": 38.6},
}
KINDS = ("relu", "swish", "prelu", "pwlu", "frelu", "frelu, folded", "apl", "pau")
PARTS = 10  # into which a measurement is divided, to update the progress bar
INNER = 5  # calls per reading of the clock


def network(name: str, kind: str, options: argparse.Namespace) -> nn.Module:
    """Return the network in evaluation mode with this activation at every site that convert_ finds."""
    torch.manual_seed(0)
    model: nn.Module = torchvision.models.get_model(name, weights=None)
    activation, _, way = kind.partition(", ")
    to = partial(_in_place, activation) if activation in ("relu", "swish") else activation
    pwlu.convert_(model, torch.randn(2, 3, 224, 224), to=to)
    layout = torch.channels_last if options.channels_last else torch.contiguous_format
    model = model.eval().to(options.device)
    model = model.to(dtype=DTYPES[options.dtype], memory_format=layout)  # type: ignore[call-overload]
    if activation == "pwlu":
        pwlu.fuse_(model)
    for module in model.modules():
        if way == "folded" and isinstance(module, FReLU):
            module.conv, module.norm = fuse_conv_bn_eval(module.conv, module.norm), nn.Identity()
    return model


def _in_place(activation: str, channels: int, site: Any) -> nn.Module:
    return nn.ReLU(inplace=True) if activation == "relu" else nn.SiLU(inplace=True)


def measure(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row per activation."""
    torch._dynamo.reset()
    x = torch.randn(options.batch, 3, options.pixels, options.pixels, device=options.device, dtype=DTYPES[options.dtype])
    x = x.contiguous(memory_format=torch.channels_last if options.channels_last else torch.contiguous_format)
    calls: dict[str, Callable[[], Any]] = {}
    for kind in tqdm(KINDS, desc=f"{name}, preparing"):
        model = network(name, kind, options)
        calls[kind] = partial(torch.compile(model, fullgraph=True) if options.compile else model, x)
        calls[kind]()
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    inner, cuda = min(INNER, options.runs), options.device == "cuda"
    rounds = math.ceil(options.runs / inner)
    parts = min(PARTS, rounds)
    for part in tqdm(range(parts), desc=f"{name}, timing"):
        share = rounds // parts + (part < rounds % parts)
        found = interleaved(calls, share, inner=inner, wait=torch.cuda.synchronize if cuda else None)
        for kind in KINDS:
            times[kind] += found[kind]
    for kind in tqdm(KINDS, desc=f"{name}, GPU alone", disable=not cuda):
        row: Row = {"network": name, "call": kind, "mode": "compiled" if options.compile else "eager", "dtype": options.dtype}
        row |= {
            "layout": "channels_last" if options.channels_last else "NCHW",
            "batch": options.batch,
            "pixels": options.pixels,
        }
        row |= {"runs": rounds * inner, "mean_ms": fmean(times[kind])} | percentiles(times[kind])
        alone = percentiles(time_on_gpu({"": calls[kind]}, rounds)[""])["p50_ms"] if cuda else math.nan
        yield row | {"gpu_ms": alone, "paper_v100_ms": PAPER.get(name, {}).get(kind, math.nan)} | machine(options.device)


def show(table: list[Row]) -> None:
    """Print a Markdown table per network with a row per activation: medians, and ratios to ReLU."""
    for name in dict.fromkeys(row["network"] for row in table):
        rows = {row["call"]: row for row in table if row["network"] == name}
        first = rows["relu"]
        images = f"{first['batch']} x 3 x {first['pixels']} x {first['pixels']}"
        mode = ", ".join(first[key] for key in ("mode", "dtype", "layout"))
        print(f"\n{name} on {first['device']}: {mode}, {images}, {first['runs']} runs\n")
        print("| activation | ms | x ReLU | GPU alone, ms | x ReLU | paper, V100, ms | x ReLU |\n|---|---|---|---|---|---|---|")
        for kind, row in rows.items():
            cells = []
            for column in ("p50_ms", "gpu_ms", "paper_v100_ms"):
                known = not math.isnan(row[column])
                cells += [f"{row[column]:.2f}", f"{row[column] / first[column]:.2f}"] if known else ["", ""]
            print(f"| {kind} | {' | '.join(cells)} |")


def main() -> None:
    """Parse the command line, measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="run on this device (default: %(default)s)")
    parser.add_argument(
        "--networks", nargs="+", default=tuple(PAPER), metavar="NAME", help="time these networks (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=64, help="use this many images per batch (default: %(default)s)")
    parser.add_argument("--pixels", type=int, default=224, help="set the height and width of images (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=500, help="time each network this many times (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="compute in this type (default: %(default)s)")
    parser.add_argument(
        "--channels-last", action="store_true", help="use the memory format that GPUs prefer in 16 bits (default: off)"
    )
    parser.add_argument("--compile", action="store_true", help="compile the networks with torch.compile (default: off)")
    parser.add_argument(
        "--output",
        type=Path,
        help="write results to this file (default: inference-DEVICE.csv in benchmarks/results, with the mode in its name)",
    )
    options = parser.parse_args()
    if options.runs < 1:
        parser.error("--runs must be at least 1")
    torch._dynamo.config.recompile_limit = 1000  # torch counts each network as a recompilation of the same code
    with torch.inference_mode():
        table = [row for name in options.networks for row in measure(name, options)]
    show(table)
    mode = (
        [options.dtype] * (options.dtype != "float32")
        + ["channels-last"] * options.channels_last
        + ["compiled"] * options.compile
    )
    write(options.output or RESULTS / f"{'-'.join(['inference', options.device, *mode])}.csv", table)


if __name__ == "__main__":
    main()
