"""Draw figures of the documentation, as PNG and as SVG, with type as large as the text around them.

    python docs/figures.py           draws all, from results/ and from a run of `pwlu train` (a minute) that it starts
    python docs/figures.py NAME ...  draws these only

The pictures of a report need Playwright and the Chromium of the system. `docs/run.py --write` draws the figure of the tutorial,
and `benchmarks/norms_figure.py` that of fused norms.
"""

import argparse
import atexit
import copy
import functools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot, rcParams
from matplotlib.text import Text

import pwlu
from pwlu.lab.compare.presets import PRESETS, Comparison
from pwlu.lab.compare.table import Table
from pwlu.lab.recipes import catalog
from pwlu.lab.recipes.experiment import differences, slug
from pwlu.lab.recipes.metrics import TITLES
from pwlu.lab.runs.results import find_runs

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
COMMAND = [sys.executable, "-m", "pwlu"]
WIDTH = 7.2  # inches: the width of the text in the site
ABLATED = {"granularity", "fix_init", "intervals"}  # docs/results.md has tables of these
LIMIT = 6  # points: so that a run that diverged does not make all other gains small
LAYERS = {  # those whose functions docs/results.md shows
    "resnet18": ["relu", "layer1.1.relu", "layer2.1.relu", "layer3.0.relu_2", "layer4.0.relu", "layer4.1.relu_2"],
    "mobilenet_v3_small": [
        *("features.0.2", "features.1.block.0.2", "features.4.block.0.2"),
        *("features.6.block.1.2", "features.12.2", "classifier.1"),
    ],
}
NAMES = {
    "cifar100": "CIFAR-100",
    "tinyimagenet": "Tiny-ImageNet",
    "imagenette": "Imagenette",
    "imagenet": "ImageNet",
    "coco": "COCO",
    "voc": "VOC",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "mobilenet_v1": "MobileNet-V1",
    "mobilenet_v2": "MobileNet-V2",
    "mobilenet_v3_small": "MobileNet-V3-small",
    "efficientnet_b0": "EfficientNet-B0",
    "maskrcnn_resnet18_fpn": "Mask R-CNN",
    "maskrcnn_resnet50_fpn": "Mask R-CNN",
    "retinanet_resnet18_fpn": "RetinaNet",
    "retinanet_resnet50_fpn": "RetinaNet",
}


def save(figure: Any, name: str, width: float = WIDTH, points: float = 11) -> None:
    """Write both files at the width of the text, with type of at least that many points."""
    figure.set_size_inches(width, figure.get_size_inches()[1])
    for text in figure.findobj(Text):
        text.set_fontsize(max(points, text.get_fontsize()))
    for suffix in (".png", ".svg"):
        path = ROOT / "docs/images" / f"{name}{suffix}"
        figure.savefig(path, dpi=160, metadata={"Date": None} if suffix == ".svg" else None)
        print(f"saved {path.relative_to(ROOT)}")


def cells(results: Path) -> Iterator[Table]:
    """Yield a table of all activations for every training of ReLU that was measured on test or validation images."""
    rows = {
        title: row
        for preset in PRESETS.values()
        for title, row in preset.items()
        if row["activation"] != "pwlu" or not row.keys() & ABLATED
    }
    runs, complaints = find_runs(results)
    assert not complaints, complaints
    baselines = [run.settings for run in runs if run.settings.activation == "relu" and not run.settings.holdout]
    trainings = {(settings.recipe, *differences(settings).items()) for settings in baselines}
    for recipe, *changes in sorted(trainings, key=lambda training: (list(catalog.RECIPES).index(training[0]), training)):
        experiments = {title: catalog.settings(recipe, **dict(changes) | row) for title, row in rows.items()}
        table = Table(Comparison(recipe, "all", dict(changes), experiments), runs)
        if len(table.measured) > 1:
            yield table


def improvements() -> Any:
    """Return the chart of the gains of all activations on all cells."""
    measured = {}
    for table in cells(RESULTS):
        data, *network = (NAMES.get(word, word) for word in table.comparison.recipe.split("/"))
        metric = table.metrics[0]
        name = "\n".join([data if metric == "accuracy" else f"{data}, {TITLES[metric]}", *network])
        if name in measured:  # trained in two ways
            name += f"\n{slug(table.comparison.differences())}"
        measured[name] = table.statistics()
    return pwlu.plot_improvements(measured, limit=LIMIT)


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


def functions(run: Path, inputs: str, **options: Any) -> Any:
    """Return the functions of a run, with their inputs from this file."""
    learned = {name: {**unit, "init": "relu"} for name, unit in torch.load(run / "functions.pt", weights_only=True).items()}
    return pwlu.plot_functions(learned, alignment=pwlu.Alignment.from_json((run / inputs).read_text()), **options)


def functions_of(network: str, layers: list[str]) -> Any:
    """Return functions of smooth PWLUs that a network learned on CIFAR-100."""
    run = RESULTS / "cifar100" / network / "pwlu-curvature-0.001-precision-bf16-seed0"
    figure = functions(run, "alignment.json", layers=layers, channels=4)
    for axis in figure.axes:
        axis.set_title(axis.get_title(loc="left").partition(": ")[2], loc="left")
        axis.set_title("", loc="right")
    return figure


@functools.cache
def digits_run() -> Path:
    """Train on handwritten digits, and return the folder of the run."""
    runs = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, runs)
    subprocess.run([*COMMAND, "train", "digits", "--runs", runs], check=True)
    (run,) = runs.iterdir()
    return run


def report() -> None:
    """Write pictures of two parts of the report of a run: alignment and shapes, and functions."""
    sys.path.insert(0, str(ROOT / "tests/support"))
    from browser import browser

    parts = {"report-shapes": ("alignment", "shapes"), "report-functions": ("functions", "functions")}
    with tempfile.TemporaryDirectory() as folder, browser() as tab:
        page = Path(folder) / "report.html"
        subprocess.run([*COMMAND, "report", digits_run(), "-o", page], check=True)
        tab.page.set_viewport_size({"width": 1100, "height": 900})
        tab.open(page)
        for name, (first, last) in parts.items():
            boxes = [tab.page.locator(f"section#{section}").bounding_box() for section in (first, last)]
            top, bottom = boxes[0]["y"], boxes[1]["y"] + boxes[1]["height"]
            path = ROOT / "docs/images" / f"{name}.png"
            tab.page.screenshot(path=path, full_page=True, clip={"x": 0, "y": top, "width": 1100, "height": bottom - top})
            print(f"saved {path.relative_to(ROOT)}")


FIGURES = {
    "improvements": lambda: save(improvements(), "improvements"),
    "alignment": lambda: save(iou(), "alignment-mobilenet_v3_small"),
    "constraints": lambda: save(constraints(), "constraints"),
    "functions": lambda: [save(functions_of(*which), f"functions-{which[0]}") for which in LAYERS.items()],
    "digits": lambda: save(functions(digits_run(), "inputs.json", same_scale=True), "digits", width=9),
    "report": report,
}


def main() -> None:
    """Parse the command line, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"draw these only: {', '.join(FIGURES)}")
    names = parser.parse_args().names or list(FIGURES)
    if unknown := [name for name in names if name not in FIGURES]:
        parser.error(f"there is no figure {unknown[0]}. Figures are {', '.join(FIGURES)}")
    rcParams["svg.hashsalt"] = "pwlu"  # the same file every time
    for name in names:
        FIGURES[name]()


if __name__ == "__main__":
    main()
