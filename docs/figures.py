"""Draw figures of the documentation, as PNG and as SVG, with type as large as the text around them.

    python docs/figures.py              the chart of gains and the histogram of alignment, from docs/results.md and results/
    python docs/figures.py --run RUN    also the figure of the home page, from a run folder of `pwlu train`

`docs/run.py --write` draws the figure of the tutorial, and `benchmarks/norms_figure.py` that of fused norms.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from matplotlib import rcParams
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


def functions(run: Path) -> Any:
    """Return the functions of a run over the distributions of their inputs."""
    learned = {name: {**unit, "init": "relu"} for name, unit in torch.load(run / "functions.pt", weights_only=True).items()}
    return pwlu.plot_functions(learned, alignment=pwlu.Alignment.from_json((run / "inputs.json").read_text()), same_scale=True)


def main() -> None:
    """Parse the command line, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a finished run folder of `pwlu train`, for the figure of the home page")
    options = parser.parse_args()
    rcParams["svg.hashsalt"] = "pwlu"  # the same file every time
    save(gains(), "improvements-cifar100")
    save(iou(), "alignment-mobilenet_v3_small")
    if options.run:
        save(functions(options.run), "digits", width=9)


if __name__ == "__main__":
    main()
