"""The two phases of the paper, as optimizer hooks, so that the training loop does not change."""

import atexit
import functools
import gc
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from pwlu.common.checks import check_integer
from pwlu.common.text import abbreviate, counted
from pwlu.learning.freezing import remove_gradients
from pwlu.learning.optimizers import add_momentum_buffers, complete_state, state_optimizer, unwrap_optimizer
from pwlu.learning.realignment import OWN_BOUNDS, Realigned, realign_
from pwlu.learning.shared_rule import DEFAULT_RULE, SharedRule, add_penalty_, find_rule, share_gradients_, smooth_
from pwlu.learning.two_phase_checks import check_copies, check_optimizer, check_rule, warn_of_decay
from pwlu.units.module import PWLU, controlled, require_own_weights, require_units
from pwlu.units.nonuniform import NonUniformPWLU
from pwlu.units.sharding import full_values, write_parameter
from pwlu.units.statistics import InputStatistics, advance_


class TwoPhase:
    """The learning method of the paper. It hooks into the optimizer, so that the training loop does not change.

    In Phase I, the first ``realign_at`` optimizer steps, the PWLU parameters do not change; the PWLUs collect statistics of
    their inputs. After the last of these steps, :func:`pwlu.realign_` moves the bounds of every PWLU to its inputs. In Phase II
    the PWLU parameters train like all others.

    A step that GradScaler skips does not count. The state is part of the state dict of the model. To resume, load model and
    optimizer and create a TwoPhase with the same arguments, before or after loading.

    Args:
        model: a model with PWLUs. You can apply DistributedDataParallel and torch.compile before or after; apply fully_shard
            before you create the optimizer.
        optimizer: the optimizer that holds the PWLU parameters.
        realign_at: the number of optimizer steps of Phase I (T' in the paper, where it is 5 epochs).
        rule: how PWLUs learn in Phase II. ``"paper"`` or None: like all other parameters. ``"shared"``: the channels of a layer
            share their gradients, and bends are penalized; see :mod:`pwlu.learning.shared_rule`. A
            :class:`pwlu.learning.shared_rule.SharedRule` sets other strengths. Default: ``"paper"``.
        copies: models with the same structure, such as an exponential moving average. At realignment, their PWLUs get the
            parameters and statistics of the model. Default: none.
        process_group: the process group that trains the model. Default: that of the model if it is a
            DistributedDataParallel, else the default group.

    Attributes:
        report: after realignment, one :class:`pwlu.learning.realignment.Realigned` per PWLU.

    Raises:
        TypeError: if ``model`` is not a module, ``optimizer`` not an optimizer, or another rule than the paper's is to train a
            :class:`pwlu.NonUniformPWLU`.
        ValueError: if the model has no PWLUs, the optimizer does not hold their parameters, or an argument is not valid.
        RuntimeError: if a PWLU already has a TwoPhase.

    Example::

        model = torch.nn.Sequential(torch.nn.Linear(4, 8), pwlu.PWLU(channels=8))
        optimizer = torch.optim.SGD(pwlu.parameter_groups(model, lr=0.1))
        phases = pwlu.TwoPhase(model, optimizer, realign_at=2)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
        print(phases)  # TwoPhase(1 PWLU, Phase II, 2 of 2 steps of Phase I taken)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        realign_at: int,
        *,
        rule: str | SharedRule | None = DEFAULT_RULE,
        copies: nn.Module | Sequence[nn.Module] = (),
        process_group: "dist.ProcessGroup | None" = None,
    ) -> None:
        hint = "the number of optimizer steps, such as 5 * len(loader); to train without Phase I, do not use TwoPhase"
        self.realign_at = check_integer("TwoPhase", "realign_at", realign_at, hint, 1)
        self.rule = find_rule(rule)
        self.model = model
        why = "and the rule needs equally spaced knots. Write rule='paper', or convert the model with to='pwlu'"
        self._units = require_units("TwoPhase", model, {NonUniformPWLU: why} if self.rule else None)
        self._statistics = list(dict.fromkeys(unit.statistics for unit in self._units.values()))  # units may share theirs
        if any(isinstance(module, nn.DataParallel) for module in model.modules()):
            raise ValueError(
                "TwoPhase: nn.DataParallel runs copies of the model, whose statistics would be lost. "
                "Use torch.nn.parallel.DistributedDataParallel"
            )
        require_own_weights("TwoPhase", self._units, OWN_BOUNDS)
        optimizer = unwrap_optimizer("TwoPhase", optimizer)
        check_rule(self.rule, optimizer)
        check_optimizer("TwoPhase", optimizer, self._units)
        self.copies = check_copies("TwoPhase", copies, self._units)
        if process_group is None and isinstance(model, DistributedDataParallel):
            process_group = model.process_group
        self.process_group = process_group
        self.report: list[Realigned] = []
        self._momentum_ready = False  # whether add_momentum_buffers was called
        self._completing = False  # inside complete_state, whose step does not count
        self._shared: Any = None  # what the rule keeps from before a step until after it
        self._stepping = False  # inside a step; some optimizers step another optimizer inside
        self._optimizer = weakref.ref(optimizer)
        self._wrappers: list[weakref.ref[DistributedDataParallel]] | None = None  # of the model, found at the first step
        self._warned = False  # whether _warn_of_other_optimizer has warned
        self._check_no_other_controller()
        self._read_progress()
        for statistics in self._statistics:
            statistics.phase = 2 if statistics.realigned else 1
        # The hooks of the optimizer keep this object alive. It has only a weak reference to the optimizer, so that both are
        # freed together.
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            state_optimizer(optimizer).register_state_dict_pre_hook(self._before_state_dict),
        ]
        self._release_units = weakref.finalize(optimizer, _release_units, self._statistics)
        self._release_units.atexit = False
        warn_of_decay(optimizer, self._units)
        _INSTANCES.add(self)
        _watch_optimizers()

    @property
    def phase(self) -> int:
        """Return the phase, 1 or 2; 0 after :meth:`remove`."""
        return max(statistics.phase for statistics in self._statistics)

    @property
    def steps(self) -> int:
        """Return the number of steps of Phase I so far."""
        if any(statistics.loaded for statistics in self._statistics):
            self._read_progress()
        return self._steps

    def remove(self) -> None:
        """Detach from model and optimizer. PWLUs then train from the next step on, even if Phase I has not ended."""
        self._warn_of_phase_one("remove")
        self._detach()

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._release_units()

    def __repr__(self) -> str:
        phase = ("removed", "Phase I", "Phase II")[self.phase]
        units = counted(len(self._units), "PWLU")
        return f"TwoPhase({units}, {phase}, {self.steps} of {self.realign_at} steps of Phase I taken)"

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change the gradients of units. In Phase I, remove them, because momentum moves a unit even if its gradient is 0."""
        self._stepping = True
        if self._completing:
            return None
        if any(statistics.loaded for statistics in self._statistics):
            self._read_progress()
        units = self._units.values()
        if self.phase != 1:
            if not self._momentum_ready:
                add_momentum_buffers(state_optimizer(optimizer), units)
                self._momentum_ready = True
            if self.rule is None:
                return None
        else:
            self._check_even_inputs(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if closure is None or self.phase == 1:
            self._change_gradients(optimizer)
        if closure is None:
            return None

        def changed() -> Any:
            loss = closure()
            added = self._change_gradients(optimizer)
            return loss if added is None else loss + added

        if "closure" in kwargs:
            return args, {**kwargs, "closure": changed}
        return (args[0], changed, *args[2:]), kwargs

    def _change_gradients(self, optimizer: Optimizer) -> Tensor | None:
        """Remove the gradients of units in Phase I; let the rule change them in Phase II. Return what it adds to the loss."""
        units = self._units.values()
        if self.phase == 1:
            remove_gradients(units)
        elif self.rule is not None:
            # LBFGS has a metric of its own, and its line search needs the gradient of the loss that the closure returns.
            if isinstance(optimizer, torch.optim.LBFGS):
                return add_penalty_(self.rule, units)
            self._shared = share_gradients_(self.rule, units, optimizer)
        return None

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stepping = False
        shared, self._shared = self._shared, None
        if shared is not None and self.rule is not None:
            smooth_(self.rule, shared, optimizer)
        if self.phase != 1 or self._completing or self._is_dummy_step(optimizer):
            return
        # GradScaler calls a fused optimizer even for a skipped step, and sets found_inf.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and found_inf.item():
            return
        advance_(self._statistics, self.process_group)
        self._steps += 1
        if self._steps >= self.realign_at:
            self.report = realign_(self.model)
            for copy in self.copies:
                self._copy_to(copy)

    def _is_dummy_step(self, optimizer: Optimizer) -> bool:
        """Return whether torch.distributed.checkpoint made this step, with a learning rate of 0, to create optimizer state."""
        rates = [group["lr"] for group in optimizer.param_groups]
        if any(rate.device.type != "cpu" if isinstance(rate, Tensor) else False for rate in rates) or any(map(float, rates)):
            return False
        return not any(bool(statistics.pool.any()) for statistics in self._statistics)

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        """Create the optimizer state of the units before the optimizer is saved."""
        self._completing = True
        try:
            complete_state(optimizer, self._units.values())
        finally:
            self._completing = False

    @torch.no_grad()
    def _copy_to(self, copy: list[PWLU]) -> None:
        for unit, other in zip(self._units.values(), copy, strict=True):
            for parameter, value in zip(other.parameters(), unit.parameters(), strict=True):
                write_parameter(parameter, full_values(value))
            for buffer, state in zip(other.statistics.buffers(), unit.statistics.buffers(), strict=True):
                buffer.copy_(state)

    def _read_progress(self) -> None:
        """Read the number of steps from the state of the model, and check that all units agree."""
        states = {(int(s.steps), bool(s.realigned)) for s in self._statistics}
        if len(states) > 1:
            raise ValueError(
                "TwoPhase: the PWLUs of this model are not at the same point of training: (steps of Phase I, realigned) are "
                f"{sorted(states)}. Load one complete state dict, or start again: call reset_parameters() on every PWLU."
            )
        ((self._steps, realigned),) = states
        if not realigned and self._steps >= self.realign_at:
            raise ValueError(
                f"TwoPhase: realign_at={self.realign_at} has passed: the model has taken {self._steps} steps of Phase I and is "
                f"not realigned. Write a realign_at above {self._steps}, or call pwlu.realign_(model) before TwoPhase."
            )
        for statistics in self._statistics:
            statistics.loaded = False
        self._momentum_ready = False

    def _check_no_other_controller(self) -> None:
        """Check that no unit has another TwoPhase, because two would count every step twice."""
        if taken := controlled(self._units):
            raise RuntimeError(
                f"TwoPhase: {abbreviate(taken)} already has a TwoPhase. Keep that one, which works as long as its optimizer "
                "exists, or call its remove() first."
            )

    def _check_even_inputs(self, optimizer: Optimizer) -> None:
        """Raise if a rank may run out of data inside join() while others continue: it would not take part in our all-reduce."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size(self.process_group) > 1):
            return
        if self._wrappers is None:  # a model does not know its DistributedDataParallel wrappers
            mine = set(self._units.values())
            found = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
            self._wrappers = [weakref.ref(each) for each in found if not mine.isdisjoint(each.modules())]
        configs = [each._join_config for wrapper in self._wrappers if (each := wrapper()) is not None]
        uneven = any(config.enable and not config.throw_on_early_termination for config in configs)
        # An optimizer that takes part in join() steps on every rank.
        if uneven and not getattr(getattr(optimizer, "_join_config", None), "enable", False):
            raise RuntimeError(
                "TwoPhase: every step of Phase I needs all ranks, but inside join() a rank without data takes no step. "
                f"Give all ranks the same number of batches for the first {self.realign_at} steps and enter join() after "
                "them, or write join(throw_on_early_termination=True)"
            )

    def _warn_of_other_optimizer(self, optimizer: Optimizer) -> None:
        """Warn once if another optimizer steps the units in Phase I, because Phase I would then never end."""
        if self._warned or self._stepping or self._completing or self.phase != 1 or optimizer is self._optimizer():
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names = [name for name, unit in self._units.items() if id(unit._parameters.get("weight")) in held]
        # If the other optimizer wraps ours, the step is already counted and the pools are empty.
        if names and any(bool(statistics.pool.any()) for statistics in self._statistics):
            self._warned = True
            warnings.warn(
                f"TwoPhase: a step of another optimizer ({type(optimizer).__name__}) that holds {abbreviate(names)} does not "
                "count, so Phase I will not end. Call remove() on this TwoPhase and create one for the new optimizer: "
                "pwlu.TwoPhase(model, optimizer, realign_at=...)",
                stacklevel=4,
            )

    def _warn_of_phase_one(self, when: str) -> None:
        """Warn if training has started and ends in Phase I."""
        if self.phase == 1 and self.steps:
            warnings.warn(
                f"TwoPhase: {when} in Phase I, after {self.steps} of {self.realign_at} steps: the PWLUs have learned nothing "
                "yet. Train longer, or create the TwoPhase with a smaller realign_at",
                stacklevel=3,
            )


_INSTANCES: "weakref.WeakSet[TwoPhase]" = weakref.WeakSet()


@functools.cache  # register one global hook, when the first TwoPhase is created
def _watch_optimizers() -> None:
    def after_any_step(optimizer: Optimizer, *_: Any) -> None:
        for phases in list(_INSTANCES):
            phases._warn_of_other_optimizer(optimizer)

    register_optimizer_step_post_hook(after_any_step)


@atexit.register
def _warn_at_exit() -> None:
    for phases in _INSTANCES:
        phases._warn_of_phase_one("the process ends")


def _release_units(statistics: Sequence[InputStatistics]) -> None:
    for each in statistics:
        each.phase = 0
