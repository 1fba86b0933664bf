"""Draw figures of the documentation, as PNG and as SVG, with type as large as the text around them.

    python docs/figures.py              the chart of gains and the histogram of alignment, from docs/results.md and results/,
                                        and the projections of one function
    python docs/figures.py --run RUN    also the figure of the home page and the pictures of a report, from a run folder of
                                        `pwlu train` (the pictures need Playwright and the Chromium of the system)

`docs/run.py --write` draws the figure of the tutorial, and `benchmarks/norms_figure.py` that of fused norms.
"""

import argparse
import copy
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot, rcParams
from matplotlib.text import Text

import pwlu

ROOT = Path(__file__).parent.parent
WIDTH = 7.2  # inches: the width of the text in the site
NETWORKS = {"cifar100/resnet18": "ResNet-18", "cifar100/mobilenet_v3_small": "MobileNet-V3-small"}


def save(figure: Any, name: str, width: float = WIDTH, points: float = 11) -> None:
    """Write both files at the width of the text, with type of at least that many points."""
    figure.set_size_inches(width, figure.get_size_inches()[1])
    for text in figure.findobj(Text):
        text.set_fontsize(max(points, text.get_fontsize()))
    for suffix in (".png", ".svg"):
        path = ROOT / "docs/images" / f"{name}{suffix}"
        figure.savefig(path, dpi=160, metadata={"Date": None} if suffix == ".svg" else None)
        print(f"saved {path.relative_to(ROOT)}")


def gains() -> Any:
    """Return the chart of gains, from the tables of docs/results.md."""
    page = (ROOT / "docs/results.md").read_text()
    measured: dict[str, dict[str, Any]] = {}
    paper: dict[str, dict[str, float]] = {}
    for recipe, name in NETWORKS.items():
        for preset in ("activations", "smoothing"):
            (table,) = re.findall(rf"<!-- table: {recipe} {preset} .*?<!-- end of table -->", page, re.DOTALL)
            for line in table.splitlines():
                cells = [cell.strip() for cell in line.strip("|").split("|")]
                if (found := re.fullmatch(r"([\d.]+) ± ([\d.]+) \((\d)\)", cells[1] if len(cells) > 1 else "")) is None:
                    continue
                if cells[0] == "PWLU, smooth, started as Swish":  # measured in one of the networks only
                    continue
                measured.setdefault(name, {})[cells[0]] = (float(found[1]), float(found[2]), int(found[3]))
                if cells[-1]:
                    paper.setdefault(name, {})[cells[0]] = float(cells[-1])
    return pwlu.plot_improvements(measured, "ReLU", paper, "the paper, same network, ImageNet")


def iou() -> Any:
    """Return the histogram of alignment in the small MobileNet-V3."""
    runs = {"fix-init-10": "pwlu-fix-init-10-precision-bf16-seed0", "stat-realign": "pwlu-precision-bf16-seed0"}
    folder = ROOT / "results/cifar100/mobilenet_v3_small"
    return pwlu.plot_alignment(
        {label: pwlu.Alignment.from_json((folder / run / "alignment.json").read_text()) for label, run in runs.items()}
    )


def constraints() -> Any:
    """Return one function before and after the projection onto each constraint."""
    torch.manual_seed(3)
    start = pwlu.PWLU(intervals=8)
    start.assign(heights=start.heights + 0.6 * torch.randn(1, 9))
    shapes: dict[str, dict[str, Any]] = {
        "lipschitz=1": {"lipschitz": 1.0},
        "monotone": {"monotone": True},
        "convex": {"convex": True},
        "odd": {"odd": True},
        "range=(0, 1)": {"range": (0.0, 1.0)},
        "lipschitz=1, odd": {"lipschitz": 1.0, "odd": True},
    }
    figure, axes = pyplot.subplots(2, 3, sharex=True, sharey=True, figsize=(WIDTH, 4.2), layout="constrained")
    x = torch.linspace(-4, 4, 801)
    for axis, (title, shape) in zip(axes.flat, shapes.items(), strict=True):
        unit = copy.deepcopy(start)
        pwlu.constrain_(unit, **shape)
        axis.plot(x, start(x).detach(), color="0.7")
        axis.plot(x, unit(x).detach(), color="tab:blue")
        axis.set_title(title)
    return figure


def functions(run: Path) -> Any:
    """Return the functions of a run over the distributions of their inputs."""
    learned = {name: {**unit, "init": "relu"} for name, unit in torch.load(run / "functions.pt", weights_only=True).items()}
    return pwlu.plot_functions(learned, alignment=pwlu.Alignment.from_json((run / "inputs.json").read_text()), same_scale=True)


def report(run: Path) -> None:
    """Write pictures of two parts of the report of a run: alignment and shapes, and functions."""
    sys.path.insert(0, str(ROOT / "tests/support"))
    from browser import browser

    parts = {"report-shapes": ("alignment", "shapes"), "report-functions": ("functions", "functions")}
    with tempfile.TemporaryDirectory() as folder, browser() as tab:
        page = Path(folder) / "report.html"
        subprocess.run([Path(sys.executable).parent / "pwlu", "report", run, "-o", page], check=True)
        tab.page.set_viewport_size({"width": 1100, "height": 900})
        tab.open(page)
        for name, (first, last) in parts.items():
            boxes = [tab.page.locator(f"section#{section}").bounding_box() for section in (first, last)]
            top, bottom = boxes[0]["y"], boxes[1]["y"] + boxes[1]["height"]
            path = ROOT / "docs/images" / f"{name}.png"
            tab.page.screenshot(path=path, full_page=True, clip={"x": 0, "y": top, "width": 1100, "height": bottom - top})
            print(f"saved {path.relative_to(ROOT)}")


def main() -> None:
    """Parse the command line, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--run", type=Path, help="a finished run folder of `pwlu train`, for the home page and the page on reports"
    )
    options = parser.parse_args()
    rcParams["svg.hashsalt"] = "pwlu"  # the same file every time
    save(gains(), "improvements-cifar100")
    save(iou(), "alignment-mobilenet_v3_small")
    save(constraints(), "constraints")
    if options.run:
        save(functions(options.run), "digits", width=9)
        report(options.run)


if __name__ == "__main__":
    main()
