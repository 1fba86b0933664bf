"""Time PWLU's operators beside F.relu, F.silu, nn.PReLU and the plain torch formula, in one run.

Prints a table of medians, each with its ratio to ReLU, and writes p20/p50/p80 with device and versions as CSV.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import RESULTS, interleaved, keep_memory, machine, percentiles, write
from torch import Tensor, nn
from tqdm import tqdm

import pwlu
from pwlu import reference

FORMATS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def plain(act: pwlu.PWLU) -> Callable[[Tensor], Tensor]:
    """The formula in plain torch, differentiated by autograd."""
    return lambda x: reference.forward(x, *act.unit_parameters(), 1)


def competitors(channels: int, intervals: list[int], dtype: torch.dtype, slow: bool) -> dict[str, Callable[[Tensor], Tensor]]:
    """Everything that is timed, by name."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    units = {n: pwlu.PWLU(channels, n, init="silu").to(wide) for n in intervals}
    calls: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "silu": F.silu, "prelu": nn.PReLU(channels, dtype=dtype)}
    calls |= {f"pwlu N={n}": unit for n, unit in units.items()}
    for n in intervals[:1]:
        fused = pwlu.PWLU(channels, n, init="silu").to(wide).eval()
        pwlu.fuse_(fused)
        calls[f"pwlu N={n} fused"] = fused
        if slow:
            calls[f"plain torch N={n}"] = plain(units[n])
    return calls


def forward_and_backward(call: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Callable[[], Any]:
    """One step of training through the call, with the gradients of x and of all of its parameters."""
    leaves = [x.detach().clone().requires_grad_()]
    if isinstance(call, nn.Module):
        leaves += list(call.parameters())
    return lambda: torch.autograd.grad(call(leaves[0]), leaves, grad)


def measure(shape: list[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all formats and dtypes."""
    rows = []
    problems = [(f, d) for d in options.dtypes for f in options.formats]
    for name, dtype_name in tqdm(problems, desc="layouts x dtypes"):
        dtype = DTYPES[dtype_name]
        x = (2 * torch.randn(shape)).to(dtype).contiguous(memory_format=FORMATS[name])
        grad = torch.randn(shape).to(dtype).contiguous(memory_format=FORMATS[name])
        calls = competitors(shape[1], options.intervals, dtype, not options.fast)
        with torch.no_grad():
            times = {"forward": interleaved({n: partial(c, x) for n, c in calls.items()}, options.rounds)}
        training = {n: forward_and_backward(c, x, grad) for n, c in calls.items() if "fused" not in n}
        times["forward+backward"] = interleaved(training, options.rounds)
        for what, found in times.items():
            base = percentiles(found["relu"])["p50_ms"]
            for call, each in found.items():
                row = {"what": what, "call": call, "shape": "x".join(map(str, shape)), "layout": name, "dtype": dtype_name}
                rows.append(row | percentiles(each) | {"x_relu": percentiles(each)["p50_ms"] / base} | machine())
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """A Markdown table: a line a call, a column a layout and pass."""
    columns = list(dict.fromkeys((r["dtype"], r["layout"], r["what"]) for r in rows))
    cells = {(r["call"], r["dtype"], r["layout"], r["what"]): f"{r['p50_ms']:.2f} ({r['x_relu']:.2f})" for r in rows}
    print("| ms (x ReLU) | " + " | ".join(f"{d} {layout} {what}" for d, layout, what in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for call in dict.fromkeys(r["call"] for r in rows):
        print(f"| {call} | " + " | ".join(cells.get((call, *column), "") for column in columns) + " |")


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape",
        type=int,
        nargs=4,
        default=[32, 64, 56, 56],
        metavar=("B", "C", "H", "W"),
        help="default: 6.4 million elements, as after the first stage of a ResNet-18",
    )
    parser.add_argument(
        "--intervals", type=int, nargs="+", default=[16, 4, 64], help="N; the first also fused and in plain torch"
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32"], help="default: float32")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="default: both")
    parser.add_argument("--rounds", type=int, default=40, help="measurements of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: all of torch's")
    parser.add_argument("--fast", action="store_true", help="without the plain torch formula, which takes most of the time")
    parser.add_argument("--output", type=Path, default=RESULTS / "op-cpu.csv", help="default: %(default)s")
    options = parser.parse_args()
    keep_memory()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = measure(options.shape, options)
    show(rows)
    write(options.output, rows)


if __name__ == "__main__":
    main()
