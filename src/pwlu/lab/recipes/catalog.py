"""The catalog of recipes. Each recipe is one row of data."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from pwlu.common.text import nearest
from pwlu.lab.recipes.settings import Settings, UserError, check


@dataclass(frozen=True)
class Recipe:
    """An architecture, a data set, and the hyperparameters of training.

    Attributes:
        lr: the peak learning rate for ``batch`` images per step.
        warm_up: the fraction of the steps over which the learning rate rises.
        small: use small strides in the first layers, for images of 32 or 64 pixels.
        realign_epochs: the length of Phase I, the paper's T'.
        iterations: the length of training in steps of ``batch`` images. 0: train for ``epochs`` instead.
        optimizer: "sgd", with momentum 0.9, or "adam".
        drops: the parts of training after which the learning rate is divided by 10. Without any, it falls as a cosine.
        pau_lr: the factor on the learning rate of PAU's parameters, chosen on held-out images. With SGD, 1 is too large,
            because powers up to x^5 make their gradients large.
        anchors: for detectors, the factor on the sizes of anchors. A factor of 1 gives 32, 64, ..., 512 pixels.
        detections: for detectors, the largest number of detections per image.
    """

    data: str
    network: str
    epochs: int
    batch: int
    lr: float
    weight_decay: float
    augmentation: str = "crop+flip"
    label_smoothing: float = 0.0
    warm_up: float = 0.1
    width: float = 1.0
    pixels: int = 224
    realign_epochs: float = 5
    small: bool = False
    iterations: int = 0
    optimizer: str = "sgd"
    drops: tuple[float, ...] = ()
    measure_every: int = 1
    pau_lr: float = 1e-4
    anchors: float = 1.0
    detections: int = 100

    @property
    def detects(self) -> bool:
        """Return whether this recipe trains a detector. Otherwise it trains a classifier."""
        return self.data == "coco"

    @property
    def in_memory(self) -> bool:
        """Return whether all images have the same size and are kept in memory."""
        return self.data not in ("coco", "folder")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the metrics that tables compare, in percent, by their names in result.json."""
        if not self.detects:
            return ("accuracy",)
        return ("box_ap", "mask_ap") if self.network.startswith("maskrcnn") else ("box_ap",)


def _imagenet(network: str, epochs: int, weight_decay: float, lr: float, augmentation: str = "crop+flip") -> Recipe:
    """Return a recipe of the paper: SGD with momentum 0.9, one-cycle cosine schedule, batch size 1024, T' = 5 epochs.

    The paper does not give the peak learning rate and the warm-up, so these are our choice. The rate is 0.1 per 256 images for
    ResNets and half of that for mobile networks. It rises over a tenth of the steps.
    """
    return Recipe("folder", network, epochs, 1024, lr, weight_decay, augmentation)


def _cifar(network: str, width: float, **values: Any) -> Recipe:
    """Return a recipe of our own. T' is 7 % of training, a little more than the paper's 5 of 100 epochs for ResNets."""
    values |= {"width": width, "pixels": 32, "realign_epochs": 2, "small": True}
    return Recipe("cifar100", network, 30, 512, 0.4, 5e-4, label_smoothing=0.1, warm_up=0.2, **values)


def _cifar_by_adam(network: str) -> Recipe:
    """Return a recipe of a published comparison of activations (Dubey, Singh and Chaudhuri, Neurocomputing 2022).

    The values are those of the authors' code: no weight decay, and one learning rate for all parameters. T' = 5 epochs is our
    choice.
    """
    values: dict[str, Any] = {"pixels": 32, "small": True, "optimizer": "adam", "drops": (0.8,), "pau_lr": 1.0}
    return Recipe("cifar100", network, 100, 64, 1e-3, 0.0, warm_up=0.0, **values)


def _tiny_imagenet(network: str, width: float) -> Recipe:
    values: dict[str, Any] = {"width": width, "pixels": 64, "realign_epochs": 2, "small": True}
    return Recipe("tinyimagenet", network, 30, 256, 0.2, 5e-4, label_smoothing=0.1, warm_up=0.2, **values)


def _imagenette(network: str, width: float) -> Recipe:
    values: dict[str, Any] = {"width": width, "pixels": 128, "realign_epochs": 3}
    return Recipe("folder", network, 40, 128, 0.2, 5e-4, label_smoothing=0.1, warm_up=0.2, **values)


def _coco(detector: str) -> Recipe:
    """Return a recipe of the paper: 270k steps of 16 images, T' = 5 epochs.

    The learning rate is divided by 10 for the last 60k steps and again for the last 20k. The warm-up of 1000 steps and the
    horizontal flip are our choice. On COCO's 118k images, 270k steps are 37 epochs.
    """
    values: dict[str, Any] = {"warm_up": 1 / 270, "pixels": 800, "iterations": 270_000, "drops": (21 / 27, 25 / 27)}
    return Recipe("coco", f"{detector}_resnet50_fpn", 37, 16, 0.02, 1e-4, "flip", **values)


def _objects(detector: str, **values: Any) -> Recipe:
    """Return a recipe of our own for small data sets: ResNet-18 and the one-cycle cosine schedule of the other small recipes.

    RetinaNet has half the learning rate and twice the epochs: on held-out nuclei it diverged at the rate of Mask R-CNN.
    """
    values = {"batch": 8, "lr": 0.02, "weight_decay": 1e-4, "realign_epochs": 3, "measure_every": 5} | values
    if detector == "retinanet":
        values |= {"lr": values["lr"] / 2} | {name: 2 * values[name] for name in ("epochs", "realign_epochs")}
    return Recipe("coco", f"{detector}_resnet18_fpn", augmentation="flip", **values)


_SMALL_SETS: dict[str, dict[str, Any]] = {
    "nuclei": {"epochs": 20, "pixels": 320, "anchors": 0.25, "detections": 400, "realign_epochs": 2},
    "pedestrians": {"epochs": 60, "pixels": 320, "anchors": 0.5, "realign_epochs": 5, "measure_every": 10},
    "voc": {"epochs": 40, "pixels": 240, "anchors": 0.5, "batch": 16, "lr": 0.04, "realign_epochs": 4, "measure_every": 10},
    "tiny": {"epochs": 8, "pixels": 96, "anchors": 0.25, "batch": 4, "width": 0.125, "realign_epochs": 1, "measure_every": 1},
}
DETECTORS = ("maskrcnn", "retinanet")

RECIPES = {
    "imagenet/resnet18": _imagenet("resnet18", 100, 1e-4, 0.4),
    "imagenet/resnet50": _imagenet("resnet50", 100, 1e-4, 0.4),
    "imagenet/mobilenet_v2": _imagenet("mobilenet_v2", 200, 4e-5, 0.2),
    "imagenet/mobilenet_v3_small": _imagenet("mobilenet_v3_small", 350, 4e-5, 0.2),
    "imagenet/efficientnet_b0": _imagenet("efficientnet_b0", 350, 1e-5, 0.2, "autoaugment"),
    "cifar100/resnet18": _cifar("resnet18", 0.25, pau_lr=3e-4),
    "cifar100/mobilenet_v2": _cifar("mobilenet_v2", 0.5),
    "cifar100/mobilenet_v3_small": _cifar("mobilenet_v3_small", 0.5, pau_lr=1e-3),
    "cifar100/efficientnet_b0": _cifar("efficientnet_b0", 0.5),
    "cifar100/mobilenet_v1": _cifar_by_adam("mobilenet_v1"),
    "tinyimagenet/resnet18": _tiny_imagenet("resnet18", 0.5),
    "tinyimagenet/mobilenet_v2": _tiny_imagenet("mobilenet_v2", 0.5),
    "tinyimagenet/mobilenet_v3_small": _tiny_imagenet("mobilenet_v3_small", 1.0),
    "tinyimagenet/efficientnet_b0": _tiny_imagenet("efficientnet_b0", 0.5),
    "imagenette/resnet18": _imagenette("resnet18", 0.5),
    "imagenette/mobilenet_v2": _imagenette("mobilenet_v2", 0.5),
    "imagenette/mobilenet_v3_small": _imagenette("mobilenet_v3_small", 1.0),
    "imagenette/efficientnet_b0": _imagenette("efficientnet_b0", 0.5),
    "digits": Recipe("digits", "convnet", 40, 64, 0.2, 5e-4, "crop", warm_up=0.2, pixels=8, realign_epochs=3),
    **{f"coco/{detector}_resnet50_fpn": _coco(detector) for detector in DETECTORS},
    **{f"{name}/{d}_resnet18_fpn": _objects(d, **values) for name, values in _SMALL_SETS.items() for d in DETECTORS},
}


def find(name: str) -> Recipe:
    """Return the recipe with this name, or raise an error that suggests the three closest names."""
    if name in RECIPES:
        return RECIPES[name]
    first, second, third = nearest(name, RECIPES, most=3, cutoff=0)
    raise UserError(
        f"there is no recipe {name!r}. Did you mean {first}, {second} or {third}? pwlu train --help lists all {len(RECIPES)}"
    )


def settings(recipe: str, **changes: Any) -> Settings:
    """Return the settings of a recipe with changes. Ignore changes to None. If ``epochs`` is given, set iterations to 0."""
    row = {k: v for k, v in dataclasses.asdict(find(recipe)).items() if k in _SHARED}
    row["unit_lr"] = find(recipe).pau_lr if changes.get("activation") == "pau" else 1.0
    if changes.get("epochs") is not None:
        row["iterations"] = 0
    made = check(Settings(recipe=recipe, **row | {k: v for k, v in changes.items() if v is not None}))
    _check_task(made, find(recipe))
    return made


def _check_task(settings: Settings, recipe: Recipe) -> None:
    """Raise an error if a setting does not apply to the task of the recipe."""
    maskrcnn = recipe.network.startswith("maskrcnn")
    wrong = {
        f"--augmentation {settings.augmentation} is for classification: write flip or none": recipe.detects
        and settings.augmentation not in ("none", "flip"),
        "--label-smoothing is for classification: leave it out": recipe.detects and settings.label_smoothing,
        "--compile does not work for Mask R-CNN: torch recompiles it for every number of boxes, for many minutes, until it "
        "reaches the recompilation limit. Leave it out": maskrcnn and settings.compile,
        f"--pixels {settings.pixels} is too small for the coarsest feature maps of a detector: write 64 or more": recipe.detects
        and settings.pixels < 64,
        "--augmentation flip is for detection: write crop+flip": not recipe.detects and settings.augmentation == "flip",
        "--save-detections is for detection: leave it out": not recipe.detects and settings.save_detections,
        "--test-data is for shards of images: leave it out": recipe.data != "folder" and settings.test_data,
        "--augmentation autoaugment is for image files: write crop+flip": recipe.in_memory
        and settings.augmentation == "autoaugment",
        f"the images of {recipe.data} always have {recipe.pixels} pixels: leave out --pixels": recipe.in_memory
        and settings.pixels != recipe.pixels,
    }
    for message, holds in wrong.items():
        if holds:
            raise UserError(message)


def total_steps(settings: Settings, steps_per_epoch: int) -> int:
    """Return the number of optimizer steps. Iterations are scaled, so that all batch sizes see the same number of images."""
    if not settings.iterations:
        return settings.epochs * steps_per_epoch
    return max(1, round(settings.iterations * find(settings.recipe).batch / settings.batch))


_SHARED = {f.name for f in dataclasses.fields(Settings)} & {f.name for f in dataclasses.fields(Recipe)} - {"data"}
