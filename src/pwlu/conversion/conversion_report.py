"""What a conversion found and did."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from pwlu.initial_functions import InitialFunction
from pwlu.text import columns

EXACT = 1e-6  # a start that is no further from what stood there than this equals it to rounding


@dataclass
class Site:
    """One place in one module where an activation is applied.

    ``name``: of the module that computes it after the conversion. ``was``: what stood there. ``shape``: of its input for the
    sample (the first, if it was called more than once). ``modes``: train, eval or both. ``action``: converted, skipped (by a
    rule or on request), impossible, or unreached. ``error``: the largest difference of the new activation's start to what
    stood there; None if it does not start as that. It is taken for |x| <= 100, or with ``bounds="sample"`` between the
    smallest and the largest input. ``layout``: "guess" if ``channel_dim`` is a guess, "several" if no single dimension has
    the channels, so that there is one function for the layer; else empty. ``glu``: what it returns multiplies a path beside
    it, as in SwiGLU.
    """

    name: str
    was: str
    kind: str
    shape: tuple[int, ...] = ()
    channels: int = 0
    channel_dim: int = 1
    layout: str = ""
    positions: int | None = None
    modes: tuple[str, ...] = ()
    calls: int = 0
    source: str = ""
    action: str = "skipped"
    reason: str = ""
    parameters: int = 0
    error: float | None = None
    glu: bool = False
    start: InitialFunction | None = field(default=None, repr=False)


@dataclass
class Change:
    """How far the outputs of a model on the sample changed, in evaluation mode.

    ``maximum``: the largest difference of an output. ``relative``: the same, divided by the largest output before.
    """

    maximum: float
    relative: float

    @classmethod
    def between(cls, before: Sequence[Tensor], after: Sequence[Tensor]) -> "Change":
        """Return the change of these outputs, one by one of the same shape. NaN counts where it was not before."""
        maximum = largest = 0.0
        for old, new in zip(before, after, strict=True):
            same = (old == new) | (old.isnan() & new.isnan())
            difference = (new.double() - old.double()).abs().masked_fill(same, 0.0)
            maximum = max(maximum, difference.nan_to_num(float("inf")).amax().item() if old.numel() else 0.0)
            finite = old[old.isfinite()]
            largest = max(largest, finite.double().abs().amax().item() if finite.numel() else 0.0)
        return cls(maximum, maximum / largest if largest else float("inf") if maximum else 0.0)

    def __str__(self) -> str:
        if not self.maximum:
            return "On the sample, in evaluation mode, the outputs do not change."
        return (
            f"On the sample, in evaluation mode, outputs change by up to {self.maximum:.2g}, "
            f"{self.relative:.2g} of the largest output."
        )


@dataclass
class Report:
    """Every site of a model, in the order in which the sample reached them. Prints as a table; iterates over sites.

    ``change``: how far the outputs changed. It is None if all starts are exact, or if the outputs could not be compared.
    """

    model: str
    sites: list[Site]
    notes: list[str] = field(default_factory=list)
    change: Change | None = None

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def of(self, action: str) -> list[Site]:
        """The sites of which this became: converted, skipped, impossible or unreached."""
        return [site for site in self.sites if site.action == action]

    @property
    def converted(self) -> list[Site]:
        """The sites that have a new activation."""
        return self.of("converted")

    @property
    def parameters(self) -> int:
        """Parameters added."""
        return sum(site.parameters for site in self.sites)

    def as_dicts(self) -> list[dict[str, Any]]:
        """For a data frame or JSON."""
        rows = [asdict(site) for site in self.sites]
        for row, site in zip(rows, self.sites, strict=True):
            row["start"] = site.start and site.start.name
        return rows

    def __str__(self) -> str:
        head = ("name", "was", "shape", "what happened", "why")
        rows = [(s.name, s.was, " x ".join(map(str, s.shape)), s.action, _why(s)) for s in self.sites]
        counts = {action: len(self.of(action)) for action in ("converted", "skipped", "impossible", "unreached")}
        parts = [f"{n} {action}" for action, n in counts.items() if n or action == "converted"]
        summary = f"{self.model}: {', '.join(parts)}; {self.parameters:,} parameters added"
        change = [str(self.change)] if self.change else []
        return "\n".join([*columns(head, rows), summary, *change, *self.notes])


def _why(site: Site) -> str:
    notes = [site.reason] if site.reason else []
    if site.glu:
        notes.append("GLU: it multiplies another path")
    if site.action == "converted":
        if site.layout == "guess":
            notes.append(f"channels in dimension {site.channel_dim}: a guess")
        if site.layout == "several":
            notes.append("one function for the layer: no single dimension has its channels")
        if site.error is not None and site.error > EXACT:
            notes.append(f"starts within {site.error:.2g} of it")
        if len(site.modes) == 1:
            notes.append(f"in {site.modes[0]} mode only")
    return "; ".join(notes)
