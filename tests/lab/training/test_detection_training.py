"""Detectors train with every activation, in both phases, stop and go on, and say what the paper says."""

import re
import sys

import pytest
import torch
from detection_helpers import MASK, RETINA, WIDE, square, task_of, write_objects, write_part
from lab_helpers import assert_same_run, one_thread, take_steps, train, train_until, trainer_of
from networks import of_units, same, values
from torch import nn

import pwlu
from pwlu import baselines
from pwlu.lab.models import detectors
from pwlu.lab.recipes.catalog import RECIPES, settings
from pwlu.lab.recipes.settings import UserError
from pwlu.lab.runs.divergence import STATUS
from pwlu.lab.runs.run_folder import RunFolder
from pwlu.lab.training import loop
from pwlu.lab.training.trainer import _schedule

# Places with an activation: the body of the ResNet; then proposals, boxes, masks, or P7 and two heads of four.
BODY = {"resnet18": 17, "resnet50": 49}
HEADS = {"maskrcnn": 1 + 2 + 4 + 1, "retinanet": 1 + 2 * 4}
SMALL = [name for name, row in RECIPES.items() if row.detects and "resnet18" in name]


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    return write_objects(tmp_path_factory.mktemp("data") / "objects")


def sites_of(network):
    detector, body, _ = network.split("_")
    return BODY[body] + HEADS[detector]


@pytest.mark.parametrize("name", [MASK, RETINA])
def test_two_steps(objects, name):
    """One in each phase."""
    trainer = trainer_of(task_of(name, objects, epochs=2, batch=4, realign_epochs=0.5))
    assert len(trainer.units) == len(trainer.report.converted) == sites_of(RECIPES[name].network)
    seen = []
    take_steps(trainer, 2, lambda number: seen.append((trainer.phase, values(of_units(trainer.network)))))
    assert [phase for phase, _ in seen] == [1, 2]
    assert not same(seen[1][1], values(of_units(trainer.network)))
    assert all(p.isfinite().all() for p in trainer.network.parameters())
    levels = {site.name: site.calls for site in trainer.report.converted}
    of_five = "rpn.head.conv.0.1" if name == MASK else "head.classification_head.conv.0.1"
    assert levels[of_five] == 2 * 5  # in training and in evaluation, one function for all levels


@pytest.mark.slow
@pytest.mark.parametrize("name", ["coco/maskrcnn_resnet50_fpn", "coco/retinanet_resnet50_fpn"])
def test_the_networks_of_the_paper(objects, name):
    """Allow two detections per image, to save time."""
    row = RECIPES[name]
    assert (row.anchors, row.detections, row.width) == (1, 100, 1)
    network = detectors.build(row.network, 2, pixels=96, width=row.width, norm="batch", anchors=row.anchors, detections=2)
    with one_thread():
        report = pwlu.convert_(network, task_of(name, objects, pixels=96, batch=2).sample())
    assert len(report.converted) == sites_of(row.network)
    assert not report.of("impossible")
    assert not report.of("unreached")
    assert all(p.requires_grad for p in network.parameters())  # nothing is frozen
    assert len([m for m in network.backbone.body.modules() if isinstance(m, nn.BatchNorm2d)]) == 53
    assert len([m for m in network.backbone.fpn.modules() if isinstance(m, nn.BatchNorm2d)]) == (8 if "mask" in name else 6)
    generator = network.rpn.anchor_generator if "mask" in name else network.anchor_generator
    assert [sizes[0] for sizes in generator.sizes] == [32, 64, 128, 256, 512]
    assert (network.transform.min_size, network.transform.max_size) == ((96,), 160)  # as 800 is to 1333


@pytest.mark.parametrize(("name", "activation"), [(MASK, "frelu"), (RETINA, "frelu"), (RETINA, "swish")])
def test_other_activations(objects, name, activation):
    task = task_of(name, objects, activation=activation, epochs=1)
    trainer = trainer_of(task)
    kinds = {"swish": nn.SiLU, "frelu": baselines.FReLU}
    skipped = {site.name for site in trainer.report.of("skipped") if site.kind not in ("sigmoid", "clamp")}  # scores, boxes
    for site in trainer.report.converted:
        unit = trainer.network.get_submodule(site.name)
        flat = activation == "frelu" and "box_head" in site.name  # no map there
        assert isinstance(unit, nn.ReLU if flat else kinds[activation]), site.name
    places = sites_of(RECIPES[name].network)
    assert len(trainer.report.converted) + len(skipped) == places
    before = values(trainer.network.parameters())
    take_steps(trainer, 1)
    assert not same(before, list(trainer.network.parameters()))
    assert all(p.isfinite().all() for p in trainer.network.parameters())


@pytest.mark.parametrize("activation", ["pwlu", "frelu"])
def test_a_batch_without_objects(tmp_path, activation):
    """Its images cannot be read. The mask head then has nothing to do, and the others learn what is nothing."""
    write_part(tmp_path, "train", {1: WIDE, 2: WIDE}, [square(1, 0, 0, 25), square(2, 0, 0, 25)])
    write_part(tmp_path, "val", {3: WIDE}, [square(3, 0, 0, 25)])
    for number in (1, 2):
        (tmp_path / "images" / f"{number}.png").write_text("no image")
    trainer = trainer_of(task_of(MASK, tmp_path, activation=activation, batch=2, epochs=2, realign_epochs=1))
    with one_thread():
        (batches,) = trainer.task.epoch(0)
        sums = trainer.step(0, batches)
    summary = trainer.task.summary(sums)
    assert summary["unreadable_images"] == 2
    assert summary["loss_mask"] == summary["loss_box_reg"] == 0
    assert 0 < summary["loss"] < 10
    for name, value in trainer.network.state_dict().items():
        assert value.isfinite().all(), name


@pytest.mark.parametrize(("name", "precision"), [(MASK, "bf16"), (RETINA, "float64")])
def test_other_precisions(objects, name, precision):
    trainer = trainer_of(task_of(name, objects, activation="relu", epochs=1, batch=2, precision=precision))
    with one_thread():
        loss = trainer.task.summary(trainer.step(0, next(trainer.task.epoch(0))))["loss"]
    assert 0 < loss < 20


# Runs.

SHORT = ("--workers", "0", "--epochs", "2", "--realign-epochs", "1", "--batch", "4")


@pytest.fixture(scope="module")
def uninterrupted(objects, tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    assert train(MASK, "--data", objects, *SHORT, "--runs", runs) == 0
    (path,) = runs.iterdir()
    return RunFolder(path)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(objects, uninterrupted, tmp_path, monkeypatch):
    """In the middle of the second epoch: to the bit, though proposals are drawn by lot."""
    train_until(3, MASK, "--data", objects, *SHORT, "--runs", tmp_path, checkpoints=True)
    (path,) = tmp_path.iterdir()
    assert RunFolder(path).checkpoints()[-1].name.startswith("step-00000003-")
    monkeypatch.setattr(loop, "write_report", lambda *_, **__: None)  # it takes long, and is compared with nothing
    assert train("--resume", path) == 0
    assert_same_run(RunFolder(path), uninterrupted)


def test_what_a_run_leaves(uninterrupted):
    result = uninterrupted.json("result.json")
    names = [f"{kind}_ap{name}" for kind in ("box", "mask") for name in ("", "50", "75", "_small", "_medium", "_large")]
    assert list(result)[:13] == [names[0], "best_box_ap", *names[1:]]
    assert (result["measured_on"], result["measured_images"], result["sites"]) == ("validation images", 5, 25)
    row = uninterrupted.metrics()[-1]
    losses = [value for name, value in row.items() if name.startswith("loss_")]
    assert len(losses) == 5
    assert row["loss"] == pytest.approx(sum(losses), rel=1e-6)
    report = (uninterrupted.path / "report.md").read_text()
    assert "box AP " in report.splitlines()[2]
    assert "- 2 classes: red, green" in report
    assert "- training: 8 images (0 without objects), 17 objects, 0 crowds" in report
    for site in ("body.layer4.1.relu_2", "rpn.head.conv.0.1", "roi_heads.box_head.relu", "roi_heads.mask_predictor.relu"):
        assert f"{site} " in report
    assert not (uninterrupted.path / "detections.json").exists()


def test_iterations_and_measurements(objects, tmp_path, capsys):
    """Of five steps, two per epoch, the third epoch has one. The second and the last epoch are measured."""
    command = [RETINA, "--data", objects, "--workers", 0, "--iterations", 5, "--act", "relu", "--measure-every", 2]
    assert train(*command, "--runs", tmp_path) == 0
    (path,) = tmp_path.iterdir()
    rows = RunFolder(path).metrics()
    assert [row["step"] for row in rows] == [2, 4, 5]
    assert ["box_ap" in row for row in rows] == [False, True, True]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 classes: red, green"
    assert lines[3].startswith("epoch   1/3: loss ")
    assert [", box AP " in line for line in lines[3:6]] == [False, True, True]
    assert lines[6].startswith("box AP ")
    assert "mask" not in lines[6]


def test_divergence(objects, tmp_path):
    assert train(MASK, "--data", objects, *SHORT, "--lr", "1e30", "--act", "relu", "--runs", tmp_path) == STATUS
    (path,) = tmp_path.iterdir()
    result = RunFolder(path).json("result.json")
    assert result["diverged"] is True
    assert result["box_ap"] == 0


def test_worker_processes(objects):
    """Workers give the same as this process."""
    ours, theirs = (task_of(MASK, objects, workers=workers) for workers in (0, 1))
    for epoch in (0, 1):
        for (ours_now,), (theirs_now,) in zip(ours.epoch(epoch), theirs.epoch(epoch), strict=True):
            assert all(map(torch.equal, ours_now[0], theirs_now[0]))
            for target, other in zip(ours_now[1], theirs_now[1], strict=True):
                assert all(torch.equal(target[name], other[name]) for name in ("boxes", "labels", "masks"))


# Recipes.


@pytest.mark.parametrize("detector", ["maskrcnn", "retinanet"])
def test_the_settings_of_the_paper(detector):
    found = settings(f"coco/{detector}_resnet50_fpn")
    assert (found.iterations, found.batch, found.lr, found.weight_decay, found.pixels) == (270_000, 16, 0.02, 1e-4, 800)
    assert (found.realign_epochs, found.intervals, found.granularity, found.init) == (5, 16, "channel", "relu")
    assert round(found.realign_epochs * 118_287 / 16, -3) == 37_000
    weights = [torch.zeros(1, requires_grad=True)]
    schedule = _schedule(torch.optim.SGD(weights, 0.02), found, 270_000)
    (factor,) = schedule.lr_lambdas
    steps = (0, 500, 999, 1000, 209_999, 210_000, 249_999, 250_000, 269_999)
    assert [factor(step) for step in steps] == pytest.approx([0.001, 0.501, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])


def test_rate_and_iterations_follow_the_batch(objects):
    task = task_of("coco/retinanet_resnet50_fpn", objects, batch=8, activation="relu", pixels=96)
    assert task.total_steps == 540_000
    (group,) = trainer_of(task_of(RETINA, objects, batch=2, activation="relu")).optimizer.param_groups
    assert group["max_lr"] == settings(RETINA).lr * 2 / 4
    assert settings("coco/retinanet_resnet50_fpn", epochs=12).iterations == 0
    assert settings("coco/retinanet_resnet50_fpn", epochs=12, iterations=9).iterations == 9


@pytest.mark.parametrize("name", SMALL)
def test_every_detector_detects(name):
    """With new weights, whatever it says; anchors, sizes and numbers are those of the recipe."""
    row = RECIPES[name]
    model = detectors.build(
        row.network, 3, pixels=64, width=0.125, norm="batch", anchors=row.anchors, detections=row.detections
    ).eval()
    generator = model.rpn.anchor_generator if hasattr(model, "rpn") else model.anchor_generator
    assert [sizes[0] for sizes in generator.sizes] == [32 * row.anchors * 2**k for k in range(5)]
    assert (model.roi_heads if hasattr(model, "rpn") else model).detections_per_img == row.detections
    with one_thread(), torch.no_grad():
        (found,) = model([torch.rand(3, 64, 96)])
    assert found["boxes"].shape[1] == 4
    assert (found["labels"] <= 3).all()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"augmentation": "crop+flip"}, r"--augmentation crop\+flip is for classification: write flip or none"),
        ({"label_smoothing": 0.1}, "--label-smoothing is for classification: leave it out"),
        ({"pixels": 32}, "--pixels 32 is too small for the coarsest feature maps of a detector: write 64 or more"),
        ({"batch": 9}, "--batch 9 must be at most the number of training images, 8"),
        ({"batch": 3, "accumulate": 2}, r"--batch 3 must be divisible by processes x --accumulate, 1 x 2\. Write --batch 4"),
        ({"holdout": 8}, "--holdout 8 must be less than the number of training images, 8"),
        ({"data": "nowhere"}, r"expected one file nowhere/annotations/instances_train\*\.json"),
    ],
)
def test_mistakes(objects, changes, text):
    with pytest.raises(UserError, match=text):
        task_of(RETINA, **{"data": objects} | changes)


def test_mask_rcnn_is_not_compiled(objects):
    with pytest.raises(UserError, match=r"--compile does not work for Mask R-CNN: .* Leave it out"):
        task_of(MASK, objects, compile=True)
    task_of(RETINA, objects, compile=True)


def test_what_is_not_for_classification(tmp_path, capsys):
    for flags, text in (
        (["--augmentation", "flip"], "--augmentation flip is for detection: write crop+flip"),
        (["--save-detections"], "--save-detections is for detection: leave it out"),
    ):
        assert train("digits", *flags, "--runs", tmp_path) == 2
        assert text in capsys.readouterr().err


def test_mistakes_of_length(objects):
    with pytest.raises(
        UserError, match=r"Phase I must be shorter than training: --realign-epochs 2 is 4 steps, training has 4\."
    ):
        trainer_of(task_of(RETINA, objects, iterations=4, realign_epochs=2))
    with pytest.raises(UserError, match="--measure-every must be at least 1, not 0"):
        settings(RETINA, measure_every=0)
    with pytest.raises(UserError, match="--iterations must be at least 0, not -1"):
        settings(RETINA, iterations=-1)


def test_without_the_package(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    for name in ("data.coco", "tasks.detection", "tasks.coco_evaluation", "data.masks", "data.detection_images"):
        monkeypatch.delitem(sys.modules, f"pwlu.lab.{name}", raising=False)
    assert train(RETINA, "--runs", tmp_path) == 2
    error = capsys.readouterr().err
    assert re.search(r"detection needs more packages \(.*faster_coco_eval.*\): pip install '\.\[train,detection\]'", error)
