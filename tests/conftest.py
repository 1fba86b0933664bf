"""Options and fixtures of all tests."""

import gc
import os
import shutil
import sys

# Before torch is imported: some virtual machines announce AMX and end a process that uses it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Before pwlu is imported, here and in all processes that tests start: eager.cpp is tested wherever it can be built.
if sys.platform != "win32" and any(map(shutil.which, ("c++", "g++", "clang++"))):
    os.environ.setdefault("PWLU_EAGER", "compiled")

import cuda_emulator
import helpers
import imported
import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck, settings

# Properties see the same cases in every run, or new ones with HYPOTHESIS_PROFILE=random.
# A failure prints @reproduce_failure(...): put above the test, that line runs the case again.
settings.register_profile(
    "fixed", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.register_profile("random", settings.get_profile("fixed"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="the device the tests of operators run on: cpu, cuda, mps, ...")


def pytest_configure(config):
    device = config.getoption("--device")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise pytest.UsageError(f"--device {device}: {str(error).splitlines()[0]}") from None


def pytest_generate_tests(metafunc):
    if "code" in metafunc.fixturenames:  # every implementation there is for the device
        names = helpers.names_of_implementations(torch.device(metafunc.config.getoption("--device")))
        metafunc.parametrize("code", names, indirect=True)


def pytest_unconfigure():
    gc.unfreeze()  # else packages that count their objects at exit complain of leaks


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # what was imported stays: collections then look at what tests make


@pytest.fixture(scope="session")
def processes():
    """Run Python in new processes; torch is imported once for all of them."""
    with imported.interpreter("torch._dynamo", "torch._inductor") as run:  # optimizers and packages import these
        yield run


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    """Return a finished run of the digits for tests that only read one. All workers share it: copy it to change it."""
    from lab_helpers import RunFolder, short_run  # needs more than torch

    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    with FileLock(root / "digits.lock"):
        runs = root / "digits"
        return RunFolder(next(runs.iterdir())) if runs.exists() else short_run(runs)


@pytest.fixture
def device(request):
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def kernel(device):
    """Return the CUDA kernels: those of the GPU, or emulated ones if the device is the CPU."""
    return cuda_emulator.kernel_for(device)


@pytest.fixture(autouse=True)
def _same_random_numbers_every_time():
    torch.manual_seed(0)
