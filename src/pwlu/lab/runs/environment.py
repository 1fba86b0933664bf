"""Record the versions and the hardware of a run."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from pwlu.lab.runs.processes import Processes
from pwlu.lab.runs.run_folder import FORMAT
from pwlu.version import __version__

SIDE_BY_SIDE = "PWLU_SIDE_BY_SIDE"  # `pwlu compare` sets it to the number of runs that share the device; times depend on it


def environment(processes: Processes) -> dict[str, Any]:
    """Return the contents of environment.json: source revision, versions, hardware."""
    cuda = processes.device.type == "cuda"
    return {
        "pwlu": __version__,
        "format": FORMAT,
        "revision": revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": version("torchvision"),
        "device": torch.cuda.get_device_name(processes.device) if cuda else processor(),
        "threads": torch.get_num_threads(),
        "processes": processes.count,
        "side_by_side": int(os.environ.get(SIDE_BY_SIDE, 1)),
    }


def processor() -> str:
    """Return the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def revision() -> str:
    """Return the commit of the source, with a + if files have changed since. Return "" for an installed package.

    For a copy of the source without its git history, set PWLU_REVISION to the commit.
    """
    root = Path(__file__).parents[4]
    if not (root / ".git").exists():
        return os.environ.get("PWLU_REVISION", "")
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=10"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def version(package: str) -> str:
    """Return the version of an installed package, or ""."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
