"""Train a small language model with PWLUs in its MLPs, on text that comes with Python: nothing is downloaded.

The model is a decoder-only transformer that reads single bytes. pwlu.convert_ replaces the GELU of each MLP, whose
channels are in the last dimension, and every PWLU starts as GELU. The same model is trained with GELU for comparison.
The text is Python's licence and the source code of its standard library. --tiny takes seconds on a CPU.

One seed each: a difference of a few hundredths of a bit says nothing.
"""

import argparse
import math
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pwlu


def text(size: int) -> Tensor:
    """Return that many bytes: Python's licence where it is installed, then modules of the standard library in order of name."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = bytearray()
    for path in [*folder.glob("LICENSE*"), *sorted(folder.glob("*.py"))]:
        found += path.read_bytes()
        if len(found) >= size:
            break
    return torch.frombuffer(found[:size], dtype=torch.uint8).long()


class Block(nn.Module):
    """Attention to earlier bytes, then an MLP with GELU; both are added to their input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of x, (batch, length, width)."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class LanguageModel(nn.Module):
    """Predict the next byte at every position."""

    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, length, 256)."""
        return self.head(self.norm(self.blocks(self.bytes(tokens) + self.positions[: tokens.shape[1]])))


def draw(data: Tensor, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random pieces of the text, and the same shifted by one byte."""
    at = torch.randint(len(data) - length - 1, (batch, 1), generator=generator) + torch.arange(length)
    return data[at], data[at + 1]


def bits_per_byte(model: nn.Module, data: Tensor, length: int, device: str) -> float:
    """Return the mean loss on the text, cut into pieces, in bits."""
    count = (len(data) - 1) // length * length
    total = 0.0
    with torch.no_grad():
        for x, y in zip(data[:count].view(-1, length).split(32), data[1 : count + 1].view(-1, length).split(32), strict=True):
            total += F.cross_entropy(model(x.to(device)).flatten(0, 1), y.to(device).flatten(), reduction="sum").item()
    return total / count / math.log(2)


def main() -> None:
    """Parse the command line, train twice, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="optimizer steps (default: 2000; with --tiny: 120)")
    parser.add_argument("--realign-after", type=float, default=0.1, help="share of the steps in Phase I (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of AdamW (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="two layers of width 32, 200 kB of text: seconds on a CPU")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width, layers, heads, length, size, batch = (32, 2, 2, 64, 200_000, 16) if options.tiny else (128, 4, 4, 128, 2_000_000, 32)
    steps = options.steps or (120 if options.tiny else 2000)
    data = text(size)
    train, test = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    for kind in ("GELU", "PWLU"):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)  # the same batches for both
        model = LanguageModel(width, layers, heads, length).to(device)
        parameters: Any = model.parameters()
        if kind == "PWLU":
            print(pwlu.convert_(model, train[: 2 * length].view(2, length).to(device)))
            parameters = pwlu.parameter_groups(model, lr=options.lr, weight_decay=0.1)  # PWLUs without weight decay
        optimizer = torch.optim.AdamW(parameters, lr=options.lr, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        if kind == "PWLU":
            phases = pwlu.TwoPhase(model, optimizer, realign_at=max(1, int(options.realign_after * steps)))
        for step in range(1, steps + 1):
            x, y = draw(train, batch, length, generator)
            loss = F.cross_entropy(model(x.to(device)).flatten(0, 1), y.to(device).flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if step % max(1, steps // 4) == 0:
                print(f"{kind}, step {step}: training loss {loss.item() / math.log(2):.3f} bits per byte", flush=True)
        if kind == "PWLU":
            print(phases)
            phases.remove()
        print(f"{kind}: {bits_per_byte(model.eval(), test, length, device):.3f} bits per byte on the last tenth of the text")


if __name__ == "__main__":
    main()
