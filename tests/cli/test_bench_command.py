"""``pwlu bench``: one table of all ways to run a trained network, and its messages if one of them cannot run."""

import copy
import re
import sys
from functools import partial

import pytest
import torch
from lab_helpers import short_run
from torch import nn
from trained_helpers import folder_of

from pwlu.cli import main
from pwlu.lab.inference import benchmark
from pwlu.lab.inference.benchmark import measure, with_relu
from pwlu.lab.inference.timing import interleaved, percentiles
from pwlu.lab.inference.trained_network import load
from pwlu.units.module import PWLU

PLAIN = ["PyTorch, ReLU", "PyTorch, PWLU", "PyTorch, PWLU fused"]
COMPILED = ["torch.compile, ReLU", "torch.compile, PWLU fused"]
ONNX = ["ONNX Runtime, ReLU", "ONNX Runtime, PWLU"]
CPU = torch.device("cpu")


def bench(*arguments):
    return main(["bench", *map(str, arguments), "--device", "cpu", "--rounds", "3"])


def rows(printed):
    """Return the rows of the table: their names, and the numbers or the text in their place."""
    lines = printed.splitlines()
    begin = next(k for k, line in enumerate(lines) if line.startswith("----")) + 1
    end = next(k for k, line in enumerate(lines[begin:], begin) if not line)
    return {cells[0]: cells[1:] for cells in (re.split(r"\s{2,}", line) for line in lines[begin:end])}


@pytest.fixture
def run(digits_run):
    return digits_run.path


def test_one_table(run, capsys):
    pytest.importorskip("onnxruntime")
    threads = torch.get_num_threads()
    assert bench(run, "--batch", 5, "--threads", 1, "--no-compile") == 0
    printed = capsys.readouterr().out
    found = rows(printed)
    assert list(found) == PLAIN + ONNX
    for name, (middle, low, high, images, ratio) in found.items():
        assert float(low) <= float(middle) <= float(high)
        # numbers in a table have three digits at least
        assert float(images.replace(",", "")) == pytest.approx(5e3 / float(middle), rel=0.006)
        relu = found[name.partition(",")[0] + ", ReLU"][0]
        assert float(ratio) == pytest.approx(float(middle) / float(relu), rel=0.02, abs=0.006)
    assert f"{run}: digits, 3 pwlu, batch of 5, images of 1 x 8 x 8, float32" in printed
    assert re.search(rf", 1 threads, .*; python .*, torch {re.escape(torch.__version__)}, ONNX Runtime \d.*, pwlu \d", printed)
    assert re.search(r"p20 and p80 of 3 rounds of (\d+ calls|one call)\.", printed)
    assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_compiled(run):
    found, _ = measure(load(run), CPU, batch=2, rounds=1, compiled=True)
    names = [contender.name for contender in found]
    assert names[:5] == PLAIN + COMPILED
    assert all(contender.times for contender in found[:5]), [contender.why for contender in found]


def test_other_activations(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    path = short_run(tmp_path / "a", "--act", "swish").path
    assert bench(path, "--no-compile") == 0
    expected = ["PyTorch, ReLU", "PyTorch, Swish", "ONNX Runtime, ReLU", "ONNX Runtime, Swish"]
    assert list(rows(capsys.readouterr().out)) == expected
    path = short_run(tmp_path / "b", "--act", "relu").path
    assert bench(path, "--no-compile") == 0
    printed = capsys.readouterr().out
    assert list(rows(printed)) == ["PyTorch, ReLU", "ONNX Runtime, ReLU"]
    assert "This run uses ReLU, so there is nothing to compare" in printed


def test_relu_in_its_place(run):
    """ReLU is measured at the same sites with the same weights."""
    trained = load(run)
    network = with_relu(trained)
    layers = dict(trained.network.named_modules())
    for name, module in network.named_modules():
        if isinstance(layers[name], PWLU):
            assert isinstance(module, nn.ReLU)
    expected = copy.deepcopy(trained.network)
    for name in ("2", "5", "8"):
        expected[int(name)] = nn.ReLU()
    x = trained.sample(3)
    with torch.no_grad():
        assert torch.equal(network(x.clone()), expected(x))


def test_relu_of_a_detector_leaves_its_maps_alone(tmp_path):
    """A RetinaNet returns the map P6 that it computes P7 from by F.relu."""
    import detection_helpers as helpers  # skips the test if a package is missing

    folder_of(helpers.task_of("tiny/retinanet_resnet18_fpn", helpers.write_objects(tmp_path)), tmp_path / "run")
    backbone = load(tmp_path / "run").backbone()
    with torch.no_grad():
        assert with_relu(backbone)(backbone.sample(2))["p6"].min() < 0


# What cannot be run.


def test_without_onnx_runtime(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert bench(run, "--no-compile") == 0
    found = rows(capsys.readouterr().out)
    assert list(found) == PLAIN + ONNX
    for name in ONNX:
        assert found[name][:5] == ["-"] * 5
        assert re.match(r"\w+ needs onnx, .*: pip install '\.\[onnx\]'", found[name][5])
    assert all(float(found[name][0]) > 0 for name in PLAIN)


def test_without_a_compiler(run, monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("No working C++ compiler found\nand much more")

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert bench(run) == 0
    found = rows(capsys.readouterr().out)
    assert list(found) == PLAIN + COMPILED + ONNX
    for name in COMPILED:
        assert found[name] == ["-"] * 5 + ["failed with RuntimeError: No working C++ compiler found"]


def test_onnx_runtime_is_for_the_cpu(run):
    with pytest.raises(Exception, match="timed on the CPU only: write --device cpu"):
        benchmark._in_onnx_runtime(load(run).network, torch.zeros(2, 1, 8, 8, device="meta"), run / "x.onnx")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--batch", 0], "--batch must be at least 1, not 0"), (["--threads", 0], "--threads must be at least 1, not 0")],
)
def test_mistakes(arguments, text, run, capsys):
    assert bench(run, *arguments) == 2
    assert capsys.readouterr().err == f"pwlu bench: {text}\n"


def test_more_mistakes(run, tmp_path, monkeypatch, capsys):
    assert main(["bench", str(run), "--rounds", "0"]) == 2
    assert "--rounds must be at least 1, not 0" in capsys.readouterr().err
    assert main(["bench", str(run), "--device", "tpu"]) == 2
    assert "--device tpu: torch has no such device" in capsys.readouterr().err
    assert bench(tmp_path / "nowhere") == 2
    assert f"pwlu bench: there is no folder {tmp_path / 'nowhere'}" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "pwlu.lab.inference.trained_network", None)
    assert bench(run) == 2
    assert "pip install '.[train,onnx]'" in capsys.readouterr().err


def test_stopped(run, monkeypatch, capsys):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("pwlu.lab.inference.benchmark.interleaved", stop)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # which takes seconds to prepare
    assert bench(run, "--no-compile") == 130
    assert capsys.readouterr().err == "\nstopped\n"


def test_a_bar_on_a_terminal(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert bench(run, "--no-compile") == 0
    printed = capsys.readouterr().err
    for bar in ("prepared: 100%", "timed: 100%", "3/3"):
        assert bar in printed


# Timing.


def test_calls_take_turns():
    order, ends = [], []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    found = interleaved(calls, 3, inner=2, wait=lambda: order.append("."), after_round=lambda: ends.append(len(order)))
    assert "".join(order) == "aaabbb" + 3 * "a.aa.b.bb."
    assert ends == [16, 26, 36]
    assert {name: len(times) for name, times in found.items()} == {"a": 3, "b": 3}


def test_a_measurement_is_the_mean_of_its_calls():
    clock = partial(next, iter([1.0, 1.5, 7.0, 7.25]))
    assert interleaved({"a": lambda: None}, 2, inner=5, clock=clock) == {"a": [100.0, 50.0]}


def test_percentiles():
    assert percentiles([5.0, 1.0, 3.0, 2.0, 4.0]) == {"p20_ms": 2.0, "p50_ms": 3.0, "p80_ms": 5.0}
    assert percentiles([7.0]) == {"p20_ms": 7.0, "p50_ms": 7.0, "p80_ms": 7.0}


def test_small_networks_are_called_several_times(monkeypatch):
    clock = iter([0, 1, 0, 1, 0, 0.004] + [0, 1] * 3 + [0, 1e-6] * 3)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    assert [benchmark._calls(lambda: None, None) for _ in range(3)] == [2, 1, 50]
