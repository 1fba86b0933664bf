"""The command line: ``pwlu <command>``. Each command is a file beside this one, imported when it is called."""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence

from pwlu.text import nearest
from pwlu.version import __version__

COMMANDS = {
    "info": "versions, devices, and which code computes PWLU where, and why",
    "build": "compile now what the first process would, for images and clusters",
    "train": "train an architecture on a data set with a chosen activation",
    "compare": "fill a table of activations, architectures and seeds",
    "report": "a run as one page of HTML: curves, alignment, shapes, all learned functions",
    "evaluate": "COCO's average precision of detections that were saved",
    "export": "the network of a run as ONNX, or for torch.export.load: a file that needs nothing of pwlu",
    "bench": "how fast the network of a run is: in PyTorch, compiled and in ONNX Runtime, beside ReLU",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command named by the first argument."""
    parser = argparse.ArgumentParser(
        prog="pwlu",
        description="The Piecewise Linear Unit: an activation function that a network learns for itself.",
        epilog="`pwlu COMMAND --help` says more about each command.",
    )
    parser.add_argument("--version", action="version", version=f"pwlu {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    given = list(sys.argv[1:] if arguments is None else arguments)
    chosen = parser
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if given[:1] == [name]:
            importlib.import_module(f"pwlu.cli.{name}").add_arguments(command)
            chosen = command
    options, unknown = parser.parse_known_args(given)
    if unknown:
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}{_meant(unknown, chosen.format_help())}")
    try:
        status: int = importlib.import_module(f"pwlu.cli.{options.command}").run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at exit, which would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("pwlu: stopped, because nobody reads its output any more (as after `| head`)", file=sys.stderr)
        return 128 + 13  # as a shell says of a program that SIGPIPE ended
    return status


def _meant(unknown: Sequence[str], help_text: str) -> str:
    """Name the flags that are nearest to those that are not known."""
    flags = sorted(set(re.findall(r"--[a-z][\w-]*", help_text)))
    near = {word: match for word in unknown if word.startswith("--") for match in nearest(word.partition("=")[0], flags)}
    return "".join(f". Instead of {word}, did you mean {match}?" for word, match in near.items())
