"""Prepared comparisons: the paper's comparison and ablations, and our own, as data."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pwlu import baselines
from pwlu.common.text import nearest
from pwlu.lab.recipes import catalog
from pwlu.lab.recipes.experiment import slug
from pwlu.lab.recipes.settings import Settings, UserError, flag

BASELINE = "ReLU"
TITLES = {
    "relu": BASELINE,
    "prelu": "PReLU",
    "swish": "Swish",
    "silu": "SiLU",
    "gelu": "GELU",
    "mish": "Mish",
    "hardswish": "Hard-Swish",
    "apl": "APL",
    "apl5": "APL, S = 5",
    "pau": "PAU",
    "frelu": "FReLU",
    "aconc": "ACON-C",
    "metaacon": "Meta-ACON",
    "dyrelu": "DY-ReLU-B",
    "se_relu": "ReLU with squeeze-and-excitation",
    "pwlu": "PWLU",
    "dynamic_pwlu": "Dynamic PWLU",
    "nonuniform_pwlu": "Non-uniform PWLU",
}
SEVEN = ("relu", "prelu", "swish", "apl", "pau", "frelu", "pwlu")

SMOOTH = 0.001  # the --curvature of "PWLU, smooth", chosen on held-out images of CIFAR-100
FAST = 10.0  # the --unit-lr of "PWLU, fast", chosen on held-out images of nuclei

Rows = dict[str, dict[str, Any]]  # title of a row -> changes of settings


def _activations(names: Iterable[str]) -> Rows:
    return {TITLES.get(name, name): {"activation": name} for name in names}


_BOUNDS: Rows = {
    f"{title}, {granularity}-wise": {"activation": "pwlu", "granularity": granularity} | change
    for granularity in ("layer", "channel")
    for title, change in (
        *((f"fix-init-{x}", {"fix_init": float(x)}) for x in (3, 6, 10)),
        ("stat-realign", {}),
    )
}
_SMOOTH: Rows = {"PWLU, smooth": {"activation": "pwlu", "curvature": SMOOTH}}
_SHARED: Rows = {"PWLU, rule shared": {"activation": "pwlu", "rule": "shared"}}
PRESETS: dict[str, Rows] = {
    "activations": _activations(SEVEN),
    "bounds": _activations(["relu"]) | _BOUNDS,
    "intervals": _activations(["relu"]) | {f"N = {n}": {"activation": "pwlu", "intervals": n} for n in (4, 8, 12, 16, 20)},
    "smoothing": _activations(["relu", "swish", "pwlu"])
    | _SMOOTH
    | {"PWLU, smooth, from Swish": {"activation": "pwlu", "curvature": SMOOTH, "init": "swish"}}
    | _SHARED,
    "improvements": _activations(SEVEN) | _SMOOTH | _SHARED,
    "dynamic": _activations(["relu", "gelu", "mish", "se_relu", "dyrelu", "aconc", "metaacon", "pwlu", "dynamic_pwlu"]),
    "knots": _activations(["relu"])
    | {f"PWLU, N = {n}": {"activation": "pwlu", "intervals": n} for n in (4, 16)}
    | {"Non-uniform PWLU, N = 4": {"activation": "nonuniform_pwlu", "intervals": 4}},
    "detection": _activations(["relu", "swish", "frelu", "pwlu"])
    | {"PWLU, fast, from Swish": {"activation": "pwlu", "unit_lr": FAST, "init": "swish"}},
}


@dataclass(frozen=True)
class Comparison:
    """The rows of one table.

    Attributes:
        recipe: the name of the recipe.
        name: the name of the preset.
        changes: changes to the recipe that all rows share.
        experiments: the settings of each row by title; the seed does not matter.
    """

    recipe: str
    name: str
    changes: dict[str, Any]
    experiments: dict[str, Settings]

    @property
    def stem(self) -> str:
        """Return the name of the table's files, without suffix."""
        changes = self.differences()
        return f"{self.name}-{slug(changes)}" if changes else self.name

    def differences(self) -> dict[str, Any]:
        """Return the changes that differ from the recipe, without machine settings."""
        recipe = catalog.settings(self.recipe).identity()
        return {name: value for name, value in self.changes.items() if name in recipe and value != recipe[name]}


def comparison(recipe: str, text: str, changes: dict[str, Any]) -> Comparison:
    """Return a comparison on one recipe, with changes of settings for all rows.

    `text`: the name of a preset, or names of activations separated by commas.
    """
    catalog.find(recipe)
    name, compared = _find(text)
    varied = {setting for change in compared.values() for setting in change}
    for setting in changes:
        if setting in varied:
            raise UserError(f"the comparison {name!r} varies {flag(setting)}: leave it out")
    experiments = {title: catalog.settings(recipe, **changes | change) for title, change in compared.items()}
    return Comparison(recipe, name, changes, experiments)


def _find(text: str) -> tuple[str, Rows]:
    if text in PRESETS:
        return text, PRESETS[text]
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise UserError(f"expected names of activations separated by commas, not {text!r}. Write --acts {','.join(SEVEN)}")
    for name in names:
        if name not in baselines.NAMES:
            raise UserError(_unknown(name, alone=len(names) == 1))
    return ("activations" if set(names) == set(SEVEN) else "-".join(names)), _activations(names)


def _unknown(name: str, alone: bool) -> str:
    known = [*baselines.NAMES, *(PRESETS if alone else ())]
    near = nearest(name, known)
    return (
        f"there is no activation{' and no preset' if alone else ''} {name!r}."
        + (f" Did you mean {near[0]}?" if near else "")
        + f" Activations are {', '.join(baselines.NAMES)}"
        + (f"; presets are {', '.join(PRESETS)}" if alone else "")
    )
