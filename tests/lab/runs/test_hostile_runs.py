"""Run folders that were damaged or made to harm: every command says what is wrong with which file, and changes nothing."""

import hashlib
import io
import json
import shutil

import pytest
import torch
from lab_helpers import train
from safetensors.torch import save

import pwlu
from pwlu.analysis.alignment import Alignment
from pwlu.cli import main
from pwlu.common.text import parse_json
from pwlu.lab.runs.run_folder import FORMAT, RunFolder


@pytest.fixture
def run(digits_run, tmp_path):
    """A finished run, to be damaged."""
    return shutil.copytree(digits_run.path, tmp_path / "run")


@pytest.fixture
def stopped(run):
    """The same without its result."""
    (run / "result.json").unlink()
    return run


def changed(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# metrics.jsonl


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (b'{"epoch": 2, "st', "Unterminated string"),
        (b"", "Expecting value"),
        (b"[]", "it must be the numbers of an epoch"),
        (b'{"epoch": 2, "step": 14, "loss": Infinity}', "Infinity is not a finite number"),
        (b'{"epoch": 2, "step": 14, "loss": 1e999}', "1e999 is not a finite number"),
        (b'{"epoch": 2, "step": 14, "loss": "low"}', "it must be the numbers of an epoch"),
        (b"\xff\xfe\x00", "can't decode byte 0xff"),
    ],
)
def test_a_broken_line_of_metrics(stopped, capsys, line, wrong):
    """The error names the line, and nothing is deleted."""
    path = stopped / "metrics.jsonl"
    first, _, last = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, line, last, b""]))
    before = path.read_bytes()
    assert train("--resume", stopped) == 2
    text = capsys.readouterr().err
    assert f"line 2 of {path} is damaged: " in text
    assert wrong in text
    assert "Nothing was changed" in text
    assert path.read_bytes() == before
    assert main(["report", str(stopped)]) == 0  # of what there is besides
    assert f"line 2 of {path} is damaged: " in capsys.readouterr().err


@pytest.mark.parametrize("kept", [0, 2])
def test_epochs_that_are_missing(stopped, capsys, kept):
    path = stopped / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:kept]))
    assert train("--resume", stopped) == 2
    assert (
        f"{path} ends at step {7 * kept}, but the newest checkpoint is of step 21: epochs are missing"
        in capsys.readouterr().err
    )


def test_epochs_without_their_numbers(stopped, capsys):
    path = stopped / "metrics.jsonl"
    path.write_text("".join(json.dumps({"epoch": epoch, "step": 7 * epoch}) + "\n" for epoch in (1, 2, 3)))
    assert train("--resume", stopped) == 2
    assert f"{path} is damaged: it does not give a result (KeyError" in capsys.readouterr().err


# Tensors.


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b"", "is not a safetensors file, or is damaged"),
        (b"\x08\0\0\0\0\0\0\0[1, 2, 3", "is not a safetensors file, or is damaged"),
        (save({"weight": torch.zeros(2)}), "does not say how its model was converted"),
        (save({}, {"pwlu": '{"format": 1, "version": "0.1.0", "units": []}'}), "is missing"),
        (save({}, {"pwlu": '{"format": 9, "version": "7.0", "units": []}'}), "was written by a later version, pwlu 7.0"),
        (save({}, {"pwlu": '{"format": 1, "version": "0.1.0", "units": 5}'}), "the conversion in the file is damaged"),
    ],
)
def test_files_that_are_not_weights(run, tmp_path, capsys, content, wrong):
    (run / "model.safetensors").write_bytes(content)
    assert main(["export", str(run), str(tmp_path / "model.pt2")]) == 2
    text = capsys.readouterr().err
    assert f"{run / 'model.safetensors'} is damaged, or does not hold the weights of the network" in text
    assert wrong in text


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"shape": [1, 8]}, "ValueError"),
        ({"shape": [0, 8, 8]}, "the shape must be three sizes above 0"),
        ({"mean": ["dark"]}, "ValueError"),
        ({"sites": []}, "AttributeError"),
        ({"classes": None}, "TypeError"),
    ],
)
def test_files_that_do_not_describe_a_network(run, tmp_path, capsys, changes, wrong):
    changed(run / "network.json", **changes)
    assert main(["export", str(run), str(tmp_path / "model.pt2")]) == 2
    text = capsys.readouterr().err
    assert f"{run / 'network.json'} does not describe a network: {wrong}" in text or wrong in text


@pytest.mark.parametrize("content", [[1], 3, {}, {"trainer": {}}, {"trainer": 3, "step": 21, "seconds": 1.0}, b"junk", b""])
def test_a_checkpoint_of_something_else(stopped, capsys, content):
    """Its checksum is right."""
    if not isinstance(content, bytes):
        buffer = io.BytesIO()
        torch.save(content, buffer)
        content = buffer.getvalue()
    for old in (stopped / "checkpoints").iterdir():
        old.unlink()
    name = f"step-00000021-{hashlib.sha256(content).hexdigest()[:8]}.pt"
    (stopped / "checkpoints" / name).write_bytes(content)
    assert train("--resume", stopped) == 2
    text = capsys.readouterr().err
    assert (
        f"{name} is damaged: " in text or f"the newest checkpoint of {stopped} does not fit what config.json describes" in text
    )


@pytest.mark.parametrize("name", ["step-abc.pt", "step-.pt", "step--1.pt", "step-1e5.pt", "step-\u00b2.pt"])
def test_odd_names_of_snapshots(run, capsys, name):
    shutil.copy(run / "functions.pt", run / "snapshots" / name)
    assert main(["report", str(run)]) == 0
    assert f"snapshots/{name} is left out: its name must have the number of a step" in capsys.readouterr().err


@pytest.mark.parametrize("content", [[1], {"a": 3}, {"1": {"left": torch.zeros(2)}}, {}, {3: torch.zeros(2)}])
def test_files_that_are_not_functions(run, capsys, content):
    torch.save(content, run / "functions.pt")
    assert main(["report", str(run)]) == 0
    assert "functions.pt cannot be read and is left out: " in capsys.readouterr().err


# JSON.


@pytest.mark.parametrize("name", ["config.json", "environment.json", "result.json"])
@pytest.mark.parametrize(
    "content",
    [b'{"a": "\xe4"}', b"[" * 100_000, b'{"a": "\\ud800"}', b'{"a": NaN}', b'{"a": 1' + b"0" * 400 + b"}", b"null", b""],
    ids=["not UTF-8", "deep", "half a character", "NaN", "huge", "null", "empty"],
)
def test_text_of_any_kind(run, capsys, name, content):
    (run / name).write_bytes(content)
    status = main(["report", str(run)])
    assert f"{run / name} is damaged: " in capsys.readouterr().err
    assert status == 0
    if name == "environment.json":
        return
    assert train("--resume", run) == 2
    assert f"{run / name} is damaged: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("result.json", {"accuracy": "high"}),
        ("result.json", {"diverged": [1]}),
        ("result.json", {"measured_on": 5}),
        ("environment.json", {"device": ["a", "b"]}),
        ("environment.json", {"side_by_side": "two"}),
    ],
)
def test_values_of_another_kind(run, tmp_path, capsys, name, changes):
    changed(run / name, **changes)
    arguments = ["--epochs", "3", "--realign-epochs", "1", "--batch", "128", "--seeds", "1"]
    folders = ["--runs", str(tmp_path), "--results", str(tmp_path / "results")]
    complaint = f"{run / name} is damaged: {next(iter(changes))} must be a "
    assert main(["compare", "digits", "--acts", "pwlu", *arguments, *folders, "--dry-run"]) == 0
    assert complaint in capsys.readouterr().err
    assert main(["report", str(run)]) == 0
    assert complaint in capsys.readouterr().err


def test_a_file_that_is_a_folder(run, capsys):
    for name in ("environment.json", "metrics.jsonl"):
        (run / name).unlink()
        (run / name).mkdir()
    assert main(["report", str(run)]) == 0
    text = capsys.readouterr().err
    assert f"{run / 'environment.json'} cannot be read: " in text
    assert f"{run / 'metrics.jsonl'} cannot be read: " in text


# alignment.json and inputs.json


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"iou": None}, "'NoneType'"),
        ({"iou": [0.5]}, "left of '2' must be 1 number, one per channel"),
        ({"outside": ["much"] * 8}, "outside of '2' must be 8 numbers"),
        ({"count": []}, "count of '2' must be 8 numbers"),
        ({"histogram": [[1] * 32] * 7 + [[1, 2]], "low": [0] * 8, "high": [1] * 8}, "the histograms of '2' must have 32 bars"),
        ({"histogram": []}, "low of '2' must be 0 numbers"),
        ({"name": 7}, "names of units must be strings"),
    ],
)
def test_files_that_are_not_an_alignment(run, capsys, changes, wrong):
    content = json.loads((run / "inputs.json").read_text())
    content["units"][0] |= changes
    (run / "inputs.json").write_text(json.dumps(content))
    assert main(["report", str(run)]) == 0
    text = capsys.readouterr().err
    assert "inputs.json cannot be read and is left out: " in text
    assert wrong in text


def test_null_means_unknown(run):
    """As to_json writes what is not finite."""
    found = Alignment.from_json((run / "alignment.json").read_text())
    found.units[0].iou[0] = float("nan")
    again = Alignment.from_json(found.to_json())
    assert again.units[0].iou[0] != again.units[0].iou[0]


def test_numbers_as_json_has_them():
    assert parse_json('{"a": [1, -2.5, 1e300, null, true, "\u00e4"]}') == {"a": [1, -2.5, 1e300, None, True, "\u00e4"]}


@pytest.mark.parametrize("flag", ["--lr", "--weight-decay", "--curvature"])
def test_settings_that_are_not_finite(tmp_path, capsys, flag):
    assert train(flag, "inf", "--runs", tmp_path) == 2
    assert f"{flag} must be a finite number, not inf" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# Of a later version.


@pytest.mark.parametrize("version", ["0.2.0", "1.0", "0.1.1.dev3", "10.0.0+local"])
def test_a_run_of_a_later_version(stopped, tmp_path, capsys, version):
    """With a setting that this one does not know, or a value that it does not."""
    changed(stopped / "environment.json", pwlu=version)
    for change in ({"colour": "red"}, {"init": ["relu", "silu"]}):
        changed(stopped / "config.json", **change)
        expected = f"{stopped} was written by a later version, pwlu {version}. This is pwlu {pwlu.__version__}: update it"
        assert train("--resume", stopped) == 2
        assert expected in capsys.readouterr().err
        assert main(["export", str(stopped), str(tmp_path / "model.pt2")]) == 2
        assert expected in capsys.readouterr().err
        folders = ["--runs", str(tmp_path), "--results", str(tmp_path / "results")]
        assert main(["compare", "digits", "--acts", "pwlu", "--dry-run", *folders]) == 0
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize("version", [pwlu.__version__, "0.0.9", "", None, "absent"])
def test_a_run_of_no_later_version(stopped, capsys, version):
    changed(stopped / "config.json", colour="red")
    if version == "absent":
        (stopped / "environment.json").unlink()
    else:
        changed(stopped / "environment.json", pwlu=version)
    assert train("--resume", stopped) == 2
    assert f"colour is not a setting of pwlu {pwlu.__version__}. Copy it again" in capsys.readouterr().err


def test_a_run_in_a_later_format(stopped, tmp_path, capsys):
    """Every command says so, whatever it could read of it."""
    changed(stopped / "environment.json", pwlu="0.9.0", format=FORMAT + 1)
    expected = f"{stopped} was written by a later version, pwlu 0.9.0, in format {FORMAT + 1}. This is pwlu "
    folders = ["--runs", str(tmp_path), "--results", str(tmp_path / "results")]
    for arguments, status in (
        (["train", "--resume", stopped], 2),
        (["export", stopped, tmp_path / "model.pt2"], 2),
        (["report", stopped], 2),
        (["compare", "digits", "--acts", "pwlu", "--dry-run", *folders], 0),
    ):
        assert main([str(each) for each in arguments]) == status
        assert expected in capsys.readouterr().err


def test_a_later_version_that_fits(stopped, capsys):
    """It is read without an error."""
    changed(stopped / "environment.json", pwlu="99.0")
    assert train("--resume", stopped) == 0


def test_the_undamaged_run_is_fine(run, capsys):
    assert train("--resume", run) == 0
    assert RunFolder(run).metrics()
    assert capsys.readouterr().err == ""
