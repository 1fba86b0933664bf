"""Compare learning rules for PWLUs on held-out images of CIFAR-100.

A rule is a list of words, such as "sharesum=0.1 curv=0.001 init=swish". Each rule trains each network once per seed, with the
recipe of `pwlu train`, in a separate process. Results go to OUT/results.jsonl, one line per run, and progress to OUT/log.txt.

    python experiments/learning_rules.py --block anchors --data data --out runs/rules
    python experiments/learning_rules.py --rules "curv=0.001; curv=0.001 init=swish" --seeds 1,2 --jobs 4 --mps
    python experiments/learning_rules.py --rules "curv=0.001" --device cpu --images 2000 --also "epochs=2 batch=128 realign=1"
    python experiments/learning_rules.py --table experiments/results.jsonl
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from rule_training import ACTIVATIONS, RULE_FIELDS, SETTINGS, parse, train

from pwlu.lab.compare.mps import multi_process_service
from pwlu.lab.data.small_images import cifar100
from pwlu.lab.recipes.catalog import RECIPES
from pwlu.lab.recipes.settings import UserError

TRIED = Path(__file__).with_name("results.jsonl")
ANCHORS = ("relu", "swish", "pwlu", "curv=0.001")
NETWORKS = tuple(name.removeprefix("cifar100/") for name in RECIPES if name.startswith("cifar100/"))
UNTRIED = (
    # A penalty relative to the inputs, of the same strength for every channel. As a gradient, it is as good as any on the
    # ResNet, but diverges on the MobileNet. An implicit step is stable.
    "shareall sharesum=0.1 curv=0.001 sigma prox",
    "shareall sharesum=0.1 curv=0.003 sigma prox",
    "shareall sharesum=0.1 curv=0.01 sigma prox",
    "shareall sharesum=0.3 curv=0.003 sigma prox",
    "shareall sharesum=0.1 curv=0.003 sigma prox unitlr=3",
    # Without weight decay on norms, the MobileNet fits its training images better.
    "shareall sharesum=0.1 curv=0.0003 normdecay=0",
    "pwlu normdecay=0",
    "frelu normdecay=0",
    "apl normdecay=0",
    "prelu normdecay=0",
    # Fewer intervals make functions smoother, in all networks alike.
    "lib N=6 normdecay=0",
    "lib N=4 normdecay=0",
    "lib N=8",
    "lib N=6",
    "lib N=4",
    "shareall sharesum=0.1 curv=0.0003 N=8",
    "shareall sharesum=0.1 curv=0.0003 N=6",
    "sharesum=0.1 N=6",
    # Bounds that follow the inputs by repeated regridding, with steps relative to the size of the function.
    "regrid=4 relstep=0.002 share=1 relcurv=1e-4 prox",
    # The library's rule with other strengths.
    "lib",
    "lib libbend=0.1",
    "lib libshare=0.03",
    "lib libshare=0.3",
    "lib unitlr=3",
    "curv=0.001 init=gelu",
    # Which of smoothness, scale and step size matters, and how much of it.
    "share=1 relcurv=3e-5 prox",
    "share=1 relcurv=5e-3 prox mean",
    "gain=-1",
    "decayB share=1 relcurv=1e-4 prox",
    "share=1 relcurv=1e-4 prox reldev=1e-5",
    "relstep=0.003 share=1 curv=0.002 prox",
    "share=1 relcurv=1e-4 prox init=swish base",
    # Gradient noise, other penalties, other settings.
    "share=1 precond=4 relcurv=1e-4 prox",
    "tv2=1e-4 share=1",
    "layer relcurv=5e-3 prox mean",
    "sharesum=0.1 relcurv=1e-4 prox",
    "share=1 relcurv=1e-4 prox normdecay=0",
    "share=1 relcurv=1e-4 prox unitlr=3",
    "share=1 relcurv=1e-4 prox N=8",
)


def read_results(path: Path) -> list[dict[str, Any]]:
    """Read a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def blocks() -> dict[str, tuple[str, ...]]:
    """Return lists of rules by name: anchors to compare with, the rules of the published table, and rules not tried yet."""
    return {"anchors": ANCHORS, "tried": tuple(dict.fromkeys(r["rule"] for r in read_results(TRIED))), "untried": UNTRIED}


def table(results: list[dict[str, Any]]) -> str:
    """Return a Markdown table of means over seeds: anchors first, then the other rules by mean accuracy."""
    networks = sorted({r["network"] for r in results})
    measures = ("accuracy", "train loss", "held-out loss", "IOU")
    lines = ["| rule | " + " | ".join(f"{n} {m}" for n in networks for m in measures) + " |"]
    lines += ["|---" + "|---:" * len(measures) * len(networks) + "|"]

    def place(rule: str) -> tuple[int, float]:
        if rule in ANCHORS:
            return ANCHORS.index(rule), 0.0
        return len(ANCHORS), -statistics.mean(r["accuracy"] for r in results if r["rule"] == rule)

    for rule in sorted(dict.fromkeys(r["rule"] for r in results), key=place):
        cells = []
        for network in networks:
            mine = [r for r in results if r["rule"] == rule and r["network"] == network]
            for name, form in (("accuracy", ".2f"), ("train_loss", ".3f"), ("heldout_loss", ".3f"), ("iou", ".2f")):
                values = [r[name] for r in mine if r[name] is not None]
                cells.append(f"{statistics.mean(values):{form}}" if values and len(values) == len(mine) else "-")
            again = len(mine) > len({r["seed"] for r in mine})
            notes = [f"{len(mine)} {'runs' if again else 'seeds'}"] if len(mine) > 1 else []
            notes += [f"diverged, epoch {r['epochs']}" for r in mine if r["unfinished"] and r["train_loss"] is None]
            notes += [f"stopped after epoch {r['epochs']}" for r in mine if r["unfinished"] and r["train_loss"] is not None]
            cells[-4] += f" ({'; '.join(notes)})" if notes else ""
        lines.append(f"| {rule} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run_all(specs: list[dict[str, Any]], arguments: argparse.Namespace, environment: dict[str, str]) -> int:
    """Train all runs, `--jobs` at a time. Return how many failed or did not start."""
    began = time.time()
    deadline = began + 60 * arguments.minutes
    waiting, running, failed = list(specs), {}, 0
    command = [sys.executable, str(Path(__file__).resolve()), "--data", str(arguments.data), "--out", str(arguments.out)]
    command += ["--deadline", str(deadline)] + (["--device", arguments.device] if arguments.device else [])
    try:
        while waiting or running:
            while waiting and len(running) < arguments.jobs and time.time() < deadline:
                spec = waiting.pop(0)
                running[subprocess.Popen([*command, "--one", json.dumps(spec)], env=environment)] = spec
            for child in [c for c in running if c.poll() is not None]:
                spec = running.pop(child)
                failed += child.returncode != 0
                print(f"{time.time() - began:6.0f} s {'FAILED' if child.returncode else 'done'}: {title(spec)}", flush=True)
            if waiting and not running and time.time() >= deadline:
                break
            time.sleep(0.1)
    finally:
        for child in running:
            child.kill()
    for spec in waiting:
        print(f"not started, --minutes have passed: {title(spec)}", flush=True)
    return failed + len(waiting)


def title(spec: dict[str, Any]) -> str:
    """Return the name of a run for messages."""
    return f"{spec['network']}, seed {spec['seed']}, {spec['rule']}"


def run_one(spec: dict[str, Any], arguments: argparse.Namespace) -> int:
    """Train one run in this process, and append its result to the file."""

    def log(text: str) -> None:
        with open(arguments.out / "log.txt", "a") as file:
            file.write(f"{title(spec)}: {text}\n")

    try:
        result = train(spec, arguments.data, arguments.device, arguments.deadline, log)
    except Exception as error:
        log(f"FAILED\n{traceback.format_exc()}")
        print(f"{title(spec)}: {type(error).__name__}: {error}", flush=True)
        return 1
    with open(arguments.out / "results.jsonl", "a") as file:
        file.write(json.dumps(result) + "\n")
    return 0


def words_help() -> str:
    """Return the help text on the words of rules."""
    lines = ["words of rules:", f"  {', '.join(ACTIVATIONS)}: use this activation (default: pwlu)"]
    lines += ["  layer, channel: learn one function per layer or per channel (default: channel)"]
    for name, field in RULE_FIELDS.items():
        lines.append(f"  {name if field.type is bool else name + '=X'}: {field.metadata['help']}")
    lines.append("settings of the recipe, as in pwlu train --help:")
    lines += [f"  {word}=X: {setting}" for word, setting in SETTINGS.items()]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=__doc__, epilog=words_help(), formatter_class=raw)
    networks = "mobilenet_v3_small,resnet18"
    helps = {
        "rules": "train with these rules, separated by semicolons (default: none)",
        "block": "train with all rules of a block; --list shows them (default: none)",
        "also": "add these words to every rule (default: none)",
        "networks": f"train these networks, separated by commas: {', '.join(NETWORKS)} (default: {networks})",
        "seeds": "train with these seeds, separated by commas (default: 0)",
        "holdout": "measure on N held-out training images (default: 5000)",
        "images": "train on the first N of the other images (default: all)",
        "data": "read CIFAR-100 from DIR/cifar-100-python (default: data)",
        "out": "write results to DIR (default: runs/rules)",
        "device": "train on cpu or cuda (default: cuda if available)",
        "jobs": "train N runs at the same time (default: 1)",
        "mps": "start nvidia-cuda-mps-control, which speeds up simultaneous runs (default: off)",
        "minutes": "stop after X minutes, and keep the results so far (default: no limit)",
        "list": "print the rules of all blocks, and exit (default: off)",
        "table": "print a file of results as a table, and exit (default: train)",
    }
    made.add_argument("--rules", default="", help=helps["rules"], metavar="RULES")
    made.add_argument("--block", choices=("anchors", "tried", "untried"), help=helps["block"])
    made.add_argument("--also", default="", help=helps["also"], metavar="WORDS")
    made.add_argument("--networks", default=networks, help=helps["networks"], metavar="NAMES")
    made.add_argument("--seeds", default="0", help=helps["seeds"], metavar="NUMBERS")
    made.add_argument("--holdout", type=int, default=5000, help=helps["holdout"], metavar="N")
    made.add_argument("--images", type=int, default=0, help=helps["images"], metavar="N")
    made.add_argument("--data", type=Path, default=Path("data"), help=helps["data"], metavar="DIR")
    made.add_argument("--out", type=Path, default=Path("runs/rules"), help=helps["out"], metavar="DIR")
    made.add_argument("--device", help=helps["device"], metavar="NAME")
    made.add_argument("--jobs", type=int, default=1, help=helps["jobs"], metavar="N")
    made.add_argument("--mps", action="store_true", help=helps["mps"])
    made.add_argument("--minutes", type=float, default=math.inf, help=helps["minutes"], metavar="X")
    made.add_argument("--list", action="store_true", help=helps["list"])
    made.add_argument("--table", type=Path, help=helps["table"], metavar="FILE")
    made.add_argument("--one", help=argparse.SUPPRESS)
    made.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    return made


def main() -> int:
    """Parse the command line and do what it asks for."""
    command = parser()
    arguments = command.parse_args()
    if arguments.one:
        return run_one(json.loads(arguments.one), arguments)
    if arguments.table:
        print(table(read_results(arguments.table)))
        return 0
    if arguments.list:
        for name, rules in blocks().items():
            print("\n    ".join([f"{name}:", *rules]))
        return 0
    rules = [*(blocks()[arguments.block] if arguments.block else ()), *filter(str.strip, arguments.rules.split(";"))]
    rules = [" ".join(f"{rule} {arguments.also}".split()) for rule in rules]
    networks = arguments.networks.split(",")
    if not rules or not set(networks) <= set(NETWORKS):
        command.error("write --rules, --block or --list" if not rules else f"--networks takes {', '.join(NETWORKS)}")
    try:  # check here, so that the error appears once and not in every process
        seeds = [int(seed) for seed in arguments.seeds.split(",")]
        for rule in rules:
            parse(rule)
        cifar100(arguments.data)
    except (ValueError, UserError) as error:
        command.error(str(error))
    options = {"holdout": arguments.holdout, "images": arguments.images}
    specs = [{"rule": r, "network": n, "seed": s} | options for r in rules for n in networks for s in seeds]
    arguments.out.mkdir(parents=True, exist_ok=True)
    with multi_process_service() if arguments.mps else contextlib.nullcontext():
        failed = run_all(specs, arguments, dict(os.environ) | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    if (arguments.out / "results.jsonl").exists():
        print(table(read_results(arguments.out / "results.jsonl")))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
