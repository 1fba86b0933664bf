"""Time networks with their own activation, SiLU and PWLU side by side: inference, training steps, memory, conversion.

inference   ResNet-18 and MobileNet-V3-small with fused PWLUs: eager and compiled, float32 and bfloat16 channels_last. Compiled
            networks are timed in two ways: with aten operators, which torch.compile fuses with their neighbours, and with the
            operator pwlu::lookup, which it cannot see into ("kernel").
training    a training step of timm's networks with SGD, bfloat16 autocast, channels_last, beside the same network with its own
            activation and with SiLU: eager or compiled, Phase I and Phase II, batch norms separate or fused with PWLUs. Also
            the time after which the host has launched all work, and the peak memory above that between steps.
conversion  seconds that pwlu.convert_ takes for several models.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from timing import RESULTS, gpu_busy_ms, machine, time_on_gpu, write
from torch import Tensor, nn
from tqdm import tqdm

import pwlu
from pwlu import ops
from pwlu.lab.inference.timing import interleaved, percentiles

Row = dict[str, Any]
OWN = "own activation"
NETWORKS = ("resnet18", "mobilenet_v3_small")
CONVERTED = (
    "resnet18",
    "resnet50",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "densenet121",
    "googlenet",
    "regnet_y_400mf",
    "convnext_tiny",
    "vit_b_16",
    "swin_t",
)
TRAINED = {  # batch size, and whether to compile the network
    "resnet50": (128, (False, True)),
    "mobilenetv2_100": (128, (False, True)),
    "efficientnet_b0": (128, (False, True)),
    "vit_small_patch16_224": (128, (False,)),
    "resnet18": (256, (False, True)),
}
FUSED = "pwlu, norms fused"
KINDS = (OWN, "silu", "pwlu", "pwlu, Phase I", FUSED, f"{FUSED}, Phase I")
DYNAMIC = ("dynamic_pwlu", "dyrelu", "metaacon", "se_relu")  # functions of the whole sample
DETECTORS = ("retinanet_resnet50_fpn", "maskrcnn_resnet50_fpn")


class ByKernel(nn.Module):
    """A fused PWLU that always calls the operator."""

    def __init__(self, fused: pwlu.FusedPWLU) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        """Compute the same as FusedPWLU."""
        unit = self.fused
        return ops.lookup(x, unit.left, unit.inv_step, unit.slopes, unit.offsets, unit.channel_dim)


def network(name: str, activation: str, options: argparse.Namespace) -> nn.Module:
    """Return the network with this activation at every site that convert_ finds. Its own activation is ReLU in place."""
    torch.manual_seed(0)
    model: nn.Module = getattr(torchvision.models, name)(weights=None)
    if not (name == "resnet18" and activation == OWN):
        to: Any = "pwlu" if activation == "pwlu" else partial(_in_place, "relu" if activation == OWN else activation)
        pwlu.convert_(model, torch.randn(2, 3, 224, 224), to=to)
    return model.to(options.device)


def _in_place(name: str, channels: int, site: Any) -> nn.Module:
    return nn.ReLU(inplace=True) if name == "relu" else nn.SiLU(inplace=True)


def by_kernel(model: nn.Module) -> nn.Module:
    """Hide the fused PWLUs of the model from the compiler."""
    for module in list(model.modules()):
        for key, child in module._modules.items():
            if isinstance(child, pwlu.FusedPWLU):
                module._modules[key] = ByKernel(child)
    return model


def inference(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of forward passes in every mode."""
    modes = [(c, d) for c in (False, True) for d in (torch.float32, torch.bfloat16)]
    for name in options.networks:
        for compiled, dtype in tqdm(modes, desc=f"{name}, inference"):
            layout = torch.channels_last if dtype == torch.bfloat16 else torch.contiguous_format
            x = torch.randn(options.batch, 3, options.pixels, options.pixels, device=options.device)
            x = x.to(dtype=dtype, memory_format=layout)
            calls: dict[str, Callable[[], Any]] = {}
            kinds = [OWN, "silu", "pwlu", "pwlu, kernel" if compiled else "pwlu, not fused"]
            torch._dynamo.reset()
            for kind in kinds:
                model = network(name, kind.partition(",")[0], options).eval()
                model = model.to(dtype=dtype, memory_format=layout)  # type: ignore[call-overload]
                if kind in ("pwlu", "pwlu, kernel"):
                    pwlu.fuse_(model)
                if kind == "pwlu, kernel":
                    by_kernel(model)
                calls[kind] = partial(torch.compile(model, fullgraph=True) if compiled else model, x)
            row: Row = {"what": "inference", "network": name, "mode": _mode(compiled), "dtype": _short(dtype)}
            row |= {"batch": options.batch}
            with torch.inference_mode():
                yield from rows(row, calls, options)


def training(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of training steps."""
    names = [n for n in TRAINED if not options.trained or n in options.trained]
    modes = [(name, compiled) for name in names for compiled in TRAINED[name][1] if _mode(compiled) in options.modes]
    for name, compiled in tqdm(modes, desc="training"):
        batch = options.training_batch or TRAINED[name][0]
        x = torch.randn(batch, 3, options.pixels, options.pixels, device=options.device)
        x = x.contiguous(memory_format=torch.channels_last)
        labels = torch.randint(1000, (batch,), device=options.device)
        calls: dict[str, Callable[[], Any]] = {}
        torch._dynamo.reset()
        for kind in dict.fromkeys((OWN, *(options.kinds or KINDS))):
            if (kind.startswith(FUSED) and name.startswith("vit")) or (kind == "silu" and name.startswith("efficientnet")):
                continue  # ViT has no batch norm; EfficientNet's own activation is SiLU
            model, optimizer = trained(name, kind, options)
            calls[kind] = partial(step, torch.compile(model) if compiled else model, optimizer, x, labels)
        row: Row = {"what": "training", "network": name, "mode": _mode(compiled), "dtype": "bfloat16"}
        yield from rows(row | {"batch": batch}, calls, options)


def trained(name: str, kind: str, options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network of timm in training mode with this kind of activation, and its optimizer."""
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, num_classes=1000)
    sample = torch.randn(2, 3, 224, 224)
    if kind != OWN:
        to: Any = partial(_in_place, "silu") if kind == "silu" else kind if kind in DYNAMIC else "pwlu"
        pwlu.convert_(model, sample, to=to)
    if kind.startswith(FUSED):
        pwlu.fuse_norms_(model, sample)
    model = model.to(options.device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    groups = pwlu.parameter_groups(model, lr=1e-3) if "pwlu" in kind else model.parameters()
    optimizer = torch.optim.SGD(groups, lr=1e-3, momentum=0.9)
    if kind.endswith("Phase I"):
        pwlu.TwoPhase(model, optimizer, realign_at=10**9)
    return model, optimizer


def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> None:
    """Take one ordinary training step."""
    optimizer.zero_grad()
    with torch.autocast(x.device.type, torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), labels)
    loss.backward()
    optimizer.step()


def rows(row: Row, calls: dict[str, Callable[[], Any]], options: argparse.Namespace) -> list[Row]:
    """Time the calls in turns. On a GPU, time the GPU's work alone as well; for inference by replaying CUDA graphs."""
    cuda, unknown = options.device == "cuda", float("nan")
    wait = torch.cuda.synchronize if cuda else lambda: None
    times = interleaved(calls, options.rounds, inner=options.inner, wait=wait)
    hosts = {name: host(call, wait) for name, call in calls.items()}
    peaks = {name: peak(call) if cuda else unknown for name, call in calls.items()}
    replayed = time_on_gpu(calls, options.rounds) if cuda and row["what"] == "inference" else {}
    base = percentiles(times[OWN])["p50_ms"]
    table = []
    for name, each in times.items():
        result = percentiles(each)
        result |= {"x_own": result["p50_ms"] / base, "host_ms": hosts[name], "peak_mib": peaks[name]}
        result |= {"gpu_ms": unknown, "gpu_x_own": unknown}
        if name in replayed:
            result["gpu_ms"], own = (percentiles(replayed[n])["p50_ms"] for n in (name, OWN))
            result["gpu_x_own"] = result["gpu_ms"] / own
        table.append(row | {"call": name} | result | machine(options.device))
        if cuda and not replayed:
            PENDING.append((table[-1], table[0], calls[name]))
    return table


def host(call: Callable[[], Any], wait: Callable[[], None]) -> float:
    """Return the milliseconds after which a call returns, while the GPU may still be working."""
    times = []
    for _ in range(5):
        wait()
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    return percentiles(times)["p50_ms"]


PENDING: list[tuple[Row, Row, Callable[[], Any]]] = []  # a row, the row of the network's own activation, the call


def add_busy() -> None:
    """Add the time for which the GPU is busy in each training step. Call this last: the profiler slows later launches."""
    for row, _, call in PENDING:
        row["gpu_ms"] = gpu_busy_ms(call)
    for row, own, _ in PENDING:
        row["gpu_x_own"] = row["gpu_ms"] / own["gpu_ms"]


def peak(call: Callable[[], Any]) -> float:
    """Return the peak memory of a call in MiB, above what was allocated before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def conversion(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the seconds that the conversion of each model takes on the CPU."""
    image = torch.randn(2, 3, 224, 224)
    samples = dict.fromkeys(CONVERTED, image) | dict.fromkeys(DETECTORS, ([image[0]],))
    for name, sample in tqdm(samples.items(), desc="conversion"):
        times, sites = [], 0
        without_backbone = {"weights_backbone": None} if name in DETECTORS else {}
        for _ in range(3):
            model = torchvision.models.get_model(name, weights=None, **without_backbone)
            begin = time.perf_counter()
            sites = len(pwlu.convert_(model, sample).converted)
            times.append((time.perf_counter() - begin) * 1e3)
        row: Row = {
            "what": "conversion",
            "network": name,
            "mode": f"{sites} sites",
            "dtype": "",
            "batch": "",
            "call": "convert_",
        }
        yield (
            row
            | percentiles(times)
            | dict.fromkeys(("x_own", "host_ms", "peak_mib", "gpu_ms", "gpu_x_own"), "")
            | machine("cpu")
        )


def _mode(compiled: bool) -> str:
    return "compiled" if compiled else "eager"


def _short(dtype: torch.dtype) -> str:
    return "bfloat16 channels_last" if dtype == torch.bfloat16 else "float32"


def _cell(r: Row) -> str:
    times = f"{r['p50_ms']:.2f} ({r['x_own']:.3f}), {r['host_ms']:.2f}, {r['gpu_ms']:.2f} ({r['gpu_x_own']:.3f})"
    return f"{times}, {r['peak_mib']:.0f}"


def show(table: list[Row]) -> None:
    """Print Markdown tables with a row per call and a column per mode, and the seconds of conversion."""
    for what, network in dict.fromkeys((r["what"], r["network"]) for r in table if r["what"] != "conversion"):
        selected = [r for r in table if (r["what"], r["network"]) == (what, network)]
        columns = list(dict.fromkeys((r["mode"], r["dtype"]) for r in selected))
        print(
            f"\n| {network}, {what}: ms (x own), host, GPU alone, MiB | "
            + " | ".join(" ".join(column) for column in columns)
            + " |"
        )
        print("|---|" + "---|" * len(columns))
        cells = {(r["call"], r["mode"], r["dtype"]): _cell(r) for r in selected}
        for call in dict.fromkeys(r["call"] for r in selected):
            print(f"| {call} | " + " | ".join(cells.get((call, *column), "") for column in columns) + " |")
    if seconds := [r for r in table if r["what"] == "conversion"]:
        print("\n| conversion | sites | s |\n|---|---|---|")
        for r in seconds:
            print(f"| {r['network']} | {r['mode'].partition(' ')[0]} | {r['p50_ms'] / 1e3:.2f} |")


def main() -> None:
    """Parse the command line, measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"inference": inference, "training": training, "conversion": conversion}
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"measure these: {', '.join(parts)} (default: all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="run on this device (default: %(default)s)")
    parser.add_argument(
        "--networks",
        nargs="+",
        default=NETWORKS,
        metavar="NAME",
        help="time inference of these networks (default: %(default)s)",
    )
    parser.add_argument(
        "--batch", type=int, default=64, help="use this many images per batch in inference (default: %(default)s)"
    )
    parser.add_argument(
        "--trained", nargs="+", choices=list(TRAINED), metavar="NAME", help="time training of these networks (default: all)"
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        metavar="KIND",
        choices=(*KINDS, *DYNAMIC),
        help=f"time training with '{OWN}' and these activations: {', '.join((*KINDS[1:], *DYNAMIC))} (default: the first six)",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=("eager", "compiled"),
        default=("eager", "compiled"),
        help="time training in these modes (default: both)",
    )
    parser.add_argument(
        "--training-batch", type=int, help="use this many images per batch in training (default: 128, for resnet18 256)"
    )
    parser.add_argument("--pixels", type=int, default=224, help="set the height and width of images (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="measure each variant this many times (default: %(default)s)")
    parser.add_argument("--inner", type=int, default=5, help="make this many calls per measurement (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, help="write results to this file (default: model-DEVICE.csv in benchmarks/results)"
    )
    options = parser.parse_args()
    if unknown := set(options.parts) - set(parts):
        parser.error(f"unknown part {', '.join(sorted(unknown))}: choose from {', '.join(parts)}")
    table = [row for name in options.parts or parts for row in parts[name](options)]
    if options.device == "cuda":
        add_busy()
    show(table)
    write(options.output or RESULTS / f"model-{options.device}.csv", table)


if __name__ == "__main__":
    main()
