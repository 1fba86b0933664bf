"""Time a training step of small CIFAR-100 networks: PWLUs alone, with pwlu.curvature in the loss, and with rule="shared".

The networks are those of the recipes, MobileNet-V3-small x 0.5 and ResNet-18 x 0.25, with SGD and momentum, in Phase II. On a
GPU they train in bfloat16 with channels_last. "rule alone" is what the rule adds to a step, timed without the rest.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import RESULTS, machine, write
from torch import Tensor, nn

import pwlu
from pwlu.lab.inference.timing import interleaved, percentiles
from pwlu.lab.models import unconverted
from pwlu.lab.recipes import catalog
from pwlu.learning.shared_rule import SharedRule, share_gradients_, smooth_
from pwlu.units.module import units_of

NETWORKS = ("mobilenet_v3_small", "resnet18")
KINDS = ("pwlu", "curvature in the loss", 'rule="shared"')


def trained(name: str, kind: str, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network in Phase II, and its optimizer."""
    torch.manual_seed(0)
    settings = catalog.settings(f"cifar100/{name}")
    model = unconverted.network(settings, 100, 3)
    pwlu.convert_(model, unconverted.sample(settings, 3), init="relu")
    layout = torch.channels_last if device == "cuda" else torch.contiguous_format
    model = model.to(device, memory_format=layout).train()  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(pwlu.parameter_groups(model, lr=1e-3), lr=1e-3, momentum=0.9)
    for unit in units_of(model).values():
        unit.statistics.realigned.fill_(True)
    pwlu.TwoPhase(model, optimizer, 1, rule="shared" if kind == KINDS[2] else "paper")
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str, x: Tensor, labels: Tensor) -> None:
    """Take one training step."""
    optimizer.zero_grad()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.device.type == "cuda"):
        loss = nn.functional.cross_entropy(model(x), labels)
    if kind == KINDS[1]:
        loss = loss + 0.001 * pwlu.curvature(model)
    loss.backward()
    optimizer.step()


def rule_alone(rule: SharedRule, units: list[pwlu.PWLU], optimizer: torch.optim.Optimizer) -> None:
    """Do what the rule does before and after the step of the optimizer."""
    smooth_(rule, share_gradients_(rule, units, optimizer), optimizer)


def main() -> None:
    """Parse the command line, measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="run on this device (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="train on this many images per step (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="measure each step this many times (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, help="write results to this file (default: learning-rule-DEVICE.csv in benchmarks/results)"
    )
    options = parser.parse_args()
    wait = torch.cuda.synchronize if options.device == "cuda" else None
    rows: list[dict[str, Any]] = []
    for name in NETWORKS:
        x = torch.randn(options.batch, 3, 32, 32, device=options.device)
        labels = torch.randint(100, (options.batch,), device=options.device)
        calls: dict[str, Callable[[], Any]] = {}
        for kind in KINDS:
            model, optimizer = trained(name, kind, options.device)
            calls[kind] = partial(step, model, optimizer, kind, x, labels)
            calls[kind]()
        calls["rule alone"] = partial(rule_alone, SharedRule(), list(units_of(model).values()), optimizer)
        times = interleaved(calls, options.rounds, wait=wait)
        base = percentiles(times["pwlu"])["p50_ms"]
        functions = sum(unit.channels for unit in units_of(model).values())
        print(f"\n{name}: {len(units_of(model))} PWLUs, {functions} functions")
        for kind, each in times.items():
            found = percentiles(each)
            print(f"  {kind:<24}{found['p50_ms']:10.3f} ms  {100 * found['p50_ms'] / base:7.2f} % of a step with PWLUs alone")
            row = {"network": name, "batch": options.batch, "call": kind, **found, "x_pwlu": found["p50_ms"] / base}
            rows.append(row | machine(options.device))
    write(options.output or RESULTS / f"learning-rule-{options.device}.csv", rows)


if __name__ == "__main__":
    main()
