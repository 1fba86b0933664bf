"""``pwlu build``: compile the libraries now, for images and clusters."""

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pwlu.kernels import build, cpu, eager


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the help text; there are no options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Compile what the first process that uses pwlu would compile, and print where it is and how long that took:\n"
        "  cpu    the CPU kernel, for each level of this kind of processor, unless the package came with it (a C compiler)\n"
        "  eager  the operators without Python, for the installed torch (a C++ compiler, 15 s of a core or more, 1 GB)\n"
        "What is there already is left as it is. Exit status 1: something could not be compiled, and standard error says why."
    )
    parser.epilog = (
        "The libraries go to $PWLU_CACHE, else to the user's cache folder. They serve the user who ran this command; if that\n"
        "was root, everybody. In an image, where the user may be another one later, name the folder:\n"
        "  ENV PWLU_CACHE=/opt/pwlu\n"
        "  RUN pwlu build\n"
        "On a cluster whose nodes share the home folder, run it once on one of the nodes that will compute: the libraries are\n"
        "used by those with the same processor architecture and C library. CC and CXX name the compilers. `pwlu info` shows\n"
        "what serves."
    )


def run(_options: argparse.Namespace) -> int:
    """Build one after the other, and print a line for each."""
    made = [_tell(f"cpu {variant}", functools.partial(_cpu, variant)) for variant in build.variants()]
    return int(not all([*made, _tell("eager", functools.partial(eager.compile_library, keep=True))]))


def _cpu(variant: str) -> Path:
    kernel = cpu.installed(variant)
    return build.build(variant, keep=True) if kernel is None else kernel.path


def _tell(name: str, make: Callable[[], Path]) -> bool:
    start = time.monotonic()
    try:
        path = make()
    except OSError as error:
        print(f"pwlu build: {name} could not be built: {error}", file=sys.stderr)
        return False
    print(f"{name:<12}  {time.monotonic() - start:5.1f} s  {path}")
    return True
