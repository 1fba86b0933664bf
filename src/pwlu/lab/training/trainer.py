"""The trainer: the network with its activations, the optimizer, the schedule and the learning phases."""

import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils

from pwlu import baselines
from pwlu.conversion.convert import convert_
from pwlu.conversion.fuse_norms import fuse_norms_
from pwlu.conversion.safetensors_file import tensors_to_bytes
from pwlu.conversion.saving import serialise
from pwlu.kernels.dispatch import warm_up
from pwlu.lab.data import keyed_random
from pwlu.lab.recipes.catalog import find
from pwlu.lab.recipes.settings import UNITS, Settings, UserError
from pwlu.lab.runs.processes import Processes
from pwlu.lab.training.step_graph import StepGraph
from pwlu.learning.curvature import curvature
from pwlu.learning.parameter_groups import split_parameters
from pwlu.learning.two_phase import TwoPhase
from pwlu.units.module import PWLU, units_of
from pwlu.units.nonuniform import blocks_to_show
from pwlu.units.squeeze import function_parameters

LEARNED = (PWLU, nn.PReLU, baselines.APL, baselines.PAU, baselines.ACONC)  # their parameters describe functions: no decay


class Trainer:
    """The network, optimizer, schedule, phases, and moving average of the weights of a run."""

    def __init__(self, task: Any, settings: Settings, processes: Processes) -> None:
        self.task, self.settings, self.processes = task, settings, processes
        self.device_type = processes.device.type
        torch.manual_seed(int(keyed_random.hash_keys(settings.seed, 3)))
        network = task.network()
        self.report = replace_activations(network, task.sample(), settings)
        if processes.count > 1 and self.device_type == "cuda":
            network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
        self.fuse_norms = _fuse_norms(network, task.sample(), settings, self.device_type)
        network = network.to(processes.device, task.dtype, memory_format=task.layout)
        self.network: nn.Module = network
        self.average = None
        if settings.ema:
            self.average = swa_utils.AveragedModel(network, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(settings.ema))
        self.parallel: Any = None
        if processes.count > 1:
            self.parallel = DistributedDataParallel(network, [processes.device] if self.device_type == "cuda" else None)
        model = self.parallel or network
        self.model: Any = torch.compile(model) if settings.compile else model
        self.optimizer = _optimizer(network, settings)
        self.schedule = _schedule(self.optimizer, settings, task.total_steps)
        self.scaler = torch.amp.GradScaler(self.device_type, enabled=settings.precision == "fp16")
        self.graph = None
        if settings.cuda_graphs:
            check_cuda_graphs(settings, processes)
            self.graph = StepGraph(self._backward, network.parameters())
        self.units = units_of(network)
        self.phases = None
        if self.units and not settings.fix_init:
            realign_at = max(1, round(settings.realign_epochs * task.steps_per_epoch))
            if realign_at >= task.total_steps:
                raise UserError(
                    f"Phase I must be shorter than training: --realign-epochs {settings.realign_epochs:g} is {realign_at} "
                    f"steps, training has {task.total_steps}. Write fewer --realign-epochs, or train for longer"
                )
            copies = [self.average.module] if self.average else []
            self.phases = TwoPhase(network, self.optimizer, realign_at, rule=settings.rule, copies=copies)

    @property
    def measured(self) -> nn.Module:
        """Return the network to measure: the moving average if there is one, else the network."""
        return self.average.module if self.average else self.network

    @property
    def phase(self) -> int:
        """Return 1 in Phase I, in which the parameters of PWLUs are fixed, else 2."""
        return self.phases.phase if self.phases else 2

    def autocast(self) -> Any:
        """Return the autocast context for the precision of the settings."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.settings.precision)
        return torch.autocast(self.device_type, dtype) if dtype else nullcontext()

    def step(self, number: int, batches: list[Any]) -> Tensor:
        """Take an optimizer step on one or several micro-batches, and return the sums of the task."""
        seed = keyed_random.hash_keys(self.settings.seed, 4, number, self.processes.rank)
        torch.manual_seed(int(seed))  # for dropout
        sums = self.graph(batches, self.phase) if self.graph else self._backward(batches)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        with warnings.catch_warnings():  # if fp16 overflowed, the scaler skipped the optimizer step, and torch warns
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            self.schedule.step()
        self.optimizer.zero_grad()
        if self.average:
            self.average.update_parameters(self.network)
        return sums

    def _backward(self, batches: list[Any]) -> Tensor:
        """Compute the gradients of one or several micro-batches, and return the sums of the task."""
        sums = torch.zeros((), device=self.processes.device)
        for part, batch in enumerate(batches, start=1):
            postpone = self.parallel is not None and part < len(batches)  # all-reduce gradients only in the last micro-batch
            with self.parallel.no_sync() if postpone else nullcontext():
                with self.autocast():
                    loss, each = self.task.loss(self.model, batch)
                if self.settings.curvature and self.units and self.phase == 2:
                    loss = loss + self.settings.curvature * curvature(self.network)
                self.scaler.scale(loss / len(batches)).backward()
            sums = sums + each
        return sums

    def _parts(self) -> dict[str, Any]:
        """Return everything that has a state, by name."""
        names = ("network", "optimizer", "schedule", "scaler", *(["average"] if self.average else []))
        return {name: getattr(self, name) for name in names}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def serialised(self) -> bytes:
        """Return the contents of a safetensors file: as :func:`pwlu.save` writes it, or with the weights only."""
        return serialise(self.measured) if self.units else tensors_to_bytes(self.measured.state_dict())

    def functions(self) -> dict[str, dict[str, Tensor]]:
        """Return the parameters of every PWLU, on the CPU."""
        return {
            name: {block: values.detach().cpu().clone() for block, values in blocks_to_show(unit)._asdict().items()}
            for name, unit in units_of(self.measured).items()
        }


def check_cuda_graphs(settings: Settings, processes: Processes) -> None:
    """Raise UserError if steps cannot be captured."""
    why = None
    if processes.device.type != "cuda":
        why = f"it needs a GPU, and this run computes on {processes.device}"
    elif processes.count > 1:
        why = f"it needs one process, and this run has {processes.count}"
    elif find(settings.recipe).detects:
        why = "it needs images of one size, and detection has many"
    if why:
        raise UserError(f"--cuda-graphs: {why}. Leave it out")


def _fuse_norms(network: nn.Module, sample: Any, settings: Settings, device: str) -> str:
    """Fuse batch norms with the PWLUs after them if the settings say so. Return "on" if they are fused, else "off"."""
    # On a CPU, fused norms are not faster in channels_last, and were not timed in compiled networks: see docs/norms.md.
    plain = not (settings.channels_last or settings.compile)
    pays = device == "cuda" or (device == "cpu" and plain and bool(warm_up("cpu")))
    if settings.fuse_norms == "off" or (settings.fuse_norms == "auto" and not pays):
        return "off"
    try:
        fuse_norms_(network, sample)
    except ValueError as error:  # no norm can be fused
        if settings.fuse_norms == "on":
            raise UserError(f"--fuse-norms on: {error}") from None
        return "off"
    return "on"


def replace_activations(network: nn.Module, sample: Tensor, settings: Settings) -> Any:
    """Replace the network's activations by those of the settings. Return the report of :func:`pwlu.convert_`."""
    bounds = (-settings.fix_init, settings.fix_init) if settings.fix_init else None
    options: dict[str, Any] = {}
    if settings.activation in UNITS:
        options = {"bounds": bounds, "intervals": settings.intervals, "init": settings.init}
    try:
        return convert_(network, sample, to=settings.activation, granularity=settings.granularity, **options)
    except ValueError as error:
        raise UserError(f"--act {settings.activation}: {error}") from None


def _optimizer(network: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    groups = _parameter_groups(network, settings)
    return torch.optim.Adam(groups) if find(settings.recipe).optimizer == "adam" else torch.optim.SGD(groups, momentum=0.9)


def _schedule(optimizer: torch.optim.Optimizer, settings: Settings, steps: int) -> Any:
    """Return the learning rate schedule: a warm-up, then a cosine or the drops of the recipe.

    With drops, the warm-up is linear and starts at a thousandth of the peak.
    """
    drops = [round(steps * part) for part in find(settings.recipe).drops]
    if not drops:
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            [group["lr"] for group in optimizer.param_groups],
            total_steps=steps,
            pct_start=max(0.0, settings.warm_up - 1e-9),  # torch divides by zero if the warm-up is exactly one step
            cycle_momentum=False,
        )
    warm_up = settings.warm_up * steps

    def factor(step: int) -> float:
        return min(1.0, 0.001 + step / warm_up if warm_up else 1.0) * 0.1 ** sum(step >= drop for drop in drops)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _parameter_groups(network: nn.Module, settings: Settings) -> list[dict[str, Any]]:
    """Return parameter groups without weight decay for learned functions, which it would pull towards zero."""
    functions = function_parameters(module for module in network.modules() if isinstance(module, LEARNED))
    lr = settings.lr * settings.batch / find(settings.recipe).batch
    return split_parameters(network, functions, lr, settings.weight_decay, settings.unit_lr, settings.norm_weight_decay)
