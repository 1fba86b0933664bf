"""Compare the speed of a trained network with that of ReLU: in PyTorch, under torch.compile, and in ONNX Runtime."""

import copy
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pwlu.deploy.fuse import fuse_
from pwlu.lab.compare.presets import BASELINE, TITLES
from pwlu.lab.inference.exporting import session, write_onnx
from pwlu.lab.inference.timing import interleaved, percentiles
from pwlu.lab.inference.trained_network import TrainedNetwork
from pwlu.lab.recipes.settings import UserError
from pwlu.lab.runs.progress import Progress
from pwlu.units.module import units_of

ONNX_RUNTIME = "ONNX Runtime"
SECONDS = 0.01  # the shortest time of a measurement; one measurement calls a small network several times
MOST_CALLS = 50


@dataclass
class Contender:
    """One way to run the network.

    Attributes:
        runtime: PyTorch, torch.compile or ONNX Runtime.
        activation: the title of the activation.
        call: runs the network once. None if it cannot run here.
        why: why it cannot run, and what to do.
        times: p20, p50 and p80 of the milliseconds per call.
        ratio_to_relu: the median divided by the median of ReLU in the same runtime. None if ReLU could not be timed.
    """

    runtime: str
    activation: str
    call: Callable[[], Any] | None = None
    why: str = ""
    times: tuple[float, float, float] | None = None
    ratio_to_relu: float | None = None

    @property
    def name(self) -> str:
        """Return the name in a table."""
        return f"{self.runtime}, {self.activation}"


def with_relu(trained: TrainedNetwork) -> nn.Module:
    """Return a copy with the same weights, in which ReLU replaces every activation that the run inserted.

    The ReLUs work in place, as in published networks. Otherwise the comparison would make ReLU look too slow. If the network
    calls a function such as F.relu, it may use the input again. So these ReLUs are not in place.
    """
    network = copy.deepcopy(trained.network)
    for name, was in trained.info.sites.items():
        network.set_submodule(name, nn.ReLU(inplace=not was.startswith("F.")))
    return network.eval()


def measure(
    trained: TrainedNetwork, device: torch.device, batch: int, rounds: int, compiled: bool
) -> tuple[list[Contender], int]:
    """Time all ways to run a network that takes tensors, in turn. Return them, and the number of calls per measurement.

    `batch`: the number of images per call. `rounds`: the number of measurements. `compiled`: time torch.compile, too.
    """
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format  # as in pwlu train
    x = trained.sample(batch).to(device).contiguous(memory_format=layout)
    networks = {
        name: network.to(device=device, memory_format=layout)  # type: ignore[call-overload]
        for name, network in _networks(trained).items()
    }
    wait = torch.accelerator.synchronize if device.type != "cpu" else None
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        found = _prepare_contenders(networks, x, compiled, Path(folder))
        able = {contender.name: contender.call for contender in found if contender.call is not None}
        inner = _calls(next(iter(able.values())), wait)
        # Time the runtimes separately: idle threads of one runtime take time from the threads of the other.
        others = {name: call for name, call in able.items() if name.startswith(ONNX_RUNTIME)}
        in_torch = {name: call for name, call in able.items() if name not in others}
        parts = [part for part in (in_torch, others) if part]
        times: dict[str, list[float]] = {}
        with closing(Progress("timed", rounds * len(parts), unit="round")) as progress:
            for part in parts:
                times |= interleaved(part, rounds, inner=inner, wait=wait, after_round=progress.step)
    for contender in found:
        if contender.name in times:
            low, middle, high = percentiles(times[contender.name]).values()
            contender.times = (low, middle, high)
            if base := times.get(f"{contender.runtime}, {BASELINE}"):
                contender.ratio_to_relu = middle / percentiles(base)["p50_ms"]
    return found, inner


def _networks(trained: TrainedNetwork) -> dict[str, nn.Module]:
    """Return the networks to time by name: ReLU first, the one to deploy last."""
    networks = {BASELINE: with_relu(trained)}
    if trained.settings.activation == "relu":
        return networks
    title = TITLES.get(trained.settings.activation, trained.settings.activation)
    networks[title] = trained.network
    if units_of(trained.network):
        fused = copy.deepcopy(trained.network)
        fuse_(fused)
        networks[f"{title} fused"] = fused
    return networks


def _prepare_contenders(networks: dict[str, nn.Module], x: Tensor, compiled: bool, folder: Path) -> list[Contender]:
    names = list(networks)
    shipped = list(dict.fromkeys((BASELINE, names[-1])))
    written = names[:2]  # write_onnx fuses the network itself, and compares the file with it
    found = [Contender("PyTorch", name, partial(network, x)) for name, network in networks.items()]
    with closing(Progress("prepared", len(shipped) * compiled + len(written), unit="way")) as progress:
        for name in shipped if compiled else ():
            found.append(_try_to_prepare("torch.compile", name, partial(_compiled, networks[name], x)))
            progress.step()
        for name in written:
            found.append(
                _try_to_prepare(ONNX_RUNTIME, name, partial(_in_onnx_runtime, networks[name], x, folder / f"{name}.onnx"))
            )
            progress.step()
    return found


def _try_to_prepare(runtime: str, name: str, make: Callable[[], Callable[[], Any]]) -> Contender:
    """Return a contender. If it cannot be prepared, return one without a call that says why, so that the others can run."""
    try:
        return Contender(runtime, name, make())
    except (ImportError, UserError) as error:
        return Contender(runtime, name, why=str(error))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return Contender(runtime, name, why=f"failed with {type(error).__name__}: {lines[0][:160]}")


def _compiled(network: nn.Module, x: Tensor) -> Callable[[], Any]:
    call = partial(torch.compile(network, fullgraph=True, dynamic=False), x)
    call()
    return call


def _in_onnx_runtime(network: nn.Module, x: Tensor, file: Path) -> Callable[[], Any]:
    if x.device.type != "cpu":
        raise UserError("ONNX Runtime is timed on the CPU only: write --device cpu")
    sample = torch.cat([x, x])[:2].clone()
    with torch.inference_mode(False):  # torch.export cannot trace tensors made in inference mode
        write_onnx(network, sample.clone(), file, {})
    return partial(session(file, torch.get_num_threads()), x)


def _calls(call: Callable[[], Any], wait: Callable[[], None] | None) -> int:
    """Return how many calls a measurement needs to take at least ``SECONDS``, but at most ``MOST_CALLS``."""
    for _ in range(3):
        begin = time.perf_counter()
        call()
        if wait:
            wait()
        seconds = time.perf_counter() - begin
    return min(max(round(SECONDS / seconds), 1), MOST_CALLS)
