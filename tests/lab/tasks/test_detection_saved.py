"""Detections in files: those of a run and of other programs, evaluated elsewhere, and what is wrong with them."""

import json
import shutil

import pytest
from detection_helpers import MASK, RETINA, WIDE, detection, square, task_of, write_objects, write_part
from lab_helpers import train

from pwlu.cli import main
from pwlu.lab.runs.run_folder import RunFolder
from pwlu.lab.tasks import coco_evaluation


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    return write_objects(tmp_path_factory.mktemp("data") / "objects", train=6)


def evaluated(capsys, *arguments):
    status = main(["evaluate", *map(str, arguments)])
    printed = capsys.readouterr()
    return status, printed.out if status == 0 else printed.err


def annotations_alone(root, part, copy):
    """In `copy`: of one part, without images."""
    name = f"annotations/instances_{part}.json"
    (copy / "annotations").mkdir(parents=True)
    shutil.copy(root / name, copy / name)
    return copy


@pytest.fixture
def three(tmp_path):
    """Three green squares in two images, and an image without objects; these annotations are all that is there."""
    images = {1: WIDE, 2: WIDE, 3: WIDE}
    write_part(tmp_path / "data", "val", images, [square(1, 0, 0, 25), square(1, 50, 0, 25), square(2, 0, 0, 25)])
    return annotations_alone(tmp_path / "data", "val", tmp_path)


def test_evaluate(three, tmp_path, capsys):
    path = tmp_path / "found.json"
    path.write_text(json.dumps([detection(0.9, 1, 0, 0, 25, 25), detection(0.8, 3, 0, 0, 25, 25)]))
    status, text = evaluated(capsys, path, "--data", tmp_path)
    assert status == 0
    numbers = "AP 33.66  AP50 33.66  AP75 33.66  AP small 33.66  AP medium -  AP large -"
    assert text == f"box   {numbers}\nmask  {numbers}\n"
    rows = [detection(0.9, 1, 0, 0, 25, 25), detection(0.8, 1, 50, 0, 25, 25)]
    path.write_text(json.dumps([{k: v for k, v in row.items() if k != "segmentation"} for row in rows]))
    assert evaluated(capsys, path, "--data", tmp_path, "--most", 1)[1].startswith("box   AP 33.66  ")
    assert evaluated(capsys, path, "--data", tmp_path)[1].startswith("box   AP 66.34  ")
    path.write_text(path.read_text().replace('"score"', '"note": "segmentation", "score"'))
    assert "mask" not in evaluated(capsys, path, "--data", tmp_path)[1]


def test_masks_without_boxes(three, tmp_path, capsys):
    """COCO's own results of masks have none."""
    path = tmp_path / "found.json"
    rows = [detection(0.9, 1, 0, 0, 25, 25), detection(0.8, 3, 0, 0, 25, 25)]
    path.write_text(json.dumps([{k: v for k, v in row.items() if k != "bbox"} for row in rows]))
    status, text = evaluated(capsys, path, "--data", tmp_path)
    assert (status, text) == (0, "mask  AP 33.66  AP50 33.66  AP75 33.66  AP small 33.66  AP medium -  AP large -\n")


@pytest.mark.parametrize(
    "mask", [[[0, 0, 25, 0, 25, 25, 0, 25]], {"size": list(WIDE), "counts": [0, *([25, 39] * 24), 25, 39 + 64 * 71]}]
)
def test_masks_of_other_forms(three, tmp_path, capsys, mask):
    """A polygon, and run lengths that are not compressed; numbers may be text."""
    path = tmp_path / "found.json"
    path.write_text(json.dumps([detection("0.9", "1", 0, 0, 25, 25, category=7.0) | {"segmentation": mask}]))
    status, text = evaluated(capsys, path, "--data", tmp_path)
    assert status == 0
    numbers = "AP 33.66  AP50 33.66  AP75 33.66  AP small 33.66  AP medium -  AP large -"
    assert text == f"box   {numbers}\nmask  {numbers}\n"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"segmentation": None}, "segmentation is missing"),
        ({"bbox": None}, "bbox is missing"),
        *(
            (
                {"segmentation": mask},
                "segmentation is damaged or does not fit the image of height 64 and width 96: expected polygons",
            )
            for mask in (
                {"size": list(WIDE[::-1]), "counts": [0, 64 * 96]},
                {"size": list(WIDE), "counts": "P"},
                {"size": list(WIDE), "counts": [3, 9]},
                {"size": list(WIDE)},
                [[1, 2, 3]],
                "a mask",
                5,
            )
        ),
        ({"score": None}, "score is missing"),
        ({"score": "high"}, "score must be 1 finite number, not ['high']"),
        ({"bbox": [0, 0, 1]}, "bbox must be 4 finite numbers, not [0, 0, 1]"),
        ({"bbox": [0, 0, 1, float("nan")]}, "bbox must be 4 finite numbers, not [0, 0, 1, nan]"),
        ({"bbox": 5}, "bbox must be 4 finite numbers, not 5"),
        ({"bbox": "0055"}, "bbox must be 4 finite numbers, not 0055"),
        ({"image_id": "one"}, "image_id must be a 64-bit integer, not 'one', in {'image_id': 'one', "),
    ],
)
def test_a_damaged_detection_is_named(three, tmp_path, capsys, changes, text):
    path = tmp_path / "found.json"
    good = detection(0.9, 1, 0, 0, 25, 25)
    path.write_text(json.dumps([good, good | changes, good]))
    status, printed = evaluated(capsys, path, "--data", tmp_path)
    assert status == 2
    expected = f"pwlu evaluate: {path} does not contain detections in COCO's results format: in detection 2 of 3, {text}"
    assert printed.startswith(expected)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "does not contain detections in COCO's results format: "),
        ("{}", "does not contain detections in COCO's results format: expected a list of detections"),
        ("[5]", "does not contain detections in COCO's results format: expected a list of detections"),
        ('[{"image_id": 101}]', "in COCO's results format: in detection 1 of 1, category_id is missing"),
        (
            '[{"image_id": 7, "category_id": 3, "bbox": [0, 0, 1, 1], "score": 1}]',
            "has a detection of category 3 in image 7",
        ),
    ],
)
def test_what_is_no_detection(objects, tmp_path, capsys, content, text):
    path = tmp_path / "found.json"
    path.write_text(content)
    status, printed = evaluated(capsys, path, "--data", objects)
    assert status == 2
    assert printed.startswith(f"pwlu evaluate: {path} ")
    assert text in printed


def test_what_cannot_be_evaluated(objects, tmp_path, capsys):
    assert "a file of detections needs its data set: write --data DIR" in evaluated(capsys, tmp_path / "x.json")[1]
    assert "does not contain detections" in evaluated(capsys, tmp_path / "x.json", "--data", objects)[1]
    for most in (0, -3):
        assert f"--most must be at least 1, not {most}" in evaluated(capsys, tmp_path / "x.json", "--most", most)[1]
    assert f"{tmp_path} is not a run folder" in evaluated(capsys, tmp_path)[1]
    folder = RunFolder(tmp_path)
    folder.write_json("config.json", task_of(RETINA, objects).settings.as_dict())
    assert "has no detections.json. To get one, train with pwlu train --save-detections" in evaluated(capsys, tmp_path)[1]
    content = folder.json("config.json") | {"recipe": "digits"}
    folder.write_json("config.json", content)
    assert "is a run of digits, which is not a detector" in evaluated(capsys, tmp_path)[1]


def test_detections_of_a_run(objects, tmp_path, capsys):
    """What is saved at the end gives the same numbers, where there are annotations alone; of held-out images too."""
    command = [MASK, "--data", objects, "--workers", 0, "--act", "relu", "--epochs", 1, "--holdout", 2, "--batch", 4]
    assert train(*command, "--save-detections", "--runs", tmp_path / "runs") == 0
    (path,) = (tmp_path / "runs").iterdir()
    result = RunFolder(path).json("result.json")
    capsys.readouterr()
    status, text = evaluated(capsys, path)
    assert status == 0
    elsewhere = annotations_alone(objects, "train", tmp_path / "elsewhere")
    assert evaluated(capsys, path, "--data", elsewhere) == (0, text)
    for line, kind in zip(text.splitlines(), ("box", "mask"), strict=True):
        numbers = [result[name] for name in coco_evaluation.names(kind)]
        assert [word for word in line.split() if word[0] in "-0123456789"] == [
            "-" if number is None else f"{number:.2f}" for number in numbers
        ]
    assert (result["measured_on"], result["measured_images"]) == ("held-out training images", 2)
    saved = (path / "detections.json").read_bytes()
    for name in ("detections.json", "result.json"):  # as if it had been stopped after its last measurement
        (path / name).unlink()
    assert train("--resume", path) == 0
    assert (path / "detections.json").read_bytes() == saved
    assert RunFolder(path).json("result.json") == result
