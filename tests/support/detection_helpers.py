"""What the tests of detection share: small data sets in COCO's layout, and tasks on them."""

import json

import numpy as np
import pytest
import torch
from lab_helpers import ALONE
from PIL import Image
from torch import nn

rle = pytest.importorskip("faster_coco_eval").mask  # every file that imports this one is skipped without it

from pwlu.lab.data import coco, detection_images  # noqa: E402
from pwlu.lab.recipes.catalog import settings  # noqa: E402
from pwlu.lab.tasks.detection import Detection  # noqa: E402

MASK, RETINA = "tiny/maskrcnn_resnet18_fpn", "tiny/retinanet_resnet18_fpn"
CATEGORIES = [{"id": 7, "name": "green"}, {"id": 3, "name": "red"}]  # not in order, and not from 1 on
WIDE, TALL = (64, 96), (96, 64)


def code(mask):
    """Compressed run lengths, as they stand in a JSON file."""
    found = rle.encode(np.asfortranarray(mask))
    return {"size": list(mask.shape), "counts": found["counts"].decode()}


def square(image, left, top, side, size=WIDE, category=7, **more):
    """The annotation of a square."""
    mask = np.zeros(size, np.uint8)
    mask[top : top + side, left : left + side] = 1
    row = {"image_id": image, "category_id": category, "bbox": [left, top, side, side], "area": side * side, "iscrowd": 0}
    return row | {"segmentation": code(mask)} | more


def detection(score, image, left, top, wide, high, size=WIDE, category=7):
    """What was found: a rectangle."""
    mask = np.zeros(size, np.uint8)
    mask[top : top + high, left : left + wide] = 1
    row = {"image_id": image, "category_id": category, "bbox": [left, top, wide, high], "score": score}
    return row | {"segmentation": code(mask)}


def decoded(part, image):
    """The masks of all objects of an image, uint8 (objects, height, width), by COCO's tools."""
    here = part.objects(image)
    masks = rle.decode([part.code(image, index) for index in range(here.start, here.stop)])
    return torch.from_numpy(masks).permute(2, 0, 1)


def write_part(root, part, images, annotations, categories=CATEGORIES, folder="images"):
    """`images`: by number the size; they are dark noise with a bright square for each annotation."""
    (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "annotations").mkdir(exist_ok=True)
    random = np.random.default_rng(len(images))
    for number, size in images.items():
        pixels = random.integers(0, 60, (*size, 3)).astype(np.uint8)
        for row in annotations:
            if row["image_id"] == number and row.get("segmentation"):
                pixels[rle.decode(row["segmentation"]) > 0] = (40, 230, 40) if row["category_id"] == 7 else (230, 40, 40)
        Image.fromarray(pixels).save(root / folder / f"{number}.png")
    content = {
        "images": [{"id": n, "file_name": f"{n}.png", "height": h, "width": w} for n, (h, w) in images.items()],
        "annotations": [{"id": k} | row for k, row in enumerate(annotations, start=1)],
        "categories": categories,
    }
    (root / "annotations" / f"instances_{part}.json").write_text(json.dumps(content))
    return root


def rewrite(root, part, change):
    """Have `change` change what the annotation file of a part holds."""
    path = root / "annotations" / f"instances_{part}.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def read_part(root, part="train", with_masks=True):
    return coco.read(root / "annotations" / f"instances_{part}.json", with_masks)


def scenes_of(part, flip=False):
    return detection_images.DetectionImages(part, 1, flip, torch.device("cpu"), 0)


def write_objects(root, train=8, val=5):
    """Images with one to three squares each; every third is tall."""
    random = np.random.default_rng(0)
    for part, first, count in (("train", 1, train), ("val", 101, val)):
        images = {first + k: WIDE if k % 3 else TALL for k in range(count)}
        annotations = []
        for number, size in images.items():
            for k in range(1 + number % 3):
                side = int(random.integers(12, 30))
                left, top = (int(random.integers(0, edge - side)) for edge in (size[1], size[0]))
                annotations.append(square(number, left, top, side, size, (7, 3)[k % 2]))
        write_part(root, part, images, annotations)
    return root


def task_of(recipe, data, processes=ALONE, **changes):
    """Without worker processes."""
    changes = {"channels_last": False, "workers": 0, "data": str(data)} | changes
    return Detection(settings(recipe, **changes), processes)


class Saying(nn.Module):
    """A detector that finds these boxes in every image, of the second class of RetinaNet."""

    def __init__(self, *boxes):
        super().__init__()
        self.boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)

    def forward(self, images):
        count = len(self.boxes)
        return [{"boxes": self.boxes, "labels": torch.ones(count).long(), "scores": torch.ones(count)} for _ in images]
