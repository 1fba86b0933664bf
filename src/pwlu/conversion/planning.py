"""Plan the conversion of sites: the name of each new activation, and which calls must be rewritten."""

from collections import Counter
from collections.abc import Sequence

from torch import fx, nn

from pwlu.conversion import rewrite
from pwlu.conversion.rewrite import CannotRewrite
from pwlu.conversion.sites import Candidate
from pwlu.conversion.tracing import full_name

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def plan(model: nn.Module, candidates: Sequence[Candidate]) -> None:
    """Decide which new activations replace a registered module. Choose the name of the others, and the call to rewrite."""
    crowds = Counter(candidate.calls[0].location for candidate in candidates)
    by_module: dict[str | None, list[Candidate]] = {None: []}  # None: calls of functions
    for candidate in candidates:
        by_module.setdefault(candidate.calls[0].module, []).append(candidate)
    taken: set[str] = set()
    for name, places in by_module.items():
        by_keyword = any(call.by_keyword for candidate in places for call in candidate.calls)
        replaceable = name is not None and not by_keyword and all(candidate.selected for candidate in places)
        if replaceable and len(places) == 1:
            continue
        selected = [candidate for candidate in places if candidate.selected]
        edits = [_plan_edit(model, candidate, crowds[candidate.calls[0].location] == 1) for candidate in selected]
        stays = _place_that_stays(selected, edits) if replaceable else None
        for candidate, edit in zip(selected, edits, strict=True):
            if candidate is stays or not candidate.selected:
                continue
            if isinstance(edit, CannotRewrite):
                candidate.site.action, candidate.site.reason = "impossible", str(edit)
                continue
            owner = candidate.calls[0].location.owner or ""
            preferred = name.rpartition(".")[2] if name is not None else candidate.site.kind
            child = _free_name(model.get_submodule(owner), owner, preferred, taken)
            candidate.edit, candidate.site.name = edit._replace(child=child), full_name(owner, child)
            taken.add(candidate.site.name)


def _place_that_stays(places: list[Candidate], edits: list[rewrite.Edit | CannotRewrite]) -> Candidate | None:
    """Return the place whose new activation replaces the registered module; None if every place gets its own child.

    Places that cannot be rewritten still call the registered module, so they share its new activation.
    """
    fixed = [candidate for candidate, edit in zip(places, edits, strict=True) if isinstance(edit, CannotRewrite)]
    if len({(each.site.channels, each.site.channel_dim) for each in fixed}) > 1:
        return None
    stays = (fixed or places)[0]
    for other in fixed[1:]:
        stays.modes.update(other.modes)
        why = f"shares {stays.site.name}, because the calls cannot be rewritten separately"
        other.site.action, other.site.reason = "skipped", why
    return stays


def _plan_edit(model: nn.Module, candidate: Candidate, alone: bool) -> rewrite.Edit | CannotRewrite:
    """Return how to rewrite the call of a site, or why that is not possible. `alone`: no other site is at the same place."""
    call = candidate.calls[0]
    location = call.location
    if location.owner is None:
        return CannotRewrite(f"it is called in {location.code.co_qualname} ({location}), which is not a method of a module")
    owner = model.get_submodule(location.owner)
    if isinstance(owner, fx.GraphModule):
        return CannotRewrite("its call is in a torch.fx graph: convert the model before tracing it")
    if isinstance(owner, _CONTAINERS):
        return CannotRewrite(f"it is called by {type(owner).__name__}, which would run a new child as one more layer")
    if not alone:  # in a loop, several sites can be at the same place
        return CannotRewrite(f"the same place in the code ({location}) also calls other activations")
    try:
        return rewrite.plan(type(owner), location.code, location.end, call.method)
    except CannotRewrite as why:
        return why


def _free_name(module: nn.Module, path: str, preferred: str, taken: set[str]) -> str:
    names = (preferred, *(f"{preferred}_{number}" for number in range(2, 10_000)))
    return next(name for name in names if not hasattr(module, name) and full_name(path, name) not in taken)
