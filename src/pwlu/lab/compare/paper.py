"""The results of the paper. Tables show them together with ours."""

# Top-1 accuracy on ImageNet in percent, by our names of network and method (pwlu.lab.recipes.experiment.method). From the
# paper's table of activations, and its tables of bounds and of the number of intervals, which have two or three networks.
TOP1: dict[str, dict[str, float]] = {
    "resnet18": {
        "relu": 71.34,
        "swish": 71.61,
        "prelu": 71.30,
        "apl": 71.03,
        "pau": 71.80,
        "frelu": 71.82,
        "pwlu": 72.57,
        "pwlu-fix-init-3-layer": 71.57,
        "pwlu-fix-init-6-layer": 71.70,
        "pwlu-fix-init-10-layer": 71.84,
        "pwlu-layer": 72.22,
        "pwlu-fix-init-3": 72.27,
        "pwlu-fix-init-6": 71.86,
        "pwlu-fix-init-10": 72.19,
        "pwlu-intervals-4": 72.24,
        "pwlu-intervals-8": 72.39,
        "pwlu-intervals-12": 72.45,
        "pwlu-intervals-20": 72.43,
    },
    "resnet50": {
        "relu": 76.90,
        "swish": 77.25,
        "prelu": 77.09,
        "apl": 76.43,
        "pau": 76.58,
        "frelu": 77.49,
        "pwlu": 77.78,
    },
    "mobilenet_v2": {
        "relu": 72.84,
        "swish": 73.68,
        "prelu": 73.69,
        "apl": 73.89,
        "pau": 74.56,
        "frelu": 74.85,
        "pwlu": 74.69,
    },
    "mobilenet_v3_small": {  # "MobileNet-V3" with 56 MFLOPs and 2.6 M parameters: the small one
        "relu": 67.74,
        "swish": 67.93,
        "prelu": 67.81,
        "apl": 67.68,
        "pau": 68.55,
        "frelu": 68.48,
        "pwlu": 69.65,
        "pwlu-fix-init-3-layer": 68.54,
        "pwlu-fix-init-6-layer": 68.48,
        "pwlu-fix-init-10-layer": 68.42,
        "pwlu-layer": 69.30,
        "pwlu-fix-init-3": 68.98,
        "pwlu-fix-init-6": 68.88,
        "pwlu-fix-init-10": 68.20,
        "pwlu-intervals-4": 68.70,
        "pwlu-intervals-8": 69.55,
        "pwlu-intervals-12": 69.20,
        "pwlu-intervals-20": 69.37,
    },
    "efficientnet_b0": {
        "relu": 76.45,
        "swish": 77.05,
        "prelu": 77.10,
        "apl": 77.28,
        "pau": 78.08,
        "frelu": 77.28,
        "pwlu": 78.22,
        "pwlu-intervals-4": 77.90,
        "pwlu-intervals-8": 78.09,
        "pwlu-intervals-12": 77.96,
        "pwlu-intervals-20": 77.86,
    },
}

# COCO's average precision of boxes and masks in percent, with ResNet-50, by our names of detector and method.
AP: dict[str, dict[str, dict[str, float]]] = {
    "box_ap": {
        "maskrcnn": {"relu": 39.06, "swish": 40.05, "frelu": 40.25, "pwlu": 40.48},
        "retinanet": {"relu": 37.06, "swish": 37.82, "frelu": 38.35, "pwlu": 38.31},
    },
    "mask_ap": {"maskrcnn": {"relu": 35.3, "swish": 36.1, "frelu": 36.90, "pwlu": 37.13}},
}

# Milliseconds for 64 images of 224 pixels on a V100, mean of 500 measurements.
INFERENCE: dict[str, dict[str, float]] = {
    "resnet18": {"relu": 17.1, "swish": 18.8, "pwlu": 19.9, "frelu": 23.3, "apl": 40.7, "pau": 64.2},
    "mobilenet_v3_small": {"relu": 15.4, "swish": 15.7, "pwlu": 16.2, "frelu": 18.1, "apl": 31.7, "pau": 38.6},
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
