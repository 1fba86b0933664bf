"""Small images: every layout gives the same images, and bad files are named."""

import numpy as np
import pytest
import torch
from lab_helpers import IMAGE_CLASSES, task_of, train, write_tiny_imagenet

from pwlu.lab.data.image_file import read_image
from pwlu.lab.data.small_images import cifar100, tiny_imagenet
from pwlu.lab.recipes.settings import UserError


@pytest.mark.parametrize("annotated", [True, False])
def test_layouts(tmp_path, annotated):
    (images, labels, test_images, test_labels), classes = tiny_imagenet(write_tiny_imagenet(tmp_path, annotated))
    assert classes == list(IMAGE_CLASSES)
    assert images.shape == (12, 3, 64, 64)
    assert test_images.shape == (6, 3, 64, 64)
    for part, found, numbers in (("train", images, labels), ("val", test_images, test_labels)):
        paths = sorted((tmp_path / part).rglob("*.JPEG"), key=lambda path: path.name)
        assert len(paths) == len(found)
        for path, image, label in zip(paths, found, numbers, strict=True):
            assert path.name.startswith(classes[label])
            assert torch.equal(image, torch.from_numpy(np.array(read_image(path))).movedim(-1, 0))


def test_cifar_as_image_folders(tmp_path):
    root = write_tiny_imagenet(tmp_path, annotated=False, pixels=32)
    expected, classes = cifar100(root)
    assert expected[0].shape == (12, 3, 32, 32)
    (root / "val").rename(root / "test")
    found, names = cifar100(root)
    assert names == classes == list(IMAGE_CLASSES)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_rank_shows_the_progress(tmp_path, monkeypatch, capsys, rank):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    tiny_imagenet(write_tiny_imagenet(tmp_path))
    shown = capsys.readouterr().err
    assert ("reading images: 100%" in shown) == (rank == "0")
    assert ("12/12" in shown) == (rank == "0")


def test_the_data_of_a_recipe(tmp_path):
    task = task_of("tinyimagenet/resnet18", data=str(write_tiny_imagenet(tmp_path)), batch=4, width=0.125)
    assert (len(task.data.train), len(task.data.test), task.data.channels) == (12, 6, 3)
    assert (task.data.train.padding, task.data.train.flip) == (8, True)


def test_missing(tmp_path, capsys):
    command = ("tinyimagenet/resnet18", "--data", tmp_path, "--runs", tmp_path / "runs")
    assert train(*command) == 2
    assert f"Tiny-ImageNet is not at {tmp_path}" in capsys.readouterr().err


def test_bad_files(tmp_path):
    root = write_tiny_imagenet(tmp_path / "annotated")
    listed = root / "val" / "val_annotations.txt"
    for line in ("val_0.JPEG\tn000\t0", "val_0.JPEG", ""):
        listed.write_text(listed.read_text() + line + "\n")
        with pytest.raises(UserError, match=r"line 7: .* is not a class of .*train"):
            tiny_imagenet(root)
    listed.write_text("")
    with pytest.raises(UserError, match=r"val_annotations\.txt is empty, but must have a line for each image"):
        tiny_imagenet(root)
    (root / "train" / IMAGE_CLASSES[0] / "images" / f"{IMAGE_CLASSES[0]}_1.JPEG").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"_1\.JPEG cannot be read: .*Replace it in all copies of the data set"):
        tiny_imagenet(root)
    root = write_tiny_imagenet(tmp_path / "folders", annotated=False)
    (root / "val" / IMAGE_CLASSES[1]).rename(root / "val" / "other")
    with pytest.raises(UserError, match=f"the same classes, but only one of them has .*{IMAGE_CLASSES[1]}"):
        tiny_imagenet(root)
    with pytest.raises(UserError, match="has 32 x 32 pixels, but this recipe takes 64 x 64"):
        tiny_imagenet(write_tiny_imagenet(tmp_path / "small", pixels=32))
