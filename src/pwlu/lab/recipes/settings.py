"""Everything that one run is made of, as data: what the command line may change, and what a run folder records."""

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any


class UserError(Exception):
    """Something that the person at the keyboard can put right; shown without a traceback."""


def _flag(default: Any, help: str, *, machine: bool = False, unit: bool = False, **options: Any) -> Any:
    """A setting with its help.

    `machine`: it says where and how fast a run is done, not what it computes. `unit`: it is about PWLUs.
    """
    return dataclasses.field(default=default, metadata={"help": help, "machine": machine, "unit": unit, "options": options})


PRECISIONS = ("float32", "bf16", "fp16", "float64")
FUSE_NORMS = ("auto", "on", "off")
AUGMENTATIONS = ("none", "crop", "crop+flip", "autoaugment", "flip")


@dataclass(frozen=True)
class Settings:
    """One run. A field is a flag of ``pwlu train``; None in a flag's place means: as the recipe says."""

    recipe: str
    activation: str = _flag("pwlu", "relu, prelu, swish, apl, pau, frelu, pwlu, ...", flag="--act", metavar="NAME")
    seed: int = _flag(0, "of weights, order and augmentation")
    epochs: int = _flag(None, "passes over the training images")
    iterations: int = _flag(
        0, "steps of the recipe's batch, in place of epochs; with half the images in a batch there are twice as many steps"
    )
    batch: int = _flag(None, "images in a step of the optimizer, over all processes")
    lr: float = _flag(None, "peak learning rate for the recipe's batch; it is scaled to the batch that is used")
    weight_decay: float = _flag(None, "of the weights; parameters of activations have none")
    norm_weight_decay: float = _flag(
        None, "of normalisation's scale and shift (default: as weights); 0 keeps inputs where the bounds of PWLUs are"
    )
    label_smoothing: float = _flag(None, "share of the label given to all classes")
    augmentation: str = _flag(None, "of training images", choices=AUGMENTATIONS)
    warm_up: float = _flag(None, "share of the steps in which the learning rate rises")
    width: float = _flag(None, "channels of the network, times this")
    pixels: int = _flag(None, "height and width of images; in detection the shorter of the two")
    holdout: int = _flag(0, "measure on so many images taken out of the training set, not on the test set: to choose settings")
    intervals: int = _flag(16, "N of each PWLU", unit=True)
    granularity: str = _flag("channel", "one function a channel or a layer", choices=("channel", "layer"), unit=True)
    init: str = _flag("relu", "what PWLUs start as; same = what stood there", metavar="NAME", unit=True)
    realign_epochs: float = _flag(None, "T', the length of Phase I", unit=True)
    fix_init: float = _flag(
        0.0, "no Phase I: PWLUs start with bounds -X and X, and learn from the first step", metavar="X", unit=True
    )
    unit_lr: float = _flag(
        1.0,
        "learning rate of activations' parameters, times this (default: 1; pau: 0.0001 to 0.001, by recipe)",
        metavar="FACTOR",
        unit=True,
    )
    curvature: float = _flag(0.0, "penalty on the bends of PWLUs, times this; try 0.001", metavar="FACTOR", unit=True)
    ema: float = _flag(0.0, "measure a moving average of the weights with this decay, such as 0.999", metavar="DECAY")
    norm: str = _flag("batch", "normalisation", choices=("batch", "group"))
    precision: str = _flag("float32", "of the computation; bf16 and fp16 by autocast", choices=PRECISIONS)
    accumulate: int = _flag(1, "parts in which a process computes its share of a batch", machine=True, metavar="N")
    compile: bool = _flag(False, "torch.compile the network", machine=True)
    fuse_norms: str = _flag(
        "auto",
        "batch norm, addition and PWLU in one pass; auto: where there are such places, but not with --compile, and on a CPU "
        "not with --channels-last",
        machine=True,
        choices=FUSE_NORMS,
    )
    channels_last: bool = _flag(None, "memory layout of images (default: on a GPU)", machine=True)
    data: str = _flag("data", "folder of the data set", machine=True, metavar="DIR")
    device: str = _flag(None, "cpu, cuda, ... (default: cuda where there is one)", machine=True, metavar="NAME")
    workers: int = _flag(None, "processes that read image files (default: one a core, at most 8)", machine=True, metavar="N")
    measure_every: int = _flag(
        1, "epochs from one measurement to the next (default: as the recipe says); the last is always measured", machine=True
    )
    save_detections: bool = _flag(
        False, "write what is detected at the end to detections.json, which pwlu evaluate reads", machine=True
    )
    snapshots: int = _flag(
        20, "of the functions, spread over the run, at most one an epoch; 0: none. pwlu report shows them", machine=True
    )
    tensorboard: bool = _flag(
        False, "write TensorBoard files into the run folder too: numbers, and pictures of the functions", machine=True
    )

    @property
    def readers(self) -> int:
        """``workers``, or what is meant where nothing is said."""
        return min(8, os.cpu_count() or 1) if self.workers is None else self.workers

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    def identity(self) -> dict[str, Any]:
        """What the result depends on, rounding aside: two runs with the same identity are the same experiment."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.metadata.get("machine")}

    def replace(self, **changes: Any) -> "Settings":
        """A copy with these changes, checked."""
        return check(dataclasses.replace(self, **changes))


def check(settings: Settings) -> Settings:
    """The same settings, or an error about the first that makes no sense."""
    rules = {
        "epochs": (settings.epochs >= 1, "at least 1"),
        "iterations": (settings.iterations >= 0, "at least 0"),
        "batch": (settings.batch >= 1, "at least 1"),
        "lr": (settings.lr > 0, "above 0"),
        "weight_decay": (settings.weight_decay >= 0, "at least 0"),
        "norm_weight_decay": (settings.norm_weight_decay is None or settings.norm_weight_decay >= 0, "at least 0"),
        "label_smoothing": (0 <= settings.label_smoothing < 1, "from 0 to below 1"),
        "warm_up": (0 <= settings.warm_up < 1, "from 0 to below 1"),
        "width": (settings.width > 0, "above 0"),
        "pixels": (settings.pixels >= 8, "at least 8"),
        "holdout": (settings.holdout >= 0, "at least 0"),
        "intervals": (settings.intervals >= 1, "at least 1"),
        "realign_epochs": (settings.realign_epochs > 0, "above 0; to train without Phase I write --fix-init 3"),
        "fix_init": (settings.fix_init >= 0, "above 0, such as 3"),
        "unit_lr": (settings.unit_lr >= 0, "at least 0"),
        "curvature": (settings.curvature >= 0, "at least 0"),
        "ema": (0 <= settings.ema < 1, "from 0 to below 1, such as 0.999"),
        "accumulate": (settings.accumulate >= 1, "at least 1"),
        "measure_every": (settings.measure_every >= 1, "at least 1"),
        "snapshots": (settings.snapshots >= 0, "at least 0"),
        "workers": (settings.workers is None or settings.workers >= 0, "at least 0"),
        "augmentation": (settings.augmentation in AUGMENTATIONS, f"one of {', '.join(AUGMENTATIONS)}"),
        "precision": (settings.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}"),
        "granularity": (settings.granularity in ("channel", "layer"), "channel or layer"),
        "fuse_norms": (settings.fuse_norms in FUSE_NORMS, f"one of {', '.join(FUSE_NORMS)}"),
        "norm": (settings.norm in ("batch", "group"), "batch or group"),
    }
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{flag(field.name)} must be a finite number, not {value}")
    for name, (holds, expected) in rules.items():
        if not holds:
            raise UserError(f"{flag(name)} must be {expected}, not {getattr(settings, name)}")
    realigns = settings.activation == "pwlu" and not settings.fix_init and not settings.iterations
    if realigns and settings.realign_epochs >= settings.epochs:
        raise UserError(
            f"Phase I of {settings.realign_epochs:g} epochs (--realign-epochs) leaves nothing of {settings.epochs} epochs for "
            f"PWLUs to learn in. Write --realign-epochs {settings.epochs / 10:g}, or more --epochs"
        )
    return settings


def flag(name: str) -> str:
    """The flag of the command line that changes this setting."""
    options = {f.name: f.metadata for f in dataclasses.fields(Settings)}[name].get("options", {})
    return options.get("flag", "--" + name.replace("_", "-"))
