"""The report of a conversion."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from pwlu.common.reports import RowReport
from pwlu.common.text import columns
from pwlu.initial_functions import InitialFunction

EXACT = 1e-6  # an initial function within this distance of the original activation is equal up to rounding


@dataclass
class Site:
    """A place in the code of one module that applies an activation.

    Attributes:
        name: full name, after the conversion, of the module that computes the activation.
        was: the original activation.
        kind: its kind, such as ``"relu"``.
        shape: shape of its input for the sample. If it is called more than once, the shape of the first call.
        channels: number of channels.
        channel_dim: dimension of the channels.
        layout: ``"guess"`` if ``channel_dim`` is a guess. ``"several"`` if the channels are spread over several dimensions.
            The site then has one function for all channels. Otherwise empty.
        positions: height x width of a feature map; None for vectors and sequences.
        modes: the modes in which it is called: train, eval or both.
        calls: number of calls, over all samples and modes.
        source: file and line of the call.
        action: ``"converted"``, ``"skipped"`` (by a rule or on request), ``"impossible"`` or ``"unreached"``.
        reason: why it was not converted, or a remark.
        parameters: number of parameters added.
        error: largest difference between the initial function and the original activation; None if the PWLU starts as
            something else. It is measured for |x| <= 100, or over the range of the inputs with ``bounds="sample"``.
        glu: whether the output is multiplied with a parallel path, as in SwiGLU.
        start: the initial function that equals the original activation.
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
    """How much the outputs of a model on the sample changed, in evaluation mode.

    Attributes:
        maximum: largest difference of an output.
        relative: ``maximum`` divided by the largest output before the conversion.
    """

    maximum: float
    relative: float

    @classmethod
    def between(cls, before: Sequence[Tensor], after: Sequence[Tensor]) -> "Change":
        """Return the change between two lists of outputs of equal shapes. A NaN counts only if the conversion caused it."""
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
class Report(RowReport[Site], rows="sites"):
    """Every site of a model, in the order in which the sample reached them. Prints as a table; iterates over sites.

    Attributes:
        model: class name of the model.
        sites: the sites.
        notes: remarks about the conversion as a whole.
        change: how much the outputs on the sample changed. None if every initial function is exact, or if it is unknown.
    """

    model: str
    sites: list[Site]
    notes: list[str] = field(default_factory=list)
    change: Change | None = None

    def of(self, action: str) -> list[Site]:
        """Return the sites with this action: converted, skipped, impossible or unreached."""
        return [site for site in self.sites if site.action == action]

    @property
    def converted(self) -> list[Site]:
        """Return the sites that have a new activation."""
        return self.of("converted")

    @property
    def parameters(self) -> int:
        """Return the number of parameters added."""
        return sum(site.parameters for site in self.sites)

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return one dictionary per site, for a data frame or JSON."""
        return [asdict(site) | {"start": site.start and site.start.name} for site in self.sites]

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
        notes.append("GLU: its output is multiplied with another path")
    if site.action == "converted":
        if site.layout == "guess":
            notes.append(f"channels in dimension {site.channel_dim}: a guess")
        if site.layout == "several":
            notes.append("one function for the layer: its channels are spread over several dimensions")
        if site.error is not None and site.error > EXACT:
            notes.append(f"starts within {site.error:.2g} of it")
        if len(site.modes) == 1:
            notes.append(f"in {site.modes[0]} mode only")
    return "; ".join(notes)
