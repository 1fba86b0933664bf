"""TwoPhase as a callback of Hugging Face's Trainer. A callback is needed because the Trainer creates its optimizer itself.

    pwlu.convert_(model, sample)
    trainer = Trainer(model, args, callbacks=[TwoPhaseCallback(realign_after_epochs=5)], ...)
    own_group_(trainer)  # no weight decay for PWLUs
    trainer.train()

If you pass the Trainer an optimizer (``optimizers=``) made from :func:`pwlu.parameter_groups`, the callback is enough.

Saved models keep their PWLUs: ``config.json`` records the conversion, and :func:`from_pretrained` repeats it before it loads
the weights. Once this module is imported, ``from_pretrained`` of transformers' own classes does the same.

    save_pretrained(model, "folder")
    model = from_pretrained(ViTForImageClassification, "folder")  # or ViTForImageClassification.from_pretrained("folder")
"""

import contextlib
import math
import os
import warnings
from typing import Any

from torch.optim import Optimizer

from pwlu.common.checks import check_rate
from pwlu.common.text import install
from pwlu.learning.shared_rule import DEFAULT_RULE, SharedRule, find_rule
from pwlu.learning.two_phase import TwoPhase
from pwlu.units.module import units_of
from pwlu.units.squeeze import function_parameters

try:
    from transformers import AutoConfig, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(f"pwlu.integrations.hugging_face needs the package transformers: {install('transformers')}") from error

from pwlu.integrations.hugging_face_loading import has_conversion, record_conversion


def save_pretrained(model: Any, folder: str | os.PathLike[str], **options: Any) -> None:
    """Call the model's ``save_pretrained``, and record the conversion in ``config.json`` for :func:`from_pretrained`.

    A Trainer with a :class:`TwoPhaseCallback` records it at every checkpoint.

    Args:
        model: a converted transformers model.
        folder: where to save it.
        options: options of the model's ``save_pretrained``.

    Raises:
        ValueError: if the model has no PWLU, or has fused units or other activations in their place.
    """
    record_conversion(model)
    model.save_pretrained(folder, **options)


def from_pretrained(cls: Any, name: str | os.PathLike[str], **options: Any) -> Any:
    """Return ``cls.from_pretrained(name)``, or raise an error if the model was saved without its conversion.

    Once this module is imported, ``cls.from_pretrained`` itself converts the model before it loads the weights. The input
    statistics of an unfinished optimizer step are lost.

    Args:
        cls: a model class of transformers, or one of its Auto classes.
        name: a folder that :func:`save_pretrained` wrote, or a checkpoint of a Trainer with a :class:`TwoPhaseCallback`.
        options: options of ``cls.from_pretrained``.

    Returns:
        The model.

    Raises:
        ValueError: if ``config.json`` has no record of a conversion, or the conversion does not fit the model.
    """
    shared = ("trust_remote_code", "revision", "token", "cache_dir", "local_files_only", "subfolder")
    config = options.pop("config", None)
    config = config or AutoConfig.from_pretrained(name, **{key: options[key] for key in shared if key in options})
    if not has_conversion(config):
        raise ValueError(
            f"from_pretrained: {name} has no record of a conversion. Save the model with "
            "pwlu.integrations.hugging_face.save_pretrained(model, folder), or train it with a TwoPhaseCallback"
        )
    return cls.from_pretrained(name, config=config, **options)


class TwoPhaseCallback(TrainerCallback):
    """:class:`pwlu.TwoPhase` as a callback of the Trainer, from the beginning to the end of training.

    A checkpoint of the Trainer holds everything that ``resume_from_checkpoint`` needs. A second ``train()`` does not realign
    PWLUs again that were realigned before.

    Pass either ``realign_at`` or ``realign_after_epochs``.

    Args:
        realign_at: the length T' of Phase I in optimizer steps.
        realign_after_epochs: the length T' of Phase I in epochs; the training data must have a length. The paper uses 5.
        rule: the learning rule of Phase II, as for :class:`pwlu.TwoPhase`.

    Attributes:
        phases: the :class:`pwlu.TwoPhase` of the current or last training; None before the first.
    """

    def __init__(
        self,
        realign_at: int | None = None,
        realign_after_epochs: float | None = None,
        *,
        rule: str | SharedRule | None = DEFAULT_RULE,
    ) -> None:
        if (realign_at is None) == (realign_after_epochs is None):
            raise ValueError(
                f"TwoPhaseCallback: pass either realign_at (steps) or realign_after_epochs, not realign_at={realign_at!r} and "
                f"realign_after_epochs={realign_after_epochs!r}. The paper's choice: realign_after_epochs=5"
            )
        if realign_after_epochs is not None and not 0 < realign_after_epochs < math.inf:
            raise ValueError(
                f"TwoPhaseCallback: realign_after_epochs must be a positive number such as 5, not {realign_after_epochs!r}. "
                "To train without Phase I, leave the callback out."
            )
        self.rule = find_rule(rule)
        self.realign_at = realign_at
        self.realign_after_epochs = realign_after_epochs
        self.phases: TwoPhase | None = None
        self._phase_at_end = 0

    @property
    def phase(self) -> int:
        """Return the phase of the current or last training, 1 or 2; 0 before the first."""
        return self._phase_at_end or (self.phases.phase if self.phases else 0)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start or continue the phase of the model. When the Trainer resumes, it has already loaded its checkpoint."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if self.phases is not None:
            self.phases._detach()  # an interrupted training has left it attached
        self._phase_at_end = 0
        with contextlib.suppress(ValueError):  # the model has other activations than PWLUs: from_pretrained will report it
            record_conversion(model)
        steps = self._steps(args, kwargs.get("train_dataloader"))
        self.phases = phases = TwoPhase(model, optimizer, steps, rule=self.rule)
        if state.global_step and phases.phase == 1 and not phases.steps:
            raise RuntimeError(
                f"TwoPhaseCallback: the Trainer resumes at step {state.global_step}, but the model's PWLUs have their initial "
                "values. Either the checkpoint does not contain them, or the Trainer did not find them. transformers saves "
                "some models, such as ViT, under names that it does not find when it resumes. Before the training that "
                "saves, write model.save_pretrained = functools.partial(model.save_pretrained, save_original_format=False)"
            )
        last = phases.steps + state.max_steps - state.global_step
        if phases.phase == 1 and last <= phases.realign_at:
            warnings.warn(
                f"TwoPhaseCallback: Phase I takes {phases.realign_at} steps, but this training ends after {last} of them, so "
                "no PWLU will learn. Train longer, or realign earlier.",
                stacklevel=2,
            )

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Detach the phases from model and optimizer, so that another training can start."""
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
                f"TwoPhaseCallback: realign_after_epochs={self.realign_after_epochs} needs training data with a length, but "
                f"{type(getattr(loader, 'dataset', loader)).__name__} has none. Pass a number of steps: realign_at=1000"
            ) from None
        # If the last micro-batches of an epoch do not fill an accumulation, the Trainer still takes a step with them.
        return max(1, round(self.realign_after_epochs * math.ceil(batches / args.gradient_accumulation_steps)))


def own_group_(trainer: Trainer, lr_factor: float = 1.0) -> Optimizer:
    """Give the PWLU parameters their own group in the Trainer's optimizer, with ``lr * lr_factor`` and no weight decay.

    By default, the Trainer's ``weight_decay`` would pull heights and bounds towards zero: it exempts only biases and norms.
    This function creates the optimizer from the Trainer's arguments. Call it before ``train()``.

    Args:
        trainer: the Trainer.
        lr_factor: factor of the learning rate of PWLUs. Default: 1.0.

    Returns:
        The optimizer.

    Raises:
        ValueError: if ``lr_factor`` is negative, the Trainer has ``model_init``, or its optimizer already has a scheduler.
    """
    check_rate("own_group_", "lr_factor", lr_factor)
    if trainer.model_init is not None:
        raise ValueError(
            "own_group_: with model_init, train() creates a new model and a new optimizer. Pass model=... to the Trainer "
            "instead, or override its create_optimizer()."
        )
    optimizer: Optimizer = trainer.create_optimizer()
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ValueError(
            "own_group_: the optimizer already has a scheduler, which would not know the new group. Call own_group_ right "
            "after you create the Trainer. For your own optimizer, use pwlu.parameter_groups(model, lr=...) instead."
        )
    learned = function_parameters(units_of(trainer.model).values())
    for group in list(optimizer.param_groups):
        if own := [p for p in group["params"] if id(p) in learned]:
            group["params"] = [p for p in group["params"] if id(p) not in learned]
            optimizer.add_param_group({**group, "params": own, "lr": group["lr"] * lr_factor, "weight_decay": 0.0})
    return optimizer
