"""Compute the gradients of a training step as a CUDA graph: one launch instead of about a thousand.

Small networks keep a GPU busy for less time than Python needs to launch their kernels. A graph removes most of that time.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves, tree_map

EAGER_STEPS = 3  # before a capture, which can neither load kernels nor let cuDNN choose algorithms


class _Captured(NamedTuple):
    """A graph, and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batches: list[Any]
    gradients: list[Tensor | None]
    result: Tensor


class StepGraph:
    """Call a function that computes gradients: at first as usual, then by replaying a CUDA graph of it.

    Args:
        function: takes a list of batches, adds to the gradients of the parameters, and returns a tensor.
        parameters: the parameters whose gradients it computes.
    """

    def __init__(self, function: Callable[[list[Any]], Tensor], parameters: Iterable[Parameter]) -> None:
        self.function, self.parameters = function, list(parameters)
        self.stream = torch.cuda.Stream()
        self.kind: Hashable = None
        self.captures = self.eager_steps = 0
        self.captured: _Captured | None = None

    def __call__(self, batches: list[Any], variant: Hashable) -> Tensor:
        """Compute the gradients for these batches, and return the tensor. The gradients must be None before the call.

        `variant` describes what else decides which kernels run. The function is captured again when it changes.
        """
        kind = (variant, *((leaf.shape, leaf.stride(), leaf.dtype) for leaf in tree_leaves(batches)))
        if kind != self.kind:
            self.kind, self.eager_steps, self.captured = kind, 0, None
        if self.eager_steps < EAGER_STEPS:
            self.eager_steps += 1
            return self._run(batches)
        if self.captured is None:
            self.captured = self._capture(batches)
        graph, inputs, gradients, result = self.captured
        for leaf, value in zip(tree_leaves(inputs), tree_leaves(batches), strict=True):
            leaf.copy_(value)
        graph.replay()
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        return result.clone()  # the next replay overwrites it

    def _run(self, batches: list[Any]) -> Tensor:
        # On the stream of the capture, because autograd remembers the stream on which it first met a parameter.
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = self.function(batches)
        current.wait_stream(self.stream)
        return result

    def _capture(self, batches: list[Any]) -> _Captured:
        graph, inputs = torch.cuda.CUDAGraph(), tree_map(torch.clone, batches)
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):  # other threads read images
            result = self.function(inputs)
        self.captures += 1
        return _Captured(graph, inputs, [parameter.grad for parameter in self.parameters], result)
