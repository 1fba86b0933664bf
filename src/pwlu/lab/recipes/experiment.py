"""When two runs are the same experiment, and what an experiment is called."""

import hashlib
import re
from collections.abc import Hashable
from typing import Any

from pwlu.lab.recipes import catalog
from pwlu.lab.recipes.settings import Settings

_OF_PWLU = ("intervals", "init", "realign_epochs", "fix_init", "curvature")
_OF_LEARNED = ("granularity", "unit_lr")
_WITHOUT_PARAMETERS = ("relu", "swish", "silu", "gelu", "hardswish")
_OF_ACTIVATIONS = ("activation", "intervals", "init", "fix_init", "curvature", *_OF_LEARNED)  # not T': it is a length of time

_LONGEST = 160  # letters of a label: a name of a folder has at most 255, and others stand beside it


def essential(settings: Settings) -> Settings:
    """The same experiment, with every setting that plays no part in it as the recipe has it.

    A ReLU has no intervals, so a network with ReLUs that was trained with ``--intervals 8`` need not be trained again.
    """
    idle: set[str] = set()
    if settings.activation != "pwlu":
        idle |= set(_OF_PWLU)
    elif settings.fix_init:
        idle.add("realign_epochs")
    if settings.activation in _WITHOUT_PARAMETERS:
        idle |= set(_OF_LEARNED)
    recipe = catalog.settings(settings.recipe, activation=settings.activation)
    return settings.replace(**{name: getattr(recipe, name) for name in idle})


def run_key(settings: Settings) -> Hashable:
    """Equal for two runs of the same experiment with the same seed."""
    return tuple(essential(settings).identity().items())


def experiment_key(settings: Settings) -> Hashable:
    """Equal for two runs of the same experiment, whatever their seeds."""
    return run_key(settings.replace(seed=0))


def differences(settings: Settings) -> dict[str, Any]:
    """What differs from the recipe, other than activation and seed."""
    recipe = catalog.settings(settings.recipe, activation=settings.activation).identity()
    named = essential(settings).identity().items()
    return {name: value for name, value in named if value != recipe[name] and name not in ("recipe", "activation", "seed")}


def label(settings: Settings) -> str:
    """A name for the experiment that can be a folder's: ``relu``, ``pwlu-intervals-8``, ``pwlu-fix-init-10-layer``."""
    return _fitting(spelled({"activation": settings.activation} | differences(settings)))


def run_name(settings: Settings) -> str:
    """Return the name of a run: ``digits-relu-seed0``, ``cifar100-resnet18-pwlu-epochs-60-seed2``."""
    return f"{settings.recipe.replace('/', '-')}-{label(settings)}-seed{settings.seed}"


def method(settings: Settings) -> str:
    """The label of what concerns activations alone, as if all else were as the recipe has it."""
    named = {"activation": settings.activation} | differences(settings)
    return spelled({name: value for name, value in named.items() if name in _OF_ACTIVATIONS})


def spelled(changes: dict[str, Any]) -> str:
    """Changes of settings in the characters that any file system takes: ``epochs-60-ema-0.999``."""
    parts = [f"{name}-{short(value)}" for name, value in changes.items() if name not in ("activation", "granularity")]
    parts = [changes["activation"], *parts] if "activation" in changes else parts
    parts += [changes["granularity"]] if "granularity" in changes else []
    return re.sub(r"[^\w.+-]", "_", "-".join(parts).replace("_", "-"))


def _fitting(name: str) -> str:
    """Return the same, or its beginning and a check sum of it, where it is too long for the name of a folder."""
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def short(value: Any) -> str:
    """A value as one would write it: 3 for 3.0."""
    return str(value).removesuffix(".0")
