"""Running copies of a model on samples, in training and in evaluation mode.

On fake tensors, which have shapes but no values, or for real where a model's course depends on values.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pwlu.conversion.kinds import PRELU, recognise_module
from pwlu.conversion.nodes import SAMPLE
from pwlu.conversion.probing import known_functions
from pwlu.conversion.quiet import quiet
from pwlu.conversion.tracing import Call, Recorder, registrations, stateless_leaf, unshare


class Run(NamedTuple):
    """Which run of the model: in which mode, on which sample."""

    mode: str
    sample: int


Recorded = dict[Run, list[Call]]


class Runs:
    """Copies of a model that can be run on samples, fake where possible. A list is several samples."""

    def __init__(self, model: nn.Module, sample: Any) -> None:
        self.model, samples = model, sample if isinstance(sample, list) else [sample]
        self.samples = [dict(one) if isinstance(one, Mapping) else one for one in samples]
        self.failures: dict[Run, Exception] = {}
        self.ways: dict[Run, tuple[bool, bool]] = {}  # for real or on fake tensors, with hooks or without
        self.known = known_functions(model)
        self.reached: set[str] = set()

    def copy(self, number: int, real: bool, hooks: bool) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]:
        """A copy of the model, arguments for it, and the mode to run it in. `hooks`: whether it has those of the user."""
        if real:
            mode: Any = None
            model, sample = copy.deepcopy(self.model), copy.deepcopy(self.samples[number])
        else:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            with FakeCopyMode(mode):
                model = copy.deepcopy(self.model)
            sample = tree_map_only(Tensor, mode.from_tensor, self.samples[number])
        if not hooks:
            for registered in _hooks(model):
                for number in [number for number, hook in registered.items() if not _of_torch(hook)]:
                    del registered[number]
        if isinstance(sample, dict):
            return model, (), sample, mode
        return model, (sample if isinstance(sample, tuple) else (sample,)), {}, mode

    def record(self, kinds: Iterable[Any]) -> Recorded:
        """Return the calls in training and in evaluation mode, sample by sample; runs that fail are left out."""
        found = {}
        for run in (Run(mode, number) for mode in ("train", "eval") for number in range(len(self.samples))):
            for hooks, real in self._ways():
                try:
                    found[run] = self._record(run, real, hooks, kinds)
                    self.ways[run] = real, hooks
                    self.failures.pop(run, None)
                    break
                except Exception as error:
                    self.failures[run] = error
        return found

    def _ways(self) -> list[tuple[bool, bool]]:
        """With the hooks of the user or without, for real or not; hooks take part only if a model cannot run without them."""
        with_hooks = (
            (False, True) if any(not _of_torch(hook) for one in _hooks(self.model) for hook in one.values()) else (False,)
        )
        return [(hooks, real) for hooks in with_hooks for real in (False, True)]

    def _record(self, run: Run, real: bool, hooks: bool, kinds: Iterable[Any]) -> list[Call]:
        model, args, kwargs, fake = self.copy(run.sample, real, hooks)
        classes = (*PRELU, *(kind for kind in kinds if isinstance(kind, type)))
        known = {model.get_submodule(name) for name in self.known}

        def candidate(module: nn.Module) -> bool:
            return stateless_leaf(module) or isinstance(module, classes) or module in known

        unshare(model, candidate)
        names = {module: name for name, module in model.named_modules()}
        recorder = Recorder(names, "clamp" in kinds)
        for leaf in tree_leaves((args, kwargs)):
            recorder.dataflow.record(SAMPLE, (), {}, leaf)
        for name, (_, _, module) in registrations(model).items():
            if stateless_leaf(module) or isinstance(module, classes) or name in self.known:
                by_class, known_as = recognise_module(self.model.get_submodule(name), kinds), self.known.get(name)
                module.forward = partial(recorder.module_called, name, module, module.forward, by_class, known_as)
        model.train(run.mode == "train")
        with quiet(), _maybe(fake), recorder:
            outputs = model(*args, **kwargs)
        self.reached |= recorder.reached
        return recorder.finish(outputs)

    def outputs(self) -> list[Tensor] | Exception:
        """Return the numbers that the model, as it is now, returns for the sample in evaluation mode, or why there are none."""
        outputs = []
        for number in range(len(self.samples)):
            try:
                model, args, kwargs, _ = self.copy(number, True, self.ways.get(Run("eval", number), (True, False))[1])
                with quiet():
                    outputs.append(model.eval()(*args, **kwargs))
            except Exception as error:
                return error
        tensors = [leaf.detach() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            return RuntimeError("the model is on the meta device")
        return [tensor for tensor in tensors if tensor.is_floating_point()]

    def input_ranges(self, change: Any, names: Iterable[str]) -> dict[str, tuple[float, float]]:
        """Make the change to a copy and run it for real: the smallest and the largest finite input of these modules.

        In evaluation mode, or in training mode if the model runs in that alone.
        """
        found: dict[str, tuple[float, float]] = {}

        def note(name: str, _: nn.Module, given: tuple[Tensor, ...]) -> None:
            x = given[0].detach().double()
            x = x[x.isfinite()]
            if x.numel():
                low, high = found.get(name, (torch.inf, -torch.inf))
                found[name] = min(low, x.min().item()), max(high, x.max().item())

        mode = "eval" if any(run.mode == "eval" for run in self.ways) else "train"
        for run, (_, hooks) in self.ways.items():
            if run.mode == mode:
                model, args, kwargs, _ = self.copy(run.sample, True, hooks)
                change(model)
                for name in names:
                    model.get_submodule(name).register_forward_pre_hook(partial(note, name))
                with quiet():
                    model.train(mode == "train")(*args, **kwargs)
        return found

    def check(self, change: Any, expected: Mapping[str, Counter[Run]]) -> dict[str, bool]:
        """Make the change to a copy and run it again: which of these modules are never called (False) or too often (True)?"""
        wrong = {}
        for run, (real, hooks) in self.ways.items():
            model, args, kwargs, fake = self.copy(run.sample, real, hooks)
            change(model)
            called = Counter[str]()
            for name in expected:
                model.get_submodule(name).register_forward_pre_hook(partial(_note, called, name))
            model.train(run.mode == "train")
            with quiet(), _maybe(fake):
                model(*args, **kwargs)
            for name, calls in expected.items():
                if called[name] > calls[run] or (calls[run] and not called[name]):
                    wrong[name] = called[name] > calls[run]
        return wrong


def _hooks(model: nn.Module) -> Iterator[dict[int, Any]]:
    for module in model.modules():
        yield module._forward_hooks
        yield module._forward_pre_hooks


def _of_torch(hook: Any) -> bool:
    """Return whether it is one of torch's own, without which a model may be another: weight norm, pruning."""
    hook = getattr(hook, "func", hook)  # of a partial
    return any(str(getattr(of, "__module__", "")).split(".")[0] == "torch" for of in (hook, *type(hook).__mro__))


def _note(called: Counter[str], name: str, *_: Any) -> None:
    called[name] += 1


@contextmanager
def _maybe(mode: Any) -> Iterator[None]:
    if mode is None:
        yield
    else:
        with mode:
            yield
