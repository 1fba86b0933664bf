"""Run folders as `pwlu train` leaves them, without training."""

import dataclasses
import json

from pwlu.analysis.alignment import Alignment, UnitAlignment
from pwlu.lab.recipes import catalog

ENVIRONMENT = {"pwlu": "0.1.0", "revision": "1a2b3c4d5e", "torch": "2.15.0", "device": "A GPU", "side_by_side": 1}
RESULT = {
    "accuracy": 0.0,
    "best_accuracy": 99.0,
    "test_loss": 0.5,
    "train_loss": 0.4,
    "measured_on": "test images",
    "measured_images": 10000,
    "seconds_per_epoch": 2.0,
    "parameters": 1234567,
    "sites": 3,
    "diverged": False,
}


def every_setting_changed():
    """The settings of the digits, with another value for each of them; no recipe takes all of these."""
    plain = catalog.settings("digits")
    values = {"recipe": "digits", "activation": "pau", "augmentation": "none", "granularity": "layer", "norm": "group"}
    values |= {"precision": "bf16", "init": "same", "data": "a b=c", "device": "cpu", "fuse_norms": "off", "rule": "shared"}
    values |= {"test_data": "b.tar", "channels_last": False, "workers": 0}
    kinds = {int: 9, float: 0.123456789012345, bool: True}
    changed = plain.replace(**{f.name: values.get(f.name, kinds.get(f.type)) for f in dataclasses.fields(plain)})
    same = [name for name, value in changed.as_dict().items() if value == plain.as_dict()[name]]
    assert same == ["recipe"]
    return changed


def example_run(
    folder, accuracy=None, recipe="cifar100/resnet18", result=None, environment=None, epochs_done=2, iou=(), **changes
):
    """Write a run folder; without an accuracy the run is not finished. ``iou``: of each channel of its only PWLU."""
    settings = catalog.settings(recipe, **changes)
    folder.mkdir(parents=True)
    held_out = {"measured_on": "held-out training images"} if settings.holdout else {}
    files = {"config.json": settings.as_dict(), "environment.json": ENVIRONMENT | (environment or {})}
    if accuracy is not None:
        files["result.json"] = RESULT | held_out | {"accuracy": accuracy} | (result or {})
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"epoch": e + 1, "step": e + 1}) + "\n" for e in range(epochs_done))
    )
    (folder / "model.safetensors").write_bytes(b"weights")
    if settings.activation == "pwlu":
        (folder / "functions.pt").write_bytes(b"{}")
        unit = UnitAlignment("act", *[[0.0] * len(iou)] * 4, list(iou), *[[0] * len(iou)] * 3)
        (folder / "alignment.json").write_text(Alignment("Net", 1, [unit]).to_json())
    return settings


def files_in(folder):
    """The names of all files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
