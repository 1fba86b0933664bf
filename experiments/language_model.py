"""Compare activations in the MLPs of a language model: bits per byte on held-out text, three seeds, matched parameters.

The model is a decoder-only transformer that reads bytes. The text is the source code of Python's standard library. Every tenth
module is held out. SwiGLU has three matrices, so its hidden layer is 2/3 as wide. A PWLU starts as the activation it replaces.

    python experiments/language_model.py --out runs/lm                      # all kinds, three seeds, one after the other
    python experiments/language_model.py --jobs 16 --mps --out runs/lm      # side by side on a GPU
    python experiments/language_model.py --kinds gelu pwlu --tiny           # seconds on a CPU
    python experiments/language_model.py --table experiments/language_model.jsonl
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from learning_rules import read_results
from torch import Tensor, nn
from tqdm import tqdm

import pwlu
from pwlu.lab.compare.mps import multi_process_service

FULL = {"width": 256, "layers": 6, "heads": 8, "length": 256, "batch": 32, "steps": 2000, "lr": 2e-3}
TINY = {"width": 32, "layers": 2, "heads": 2, "length": 64, "batch": 8, "steps": 30, "lr": 2e-3}
WARMUP = 0.05  # of the steps
REALIGN = 0.1  # of the steps
KINDS = {
    "gelu": "GELU",
    "silu": "SiLU",
    "relu2": "ReLU squared",
    "pwlu": "PWLU per channel, from GELU",
    "pwlu_layer": "PWLU per layer, from GELU",
    "swiglu": "SwiGLU",
    "swiglu_pwlu": "SwiGLU, gate a PWLU per channel",
    "swiglu_pwlu_layer": "SwiGLU, gate a PWLU per layer",
}


class Activation(nn.Module):
    """An activation by name, as a module that pwlu.convert_ finds."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of x."""
        return F.relu(x).square() if self.name == "relu2" else F.silu(x) if self.name == "silu" else F.gelu(x)


class MLP(nn.Module):
    """Two matrices and an activation between them, or SwiGLU's three matrices."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        gated = kind.startswith("swiglu")
        hidden = 4 * width * 2 // 3 if gated else 4 * width
        self.act = Activation("silu" if gated else kind)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.gate = nn.Linear(width, hidden) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of x."""
        return self.down(self.act(self.up(x)) if self.gate is None else self.act(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention to earlier bytes, then an MLP; both are added to their input."""

    def __init__(self, width: int, heads: int, kind: str) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.mlp = nn.Linear(width, 3 * width), nn.Linear(width, width), MLP(width, kind)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of x, (batch, length, width)."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class LanguageModel(nn.Module):
    """Predict the next byte at every position."""

    def __init__(self, width: int, layers: int, heads: int, length: int, kind: str) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads, kind) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, length, 256)."""
        return self.head(self.norm(self.blocks(self.bytes(tokens) + self.positions[: tokens.shape[1]])))


def texts() -> tuple[Tensor, Tensor]:
    """Return the bytes of the standard library's modules for training, and of every tenth module for the measurement."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in folder.rglob("*.py") if not {"site-packages", "dist-packages", "test"} & set(path.parts))
    parts: tuple[bytearray, bytearray] = bytearray(), bytearray()
    for number, path in enumerate(paths):
        parts[number % 10 == 9].extend(path.read_bytes())
    train, held_out = (torch.frombuffer(part, dtype=torch.uint8).long() for part in parts)
    return train, held_out


def build(kind: str, size: dict[str, Any], device: str) -> nn.Module:
    """Return the model, with PWLUs where the kind asks for them."""
    base = "gelu" if kind.startswith("pwlu") else kind
    model = LanguageModel(size["width"], size["layers"], size["heads"], size["length"], base).to(device)
    if "pwlu" in kind:
        sample = torch.zeros(2, size["length"], dtype=torch.long, device=device)
        pwlu.convert_(model, sample, granularity="layer" if kind.endswith("layer") else "channel")
    return model


def train(kind: str, seed: int, size: dict[str, Any], device: str) -> dict[str, Any]:
    """Train one model, and return its result."""
    torch.set_num_threads(1)
    began = time.time()
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)  # the same batches for every kind
    data, held_out = (part.to(device) for part in texts())
    model = build(kind, size, device)
    groups = [  # weight decay on matrices alone: a PWLU's parameters are one vector
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=size["lr"])
    steps, length = size["steps"], size["length"]
    warmup = max(1, int(WARMUP * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    phases = pwlu.TwoPhase(model, optimizer, realign_at=max(1, int(REALIGN * steps))) if "pwlu" in kind else None
    autocast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    offsets = torch.arange(length + 1, device=device)
    losses = torch.zeros((), device=device)
    for step in tqdm(range(steps), desc=f"{kind}, seed {seed}", disable=None):
        at = torch.randint(len(data) - length - 1, (size["batch"], 1), generator=generator).to(device)
        piece = data[at + offsets]
        with autocast:
            loss = F.cross_entropy(model(piece[:, :-1]).flatten(0, 1).float(), piece[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step >= steps - 100:
            losses += loss.detach() / min(steps, 100)
    if phases:
        phases.remove()
    model.eval()
    pieces = held_out[: min(len(held_out) // length, 2000) * length].view(-1, length)
    total = 0.0
    with torch.no_grad(), autocast:
        for part in pieces.split(size["batch"]):
            total += F.cross_entropy(model(part[:, :-1]).flatten(0, 1).float(), part[:, 1:].flatten(), reduction="sum").item()
    return {
        "kind": kind,
        "seed": seed,
        "bits": round(total / pieces[:, 1:].numel() / math.log(2), 4),
        "train_bits": round(losses.item() / math.log(2), 4),
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(time.time() - began, 1),
        "text": [len(data), len(held_out)],
        "versions": f"Python {sys.version.split()[0]}, torch {torch.__version__}",
    }


def table(results: list[dict[str, Any]]) -> str:
    """Return a Markdown table: means and standard deviations over seeds, paired differences to GELU with standard errors."""
    lines = ["| MLP | parameters | bits per byte, held out | minus GELU, paired | training |", "|---|---:|---:|---:|---:|"]
    base = {r["seed"]: r["bits"] for r in results if r["kind"] == "gelu"}
    for kind, name in KINDS.items():
        mine = [r for r in results if r["kind"] == kind]
        if not mine:
            continue
        bits, trained = [r["bits"] for r in mine], [r["train_bits"] for r in mine]
        gains = [r["bits"] - base[r["seed"]] for r in mine if r["seed"] in base]
        spread = f" ± {statistics.stdev(bits):.4f}" if len(bits) > 1 else ""
        paired = "-"
        if kind != "gelu" and len(gains) > 1:
            paired = f"{statistics.mean(gains):+.4f} ± {statistics.stdev(gains) / math.sqrt(len(gains)):.4f}"
        cells = [
            f"{mine[0]['parameters']:,}",
            f"{statistics.mean(bits):.4f}{spread}",
            paired,
            f"{statistics.mean(trained):.4f}",
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run_all(arguments: argparse.Namespace, environment: dict[str, str]) -> int:
    """Train every kind with every seed, `--jobs` at a time, each in a process. Return how many failed."""
    waiting = [(kind, seed) for seed in range(arguments.seeds) for kind in arguments.kinds]
    running: dict[subprocess.Popen[bytes], tuple[str, int]] = {}
    failed = 0
    command = [sys.executable, __file__, "--out", str(arguments.out), *(["--tiny"] if arguments.tiny else [])]
    while waiting or running:
        while waiting and len(running) < arguments.jobs:
            kind, seed = waiting.pop(0)
            running[subprocess.Popen([*command, "--one", kind, str(seed)], env=environment)] = kind, seed
        for child in [c for c in running if c.poll() is not None]:
            kind, seed = running.pop(child)
            failed += child.returncode != 0
            print(f"{'FAILED' if child.returncode else 'done'}: {kind}, seed {seed}", flush=True)
        time.sleep(0.1)
    return failed


def main() -> int:
    """Parse the command line and do what it asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--seeds", type=int, default=3, help="train seeds 0 to N - 1 (default: %(default)s)", metavar="N")
    parser.add_argument("--jobs", type=int, default=1, help="train N runs at the same time (default: %(default)s)", metavar="N")
    parser.add_argument("--mps", action="store_true", help="start nvidia-cuda-mps-control (default: off)")
    parser.add_argument("--tiny", action="store_true", help="two layers of width 32, 30 steps: seconds on a CPU (default: off)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/lm"), help="write results to DIR (default: %(default)s)", metavar="DIR"
    )
    parser.add_argument("--table", type=Path, help="print a file of results as a table, and exit", metavar="FILE")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table:
        print(table(read_results(arguments.table)))
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = arguments.out / "language_model.jsonl"
    if arguments.one:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        result = train(arguments.one[0], int(arguments.one[1]), TINY if arguments.tiny else FULL, device)
        with results.open("a") as file:
            file.write(json.dumps(result) + "\n")
        return 0
    with multi_process_service() if arguments.mps else contextlib.nullcontext():
        failed = run_all(arguments, dict(os.environ) | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    if results.exists():
        print(table(read_results(results)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
