"""Time a comparison of 24 digits runs in the local pool and on a Ray cluster of two nodes on this machine, one core each.

Then kill a process that trains, and one of the two nodes, when half of the runs are finished. The start of the cluster is not
counted; connecting to it is. Write a CSV file:

- tried_again: how many runs died and were tried again.
- different_runs: how many runs have other weights than in the local pool, in any bit.
- load: the load average at the end. Two processes train, so more than about two means that something else was running.
"""

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from timing import RESULTS, machine, write

RUNS = 24
SMALL: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}  # of a node


def compare(arguments: list[str], kill: Callable[[Path], None] | None) -> tuple[float, int, dict[str, str]]:
    """Run ``pwlu compare`` in an empty folder. Return its seconds, how many runs were tried again, and hashes of all weights.

    Args:
        arguments: the arguments of the command.
        kill: kills something, given the folder, when half of the runs are finished.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, begin = Path(name), time.monotonic()
        command = [sys.executable, "-m", "pwlu", "compare", "digits", "--realign-epochs", "1", *arguments]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
            while kill is not None and len(list(folder.glob("runs/*/result.json"))) < RUNS // 2:
                if process.poll() is not None:
                    raise RuntimeError("the comparison ended before half of its runs were finished")
                time.sleep(0.05)
            if kill is not None:
                kill(folder)
            printed, _ = process.communicate()
        seconds = time.monotonic() - begin
        if process.returncode:
            raise RuntimeError(f"the comparison ended with status {process.returncode}:\n{printed}")
        weights = {path.parent.name: digest(path) for path in folder.glob("runs/*/model.safetensors")}
    return seconds, printed.count("died and will be tried again"), weights


def digest(path: Path) -> str:
    """Return a hash of all bits of saved weights."""
    state = load_file(path)
    return hashlib.sha256(b"".join(key.encode() + state[key].numpy().tobytes() for key in sorted(state))).hexdigest()


def kill_process(folder: Path) -> None:
    """Kill the newest process that trains a run in this folder: an older one may just have finished."""
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if b"train" in command and any(str(folder / "runs").encode() in part for part in command):
            found.append(int(entry))
    os.kill(max(found), signal.SIGKILL)


def main() -> None:
    """Parse the command line, measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="train each run for so many epochs (default: 10)")
    parser.add_argument("--rounds", type=int, default=1, help="measure all so often, in turn (default: 1)")
    options = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"})  # nodes pass it on
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=SMALL | {"include_dashboard": False})
    os.environ["RAY_ADDRESS"] = cluster.address
    runs = ["--acts", "relu,prelu,swish,pwlu", "--seeds", str(RUNS // 4), "--epochs", str(options.epochs)]
    rows = []
    for number in range(options.rounds):
        second = cluster.add_node(**SMALL)
        cluster.wait_for_nodes()

        def kill_node(_: Path, node: Any = second) -> None:
            cluster.remove_node(node, allow_graceful=False)

        places: dict[str, tuple[list[str], Callable[[Path], None] | None]] = {
            "local pool": (["--jobs", "2"], None),
            "Ray, two nodes": (["--on", "ray"], None),
            "Ray, a process killed": (["--on", "ray"], kill_process),
            "Ray, a node killed": (["--on", "ray"], kill_node),  # last, because the next round starts it again
        }
        expected: dict[str, str] = {}
        for place, (arguments, kill) in places.items():
            seconds, tried_again, weights = compare([*runs, *arguments], kill)
            expected = expected or weights
            different = sum(weights.get(name) != digest for name, digest in expected.items())
            row = {
                "place": place,
                "round": number,
                "runs": len(weights),
                "epochs": options.epochs,
                "seconds": round(seconds, 2),
            }
            row |= {"tried_again": tried_again, "different_runs": different, "load": round(os.getloadavg()[0], 2)}
            print(row, flush=True)
            rows.append(row)
    cluster.shutdown()
    about = machine("cpu") | {"ray": ray.__version__}
    write(RESULTS / "cluster-cpu.csv", [row | about for row in rows])


if __name__ == "__main__":
    main()
