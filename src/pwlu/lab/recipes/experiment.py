"""Decide whether two runs are the same experiment, and name experiments."""

import dataclasses
import hashlib
import re
from collections.abc import Hashable
from typing import Any

from pwlu.lab.recipes import catalog
from pwlu.lab.recipes.settings import UNITS, Settings

_UNIT_SETTINGS = {field.name for field in dataclasses.fields(Settings) if field.metadata.get("unit")}
_LEARNED_SETTINGS = {"granularity", "unit_lr"}  # those of all activations that learn
_WITHOUT_PARAMETERS = ("relu", "swish", "silu", "gelu", "mish", "hardswish")

_MAX_LABEL = 160  # characters; folder names have at most 255, and include the recipe and the seed as well


def reset_unused(settings: Settings) -> Settings:
    """Return the settings with the recipe's value for every setting that has no effect.

    For example, a ReLU has no intervals: a run of ReLU with ``--intervals 8`` is the same experiment as one without.
    """
    unused: set[str] = set()
    if settings.activation not in UNITS:
        unused |= _UNIT_SETTINGS - _LEARNED_SETTINGS
    elif settings.fix_init:
        unused.add("realign_epochs")
    if settings.activation in _WITHOUT_PARAMETERS:
        unused |= _LEARNED_SETTINGS
    recipe = catalog.settings(settings.recipe, activation=settings.activation)
    return settings.replace(**{name: getattr(recipe, name) for name in unused})


def run_key(settings: Settings) -> Hashable:
    """Return a key that is equal for two runs of the same experiment with the same seed."""
    return tuple(reset_unused(settings).identity().items())


def experiment_key(settings: Settings) -> Hashable:
    """Return a key that is equal for two runs of the same experiment, whatever their seeds."""
    return run_key(settings.replace(seed=0))


def differences(settings: Settings) -> dict[str, Any]:
    """Return the settings that differ from the recipe, without activation and seed."""
    recipe = catalog.settings(settings.recipe, activation=settings.activation).identity()
    named = reset_unused(settings).identity().items()
    return {name: value for name, value in named if value != recipe[name] and name not in ("recipe", "activation", "seed")}


def label(settings: Settings) -> str:
    """Return a name of the experiment for folders: ``relu``, ``pwlu-intervals-8``, ``pwlu-fix-init-10-layer``."""
    return _shorten(slug({"activation": settings.activation} | differences(settings)))


def run_name(settings: Settings) -> str:
    """Return the name of a run: ``digits-relu-seed0``, ``cifar100-resnet18-pwlu-epochs-60-seed2``."""
    return f"{settings.recipe.replace('/', '-')}-{label(settings)}-seed{settings.seed}"


def method(settings: Settings) -> str:
    """Return a name of the activation and its settings, without the other settings of the run."""
    chosen = _UNIT_SETTINGS - {"realign_epochs"}  # this depends on the length of training
    changes = {name: value for name, value in differences(settings).items() if name in chosen}
    return slug({"activation": settings.activation} | changes)


def slug(changes: dict[str, Any]) -> str:
    """Return changes of settings in characters that every file system allows: ``epochs-60-ema-0.999``."""
    parts = [f"{name}-{format_value(value)}" for name, value in changes.items() if name not in ("activation", "granularity")]
    parts = [changes["activation"], *parts] if "activation" in changes else parts
    parts += [changes["granularity"]] if "granularity" in changes else []
    return re.sub(r"[^\w.+-]", "_", "-".join(parts).replace("_", "-"))


def _shorten(name: str) -> str:
    """Replace the end of a name by a checksum if the name is too long for a folder."""
    return name if len(name) <= _MAX_LABEL else f"{name[: _MAX_LABEL - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def format_value(value: Any) -> str:
    """Return a value as a user would type it: 3 for 3.0."""
    return str(value).removesuffix(".0")
