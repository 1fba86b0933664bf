"""Count the knots that trained functions need, if they may lie anywhere among their knots: see pwlu.simplify_.

Print a Markdown table with a row per trained network and tolerance. A tolerance is a share of the range max Y - min Y.
"""

import argparse
from pathlib import Path

import torch

from pwlu.deploy.fewest_knots import least_errors
from pwlu.reference.nonuniform import Knots

RESULTS = Path(__file__).parent.parent / "results"


def count(path: Path, tolerance: float) -> tuple[int, torch.Tensor, list[int]]:
    """Return the knots per function now, those needed per channel, and those needed per unit for all of its channels."""
    channels, units, now = [], [], 0
    for blocks in torch.load(path).values():
        left, right, heights = (blocks[name].double() for name in ("left", "right", "heights"))
        now, open_ = heights.shape[1], right > left
        if not open_.any():
            continue
        knots = left[:, None] + (right - left)[:, None] * torch.linspace(0, 1, now, dtype=torch.float64)
        slopes = (blocks[name].double()[open_] for name in ("left_slope", "right_slope"))
        of = Knots(knots[open_], heights[open_], *slopes)
        allowed = tolerance * (of.heights.amax(1) - of.heights.amin(1))
        found = (least_errors(of)[0] <= allowed[:, None]).int().argmax(1)
        channels.append(found)
        units.append(int(found.max()))
    return now, torch.cat(channels), units


def main() -> None:
    """Parse the command line, count, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="*", help="read these files functions.pt (default: all in results/)")
    parser.add_argument(
        "--tolerances", type=float, nargs="+", default=[1e-3, 1e-2], help="allow these errors (default: 0.001 0.01)"
    )
    options = parser.parse_args()
    print("| run | functions | knots | error | needed, median | needed, 90 % | needed per unit, mean |")
    print("|---|---|---|---|---|---|---|")
    for path in options.paths or sorted(RESULTS.rglob("functions.pt")):
        for tolerance in options.tolerances:
            now, channels, units = count(path, tolerance)
            name = path.parent.relative_to(RESULTS) if path.is_relative_to(RESULTS) else path.parent
            median, most = (int(channels.double().quantile(q, interpolation="higher")) for q in (0.5, 0.9))
            cells = (name, len(channels), now, f"{tolerance:.1%}", median, most, f"{sum(units) / len(units):.1f}")
            print("| " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    main()
