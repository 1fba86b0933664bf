"""Time how many images per second one core reads, from folders and from shards, and write a CSV file.

The images are JPEG files with noise: 500 x 375 pixels and 97 kB for the recipes of ImageNet, 213 x 160 pixels for those of
Imagenette. The images of Imagenette fit into memory, so they are decoded once, before the measurement. The files are in the
page cache: this is the time of decoding, augmenting and sending, without that of the disk. One worker process reads. The
process that receives the batches also normalises them, on another core.
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

from pwlu.lab.data import sources
from pwlu.lab.data.file_images import load_files
from pwlu.lab.data.shards import Shards
from pwlu.lab.recipes.catalog import settings

LARGE, SMALL = (500, 375), (213, 160)  # sizes of images


def jpeg(random: np.random.Generator, size: tuple[int, int]) -> bytes:
    """Return a JPEG file of this size."""
    width, height = size
    coarse = Image.fromarray(random.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8))
    noise = random.normal(0, 12, (height, width, 3))
    smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC))
    file = io.BytesIO()
    Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def make_folder(root: Path, count: int, size: tuple[int, int]) -> list[bytes]:
    """Write images of one class as a folder, as --data expects it. Return the files for training."""
    random = np.random.default_rng(0)
    for part in ("train", "val"):
        (root / part / "0").mkdir(parents=True)
    files = [jpeg(random, size) for _ in range(count)]
    for number, content in enumerate(files):
        (root / "train" / "0" / f"{number:06}.jpg").write_bytes(content)
    (root / "val" / "0" / "0.jpg").write_bytes(files[0])
    return files


def make_shards(root: Path, files: list[bytes]) -> str:
    """Write images as shards of 256. Return their pattern."""
    for first in range(0, len(files), 256):
        with tarfile.open(root / f"train-{first // 256:03}.tar", "w") as tar:
            for number, content in enumerate(files[first : first + 256], start=first):
                for name, data in ((f"{number:06}.jpg", content), (f"{number:06}.cls", b"0")):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return str(root / f"train-{{000..{(len(files) - 1) // 256:03}}}.tar")


def images_per_second(recipe: str, in_memory: bool, **changes: Any) -> float:
    """Return the images per second of one epoch, after one batch that starts the worker."""
    limit = sources.IN_MEMORY
    sources.IN_MEMORY = limit if in_memory else 0
    train, _, _ = load_files(settings(recipe, **changes), torch.device("cpu"))
    sources.IN_MEMORY = limit
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
    parser.add_argument("--rounds", type=int, default=3, help="measure each so often, in turn (default: 3)")
    parser.add_argument(
        "--tables", action="store_true", help="print the tables of docs/scale.md, measure nothing (default: off)"
    )
    options = parser.parse_args()
    if options.tables:
        print(tables())
        return
    rows, count = [], options.images
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        files = {"folder": make_folder(root, count, LARGE), "Imagenette, in memory": make_folder(root / "small", count, SMALL)}
        files["shards"], files["Imagenette, from files"] = files.values()
        pattern = make_shards(root, files["shards"])
        begin = time.monotonic()
        Shards(pattern)
        index = 1e6 * (time.monotonic() - begin) / count
        print(f"reading the headers of shards: {index:.0f} microseconds per image")
        large, small = {"recipe": "imagenet/resnet50"}, {"recipe": "imagenette/resnet18", "data": str(root / "small")}
        places: dict[str, dict[str, Any]] = {
            "folder": large | {"in_memory": False, "data": str(root)},
            "shards": large | {"in_memory": False, "data": pattern, "holdout": 1},
            "Imagenette, from files": small | {"in_memory": False},
            "Imagenette, in memory": small | {"in_memory": True},
        }
        for number in range(options.rounds):
            for place, arguments in places.items():
                speed, size = images_per_second(**arguments, workers=1), sum(map(len, files[place])) / count
                print(f"{place}: {speed:.0f} images per second", flush=True)
                row = {"source": place, "round": number, "images": count, "bytes_per_file": round(size), "workers": 1}
                rows.append(row | {"images_per_second": round(speed, 1), "index_us_per_image": round(index, 1)})
    write(RESULTS / "data-cpu.csv", [row | machine("cpu") for row in rows])


if __name__ == "__main__":
    main()
