"""Time a stack of convolution, batch norm and activation: ReLU, SiLU and PWLU, in inference and training, eager and compiled.

For inference PWLU is fused, in two ways: as torch.compile sees it, aten operators that melt into their neighbours ("melted"),
and as the operator pwlu::lookup, which the compiler cannot see into ("kernel").
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import RESULTS, interleaved, machine, percentiles, write
from torch import Tensor, nn
from tqdm import tqdm

import pwlu
from pwlu import ops


class ByKernel(nn.Module):
    """A fused unit that always calls the operator."""

    def __init__(self, fused: pwlu.FusedPWLU) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        """As FusedPWLU."""
        unit = self.fused
        return ops.lookup(x, unit.left, unit.inv_step, unit.slopes, unit.offsets, unit.channel_dim)


def stack(activation: Callable[[], nn.Module], options: argparse.Namespace) -> nn.Sequential:
    """`depth` times convolution, batch norm, activation."""
    channels = options.shape[1]
    layers = [
        layer
        for _ in range(options.depth)
        for layer in (nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), activation())
    ]
    return nn.Sequential(*layers).to(options.device).to(memory_format=options.memory_format)


def by_kernel(model: nn.Sequential) -> nn.Sequential:
    """The same model, its fused units hidden from the compiler."""
    return nn.Sequential(*(ByKernel(m) if isinstance(m, pwlu.FusedPWLU) else m for m in model))


def inference(options: argparse.Namespace) -> dict[str, nn.Module]:
    """Models to run forward."""
    models: dict[str, nn.Module] = {"relu": stack(nn.ReLU, options), "silu": stack(nn.SiLU, options)}
    for model in models.values():
        model.eval()
    melted = stack(partial(pwlu.PWLU, options.shape[1], init="silu"), options).eval()
    models["pwlu, not fused"] = stack(partial(pwlu.PWLU, options.shape[1], init="silu"), options).eval()
    pwlu.fuse_(melted)
    models["pwlu fused, melted"] = melted
    models["pwlu fused, kernel"] = by_kernel(melted)
    return models


def training(options: argparse.Namespace) -> dict[str, nn.Module]:
    """Models to run forward and backward."""
    return {
        "relu": stack(nn.ReLU, options),
        "silu": stack(nn.SiLU, options),
        "prelu": stack(partial(nn.PReLU, options.shape[1]), options),
        "pwlu": stack(partial(pwlu.PWLU, options.shape[1], init="silu"), options),
    }


def run(model: Any, x: Tensor, dtype: torch.dtype, train: bool) -> None:
    """One pass."""
    with torch.autocast(x.device.type, dtype=dtype, enabled=dtype != torch.float32):
        y = model(x)
    if train:
        y.float().square().mean().backward()
        model.zero_grad()


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all modes."""
    x = torch.randn(options.shape, device=options.device).to(memory_format=options.memory_format)
    wait = torch.cuda.synchronize if options.device == "cuda" else None
    rows = []
    modes = [(train, compiled, dtype) for train in (False, True) for compiled in (False, True) for dtype in options.dtypes]
    for train, compiled, name in tqdm(modes, desc="modes"):
        models = training(options) if train else inference(options)
        torch._dynamo.reset()
        calls = {
            n: partial(run, torch.compile(m, fullgraph=True) if compiled else m, x, getattr(torch, name), train)
            for n, m in models.items()
        }
        with torch.set_grad_enabled(train):
            times = interleaved(calls, options.rounds, wait=wait)
        base = percentiles(times["relu"])["p50_ms"]
        for call, each in times.items():
            row: dict[str, Any] = {"what": "training" if train else "inference", "mode": "compiled" if compiled else "eager"}
            row |= {"call": call, "dtype": name, "shape": "x".join(map(str, options.shape)), "depth": options.depth}
            rows.append(row | percentiles(each) | {"x_relu": percentiles(each)["p50_ms"] / base} | machine(options.device))
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """A Markdown table: a line a call, a column a mode."""
    columns = list(dict.fromkeys((r["what"], r["mode"], r["dtype"]) for r in rows))
    cells = {(r["call"], r["what"], r["mode"], r["dtype"]): f"{r['p50_ms']:.3f} ({r['x_relu']:.2f})" for r in rows}
    print("| ms (x ReLU) | " + " | ".join(" ".join(column) for column in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for call in dict.fromkeys(r["call"] for r in rows):
        print(f"| {call} | " + " | ".join(cells.get((call, *column), "") for column in columns) + " |")


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="default: %(default)s")
    parser.add_argument("--shape", type=int, nargs=4, default=[64, 128, 56, 56], metavar=("B", "C", "H", "W"))
    parser.add_argument("--depth", type=int, default=8, help="layers (default: %(default)s)")
    parser.add_argument("--channels-last", action="store_true", help="memory format; default: NCHW")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="bfloat16: autocast; default: both")
    parser.add_argument("--rounds", type=int, default=30, help="measurements of each (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="default: model-DEVICE.csv in benchmarks/results")
    options = parser.parse_args()
    options.memory_format = torch.channels_last if options.channels_last else torch.contiguous_format
    torch.manual_seed(0)
    rows = measure(options)
    show(rows)
    write(options.output or RESULTS / f"model-{options.device}.csv", rows)


if __name__ == "__main__":
    main()
