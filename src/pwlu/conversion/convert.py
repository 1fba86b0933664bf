"""Replace the activations of an existing model. Every place that applies an activation gets its own new one."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pwlu.common import checks
from pwlu.common.text import counted
from pwlu.conversion.conversion_report import EXACT, Change, Report, Site
from pwlu.conversion.kinds import ARGUMENTS, DEFAULT_KINDS
from pwlu.conversion.making import UNITS, Factory, activation_maker
from pwlu.conversion.planning import plan
from pwlu.conversion.replacing import OriginalActivation, insert_
from pwlu.conversion.sample_runs import Run, Runs, could_not_run
from pwlu.conversion.sites import Candidate, Rules, decide, find_sites
from pwlu.conversion.tracing import stateless_leaf
from pwlu.conversion.unreached import unreached
from pwlu.initial_functions import InitialFunction
from pwlu.units.module import require_model, units_of

_FAR = 0.1  # warn if an initial function differs by more than this from the original activation


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
    """Replace the activations of a model by PWLUs, in place.

    A site is a place in the code of one module that applies an activation. An ``nn.ReLU`` that a block calls twice becomes
    two PWLUs; ``F.relu(x)`` in a ``forward`` becomes one. The class of the model, its methods, its hooks and the names of its
    weights stay the same. Activations that feed a gate, as in squeeze-and-excitation, stay as they are.

    Args:
        model: the model. Wrap it (DistributedDataParallel, fully_shard, torch.compile) only after this call.
        sample: an input of the model: a tensor, a tuple of arguments, or a dictionary of keyword arguments. A copy of the
            model runs on it, with fake tensors if possible, to find the sites and their shapes. A list means several samples:
            if no layer determines the channel dimension, it is the dimension whose size is the same in all samples. If the
            model takes a list, pass a tuple: ``(images,)``.
        to: ``"pwlu"``, ``"dynamic_pwlu"``, ``"nonuniform_pwlu"``, the name of another activation (see
            :func:`pwlu.activation`), or a function of ``(channels, site)`` that returns a module.
        kinds: activations to replace: names, or classes of your own modules. Default: :data:`pwlu.DEFAULT_KINDS`.
        bounds: initial bounds of every PWLU. Default: (-3, 3) for ReLU, and the bounds with the smallest error for other
            functions. ``"sample"``: the smallest and the largest input of each site on the sample.
        intervals: number of intervals, N. Default: 16.
        tolerance: largest allowed distance between a PWLU and its initial function. If given, N grows from ``intervals`` until
            the distance is small enough.
        granularity: ``"channel"`` for one function per channel, ``"layer"`` for one function per site. Default: ``"channel"``.
        init: initial function: a name such as ``"relu"`` (as in the paper), or a function. ``"same"``: the original activation,
            so that a trained network keeps working. Default: ``"same"``.
        where: a function of a :class:`Site` that returns False if the site must not be converted.
        min_positions: do not convert sites whose feature maps have fewer positions (height x width). Default: 2.

    Returns:
        A report of every site. If outputs change, ``report.change`` says by how much.

    Raises:
        TypeError: if ``model`` is not a module, or ``where`` is not a function.
        ValueError: if another argument is wrong, the model is wrapped or scripted, or no site can be converted. The model is
            unchanged.
        RuntimeError: if the model cannot be run on the sample. The model is unchanged.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> report = pwlu.convert_(model, torch.randn(2, 3, 32, 32))
        >>> report.converted[0].channels
        8
    """
    require_model("convert_", model)
    if where is not None and not callable(where):
        raise TypeError(
            f"convert_: where must be a function of a site, such as lambda site: 'head' not in site.name, not {where!r}"
        )
    hint = "2 leaves out squeeze-and-excitation, 1 does not"
    rules = Rules(
        _check_kinds(kinds), granularity, where, checks.check_integer("convert_", "min_positions", min_positions, hint, 0)
    )
    make = activation_maker(to, bounds, intervals, granularity, init, tolerance)
    _check_model(model)
    if isinstance(sample, list) and not sample:
        raise ValueError("convert_: sample is an empty list. Pass a tensor, a tuple of arguments, or a list of several samples")
    runs = Runs(model, sample)
    recorded = runs.record(rules.kinds)
    if not recorded:
        error = runs.failures[Run("eval", 0)]
        what = "convert_: the model could not be run on the sample, in training or in evaluation mode"
        hint = " A list holds several samples; if the model takes a list, pass (images,)."
        raise could_not_run(what, error, hint) from error
    candidates = find_sites(recorded)
    for candidate in candidates:
        decide(candidate, rules)
    plan(model, candidates)
    if isinstance(to, str) and to in UNITS and bounds == "sample":
        _calibrate(runs, candidates)
    for candidate in candidates:
        if candidate.selected:
            candidate.module = make(candidate)
    _trial_run(runs, candidates)
    _count_parameters(candidates)
    report = Report(
        type(model).__name__, [each.site for each in candidates] + unreached(model, recorded, runs.reached, rules), _notes(runs)
    )
    if not report.converted:
        raise _nothing_converted(report, model)
    _warn_if_far(report, tolerance)
    measured = any(site.error is None or site.error > EXACT for site in report.converted)
    before = runs.outputs() if measured else None
    new = {each.site.name: (each.module, each.edit) for each in candidates if each.selected and each.module is not None}
    insert_(model, new)
    if before is not None:
        _record_change(report, before, runs.outputs())
    return report


# Checking the arguments.


def _check_kinds(kinds: Iterable[str | type[nn.Module]]) -> tuple[str | type[nn.Module], ...]:
    kinds = tuple(kinds) if isinstance(kinds, Iterable) and not isinstance(kinds, (str, type)) else (kinds,)
    if unknown := [k for k in kinds if not (k in ARGUMENTS if isinstance(k, str) else isinstance(k, type))]:
        raise ValueError(
            f"convert_: {unknown[0]!r} is not a kind. Choose from {', '.join(ARGUMENTS)}, or pass classes of modules"
        )
    if not kinds:
        raise ValueError("convert_: kinds is empty, so nothing would be converted. Leave it out for the default kinds")
    return kinds


def wrapper_of(model: nn.Module) -> str | None:
    """Return the class of the first module that wraps another for training or compilation; None if there is none."""
    from torch._dynamo.eval_frame import OptimizedModule
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel, FSDPModule, FullyShardedDataParallel, OptimizedModule)
    return next((type(module).__name__ for module in model.modules() if isinstance(module, wrappers)), None)


def check_unwrapped(caller: str, model: nn.Module, verb: str = "Convert") -> None:
    """Raise ValueError if the model is wrapped for training. The error names the public function and what it does."""
    if wrapper := wrapper_of(model):
        raise ValueError(
            f"{caller}: the model is already wrapped by {wrapper}. {verb} it first with pwlu.{caller}(model, ...), then wrap it"
        )


def _check_model(model: nn.Module) -> None:
    check_unwrapped("convert_", model)
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "convert_: the model is scripted. Pass it as it was before torch.jit.script. A converted model cannot be scripted: "
            "to deploy it, call pwlu.fuse_(model.eval()), then torch.jit.trace or torch.export.export"
        )
    if stateless_leaf(model):
        raise ValueError(
            f"convert_: the model is itself an activation, {model}, and cannot be replaced in place. "
            "Write model = pwlu.PWLU(channels), or pass the model that contains it"
        )


# Converting.


_TRIAL_FAILURES = {  # keys: (a call is rewritten, the new activation is called too often)
    (False, False): "the model does not call it by its registered name",
    (False, True): "its module does not always apply the same activation",
    (True, False): "its method is called through a reference that was taken earlier",
    (True, True): "the same place in the code also calls something else",
}


def _convert_for_trial(candidates: Sequence[Candidate], model: nn.Module) -> None:
    """Put the original activations into the places of the new ones."""
    selected = [candidate for candidate in candidates if candidate.selected]
    insert_(model, {each.site.name: (OriginalActivation(model, each.calls[0]), each.edit) for each in selected})


def _trial_run(runs: Runs, candidates: Sequence[Candidate]) -> None:
    """Convert a copy and run it. Reject new activations that are never called, or that also replace other calls."""
    while expected := {candidate.site.name: candidate.modes for candidate in candidates if candidate.selected}:
        wrong = runs.check(partial(_convert_for_trial, candidates), expected)
        if not wrong:
            return
        for candidate in candidates:
            if candidate.selected and candidate.site.name in wrong:
                site, too_often = candidate.site, wrong[candidate.site.name]
                site.action, site.reason = "impossible", _TRIAL_FAILURES[candidate.edit is not None, too_often]
                site.error = None


def _count_parameters(candidates: Sequence[Candidate]) -> None:
    """Count the parameters of new activations. Those that several sites share count at the first."""
    counted = set[nn.Parameter]()
    for candidate in candidates:
        if candidate.selected and candidate.module is not None:
            new = set(candidate.module.parameters()) - counted
            candidate.site.parameters = sum(p.numel() for p in new)
            counted |= new


def _calibrate(runs: Runs, candidates: Sequence[Candidate]) -> None:
    """Record the range of the inputs of every site."""
    selected = {candidate.site.name: candidate for candidate in candidates if candidate.selected}
    for name, (low, high) in runs.input_ranges(partial(_convert_for_trial, candidates), selected).items():
        width = high - low
        selected[name].inputs = (low, high) if width > 1e-3 else (low - 0.5, high + 0.5)


# Messages.


def _warn_if_far(report: Report, tolerance: float | None) -> None:
    """Warn if a PWLU starts far from the original activation."""
    allowed = tolerance or _FAR
    far = [site for site in report.converted if site.error is not None and site.error > allowed]
    if far:
        worst = max(far, key=lambda site: site.error or 0.0)
        warnings.warn(
            f"convert_: the initial function of {counted(len(far), 'PWLU')} differs by more than {allowed:g} from the "
            f"activation that it replaces. The largest difference is {worst.error:.2g}, at {worst.name} ({worst.was}). Pass "
            "tolerance=1e-2 for more intervals, or bounds='sample' for bounds that fit the sample",
            stacklevel=3,
        )


def _record_change(report: Report, before: list[Tensor] | Exception, after: list[Tensor] | Exception) -> None:
    """Record in the report how much the outputs on the sample changed, or why that is unknown."""
    if isinstance(before, Exception) or isinstance(after, Exception):
        failed = before if isinstance(before, Exception) else after
        report.notes.append(f"The change of the outputs could not be measured ({_one_line(failed)}).")
    elif [y.shape for y in before] != [y.shape for y in after]:
        report.notes.append("In evaluation mode, the shapes of the outputs on the sample changed.")
    else:
        report.change = Change.between(before, after)


def _one_line(error: Any) -> str:
    text = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {text}"


def _notes(runs: Runs) -> list[str]:
    notes = []
    for run, error in runs.failures.items():
        which = f"sample {run.sample}" if len(runs.samples) > 1 else "the sample"
        notes.append(f"In {run.mode} mode, the model could not be run on {which} ({_one_line(error)}).")
    scripted = [name for name, module in runs.model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    for name in [name for name in scripted if name.rpartition(".")[0] not in scripted]:
        notes.append(f"{name} is scripted, so its activations are not found. Convert the module that was scripted instead.")
    return notes


def _nothing_converted(report: Report, model: nn.Module) -> ValueError:
    units = len(units_of(model))
    already = f" It already has {counted(units, 'PWLU')}." if units else ""
    hint = "no call of relu, gelu, silu, ... Pass the classes of your own activations in kinds"
    seen = f"\n{report}" if report.sites else f" No activation was found: {hint}"
    return ValueError(f"convert_: nothing in {report.model} was converted.{already}{seen}")
