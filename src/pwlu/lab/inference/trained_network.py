"""Rebuild the network of a finished run from its folder. This needs no data set."""

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from pwlu.common.text import counted
from pwlu.conversion.safetensors_file import read_tensors
from pwlu.conversion.saving import load_into
from pwlu.lab.models import unconverted
from pwlu.lab.recipes.catalog import find
from pwlu.lab.recipes.experiment import run_name
from pwlu.lab.recipes.settings import UNITS, Settings, UserError
from pwlu.lab.runs import network_info
from pwlu.lab.runs.divergence import describe_divergence
from pwlu.lab.runs.network_info import NetworkInfo, read_network_info
from pwlu.lab.runs.results import no_run_error
from pwlu.lab.runs.run_folder import MODEL, RunFolder
from pwlu.lab.training.trainer import replace_activations


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained network on the CPU, in float32, in evaluation mode. ``info`` describes its input, classes and activations."""

    path: Path
    settings: Settings
    network: nn.Module
    info: NetworkInfo

    @property
    def detects(self) -> bool:
        """Return whether it is a detector, which takes a list of images instead of a tensor."""
        return find(self.settings.recipe).detects

    def sample(self, batch: int) -> Tensor:
        """Return random numbers in place of normalized images, (batch, C, H, W)."""
        return torch.randn(batch, *self.info.shape, generator=torch.Generator().manual_seed(0))

    def backbone(self) -> "TrainedNetwork":
        """Return the ResNet of a detector with its feature pyramid. It maps a tensor of images to a dictionary of maps."""
        own = "backbone."
        sites = {name.removeprefix(own): was for name, was in self.info.sites.items() if name.startswith(own)}
        info = dataclasses.replace(self.info, sites=sites)
        return dataclasses.replace(self, network=self.network.get_submodule("backbone"), info=info)


def load(path: Path) -> TrainedNetwork:
    """Return the network of a run folder. If a file is missing or damaged, raise an error that says so and what to do."""
    folder = RunFolder(path)
    if not folder.has("config.json"):
        raise no_run_error(path, "config.json", MODEL)
    settings = folder.settings()
    if folder.finished and (result := folder.result()).get("diverged"):
        raise UserError(f"{path} has no trained network. {describe_divergence(result, settings.as_dict())}")
    if missing := next((name for name in (MODEL, network_info.FILE) if not folder.has(name)), None):
        raise UserError(_explain_missing(missing, folder, settings))
    info = read_network_info(folder)
    network = unconverted.network(settings, len(info.classes), info.shape[0])
    try:
        if settings.activation in UNITS:
            load_into(network, path / MODEL)
        else:
            replace_activations(network, unconverted.sample(settings, info.shape[0]), settings)
            network.load_state_dict(read_tensors(path / MODEL))
    except (LookupError, RuntimeError, ValueError) as error:
        why = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
        raise folder.unreadable(
            f"{path / MODEL} is damaged, or does not hold the weights of the network that config.json describes, "
            f"{find(settings.recipe).network} with {settings.activation}: {why}"
        ) from None
    if not all(bool(tensor.isfinite().all()) for tensor in network.state_dict().values()):
        raise UserError(f"the weights in {path / MODEL} are not all finite. Train again, with a smaller --lr")
    return TrainedNetwork(path, settings, network.float().eval(), info)


def _explain_missing(missing: str, folder: RunFolder, settings: Settings) -> str:
    path = folder.path
    if folder.finished:
        return (
            f"{path} has the results of a run but no {missing}, like the runs in results/. Write the folder that pwlu train "
            f"made, such as runs/{run_name(settings)}"
        )
    epochs = counted(len(folder.metrics()), "epoch")
    return f"{path} is not finished: it has completed {epochs}. Continue it with pwlu train --resume {shlex.quote(str(path))}"
