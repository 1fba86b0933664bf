"""Fuse batch norms with the PWLUs after them: norm, addition and PWLU take one pass over memory in training."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from pwlu.common.reports import RowReport
from pwlu.common.text import columns, counted
from pwlu.conversion.convert import check_unwrapped
from pwlu.conversion.sample_runs import Run, Runs, could_not_run
from pwlu.units.deferred_norm import Deferred, DeferredNorm, deferring, has_hooks, stop_deferring_
from pwlu.units.module import PWLU, require_model, require_units


@dataclass
class NormSite:
    """A batch norm of a model.

    Attributes:
        norm: its name.
        units: the names of the PWLUs that get its output.
        added: whether a tensor is added to its output before the PWLU.
        reason: why the norm is not fused; empty if it is.
        through: the names of the other modules that its output enters or leaves on the way to the PWLU.
    """

    norm: str
    units: list[str] = field(default_factory=list)
    added: bool = False
    reason: str = ""
    through: list[str] = field(default_factory=list, repr=False)

    @property
    def fused(self) -> bool:
        """Return whether the norm and its PWLU run in one pass."""
        return not self.reason


@dataclass
class NormReport(RowReport[NormSite], rows="sites"):
    """A report of every batch norm of a model. Printing it shows a table; iterating over it gives the sites."""

    model: str
    sites: list[NormSite]

    @property
    def fused(self) -> list[NormSite]:
        """Return the sites that run in one pass."""
        return [site for site in self.sites if site.fused]

    def __str__(self) -> str:
        head = ("norm", "unit", "addition", "what happened", "why not")
        rows = [
            (s.norm, ", ".join(s.units), "yes" if s.added else "", "fused" if s.fused else "not fused", s.reason)
            for s in self.sites
        ]
        return "\n".join([*columns(head, rows), f"{self.model}: {len(self.fused)} of {counted(len(self), 'batch norm')} fused"])


class _Recorder:
    """Record where the outputs of all norms go while a copy of the model runs."""

    def __init__(self, model: nn.Module) -> None:
        self.names: dict[Any, str] = {module: name for name, module in model.named_modules()}
        self.sites: dict[str, NormSite] = {}

    def site(self, norm: Any) -> NormSite:
        return self.sites.setdefault(self.names[norm], NormSite(self.names[norm]))

    def record_pair(self, deferred: Deferred, unit: PWLU) -> None:
        """Record that a unit used the output of a norm."""
        name = self.names[unit]
        for site in map(self.site, deferred.norms()):
            site.units += [] if name in site.units else [name]
            site.added |= deferred.residual is not None

    def record_use(self, deferred: Deferred, what: str) -> None:
        """Record that something other than a unit used the output of a norm."""
        self.site(deferred.norm).reason = f"its output goes to {what}"

    def record_passage(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record that the output of a norm enters or leaves a module. This is a forward hook."""
        name = self.names[module]
        for deferred in (leaf for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, Deferred)):
            if not name:
                deferred.value_for("the caller of the model")
            for norm in deferred.norms():
                through = self.site(norm).through
                through += [] if name in through else [name]


def fuse_norms_(model: nn.Module, sample: Any) -> NormReport:
    """Fuse each batch norm with the PWLU after it, in place, if only that PWLU uses its output. Training then takes less time.

    In a training step, a separate norm and PWLU read or write an activation 13 times; fused, they do so 8 times. With an
    addition in between, these numbers are 16 and 11. If the outputs of two norms are added, autograd saves neither output for
    the backward pass. Parameters, buffers, their names, the state dict, optimizers and hooks do not change.
    :func:`unfuse_norms_` undoes the fusion.

    The function supports BatchNorm1d, 2d and 3d, SyncBatchNorm, and timm's BatchNormAct2d. With 16-bit inputs, z = norm(x) + r
    is not rounded to 16 bits. So results differ from those of separate layers by that rounding. If the norm, the
    PWLU, or a module that the norm's output enters or leaves in between has hooks, and in torch.export and tracing, both run
    separately, as without this function.

    Args:
        model: a model with PWLUs. Wrap it (DistributedDataParallel, fully_shard, torch.compile) only after this call.
        sample: the input of the model: a tensor, a tuple of arguments, or a dictionary of keyword arguments. A copy of the
            model runs on it, to find where the output of each batch norm goes.

    Returns:
        A report of every batch norm. It names the PWLU that the norm is fused with, and says whether there is an addition in
        between. If the norm is not fused, the report says why.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: if the model has no PWLU, is wrapped, or no batch norm can be fused. The model is unchanged.
        RuntimeError: if the model cannot be run on the sample in training mode. The model is unchanged.
    """
    units = require_units("fuse_norms_", model)
    check_unwrapped("fuse_norms_", model, "Fuse")
    norms = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    sites: dict[str, NormSite] = {}
    classes: dict[str, type] = {}
    for name, found in norms.items():
        sites[name] = NormSite(name)
        try:
            cls: Any = type(found)
            classes[name] = cls if issubclass(cls, DeferredNorm) else deferring(cls)
        except ValueError as error:
            sites[name].reason = str(error)
    sites |= _recorded(model, sample, classes)
    modules = dict(model.named_modules())
    for site in sites.values():
        _check(site, modules)
    report = NormReport(type(model).__name__, list(sites.values()))
    if not report.fused:
        seen = f"\n{report}" if norms else " It has no batch norm."
        raise ValueError(
            f"fuse_norms_: nothing in {report.model} was fused. A batch norm can be fused if only a PWLU uses its output.{seen}"
        )
    for site in report.fused:
        norm: Any = norms[site.norm]
        norm.__class__ = classes[site.norm]
        norm.recorder, norm.units = None, tuple(units[name] for name in site.units)
        norm.through = tuple(modules[name] for name in site.through)
    return report


def _recorded(model: nn.Module, sample: Any, classes: dict[str, type]) -> dict[str, NormSite]:
    """Run a copy of the model in which all norms defer their outputs, and return a site for each norm."""
    recorder: _Recorder

    def prepare(copy: nn.Module) -> None:
        nonlocal recorder
        recorder = _Recorder(copy)
        for name, cls in classes.items():
            norm: Any = copy.get_submodule(name)
            norm.__class__, norm.recorder, norm.units, norm.through = cls, recorder, (), ()
        for module in copy.modules():
            if not isinstance(module, (PWLU, _BatchNorm)):
                module.register_forward_hook(recorder.record_passage, with_kwargs=True)

    try:
        Runs(model, sample).run_if_possible(Run("train", 0), prepare)
    except Exception as error:
        raise could_not_run("fuse_norms_: the model could not be run on the sample in training mode", error) from error
    return {name: recorder.sites.get(name, NormSite(name, reason="the sample did not reach it")) for name in classes}


def _check(site: NormSite, modules: dict[str, nn.Module]) -> None:
    """Set the reason if no PWLU gets the output, or if the modules prevent fusion: hooks, or a subclass of PWLU."""
    if site.reason:
        return
    if not site.units:
        site.reason = "its output does not go to a PWLU"
    elif hooked := [name for name in (site.norm, *site.units, *site.through) if has_hooks(modules[name])]:
        site.reason = f"{hooked[0]} has hooks"
    elif any(type(modules[name]) is not PWLU for name in site.units):
        site.reason = "the unit is an instance of a subclass of PWLU"


def unfuse_norms_(model: nn.Module) -> list[str]:
    """Undo :func:`fuse_norms_`: every batch norm runs separately again. Return the names of the norms that were fused."""
    require_model("unfuse_norms_", model)
    norms = {name: module for name, module in model.named_modules() if isinstance(module, DeferredNorm)}
    for norm in norms.values():
        stop_deferring_(norm)
    return list(norms)
