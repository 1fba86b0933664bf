"""The command line: ``pwlu COMMAND``. Each command is a module of this package, which is imported only when it is needed.

Help texts are in the imperative, have no full stop, and end with the default in brackets.
"""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence

from pwlu.common.text import nearest
from pwlu.lab.recipes.settings import UserError
from pwlu.version import __version__

COMMANDS = {
    "info": "show versions, devices, and which kernel each device uses",
    "build": "compile the kernels ahead of time, for container images and clusters",
    "train": "train a network on a data set with a chosen activation",
    "compare": "train with several activations and seeds, and tabulate the results",
    "report": "write a report of a run as one HTML page: curves, alignment, shapes, learned functions",
    "evaluate": "compute COCO's average precision of saved detections",
    "export": "write the network of a run as a file that runs without pwlu: ONNX or torch.export",
    "bench": "time the network of a run against ReLU: in PyTorch, compiled, and in ONNX Runtime",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command named by the first argument."""
    parser = argparse.ArgumentParser(
        prog="pwlu",
        description="The Piecewise Linear Unit (PWLU): an activation function that is learned with the network.",
        epilog="Run `pwlu COMMAND --help` for the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"pwlu {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    given = list(sys.argv[1:] if arguments is None else arguments)
    chosen = parser
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if given[:1] == [name]:
            importlib.import_module(f"pwlu.cli.{name}").add_arguments(command)
            chosen = command
    options, unknown = parser.parse_known_args(given)
    if unknown:
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}{_suggestions(unknown, chosen.format_help())}")
    try:
        status: int = importlib.import_module(f"pwlu.cli.{options.command}").run(options)
        sys.stdout.flush()
    except UserError as error:
        print(f"pwlu {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python flushes once more at exit, which would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("pwlu: stopped because the program that read its output has exited (as in `| head`)", file=sys.stderr)
        return 128 + 13  # the status a shell reports for a program that SIGPIPE ended
    return status


def add_number(parser: argparse.ArgumentParser, flag: str, text: str, default: int | None = None) -> None:
    """Add an option that is an integer."""
    parser.add_argument(flag, type=int, default=default, metavar="N", help=text)


def check_positive(options: argparse.Namespace, *names: str) -> None:
    """Raise an error if one of these numbers is given and is below 1."""
    for name in names:
        if (value := getattr(options, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {value}")


def _suggestions(unknown: Sequence[str], help_text: str) -> str:
    """Suggest the known flag that is closest to each unknown one."""
    flags = sorted(set(re.findall(r"--[a-z][\w-]*", help_text)))
    near = {word: match for word in unknown if word.startswith("--") for match in nearest(word.partition("=")[0], flags)}
    return "".join(f". Instead of {word}, did you mean {match}?" for word, match in near.items())
