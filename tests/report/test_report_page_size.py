"""The page of a large network: ResNet-50 with a function a channel, 22,720 of them, stays small and opens."""

import pytest
import torch
import torchvision
from browser import browser, missing
from report_page_helpers import data_of, functions_of, grown, inputs_of, write_run

import pwlu
from pwlu.report.page import page
from pwlu.report.run_data import read_run_data


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """With snapshots that jump about, and inputs as irregular as any: next to nothing can be compressed."""
    torch.manual_seed(0)
    model = torchvision.models.resnet50()
    pwlu.convert_(model, torch.rand(1, 3, 64, 64))
    functions = grown(functions_of(model), 0.3)
    path = write_run(tmp_path_factory.mktemp("runs") / "run", functions, epochs=5, alignment=inputs_of(functions), wild=True)
    (path / "report.html").write_text(page(read_run_data(path)))
    return path / "report.html"


def test_less_than_5_mb(written):
    data = data_of(written.read_text())
    assert 3e6 < written.stat().st_size < 5e6
    assert sum(layer["channels"] for layer in data["layers"]) == 22_720
    assert all(layer["intervals"] == 16 for layer in data["layers"])
    assert 3 <= len(data["moments"]) < 6
    assert data["left_out"] == [f"{6 - len(data['moments'])} of 6 snapshots"]


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_it_opens(written):
    with browser() as tab:
        tab.open(written)
        assert tab.problems == []
        assert tab.value("document.querySelectorAll('#layers label').length") == 49
        said = tab.value("document.getElementById('left-out').textContent")
        assert said.startswith("To stay small, this page leaves out")
        tab.value("document.querySelectorAll('[name=layer]')[48].click()")
        tab.value("document.getElementById('channel').focus()")
        tab.press("End")
        assert tab.value("document.getElementById('caption').textContent").startswith(
            "Layer 49 (layer4.2.relu_3), channel 2047 of 2048"
        )
        assert tab.problems == []
