"""NVIDIA's multi-process service around the runs of a comparison."""

import os
import stat

import pytest

from pwlu.lab.compare import mps

VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


@pytest.fixture
def control(tmp_path, monkeypatch):
    """Put a program in place of NVIDIA's that logs its arguments and its input. Return the path of the log."""
    program, log = tmp_path / mps._CONTROL, tmp_path / "log"
    program.write_text(f'#!/bin/sh\necho "$* $CUDA_MPS_PIPE_DIRECTORY" >> {log}\n[ "$1" = -d ] || cat >> {log}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv(VARIABLES[0], raising=False)
    monkeypatch.setenv(VARIABLES[1], "mine")
    return log


def test_children_use_the_service_until_it_ends(control, monkeypatch, capsys):
    monkeypatch.setattr(mps, "_CHECK", "import os; os.environ['CUDA_MPS_PIPE_DIRECTORY']")
    with mps.multi_process_service():
        folder = os.environ[VARIABLES[0]]
        assert os.environ[VARIABLES[1]] == folder
        assert os.path.isdir(folder)
    assert control.read_text() == f"-d {folder}\n {folder}\nquit\n"
    assert VARIABLES[0] not in os.environ
    assert os.environ[VARIABLES[1]] == "mine"
    assert not os.path.exists(folder)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("reason", ["no program", "no GPU"])
def test_it_says_if_there_is_no_service(reason, control, monkeypatch, capsys):
    if reason == "no program":
        (control.parent / mps._CONTROL).unlink()
    monkeypatch.setattr(mps, "_CHECK", "raise SystemExit(1)")
    with mps.multi_process_service():
        assert VARIABLES[0] not in os.environ
        assert os.environ[VARIABLES[1]] == "mine"
    assert "--mps does not work here, continuing without it: " in capsys.readouterr().err
