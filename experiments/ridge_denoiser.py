"""Denoise grey images with a learned convex ridge regulariser, with ReLU, soft shrinkage or constrained PWLUs as activation.

The regulariser is R(x) = sum over filters c of sum psi_c(w_c * x). Its gradient is W' a(W x). The activation a = psi' must be
monotone for R to be convex, and 1-Lipschitz for a known step size. W has norm 1 or less. The denoiser takes some steps of
gradient descent on |x - y|^2/2 + lambda R(x). Run: python experiments/ridge_denoiser.py --images DIR
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import pwlu

FILTERS, SIZE, ITERATIONS = 8, 5, 6


class Shrink(nn.Module):
    """ReLU or soft shrinkage with a learned threshold per channel."""

    def __init__(self, soft: bool) -> None:
        super().__init__()
        self.soft, self.threshold = soft, nn.Parameter(torch.full((FILTERS, 1, 1), 0.01))

    def forward(self, x: Tensor) -> Tensor:
        """Subtract the threshold, towards 0 on one or both sides."""
        if self.soft:
            return x - x.clamp(-self.threshold.abs(), self.threshold.abs())
        return (x - self.threshold).relu()


class Denoiser(nn.Module):
    """Gradient descent on the regularised problem."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(FILTERS, 1, SIZE, SIZE) / SIZE)
        self.strength = nn.Parameter(torch.zeros(()))
        self.activation: nn.Module
        if activation == "PWLU":
            self.activation = pwlu.PWLU(FILTERS, bounds=(-0.2, 0.2), init="identity")
            pwlu.constrain_(self, lipschitz=1.0, monotone=True)
        else:
            self.activation = Shrink(activation == "soft shrinkage")

    def forward(self, y: Tensor) -> Tensor:
        """Denoise images (B, 1, H, W)."""
        centred = self.filters - self.filters.mean((2, 3), keepdim=True)
        spectrum = torch.fft.rfft2(centred, s=(64, 64)).abs().square().sum(0).amax().sqrt()
        filters = centred / spectrum  # the norm of the convolution
        strength = self.strength.exp()
        step, x = 2 / (2 + strength), y
        for _ in range(ITERATIONS):
            gradient = F.conv_transpose2d(self.activation(F.conv2d(x, filters, padding=2)), filters, padding=2)
            x = x - step * (x - y + strength * gradient)
        return x


def load(folder: Path) -> list[Tensor]:
    """Return all images of a folder in grey, with values from 0 to 1."""
    found = []
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".webp", ".png", ".jpg")):
        with Image.open(path) as image:
            grey = image.convert("L")
            found.append(torch.frombuffer(bytearray(grey.tobytes()), dtype=torch.uint8).view(grey.height, grey.width) / 255)
    return [image for image in found if min(image.shape) >= 160]


def crops(images: list[Tensor], count: int, size: int, generator: torch.Generator) -> Tensor:
    """Return random crops (count, 1, size, size)."""
    chosen = []
    for index in torch.randint(len(images), (count,), generator=generator).tolist():
        image = images[index]
        top, left = (int(torch.randint(length - size + 1, (), generator=generator)) for length in image.shape)
        chosen.append(image[top : top + size, left : left + size])
    return torch.stack(chosen)[:, None]


def psnr(x: Tensor, clean: Tensor) -> Tensor:
    """Return the mean PSNR of images in decibels."""
    return -10 * (x - clean).square().mean((1, 2, 3)).log10().mean()


def run(activation: str, noise: float, images: list[Tensor], test: Tensor, steps: int, seed: int) -> float:
    """Train one denoiser; return its PSNR on the test images."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Denoiser(activation)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        clean = crops(images, 16, 40, generator)
        noisy = clean + noise / 255 * torch.randn(clean.shape, generator=generator)
        optimizer.zero_grad()
        (1e3 * (model(noisy) - clean).square().mean()).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        noisy = test + noise / 255 * torch.randn(test.shape, generator=torch.Generator().manual_seed(123))
        return float(psnr(model(noisy), test))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="folder of images; the last ones are for the test")
    parser.add_argument("--tests", type=int, default=40, help="number of images for the test")
    parser.add_argument("--steps", type=int, default=120, help="steps of Adam")
    parser.add_argument("--seeds", type=int, default=2, help="runs per row and noise level")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    images = load(options.images)
    train, held = images[: -options.tests], images[-options.tests :]
    test = torch.stack([image[:160, :160] for image in held])[:, None]
    levels = (5, 15, 25)
    print(
        f"{len(train)} images to train, {len(test)} to test\n| activation | noise 5 | 15 | 25 |\n|---|---:|---:|---:|",
        flush=True,
    )
    noise = [f"{float(psnr(test + s / 255 * torch.randn_like(test), test)):.2f}" for s in levels]
    print(f"| (noisy image) | {' | '.join(noise)} |", flush=True)
    for activation in ("ReLU", "soft shrinkage", "PWLU"):
        cells = []
        for level in levels:
            found = torch.tensor([run(activation, level, train, test, options.steps, seed) for seed in range(options.seeds)])
            cells.append(f"{found.mean():.2f} ± {found.std():.2f}")
        print(f"| {activation} | {' | '.join(cells)} |", flush=True)
    print(f"PSNR in dB ± standard deviation, torch {torch.__version__}, {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
