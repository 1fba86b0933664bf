"""Decide whether a training diverged, and describe when it did and what to try.

The command line, report.md and the HTML page show the same description.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from pwlu.lab.recipes.catalog import RECIPES
from pwlu.lab.recipes.settings import UNITS

STATUS = 3  # exit status of `pwlu train`
_LOSS_RATIO = 10.0  # a final loss above this multiple of the first step's loss, that of an untrained network, is divergence


def divergence(rows: Sequence[Mapping[str, Any]], first_loss: float | None) -> dict[str, Any]:
    """Return the entries of result.json: ``diverged``, and if it is true ``diverged_at_epoch`` and ``diverged_at_step``.

    A run diverged if its loss is not finite, or if its last loss is more than 10 times that of its first step. If the first
    loss is None, it is not known.
    """

    def too_high(row: Mapping[str, Any]) -> bool:
        return row["loss"] is None or (first_loss is not None and row["loss"] > _LOSS_RATIO * first_loss)

    last_rows = list(itertools.takewhile(too_high, reversed(rows)))  # a loss that rose and fell again is not divergence
    if not last_rows:
        return {"diverged": False}
    first = last_rows[0 if last_rows[0]["loss"] is None else -1]  # a run stops once its loss is not finite
    return {"diverged": True, "diverged_at_epoch": first["epoch"], "diverged_at_step": first.get("diverged_at")}


def describe_divergence(result: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return a sentence on when a run diverged, and one on what to try, from its result.json and config.json.

    Files of older versions lack the epoch and the step. The config may be empty.
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
