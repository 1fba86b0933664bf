"""Annotation files as COCO writes them: what is read, what is left out and counted, and what is an error."""

import math

import numpy as np
import pytest
import torch
from detection_helpers import (
    CATEGORIES,
    TALL,
    WIDE,
    code,
    decoded,
    read_part,
    rewrite,
    scenes_of,
    square,
    write_objects,
    write_part,
)

from pwlu.lab.data import coco
from pwlu.lab.recipes.settings import UserError


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
    write_part(tmp_path, "train", {1: WIDE}, [square(1, 30, 10, 10) | {"bbox": [30, 10, 20, 10]}])
    rewrite(tmp_path, "train", lambda content: content["annotations"][0].update(segmentation=forms[form]))
    assert torch.equal(decoded(read_part(tmp_path), 0), torch.from_numpy(mask)[None])


@pytest.mark.parametrize(
    ("corner", "there"), [(960, True), (-960, True), (961, False), (-961, False), (math.nan, False), (math.inf, False)]
)
def test_polygons_that_reach_far_outside(tmp_path, corner, there):
    """Beyond ten times the image they are no masks: COCO's code would need memory for all the way."""
    for polygon in (
        [[1, 1, corner, 1, 1, 50]],
        [[1, 1, 60, 1, 1, 50, 2, corner]],
        [[1, 1, 9, 1, 9, 9], [corner, 1, 9, 1, 9, 9]],
    ):
        write_part(tmp_path, "train", {1: WIDE}, [square(1, 0, 0, 9)])
        rewrite(tmp_path, "train", lambda content, found=polygon: content["annotations"][0].update(segmentation=found))
        assert len(read_part(tmp_path).boxes) == there


@pytest.mark.parametrize("with_masks", [True, False])
def test_areas(tmp_path, with_masks):
    """As the file says, if it says so; else of the mask, else of the box in its image."""
    mask = square(1, 0, 0, 9)
    given = [5, 2.5, "7", None, -1, 0, math.nan, math.inf, 1e11, "large", [1]]
    rows = [mask | {"bbox": [0, 0, 10, 10], "area": area} for area in given]
    rows.append({name: value for name, value in rows[0].items() if name != "area"})
    if not with_masks:
        rows.append(mask | {"bbox": [90, 0, 10, 10], "area": -1, "segmentation": None})
    write_part(tmp_path, "train", {1: WIDE}, rows)
    found = read_part(tmp_path, with_masks=with_masks).areas.tolist()
    assert found == [5, 2.5, 7] + 9 * [81] + [60] * (not with_masks)


def test_numbers_that_are_text(tmp_path):
    """Or have a point: 7 is 7."""
    write_part(tmp_path, "train", {1: WIDE, 2: WIDE}, [square(1, 0, 0, 9), square(1, 0, 0, 9, iscrowd=1), square(2, 0, 0, 9)])
    expected = read_part(tmp_path)

    def as_text(content):
        for row in (*content["images"], *content["annotations"], *content["categories"]):
            row |= {name: str(value) for name, value in row.items() if isinstance(value, int)}

    def with_point(content):
        content["annotations"][0] |= {"image_id": 1.0, "category_id": "7", "iscrowd": None}
        content["annotations"][2].pop("iscrowd")

    for change in (as_text, with_point):
        rewrite(tmp_path, "train", change)
        found = read_part(tmp_path)
        assert found.classes == expected.classes
        for name in ("image_ids", "sizes", "first", "areas", "categories", "crowd"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_large_numbers(tmp_path):
    """Of 64 bits, which are more than float64 can tell apart."""
    number = 2**63 - 1
    categories = [{"id": number, "name": "red"}, {"id": number - 1, "name": "green"}]
    part = read_part(write_part(tmp_path, "train", {number: WIDE}, [square(number, 0, 0, 9, category=number)], categories))
    assert part.image_ids.tolist() == part.categories.tolist() == [number]


def test_what_cannot_be_used_is_left_out_and_counted(tmp_path):
    """Each bad object is counted under its reason; images with nothing but bad ones do not train."""
    bad = [
        (square(1, 0, 0, 9, category_id=4), coco.UNKNOWN_CATEGORY),
        (square(99, 0, 0, 9), coco.UNKNOWN_IMAGE),
        (square(1, 0, 0, 9, bbox=[5, 5, 0, 9]), coco.NO_AREA),
        (square(1, 0, 0, 9, bbox=[5, 5, 9, -1]), coco.NO_AREA),
        (square(1, 0, 0, 9, bbox=[96, 5, 9, 9]), coco.NO_AREA),  # outside of the image
        (square(1, 0, 0, 9, bbox=[float("nan"), 5, 9, 9]), coco.NO_AREA),
        (square(1, 0, 0, 9, bbox=[5, 5]), coco.NO_AREA),
        (square(1, 0, 0, 9, bbox="5599"), coco.NO_AREA),
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
    rewrite(tmp_path, "train", lambda content: content.update(annotations=[row for row, _ in bad] + content["annotations"]))
    part = read_part(tmp_path)
    expected = dict.fromkeys(part.left_out, 0)
    for _, why in bad:
        expected[why] += 1
    assert {why: int(counts.sum()) for why, counts in part.left_out.items()} == expected
    assert part.first.tolist() == [0, 1, 1, 2, 4]
    assert part.crowd.tolist() == [False, True, False, True]
    assert part.training_images().tolist() == [0, 3]
    assert str(part).startswith("4 images (2 without objects), 2 objects, 2 crowds, left out: 1 object without an image in the")
    assert f"left out: {expected[coco.NO_AREA]} objects without a box of positive area in the image" in str(part)
    of_boxes = read_part(tmp_path, with_masks=False)
    assert not of_boxes.left_out[coco.NO_MASK].any()
    assert len(of_boxes.boxes) == len(part.boxes) + expected[coco.NO_MASK]


def test_one_of_each(tmp_path):
    part = read_part(write_part(tmp_path, "train", {1: WIDE}, [square(1, 0, 0, 9), square(1, 0, 0, 9, iscrowd=1)]))
    assert str(part) == "1 image (0 without objects), 1 object, 1 crowd"


def test_annotations_without_images(tmp_path):
    """Annotations are read without images. Only training needs images, and any one is enough."""
    write_objects(tmp_path, train=3, val=3)
    expected = coco.load(tmp_path, with_masks=True)
    for path in (tmp_path / "images").iterdir():
        path.unlink()
    write_part(tmp_path, "more", {200: WIDE}, [])
    for part in ("train", "val"):
        rewrite(tmp_path, part, lambda content: content["images"].extend(rows(range(201, 320)) + rows([200])))
    assert [len(part) for part in coco.load(tmp_path, with_masks=True)] == [123, 123]
    (tmp_path / "images" / "200.png").unlink()
    (tmp_path / "images").rmdir()
    for name, part in zip(("train", "val"), expected, strict=True):
        assert torch.equal(coco.load_annotations(tmp_path, name, with_masks=True).boxes, part.boxes)


def rows(numbers):
    return [{"id": number, "file_name": f"{number}.png", "height": 64, "width": 96} for number in numbers]


# Mistakes.


def test_data_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"expected one file .*/annotations/instances_train\*\.json, found none\. Expected"):
        coco.load(tmp_path, True)
    write_objects(tmp_path)
    copy = tmp_path / "annotations" / "instances_train2017.json"
    copy.write_bytes((tmp_path / "annotations" / "instances_train.json").read_bytes())
    with pytest.raises(UserError, match=r"2 files: instances_train\.json, instances_train2017\.json"):
        coco.load(tmp_path, True)
    copy.unlink()
    there = r"the images of the train annotations are missing: expected 1\.png and the others in .*/train or .*/images"
    (tmp_path / "images").rename(tmp_path / "pictures")
    with pytest.raises(UserError, match=there):
        coco.load(tmp_path, True)
    (tmp_path / "images").mkdir()
    with pytest.raises(UserError, match=there):
        coco.load(tmp_path, True)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "does not contain annotations in COCO's format: JSONDecodeError"),
        ("{}", "does not contain annotations in COCO's format: KeyError\\('categories'\\)"),
        ('{"categories": [], "images": [{"id": 1}], "annotations": []}', "KeyError\\('file_name'\\)"),
        ('{"categories": [], "images": [], "annotations": [{}]}', "image_id must be a 64-bit integer, not None, in {}"),
    ],
)
def test_files_that_are_not_annotations(tmp_path, content, text):
    path = tmp_path / "instances_train.json"
    path.write_text(content)
    with pytest.raises(UserError, match=text):
        coco.read(path, True)


@pytest.mark.parametrize(
    ("what", "changes", "text"),
    [
        ("images", {"height": 0}, "height and width must be from 1 to 1,048,576, not 0 and 96, in {'id': 1, "),
        ("images", {"width": 2**40}, "height and width must be from 1 to 1,048,576, not 64 and 1099511627776, in {'id': 1, "),
        ("images", {"width": -5}, "height and width must be from 1 to 1,048,576, not 64 and -5, in {'id': 1, "),
        ("images", {"height": None}, "height must be a 64-bit integer, not None, in {'id': 1, "),
        ("images", {"height": 64.5}, r"height must be a 64-bit integer, not 64\.5, in {'id': 1, "),
        ("images", {"id": "one"}, "id must be a 64-bit integer, not 'one', in {'id': 'one', 'file_name': "),
        ("images", {"id": 2**63}, "id must be a 64-bit integer, not 9223372036854775808, in "),
        ("images", {"id": 2}, "two of its images have the id 2$"),
        ("annotations", {"category_id": [3]}, r"category_id must be a 64-bit integer, not \[3\], in {'id': 1, "),
        ("annotations", {"category_id": math.inf}, "category_id must be a 64-bit integer, not inf, in {'id': 1, "),
        ("annotations", {"image_id": None}, "image_id must be a 64-bit integer, not None, in {'id': 1, "),
        ("annotations", {"iscrowd": "no"}, "iscrowd must be a 64-bit integer, not 'no', in {'id': 1, "),
        ("categories", {"id": 3}, "two of its categories have the id 3$"),
    ],
)
def test_numbers_that_are_none(tmp_path, what, changes, text):
    write_part(tmp_path, "train", {1: WIDE, 2: WIDE}, [square(1, 1, 2, 20)])
    rewrite(tmp_path, "train", lambda content: content[what][0].update(changes))
    with pytest.raises(UserError, match=f"instances_train.json does not contain annotations in COCO's format: {text}"):
        read_part(tmp_path)


def test_parts_that_do_not_fit(tmp_path):
    write_part(tmp_path, "train", {1: WIDE}, [square(1, 1, 2, 20)])
    write_part(tmp_path, "val", {1: WIDE}, [square(1, 1, 2, 20)], [*CATEGORIES, {"id": 9, "name": "blue"}])
    with pytest.raises(UserError, match=r"must have the same categories, but only one of them has \(9, 'blue'\)"):
        coco.load(tmp_path, True)
    write_part(tmp_path, "val", {1: WIDE}, [square(1, 1, 2, 20, iscrowd=1)])
    with pytest.raises(UserError, match=r"the val annotations under .* have no usable object: 1 image "):
        coco.load(tmp_path, True)
