"""Run copies of a model on samples, in training and in evaluation mode.

The runs use fake tensors, which have shapes but no values, or real ones if the control flow depends on values.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pwlu.conversion.kinds import PRELU_CLASSES, recognise_module
from pwlu.conversion.nodes import SAMPLE
from pwlu.conversion.probing import known_functions
from pwlu.conversion.quiet import quiet
from pwlu.conversion.tracing import Call, Recorder, registrations, stateless_leaf, unshare


class Run(NamedTuple):
    """One run of the model: its mode and the number of its sample."""

    mode: str
    sample: int


Recorded = dict[Run, list[Call]]


class Runs:
    """Runs copies of a model on samples, on fake tensors where possible. A list holds several samples."""

    def __init__(self, model: nn.Module, sample: Any) -> None:
        self.model, samples = model, sample if isinstance(sample, list) else [sample]
        self.samples = [dict(one) if isinstance(one, Mapping) else one for one in samples]
        self.failures: dict[Run, Exception] = {}
        self.settings: dict[Run, tuple[bool, bool]] = {}  # (real tensors, user's hooks)
        self.known = known_functions(model)
        self.reached: set[str] = set()

    def copy(self, number: int, real: bool, hooks: bool) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]:
        """Return a copy of the model, its arguments, and the fake tensor mode or None. `hooks`: keep the user's hooks."""
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
                for number in [number for number, hook in registered.items() if not _is_torch_hook(hook)]:
                    del registered[number]
        if isinstance(sample, dict):
            return model, (), sample, mode
        return model, (sample if isinstance(sample, tuple) else (sample,)), {}, mode

    def record(self, kinds: Iterable[Any]) -> Recorded:
        """Return the calls of every run, in training and evaluation mode. Leave out runs that fail."""
        found = {}
        for run in (Run(mode, number) for mode in ("train", "eval") for number in range(len(self.samples))):
            for hooks, real in self._settings_to_try():
                try:
                    found[run] = self._record(run, real, hooks, kinds)
                    self.settings[run] = real, hooks
                    self.failures.pop(run, None)
                    break
                except Exception as error:
                    self.failures[run] = error
        return found

    def _settings_to_try(self) -> list[tuple[bool, bool]]:
        """Return pairs (hooks, real tensors) in the order to try them. User hooks run only if the model fails without them."""
        with_hooks = any(not _is_torch_hook(hook) for one in _hooks(self.model) for hook in one.values())
        return [(hooks, real) for hooks in ((False, True) if with_hooks else (False,)) for real in (False, True)]

    def _record(self, run: Run, real: bool, hooks: bool, kinds: Iterable[Any]) -> list[Call]:
        model, args, kwargs, fake = self.copy(run.sample, real, hooks)
        classes = (*PRELU_CLASSES, *(kind for kind in kinds if isinstance(kind, type)))
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
        with quiet(), fake or nullcontext(), recorder:
            outputs = model(*args, **kwargs)
        self.reached |= recorder.reached
        return recorder.finish(outputs)

    def outputs(self) -> list[Tensor] | Exception:
        """Return the outputs of the model on the samples in evaluation mode, or the exception that prevents it."""
        outputs = []
        for number in range(len(self.samples)):
            try:
                model, args, kwargs, _ = self.copy(number, True, self.settings.get(Run("eval", number), (True, False))[1])
                with quiet():
                    outputs.append(model.eval()(*args, **kwargs))
            except Exception as error:
                return error
        tensors = [leaf.detach() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            return RuntimeError("the model is on the meta device")
        return [tensor for tensor in tensors if tensor.is_floating_point()]

    def input_ranges(self, change: Any, names: Iterable[str]) -> dict[str, tuple[float, float]]:
        """Apply the change to a copy and return the smallest and largest finite input of each named module.

        The copy runs in evaluation mode, or in training mode if evaluation mode fails.
        """
        found: dict[str, tuple[float, float]] = {}

        def widen(name: str, _: nn.Module, given: tuple[Tensor, ...]) -> None:
            x = given[0].detach().double()
            x = x[x.isfinite()]
            if x.numel():
                low, high = found.get(name, (torch.inf, -torch.inf))
                found[name] = min(low, x.min().item()), max(high, x.max().item())

        mode = "eval" if any(run.mode == "eval" for run in self.settings) else "train"
        for run, (_, hooks) in self.settings.items():
            if run.mode == mode:
                model, args, kwargs, _ = self.copy(run.sample, True, hooks)
                change(model)
                for name in names:
                    model.get_submodule(name).register_forward_pre_hook(partial(widen, name))
                with quiet():
                    model.train(mode == "train")(*args, **kwargs)
        return found

    def check(self, change: Any, expected: Mapping[str, Counter[Run]]) -> dict[str, bool]:
        """Apply the change to a copy and run it. Return the modules that are never called (False) or too often (True)."""
        wrong = {}

        def count(name: str, *_: Any) -> None:
            called[name] += 1

        for run, (real, hooks) in self.settings.items():
            model, args, kwargs, fake = self.copy(run.sample, real, hooks)
            change(model)
            called = Counter[str]()
            for name in expected:
                model.get_submodule(name).register_forward_pre_hook(partial(count, name))
            model.train(run.mode == "train")
            with quiet(), fake or nullcontext():
                model(*args, **kwargs)
            for name, calls in expected.items():
                if called[name] > calls[run] or (calls[run] and not called[name]):
                    wrong[name] = called[name] > calls[run]
        return wrong


def _hooks(model: nn.Module) -> Iterator[dict[int, Any]]:
    for module in model.modules():
        yield module._forward_hooks
        yield module._forward_pre_hooks


def _is_torch_hook(hook: Any) -> bool:
    """Return whether torch registered the hook, as for weight norm and pruning. Such hooks affect the results."""
    hook = getattr(hook, "func", hook)  # unwrap a partial
    return any(str(getattr(of, "__module__", "")).split(".")[0] == "torch" for of in (hook, *type(hook).__mro__))
