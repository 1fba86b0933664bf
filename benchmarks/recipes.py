"""Time training steps of the recipes of pwlu train on random images, and write a CSV file.

A step is what pwlu train computes after the images are on the device: forward and backward pass, optimizer, learning phases and
schedule, in Phase II. On a GPU, each recipe trains in bfloat16, in eager mode and with --cuda-graphs. "on the GPU" is the time
for which the GPU is busy. --kernels prints the kernels that take most of it.

    python benchmarks/recipes.py cifar100/resnet18 --kernels
    python benchmarks/recipes.py --jobs 1 16 --mps          # also 16 processes at a time, as pwlu compare --jobs 16 --mps
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import RESULTS, gpu_busy_ms, machine, write
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from pwlu.lab.compare.mps import multi_process_service
from pwlu.lab.data.datasets import Data
from pwlu.lab.data.images import in_memory
from pwlu.lab.inference.timing import interleaved, percentiles
from pwlu.lab.recipes import catalog
from pwlu.lab.runs.processes import Processes
from pwlu.lab.tasks.classification import Classification
from pwlu.lab.tasks.task import Task
from pwlu.lab.training.trainer import Trainer

RECIPES = (
    *("cifar100/resnet18", "cifar100/mobilenet_v3_small", "cifar100/efficientnet_b0"),
    *("imagenette/resnet18", "imagenette/mobilenet_v2", "tinyimagenet/resnet18", "tinyimagenet/mobilenet_v3_small"),
)
CHANGES: dict[str, dict[str, Any]] = {  # activations by the name in the table
    "relu": {"activation": "relu"},
    "pwlu": {"activation": "pwlu"},
    'pwlu, rule="shared"': {"activation": "pwlu", "rule": "shared"},
    "dynamic_pwlu": {"activation": "dynamic_pwlu"},
}
MODES = {"eager": False, "CUDA graph": True}
CLASSES, STEPS = 100, 4  # classes, and different batches
SECONDS = 5.0  # for which processes side by side are timed


class RandomImages(Classification):
    """Classification of random images in the memory of the device."""

    def __init__(self, settings: Any, processes: Processes) -> None:
        Task.__init__(self, settings, processes)
        shape = (STEPS * settings.batch, 3, settings.pixels, settings.pixels)
        images, labels = torch.randint(256, shape, dtype=torch.uint8), torch.randint(CLASSES, shape[:1])
        train, test = in_memory(images, labels, images[:2], labels[:2], processes.device, padding=0, flip=False)
        self.data = Data(train, test, [str(label) for label in range(CLASSES)], 3, "random images")
        self.plan_steps(len(images))
        self.classes, self.channels = self.data.classes, 3


def stepper(recipe: str, changes: dict[str, Any], graph: bool, device: str) -> Callable[[], None]:
    """Return a function that takes a training step in Phase II."""
    torch.manual_seed(0)
    cuda = device == "cuda"
    settings = catalog.settings(
        recipe,
        **changes,
        realign_epochs=1 / STEPS,
        cuda_graphs=graph,
        precision="bf16" if cuda else "float32",
        channels_last=cuda,
        device=device,
        epochs=10**5,  # so that the schedule does not end
    )
    processes = Processes(0, 1, torch.device(device))
    task = RandomImages(settings, processes)
    trainer = Trainer(task, settings, processes)
    batches, done = list(task.epoch(0)), 0

    def step() -> None:
        nonlocal done
        trainer.step(done, batches[done % STEPS])
        done += 1

    for _ in range(2 * STEPS):  # through Phase I and the capture of graphs
        step()
    return step


def print_kernels(step: Callable[[], None], most: int = 15) -> None:
    """Print the kernels of a step that keep the GPU busy for longest."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    rows = [row for row in found.key_averages() if row.device_type == DeviceType.CUDA]
    rows.sort(key=lambda row: -row.self_device_time_total)
    print(f"    {sum(row.count for row in rows) / 3:.0f} kernels and copies per step")
    for row in rows[:most]:
        print(f"    {row.self_device_time_total / 3e3:8.3f} ms  {row.count / 3:5.0f} x  {row.key[:100]}")


def measure(recipe: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each activation and mode."""
    modes = MODES if options.device == "cuda" else {"eager": False}
    calls = {
        (act, mode): stepper(recipe, CHANGES[act], graph, options.device)
        for act in options.activations
        for mode, graph in modes.items()
    }
    wait = torch.cuda.synchronize if options.device == "cuda" else None
    times = interleaved({json.dumps(key): call for key, call in calls.items()}, options.rounds, inner=5, wait=wait)
    rows, batch = [], catalog.find(recipe).batch
    for (act, mode), call in calls.items():
        found = percentiles(times[json.dumps((act, mode))])
        busy = gpu_busy_ms(call) if options.device == "cuda" else None
        row = {"recipe": recipe, "batch": batch, "activation": act, "mode": mode, "jobs": 1, **found, "gpu_ms": busy}
        rows.append(row | {"images_per_second": round(1e3 * batch / found["p50_ms"])})
        on_gpu = "" if busy is None else f", {busy:.2f} ms on the GPU"
        print(
            f"{recipe}, {act}, {mode}: {found['p50_ms']:.2f} ms{on_gpu}, {rows[-1]['images_per_second']:,} images/s", flush=True
        )
        if options.kernels and options.device == "cuda":
            print_kernels(call)
    return rows


def steps_in_time(recipe: str, act: str, mode: str, device: str) -> None:
    """Take steps for some seconds after the parent process writes a line, and print the milliseconds per step."""
    step = stepper(recipe, CHANGES[act], MODES[mode], device)
    print("ready", flush=True)
    sys.stdin.readline()
    begin, steps = time.monotonic(), 0
    while time.monotonic() - begin < SECONDS:
        for _ in range(5):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
        steps += 5
    print(1e3 * (time.monotonic() - begin) / steps)


def side_by_side(recipe: str, act: str, mode: str, jobs: int, device: str) -> dict[str, Any]:
    """Return a row for a number of processes that train at the same time."""
    command = [sys.executable, __file__, "--child", json.dumps([recipe, act, mode, device])]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children: list[subprocess.Popen[Any]] = [
        subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes) for _ in range(jobs)
    ]
    for child in children:
        assert child.stdout is not None
        while child.stdout.readline() not in ("ready\n", ""):  # "": it failed
            pass
    for child in children:  # all start now; communicate() would wait for each of them in turn
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    times = [float(child.communicate()[0].split()[-1]) for child in children]
    batch, found = catalog.find(recipe).batch, percentiles(times)
    speed = round(sum(1e3 * batch / each for each in times))
    print(f"{recipe}, {act}, {mode}, {jobs} processes: {found['p50_ms']:.2f} ms each, {speed:,} images/s together", flush=True)
    row = {"recipe": recipe, "batch": batch, "activation": act, "mode": mode, "jobs": jobs, **found, "gpu_ms": None}
    return row | {"images_per_second": speed}


def main() -> None:
    """Parse the command line, measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "recipes", nargs="*", default=RECIPES, metavar="RECIPE", help=f"time these (default: {', '.join(RECIPES)})"
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default=device, help="run on this device (default: cuda if available)"
    )
    names = ", ".join(CHANGES)
    parser.add_argument(
        "--activations", nargs="*", choices=list(CHANGES), default=["relu", "pwlu"], help=f"of {names} (default: relu pwlu)"
    )
    parser.add_argument("--rounds", type=int, default=20, help="measure each step this many times (default: %(default)s)")
    parser.add_argument("--jobs", type=int, nargs="*", default=[1], help="train so many processes at a time (default: 1)")
    parser.add_argument("--mps", action="store_true", help="start NVIDIA's multi-process service for them (default: off)")
    parser.add_argument("--kernels", action="store_true", help="print the slowest kernels (default: off)")
    parser.add_argument(
        "--output", type=Path, help="write results to this file (default: recipes-DEVICE.csv in benchmarks/results)"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        steps_in_time(*json.loads(options.child))
        return
    rows = [row for recipe in options.recipes for row in (measure(recipe, options) if 1 in options.jobs else ())]
    several = [jobs for jobs in options.jobs if jobs > 1]
    with multi_process_service() if several and options.mps else contextlib.nullcontext():
        for recipe in options.recipes:
            for jobs in several:
                for mode in MODES if options.device == "cuda" else ("eager",):
                    rows += map(partial(side_by_side, recipe, mode=mode, jobs=jobs, device=options.device), options.activations)
    write(options.output or RESULTS / f"recipes-{options.device}.csv", [row | machine(options.device) for row in rows])


if __name__ == "__main__":
    main()
