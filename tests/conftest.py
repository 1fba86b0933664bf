"""Options and fixtures of all tests."""

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="the device the tests of operators run on: cpu, cuda, mps, ...")


@pytest.fixture
def device(request):
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def _same_random_numbers_every_time():
    torch.manual_seed(0)
