"""Every file appears complete or not at all, also on a disk that is full."""

import os
import subprocess

import pytest
import torch
from report_page_helpers import functions_of, small_network, write_run
from torch import nn

import pwlu
from pwlu.cli import main
from pwlu.common import files
from pwlu.lab.inference import exporting

LEFT = 8192  # bytes on the small disk


@pytest.fixture
def disk(tmp_path):
    """A disk of 64 kB that is all but full."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = os.name == "posix" and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, check=False
    )
    if not made or made.returncode:
        pytest.skip("a disk can be mounted by root on Linux alone")
    try:
        (folder / "filler").write_bytes(b"-" * (65536 - LEFT))
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_when_it_is_complete(tmp_path):
    files.write(tmp_path / "a", b"old")
    with files.atomic_write(tmp_path / "a") as file:
        file.write_bytes(b"new")
        (file.parent / "a.data").write_bytes(b"more")
        assert (tmp_path / "a").read_bytes() == b"old"
        assert not (tmp_path / "a.data").exists()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"new", "a.data": b"more"}


def test_nothing_is_left_of_what_failed(tmp_path):
    files.write(tmp_path / "a", b"old")

    def failing():
        with files.atomic_write(tmp_path / "a") as file:
            file.write_bytes(b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"old"}


@pytest.mark.skipif(os.name == "nt", reason="links and rights of another kind")
def test_links_and_rights(tmp_path):
    """A link stays one, and the file is as readable as any other that the user makes."""
    (tmp_path / "link").symlink_to("target")
    files.write(tmp_path / "link", b"content")
    (tmp_path / "usual").touch()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"content"
    assert (tmp_path / "target").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize(("name", "why"), [("no/a", "the folder {}/no does not exist"), ("", "it exists and is not a file")])
def test_no_place(tmp_path, name, why):
    with pytest.raises(files.CannotWrite) as caught:
        files.write(tmp_path / name, b"")
    assert str(caught.value) == f"{tmp_path / name} cannot be written: {why.format(tmp_path)}"


# A disk that is full.


def test_a_full_disk(disk):
    files.write(disk / "a", b"old")
    with pytest.raises(files.CannotWrite) as caught:
        files.write(disk / "a", b"-" * 2 * LEFT)
    assert str(caught.value) == (
        f"no space left on the disk for {disk / 'a'}. Free some space and try again; an existing file is unchanged"
    )
    assert (disk / "a").read_bytes() == b"old"
    assert names(disk) == ["a", "filler"]


def test_a_report_on_a_full_disk(disk, tmp_path, capsys):
    run = write_run(tmp_path / "run", functions_of(small_network()))
    page = disk / "page.html"
    page.write_text("a good page")
    assert main(["report", str(run), "-o", str(page)]) == 2
    assert capsys.readouterr().err.startswith(f"pwlu report: no space left on the disk for {page}. ")
    assert page.read_text() == "a good page"
    assert names(disk) == ["filler", "page.html"]


EXPORT = """
import sys, torch
from pathlib import Path
from torch import nn
from pwlu.lab.inference import exporting
network = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3), nn.ReLU()).eval()
try:
    exporting.write_pt2(network, torch.randn(2, 3, 8, 8), Path(sys.argv[1]), {})
except OSError as error:
    sys.exit(str(error))
"""


@pytest.mark.slow
def test_pt2_on_a_full_disk(disk, processes):
    """In a process of its own, for torch ended that."""
    done = processes(["-c", EXPORT, disk / "model.pt2"], dict(os.environ))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"no space left on the disk for {disk / 'model.pt2'}. " in done.stderr
    assert names(disk) == ["filler"]


@pytest.mark.parametrize("units", [True, False])
def test_onnx_on_a_full_disk(disk, units):
    network = nn.Sequential(nn.Conv2d(3, 64, 3), pwlu.PWLU(64) if units else nn.ReLU()).eval()
    with pytest.raises(files.CannotWrite, match="no space left on the disk for ") as caught:
        exporting.write_onnx(network, torch.randn(2, 3, 8, 8), disk / "model.onnx", {})
    assert "dynamic_batch" not in str(caught.value)
    assert names(disk) == ["filler"]
