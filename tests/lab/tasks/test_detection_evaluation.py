"""Average precision of known detections, in one process and in two."""

import io
import json
import math
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch
import torch.distributed as dist
from detection_helpers import MASK, WIDE, code, decoded, detection, read_part, square, task_of, write_objects, write_part
from lab_helpers import one_thread, start, trainer_of
from safetensors.torch import load_file

from pwlu.lab.data import coco
from pwlu.lab.runs.run_folder import RunFolder
from pwlu.lab.tasks import coco_evaluation


def part_of(root, images, annotations):
    return read_part(write_part(root, "val", images, annotations), "val")


@pytest.fixture
def three(tmp_path):
    """Three green squares in two images, and an image without objects."""
    return part_of(tmp_path, {1: WIDE, 2: WIDE, 3: WIDE}, [square(1, 0, 0, 25), square(1, 50, 0, 25), square(2, 0, 0, 25)])


@pytest.mark.parametrize("kind", ["box", "mask"])
def test_a_case_by_hand(three, kind):
    """Right, wrong, and right with an overlap of 16/25 = 0.64, which is enough for three thresholds of ten.

    With those three: precision 1 up to a recall of 1/3 and 2/3 up to 2/3, which are 34 and 33 of the recalls 0, 0.01, ..., 1.
    With the other seven: 1 up to 1/3.
    """
    rows = [detection(0.9, 1, 0, 0, 25, 25), detection(0.8, 3, 0, 0, 25, 25), detection(0.7, 2, 0, 0, 25, 16)]
    found = coco_evaluation.average_precision(three, rows, kind, 100)
    loose, strict = 100 * (34 + 33 * 2 / 3) / 101, 100 * 34 / 101
    assert list(found) == [f"{kind}_ap{name}" for name in ("", "50", "75", "_small", "_medium", "_large")]
    values = list(found.values())
    assert values[:4] == pytest.approx([(3 * loose + 7 * strict) / 10, loose, strict, values[0]], rel=1e-9)
    assert all(math.isnan(value) for value in values[4:])  # there are no larger objects


def test_the_order_is_that_of_scores(three):
    """The wrong one last: precision 1 up to a recall of 1/3, and that is all."""
    rows = [detection(0.1, 3, 0, 0, 25, 25), detection(0.9, 2, 0, 0, 25, 25)]
    assert coco_evaluation.average_precision(three, rows, "box", 100)["box_ap"] == pytest.approx(100 * 34 / 101)
    rows[0]["score"] = 0.95
    assert coco_evaluation.average_precision(three, rows, "box", 100)["box_ap"] == pytest.approx(50 * 34 / 101)


def test_perfect_detections(tmp_path):
    """As a detector gives them: tensors with labels, boxes of two corners, masks of probabilities."""
    write_objects(tmp_path)
    _, part = coco.load(tmp_path, with_masks=True)
    rows = []
    for image, number in enumerate(part.image_ids.tolist()):
        here = part.objects(image)
        left, top, wide, high = part.boxes[here].unbind(1)
        found = {
            "boxes": torch.stack([left, top, left + wide, top + high], 1).float(),
            "labels": torch.tensor([1 + [3, 7].index(c) for c in part.categories[here].tolist()]),
            "scores": torch.linspace(0.9, 0.8, here.stop - here.start),
            "masks": decoded(part, image)[:, None] * 0.9,
        }
        rows += coco_evaluation.detections(number, found, list(part.classes), first_label=1)
    rows = json.loads(json.dumps(rows))
    assert rows[0]["segmentation"] == code(decoded(part, 0)[0].numpy())
    for kind in ("box", "mask"):
        found = coco_evaluation.average_precision(part, rows, kind, 100)
        assert [found[f"{kind}_ap{name}"] for name in ("", "50", "75", "_small")] == [100, 100, 100, 100]


def test_nothing_found(three):
    assert coco_evaluation.average_precision(three, [], "box", 100)["box_ap"] == 0
    none = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0), "scores": torch.zeros(0), "masks": torch.zeros(0, 1, 64, 96)}
    assert coco_evaluation.detections(1, none, [3, 7], 1) == []


def test_crowds_count_neither_for_nor_against(tmp_path):
    part = part_of(tmp_path, {1: WIDE}, [square(1, 0, 0, 25), square(1, 40, 0, 40, iscrowd=1)])
    rows = [detection(0.9, 1, 45, 5, 10, 10), detection(0.8, 1, 60, 5, 10, 10), detection(0.7, 1, 0, 0, 25, 25)]
    assert coco_evaluation.average_precision(part, rows, "box", 100)["box_ap"] == 100
    rows.append(detection(0.75, 1, 0, 40, 10, 10))  # elsewhere
    assert coco_evaluation.average_precision(part, rows, "box", 100)["box_ap"] == pytest.approx(50)


def test_so_many_detections_count(three):
    """Of an image and class."""
    rows = [detection(0.9, 1, 0, 0, 25, 25), detection(0.8, 1, 50, 0, 25, 25), detection(0.7, 2, 0, 0, 25, 25)]
    assert coco_evaluation.average_precision(three, rows, "box", 2)["box_ap"] == 100
    assert coco_evaluation.average_precision(three, rows, "box", 1)["box_ap"] == pytest.approx(100 * 67 / 101)
    rows[0]["category_id"] = 3  # of which there is nothing: it takes no place among those of the other class
    assert coco_evaluation.average_precision(three, rows, "box", 1)["box_ap"] == pytest.approx(100 * 67 / 101)


@pytest.mark.parametrize("kind", ["box", "mask"])
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_numbers_of_the_original_evaluator(tmp_path, kind):
    """COCO's own, on random objects of all sizes, crowds, and detections of every quality."""
    original = pytest.importorskip("pycocotools.cocoeval")
    coco_api = pytest.importorskip("pycocotools.coco")
    random, size = np.random.default_rng(5), (160, 150)
    truth, rows = [], []
    for number in range(1, 9):
        for _ in range(6):
            side, category = int(random.integers(8, 120)), int(random.choice([3, 7]))
            left, top = (int(random.integers(0, edge - side)) for edge in (150, 160))
            truth.append(square(number, left, top, side, size, category, iscrowd=int(random.random() < 0.1)))
            for _ in range(2):
                change = random.integers(-side // 8 - 1, side // 8 + 2, 2)
                x, y = max(0, left + change[0]), max(0, top + change[1])
                rows.append(detection(round(float(random.random()), 6), number, int(x), int(y), side, side, size, category))
    part = part_of(tmp_path, dict.fromkeys(range(1, 9), size), truth)
    found = coco_evaluation.average_precision(part, rows, kind, 100)
    if kind == "mask":  # with boxes, it would take their areas for those of the masks
        rows = [{name: value for name, value in row.items() if name != "bbox"} for row in rows]
    with redirect_stdout(io.StringIO()):
        annotated = coco_api.COCO(str(tmp_path / "annotations" / "instances_val.json"))
        evaluator = original.COCOeval(annotated, annotated.loadRes(rows), {"box": "bbox", "mask": "segm"}[kind])
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    assert list(found.values()) == pytest.approx(list(100 * evaluator.stats[:6]), rel=1e-9)
    assert 10 < found[f"{kind}_ap"] < 90


# Two processes.


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    return write_objects(tmp_path_factory.mktemp("data") / "objects", train=6)


@pytest.mark.slow
@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
def test_two_processes_measure_as_one(objects, tmp_path_factory):
    """Five images, three of them for the first process; detections to rounding, and AP, are those of one process.

    After two steps, one in each phase: half of the recipe's batch, so one iteration of it.
    """
    command = [MASK, "--data", objects, "--workers", "0", "--iterations", "1", "--realign-epochs", "0.33", "--batch", "2"]
    runs, meeting = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("meeting")
    jobs = [{"arguments": [*command, "--save-detections", "--runs", runs]}]
    statuses, printed = start(meeting, jobs, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert statuses == [0]
    assert len([line for line in printed if line.startswith("epoch ")]) == 1
    (path,) = runs.iterdir()
    task = task_of(MASK, objects)
    network = trainer_of(task).network
    network.load_state_dict(load_file(path / "model.safetensors"))
    with one_thread():
        measured = task.measure(network, torch.no_grad())
    found = json.loads((path / "detections.json").read_text())
    result = RunFolder(path).json("result.json")
    assert {row["image_id"] for row in found} == set(task.test.part.image_ids.tolist())
    assert len(found) == len(task.rows) > 20
    in_order = [sorted(rows, key=lambda row: (row["image_id"], row["bbox"])) for rows in (found, task.rows)]
    for one, other in zip(*in_order, strict=True):
        assert one["bbox"] == pytest.approx(other["bbox"], abs=0.02)
        assert one["score"] == pytest.approx(other["score"], abs=2e-6)
    assert result["box_ap"] == pytest.approx(measured["box_ap"], rel=1e-6)
    assert result["mask_ap"] == pytest.approx(measured["mask_ap"], rel=1e-6)
