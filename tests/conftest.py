"""Options and fixtures of all tests."""

import os
import shutil
import sys

# Before torch is imported: some virtual machines announce AMX and end a process that uses it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Before pwlu is imported, here and in all processes that tests start: eager.cpp is tested wherever it can be built.
if sys.platform != "win32" and any(map(shutil.which, ("c++", "g++", "clang++"))):
    os.environ.setdefault("PWLU_EAGER", "compiled")

import helpers
import pytest
import torch
from hypothesis import HealthCheck, settings

# Properties: the same cases in every run, or new ones with HYPOTHESIS_PROFILE=random. A failure prints a line, @reproduce_failure,
# which runs that case again when it is put above the test.
settings.register_profile(
    "fixed", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.register_profile("random", settings.get_profile("fixed"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="the device the tests of operators run on: cpu, cuda, mps, ...")


def pytest_generate_tests(metafunc):
    if "code" in metafunc.fixturenames:  # every implementation there is for the device
        names = helpers.names_of_implementations(torch.device(metafunc.config.getoption("--device")))
        metafunc.parametrize("code", names, indirect=True)


@pytest.fixture
def device(request):
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def _same_random_numbers_every_time():
    torch.manual_seed(0)
