"""Threads of the CUDA kernels that use the same shared memory, in emulation: there is a barrier between them."""

import cuda_emulator
import pytest
import test_cuda_kernel
import test_cuda_knots
import test_cuda_rule
import test_norm_ops
import torch
from cuda_emulator import put_mistake
from test_cuda_rule import use  # noqa: F401  # a fixture

pytestmark = pytest.mark.slow


@pytest.fixture
def checked(kernel, device):
    if device.type != "cpu":
        pytest.skip("needs no GPU: compute-sanitizer finds races there")
    return cuda_emulator.Emulated(races=True)


def compare(kernel, form):
    dtype, device = torch.float32, torch.device("cpu")
    for intervals in (16, 64):
        test_cuda_kernel.compare(kernel, form, dtype, device, intervals)
        test_cuda_knots.compare(kernel, form, dtype, device, intervals)
    for residual in (False, True):
        problem = test_norm_ops.problem(test_cuda_kernel.FORMS[form][0], dtype, device, residual)
        test_norm_ops.check_parts(*problem, kernel)


@pytest.mark.parametrize("form", ["planes", "one block per channel", "small planes", "rows"])
def test_no_races(checked, form):
    compare(checked, form)


def test_no_races_in_the_learning_rule(checked, use, device):  # noqa: F811
    for intervals in (16, 64):
        test_cuda_rule.compare(use, checked, device, intervals, test_cuda_rule.ADAM)


BARRIERS = {
    "room_for_knots);\n    __syncthreads();": "rows",
    "make_float2(0.0f, 0.0f));\n  __syncthreads();\n  const unsigned table": "planes",
    "sums[group * per_group + i].y;\n    }\n  __syncthreads();": "small planes",
}


@pytest.mark.parametrize("barrier", BARRIERS)
def test_missing_barriers_are_found(checked, barrier, monkeypatch):
    put_mistake(monkeypatch, barrier, barrier.replace("__syncthreads();", ""))
    with pytest.raises(AssertionError, match="between two barriers"):
        compare(checked, BARRIERS[barrier])


BARRIERS_OF_THE_RULE = [
    "__syncthreads();\n  double sum = 0.0;",
    "sum += room[warp];\n  __syncthreads();",
    "__syncthreads();\n  for (int i = threadIdx.x; i < columns; i += blockDim.x)",
    "sums[group * columns + i];\n  __syncthreads();",
    "__syncthreads();\n  for (int c = threadIdx.x; c < now.channels",
]


@pytest.mark.parametrize("barrier", BARRIERS_OF_THE_RULE)
def test_missing_barriers_of_the_learning_rule_are_found(checked, use, device, barrier, monkeypatch):  # noqa: F811
    put_mistake(monkeypatch, barrier, barrier.replace("__syncthreads();", ""))
    with pytest.raises(AssertionError, match="between two barriers"):
        test_cuda_rule.compare(use, checked, device, 16, test_cuda_rule.ADAM)
