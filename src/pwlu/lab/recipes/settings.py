"""The settings of a run: the flags of the command line, recorded in the run folder."""

import dataclasses
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pwlu.common.text import install
from pwlu.learning.shared_rule import DEFAULT_RULE, PAPER, RULES


class UserError(Exception):
    """An error that the user can fix. The command line prints it without a traceback."""


@contextmanager
def needs_packages(what: str, *extras: str) -> Iterator[None]:
    """Convert the error of an import into a UserError: `what` needs the packages of these extras."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"{what} needs more packages ({error}): {install(*extras)}") from None


def _setting(default: Any, help: str, *, machine: bool = False, unit: bool = False, **options: Any) -> Any:
    """Return a dataclass field for a setting.

    Args:
        default: None if the recipe sets it.
        help: the help text of the flag: imperative, no full stop. The default is appended unless the text names it.
        machine: whether the setting affects only where and how fast a run computes, and not its result.
        unit: whether the setting is about PWLUs.
        options: further arguments of ``ArgumentParser.add_argument``. ``flag`` gives the flag another name than the field.
    """
    return dataclasses.field(default=default, metadata={"help": help, "machine": machine, "unit": unit, "options": options})


PRECISIONS = ("float32", "bf16", "fp16", "float64")
UNITS = ("pwlu", "dynamic_pwlu", "nonuniform_pwlu")  # activations that are PWLUs
FUSE_NORMS = ("auto", "on", "off")
AUGMENTATIONS = ("none", "crop", "crop+flip", "autoaugment", "flip")


@dataclass(frozen=True)
class Settings:
    """The settings of one run. Every field but ``recipe`` is a flag of ``pwlu train``."""

    recipe: str
    activation: str = _setting(
        "pwlu",
        "use this activation: relu, prelu, swish, apl, pau, frelu, pwlu, dynamic_pwlu, nonuniform_pwlu, ...",
        flag="--act",
        metavar="NAME",
    )
    seed: int = _setting(0, "seed the weights, the order of the images and the augmentation")
    epochs: int = _setting(None, "pass N times over the training images")
    iterations: int = _setting(
        0,
        "train for N steps of the recipe's batch size instead of --epochs; --batch changes the number of steps, not of images "
        "(default: set by the recipe)",
    )
    batch: int = _setting(None, "use N images per optimizer step, over all processes")
    lr: float = _setting(None, "set the peak learning rate for the recipe's batch size; it is scaled in proportion to --batch")
    weight_decay: float = _setting(None, "set the weight decay of weights; the parameters of activations have no weight decay")
    norm_weight_decay: float = _setting(
        None,
        "set the weight decay of normalization layers; 0 keeps inputs aligned with the bounds of PWLUs "
        "(default: as --weight-decay)",
    )
    label_smoothing: float = _setting(None, "spread this fraction of each label over all classes")
    augmentation: str = _setting(None, "choose the augmentation of training images", choices=AUGMENTATIONS)
    warm_up: float = _setting(None, "raise the learning rate to its peak over this fraction of the steps")
    width: float = _setting(None, "multiply the number of channels of all layers by X")
    pixels: int = _setting(None, "set the height and width of images; in detection, the shorter side")
    holdout: int = _setting(
        0,
        "measure on N held-out training images instead of the test set, to choose settings (default: measure on the test set)",
    )
    intervals: int = _setting(16, "give each PWLU N intervals", unit=True)
    granularity: str = _setting(
        "channel", "learn one function per channel or per layer", choices=("channel", "layer"), unit=True
    )
    init: str = _setting(
        "relu", "initialize PWLUs as this function; same: as the activations they replace", metavar="NAME", unit=True
    )
    realign_epochs: float = _setting(None, "set the length of Phase I in epochs, the paper's T'", unit=True)
    fix_init: float = _setting(
        0.0,
        "skip Phase I: give PWLUs the bounds -X and X, and learn from the first step (default: train with Phase I)",
        metavar="X",
        unit=True,
    )
    unit_lr: float = _setting(
        1.0,
        "multiply the learning rate of activations' parameters by this (default: 1; for pau, set by the recipe)",
        metavar="FACTOR",
        unit=True,
    )
    rule: str = _setting(
        DEFAULT_RULE,
        "train PWLUs by this learning rule; shared: the channels of a layer share gradients, and bends are penalized",
        choices=tuple(RULES),
        unit=True,
    )
    curvature: float = _setting(
        0.0,
        "add this multiple of the curvature of PWLUs to the loss, such as 0.001 (default: no penalty)",
        metavar="FACTOR",
        unit=True,
    )
    ema: float = _setting(
        0.0,
        "measure an exponential moving average of the weights with this decay, such as 0.999 (default: no average)",
        metavar="DECAY",
    )
    norm: str = _setting("batch", "choose the normalization layers", choices=("batch", "group"))
    precision: str = _setting("float32", "compute in this precision; bf16 and fp16 use autocast", choices=PRECISIONS)
    accumulate: int = _setting(
        1, "accumulate gradients over N micro-batches per process and optimizer step", machine=True, metavar="N"
    )
    compile: bool = _setting(False, "compile the network with torch.compile", machine=True)
    cuda_graphs: bool = _setting(
        False, "run forward and backward pass as a CUDA graph, for networks too small to keep a GPU busy", machine=True
    )
    fuse_norms: str = _setting(
        "auto",
        "run batch norm, addition and PWLU in one pass; auto: wherever possible, but on a CPU not with --channels-last or "
        "--compile",
        machine=True,
        choices=FUSE_NORMS,
    )
    channels_last: bool = _setting(None, "use the channels-last memory format (default: on for GPUs, else off)", machine=True)
    data: str = _setting(
        "data",
        "read the data set from this folder, or the images of ImageNet and Imagenette from tar shards, in quotes: "
        "'NAME-{000..146}.tar'",
        machine=True,
        metavar="DIR",
    )
    test_data: str = _setting(
        None, "measure on the images of these shards (default: on the test images of --data)", machine=True, metavar="SHARDS"
    )
    device: str = _setting(
        None, "compute on this device: cpu, cuda, ... (default: cuda if available)", machine=True, metavar="NAME"
    )
    workers: int = _setting(
        None, "read image files in N processes (default: one per core, at most 8)", machine=True, metavar="N"
    )
    measure_every: int = _setting(1, "measure every N epochs and after the last one (default: set by the recipe)", machine=True)
    save_detections: bool = _setting(False, "write the final detections to detections.json, for pwlu evaluate", machine=True)
    snapshots: int = _setting(
        20, "save the functions N times during the run, at most once per epoch, for pwlu report; 0: never", machine=True
    )
    tensorboard: bool = _setting(
        False, "write metrics and figures of the functions for TensorBoard into the run folder", machine=True
    )

    @property
    def worker_count(self) -> int:
        """Return the number of worker processes: ``workers``, or the default if that is None."""
        return min(8, os.cpu_count() or 1) if self.workers is None else self.workers

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as a dictionary for JSON."""
        return dataclasses.asdict(self)

    def identity(self) -> dict[str, Any]:
        """Return the settings that affect the result beyond rounding. Runs with the same identity are the same experiment."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.metadata.get("machine")}

    def replace(self, **changes: Any) -> "Settings":
        """Return a copy with these changes, checked."""
        return check(dataclasses.replace(self, **changes))


def check(settings: Settings) -> Settings:
    """Return the settings, or raise an error about the first invalid one."""
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
    }
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{flag(field.name)} must be a finite number, not {value}")
        if value not in (choices := field.metadata.get("options", {}).get("choices", (value,))):
            expected = " or ".join(choices) if len(choices) == 2 else f"one of {', '.join(choices)}"
            raise UserError(f"{flag(field.name)} must be {expected}, not {value}")
    for name, (holds, expected) in rules.items():
        if not holds:
            raise UserError(f"{flag(name)} must be {expected}, not {getattr(settings, name)}")
    if settings.activation in UNITS and settings.fix_init and settings.rule != PAPER:
        raise UserError(f"--rule {settings.rule} needs Phase I: leave out --fix-init, or write --rule {PAPER}")
    if settings.activation == "nonuniform_pwlu" and (settings.rule != PAPER or settings.curvature):
        what = f"--rule {settings.rule}" if settings.rule != PAPER else "--curvature"
        raise UserError(f"{what} needs PWLUs with equally spaced knots: leave it out, or write --act pwlu")
    realigns = settings.activation in UNITS and not settings.fix_init and not settings.iterations
    if realigns and settings.realign_epochs >= settings.epochs:
        raise UserError(
            f"Phase I must be shorter than training: --realign-epochs is {settings.realign_epochs:g}, --epochs is "
            f"{settings.epochs}. Write --realign-epochs {settings.epochs / 10:g}, or more --epochs"
        )
    return settings


def flag(name: str) -> str:
    """Return the command-line flag of a setting."""
    options = {f.name: f.metadata for f in dataclasses.fields(Settings)}[name].get("options", {})
    return options.get("flag", "--" + name.replace("_", "-"))
