"""The images of a data set in COCO's layout: read from files or held in memory, unreadable, or of no use to a detector."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from detection_helpers import MASK, RETINA, WIDE, Saying, scenes_of, square, task_of, write_objects, write_part
from lab_helpers import one_thread, train
from PIL import Image

from pwlu.lab.data import coco, detection_images
from pwlu.lab.models import detectors
from pwlu.lab.recipes.catalog import RECIPES
from pwlu.lab.runs.processes import Processes
from pwlu.lab.runs.run_folder import RunFolder


@pytest.mark.parametrize("in_memory", [True, False])
def test_images_that_cannot_be_read(tmp_path, monkeypatch, in_memory):
    """Not there, cut off, no image, of another size, of unknown range: black, without objects, and counted."""
    if not in_memory:
        monkeypatch.setattr(detection_images, "IN_MEMORY", 0)
    write_part(tmp_path, "train", dict.fromkeys(range(1, 9), WIDE), [square(n, 3, 4, 20) for n in range(1, 9)])
    files = {n: tmp_path / "images" / f"{n}.png" for n in range(1, 9)}
    files[2].unlink()
    files[3].write_bytes(files[3].read_bytes()[:200])
    files[4].write_text("no image")
    Image.new("RGB", (64, 96)).save(files[5])
    Image.new("F", (96, 64), 0.5).save(files[6], "TIFF")
    Image.new("L", (96, 64), 77).save(files[7])  # grey will do
    Image.fromarray(np.full(WIDE, 99 * 257, np.uint16)).save(files[8])  # of 16 bits too
    write_part(tmp_path, "val", {9: WIDE}, [square(9, 3, 4, 20)])
    task = task_of(MASK, tmp_path, batch=8)
    assert task.train.unreadable == (5 if in_memory else None)
    assert ("5 images cannot be read" in task.notes[1]) == in_memory
    (((images, targets, unreadable),),) = task.epoch(0)
    assert unreadable == 5
    black = [not image.any() for image in images]
    assert sum(black) == 5
    assert [len(target["boxes"]) for target in targets] == [0 if b else 1 for b in black]
    for grey in (77, 99):
        assert any((image == grey / 255).all() for image in images)


def test_an_image_too_large_for_pillow(tmp_path, monkeypatch):
    part = coco.load(write_objects(tmp_path), with_masks=False)[0]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", WIDE[0] * WIDE[1] // 2 - 1)
    assert scenes_of(part).unreadable == len(part)


def test_an_image_in_memory_is_what_is_in_the_file(tmp_path, monkeypatch):
    part, _ = coco.load(write_objects(tmp_path), with_masks=True)
    held = scenes_of(part)
    monkeypatch.setattr(detection_images, "IN_MEMORY", 0)
    from_files = scenes_of(part)
    assert held.data.images is not None
    assert from_files.data.images is None
    plan, keys = [[4, 0], [7]], (1, 2, 3)
    for ours, theirs in zip(held.batches(plan, keys), from_files.batches(plan, keys), strict=True):
        for (image, target, _), (other, others_target, _) in zip(ours, theirs, strict=True):
            assert torch.equal(image, other)
            assert all(torch.equal(target[name], others_target[name]) for name in ("boxes", "labels", "masks"))


# Images to measure on.


@pytest.mark.parametrize("in_memory", [True, False])
def test_unreadable_images_to_measure_on(tmp_path, monkeypatch, in_memory):
    """They are counted over all processes."""
    if not in_memory:
        monkeypatch.setattr(detection_images, "IN_MEMORY", 0)
    write_objects(tmp_path)
    assert "unreadable_measured_images" not in measured(task_of(RETINA, tmp_path))
    (tmp_path / "images" / "101.png").write_text("no image")
    (tmp_path / "images" / "103.png").unlink()
    task = task_of(RETINA, tmp_path)
    assert measured(task)["unreadable_measured_images"] == 2
    monkeypatch.setattr(Processes, "all_reduce", lambda _, here: here + 10)  # of others
    assert measured(task)["unreadable_measured_images"] == 12


def measured(task):
    return task.measure(Saying(), nullcontext())


def test_a_run_names_unreadable_images(tmp_path, monkeypatch):
    monkeypatch.setattr(detection_images, "IN_MEMORY", 0)
    (write_objects(tmp_path / "data") / "images" / "101.png").unlink()
    command = [RETINA, "--data", tmp_path / "data", "--workers", 0, "--iterations", 1, "--act", "relu"]
    assert train(*command, "--runs", tmp_path / "runs") == 0
    (path,) = (tmp_path / "runs").iterdir()
    folder = RunFolder(path)
    assert folder.metrics()[-1]["unreadable_measured_images"] == 1
    assert folder.json("result.json")["unreadable_measured_images"] == 1
    assert "unreadable_images" not in folder.metrics()[-1]  # those of training


# Images of which nothing is left when they are scaled.

LONG = (4, 401)


@pytest.fixture
def with_long_images(tmp_path):
    for part, numbers in (("train", (1, 2, 3)), ("val", (4, 5, 6))):
        images = dict(zip(numbers, (LONG, LONG[::-1], (4, 400)), strict=True))
        write_part(tmp_path, part, images, [square(n, 0, 0, 4, size) for n, size in images.items()])
    return tmp_path


def test_long_images_are_left_out(with_long_images):
    """Training does not see them, and what is in them is missed."""
    task = task_of(RETINA, with_long_images, batch=1)
    assert task.used.tolist() == [2]
    assert task.notes[1] == (
        "training: 3 images (0 without objects), 3 objects, 0 crowds, 2 images too long and narrow for a detector"
    )
    assert task.notes[2].endswith("2 images too long and narrow for a detector")
    assert [indices for _, indices, _ in task.test_batches()] == [[2]]
    values = task.measure(Saying([0, 0, 4, 4]), nullcontext())
    assert [row["image_id"] for row in task.rows] == [6]
    assert values["box_ap"] == pytest.approx(100 * 34 / 101)  # one of three
    assert task.measured_images == 3


@pytest.mark.parametrize("name", [MASK, RETINA])
def test_a_detector_takes_what_is_not_left_out(name):
    """At the smallest of sizes."""
    model = detectors.build(RECIPES[name].network, 2, pixels=64, width=0.125, norm="batch", anchors=0.25, detections=2).eval()
    for shape in ((3, 4, 400), (3, 400, 4), (3, 1, 100), (3, 1, 1)):
        with one_thread(), torch.no_grad():
            assert len(model([torch.rand(shape)])) == 1
