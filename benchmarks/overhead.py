"""Time eager calls on a small tensor, where Python and the dispatcher take most of the time, beside nn.SiLU and nn.PReLU.

Forward and backward are timed for one call, and for a chain of eight calls divided by eight. The chain is closer to networks:
on a GPU, another thread runs the backward pass, and waking it takes longer than the rest. Times are in microseconds. For
comparison, time the operator with derivatives registered by torch.library.register_autograd, which pwlu does not use.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import RESULTS, machine, write
from torch import Tensor

import pwlu
from pwlu import ops
from pwlu.kernels import dispatch
from pwlu.lab.inference.timing import interleaved, percentiles


def registered() -> Callable[..., Tensor]:
    """Return a copy of pwlu::forward whose derivative is registered by torch.library.register_autograd, which is slower."""
    library = torch.library.Library("pwlu_overhead", "DEF")
    library.define(f"forward{ops._SCHEMAS['forward']}")
    library.impl("forward", dispatch.forward, "CompositeExplicitAutograd")
    operator = torch.ops.pwlu_overhead.forward.default

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.rest = inputs[2:]

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*ops.backward(grad, *ctx.saved_tensors, *ctx.rest, True, True), None, None)

    torch.library.register_autograd("pwlu_overhead::forward", backward, setup_context=setup, lib=library)
    registered.library = library  # type: ignore[attr-defined]  # the operator exists as long as its library
    return operator


CHAIN = 8


def step(call: Callable[[Tensor], Tensor], length: int, x: Tensor, parameters: Sequence[Tensor], grad: Tensor) -> Any:
    """Run forward and backward through a chain of `length` calls."""
    y = x
    for _ in range(length):
        y = call(y)
    return torch.autograd.grad(y, [x, *parameters], grad)


def main() -> None:
    """Parse the command line, measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds",
        type=int,
        default=50,
        help="measure each variant this many times, with 200 calls each (default: %(default)s)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="run on this device (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, help="write results to this file (default: overhead-DEVICE.csv in benchmarks/results)"
    )
    options = parser.parse_args()
    # A GPU needs no more time for 100,000 elements than for a few.
    x = torch.randn((8, 8) if options.device == "cpu" else (8, 64, 14, 14), device=options.device, requires_grad=True)
    act = pwlu.PWLU(x.shape[1]).to(options.device)
    prelu = torch.nn.PReLU(x.shape[1]).to(options.device)
    arguments, slow, kernel = (act.weight, act.intervals, 1), registered(), dispatch.kernel_of(x)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "nn.SiLU": torch.nn.SiLU(),
        "nn.PReLU": prelu,
        "PWLU": act,
        "operator alone": lambda x: ops.forward(x, *arguments),
        "operator with register_autograd": lambda x: slow(x, *arguments),
    }
    learned = {"nn.SiLU": (), "nn.PReLU": (prelu.weight,)}
    steps = {name: (call, learned.get(name, (act.weight,))) for name, call in calls.items()}
    if kernel is not None:
        calls["kernel from Python"] = lambda x: kernel.forward(x.detach(), *arguments)
    time = partial(interleaved, rounds=options.rounds, wait=None if options.device == "cpu" else torch.cuda.synchronize)
    forward = {name: partial(call, x) for name, call in calls.items()}
    times = {"forward": time(forward, inner=200)}
    with torch.no_grad():
        times["forward, no gradient"] = time(forward, inner=200)
    for length, what in ((1, "forward+backward"), (CHAIN, f"forward+backward, in a chain of {CHAIN}")):
        training = {name: partial(step, call, length, x, leaves, torch.randn_like(x)) for name, (call, leaves) in steps.items()}
        found = time(training, inner=200 // length)
        times[what] = {name: [each / length for each in milliseconds] for name, milliseconds in found.items()}
    rows = []
    for what, found in times.items():
        base = percentiles(found["nn.SiLU"])["p50_ms"]
        print(f"\n{what}")
        for name, each in found.items():
            middle = percentiles(each)["p50_ms"]
            print(f"  {name:<34}{1e3 * middle:8.2f} us  {middle / base:6.2f} x silu")
            rows.append({"what": what, "call": name, **percentiles(each), "x_silu": middle / base, **machine(options.device)})
    write(options.output or RESULTS / f"overhead-{options.device}.csv", rows)


if __name__ == "__main__":
    main()
