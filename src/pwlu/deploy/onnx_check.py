"""Check that a model has the same outputs in ONNX Runtime as in PyTorch, up to rounding.

The tolerance follows from the rounding errors of the model in PyTorch, which a copy in float64 shows. ONNX Runtime adds in
another order, so its error may be up to 3 times that of PyTorch. If a PWLU is written as a longer sum, a larger error is
allowed, because the error of n roundings grows as sqrt(n).
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

_BATCHES_AND_SPREADS = ((1, 1.0), (3, 4.0), (2, 0.25), (None, 16.0))  # batch size (None: large), multiple of sample's spread
_Outputs = tuple[list[Tensor], list[Tensor], list[Tensor]]  # of PyTorch, of PyTorch in float64, of the other implementation
_ELEMENTS, _LARGEST_BATCH = 2**16, 128  # the large batch has about this many elements, and at most this many samples


@dataclass
class Inputs:
    """The arguments of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, sample: Any) -> "Inputs":
        """Return the inputs for a tensor, a tuple of arguments, or a dictionary of keyword arguments."""
        if isinstance(sample, dict):
            return cls((), dict(sample))
        return cls(tuple(sample) if isinstance(sample, (tuple, list)) else (sample,), {})

    @property
    def tensors(self) -> list[Tensor]:
        """Return the tensors in the order of the arguments."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    @property
    def batch(self) -> int:
        """Return the batch size of the first tensor that is not 0-d; 0 if there is none."""
        return next((t.shape[0] for t in self.tensors if t.ndim), 0)

    def batched(self, tensor: Any) -> bool:
        """Return whether dimension 0 of the tensor is the batch."""
        return isinstance(tensor, Tensor) and tensor.ndim > 0 and tensor.shape[0] == self.batch

    def map(self, function: Callable[[Tensor], Any]) -> "Inputs":
        """Return the inputs with a function applied to every tensor."""
        args, kwargs = tree_map_only(Tensor, function, (self.args, self.kwargs))
        return Inputs(args, kwargs)

    def with_tensors(self, tensors: list[Tensor]) -> "Inputs":
        """Return the tensors of these inputs followed by more tensors."""
        return Inputs((*self.tensors, *tensors), {})

    def shapes(self) -> Any:
        """Return dynamic shapes for torch.export: dimension 0 of all batched tensors has the same, free size."""
        shapes = tree_map(lambda leaf: {0: "batch"} if self.batched(leaf) else None, (self.args, self.kwargs))
        return shapes[1] if self.kwargs else shapes[0]

    @property
    def large_batch(self) -> int:
        """Return a batch size so large that the inputs have many elements."""
        one = max((t[:1].numel() for t in self.tensors if t.ndim), default=1)
        return min(max(_ELEMENTS // max(one, 1), 3), _LARGEST_BATCH)

    def random(self, batch: int | None, spread: float, generator: torch.Generator) -> "Inputs":
        """Return random inputs: normal, with `spread` times the sample's deviation; integers from the sample's values."""

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


class Difference(NamedTuple):
    """A ``difference``, its ``share`` of the largest number in the same output, and its ``tolerance``."""

    difference: float
    share: float
    tolerance: float

    @property
    def allowed(self) -> bool:
        """Return whether the difference is within the tolerance; False for NaN."""
        return self.difference <= self.tolerance

    @property
    def closeness(self) -> float:
        """Return the difference divided by the tolerance."""
        return ratio(self.difference, self.tolerance)

    def __str__(self) -> str:
        difference, share, tolerance = (f"{number:.2g}" for number in self)
        return f"largest difference {difference} ({share} of the largest output), tolerance {tolerance}"


class Agreement(NamedTuple):
    """The result of a comparison. It passes if ``closest.allowed``.

    Attributes:
        closest: the difference of the output that is closest to its tolerance.
        largest: the largest difference of all outputs, for reports.
        batches: the batch sizes of the random inputs.
    """

    closest: Difference
    largest: Difference
    batches: tuple[int, ...]


def outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Return the tensors that the model returns, in the order in which it exports them."""
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
    """Compare two implementations on random inputs.

    Args:
        model: the PyTorch model, on the CPU.
        run: the other implementation, a function from inputs to outputs.
        sample: inputs that give the shapes and the spread of the random inputs.
        any_batch: whether batch sizes other than the sample's are possible.
        terms: the number of terms in the sum of a PWLU; 2 for x S_j + O_j.
        tolerance: the largest difference, as a share of the largest output. None: derive it from the rounding errors.
    """
    exact = None if tolerance is not None else _in_float64(model, sample)
    runs, batches = [], []
    generator = torch.Generator().manual_seed(0)
    for batch, spread in _BATCHES_AND_SPREADS:
        inputs = sample.random((batch or sample.large_batch) if any_batch else None, spread, generator)
        expected = outputs(model, inputs)
        wide = outputs(exact, inputs.map(_double)) if exact else expected
        runs.append((expected, wide, run(inputs)))
        batches.append(inputs.batch)
    compared = _compare(runs, 1 + 3 * math.sqrt(terms / 2), tolerance)
    return Agreement(max(compared, key=lambda each: each.closeness), max(compared), tuple(batches))


def ratio(difference: float, size: float) -> float:
    """Return difference / size. If size is 0, return 0 for no difference, else infinity."""
    return difference / size if size else math.inf if difference else 0.0


def _compare(runs: list[_Outputs], factor: float, tolerance: float | None) -> list[Difference]:
    """Return the largest difference of every output of every run. Skip elements where PyTorch's result is not finite."""
    compared = []
    for place in range(len(runs[0][0])):
        sizes, errors, found = [], [], []
        for run in runs:
            expected, exact, actual = (outputs[place].double() for outputs in run)
            if actual.shape != expected.shape:
                raise RuntimeError(
                    f"output {place} has the shape {tuple(actual.shape)}, but PyTorch's has {tuple(expected.shape)}"
                )
            finite = expected.isfinite() & exact.isfinite()
            if not finite.any():
                continue
            sizes.append(float(exact[finite].abs().max()))
            errors.append(float((expected - exact)[finite].abs().max()))
            distance = (actual - expected)[finite].abs()
            found.append(float(distance.nan_to_num(nan=math.inf).max()))
        dtype = runs[0][0][place].dtype
        eps = torch.finfo(dtype if dtype.is_floating_point else torch.float32).eps
        # Take the largest error over all runs, because PyTorch may be exact by chance in a run with few elements.
        share = max((error / size for error, size in zip(errors, sizes, strict=True) if size), default=0.0)
        allowed = factor * (share + eps) if tolerance is None else tolerance
        compared += [Difference(each, ratio(each, size), allowed * size) for each, size in zip(found, sizes, strict=True)]
    if not compared:
        raise RuntimeError("the model returned no finite number for any random input, so nothing could be compared")
    return compared


def _in_float64(model: nn.Module, sample: Inputs) -> nn.Module:
    exact = copy.deepcopy(model).double()
    try:
        outputs(exact, sample.map(_double))
    except Exception as error:
        raise RuntimeError(
            "export_onnx: the model does not run in float64, so no tolerance can be derived from its rounding errors: "
            f"{type(error).__name__}: {error}\nPass a tolerance, as a share of the largest output: "
            "pwlu.export_onnx(..., tolerance=1e-5)"
        ) from error
    return exact


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
