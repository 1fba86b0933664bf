"""Whether an ONNX model computes in ONNX Runtime what the model computes in PyTorch.

How far two results may lie apart follows from what rounding does to the model: its results are compared with those of a copy
in float64. ONNX Runtime adds in another order, so its own distance to them is taken to be up to 3 times that of PyTorch, and
more where a PWLU is written as a longer sum: errors of n roundings grow as the root of n.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

_BATCHES_AND_SPREADS = ((1, 1.0), (3, 4.0), (2, 0.25), (None, 16.0))  # spreads as multiples of the sample's
_ELEMENTS, _LARGEST_BATCH = 2**16, 128  # of the inputs in a large batch: small ones are drawn in large numbers


@dataclass
class Inputs:
    """What a model is called with. ``batch``: the size of dimension 0 that its tensors share."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, sample: Any) -> "Inputs":
        """A tensor, a tuple of arguments or a dictionary of keyword arguments."""
        if isinstance(sample, dict):
            return cls((), dict(sample))
        return cls(tuple(sample) if isinstance(sample, (tuple, list)) else (sample,), {})

    @property
    def tensors(self) -> list[Tensor]:
        """In the order of the arguments."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    @property
    def batch(self) -> int:
        """That of the first tensor that has one, else 0."""
        return next((t.shape[0] for t in self.tensors if t.ndim), 0)

    def batched(self, tensor: Any) -> bool:
        """Whether dimension 0 of it is the batch."""
        return isinstance(tensor, Tensor) and tensor.ndim > 0 and tensor.shape[0] == self.batch

    def map(self, function: Callable[[Tensor], Any]) -> "Inputs":
        """The same with other tensors."""
        args, kwargs = tree_map_only(Tensor, function, (self.args, self.kwargs))
        return Inputs(args, kwargs)

    def plus(self, tensors: list[Tensor]) -> "Inputs":
        """With more tensors after those there are."""
        return Inputs((*self.tensors, *tensors), {})

    def shapes(self) -> Any:
        """What torch.export wants to hear: dimension 0 is any number, the same for all."""
        shapes = tree_map(lambda leaf: {0: "batch"} if self.batched(leaf) else None, (self.args, self.kwargs))
        return shapes[1] if self.kwargs else shapes[0]

    @property
    def large_batch(self) -> int:
        """As many as give a good number of elements."""
        one = max((t[:1].numel() for t in self.tensors if t.ndim), default=1)
        return min(max(_ELEMENTS // max(one, 1), 3), _LARGEST_BATCH)

    def drawn(self, batch: int | None, spread: float, generator: torch.Generator) -> "Inputs":
        """Random inputs: normal with so many times the spread of the sample; whole numbers are drawn from those it has."""

        def draw(tensor: Tensor) -> Tensor:
            size = (batch, *tensor.shape[1:]) if batch and self.batched(tensor) else tensor.shape
            if not tensor.is_floating_point():
                chosen = torch.randint(max(tensor.numel(), 1), size, generator=generator)
                return tensor.flatten()[chosen]
            values = tensor.double()
            scale = float(values.std()) if tensor.numel() > 1 else 0.0
            usable = math.isfinite(scale) and scale > 0
            middle = float(values.mean()) if usable else 0.0
            return (middle + spread * (scale if usable else 1.0) * torch.randn(size, generator=generator)).to(tensor.dtype)

        return self.map(draw)


class Largest(NamedTuple):
    """The largest ``difference`` of all, as a ``share`` of the largest number in the same output, and its ``tolerance``."""

    difference: float
    share: float
    tolerance: float

    def __str__(self) -> str:
        difference, share, tolerance = (f"{number:.2g}" for number in self)
        return f"largest difference {difference} ({share} of the largest output), tolerance {tolerance}"


@dataclass
class Agreement:
    """What is judged: ``difference`` and ``tolerance`` of the output that came closest to its own. To report: ``largest``."""

    difference: float
    tolerance: float
    largest: Largest
    batches: tuple[int, ...]


@dataclass
class _Run:
    batch: int
    found: list[Tensor]
    plain: list[Tensor]
    exact: list[Tensor]


def outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The tensors that the model returns, in the order in which it exports them."""
    with torch.no_grad():
        return [leaf for leaf in tree_leaves(model(*inputs.args, **inputs.kwargs)) if isinstance(leaf, Tensor)]


def agreement(
    model: nn.Module,
    run: Callable[[Inputs], list[Tensor]],
    sample: Inputs,
    any_batch: bool,
    terms: int,
    tolerance: float | None,
) -> Agreement:
    """Compare on random inputs.

    Args:
        model: in PyTorch, on the CPU.
        run: the other one, from inputs to its outputs.
        sample: inputs.
        any_batch: whether batches of other sizes than the sample's are possible.
        terms: of the sum that a PWLU is written as, 2 for x S_j + O_j.
        tolerance: where one is given, it is a share of the largest output.
    """
    exact = None if tolerance is not None else _in_float64(model, sample)
    runs = []
    generator = torch.Generator().manual_seed(0)
    for batch, spread in _BATCHES_AND_SPREADS:
        inputs = sample.drawn((batch or sample.large_batch) if any_batch else None, spread, generator)
        plain = outputs(model, inputs)
        wide = outputs(exact, inputs.map(_double)) if exact else plain
        runs.append(_Run(inputs.batch, run(inputs), plain, wide))
    compared = _compared(runs, 1 + 3 * math.sqrt(terms / 2), tolerance)
    closest = max(compared, key=lambda each: ratio(each.difference, each.tolerance))
    return Agreement(closest.difference, closest.tolerance, max(compared), tuple(run.batch for run in runs))


def ratio(difference: float, whole: float) -> float:
    """The difference as a share of the whole, which may be 0."""
    return difference / whole if whole else math.inf if difference else 0.0


def _compared(runs: list[_Run], apart: float, tolerance: float | None) -> list[Largest]:
    """The largest difference of every output of every run. Where PyTorch's result is not finite, nothing is compared."""
    compared = []
    for place in range(len(runs[0].plain)):
        sizes, errors, found = [], [], []
        for run in runs:
            plain, exact, other = (each[place].double() for each in (run.plain, run.exact, run.found))
            if other.shape != plain.shape:
                raise RuntimeError(f"output {place} has the shape {tuple(other.shape)}, PyTorch's {tuple(plain.shape)}")
            finite = plain.isfinite() & exact.isfinite()
            if not finite.any():
                continue
            sizes.append(float(exact[finite].abs().max()))
            errors.append(float((plain - exact)[finite].abs().max()))
            distance = (other - plain)[finite].abs()
            found.append(float(distance.nan_to_num(nan=math.inf).max()))
        dtype = runs[0].plain[place].dtype
        eps = torch.finfo(dtype if dtype.is_floating_point else torch.float32).eps
        # of all runs together: in a single one of few elements PyTorch may be exact by chance
        share = max((error / size for error, size in zip(errors, sizes, strict=True) if size), default=0.0)
        allowed = apart * (share + eps) if tolerance is None else tolerance
        compared += [Largest(each, ratio(each, size), allowed * size) for each, size in zip(found, sizes, strict=True)]
    if not compared:
        raise RuntimeError("the model returned no finite number for any of the random inputs: nothing could be compared")
    return compared


def _in_float64(model: nn.Module, sample: Inputs) -> nn.Module:
    exact = copy.deepcopy(model).double()
    try:
        outputs(exact, sample.map(_double))
    except Exception as error:
        raise RuntimeError(
            "export_onnx: the model does not run in float64, which would tell how far rounding may carry its results: "
            f"{type(error).__name__}: {error}\nSay it yourself, as a share of the largest output: "
            "pwlu.export_onnx(..., tolerance=1e-5)"
        ) from error
    return exact


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
