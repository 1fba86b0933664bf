"""What comes out of a data set in COCO's layout to train on and to measure on, and in which order."""

import numpy as np
import pytest
import torch
from detection_helpers import (
    MASK,
    RETINA,
    WIDE,
    code,
    decoded,
    read_part,
    scenes_of,
    square,
    task_of,
    write_objects,
    write_part,
)

from pwlu.lab.data import coco, keyed_random
from pwlu.lab.runs.processes import Processes


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    return write_objects(tmp_path_factory.mktemp("data") / "objects", train=20)


def test_targets(tmp_path):
    """Without crowds, inside of the image, classes in the order of their numbers."""
    rows = [square(1, 3, 4, 20), square(1, 1, 1, 9, category=3), square(1, 40, 1, 9, iscrowd=1)]
    rows.append(square(1, 90, 50, 6) | {"bbox": [90, -5, 30, 80]})
    part = read_part(write_part(tmp_path, "train", {1: WIDE}, rows))
    ((_, target, _),) = next(scenes_of(part).batches([[0]], (0, 0)))
    assert target["boxes"].tolist() == [[3, 4, 23, 24], [1, 1, 10, 10], [90, 0, 96, 64]]
    assert target["labels"].tolist() == [2, 1, 2]
    for mask, (left, top, right, bottom) in zip(target["masks"][:2], target["boxes"][:2].int().tolist(), strict=True):
        expected = torch.zeros(WIDE, dtype=torch.uint8)
        expected[top:bottom, left:right] = 1
        assert torch.equal(mask, expected)


@pytest.mark.parametrize(("name", "first"), [(MASK, 1), (RETINA, 0)])
def test_labels(objects, name, first):
    """Mask R-CNN's labels begin with 1, as 0 is the background. RetinaNet has no background label."""
    task = task_of(name, objects)
    part, labels, seen = task.train.part, {3: first, 7: first + 1}, set()
    for indices, ((_, targets, _),) in zip(task.order(0).tolist(), task.epoch(0), strict=True):
        for index, target in zip(indices, targets, strict=True):
            assert target["labels"].tolist() == [labels[c] for c in part.categories[part.objects(index)].tolist()]
            seen |= set(target["labels"].tolist())
    assert seen == {first, first + 1}
    _, targets = task.sample()
    assert [target["labels"].tolist() for target in targets] == [[first], [first]]


def test_masks_are_those_of_the_file(tmp_path):
    """Whatever of their pixels is set, with crowds among the objects, which have none here, and flipped with their image."""
    random = np.random.default_rng(0)
    masks = [random.random(WIDE) < share for share in (0.001, 0.5, 2, 0.999, 2, 0.1)]
    masks[1][-1, -1] = masks[3][0, 0] = True  # of neighbours, one to its last pixel, the other from its first on
    masks[0][:, 40:50] = True  # over the edges of columns
    rows = [
        square(1, 0, 0, 9) | {"segmentation": code(mask.astype(np.uint8)), "iscrowd": k == 2} for k, mask in enumerate(masks)
    ]
    part = read_part(write_part(tmp_path, "train", {1: WIDE}, rows))
    expected = torch.from_numpy(np.stack(masks[:2] + masks[3:]).astype(np.uint8))
    seen = set()
    for epoch in range(8):
        ((_, target, _),) = next(scenes_of(part, flip=True).batches([[0]], (0, epoch)))
        seen.add(flipped := bool(keyed_random.uniform(0, epoch, 1) >= 0.5))
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
            if keyed_random.uniform(*keys, int(part.image_ids[index])) < 0.5:
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
    """A resumed run begins where it stopped."""
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


def test_each_part_says_what_is_left_out_of_it(tmp_path):
    """What the file says of an image that it does not name is said once."""
    images = dict.fromkeys(range(1, 11), WIDE)
    bad = [square(n, 3, 4, 9, bbox=[0, 0, 0, 0]) for n in range(1, 11) for _ in range(n)]
    write_part(tmp_path, "train", images, [*bad, *(square(n, 3, 4, 9) for n in images), square(99, 0, 0, 9)])
    write_part(tmp_path, "val", {20: WIDE}, [square(20, 3, 4, 9)])
    task = task_of(MASK, tmp_path, holdout=4)
    parts = (task.train.part, task.test.part)
    for part, note in zip(parts, task.notes[1:], strict=True):
        count = part.image_ids.sum()
        assert part.left_out[coco.NO_AREA].tolist() == part.image_ids.tolist()
        assert f", left out: {count} objects {coco.NO_AREA}" in note
    assert sum(int(part.left_out[coco.UNKNOWN_IMAGE].sum()) for part in parts) == 1
    assert len([note for note in task.notes if f", left out: 1 object {coco.UNKNOWN_IMAGE}" in note]) == 1
