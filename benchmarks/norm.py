"""Time a batch norm and the activation behind it, with and without a residual addition: ReLU, SiLU, PWLU, and fused PWLU.

Time the forward pass, and forward and backward, in training mode. On a GPU, only the GPU's work is timed, by replaying CUDA
graphs. Each time is printed with the smallest number of passes over the tensor: reading or writing it once is one pass.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import RESULTS, keep_memory, machine, time_on_gpu, write
from torch import Tensor, nn
from tqdm import tqdm

import pwlu
from pwlu.lab.inference.timing import interleaved, percentiles
from pwlu.ops import norm as norm_ops

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPES = [
    (128, 64, 112, 112),
    (128, 256, 56, 56),
    (128, 512, 28, 28),
    (128, 1024, 14, 14),
    (128, 2048, 7, 7),
    (128, 96, 14, 14),
]
CPU_SHAPES = [(32, 64, 56, 56), (32, 256, 28, 28), (32, 512, 14, 14), (32, 512, 7, 7), (8, 96, 14, 14)]
# (forward, forward and backward): without an addition, with an addition
PASSES = {
    "relu": ((5, 13), (8, 16)),
    "silu": ((5, 13), (8, 16)),
    "pwlu": ((5, 13), (8, 16)),
    "pwlu, one pass": ((3, 8), (4, 11)),
}


class Site(nn.Module):
    """A batch norm, an addition if there is a residual, and an activation."""

    def __init__(self, kind: str, channels: int) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.BatchNorm2d(channels)
        self.unit = pwlu.PWLU(channels, init="silu") if "pwlu" in kind else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the output of the activation."""
        norm = self.norm
        if self.kind == "pwlu, one pass":
            assert self.unit is not None
            running = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
            state = (norm.weight, norm.bias, *running, 0.1, norm.eps, True, None)
            return norm_ops.norm_act(x, residual, self.unit.weight, self.unit.intervals, *state)[0]
        z = norm(x)
        if residual is not None:
            z = z + residual
        if self.unit is not None:
            return self.unit(z)
        return F.relu(z, inplace=True) if self.kind == "relu" else F.silu(z)


def forward_and_backward(site: Site, grad: Tensor, *inputs: Tensor) -> Callable[[], Any]:
    """Return a function that runs the forward and backward pass of the site."""
    leaves = [*(x.detach().clone().requires_grad_() for x in inputs), *site.parameters()]
    return lambda: torch.autograd.grad(site(*leaves[: len(inputs)]), leaves, grad)


def measure(shape: tuple[int, ...], dtype: str, layout: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one shape."""
    fmt = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    x, residual, grad = (
        torch.randn(shape, device=options.device).to(dtype=DTYPES[dtype]).contiguous(memory_format=fmt) for _ in range(3)
    )
    rows = []
    for added in (False, True):
        inputs = (x, residual) if added else (x,)
        sites = {kind: Site(kind, shape[1]).to(options.device) for kind in PASSES}
        if options.device == "cuda":
            timer = partial(time_on_gpu, rounds=options.rounds, inner=1 if x.numel() > 1e7 else 10)
        else:
            clock = time.process_time if options.cpu_time else time.perf_counter
            timer = partial(interleaved, rounds=options.rounds, inner=1 if x.numel() > 1e6 else 10, clock=clock)
        with torch.no_grad():
            times = {"forward": timer({kind: partial(site, *inputs) for kind, site in sites.items()})}
        times["forward+backward"] = timer({kind: forward_and_backward(site, grad, *inputs) for kind, site in sites.items()})
        for which, (what, found) in enumerate(times.items()):
            base = percentiles(found["relu"])["p50_ms"]
            for kind, each in found.items():
                row: dict[str, Any] = {"what": what, "call": kind, "shape": "x".join(map(str, shape)), "layout": layout}
                row |= {"dtype": dtype, "added": added, "passes": PASSES[kind][added][which]} | percentiles(each)
                row |= {"x_relu": row["p50_ms"] / base}
                row["tb_per_s"] = row["passes"] * x.numel() * x.element_size() / row["p50_ms"] / 1e9
                rows.append(row | {"clock": "cpu" if options.cpu_time else "wall"} | machine(options.device))
    return rows


def main() -> None:
    """Parse the command line, measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", type=int, nargs=4, metavar=("B", "C", "H", "W"), help="use this input shape (default: those of a ResNet-50)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="run on this device (default: %(default)s)")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time, with one thread on a busy CPU")
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, default=["bfloat16"], help="compute in these types (default: bfloat16)"
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=("NCHW", "channels_last"),
        default=["channels_last"],
        help="use these memory formats (default: channels_last)",
    )
    parser.add_argument("--rounds", type=int, default=20, help="measure each variant this many times (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write results to this file (default: results/norm-DEVICE.csv)")
    options = parser.parse_args()
    if options.device == "cpu":
        keep_memory()
    shapes = [tuple(options.shape)] if options.shape else SHAPES if options.device == "cuda" else CPU_SHAPES
    problems = [(s, d, layout) for s in shapes for d in options.dtypes for layout in options.layouts]
    rows = [row for s, d, layout in tqdm(problems, desc="shapes") for row in measure(s, d, layout, options)]
    for r in rows:
        print(
            f"{r['shape']:>18} {r['layout']:13} {r['dtype']:8} {'added' if r['added'] else 'alone'} {r['what']:16}"
            f" {r['call']:14}"
            f" {1e3 * r['p50_ms']:8.1f} us  {r['x_relu']:.3f} x ReLU  {r['passes']:2} passes  {r['tb_per_s']:.2f} TB/s"
        )
    write(options.output or RESULTS / f"norm-{options.device}.csv", rows)


if __name__ == "__main__":
    main()
