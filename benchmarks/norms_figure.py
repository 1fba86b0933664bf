"""Draw time and memory of a training step from the results of benchmarks/model.py: docs/images/norms.png and norms.svg."""

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from timing import RESULTS

NETWORKS = {
    "resnet50": "ResNet-50",
    "resnet18": "ResNet-18",
    "mobilenetv2_100": "MobileNetV2",
    "efficientnet_b0": "EfficientNet-B0",
}
OWN = "eager", "own activation"
KINDS = {
    OWN: ("its own activation", "#8c8c8c"),
    ("compiled", "own activation"): ("the same, compiled", "#404040"),
    ("eager", "silu"): ("SiLU", "#c9a227"),
    ("eager", "pwlu"): ("PWLU", "#7fb3d5"),
    ("eager", "pwlu, norms fused"): ("PWLU, norms fused", "#1f5f99"),
}
MEASURES = {"gpu_ms": "GPU time", "p50_ms": "wall-clock time", "peak_mib": "peak memory"}


def main() -> None:
    """Read the CSV files, draw the figure, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--input",
        type=Path,
        nargs="+",
        default=[RESULTS / "training-norms-cuda.csv"],
        help="read these files, measured on one machine (default: benchmarks/results/training-norms-cuda.csv)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("docs/images/norms.png"), help="write this file (default: %(default)s)"
    )
    options = parser.parse_args()
    rows = [row for path in options.input for row in csv.DictReader(path.read_text().splitlines())]
    found = {(row["network"], (row["mode"], row["call"])): row for row in rows}
    kinds = {kind: look for kind, look in KINDS.items() if any(measured == kind for _, measured in found)}
    plt.rcParams.update({"font.size": 11, "axes.titlesize": 11, "svg.hashsalt": "pwlu"})
    figure, axes = plt.subplots(len(MEASURES), figsize=(7.2, 6.4), sharex=True, layout="constrained")
    for axis, (measure, title) in zip(axes, MEASURES.items(), strict=True):
        for i, (kind, (name, color)) in enumerate(kinds.items()):
            places, ratios = [], []
            for at, network in enumerate(NETWORKS):
                if (network, kind) in found and found[network, kind][measure]:
                    places.append(at + 0.8 * (i + 0.5) / len(kinds) - 0.4)
                    ratios.append(float(found[network, kind][measure]) / float(found[network, OWN][measure]))
            axis.bar(places, ratios, 0.72 / len(kinds), label=name, color=color)
        axis.set_ylabel(title)
        axis.set_xticks(range(len(NETWORKS)), list(NETWORKS.values()))
        axis.axhline(1, color="black", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_title("times the same network with its own activation", loc="left")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False, columnspacing=1.2)
    for path in (options.output, options.output.with_suffix(".svg")):
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
