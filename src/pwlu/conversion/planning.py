"""How sites are converted: which module gets which child, and which calls have to be rewritten for that."""

from collections import Counter
from collections.abc import Sequence

from torch import fx, nn

from pwlu.conversion import rewrite
from pwlu.conversion.sites import Found, joined

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def plan(model: nn.Module, founds: Sequence[Found]) -> None:
    """Which module gets which child, and which calls have to be rewritten for that."""
    taken: set[str] = set()
    by_module: dict[str, list[Found]] = {}
    crowds = Counter(found.calls[0].location for found in founds)
    for found in founds:
        found.alone = crowds[found.calls[0].location] == 1
        name = found.calls[0].module
        if name is not None:
            by_module.setdefault(name, []).append(found)
        elif found.wanted:
            _plan_rewrite(model, found, found.site.kind, taken)
    for name, places in by_module.items():
        owner, _, key = name.rpartition(".")
        # The registered module is replaced itself where that serves one place; every other place gets a child of its own.
        everywhere = all(found.wanted and not any(call.by_keyword for call in found.calls) for found in places)
        if everywhere and (len(places) == 1 or _one_place_stays(model, places, owner, key, taken)):
            continue
        for found in places:
            if found.wanted:
                _plan_rewrite(model, found, key, taken)
    for found in founds:
        if found.wanted and not found.key:
            found.owner, _, found.key = found.site.name.rpartition(".")


def _one_place_stays(model: nn.Module, places: Sequence[Found], owner: str, key: str, taken: set[str]) -> bool:
    """Rewrite all places but one, which keeps the module's name: the one that cannot be rewritten, else the first."""
    fixed = []
    for found in places:
        try:
            _edit(model, found, key)
        except rewrite.NotPossible:
            fixed.append(found)
    if len(fixed) > 1:
        if len({(f.site.channels, f.site.channel_dim) for f in fixed}) > 1:
            return False
        for other in fixed[1:]:
            fixed[0].modes.update(other.modes)
            other.site.action, other.site.reason = (
                "skipped",
                f"shares {fixed[0].site.name}: the places that call it cannot be told apart",
            )
    stays = (fixed or places)[0]
    for found in places:
        if found is not stays and found not in fixed:
            _plan_rewrite(model, found, key, taken)
    return True


def _edit(model: nn.Module, found: Found, child: str) -> rewrite.Edit:
    call = found.calls[0]
    location = call.location
    if location.owner is None:
        raise rewrite.NotPossible(f"it is called in {location.code.co_qualname}, {location}, which is no method of a module")
    owner = model.get_submodule(location.owner)
    if isinstance(owner, fx.GraphModule):
        raise rewrite.NotPossible("it is in a graph of torch.fx: convert the model before its graph is made")
    if isinstance(owner, _CONTAINERS):
        raise rewrite.NotPossible(f"it is called by {type(owner).__name__}, where a new child would become a layer")
    if not found.alone:
        raise rewrite.NotPossible(f"it is called at a place, {location}, that calls other activations too")
    return rewrite.plan(type(owner), location.code, location.end, child, call.method)


def _plan_rewrite(model: nn.Module, found: Found, wanted: str, taken: set[str]) -> None:
    """Give the owner of the call a new child, with a name near the wanted one, and let the call go there."""
    owner = found.calls[0].location.owner
    try:
        _edit(model, found, wanted)
    except rewrite.NotPossible as why:
        found.site.action, found.site.reason = "impossible", str(why)
        return
    assert owner is not None
    module = model.get_submodule(owner)
    names = [wanted, *(f"{wanted}_{n}" for n in range(2, 10_000))]
    child = next(n for n in names if not hasattr(module, n) and joined(owner, n) not in taken)
    taken.add(joined(owner, child))
    found.owner, found.key, found.edit = owner, child, _edit(model, found, child)
    found.site.name = joined(owner, child)
