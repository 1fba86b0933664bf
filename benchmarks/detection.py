"""Time detectors with ReLU, Swish and PWLU side by side: a training step and inference, in milliseconds per image.

Mask R-CNN and RetinaNet are built as in `pwlu train`: with ResNet-50 on images of 800 x 800 pixels, as for COCO, and with
ResNet-18 on images of 320 x 320, as for the small data sets. Images and objects are random. A training step is forward,
backward and SGD, in both phases of PWLU. Inference uses fused PWLUs and score thresholds of 0, so that the last heads process
as many boxes as an image may have. On a GPU the second number is the time for which the GPU is busy: with a slow CPU or small
images, the GPU waits for Python.
"""

import argparse
import copy
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from timing import RESULTS, gpu_busy_ms, machine, write
from torch import Tensor, nn
from tqdm import tqdm

import pwlu
from pwlu.lab.inference.timing import interleaved, percentiles
from pwlu.lab.models import detectors

Row = dict[str, Any]
CASES = {
    "maskrcnn_resnet50_fpn": 800,
    "retinanet_resnet50_fpn": 800,
    "maskrcnn_resnet18_fpn": 320,
    "retinanet_resnet18_fpn": 320,
}
CLASSES, OBJECTS = 80, 10


def pixels_of(name: str, options: argparse.Namespace) -> int:
    """Return the height and width of images."""
    return options.pixels or CASES[name]


def network(name: str, pixels: int, activation: str, device: str) -> nn.Module:
    """Return the detector with this activation on the device, in the memory format of `pwlu train`."""
    return copy.deepcopy(converted(name, pixels, activation)).to(device).to(memory_format=torch.channels_last)


@cache  # conversion takes seconds, and both training and inference use each detector
def converted(name: str, pixels: int, activation: str) -> nn.Module:
    """Return the detector with all activations replaced by this one."""
    torch.manual_seed(0)
    model = detectors.build(name, CLASSES, pixels=pixels, width=1.0, norm="batch", anchors=1.0, detections=100)
    images, targets = batch(2, pixels, "cpu")
    pwlu.convert_(model, (images, targets), to=activation)
    return model


def batch(count: int, pixels: int, device: str) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return random images with objects: boxes of a tenth to a half of the image's side, with masks."""
    generator = torch.Generator().manual_seed(1)
    images = [torch.rand(3, pixels, pixels, generator=generator).to(device) for _ in range(count)]
    targets = []
    for _ in range(count):
        size = pixels * (0.1 + 0.4 * torch.rand(OBJECTS, 2, generator=generator))
        corner = (pixels - size) * torch.rand(OBJECTS, 2, generator=generator)
        boxes = torch.cat([corner, corner + size], 1)
        masks = torch.zeros(OBJECTS, pixels, pixels, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
            mask[top:bottom, left:right] = 1
        labels = torch.randint(1, CLASSES, (OBJECTS,), generator=generator)
        targets.append({"boxes": boxes.to(device), "labels": labels.to(device), "masks": masks.to(device)})
    return images, targets


def step(model: Any, optimizer: torch.optim.Optimizer, images: list[Tensor], targets: list[dict[str, Tensor]]) -> None:
    """Take one training step."""
    optimizer.zero_grad()
    sum(model(images, targets).values()).backward()
    optimizer.step()


def training(name: str, pixels: int, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Return a training step for each activation."""
    images, targets = batch(options.batch, pixels, options.device)
    calls: dict[str, Callable[[], Any]] = {}
    for kind in ("relu", "swish", "pwlu", "pwlu, Phase I"):
        model = network(name, pixels, kind.partition(",")[0], options.device).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
        if kind == "pwlu, Phase I":
            pwlu.TwoPhase(model, optimizer, realign_at=10**9)
        calls[kind] = partial(step, model, optimizer, images, targets)
    return calls


def inference(name: str, pixels: int, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Return a forward pass for each activation."""
    images, _ = batch(options.batch, pixels, options.device)
    calls: dict[str, Callable[[], Any]] = {}
    for kind in ("relu", "swish", "pwlu"):
        model: Any = network(name, pixels, kind, options.device).eval()
        (model.roi_heads if hasattr(model, "roi_heads") else model).score_thresh = 0.0
        if kind == "pwlu":
            pwlu.fuse_(model)
        calls[kind] = partial(model, images)
    return calls


def calls_of(name: str, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Callable[[], Any]]]]:
    """Yield the calls to time for training and for inference, with gradients enabled or disabled."""
    for what, make in {"training": training, "inference": inference}.items():
        calls = make(name, pixels_of(name, options), options)
        with torch.set_grad_enabled(what == "training"):
            yield what, calls


def measure(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row per activation for training and for inference, in wall-clock time."""
    wait = torch.cuda.synchronize if options.device == "cuda" else None
    for what, calls in calls_of(name, options):
        with tqdm(total=options.rounds, desc=f"{name}, {what}") as bar:
            times = interleaved(calls, options.rounds, inner=options.inner, wait=wait, after_round=bar.update)
        found = {kind: percentiles([each / options.batch for each in times[kind]]) for kind in times}
        for kind, values in found.items():
            row: Row = {"network": name, "pixels": pixels_of(name, options), "batch": options.batch}
            row |= {"what": what, "activation": kind} | values | {"x_relu": values["p50_ms"] / found["relu"]["p50_ms"]}
            yield row | {"gpu_ms": math.nan, "gpu_x_relu": math.nan} | machine(options.device)


def add_busy(table: list[Row], options: argparse.Namespace) -> None:
    """Add the time per image for which the GPU is busy. Call this last: the profiler slows down what runs after it."""
    rows = {(row["network"], row["what"], row["activation"]): row for row in table}
    for name in dict.fromkeys(row["network"] for row in table):
        for what, calls in calls_of(name, options):
            for kind, call in calls.items():
                call()  # warm up: cuDNN chooses algorithms, memory is allocated
                rows[name, what, kind]["gpu_ms"] = gpu_busy_ms(call) / options.batch
    for row in table:
        row["gpu_x_relu"] = row["gpu_ms"] / rows[row["network"], row["what"], "relu"]["gpu_ms"]


def show(table: list[Row]) -> None:
    """Print a Markdown table with a row per activation and a column per detector and pass."""
    columns = list(dict.fromkeys((row["network"], row["what"]) for row in table))
    cells = {
        (r["activation"], r["network"], r["what"]): f"{r['p50_ms']:.2f} ({r['x_relu']:.3f})"
        + ("" if math.isnan(r["gpu_ms"]) else f", {r['gpu_ms']:.2f} ({r['gpu_x_relu']:.3f})")
        for r in table
    }
    print("\n| ms per image (x ReLU), GPU busy | " + " | ".join(", ".join(column) for column in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for kind in dict.fromkeys(row["activation"] for row in table):
        print(f"| {kind} | " + " | ".join(cells.get((kind, *column), "") for column in columns) + " |")


def main() -> None:
    """Parse the command line, measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"time these: {', '.join(CASES)} (default: all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="run on this device (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="use this many images per batch (default: %(default)s)")
    parser.add_argument(
        "--pixels", type=int, help="set the height and width of images (default: 800 with ResNet-50, 320 with ResNet-18)"
    )
    parser.add_argument("--rounds", type=int, default=15, help="measure each variant this many times (default: %(default)s)")
    parser.add_argument("--inner", type=int, default=2, help="make this many calls per measurement (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, help="write results to this file (default: detection-DEVICE.csv in benchmarks/results)"
    )
    options = parser.parse_args()
    if unknown := set(options.networks) - set(CASES):
        parser.error(f"unknown network {', '.join(sorted(unknown))}: choose from {', '.join(CASES)}")
    output = options.output or RESULTS / f"detection-{options.device}.csv"
    table: list[Row] = []
    for name in options.networks or CASES:
        table += measure(name, options)
        write(output, table)  # after each network, so that an interruption loses little
    if options.device == "cuda":
        add_busy(table, options)
        write(output, table)
    show(table)


if __name__ == "__main__":
    main()
