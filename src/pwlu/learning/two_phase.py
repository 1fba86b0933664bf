"""The paper's two phases, as hooks of the optimizer: any training loop stays as it is."""

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

from pwlu.learning.freezing import take_gradients
from pwlu.learning.optimizers import complete_state, join, keeper, unwrapped
from pwlu.learning.realignment import Realigned, realign_
from pwlu.learning.two_phase_checks import check_copy, check_optimizer, check_steps, check_weights, warn_of_decay
from pwlu.module import PWLU, full_values, require_units, write_weight
from pwlu.statistics import InputStatistics, advance_
from pwlu.text import abbreviate, counted


class TwoPhase:
    """The learning method of the paper, without a line in the training loop.

    Phase I, the first `realign_at` steps of the optimizer: PWLU parameters do not change at all, statistics of their inputs are
    kept. When the last of these steps ends, :func:`realign_` puts every PWLU where its inputs are. Phase II: ordinary training.

    Args:
        model: with PWLUs; DistributedDataParallel and torch.compile may come before or after, fully_shard before the optimizer.
        optimizer: the one that holds the PWLU parameters.
        realign_at: T', in steps of the optimizer; the paper takes 5 epochs.
        copies: models of the same structure whose PWLUs are realigned too, by copying: an exponential moving average.
        process_group: of the processes that train the model together; default: the model's own if it is a
            DistributedDataParallel, else all of them.

    A step counts when the optimizer really stepped. All that has to survive is in the model's state dict: to resume, load model
    and optimizer, and make a TwoPhase as at the beginning, before or after loading.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        realign_at: int,
        *,
        copies: nn.Module | Sequence[nn.Module] = (),
        process_group: "dist.ProcessGroup | None" = None,
    ) -> None:
        self.realign_at = check_steps(realign_at)
        self.model = model
        self._units = require_units("TwoPhase", model)
        self._statistics = [unit.statistics for unit in self._units.values()]
        if any(isinstance(module, nn.DataParallel) for module in model.modules()):
            raise ValueError(
                "TwoPhase: nn.DataParallel runs copies of the model, whose statistics would be lost. "
                "Use DistributedDataParallel"
            )
        check_weights(self._units)
        optimizer = unwrapped(optimizer)
        check_optimizer(optimizer, self._units)
        self.copies = [check_copy(copy, self._units) for copy in ([copies] if isinstance(copies, nn.Module) else copies)]
        if process_group is None and isinstance(model, DistributedDataParallel):
            process_group = model.process_group
        self.process_group = process_group
        self.report: list[Realigned] = []
        self._joined = False  # whether the optimizer is ready for units that learn
        self._completing = False  # whether the optimizer takes a step that is none
        self._stepping = False  # whether it takes any: some have another optimizer inside
        self._optimizer = weakref.ref(optimizer)
        self._wrappers: list[weakref.ref[DistributedDataParallel]] | None = None  # of the model, found at the first step
        self._warned = False  # that another optimizer has taken over
        self._check_alone()
        self._look_again()
        for statistics in self._statistics:
            statistics.phase = 2 if statistics.realigned else 1
        # The optimizer holds the controller, not the other way round: it lives as long as the optimizer does, and lets go then.
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            keeper(optimizer).register_state_dict_pre_hook(self._complete),
        ]
        self._let_go = weakref.finalize(optimizer, _let_go, self._statistics)
        self._let_go.atexit = False
        warn_of_decay(optimizer, self._units)
        _LIVING.add(self)
        _watch_optimizers()

    @property
    def phase(self) -> int:
        """1 or 2; 0 when it has let go of the model."""
        return max(statistics.phase for statistics in self._statistics)

    @property
    def steps(self) -> int:
        """Steps of Phase I taken so far."""
        if any(statistics.loaded for statistics in self._statistics):
            self._look_again()
        return self._steps

    def remove(self) -> None:
        """Let go of model and optimizer. PWLUs then train from the next step on, wherever they are."""
        self._warn_of_phase_one("remove")
        self._detach()

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._let_go()

    def __repr__(self) -> str:
        phase = ("removed", "Phase I", "Phase II")[self.phase]
        units = counted(len(self._units), "PWLU")
        return f"TwoPhase({units}, {phase}, {self.steps} of {self.realign_at} steps of Phase I taken)"

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take the gradients of units away in Phase I: one of zero would still move a parameter by momentum or decay."""
        self._stepping = True
        if self._completing:
            return None
        if any(statistics.loaded for statistics in self._statistics):
            self._look_again()
        units = self._units.values()
        if self.phase != 1:
            if not self._joined:
                join(keeper(optimizer), units)
                self._joined = True
            return None
        self._check_even(optimizer)
        take_gradients(units)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if closure is None:
            return None

        def still() -> Any:
            loss = closure()
            take_gradients(units)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": still}
        return (args[0], still, *args[2:]), kwargs

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stepping = False
        if self.phase != 1 or self._completing or self._is_dummy(optimizer):
            return
        # A fused optimizer is called by GradScaler also when it is to do nothing; the others are not called then.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and found_inf.item():
            return
        advance_(self._statistics, self.process_group)
        self._steps += 1
        if self._steps >= self.realign_at:
            self.report = realign_(self.model)
            for copy in self.copies:
                self._copy_to(copy)

    def _is_dummy(self, optimizer: Optimizer) -> bool:
        """Return whether a step trains nothing: torch.distributed.checkpoint takes one to make an optimizer's state."""
        rates = [group["lr"] for group in optimizer.param_groups]
        if any(rate.device.type != "cpu" if isinstance(rate, Tensor) else False for rate in rates) or any(map(float, rates)):
            return False
        return not any(bool(statistics.pool.any()) for statistics in self._statistics)

    def _complete(self, optimizer: Optimizer) -> None:
        """Give the optimizer a state of units before it is saved."""
        self._completing = True
        try:
            complete_state(optimizer, self._units.values())
        finally:
            self._completing = False

    @torch.no_grad()
    def _copy_to(self, copy: list[PWLU]) -> None:
        for unit, other in zip(self._units.values(), copy, strict=True):
            write_weight(other, full_values(unit.weight))
            for buffer, state in zip(other.statistics.buffers(), unit.statistics.buffers(), strict=True):
                buffer.copy_(state)

    def _look_again(self) -> None:
        """Steps and phase as the model's state has them."""
        states = {(int(s.steps), bool(s.realigned)) for s in self._statistics}
        if len(states) > 1:
            raise ValueError(
                "TwoPhase: the PWLUs of this model have not come equally far: (steps of Phase I, realigned) are "
                f"{sorted(states)}. Load one complete state dict, or begin anew: call reset_parameters() on every PWLU."
            )
        ((self._steps, realigned),) = states
        if not realigned and self._steps >= self.realign_at:
            raise ValueError(
                f"TwoPhase: the model has taken {self._steps} steps of Phase I and was not realigned, so "
                f"realign_at={self.realign_at} has passed. Write a realign_at above {self._steps}, or realign now: "
                "pwlu.realign_(model), before TwoPhase."
            )
        for statistics in self._statistics:
            statistics.loaded = False
        self._joined = False

    def _check_alone(self) -> None:
        """Two controllers would count every step twice. One whose optimizer is gone, but not yet collected, does not matter."""
        if any(unit.phase for unit in self._units.values()):
            gc.collect()
        if taken := [name for name, unit in self._units.items() if unit.phase]:
            raise RuntimeError(
                f"TwoPhase: {abbreviate(taken)} has a TwoPhase already. Keep that one, which works as long as its optimizer "
                "does, or call its remove() first."
            )

    def _check_even(self, optimizer: Optimizer) -> None:
        """Refuse processes that may run out of data while others go on: they would not take part in our collective call."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size(self.process_group) > 1):
            return
        if self._wrappers is None:  # the model does not know what it was wrapped in
            mine = set(self._units.values())
            found = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
            self._wrappers = [weakref.ref(each) for each in found if not mine.isdisjoint(each.modules())]
        configs = [each._join_config for wrapper in self._wrappers if (each := wrapper()) is not None]
        uneven = any(config.enable and not config.throw_on_early_termination for config in configs)
        if uneven and not getattr(getattr(optimizer, "_join_config", None), "enable", False):  # else it steps in every process
            raise RuntimeError(
                "TwoPhase: inside join() a process without data takes no step, but every step of Phase I needs all processes. "
                f"Give all of them the same number of batches for the first {self.realign_at} steps, and write join() after "
                "these, or write join(throw_on_early_termination=True)"
            )

    def _notice(self, optimizer: Optimizer) -> None:
        """Warn once if another optimizer trains the units in Phase I, which then would not end."""
        if self._warned or self._stepping or self._completing or self.phase != 1 or optimizer is self._optimizer():
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names = [name for name, unit in self._units.items() if id(unit._parameters.get("weight")) in held]
        # One that wraps ours has let it count the step by now, which emptied the pools.
        if names and any(bool(statistics.pool.any()) for statistics in self._statistics):
            self._warned = True
            warnings.warn(
                f"TwoPhase: a step of another optimizer ({type(optimizer).__name__}) that holds {abbreviate(names)} does not "
                "count, so Phase I will not end. Call remove() of this TwoPhase, and make one for the new optimizer: "
                "pwlu.TwoPhase(model, optimizer, realign_at=...)",
                stacklevel=4,
            )

    def _warn_of_phase_one(self, when: str) -> None:
        """Warn if training was begun and ends before the units have learned anything."""
        if self.phase == 1 and self.steps:
            warnings.warn(
                f"TwoPhase: {when} in Phase I, after {self.steps} of {self.realign_at} steps: the PWLUs have learned nothing "
                "yet. Train longer, or make TwoPhase with a smaller realign_at",
                stacklevel=3,
            )


_LIVING: "weakref.WeakSet[TwoPhase]" = weakref.WeakSet()


@functools.cache  # one for all, from the first TwoPhase on
def _watch_optimizers() -> None:
    def notice(optimizer: Optimizer, *_: Any) -> None:
        for phases in list(_LIVING):
            phases._notice(optimizer)

    register_optimizer_step_post_hook(notice)


@atexit.register
def _warn_at_exit() -> None:
    for phases in _LIVING:
        phases._warn_of_phase_one("the process ends")


def _let_go(statistics: Sequence[InputStatistics]) -> None:
    for each in statistics:
        each.phase = 0
