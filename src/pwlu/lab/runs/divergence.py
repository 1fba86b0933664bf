"""A training that diverged: when, and what to try. The command line, report.md and the page say it in the same words."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from pwlu.lab.recipes.catalog import RECIPES

STATUS = 3  # what `pwlu train` exits with
_BLOWN_UP = 10.0  # a network that has learned nothing has about the loss of the first step; this many times that is no noise


def divergence(rows: Sequence[Mapping[str, Any]], first_loss: float | None) -> dict[str, Any]:
    """Return what result.json says of it: ``diverged``, and if so ``diverged_at_epoch`` and ``diverged_at_step``.

    A run diverged if its loss is not finite, or if it ends at a loss far above that of its first step.

    Args:
        rows: what was measured, epoch by epoch.
        first_loss: of the first step; None if it is not known.
    """

    def lost(row: Mapping[str, Any]) -> bool:
        return row["loss"] is None or (first_loss is not None and row["loss"] > _BLOWN_UP * first_loss)

    at_the_end = list(itertools.takewhile(lost, reversed(rows)))  # a loss that came down again is none
    if not at_the_end:
        return {"diverged": False}
    first = at_the_end[0 if at_the_end[0]["loss"] is None else -1]  # a run stops where its loss is not finite
    return {"diverged": True, "diverged_at_epoch": first["epoch"], "diverged_at_step": first.get("diverged_at")}


def described(result: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return sentences on a run that diverged: when it did, and what to try.

    Args:
        result: of result.json; that of an older version does not say when.
        config: of config.json; empty if it is not known.
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
    if config.get("activation") == "pwlu":
        tries.append("let functions learn more slowly with --unit-lr 0.1")
    if config.get("precision") == "fp16":
        tries.append("compute in --precision bf16")
    return ", or ".join(tries) + "."
