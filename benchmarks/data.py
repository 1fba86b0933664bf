"""Time how many images per second one core reads, from a folder and from shards, and write a CSV file.

The images are JPEG files of 500 x 375 pixels with noise, 97 kB each. They are in the page cache: this is the time of decoding,
augmenting and sending, without that of the disk. One worker process reads. The process that receives the batches also
normalises them, on another core.
"""

import argparse
import csv
import io
import statistics
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timing import RESULTS, machine, write

from pwlu.lab.data.file_images import load_files
from pwlu.lab.data.shards import Shards
from pwlu.lab.recipes.catalog import settings


def jpeg(random: np.random.Generator) -> bytes:
    """Return a JPEG file of 500 x 375 pixels."""
    coarse = Image.fromarray(random.integers(0, 256, (47, 63, 3), dtype=np.uint8)).resize((500, 375), Image.Resampling.BICUBIC)
    noise = random.normal(0, 12, (375, 500, 3))
    file = io.BytesIO()
    Image.fromarray((np.asarray(coarse) + noise).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def make(root: Path, count: int) -> float:
    """Write the same images as a folder and as shards of 256. Return the mean size of a file in bytes."""
    random, sizes = np.random.default_rng(0), []
    (root / "val" / "0").mkdir(parents=True)
    (root / "train" / "0").mkdir(parents=True)
    for first in range(0, count, 256):
        with tarfile.open(root / f"train-{first // 256:03}.tar", "w") as tar:
            for number in range(first, min(first + 256, count)):
                content = jpeg(random)
                sizes.append(len(content))
                (root / "train" / "0" / f"{number:06}.jpg").write_bytes(content)
                for name, data in ((f"{number:06}.jpg", content), (f"{number:06}.cls", b"0")):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    (root / "val" / "0" / "0.jpg").write_bytes(jpeg(random))
    return float(np.mean(sizes))


def images_per_second(**changes: Any) -> float:
    """Return the images per second of one epoch, after one batch that starts the worker."""
    train, _, _ = load_files(settings("imagenet/resnet50", **changes), torch.device("cpu"))
    for _ in train.batches([torch.arange(2)], (0, 0, 2)):
        pass
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    begin = time.monotonic()
    for _ in train.batches(order.split(64), (0, 1, 2)):
        pass
    return len(train) / (time.monotonic() - begin)


def tables() -> str:
    """Return the measured images per second, and how many cores a GPU needs for it, as the tables of docs/scale.md."""
    measured: dict[str, list[float]] = {}
    for row in _rows("data-cpu.csv"):
        measured.setdefault(row["source"], []).append(float(row["images_per_second"]))
    lines = ["| source | images per second and core |", "|---|---|"]
    for source, speeds in measured.items():
        lines.append(f"| {source} | {statistics.median(speeds):.0f} ({min(speeds):.0f} to {max(speeds):.0f}) |")
    lines += [
        "",
        "| network | images per second and GPU | cores per GPU, shards | cores per node of 8 GPUs | cores for 8 x 8 GPUs |",
    ]
    lines.append("|---|---|---|---|---|")
    for network, name, mode, batch in (("resnet18", "ResNet-18", "compiled", 256), ("resnet50", "ResNet-50", "eager", 128)):
        wanted = {
            "what": "training",
            "network": network,
            "mode": mode,
            "dtype": "bfloat16",
            "batch": str(batch),
            "call": "pwlu",
        }
        (found,) = (row for row in _rows("training-cuda.csv") if wanted.items() <= row.items())
        speed = batch / float(found["p50_ms"]) * 1000
        cores = speed / statistics.median(measured["shards"])
        lines.append(f"| {name}, {mode}, batch {batch} | {speed:,.0f} | {cores:.1f} | {8 * cores:,.0f} | {64 * cores:,.0f} |")
    return "\n".join(lines)


def _rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Parse the command line, measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1024, help="read so many images (default: 1024)")
    parser.add_argument("--rounds", type=int, default=3, help="measure both so often, in turn (default: 3)")
    parser.add_argument(
        "--tables", action="store_true", help="print the tables of docs/scale.md, measure nothing (default: off)"
    )
    options = parser.parse_args()
    if options.tables:
        print(tables())
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        size = make(root, options.images)
        pattern = str(root / f"train-{{000..{(options.images - 1) // 256:03}}}.tar")
        begin = time.monotonic()
        Shards(pattern)
        index = 1e6 * (time.monotonic() - begin) / options.images
        print(f"files of {size / 1000:.0f} kB; reading the headers of shards: {index:.0f} microseconds per image")
        places: dict[str, dict[str, Any]] = {"folder": {"data": str(root)}, "shards": {"data": pattern, "holdout": 1}}
        for number in range(options.rounds):
            for place, arguments in places.items():
                speed = images_per_second(**arguments, workers=1)
                print(f"{place}: {speed:.0f} images per second", flush=True)
                row = {"source": place, "round": number, "images": options.images, "bytes_per_file": round(size), "workers": 1}
                rows.append(row | {"images_per_second": round(speed, 1), "index_us_per_image": round(index, 1)})
    write(RESULTS / "data-cpu.csv", [row | machine("cpu") for row in rows])


if __name__ == "__main__":
    main()
