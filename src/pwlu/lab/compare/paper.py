"""The results of the paper. Tables show them together with ours."""

_METHODS = ("relu", "swish", "prelu", "apl", "pau", "frelu", "pwlu")
_BOUNDS = (
    *("pwlu-fix-init-3-layer", "pwlu-fix-init-6-layer", "pwlu-fix-init-10-layer", "pwlu-layer"),
    *("pwlu-fix-init-3", "pwlu-fix-init-6", "pwlu-fix-init-10"),
)
_INTERVALS = ("pwlu-intervals-4", "pwlu-intervals-8", "pwlu-intervals-12", "pwlu-intervals-20")


def _by_method(*columns: tuple[tuple[str, ...], tuple[float, ...]]) -> dict[str, float]:
    return {name: value for names, values in columns for name, value in zip(names, values, strict=True)}


# Top-1 accuracy on ImageNet in percent, by our names of network and method (pwlu.lab.recipes.experiment.method). From the
# paper's table of activations, and its tables of bounds and of the number of intervals, which have two or three networks.
# Its "MobileNet-V3" with 56 MFLOPs and 2.6 M parameters is the small one.
TOP1: dict[str, dict[str, float]] = {
    "resnet18": _by_method(
        (_METHODS, (71.34, 71.61, 71.30, 71.03, 71.80, 71.82, 72.57)),
        (_BOUNDS, (71.57, 71.70, 71.84, 72.22, 72.27, 71.86, 72.19)),
        (_INTERVALS, (72.24, 72.39, 72.45, 72.43)),
    ),
    "resnet50": _by_method((_METHODS, (76.90, 77.25, 77.09, 76.43, 76.58, 77.49, 77.78))),
    "mobilenet_v2": _by_method((_METHODS, (72.84, 73.68, 73.69, 73.89, 74.56, 74.85, 74.69))),
    "mobilenet_v3_small": _by_method(
        (_METHODS, (67.74, 67.93, 67.81, 67.68, 68.55, 68.48, 69.65)),
        (_BOUNDS, (68.54, 68.48, 68.42, 69.30, 68.98, 68.88, 68.20)),
        (_INTERVALS, (68.70, 69.55, 69.20, 69.37)),
    ),
    "efficientnet_b0": _by_method(
        (_METHODS, (76.45, 77.05, 77.10, 77.28, 78.08, 77.28, 78.22)), (_INTERVALS, (77.90, 78.09, 77.96, 77.86))
    ),
}

# COCO's average precision of boxes and masks in percent, with ResNet-50, by our names of detector and method.
AP: dict[str, dict[str, dict[str, float]]] = {
    "box_ap": {
        "maskrcnn": {"relu": 39.06, "swish": 40.05, "frelu": 40.25, "pwlu": 40.48},
        "retinanet": {"relu": 37.06, "swish": 37.82, "frelu": 38.35, "pwlu": 38.31},
    },
    "mask_ap": {"maskrcnn": {"relu": 35.3, "swish": 36.1, "frelu": 36.90, "pwlu": 37.13}},
}


def value(metric: str, network: str, method: str) -> float | None:
    """Return the paper's value of a metric, or None. For detectors, the name of the backbone is ignored."""
    return _results(metric, network).get(method)


def gain(network: str, method: str, metric: str = "accuracy") -> float | None:
    """Return the paper's gain over ReLU; None for ReLU itself and if the paper has no value."""
    found = value(metric, network, method)
    return None if found is None or method == "relu" else found - _results(metric, network)["relu"]


def _results(metric: str, network: str) -> dict[str, float]:
    if metric == "accuracy":
        return TOP1.get(network, {})
    return AP[metric].get(network.partition("_")[0], {})
