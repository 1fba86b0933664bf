"""Data sets in COCO's layout: what is read, what is left out and counted, and what comes out of them to train on."""

import json

import numpy as np
import pytest
import torch
from detection_helpers import (
    CATEGORIES,
    MASK,
    RETINA,
    TALL,
    WIDE,
    code,
    decoded,
    square,
    task_of,
    write_objects,
    write_part,
)
from PIL import Image

from pwlu.recipes import coco, draws, scenes
from pwlu.recipes.processes import Processes
from pwlu.recipes.settings import UserError


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    return write_objects(tmp_path_factory.mktemp("data") / "objects", train=20)


def scenes_of(part, flip=False):
    return scenes.Scenes(part, 1, flip, torch.device("cpu"), 0)


# Reading.


@pytest.mark.parametrize("layout", ["coco", "images"])
def test_layouts(tmp_path, layout):
    for part in ("train", "val"):
        name, folder = (f"{part}2017", f"{part}2017") if layout == "coco" else (part, "images")
        write_part(tmp_path, name, {5: WIDE}, [square(5, 1, 2, 20)], folder=folder)
    for part in coco.load(tmp_path, with_masks=True):
        assert (part.folder / part.names[0]).exists()
        assert part.classes == {3: "red", 7: "green"}
        assert part.boxes.tolist() == [[1, 2, 20, 20]]
        assert part.sizes.tolist() == [list(WIDE)]
        ((image, _, readable),) = next(scenes_of(part).batches([[0]]))
        assert readable
        assert image[:, 10, 10].tolist() == [40, 230, 40]


@pytest.mark.parametrize("form", ["polygon", "lengths", "compressed"])
def test_masks_of_every_form(tmp_path, form):
    mask = np.zeros(WIDE, np.uint8)
    mask[10:20, 30:50] = 1
    flat = mask.flatten(order="F")
    edges = np.flatnonzero(np.diff(flat)) + 1
    lengths = np.diff([0, *edges, flat.size]).tolist()
    forms = {
        "polygon": [[30, 10, 50, 10, 50, 20, 30, 20]],
        "lengths": {"size": list(WIDE), "counts": lengths},
        "compressed": code(mask),
    }
    row = square(1, 30, 10, 10) | {"bbox": [30, 10, 20, 10]}
    write_part(tmp_path, "train", {1: WIDE}, [row])
    path = tmp_path / "annotations" / "instances_train.json"
    content = json.loads(path.read_text())
    content["annotations"][0]["segmentation"] = forms[form]
    path.write_text(json.dumps(content))
    part = coco.read(path, tmp_path / "images", with_masks=True)
    assert torch.equal(decoded(part, 0), torch.from_numpy(mask)[None])


def test_what_cannot_be_used_is_left_out_and_counted(tmp_path):
    bad = [
        (square(1, 0, 0, 9, category_id=4), coco.UNKNOWN_CATEGORY),
        (square(99, 0, 0, 9), coco.UNKNOWN_IMAGE),
        (square(1, 0, 0, 9, bbox=[5, 5, 0, 9]), coco.NO_AREA),
        (square(1, 0, 0, 9, bbox=[5, 5, 9, -1]), coco.NO_AREA),
        (square(1, 0, 0, 9, bbox=[96, 5, 9, 9]), coco.NO_AREA),  # outside of the image
        (square(1, 0, 0, 9, bbox=[float("nan"), 5, 9, 9]), coco.NO_AREA),
        (square(1, 0, 0, 9, bbox=[5, 5]), coco.NO_AREA),
        (square(1, 0, 0, 9, segmentation=None), coco.NO_MASK),
        (square(1, 0, 0, 9, segmentation={"size": [64, 96], "counts": "3"}), coco.NO_MASK),
        (
            square(1, 0, 0, 9, segmentation={"size": [64, 96], "counts": 3 * square(1, 0, 0, 9)["segmentation"]["counts"]}),
            coco.NO_MASK,
        ),
        *(  # 3 and 9 pixels of 6144, compressed and not; less than none; one that breaks off in a number
            (square(1, 0, 0, 9, segmentation={"size": [64, 96], "counts": counts}), coco.NO_MASK)
            for counts in ("39", [3, 9], "4LPP6", [4, -4, 6144], "P")
        ),
        (square(1, 0, 0, 0), coco.NO_AREA),
        (square(1, 0, 0, 9) | {"segmentation": code(np.zeros(WIDE, np.uint8))}, coco.NO_MASK),
        (square(1, 0, 0, 9) | {"segmentation": code(np.ones(TALL, np.uint8))}, coco.NO_MASK),
    ]
    good = [square(1, 3, 4, 20), square(3, 1, 1, 9, iscrowd=1), square(4, 1, 1, 9), square(4, 30, 1, 9, iscrowd=1)]
    images = {1: WIDE, 2: WIDE, 3: WIDE, 4: WIDE}  # 2 has nothing in it, 3 a crowd alone
    write_part(tmp_path, "train", images, good)
    path = tmp_path / "annotations" / "instances_train.json"
    content = json.loads(path.read_text())
    content["annotations"] = [row for row, _ in bad] + content["annotations"]
    path.write_text(json.dumps(content))
    part = coco.read(path, tmp_path / "images", with_masks=True)
    expected = {}
    for _, why in bad:
        expected[why] = expected.get(why, 0) + 1
    assert part.left_out == expected
    assert part.first.tolist() == [0, 1, 1, 2, 4]
    assert part.crowd.tolist() == [False, True, False, True]
    assert part.trained_on().tolist() == [0, 3]
    assert str(part).startswith("4 images (2 without objects), 2 objects, 2 crowds, left out: ")
    assert f"{expected[coco.NO_AREA]} boxes without area in their image" in str(part)
    of_boxes = coco.read(path, tmp_path / "images", with_masks=False)
    assert coco.NO_MASK not in of_boxes.left_out
    assert len(of_boxes.boxes) == len(part.boxes) + expected[coco.NO_MASK]


@pytest.mark.parametrize("in_memory", [True, False])
def test_images_that_cannot_be_read(tmp_path, monkeypatch, in_memory):
    """Not there, cut off, no image, of another size: black, without objects, and counted."""
    if not in_memory:
        monkeypatch.setattr(scenes, "IN_MEMORY", 0)
    write_part(tmp_path, "train", dict.fromkeys(range(1, 7), WIDE), [square(n, 3, 4, 20) for n in range(1, 7)])
    files = {n: tmp_path / "images" / f"{n}.png" for n in range(1, 7)}
    files[2].unlink()
    files[3].write_bytes(files[3].read_bytes()[:200])
    files[4].write_text("no image")
    Image.new("RGB", (64, 96)).save(files[5])
    Image.new("L", (96, 64), 77).save(files[6])  # grey will do
    write_part(tmp_path, "val", {8: WIDE}, [square(8, 3, 4, 20)])
    task = task_of(MASK, tmp_path, batch=6)
    assert task.train.unreadable == (4 if in_memory else None)
    assert ("4 images cannot be read" in task.notes[1]) == in_memory
    (((images, targets, unreadable),),) = task.epoch(0)
    assert unreadable == 4
    black = [not image.any() for image in images]
    assert sum(black) == 4
    assert [len(target["boxes"]) for target in targets] == [0 if b else 1 for b in black]
    assert any((image == 77 / 255).all() for image in images)


def test_an_image_in_memory_is_what_is_in_the_file(objects, monkeypatch):
    part, _ = coco.load(objects, with_masks=True)
    held = scenes_of(part)
    monkeypatch.setattr(scenes, "IN_MEMORY", 0)
    from_files = scenes_of(part)
    assert held.data.pixels is not None
    assert from_files.data.pixels is None
    plan, keys = [[4, 0], [7]], (1, 2, 3)
    for ours, theirs in zip(held.batches(plan, keys), from_files.batches(plan, keys), strict=True):
        for (image, target, _), (other, others_target, _) in zip(ours, theirs, strict=True):
            assert torch.equal(image, other)
            assert all(torch.equal(target[name], others_target[name]) for name in ("boxes", "labels", "masks"))


# What is trained on.


def test_targets(tmp_path):
    """Without crowds, inside of the image, classes in the order of their numbers."""
    rows = [square(1, 3, 4, 20), square(1, 1, 1, 9, category=3), square(1, 40, 1, 9, iscrowd=1)]
    rows.append(square(1, 90, 50, 6) | {"bbox": [90, -5, 30, 80]})
    part = coco.read(
        write_part(tmp_path, "train", {1: WIDE}, rows) / "annotations/instances_train.json", tmp_path / "images", True
    )
    ((_, target, _),) = next(scenes_of(part).batches([[0]], (0, 0)))
    assert target["boxes"].tolist() == [[3, 4, 23, 24], [1, 1, 10, 10], [90, 0, 96, 64]]
    assert target["labels"].tolist() == [2, 1, 2]
    for mask, (left, top, right, bottom) in zip(target["masks"][:2], target["boxes"][:2].int().tolist(), strict=True):
        expected = torch.zeros(WIDE, dtype=torch.uint8)
        expected[top:bottom, left:right] = 1
        assert torch.equal(mask, expected)


def test_masks_are_those_of_the_file(tmp_path):
    """Whatever of their pixels is set, with crowds among the objects, which have none here, and flipped with their image."""
    random = np.random.default_rng(0)
    masks = [random.random(WIDE) < share for share in (0.001, 0.5, 2, 0.999, 2, 0.1)]
    masks[1][-1, -1] = masks[3][0, 0] = True  # of neighbours, one to its last pixel, the other from its first on
    masks[0][:, 40:50] = True  # over the edges of columns
    rows = [
        square(1, 0, 0, 9) | {"segmentation": code(mask.astype(np.uint8)), "iscrowd": k == 2} for k, mask in enumerate(masks)
    ]
    root = write_part(tmp_path, "train", {1: WIDE}, rows)
    part = coco.read(root / "annotations/instances_train.json", root / "images", with_masks=True)
    expected = torch.from_numpy(np.stack(masks[:2] + masks[3:]).astype(np.uint8))
    seen = set()
    for epoch in range(8):
        ((_, target, _),) = next(scenes_of(part, flip=True).batches([[0]], (0, epoch)))
        seen.add(flipped := bool(draws.uniform(0, epoch, 1) >= 0.5))
        assert torch.equal(target["masks"], expected.flip(-1) if flipped else expected)
        assert target["masks"].dtype == torch.uint8
    assert seen == {False, True}


def test_flip(objects):
    """Half of the images, drawn from seed, epoch and the image's number, with all that is in them."""
    part, _ = coco.load(objects, with_masks=True)
    plain, flipped = scenes_of(part), scenes_of(part, flip=True)
    mirrored = 0
    for keys in ((0, 0, 2), (0, 1, 2), (1, 0, 2)):
        plan = [[*range(len(part))][::-2], [*range(len(part))][::2]]
        both = ([scene for batch in s.batches(plan, keys) for scene in batch] for s in (plain, flipped))
        for index, (image, target, _), (other, others, _) in zip([*plan[0], *plan[1]], *both, strict=True):
            if draws.uniform(*keys, int(part.image_ids[index])) < 0.5:
                assert torch.equal(image, other)
                assert torch.equal(target["boxes"], others["boxes"])
                continue
            mirrored += 1
            assert torch.equal(image.flip(-1), other)
            assert torch.equal(target["masks"].flip(-1), others["masks"])
            for mask, (left, top, right, bottom) in zip(others["masks"], others["boxes"].int().tolist(), strict=True):
                assert mask[top:bottom, left:right].all()
                assert mask.sum() == (bottom - top) * (right - left)
    assert 15 < mirrored < 45


def test_wide_and_tall_images_come_apart(objects):
    """20 images, 7 of them tall: in batches of 4, one tall, three wide, and what is left of both together."""
    task = task_of(RETINA, objects, batch=4)
    orders = [task.order(epoch) for epoch in (0, 1, 0)]
    assert torch.equal(orders[0], orders[2])
    assert not torch.equal(orders[0], orders[1])
    for order in orders[:2]:
        assert order.shape == (task.steps_per_epoch, 4) == (5, 4)
        assert order.flatten().unique().numel() == 20
        tall = [set((task.train.part.sizes[batch, 0] > task.train.part.sizes[batch, 1]).tolist()) for batch in order]
        assert [len(kinds) for kinds in tall] == [1, 1, 1, 1, 2]


def test_processes_share_every_batch(objects):
    """And a run that goes on begins where it stopped."""
    whole = [[image.sum().item() for image in images] for ((images, _, _),) in task_of(RETINA, objects).epoch(2)]
    shares = [
        task_of(RETINA, objects, Processes(rank, 2, torch.device("cpu")), accumulate=2).epoch(2, first_step=1)
        for rank in (0, 1)
    ]
    for expected, parts in zip(whole[1:], zip(*shares, strict=True), strict=True):
        found = [image.sum().item() for share in parts for images, _, _ in share for image in images]
        assert sorted(found) == sorted(expected)


def test_every_image_is_measured_once(objects):
    for count in (1, 2, 7):
        tasks = [task_of(RETINA, objects, Processes(rank, count, torch.device("cpu")), batch=14) for rank in range(count)]
        batches = [(images, indices) for task in tasks for images, indices, _ in task.test_batches()]
        assert sorted(index for _, indices in batches for index in indices) == list(range(5))
        assert all(len({image.shape for image in images}) == 1 for images, _ in batches)


def test_held_out_images(objects):
    task, other = (task_of(MASK, objects, holdout=6, seed=seed, batch=2) for seed in (0, 1))
    assert (len(task.train), len(task.test), task.measured_images) == (14, 6, 6)
    assert task.measured_on == "held-out training images"
    assert torch.equal(task.test.part.image_ids, other.test.part.image_ids)
    whole, _ = coco.load(objects, with_masks=True)
    for part in (task.train.part, task.test.part):
        for index, number in enumerate(part.image_ids.tolist()):
            place = whole.image_ids.tolist().index(number)
            ours, theirs = part.objects(index), whole.objects(place)
            assert torch.equal(part.boxes[ours], whole.boxes[theirs])
            assert torch.equal(decoded(part, index), decoded(whole, place))


# Mistakes.


def test_data_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"expected one file .*/annotations/instances_train\*\.json, there is none\. Expected"):
        coco.load(tmp_path, True)
    write_objects(tmp_path)
    copy = tmp_path / "annotations" / "instances_train2017.json"
    copy.write_bytes((tmp_path / "annotations" / "instances_train.json").read_bytes())
    with pytest.raises(UserError, match=r"2 files: instances_train\.json, instances_train2017\.json"):
        coco.load(tmp_path, True)
    copy.unlink()
    (tmp_path / "images").rename(tmp_path / "pictures")
    with pytest.raises(UserError, match=r"has no images: expected them in .*/train or .*/images"):
        coco.load(tmp_path, True)
    (tmp_path / "images").mkdir()
    with pytest.raises(UserError, match=r"the images of the train annotations are not in .*/images: it has no 1\.png"):
        coco.load(tmp_path, True)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "does not hold annotations as COCO writes them: JSONDecodeError"),
        ("{}", "does not hold annotations as COCO writes them: KeyError\\('categories'\\)"),
        ('{"categories": [], "images": [{"id": 1}], "annotations": []}', "KeyError\\('file_name'\\)"),
        ('{"categories": [], "images": [], "annotations": [{}]}', "KeyError\\('image_id'\\)"),
        (
            json.dumps(
                {"categories": [], "images": [{"id": 1, "file_name": "x", "height": 1, "width": 1}] * 2, "annotations": []}
            ),
            "1 images have the number of another image",
        ),
    ],
)
def test_files_that_are_not_annotations(tmp_path, content, text):
    path = tmp_path / "instances_train.json"
    path.write_text(content)
    with pytest.raises(UserError, match=text):
        coco.read(path, tmp_path, True)


def test_parts_that_do_not_fit(tmp_path):
    write_part(tmp_path, "train", {1: WIDE}, [square(1, 1, 2, 20)])
    write_part(tmp_path, "val", {1: WIDE}, [square(1, 1, 2, 20)], [*CATEGORIES, {"id": 9, "name": "blue"}])
    with pytest.raises(UserError, match=r"have different categories: \(9, 'blue'\) in one of them only"):
        coco.load(tmp_path, True)
    write_part(tmp_path, "val", {1: WIDE}, [square(1, 1, 2, 20, iscrowd=1)])
    with pytest.raises(UserError, match=r"the val annotations under .* have no object that could be used: 1 images"):
        coco.load(tmp_path, True)
