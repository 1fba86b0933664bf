"""The two phases in Hugging Face's Trainer, which makes its optimizer itself: a callback meets it when training begins.

    pwlu.convert_(model, sample)
    trainer = Trainer(model, args, callbacks=[TwoPhaseCallback(realign_after_epochs=5)], ...)
    own_group_(trainer)  # no weight decay for PWLUs
    trainer.train()

Where the Trainer is given an optimizer (``optimizers=``) made of :func:`pwlu.parameter_groups`, the callback alone is enough.

Saved models keep their PWLUs: the conversion is in ``config.json``, and ``from_pretrained`` repeats it before it loads weights.
That of transformers does so too, once this module is imported.

    save_pretrained(model, "folder")
    model = from_pretrained(ViTForImageClassification, "folder")  # or ViTForImageClassification.from_pretrained("folder")
"""

import contextlib
import math
import os
import warnings
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pwlu.learning.two_phase import TwoPhase
from pwlu.module import units_of
from pwlu.text import install

try:
    from transformers import AutoConfig, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        f"pwlu.integrations.hugging_face needs the package transformers, which could not be imported: {install('transformers')}"
    ) from error

from pwlu.integrations.hugging_face_loading import record, recorded


def save_pretrained(model: Any, folder: str | os.PathLike[str], **options: Any) -> None:
    """Call the model's ``save_pretrained``, with the conversion in ``config.json``: :func:`from_pretrained` needs it.

    A Trainer with a :class:`TwoPhaseCallback` does the same at every checkpoint.
    """
    _record(model)
    model.save_pretrained(folder, **options)


def from_pretrained(cls: Any, name: str | os.PathLike[str], **options: Any) -> Any:
    """Return ``cls.from_pretrained(name)``, or raise an error if the model was saved without its conversion.

    Once this module is imported, ``cls.from_pretrained`` itself converts the model before it loads the weights. What the PWLUs
    saw since the last step of the optimizer is not kept.

    Args:
        cls: a model class of transformers, or one of its Auto classes.
        name: what :func:`save_pretrained` wrote, or a checkpoint of a Trainer with a :class:`TwoPhaseCallback`.
        options: of ``cls.from_pretrained``.
    """
    shared = ("trust_remote_code", "revision", "token", "cache_dir", "local_files_only", "subfolder")
    config = options.pop("config", None)
    config = config or AutoConfig.from_pretrained(name, **{key: options[key] for key in shared if key in options})
    if not recorded(config):
        raise ValueError(
            f"from_pretrained: {name} does not say how its model was converted. Save it by "
            "pwlu.integrations.hugging_face.save_pretrained(model, folder), or train it with a TwoPhaseCallback"
        )
    return cls.from_pretrained(name, config=config, **options)


def _record(model: Any) -> None:
    if hasattr(model, "config"):  # the Trainer takes models without one, too
        record(model)


class TwoPhaseCallback(TrainerCallback):
    """:class:`pwlu.TwoPhase` as a callback of the Trainer, from the beginning of its training to the end.

    Args:
        realign_at: T' in steps of the optimizer; or
        realign_after_epochs: T' in passes over the training data, which must have a length; the paper takes 5.

    A checkpoint of the Trainer holds all that is needed to go on with ``resume_from_checkpoint``. A second ``train()`` goes on
    with the PWLUs as they are: those that were realigned are not realigned again.

    ``phases`` is the :class:`pwlu.TwoPhase` of the training that runs or ran last, None before the first.
    """

    def __init__(self, realign_at: int | None = None, realign_after_epochs: float | None = None) -> None:
        if (realign_at is None) == (realign_after_epochs is None):
            raise ValueError(
                f"TwoPhaseCallback: give either realign_at (steps) or realign_after_epochs, not realign_at={realign_at!r} and "
                f"realign_after_epochs={realign_after_epochs!r}. The paper's choice: realign_after_epochs=5"
            )
        if realign_after_epochs is not None and not 0 < realign_after_epochs < math.inf:
            raise ValueError(
                f"TwoPhaseCallback: realign_after_epochs must be a number above 0, such as 5, not {realign_after_epochs!r}. "
                "To train without Phase I, leave the callback out."
            )
        self.realign_at = realign_at
        self.realign_after_epochs = realign_after_epochs
        self.phases: TwoPhase | None = None
        self._phase_at_end = 0

    @property
    def phase(self) -> int:
        """1 or 2: where the training is, or was when it ended; 0 before the first."""
        return self._phase_at_end or (self.phases.phase if self.phases else 0)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Begin, or go on with, the phase the model is in: if the Trainer resumes, it has loaded its checkpoint by now."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if self.phases is not None:
            self.phases._detach()  # of a training that was broken off
        self._phase_at_end = 0
        with contextlib.suppress(ValueError):  # other activations beside PWLUs: from_pretrained will say that it is not known
            _record(model)
        self.phases = phases = TwoPhase(model, optimizer, self._steps(args, kwargs.get("train_dataloader")))
        if state.global_step and phases.phase == 1 and not phases.steps:
            raise RuntimeError(
                f"TwoPhaseCallback: the Trainer resumes at step {state.global_step}, but the model's PWLUs are at the start: "
                "they were not in the checkpoint, or not found there. transformers saves some models, ViT among them, under "
                "names by which it does not find the weights again when it resumes. Before the training that saves, write "
                "model.save_pretrained = functools.partial(model.save_pretrained, save_original_format=False)"
            )
        last = phases.steps + state.max_steps - state.global_step
        if phases.phase == 1 and last <= phases.realign_at:
            warnings.warn(
                f"TwoPhaseCallback: Phase I takes {phases.realign_at} steps, and this training ends after {last} of them: no "
                "PWLU will learn. Train longer, or realign earlier.",
                stacklevel=2,
            )

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Let go of model and optimizer: another training may begin."""
        if self.phases is not None:
            self._phase_at_end = self.phases.phase
            self.phases._detach()

    def _steps(self, args: TrainingArguments, loader: Any) -> int:
        if self.realign_after_epochs is None:
            assert self.realign_at is not None
            return self.realign_at
        try:
            batches = len(loader)
        except TypeError:
            raise ValueError(
                f"TwoPhaseCallback: realign_after_epochs={self.realign_after_epochs} needs training data with a length, and "
                f"{type(getattr(loader, 'dataset', loader)).__name__} has none. Give the number of steps: realign_at=1000"
            ) from None
        # What is left over at the end of an epoch makes one step more.
        return max(1, round(self.realign_after_epochs * math.ceil(batches / args.gradient_accumulation_steps)))


def own_group_(trainer: Trainer, lr_factor: float = 1.0) -> Optimizer:
    """Give the PWLU parameters a group of their own in the Trainer's optimizer: ``lr * lr_factor`` and no weight decay.

    The Trainer spares biases and norms from its ``weight_decay``, by their names, and would pull heights and bounds to zero.
    Its optimizer is made here, otherwise as its arguments have it, and returned. Call this before ``train()``.
    """
    if trainer.model_init is not None:
        raise ValueError(
            "own_group_: with model_init, train() makes a new model and a new optimizer. Give the Trainer model=... instead, "
            "or override its create_optimizer()."
        )
    optimizer: Optimizer = trainer.create_optimizer()
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ValueError(
            "own_group_: the optimizer has a scheduler already, which would not know the new group. Call own_group_ right "
            "after the Trainer is made; for an optimizer of your own, use pwlu.parameter_groups(model, lr=...) instead."
        )
    learned = _parameters_of_units(trainer.model)
    for group in list(optimizer.param_groups):
        if own := [p for p in group["params"] if id(p) in learned]:
            group["params"] = [p for p in group["params"] if id(p) not in learned]
            optimizer.add_param_group({**group, "params": own, "lr": group["lr"] * lr_factor, "weight_decay": 0.0})
    return optimizer


def _parameters_of_units(model: nn.Module) -> set[int]:
    return {id(p) for unit in units_of(model).values() for p in unit.parameters()}
