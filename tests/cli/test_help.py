"""The help of every command, in one style: imperative, no full stop, the default in brackets at the end."""

import argparse
import importlib

import pytest

from pwlu.cli import COMMANDS, main

VERBS = (
    "accumulate add choose compare compile compute continue count create divide export fail give initialize keep learn list "
    "measure multiply pass raise read reduce run save seed set show skip spread time train update use write"
)
IMPERATIVE = frozenset(VERBS.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_style_of_help(command, capsys):
    parser = argparse.ArgumentParser()
    importlib.import_module(f"pwlu.cli.{command}").add_arguments(parser)
    for action in parser._actions[1:]:  # the first is argparse's own --help
        text = action.help.replace("%%", "%")
        assert text.split()[0] in IMPERATIVE, text
        assert not text.endswith("."), text
        assert not action.option_strings or text.endswith(")"), text
        assert not action.option_strings or "(default: " in text, text
    assert COMMANDS[command].split()[0] in IMPERATIVE
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert all(len(line) <= 128 for line in capsys.readouterr().out.splitlines())


def test_help_of_all(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in COMMANDS)
