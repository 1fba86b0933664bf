"""``pwlu build``: compile the kernels ahead of time, for container images and clusters."""

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pwlu.kernels import build, cpu, eager


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the help text. There are no options."""
    parser.description = (
        "Compile the libraries that pwlu otherwise compiles on first use. Print their paths and build times:\n"
        "  cpu    the CPU kernel, one per instruction set, unless the package includes it; needs a C compiler\n"
        "  eager  the operators for eager mode, for the installed torch; needs a C++ compiler, 1 GB of memory and at least\n"
        "         15 s on one core\n"
        "Existing libraries are kept. Exit status 1 means that a library could not be compiled; standard error says why."
    )
    parser.epilog = (
        "The libraries go to $PWLU_CACHE, or to the user's cache folder if it is not set. Only the user who ran this command\n"
        "can use them; libraries built by root serve every user. In a container image, where the user may change later, set\n"
        "the folder:\n"
        "  ENV PWLU_CACHE=/opt/pwlu\n"
        "  RUN pwlu build\n"
        "On a cluster whose nodes share the home folder, run it once on one of the compute nodes. All nodes with the same\n"
        "processor architecture and C library use the result. CC and CXX select the compilers. `pwlu info` shows which\n"
        "kernels are in use."
    )


def run(_options: argparse.Namespace) -> int:
    """Build all libraries, and print one line for each."""
    built = [_build(f"cpu {variant}", functools.partial(_build_cpu, variant)) for variant in build.variants()]
    return int(not all([*built, _build("eager", functools.partial(eager.compile_library, keep=True))]))


def _build_cpu(variant: str) -> Path:
    kernel = cpu.installed(variant)
    return build.build(variant, keep=True) if kernel is None else kernel.path


def _build(name: str, make: Callable[[], Path]) -> bool:
    """Build one library and print its path. Return whether it worked."""
    start = time.monotonic()
    try:
        path = make()
    except OSError as error:
        print(f"pwlu build: {name} could not be built: {error}", file=sys.stderr)
        return False
    print(f"{name:<12}  {time.monotonic() - start:5.1f} s  {path}")
    return True
