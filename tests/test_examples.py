"""Every example of the gallery runs at its tiny size, explains itself, and is on the page of examples."""

import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run_example(monkeypatch, tmp_path, capsys):
    """Return a function that runs an example in this process and in an empty folder, and returns what it printed."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_fine_tuning_a_timm_network(run_example):
    for package in ("timm", "sklearn"):
        pytest.importorskip(package)
    printed = run_example("timm_finetune.py", "--tiny", "--no-pretrained")
    assert "9 activations became PWLUs" in printed
    own, ours = map(float, re.findall(r"test accuracy (\S+) %", printed))
    assert min(own, ours) > 50  # by chance: 10


def test_weights_that_cannot_be_loaded(run_example, monkeypatch):
    timm = pytest.importorskip("timm")

    def create_model(name, pretrained=False, **options):
        raise OSError("no network")

    monkeypatch.setattr(timm, "create_model", create_model)
    with pytest.raises(SystemExit, match=r"weights of resnet10t could not be loaded: OSError: no network\n.*--no-pretrained"):
        run_example("timm_finetune.py", "--tiny")


def test_a_language_model(run_example):
    printed = run_example("language_model.py", "--tiny", "--steps", "60")
    assert "LanguageModel: 2 converted" in printed
    assert "TwoPhase(2 PWLUs, Phase II, 6 of 6 steps of Phase I taken)" in printed
    gelu, ours = map(float, re.findall(r"(\S+) bits per byte on the last tenth", printed))
    assert max(gelu, ours) < 5.5  # without training: 8


@pytest.mark.slow
def test_a_detector(run_example):
    printed = run_example("detector.py", "--tiny")
    assert "RetinaNet: 15 converted" in printed
    assert "step 60, phase 2" in printed
    (found,) = re.findall(r"(\S+) % of the squares in 50 new images were found", printed)
    assert float(found) > 20  # without training: 0


@pytest.mark.slow
def test_onnx_without_pwlu(run_example):
    for package in ("sklearn", "onnxruntime"):
        pytest.importorskip(package)
    printed = run_example("onnx_without_pwlu.py", "--tiny")
    here, there = re.findall(r"([\d.]+) % of 897 images", printed)
    assert here == there
    assert float(here) > 60


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_help(name, run_example, capsys):
    with warnings.catch_warnings(action="ignore"), pytest.raises(SystemExit) as stopped:  # those of imported packages
        run_example(name, "--help")
    assert not stopped.value.code
    assert "options:" in capsys.readouterr().out


def test_the_page_has_them_all():
    page = (EXAMPLES.parent / "docs/examples.md").read_text()
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(re.findall(r"\]\(\.\./examples/(\w+\.py)\)", page))
