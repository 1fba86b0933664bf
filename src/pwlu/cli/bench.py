"""``pwlu bench``: time the network of a run against the same network with ReLU."""

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pwlu.cli import add_number, check_positive
from pwlu.common.text import columns
from pwlu.lab.recipes.settings import needs_packages
from pwlu.lab.runs.environment import environment, version
from pwlu.lab.runs.processes import join_process_group

if TYPE_CHECKING:
    from pwlu.lab.inference.benchmark import Contender
    from pwlu.lab.inference.trained_network import TrainedNetwork

BATCH = {"cpu": 8}  # other devices get 64, because fewer images would not keep them busy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run and the options of the measurement."""
    parser.description = (
        "Time inference with the trained network of a run. PyTorch runs three variants: the network as trained, with ReLU\n"
        "instead of its activations, and with fused PWLUs. The variants with ReLU and with fused PWLUs also run under\n"
        "torch.compile, and in ONNX Runtime as pwlu export writes them. The variants of a runtime take turns, so that other\n"
        "load on the machine affects all of them. Inputs are random images of the run's size. The table shows medians. For\n"
        "a detector, only the backbone is timed: the ResNet with its feature pyramid."
    )
    parser.epilog = (
        "examples:\n"
        "  pwlu bench runs/digits-pwlu-seed0\n"
        "  pwlu bench runs/imagenet-resnet18-pwlu-seed0 --batch 1 --threads 4 --rounds 100\n"
        "  pwlu bench runs/imagenet-resnet18-pwlu-seed0 --device cuda --no-compile\n"
        "On a CPU shared with other programs, set OMP_WAIT_POLICY=passive, so that waiting threads do not occupy a core."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="read this finished run, a folder that pwlu train wrote")
    add_number(parser, "--batch", "use N images per call (default: 8 on a CPU, 64 elsewhere)")
    add_number(parser, "--threads", "use N CPU threads (default: PyTorch's choice, usually one per core)")
    add_number(parser, "--rounds", "measure each variant N times (default: 30)", 30)
    parser.add_argument("--device", metavar="NAME", help="run on this device: cpu, cuda, ... (default: cuda if available)")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="time torch.compile as well, which takes most of the time (default: on)",
    )


def run(options: argparse.Namespace) -> int:
    """Measure the network and print the table."""
    check_positive(options, "batch", "threads", "rounds")
    with needs_packages("loading a run", "train", "onnx"):
        from pwlu.lab.inference.benchmark import measure
        from pwlu.lab.inference.trained_network import load

        trained = load(options.run)
    if trained.detects:
        trained = trained.backbone()
    with join_process_group(options.device) as processes, _threads(options.threads):
        batch = options.batch or BATCH.get(processes.device.type, 64)
        found, calls = measure(trained, processes.device, batch, options.rounds, options.compile)
        print("\n".join([_title(trained, batch), _machine(environment(processes)), "", *_table(found, batch), ""]))
        print("\n".join(_notes(trained, options.rounds, calls)))
    return 0


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _title(trained: "TrainedNetwork", batch: int) -> str:
    settings = trained.settings
    part = ", backbone only" if trained.detects else ""
    return (
        f"{trained.path}: {settings.recipe}{part}, {len(trained.info.sites)} {settings.activation}, "
        f"batch of {batch}, images of {' x '.join(map(str, trained.info.shape))}, float32"
    )


def _machine(known: dict[str, Any]) -> str:
    pwlu = f"{known['pwlu']} {known['revision']}".strip()
    return (
        f"{known['device']}, {known['threads']} threads, {torch.backends.cpu.get_cpu_capability()}; python {known['python']}, "
        f"torch {known['torch']}, ONNX Runtime {version('onnxruntime') or 'none'}, pwlu {pwlu}"
    )


def _table(found: "list[Contender]", batch: int) -> list[str]:
    head = ("", "ms per batch", "p20", "p80", "images/s", "x ReLU")
    fastest = min(contender.times[1] for contender in found if contender.times)
    digits = max(0, 2 - math.floor(math.log10(fastest)))  # decimals that give the fastest time three significant digits
    rows = []
    for contender in found:
        if contender.times is None:
            rows.append((contender.name, *"-----"))
            continue
        low, middle, high = contender.times
        ratio = "-" if contender.ratio_to_relu is None else f"{contender.ratio_to_relu:.2f}"
        times = (f"{value:.{digits}f}" for value in (middle, low, high))
        rows.append((contender.name, *times, f"{batch / middle * 1e3:,.0f}", ratio))
    lines = columns(head, rows, numbers=True)
    return [*lines[:2], *(f"{line}  {contender.why}".rstrip() for line, contender in zip(lines[2:], found, strict=True))]


def _notes(trained: "TrainedNetwork", rounds: int, calls: int) -> list[str]:
    each = f"{calls} calls" if calls > 1 else "one call"
    notes = [f"Medians, p20 and p80 of {rounds} rounds of {each}. x ReLU: time divided by that of ReLU in the same runtime."]
    if trained.settings.activation == "relu":
        notes.append("This run uses ReLU, so there is nothing to compare. Choose a run of pwlu train --act pwlu.")
    return notes
