"""Learning rules, and the learner that applies them before and after each optimizer step and between epochs."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import rule_functions as functions
import torch
from rule_functions import HEIGHTS, LEFT_SLOPE, Layers
from torch import Tensor, nn

from pwlu.initial_functions import InitialFunction
from pwlu.learning.curvature import parameter_indices
from pwlu.learning.shared_rule import SharedRule
from pwlu.units.module import PWLU

SQUARES_DECAY = 0.99  # of the running mean square of gradients
OBSERVED_BATCHES = 8  # at the end of an epoch, over which mean and standard deviation of inputs are measured


def _word(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Rule:
    """Changes to plain SGD for PWLUs. The defaults are the paper's method."""

    share: float = _word(0.0, "add X times the layer's sum of gradients, divided by sqrt(channels), to each channel's gradient")
    sharesum: float = _word(0.0, "add X times the layer's sum of gradients to each channel's gradient")
    shareall: bool = _word(False, "share the gradient of penalties too: changes the speed, not the optimum")
    precond: float = _word(0.0, "smooth the gradient along the knots: G (I + X D'D)^-1, with D the difference of neighbours")
    relstep: float = _word(0.0, "take steps relative to the function's size, with the gradient divided by its running RMS")
    decayB: bool = _word(False, "apply the recipe's weight decay to bounds and heights, not to slopes")
    curv: float = _word(0.0, "penalise squared bends, times X, as pwlu.curvature does")
    relcurv: float = _word(0.0, "penalise squared bends relative to the mean squared rise, times X")
    tv2: float = _word(0.0, "penalise absolute jumps of the slope, times X")
    dev: float = _word(0.0, "penalise squared differences from the layer's mean function, times X")
    reldev: float = _word(0.0, "penalise them relative to the mean squared rise, times X")
    mean: bool = _word(False, "average penalties over the channels of a layer instead of adding them")
    rootmean: bool = _word(False, "divide penalties by the square root of the channels of a layer")
    sigma: bool = _word(False, "penalties times (6 deviations of the input / distance of the bounds)^2")
    information: bool = _word(False, "penalties times the layer's running mean square of the gradient of heights")
    late: bool = _word(False, "penalties times (1 - learning rate / its peak)")
    prox: bool = _word(False, "apply curv and relcurv as an implicit step after the optimizer's, stable at any strength")
    base: bool = _word(False, "apply curv, relcurv and tv2 to the difference from the initial function")
    regrid: float = _word(0.0, "move the bounds to mean +- 3 deviations of the inputs every X epochs, and keep the function")
    regridlast: float = _word(0.8, "stop regridding after this fraction of the training")
    gain: float = _word(0.0, "hold the RMS slope over the inputs at X; -1: at its value after realignment")
    layergain: bool = _word(False, "let gain hold the RMS slope of each layer, with one factor for all of its channels")
    fade: bool = _word(False, "multiply share and sharesum by the learning rate divided by its peak")
    lib: bool = _word(False, "use the library's rule, pwlu.learning.shared_rule, with libshare and libbend")
    libshare: float = _word(SharedRule.sharing, "the library's rule: share X times the sum of gradients (default: 0.1)")
    libbend: float = _word(SharedRule.bend, "the library's rule: penalise squared bends, times X (default: 0.03)")
    jitter: float = _word(0.0, "shift inputs in training by a uniform random number of up to +- X intervals / 2")

    @property
    def observes(self) -> bool:
        """Return whether the rule needs mean and standard deviation of inputs."""
        return bool(self.regrid or self.gain or self.sigma)


class Bank:
    """All PWLUs of a network as one table."""

    def __init__(self, units: Iterable[PWLU]) -> None:
        self.units = list(units)
        (self.intervals,) = {unit.intervals for unit in self.units}
        self.weights = [unit.weight for unit in self.units]
        self.lengths = [weight.numel() for weight in self.weights]
        device = self.weights[0].device
        self.rows = parameter_indices(tuple(self.lengths), self.intervals, device)
        self.layers = Layers.of([unit.channels for unit in self.units], device)

    def table(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return a table of tensors that have the layout of the weights."""
        return torch.cat([t.detach().reshape(-1) for t in tensors])[self.rows]

    def values(self) -> Tensor:
        """Return the table of the weights."""
        return self.table(self.weights)

    def gradient(self) -> Tensor:
        """Return the table of the gradients."""
        return self.table(weight.grad for weight in self.weights)

    def write(self, tensors: Iterable[Tensor], table: Tensor) -> None:
        """Write a table into tensors that have the layout of the weights."""
        flat = table.new_empty(sum(self.lengths))
        flat[self.rows.reshape(-1)] = table.reshape(-1)
        torch._foreach_copy_([t.detach() for t in tensors], list(flat.split(self.lengths)))


@torch.no_grad()
def input_statistics(bank: Bank, network: nn.Module, batches: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the inputs of all functions, (F, 1) each, in evaluation mode."""
    seen: list[list[Tensor]] = [[] for _ in bank.units]

    def observe(unit: PWLU, arguments: tuple[Tensor], number: int) -> None:
        x = arguments[0]
        dims = [i for i in range(x.ndim) if unit.channels == 1 or i != unit.channel_dim % x.ndim]
        variance, mean = torch.var_mean(x.float(), dims, correction=0)
        seen[number].append(torch.stack([mean.reshape(-1), variance.reshape(-1)]))

    hooks = [unit.register_forward_pre_hook(partial(observe, number=i)) for i, unit in enumerate(bank.units)]
    training = network.training
    network.eval()
    for batch in batches:
        network(batch)
    network.train(training)
    for hook in hooks:
        hook.remove()
    parts = []
    for each in seen:
        mean, variance = torch.stack(each).unbind(1)
        parts.append(torch.stack([mean.mean(0), (variance.mean(0) + mean.var(0, correction=0)).sqrt()]))
    mean, std = torch.cat(parts, 1)[:, :, None]
    return mean, std


def shifted(unit: PWLU, arguments: tuple[Tensor], jitter: float) -> Tensor | None:
    """Return the input of a unit plus random shifts of up to +- `jitter` intervals / 2, in Phase II of training."""
    if not unit.training or unit.phase == 1:
        return None
    x = arguments[0]
    step = (unit.right - unit.left).detach() / unit.intervals
    shape = [1] * x.ndim
    shape[unit.channel_dim] = unit.channels
    return x + torch.rand_like(x).sub_(0.5).mul_(jitter * step.to(x.dtype).view(shape))


class Learner:
    """Applies a rule in every optimizer step of Phase II.

    Args:
        rule: the rule.
        bank: the PWLUs.
        base: the function whose bends are not penalised, or None.
        trainer: the trainer of the run, for its optimizer, phase and settings.
        peak: the largest learning rate of PWLUs.
    """

    def __init__(self, rule: Rule, bank: Bank, base: InitialFunction | None, trainer: Any, peak: float) -> None:
        self.rule, self.bank, self.base, self.trainer, self.peak = rule, bank, base, trainer, peak
        if rule.lib:
            trainer.phases.rule = SharedRule(rule.libshare, rule.libbend)
        self.optimizer = trainer.optimizer
        (self.group,) = (g for g in self.optimizer.param_groups if any(p is bank.weights[0] for p in g["params"]))
        like = {"dtype": bank.weights[0].dtype, "device": bank.weights[0].device}
        self.smoother = functions.smoother(bank.intervals, rule.precond).to(**like)
        self.bending = [part.to(**like) for part in functions.bending(bank.intervals)]
        self.second, self.updates = torch.zeros(len(bank.rows), 1, **like), 0
        self.squares, self.measured = torch.zeros(len(bank.rows), 1, **like), 0
        weights = {name: getattr(rule, name) for name in ("curv", "relcurv", "tv2", "dev", "reldev") if getattr(rule, name)}
        self.implicit = {name: weights.pop(name) for name in ("curv", "relcurv") if rule.prox and name in weights}
        self.explicit = weights
        if rule.shareall and rule.relstep:
            raise ValueError(
                "shareall shares the gradient of penalties, which relstep divides by its size: leave out one of both"
            )
        if rule.shareall and self.implicit and rule.share:
            raise ValueError("shareall with prox works only with sharesum: leave out share")
        if rule.relstep and self.explicit:
            raise ValueError(f"relstep works only with implicit penalties: write prox, and leave out {', '.join(weights)}")
        if rule.jitter:
            for unit in bank.units:
                unit.register_forward_pre_hook(partial(shifted, jitter=rule.jitter))
        self.mean = self.std = self.target = None
        self.changes_gradients = any((rule.share, rule.sharesum, rule.precond, rule.relstep, rule.decayB, self.explicit))
        self.learning = self.last_step = False
        self.numbers: dict[str, float] = {}
        self.notes: list[str] = []
        self.optimizer.register_step_pre_hook(lambda *_: self._before_step())
        self.optimizer.register_step_post_hook(lambda *_: self._after_step())

    def begin(self, step: int, steps_per_epoch: int) -> None:
        """Announce the next step of the epoch, counted from 0."""
        self.last_step = step == steps_per_epoch - 1

    def _before_step(self) -> None:
        rule, bank = self.rule, self.bank
        self.learning = self.trainer.phase == 2  # _after_step uses it too: the step itself may end Phase I
        if not self.learning:
            return
        if self.last_step:
            self.numbers = self._numbers()
        if not self.changes_gradients:
            return
        table, gradient = bank.values(), bank.gradient()
        if rule.information:
            self.measured += 1
            self.squares.lerp_(gradient[:, HEIGHTS:].square().mean(1, keepdim=True), 1 - SQUARES_DECAY)
        if not rule.shareall:
            gradient = self._shared(gradient, table)
        if rule.precond:
            gradient = functions.preconditioned(gradient, self.smoother)
        if rule.relstep:
            self.updates += 1
            gradient = functions.relative_step(gradient, table, self.second, self.updates) * (rule.relstep / self.peak)
        if rule.decayB:
            decayed = table * self.trainer.settings.weight_decay
            decayed[:, LEFT_SLOPE:HEIGHTS] = 0
            gradient = gradient + decayed
        if self.explicit:
            with torch.enable_grad():
                leaf = table.requires_grad_()
                each = sum(w * functions.penalty(name, leaf, bank.layers, self.base) for name, w in self.explicit.items())
                total = (each * self._scale(table)[:, 0]).sum()
                gradient = gradient + torch.autograd.grad(total, leaf)[0]
        if rule.shareall:
            gradient = self._shared(gradient, table.detach())
        bank.write([weight.grad for weight in bank.weights], gradient)

    @torch.no_grad()
    def _scale(self, table: Tensor) -> Tensor:
        """Return the factor of penalties per function, (F, 1)."""
        scale = torch.ones_like(table[:, :1])
        if self.rule.mean:
            scale = scale / self.bank.layers.channels
        if self.rule.rootmean:
            scale = scale / self.bank.layers.channels.sqrt()
        if self.rule.late:
            scale = scale * (1 - self.group["lr"] / self.peak)
        if self.rule.information:
            layers = self.bank.layers
            scale = scale * layers.sums(self.squares) / layers.channels / (1 - SQUARES_DECAY**self.measured)
        if self.rule.sigma and self.std is not None:  # before the first measurement the bounds are at mean +- 3 deviations
            scale = scale * (6 * self.std / (table[:, 1:2] - table[:, :1]).clamp(min=1e-12)).square()
        return scale

    def _shared(self, gradient: Tensor, table: Tensor) -> Tensor:
        rule, layers = self.rule, self.bank.layers
        for strength, root in ((rule.share, True), (rule.sharesum, False)):
            if strength:
                gradient = functions.shared(gradient, table, layers, strength * self._fade(), root)
        return gradient

    def _fade(self) -> float:
        return self.group["lr"] / self.peak if self.rule.fade else 1.0

    @torch.no_grad()
    def _after_step(self) -> None:
        rule, bank = self.rule, self.bank
        if not self.learning or not (self.implicit or rule.gain):
            return
        table = bank.values()
        if self.implicit:
            strength: Any = 0.0
            for name, weight in self.implicit.items():
                strength = strength + 2 * weight * (bank.intervals / functions.squared_size(table) if name == "relcurv" else 1)
            # As strong as the penalty's gradient would be: with momentum 0.9, a constant gradient counts ten times.
            strength = strength * self.group["lr"] * 10 * self._scale(table)
            sharing = rule.sharesum * self._fade() if rule.shareall else 0.0
            table = functions.implicit_bend(table, strength, *self.bending, self.base, bank.layers, sharing)
        if rule.gain:
            if self.mean is None:  # realignment has set the bounds to mean +- 3 deviations
                self.mean, self.std = table[:, :2].mean(1, keepdim=True), (table[:, 1:2] - table[:, :1]) / 6
            gain = functions.rms_slope(table, self.mean, self.std)
            if rule.layergain:
                gain = functions.layer_gain(gain, bank.layers)
            if self.target is None:
                self.target = rule.gain if rule.gain > 0 else gain
            table = functions.with_gain(table, self.target, gain)
        bank.write(bank.weights, table)

    @torch.no_grad()
    def end_epoch(self, done: int, epochs: int) -> None:
        """Update the statistics of inputs, and move the bounds if the rule asks for it, after `done` epochs."""
        rule, bank = self.rule, self.bank
        if self.trainer.phase != 2 or not rule.observes:
            return
        self.mean, self.std = self._input_statistics()
        if not rule.regrid or done % round(rule.regrid) or done > rule.regridlast * epochs:
            return
        table = bank.values()
        left, right = self.mean - 3 * self.std, self.mean + 3 * self.std
        usable = (self.std > 1e-5 * (1 + self.mean.abs())) & left.isfinite() & right.isfinite()
        left, right = torch.where(usable, left, table[:, :1]), torch.where(usable, right, table[:, 1:2])
        buffers = [self.optimizer.state.get(weight, {}).get("momentum_buffer") for weight in bank.weights]
        momentum = None if any(buffer is None for buffer in buffers) else bank.table(buffers)
        new, moved, error = functions.regrid(table, left, right, momentum)
        bank.write(bank.weights, torch.where(usable, new, table))
        if moved is not None:
            bank.write(buffers, torch.where(usable, moved, momentum))
        width = ((right - left) / (table[:, 1:2] - table[:, :1])).median().item()
        self.notes.append(f"regrid after {done}: width x {width:.3f}, error {error.median():.4f}, at most {error.max():.4f}")

    def _input_statistics(self) -> tuple[Tensor, Tensor]:
        task = self.trainer.task
        batches = task.read(list(task.order(0)[:OBSERVED_BATCHES]), (0, 0, 2))
        with self.trainer.autocast():
            return input_statistics(self.bank, self.trainer.network, (images for images, _ in batches))

    def _numbers(self) -> dict[str, float]:
        """Return medians over functions that separate scale, smoothness and step size."""
        table, gradient = self.bank.values(), self.bank.gradient()
        risen, d, size = functions.rises(table), functions.interval(table), functions.squared_size(table).sqrt()
        heights, bounds = (part.square().mean(1, keepdim=True).sqrt() for part in (gradient[:, HEIGHTS:], gradient[:, :2]))
        found = {
            "interval": d,
            "rise": size,
            "slope": size / d,
            "bend": risen.diff().square().sum(1) / risen[:, 1:-1].square().sum(1).clamp(min=1e-12),
            "gradient": heights,
            "step / rise": self.peak * heights / size,  # of one step at the peak of the learning rate, without momentum
            "step of bounds / interval": self.peak * bounds / d,
        }
        return {name: float(f"{value.median().item():.3g}") for name, value in found.items()}
