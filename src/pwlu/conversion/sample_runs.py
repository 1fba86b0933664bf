"""Run copies of a model on samples, in training and in evaluation mode.

The runs use fake tensors, which have shapes but no values, or real ones if the control flow depends on values.
"""

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pwlu.conversion.kinds import PRELU_CLASSES, recognise_module
from pwlu.conversion.probing import known_functions
from pwlu.conversion.quiet import quiet
from pwlu.conversion.tracing import Call, Recorder, registrations, stateless_leaf, unshare


def could_not_run(what: str, error: Exception, hint: str = "") -> RuntimeError:
    """Return the error about a model that fails on the sample, to raise from the original error."""
    return RuntimeError(
        f"{what}: {type(error).__name__}: {error}\nThe sample must be an input of the model: a tensor, a tuple of arguments, "
        f"or a dictionary of keyword arguments.{hint}"
    )


class Run(NamedTuple):
    """One run of the model: its mode and the number of its sample."""

    mode: str
    sample: int


Recorded = dict[Run, list[Call]]
Prepare = Callable[[nn.Module], AbstractContextManager[Any] | None]


class Runs:
    """Runs copies of a model on samples, on fake tensors where possible. A list holds several samples."""

    def __init__(self, model: nn.Module, sample: Any) -> None:
        self.model, samples = model, sample if isinstance(sample, list) else [sample]
        self.samples = [dict(one) if isinstance(one, Mapping) else one for one in samples]
        self.failures: dict[Run, Exception] = {}
        self.settings: dict[Run, tuple[bool, bool]] = {}  # (real tensors, user's hooks)
        self.reached: set[str] = set()

    def run(self, run: Run, real: bool, hooks: bool, prepare: Prepare) -> Any:
        """Run a copy of the model and return its outputs.

        `real`: use real tensors. `hooks`: keep the user's hooks. `prepare` may change the copy, and may return a context to run
        it in.
        """
        if real:
            fake: Any = None
            model, sample = copy.deepcopy(self.model), copy.deepcopy(self.samples[run.sample])
        else:
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            with FakeCopyMode(fake):
                model = copy.deepcopy(self.model)
            sample = tree_map_only(Tensor, fake.from_tensor, self.samples[run.sample])
        for registered in () if hooks else _hooks(model):
            for number in [number for number, hook in registered.items() if not _is_torch_hook(hook)]:
                del registered[number]
        context = prepare(model)
        model.train(run.mode == "train")
        with quiet(), fake or nullcontext(), context or nullcontext():
            if isinstance(sample, dict):
                return model(**sample)
            return model(*sample) if isinstance(sample, tuple) else model(sample)

    def run_if_possible(self, run: Run, prepare: Prepare) -> Any:
        """Run with the first settings that work, and note them. Raise the last error if none does.

        User hooks run only if the model fails without them, and real tensors only if it fails on fake ones.
        """
        with_hooks = any(not _is_torch_hook(hook) for one in _hooks(self.model) for hook in one.values())
        for hooks, real in itertools.product((False, True) if with_hooks else (False,), (False, True)):
            try:
                outputs = self.run(run, real, hooks, prepare)
                self.settings[run] = real, hooks
                return outputs
            except Exception as error:
                failure = error
        raise failure

    def record(self, kinds: Iterable[Any]) -> Recorded:
        """Return the calls of every run, in training and evaluation mode. Leave out runs that fail."""
        classes = (*PRELU_CLASSES, *(kind for kind in kinds if isinstance(kind, type)))
        known_as = known_functions(self.model)
        recorder: Recorder

        def prepare(model: nn.Module) -> Recorder:
            nonlocal recorder
            known = {model.get_submodule(name) for name in known_as}
            unshare(model, lambda module: stateless_leaf(module) or isinstance(module, classes) or module in known)
            recorder = Recorder({module: name for name, module in model.named_modules()}, "clamp" in kinds)
            model.register_forward_pre_hook(recorder.note_sample, with_kwargs=True, prepend=True)
            for name, (_, _, module) in registrations(model).items():
                if stateless_leaf(module) or isinstance(module, classes) or name in known_as:
                    by_class = recognise_module(self.model.get_submodule(name), kinds)
                    module.forward = partial(recorder.module_called, name, module, module.forward, by_class, known_as.get(name))
            return recorder

        found = {}
        for run in (Run(mode, number) for mode in ("train", "eval") for number in range(len(self.samples))):
            try:
                outputs = self.run_if_possible(run, prepare)
                found[run] = recorder.finish(outputs)
                self.reached |= recorder.reached
            except Exception as error:
                self.failures[run] = error
        return found

    def outputs(self) -> list[Tensor] | Exception:
        """Return the outputs of the model on the samples in evaluation mode, or the exception that prevents it."""
        outputs = []
        for run in (Run("eval", number) for number in range(len(self.samples))):
            try:
                outputs.append(self.run(run, True, self.settings.get(run, (True, False))[1], lambda _: None))
            except Exception as error:
                return error
        tensors = [leaf.detach() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            return RuntimeError("the model is on the meta device")
        return [tensor for tensor in tensors if tensor.is_floating_point()]

    def input_ranges(self, convert: Callable[[nn.Module], None], names: Iterable[str]) -> dict[str, tuple[float, float]]:
        """Convert a copy and return the smallest and largest finite input of each named module.

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
                self.run(run, True, hooks, _converted_and_watched(convert, names, widen))
        return found

    def check(self, convert: Callable[[nn.Module], None], expected: Mapping[str, Counter[Run]]) -> dict[str, bool]:
        """Convert a copy and run it. Return the modules that are never called (False) or too often (True)."""
        wrong = {}

        def count(name: str, *_: Any) -> None:
            called[name] += 1

        for run, (real, hooks) in self.settings.items():
            called = Counter[str]()
            self.run(run, real, hooks, _converted_and_watched(convert, expected, count))
            for name, calls in expected.items():
                if called[name] > calls[run] or (calls[run] and not called[name]):
                    wrong[name] = called[name] > calls[run]
        return wrong


def _converted_and_watched(convert: Callable[[nn.Module], None], names: Iterable[str], hook: Callable[..., None]) -> Prepare:
    """Return a function that converts a model, and calls `hook` with the name before each call of these modules."""

    def prepare(model: nn.Module) -> None:
        convert(model)
        for name in names:
            model.get_submodule(name).register_forward_pre_hook(partial(hook, name))

    return prepare


def _hooks(model: nn.Module) -> Iterator[dict[int, Any]]:
    for module in model.modules():
        yield module._forward_hooks
        yield module._forward_pre_hooks


def _is_torch_hook(hook: Any) -> bool:
    """Return whether torch registered the hook, as for weight norm and pruning. Such hooks affect the results."""
    hook = getattr(hook, "func", hook)  # unwrap a partial
    return any(str(getattr(of, "__module__", "")).split(".")[0] == "torch" for of in (hook, *type(hook).__mro__))
