"""Plan the conversion of sites: which module gets which child, and which calls must be rewritten."""

from collections import Counter
from collections.abc import Sequence

from torch import fx, nn

from pwlu.conversion import rewrite
from pwlu.conversion.sites import Candidate, full_name

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def plan(model: nn.Module, candidates: Sequence[Candidate]) -> None:
    """Choose the owner and the name of each new activation, and the call to rewrite for it."""
    taken: set[str] = set()
    by_module: dict[str, list[Candidate]] = {}
    crowds = Counter(candidate.calls[0].location for candidate in candidates)
    for candidate in candidates:
        candidate.alone = crowds[candidate.calls[0].location] == 1
        name = candidate.calls[0].module
        if name is not None:
            by_module.setdefault(name, []).append(candidate)
        elif candidate.selected:
            _plan_rewrite(model, candidate, candidate.site.kind, taken)
    for name, places in by_module.items():
        key = name.rpartition(".")[2]
        # The registered module is replaced for one place. Every other place gets its own child.
        everywhere = all(candidate.selected and not any(call.by_keyword for call in candidate.calls) for candidate in places)
        if everywhere and (len(places) == 1 or _keep_one_place(model, places, key, taken)):
            continue
        for candidate in places:
            if candidate.selected:
                _plan_rewrite(model, candidate, key, taken)
    for candidate in candidates:
        if candidate.selected and not candidate.key:
            candidate.owner, _, candidate.key = candidate.site.name.rpartition(".")


def _keep_one_place(model: nn.Module, places: Sequence[Candidate], key: str, taken: set[str]) -> bool:
    """Rewrite all places but one, which keeps the module's name. Keep a place that cannot be rewritten, else the first."""
    fixed = []
    for candidate in places:
        try:
            _plan_edit(model, candidate, key)
        except rewrite.CannotRewrite:
            fixed.append(candidate)
    if len(fixed) > 1:
        if len({(f.site.channels, f.site.channel_dim) for f in fixed}) > 1:
            return False
        for other in fixed[1:]:
            fixed[0].modes.update(other.modes)
            why = f"shares {fixed[0].site.name}, because the calls cannot be rewritten separately"
            other.site.action, other.site.reason = "skipped", why
    stays = (fixed or places)[0]
    for candidate in places:
        if candidate is not stays and candidate not in fixed:
            _plan_rewrite(model, candidate, key, taken)
    return True


def _plan_edit(model: nn.Module, candidate: Candidate, child: str) -> rewrite.Edit:
    call = candidate.calls[0]
    location = call.location
    if location.owner is None:
        raise rewrite.CannotRewrite(
            f"it is called in {location.code.co_qualname} ({location}), which is not a method of a module"
        )
    owner = model.get_submodule(location.owner)
    if isinstance(owner, fx.GraphModule):
        raise rewrite.CannotRewrite("its call is in a torch.fx graph: convert the model before tracing it")
    if isinstance(owner, _CONTAINERS):
        raise rewrite.CannotRewrite(f"it is called by {type(owner).__name__}, which would run a new child as one more layer")
    if not candidate.alone:
        raise rewrite.CannotRewrite(f"the same place in the code ({location}) also calls other activations")
    return rewrite.plan(type(owner), location.code, location.end, child, call.method)


def _plan_rewrite(model: nn.Module, candidate: Candidate, preferred: str, taken: set[str]) -> None:
    """Plan a new child of the module that makes the call, with the preferred name or this name and a number."""
    owner = candidate.calls[0].location.owner
    try:
        _plan_edit(model, candidate, preferred)
    except rewrite.CannotRewrite as why:
        candidate.site.action, candidate.site.reason = "impossible", str(why)
        return
    assert owner is not None
    module = model.get_submodule(owner)
    names = [preferred, *(f"{preferred}_{n}" for n in range(2, 10_000))]
    child = next(n for n in names if not hasattr(module, n) and full_name(owner, n) not in taken)
    taken.add(full_name(owner, child))
    candidate.owner, candidate.key, candidate.edit = owner, child, _plan_edit(model, candidate, child)
    candidate.site.name = full_name(owner, child)
