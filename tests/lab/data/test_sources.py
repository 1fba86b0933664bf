"""Images of a folder that are decoded in memory."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from pwlu.lab.data import sources
from pwlu.lab.data.sources import Decoded, Folder, decoded_if_small

SIZES = [(5, 7), (1, 1), (8, 3), (4, 9)]


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a class for every size."""
    rng = np.random.default_rng(0)
    for number, (height, width) in enumerate(SIZES):
        (tmp_path / str(number)).mkdir()
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(tmp_path / str(number) / "a.png")
    return Folder(tmp_path)


def test_the_images_of_the_files(folder):
    decoded = decoded_if_small(folder)
    assert isinstance(decoded, Decoded)
    assert (len(decoded), decoded.classes) == (4, ["0", "1", "2", "3"])
    for number in range(4):
        (ours, our_label), (theirs, label) = decoded.read(number), folder.read(number)
        assert np.array_equal(np.asarray(ours), np.asarray(theirs))
        assert (ours.mode, our_label) == ("RGB", label)


@pytest.mark.parametrize(("missing", "kind"), [(0, Decoded), (1, Folder)])
def test_what_fits(folder, monkeypatch, missing, kind):
    needed = 3 * sum(height * width for height, width in SIZES)
    with monkeypatch.context() as patch:
        patch.setattr(sources, "IN_MEMORY", needed - missing)
        assert type(decoded_if_small(folder)) is kind
    monkeypatch.setattr(sources, "_SHARED", folder_of_memory := sources.Path(folder.samples[0][0]).parent)
    free = 4 * (needed - missing)  # a container may have little memory that processes share
    monkeypatch.setattr(shutil, "disk_usage", lambda path: {folder_of_memory: SimpleNamespace(free=free)}[path])
    assert type(decoded_if_small(folder)) is kind
