"""The network of a finished run, made again from its folder alone: config.json says how, model.pt has the weights."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pwlu.lab.models import detectors, networks
from pwlu.lab.recipes.catalog import Recipe, find
from pwlu.lab.recipes.experiment import run_name
from pwlu.lab.recipes.settings import Settings, UserError
from pwlu.lab.runs.divergence import described
from pwlu.lab.runs.results import no_run
from pwlu.lab.runs.run_folder import RunFolder, tensors
from pwlu.lab.training.trainer import put_activations

WEIGHTS = "model.pt"


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained network: on the CPU, in float32, in evaluation mode.

    ``shape``: of an image, (C, H, W). ``classes``: how many. ``sites``: the names of the activations that the run put in, with
    what stood there before, as :class:`pwlu.conversion.conversion_report.Site` has it.
    """

    path: Path
    settings: Settings
    network: nn.Module
    shape: tuple[int, int, int]
    classes: int
    sites: dict[str, str]

    @property
    def detects(self) -> bool:
        """Whether it is a detector, which is called with a list of images, not with a tensor."""
        return find(self.settings.recipe).detects

    def sample(self, batch: int) -> Tensor:
        """Random numbers in the place of normalised images, (batch, C, H, W)."""
        return torch.randn(batch, *self.shape, generator=torch.Generator().manual_seed(0))

    def backbone(self) -> "TrainedNetwork":
        """Of a detector: the ResNet with its feature pyramid, which makes a dictionary of maps from a tensor of images."""
        own = "backbone."
        sites = {name.removeprefix(own): was for name, was in self.sites.items() if name.startswith(own)}
        return dataclasses.replace(self, network=self.network.get_submodule("backbone"), sites=sites)


def load(path: Path) -> TrainedNetwork:
    """The network of the run in that folder, or an error that says what is there instead, and what would do."""
    if not (path / "config.json").exists():
        raise no_run(path, "config.json", WEIGHTS)
    folder = RunFolder(path)
    settings = folder.settings()
    if folder.finished and (result := folder.result()).get("diverged"):
        raise UserError(f"{path} has no trained network. {described(result, settings.as_dict())}")
    state = _weights(folder, settings)
    recipe = find(settings.recipe)
    try:
        classes, channels = (_sizes_of_detector if recipe.detects else _sizes_of_classifier)(recipe, settings, state)
        network, sample = _new(recipe, settings, classes, channels)
        report = put_activations(network, sample, settings)
        network.load_state_dict(state)
    except (LookupError, RuntimeError) as error:
        why = str(error).strip().splitlines()
        raise folder.unreadable(
            f"{folder.path / WEIGHTS} does not hold the weights of the network that config.json describes, {recipe.network} "
            f"with {settings.activation}: {' '.join(line.strip() for line in why[:2])}"
        ) from None
    sites = {site.name: site.was for site in report.converted}
    return TrainedNetwork(folder.path, settings, network.eval(), (channels, settings.pixels, settings.pixels), classes, sites)


def _new(recipe: Recipe, settings: Settings, classes: int, channels: int) -> tuple[nn.Module, Any]:
    """Return the network as it was before training, and what it was called with to find its activations."""
    if recipe.detects:
        return detectors.of_recipe(settings, classes), detectors.sample(settings)
    return networks.of_recipe(settings, classes, channels), networks.sample(settings, channels)


# What the weights say.


def _weights(folder: RunFolder, settings: Settings) -> dict[str, Tensor]:
    path = folder.path / WEIGHTS
    if not path.exists():
        raise UserError(_without_weights(folder, settings))
    try:
        state = tensors(path)
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}. Copy it again from where it was trained, or train again") from None
    if strange := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise UserError(f"{path} does not hold weights: {', '.join(strange[:5])} must be tensors")
    if not all(bool(tensor.isfinite().all()) for tensor in state.values()):
        raise UserError(f"the weights in {path} are not all finite. Train again, with a smaller --lr")
    return state


def _without_weights(folder: RunFolder, settings: Settings) -> str:
    if folder.finished:
        return (
            f"{folder.path} has the results of a run but not its weights, {WEIGHTS}, as those in results/ do. Write the folder "
            f"that pwlu train made, such as runs/{run_name(settings)}"
        )
    rows = folder.metrics()
    epochs = f"after {len(rows)} epochs" if rows else "before the end of its first epoch"
    return f"{folder.path} is not finished: it stands {epochs}. Go on with pwlu train --resume {folder.path}"


def _sizes_of_classifier(recipe: Recipe, settings: Settings, state: dict[str, Tensor]) -> tuple[int, int]:
    """Classes and channels of an image: what the last layer makes, and what the first one takes."""
    with torch.device("meta"):
        layers = networks.of_recipe(settings, 1, 3).named_modules()
        kinds = {name: type(module) for name, module in layers}
    first = next(name for name, kind in kinds.items() if kind is nn.Conv2d)
    last = next(name for name, kind in reversed(kinds.items()) if kind is nn.Linear)
    return state[f"{last}.weight"].shape[0], state[f"{first}.weight"].shape[1]


def _sizes_of_detector(recipe: Recipe, _: Settings, state: dict[str, Tensor]) -> tuple[int, int]:
    """Mask R-CNN has a class more, for the background; RetinaNet has all of them for each anchor, and 4 edges likewise."""
    if recipe.network.startswith("maskrcnn"):
        return state["roi_heads.box_predictor.cls_score.bias"].numel() - 1, 3
    edges = state["head.regression_head.bbox_reg.bias"].numel()
    return 4 * state["head.classification_head.cls_logits.bias"].numel() // edges, 3
