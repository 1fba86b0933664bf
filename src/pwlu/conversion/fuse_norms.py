"""fuse_norms_: batch norm, addition and PWLU in one pass over memory, for training."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pwlu.conversion.convert import check_unwrapped
from pwlu.conversion.quiet import quiet
from pwlu.conversion.sample_runs import Runs
from pwlu.deferred_norm import Deferred, DeferredNorm, deferring, has_hooks
from pwlu.module import PWLU, require_model, require_units
from pwlu.text import columns, counted


@dataclass
class NormSite:
    """A batch norm: its name, the names of the units behind it, whether something is added between, and why it is not fused."""

    norm: str
    units: list[str] = field(default_factory=list)
    added: bool = False
    reason: str = ""

    @property
    def fused(self) -> bool:
        """Return whether norm and unit run in one pass."""
        return not self.reason


@dataclass
class NormReport:
    """Every batch norm of a model. Prints as a table; iterates over sites."""

    model: str
    sites: list[NormSite]

    def __iter__(self) -> Iterator[NormSite]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    @property
    def fused(self) -> list[NormSite]:
        """Return the sites that run in one pass."""
        return [site for site in self.sites if site.fused]

    def __str__(self) -> str:
        head = ("norm", "unit", "addition", "what happened", "why not")
        rows = [
            (s.norm, ", ".join(s.units), "yes" if s.added else "", "fused" if s.fused else "left alone", s.reason)
            for s in self.sites
        ]
        return "\n".join([*columns(head, rows), f"{self.model}: {len(self.fused)} of {counted(len(self), 'batch norm')} fused"])


class _Recorder:
    """Notes what becomes of the outputs of all norms while a copy of the model runs."""

    def __init__(self, model: nn.Module) -> None:
        self.names: dict[Any, str] = {module: name for name, module in model.named_modules()}
        self.sites: dict[str, NormSite] = {}

    def site(self, norm: Any) -> NormSite:
        return self.sites.setdefault(self.names[norm], NormSite(self.names[norm]))

    def paired(self, deferred: Deferred, unit: PWLU) -> None:
        """Note that a unit took an output."""
        residual, name = deferred.residual, self.names[unit]
        for site in map(self.site, [deferred.norm, *([residual.norm] if isinstance(residual, Deferred) else [])]):
            site.units += [] if name in site.units else [name]
            site.added |= residual is not None

    def used(self, deferred: Deferred, what: str) -> None:
        """Note that something else took an output."""
        self.site(deferred.norm).reason = f"its output goes to {what}"


def fuse_norms_(model: nn.Module, sample: Any) -> NormReport:
    """Let every batch norm whose output goes to one PWLU alone run in one pass with it, in training, in place.

    A pass over memory is what such layers cost: the pair reads and writes an activation 13 times in a step of training, one
    pass of both 8 times; with an addition in between 11 instead of 16. Where two norms are added, neither
    output is held for the backward pass. Nothing else changes: parameters, buffers, their names and the state dict stay as
    they are, and so do optimizers and hooks. :func:`unfuse_norms_` takes it back.

    Args:
        model: with PWLUs. Wrap it afterwards (DistributedDataParallel, fully_shard, torch.compile).
        sample: what the model is called with: a tensor, a tuple of arguments, or a dictionary of keyword arguments. A copy of
            the model runs on it.

    Returns:
        A report of every batch norm: fused with which unit, with or without an addition, or why not.

    Batch norms (1d, 2d, 3d, SyncBatchNorm, timm's BatchNormAct2d) are found by what becomes of their outputs. z = norm(x) + r
    is computed in float32 and not rounded to 16 bits on its way, so in bfloat16 results differ from those of the pair by such
    a rounding. Where norm or unit have hooks, in torch.export and in tracing, both run apart, as they would without this.
    """
    units = require_units("fuse_norms_", model)
    check_unwrapped("fuse_norms_", model)
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
    for name, site in _recorded(model, sample, classes).items():
        sites[name] = site
    modules = dict(model.named_modules())
    for site in sites.values():
        _check(site, modules)
    report = NormReport(type(model).__name__, list(sites.values()))
    if not report.fused:
        seen = f"\n{report}" if norms else " It has no batch norm."
        raise ValueError(f"fuse_norms_: no batch norm of {report.model} goes to one PWLU alone.{seen}")
    for site in report.fused:
        norm: Any = norms[site.norm]
        norm.__class__ = classes[site.norm]
        norm.recorder, norm.units = None, tuple(units[name] for name in site.units)
    return report


def _recorded(model: nn.Module, sample: Any, classes: dict[str, type]) -> dict[str, NormSite]:
    """Run a copy of the model whose norms all wait, and return what became of them."""
    runs, failure = Runs(model, sample), None
    for real in (False, True):
        try:
            copy, args, kwargs, fake = runs.copy(0, real, hooks=False)
            recorder = _Recorder(copy)
            for name, cls in classes.items():
                norm: Any = copy.get_submodule(name)
                norm.__class__, norm.recorder, norm.units = cls, recorder, ()
            copy.train()
            with quiet(), fake or nullcontext():
                copy(*args, **kwargs)
            break
        except Exception as error:
            failure = error
    else:
        raise RuntimeError(
            f"fuse_norms_: the model could not be run on the sample in training mode: {type(failure).__name__}: {failure}\n"
            "The sample is what the model is called with: a tensor, a tuple of arguments, or a dictionary of keyword arguments."
        ) from failure
    return {name: recorder.sites.get(name, NormSite(name, reason="the sample did not reach it")) for name in classes}


def _check(site: NormSite, modules: dict[str, nn.Module]) -> None:
    """Add the reasons that lie in the modules themselves."""
    if site.reason:
        return
    if not site.units:
        site.reason = "its output does not go to a PWLU"
    elif hooked := [name for name in (site.norm, *site.units) if has_hooks(modules[name])]:
        site.reason = f"{hooked[0]} has hooks"
    elif any(type(modules[name]) is not PWLU for name in site.units):
        site.reason = "the unit is of a subclass of PWLU"


def unfuse_norms_(model: nn.Module) -> list[str]:
    """Let every batch norm run by itself again; return the names of those that :func:`fuse_norms_` had fused."""
    require_model("unfuse_norms_", model)
    names = []
    for name, module in model.named_modules():
        if isinstance(module, DeferredNorm):
            norm: Any = module
            norm.__class__ = norm.original
            del norm.recorder, norm.units
            names.append(name)
    return names
