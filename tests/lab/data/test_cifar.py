"""Files of CIFAR-100: pickles by others, which may be damaged or made to harm."""

import codecs
import io
import os
import pickle
import re
import struct

import numpy as np
import pytest
from lab_helpers import train, write_cifar

from pwlu.lab.data.cifar import cifar100
from pwlu.lab.recipes.settings import UserError


class Python2Pickler(pickle._Pickler):
    """Writes bytes as the texts that they were in Python 2, in which the authors of CIFAR-100 made their files."""

    dispatch = pickle._Pickler.dispatch | {}

    def save_bytes(self, content):
        self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)

    dispatch[bytes] = save_bytes


def test_cifar_of_python_2(tmp_path):
    path = write_cifar(tmp_path) / "cifar-100-python" / "train"
    content = pickle.loads(path.read_bytes())
    written = io.BytesIO()
    Python2Pickler(written, protocol=2).dump(content)
    path.write_bytes(written.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    (pixels, labels, *_), names = cifar100(tmp_path)
    assert pixels.flatten(1).tolist() == content["data"].tolist()
    assert labels.tolist() == content["fine_labels"]
    assert names == [f"kind {k}" for k in range(100)]


class Harmful:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("part", ["train", "test", "meta"])
@pytest.mark.parametrize("function", [os.system, os.mkdir, exec, np.load, codecs.encode])
def test_a_pickle_that_would_do_harm(tmp_path, monkeypatch, capsys, part, function):
    """It is refused before any of its code is called."""
    monkeypatch.chdir(tmp_path)
    path = write_cifar(tmp_path) / "cifar-100-python" / part
    arguments = {os.mkdir: ["harm"], codecs.encode: ["text", "rot13"]}.get(function, ["mkdir harm"])
    path.write_bytes(pickle.dumps({"data": Harmful(function, *arguments)}, protocol=2))
    assert train("cifar100/resnet18", "--data", tmp_path, "--runs", tmp_path / "runs") == 2
    text = capsys.readouterr().err
    assert f"{path} is damaged (UnpicklingError(" in text
    assert "it loads " in text or "expected bytes in latin1, not in rot13" in text
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"data": np.zeros((12, 3072))}, "data must be uint8 of shape (images, 3072), not torch.float64"),
        ({"data": np.zeros((12, 3071), np.uint8)}, "not torch.uint8 of shape (12, 3071)"),
        ({"data": np.zeros((0, 3072), np.uint8)}, "is damaged ("),
        ({"data": "pixels"}, "is damaged ("),
        ({"fine_labels": [0] * 11}, "fine_labels must be one number from 0 to 99 per image"),
        ({"fine_labels": [100] * 12}, "fine_labels must be one number from 0 to 99 per image"),
        ({"fine_labels": [0.5] * 12}, "fine_labels must be one number from 0 to 99 per image"),
        ({"fine_labels": [10**30] * 12}, "is damaged ("),
        ({"fine_labels": None}, "is damaged ("),
    ],
)
def test_cifar_of_another_kind(tmp_path, changes, wrong):
    path = write_cifar(tmp_path) / "cifar-100-python" / "train"
    path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes()) | changes, protocol=2))
    with pytest.raises(UserError, match=re.escape(wrong)):
        cifar100(tmp_path)


def test_names_of_another_kind(tmp_path):
    path = write_cifar(tmp_path) / "cifar-100-python" / "meta"
    for content in ({}, {"fine_label_names": ["a"]}, {"fine_label_names": [1] * 100}, [1]):
        path.write_bytes(pickle.dumps(content))
        with pytest.raises(UserError, match="is damaged"):
            cifar100(tmp_path)
