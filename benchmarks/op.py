"""Time PWLU's operators beside F.relu, F.silu, nn.PReLU and the plain PyTorch formula, in one run.

Print medians with their ratio to ReLU, and write p20/p50/p80 with device and versions as CSV. On a GPU, time the GPU's work
alone by replaying CUDA graphs (benchmarks/overhead.py times Python), and compile the plain formula.
"""

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timing import RESULTS, keep_memory, machine, time_on_gpu, write
from torch import Tensor, nn
from tqdm import tqdm

import pwlu
from pwlu import ops, reference
from pwlu.lab.inference.timing import interleaved, percentiles

LAYOUTS = ("NCHW", "channels_last", "BTC")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

# On a CPU, the shape in the first stage of a ResNet-18. On a GPU, 51 million elements and the late layers of ResNets.
CPU_SHAPES = [(32, 64, 56, 56)]
GPU_SHAPES = [(64, 256, 56, 56), (256, 512, 7, 7), (64, 512, 14, 14), (64, 256, 14, 14), (32, 512, 8, 8)]
LARGE = 50_000_000


class Problem(NamedTuple):
    """An input to time: its shape (B, C, H, W), memory layout and type. With the layout BTC, the shape is (B, H W, C)."""

    shape: tuple[int, ...]
    layout: str
    dtype: str

    @property
    def channel_dim(self) -> int:
        """Return the dimension of the channels."""
        return -1 if self.layout == "BTC" else 1

    def random(self, device: str) -> Tensor:
        """Return normally distributed numbers in this layout."""
        x = torch.randn(self.shape, device=device).to(DTYPES[self.dtype])
        if self.layout == "BTC":
            return x.flatten(2).transpose(1, 2).contiguous()
        return x.contiguous(memory_format=torch.channels_last if self.layout == "channels_last" else torch.contiguous_format)


class Plain(nn.Module):
    """The formula in plain PyTorch, differentiated by autograd."""

    def __init__(self, act: pwlu.PWLU) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """Compute the same as PWLU."""
        return reference.forward(x, *reference.unpack(self.act.weight, self.act.intervals), self.act.channel_dim)


def competitors(problem: Problem, options: argparse.Namespace) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the calls to time by name."""
    channels, dim, dtype = problem.shape[1], problem.channel_dim, DTYPES[problem.dtype]
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def unit(intervals: int) -> pwlu.PWLU:
        return pwlu.PWLU(channels, intervals, init="silu", channel_dim=dim).to(options.device, wide)

    calls: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "silu": F.silu}
    if dim == 1:
        calls["prelu"] = nn.PReLU(channels, dtype=dtype, device=options.device)
    first, *others = options.intervals
    act = unit(first)
    calls[f"pwlu N={first}"] = act
    if options.device == "cpu" or torch.Size(problem.shape).numel() >= LARGE:
        calls |= {f"pwlu N={n}": unit(n) for n in others}
    if options.nonuniform:
        for n in options.intervals:
            calls[f"nonuniform N={n}"] = pwlu.NonUniformPWLU.from_uniform(unit(n))
    fused = unit(first).eval()
    pwlu.fuse_(fused)
    calls[f"pwlu N={first} fused"] = fused
    calls[f"pwlu N={first} with moments"] = lambda x: ops.observe(x, act.weight, first, dim, act.statistics.pool)
    large = problem.shape == GPU_SHAPES[0] and problem.layout == "NCHW" and problem.dtype != "float16"
    if not options.fast and (options.device == "cpu" or large):  # compiling takes half a minute
        if options.device == "cpu":
            calls[f"plain torch N={first}"] = Plain(act)
        else:
            torch._dynamo.reset()
            calls[f"compiled formula N={first}"] = torch.compile(Plain(act))
    return calls


def forward_and_backward(call: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Callable[[], Any]:
    """Return a function that runs forward and backward, with the gradients of x and of all parameters."""
    leaves = [x.detach().clone().requires_grad_()]
    if isinstance(call, nn.Module):
        leaves += list(call.parameters())
    return lambda: torch.autograd.grad(call(leaves[0]), leaves, grad)


def measure(problem: Problem, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one problem."""
    x, grad = 2 * problem.random(options.device), problem.random(options.device)
    time = interleaved if options.device == "cpu" else partial(time_on_gpu, inner=1 if x.numel() >= LARGE else 10)
    calls = competitors(problem, options)
    with torch.no_grad():
        times = {"forward": time({n: partial(c, x) for n, c in calls.items()}, options.rounds)}
    training = {n: c for n, c in calls.items() if "fused" not in n and "moments" not in n}
    times["forward+backward"] = time({n: forward_and_backward(c, x, grad) for n, c in training.items()}, options.rounds)
    rows = []
    for what, found in times.items():
        base = percentiles(found["relu"])["p50_ms"]
        for call, each in found.items():
            row: dict[str, Any] = {"what": what, "call": call, "shape": "x".join(map(str, problem.shape))}
            row |= {"layout": problem.layout, "dtype": problem.dtype} | percentiles(each)
            rows.append(row | {"x_relu": percentiles(each)["p50_ms"] / base} | machine(options.device))
    return rows


def held_for_backward(device: str) -> float:
    """Return the memory that a PWLU keeps for the backward pass, as a multiple of the memory of x."""
    x = torch.randn(64, 256, 56, 56, device=device)
    act = pwlu.PWLU(256).to(device)
    act(x)
    before = torch.cuda.memory_allocated()
    y = act(x.requires_grad_())
    after = torch.cuda.memory_allocated()
    return (after - before - y.numel() * y.element_size() + x.numel() * x.element_size()) / (x.numel() * x.element_size())


def show(rows: list[dict[str, Any]]) -> None:
    """Print a Markdown table per shape, with a row per call and a column per layout and pass."""
    for shape in dict.fromkeys(r["shape"] for r in rows):
        here = [r for r in rows if r["shape"] == shape]
        columns = list(dict.fromkeys((r["dtype"], r["layout"], r["what"]) for r in here))
        cells = {(r["call"], r["dtype"], r["layout"], r["what"]): f"{r['p50_ms']:.4g} ({r['x_relu']:.2f})" for r in here}
        print(f"\n| {shape}, ms (x ReLU) | " + " | ".join(f"{d} {layout} {what}" for d, layout, what in columns) + " |")
        print("|---|" + "---|" * len(columns))
        for call in dict.fromkeys(r["call"] for r in here):
            print(f"| {call} | " + " | ".join(cells.get((call, *column), "") for column in columns) + " |")


def problems(options: argparse.Namespace) -> Iterable[Problem]:
    """Return all combinations of shapes, types and layouts."""
    shapes = [tuple(options.shape)] if options.shape else CPU_SHAPES if options.device == "cpu" else GPU_SHAPES
    layouts = options.layouts or (LAYOUTS[:2] if options.device == "cpu" else LAYOUTS)
    dtypes = options.dtypes or (["float32"] if options.device == "cpu" else ["float32", "bfloat16", "float16"])
    return [Problem(s, layout, d) for s in shapes for d in dtypes for layout in layouts]


def main() -> None:
    """Parse the command line, measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="run on this device (default: %(default)s)")
    parser.add_argument(
        "--shape",
        type=int,
        nargs=4,
        metavar=("B", "C", "H", "W"),
        help="use this input shape (default: 6.4 million elements on a CPU; 51 million and late layers of ResNets on a GPU)",
    )
    parser.add_argument(
        "--intervals",
        type=int,
        nargs="+",
        default=[16, 4, 64],
        help="use these numbers of intervals; time the first also fused, with moments and as plain formula (default: 16 4 64)",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        help="compute in these types (default: float32; on a GPU also bfloat16 and float16)",
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=LAYOUTS,
        help="use these memory layouts (default: NCHW and channels_last; on a GPU also BTC)",
    )
    parser.add_argument(
        "--nonuniform", action="store_true", help="also time non-uniform PWLUs with these intervals (default: off)"
    )
    parser.add_argument("--rounds", type=int, default=40, help="measure each variant this many times (default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="use this many CPU threads (default: PyTorch's choice)"
    )
    parser.add_argument(
        "--fast", action="store_true", help="skip the plain formula, which takes most of the time (default: off)"
    )
    parser.add_argument("--output", type=Path, help="write results to this file (default: op-DEVICE.csv in benchmarks/results)")
    options = parser.parse_args()
    if options.device == "cpu":
        keep_memory()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = [row for problem in tqdm(problems(options), desc="problems") for row in measure(problem, options)]
    show(rows)
    if options.device == "cuda":
        print(f"\nheld for backward: {held_for_backward(options.device):.3f} x the memory of x")
    write(options.output or RESULTS / f"op-{options.device}.csv", rows)


if __name__ == "__main__":
    main()
