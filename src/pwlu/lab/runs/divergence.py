"""Decide whether a training diverged, and say when it did and what to try.

The command line, report.md and the HTML page use the same words.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from pwlu.lab.recipes.catalog import RECIPES
from pwlu.lab.recipes.settings import UNITS

STATUS = 3  # exit status of `pwlu train`
_BLOWN_UP = 10.0  # times the loss of the first step, which a network that learned nothing has: more is not noise


def divergence(rows: Sequence[Mapping[str, Any]], first_loss: float | None) -> dict[str, Any]:
    """Return the entries of result.json: ``diverged``, and if it is true ``diverged_at_epoch`` and ``diverged_at_step``.

    A run diverged if its loss is not finite, or if its loss at the end is far above that of its first step.

    Args:
        rows: the metrics of each epoch.
        first_loss: the loss of the first step; None if it is not known.
    """

    def lost(row: Mapping[str, Any]) -> bool:
        return row["loss"] is None or (first_loss is not None and row["loss"] > _BLOWN_UP * first_loss)

    at_the_end = list(itertools.takewhile(lost, reversed(rows)))  # a loss that fell again is not divergence
    if not at_the_end:
        return {"diverged": False}
    first = at_the_end[0 if at_the_end[0]["loss"] is None else -1]  # a run stops once its loss is not finite
    return {"diverged": True, "diverged_at_epoch": first["epoch"], "diverged_at_step": first.get("diverged_at")}


def described(result: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return a sentence on when a run diverged, and one on what to try.

    Args:
        result: the contents of result.json. Older versions did not write when the run diverged.
        config: the contents of config.json; empty if they are not known.
    """
    epoch, step = result.get("diverged_at_epoch"), result.get("diverged_at_step")
    when = "" if epoch is None else f" in epoch {epoch}" + ("" if step is None else f", at step {step:,}")
    loss = result.get("train_loss")
    how = "the loss was no longer finite" if loss is None else f"the loss rose to {loss:.3g}"
    return f"The training diverged{when}: {how}. {_advice(config)}"


def _advice(config: Mapping[str, Any]) -> str:
    lr, recipe = config.get("lr"), RECIPES.get(config.get("recipe", ""))
    if lr is None:
        return "Try a smaller --lr."
    if recipe is not None and lr > recipe.lr:
        tries = [f"Try the recipe's --lr {recipe.lr:g} instead of {lr:g}"]
    else:
        tries = [f"Try a smaller --lr, such as {lr / 10:g}"]
    if config.get("activation") in UNITS:
        tries.append("let functions learn more slowly with --unit-lr 0.1")
    if config.get("precision") == "fp16":
        tries.append("compute in --precision bf16")
    return ", or ".join(tries) + "."
