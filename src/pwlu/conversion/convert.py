"""Putting PWLUs, or other activations, into a model that exists: every place that applies an activation gets one of its own."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pwlu.conversion.conversion_report import EXACT, Change, Report, Site
from pwlu.conversion.kinds import ARGUMENTS, DEFAULT_KINDS
from pwlu.conversion.making import Factory, maker
from pwlu.conversion.planning import plan
from pwlu.conversion.replacing import apply
from pwlu.conversion.sample_runs import Run, Runs
from pwlu.conversion.sites import Found, Rules, decide, find_sites
from pwlu.conversion.tracing import stateless_leaf
from pwlu.conversion.unreached import unreached
from pwlu.initial_functions import InitialFunction
from pwlu.module import units_of
from pwlu.text import counted

_FAR = 0.1  # a start further than this from what stood there gets a warning


def convert_(
    model: nn.Module,
    sample: Any,
    *,
    to: str | Factory = "pwlu",
    kinds: Iterable[str | type[nn.Module]] = DEFAULT_KINDS,
    bounds: tuple[float, float] | str | None = None,
    intervals: int = 16,
    tolerance: float | None = None,
    granularity: str = "channel",
    init: str | Callable[[Tensor], Tensor] | InitialFunction = "same",
    where: Callable[[Site], bool] | None = None,
    min_positions: int = 2,
) -> Report:
    """Replace the activations of a model, in place, by PWLUs; return a report of every site.

    A site is a place in the code of one module: an ``nn.ReLU`` that a block calls twice becomes two PWLUs, ``F.relu(x)`` in a
    ``forward`` becomes one. The model stays what it is: class, methods, hooks, the names of its weights.

    Args:
        sample: what the model is called with: a tensor, a tuple of arguments or a dictionary of keyword arguments. It shows the
            shapes; a copy of the model is run on it, without values where possible. A list is several of these: where layers
            do not tell which dimension has the channels, it is the one whose size is the same for all samples. For a model
            that takes one list, write a tuple: ``(images,)``.
        to: ``"pwlu"``, the name of another activation (``pwlu.activation`` makes it), or a function of (channels, site) that
            makes a module.
        kinds: which activations are replaced: names, or classes of modules that are activations of your own.
        bounds: of every PWLU at its start; default (-3, 3) for ReLU, and for other functions those that fit best.
            ``"sample"``: from the smallest to the largest input that a site has for the sample.
        intervals: N.
        tolerance: how far a PWLU may be from the function it starts as. N then grows from ``intervals`` until that is so.
        granularity: ``"channel"`` for one function a channel, ``"layer"`` for one a site.
        init: what PWLUs start as: ``"same"`` for what stood there, so that a trained network goes on working, a name such as
            ``"relu"`` (the paper's start), or a function.
        where: a function of a :class:`Site` that says False to leave it as it is.
        min_positions: maps with fewer positions (height x width) are left alone, as in squeeze-and-excitation, and so is
            whatever feeds a gate.

    Raises an error, and changes nothing, if no site is converted. Where outputs change, ``report.change`` says by how much.
    """
    rules = Rules(_check_kinds(kinds), granularity, where, min_positions)
    make = maker(to, bounds, intervals, granularity, init, tolerance)
    _check_model(model)
    if isinstance(sample, list) and not sample:
        raise ValueError(
            "convert_: sample is an empty list. Write a tensor, a tuple of arguments, or a list of several samples"
        )
    runs = Runs(model, sample)
    recorded = runs.record(rules.kinds)
    if not recorded:
        raise _could_not_run(runs)
    founds = find_sites(recorded)
    for found in founds:
        decide(found, rules)
    plan(model, founds)
    if to == "pwlu" and bounds == "sample":
        _calibrate(runs, founds)
    for found in founds:
        if found.wanted:
            found.module = make(found)
            found.site.parameters = sum(p.numel() for p in found.module.parameters())
    _try_out(runs, founds)
    report = Report(
        type(model).__name__, [f.site for f in founds] + unreached(model, recorded, runs.reached, rules), _notes(runs)
    )
    if not report.converted:
        raise _nothing_converted(report, model)
    _warn(report, tolerance)
    measured = any(site.error is None or site.error > EXACT for site in report.converted)
    before = runs.outputs() if measured else None
    apply(model, founds)
    if before is not None:
        _measure(report, before, runs.outputs())
    return report


# What was asked for.


def _check_kinds(kinds: Iterable[str | type[nn.Module]]) -> tuple[str | type[nn.Module], ...]:
    kinds = tuple(kinds) if isinstance(kinds, Iterable) and not isinstance(kinds, (str, type)) else (kinds,)
    if unknown := [k for k in kinds if not (k in ARGUMENTS if isinstance(k, str) else isinstance(k, type))]:
        raise ValueError(f"convert_: {unknown[0]!r} is not a kind. Write some of {', '.join(ARGUMENTS)}, or classes of modules")
    if not kinds:
        raise ValueError("convert_: kinds is empty, so nothing would be converted. Leave it out for the usual ones")
    return kinds


def check_unwrapped(caller: str, model: nn.Module) -> None:
    """Raise ValueError if the model is wrapped for training. `caller`: the function of pwlu that the error speaks for."""
    from torch._dynamo.eval_frame import OptimizedModule
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel, FSDPModule, FullyShardedDataParallel, OptimizedModule)
    if wrapper := next((type(module).__name__ for module in model.modules() if isinstance(module, wrappers)), None):
        raise ValueError(
            f"{caller}: the model is wrapped already, by {wrapper}. Convert first, then wrap: pwlu.{caller}(model, ...)"
        )


def _check_model(model: nn.Module) -> None:
    check_unwrapped("convert_", model)
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("convert_: the model is scripted. Convert it first, then write torch.jit.script(model)")
    if stateless_leaf(model):
        raise ValueError(
            f"convert_: the model is a single function, {model}, and cannot be replaced in place. "
            "Write model = pwlu.PWLU(channels), or give the model that contains it"
        )


# Doing it.


_GIVEN_UP = {  # by whether a call was to be rewritten, and whether the new activation was called too often
    (False, False): "the model does not call it by its registered name",
    (False, True): "it does not always apply the same activation",
    (True, False): "the method it is in is called by a reference taken earlier",
    (True, True): "its place calls something else too",
}


def _try_out(runs: Runs, founds: Sequence[Found]) -> None:
    """Convert a copy and run it: a new activation that is not called, or also for something else, is given up."""
    while expected := {found.site.name: found.modes for found in founds if found.wanted}:
        wrong = runs.check(partial(apply, founds=founds, trial=True), expected)
        if not wrong:
            return
        for found in founds:
            if found.wanted and found.site.name in wrong:
                found.site.action, found.site.reason = "impossible", _GIVEN_UP[found.edit is not None, wrong[found.site.name]]
                found.site.parameters, found.site.error = 0, None


def _calibrate(runs: Runs, founds: Sequence[Found]) -> None:
    """Note between which numbers the inputs of every site lie."""
    wanted = {found.site.name: found for found in founds if found.wanted}
    for name, (low, high) in runs.input_ranges(partial(apply, founds=founds, trial=True), wanted).items():
        width = high - low
        wanted[name].inputs = (low, high) if width > 1e-3 else (low - 0.5, high + 0.5)


# What to say.


def _warn(report: Report, tolerance: float | None) -> None:
    """Warn where a PWLU starts far from what stood there."""
    allowed = tolerance or _FAR
    far = [site for site in report.converted if site.error is not None and site.error > allowed]
    if far:
        worst = max(far, key=lambda site: site.error or 0.0)
        warnings.warn(
            f"convert_: {counted(len(far), 'site')} further than {allowed:g} from what stood there; {worst.name}, {worst.was}, "
            f"by {worst.error:.2g}. Write tolerance=1e-2 for more intervals, or bounds='sample' for bounds that fit the sample",
            stacklevel=3,
        )


def _measure(report: Report, before: list[Tensor] | Exception, after: list[Tensor] | Exception) -> None:
    """Tell the report how far the outputs on the sample changed, or why nobody knows."""
    if isinstance(before, Exception) or isinstance(after, Exception):
        failed = before if isinstance(before, Exception) else after
        report.notes.append(f"How far the outputs changed could not be measured ({_in_short(failed)}).")
    elif [y.shape for y in before] != [y.shape for y in after]:
        report.notes.append("In evaluation mode the outputs on the sample have other shapes than before.")
    else:
        report.change = Change.between(before, after)


def _in_short(error: Any) -> str:
    text = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {text}"


def _notes(runs: Runs) -> list[str]:
    notes = []
    for run, error in runs.failures.items():
        which = f"sample {run.sample}" if len(runs.samples) > 1 else "the sample"
        notes.append(f"In {run.mode} mode the model could not be run on {which} ({_in_short(error)}).")
    scripted = [name for name, module in runs.model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    for name in [name for name in scripted if name.rpartition(".")[0] not in scripted]:
        notes.append(f"{name} is scripted: activations inside are not seen. Convert it before torch.jit.script.")
    return notes


def _could_not_run(runs: Runs) -> RuntimeError:
    error = runs.failures[Run("eval", 0)]
    new = RuntimeError(
        "convert_: the model could not be run on the sample, neither in training nor in evaluation mode: "
        f"{type(error).__name__}: {error}\nThe sample is what the model is called with: a tensor, a tuple of arguments, or a "
        "dictionary of keyword arguments. A list is several samples: for a model that takes one list, write (images,)."
    )
    new.__cause__ = error
    return new


def _nothing_converted(report: Report, model: nn.Module) -> ValueError:
    units = len(units_of(model))
    already = f" It has {counted(units, 'PWLU')} already." if units else ""
    seen = f"\n{report}" if report.sites else " No activation was seen: no call of relu, gelu, silu, ..."
    return ValueError(f"convert_: nothing in {report.model} was converted.{already}{seen}")
