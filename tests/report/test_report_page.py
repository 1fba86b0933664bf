"""``pwlu report``: what it reads, what it says is missing, and how small the page is."""

import base64
import hashlib
import itertools
import json
import re
import shutil
import zlib

import pytest
import torch
from report_page_helpers import cells_of, data_of, functions_of, grown, inputs_of, small_network, write_run
from torch import nn

import pwlu
from pwlu.analysis.shapes import describe
from pwlu.cli import main
from pwlu.lab.runs.run_folder import RunFolder
from pwlu.report import charts
from pwlu.report.encoding import encode_float16, encode_shares, encode_snapshots
from pwlu.report.gallery import gallery
from pwlu.report.page import page
from pwlu.report.run_data import read_run_data
from pwlu.report.shape_table import shape_table


@pytest.fixture
def functions():
    return grown(functions_of(small_network()), 0.3)


@pytest.fixture
def run(functions, tmp_path):
    return write_run(tmp_path / "run", functions, alignment=inputs_of(functions))


def reported(path, capsys, *arguments):
    """By the command: the page, and what was said on stderr."""
    assert main(["report", str(path), *map(str, arguments)]) == 0
    return (arguments[1] if arguments else path / "report.html").read_text(), capsys.readouterr().err


def sections_of(html):
    return re.findall(r'<section id="(\w+)"', html)


# Everything is there.


def test_a_finished_run(run, capsys):
    html, said = reported(run, capsys)
    assert sections_of(html) == ["result", "training", "alignment", "shapes", "functions"]
    assert said == ""
    assert "<h1>digits, PWLU, seed 0</h1>" in html
    assert "Accuracy 76.00 % on 899 test images; 10 learned functions in 2 layers, one per channel." in html
    assert "PWLUs have 8 intervals and started as relu. Trained with pwlu 0.1.0 (abc) and torch 2.11 on a processor." in html
    assert "Changed from the recipe: epochs 4, realign epochs 1." in html
    assert html.count("realignment, step 10") == 2  # in both charts
    assert "<dt>realigned after</dt><dd>10 steps</dd>" in html


def test_it_needs_nothing_else(run, capsys):
    """No address, and a policy that lets no other script run than this one."""
    html, _ = reported(run, capsys)
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?(?!#|")\w""", html.partition("<script>")[0])
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", html)
    script = html.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; " in html


def test_names_are_not_html(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("</script><b>", nn.ReLU())

        def forward(self, x):
            return self._modules["</script><b>"](x)

    model = Odd()
    pwlu.convert_(model, torch.rand(1, 3, 8, 8))
    functions = functions_of(model)
    html = page(read_run_data(write_run(tmp_path / "run", functions, alignment=inputs_of(functions), device="<i>")))
    assert "<b>" not in html
    assert "<i>&lt;" not in html
    assert "&lt;/script&gt;&lt;b&gt;" in html
    assert data_of(html)["layers"][0]["name"] == "</script><b>"


def test_the_table_of_shapes(tmp_path):
    """A V, a line and a ReLU in the first layer, nothing but lines in the second."""
    functions = functions_of(small_network())
    x = torch.linspace(-3, 3, 9)
    first, second = functions.values()
    first["heights"] = torch.stack([x.abs(), x, x.relu(), x.relu(), x.relu(), x.relu()])
    second["heights"] = x.expand(4, 9).clone()
    html = page(read_run_data(write_run(tmp_path / "run", functions, alignment=inputs_of(functions))))
    assert (
        "<p>Of all functions, <strong>10 %</strong> are V-shaped. In layer 1 (1), <strong>17 %</strong> are nearly linear, "
        "that is within 5 % of a straight line; in the others, 100 %. (The paper reports frequent V shapes and a nearly linear "
        "first layer.)</p>" in html
    )
    assert "Percentage of the functions of each layer with a shape where their inputs are." in html
    heads = re.findall(r'<th scope="col" title="[^"]+"><span>([^<]*)</span>', html)
    assert heads[:7] == ["linear", "ReLU-like", "V-shaped", "not monotone", "flat left", "flat right", "saturating"]
    assert data_of(html)["classes"][:3] == ["linear", "ReLU-like", "V-shaped"]
    cells = cells_of(html)
    #                   functions, linear, ReLU-like, V, not monotone, flat left, right, both, moved, collapsed, ...
    assert cells[0] == ["6", "17", "67", "17", "17", "67", "0", "0", "33", "0", "0.00", "10.0", "0.0", "0.50"]
    assert cells[1] == ["4", "100", "0", "0", "0", "0", "0", "0", "100", "0", "0.50", "10.0", "0.0", "0.50"]
    assert cells[2] == ["10", "50", "40", "10", "10", "40", "0", "0", "60", "0", "0.50", "10.0", "0.0", "0.50"]


def test_two_shares_of_inputs_outside(tmp_path):
    """One counts every input, the other every function: both say so."""
    functions = functions_of(small_network())
    aligned = inputs_of(functions)
    first, second = aligned.units
    first.outside, first.count = [0.5] * 6, [9000] * 6
    second.outside, second.count = [0.0] * 4, [1000] * 4
    html = page(read_run_data(write_run(tmp_path / "run", functions, alignment=aligned)))
    assert f"{100 * 0.5 * 54 / 58:.2f} % of all inputs lie outside the bounds; every input counts once" in html
    cells = cells_of(html)
    assert cells[2][11] == "30.0"
    assert "Inputs outside and empty intervals are means over functions." in html


@pytest.mark.parametrize("layers", [1, 2, 9])
def test_the_first_layer_is_one_layer(layers):
    """However many there are: the paper says nothing of the second."""
    units = {str(i): pwlu.PWLU(2, init="relu" if i else "identity") for i in range(layers)}
    words = shape_table(describe(nn.ModuleDict(units)), None).partition("</p>")[0]
    rest = "; in the others, 0 %" if layers > 1 else ""
    assert f"In layer 1 (0), <strong>100 %</strong> are nearly linear, that is within 5 % of a straight line{rest}." in words


def test_shapes_that_are_not_known(tmp_path):
    """Of a unit that is not finite, and of what units have moved from if that is not known."""
    functions = functions_of(small_network())
    functions["1"]["heights"][:] = torch.nan
    path = write_run(tmp_path / "run", functions, alignment=inputs_of(functions), snapshots=0, init="same")
    html = page(read_run_data(path))
    assert "Of all functions, <strong>0 %</strong> are V-shaped. In layer 1 (1), <strong>an unknown share</strong> are" in html
    cells = cells_of(html)
    assert cells[0] == ["6", *["-"] * 8, "0", "-", "10.0", "0.0", "0.50"]
    assert cells[1] == ["4", "0", "100", "0", "0", "100", "0", "0", "-", "0", "-", "10.0", "0.0", "0.50"]
    assert cells[2][:9] == ["10", *cells[1][1:9]]
    assert [layer["members"] for layer in data_of(html)["layers"]] == [[None] * 7 + [0], [0, 4, 0, 0, 4, 0, None, 0]]


def test_detection(functions, tmp_path, capsys):
    path = write_run(tmp_path / "run", functions, recipe="tiny/maskrcnn_resnet18_fpn", alignment=inputs_of(functions))
    rows = [
        {"epoch": e, "step": 10 * e, "loss": 3.0 / e, "loss_mask": 1.0}
        | ({"box_ap": 9.0 * e, "mask_ap": 8.0 * e} if e % 2 else {})
        for e in range(1, 5)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = {"box_ap": 27.0, "best_box_ap": 28.0, "mask_ap": 24.0, "box_ap_small": None, "measured_images": 5}
    RunFolder(path).write_json("result.json", result | {"measured_on": "validation images"})
    html, _ = reported(path, capsys)
    assert "Box AP 27.00, mask AP 24.00 on 5 validation images" in html
    assert "average precision, %" in html
    assert ">boxes</text>" in html
    assert ">masks</text>" in html
    assert "accuracy" not in html.partition("<details>")[0]


# Something is missing.


def test_another_activation(tmp_path, capsys):
    html, said = reported(write_run(tmp_path / "run", {}, activation="relu"), capsys)
    assert sections_of(html) == ["result", "training"]
    assert "<h1>digits, ReLU, seed 0</h1>" in html
    assert said == "The activation is relu. The network has no PWLUs, so there are no functions to show.\n"
    assert said.strip() in html
    assert "realignment, step" not in html
    assert data_of(html) is None


def test_what_compare_keeps(run, capsys):
    """Neither snapshots nor histograms."""
    aligned = inputs_of(functions_of(small_network()), bars=False)
    (run / "inputs.json").unlink()
    (run / "alignment.json").write_text(aligned.to_json())
    shutil.rmtree(run / "snapshots")
    html, said = reported(run, capsys)
    assert sections_of(html) == ["result", "training", "alignment", "shapes", "functions"]
    assert said.splitlines() == [
        "There is no inputs.json: the 5 % and 95 % quantiles of the inputs are shown instead of their distribution.",
        "There are no earlier snapshots, so only the final functions are shown.",
    ]
    data = data_of(html)
    assert data["bars"] == 0
    assert [moment["step"] for moment in data["moments"]] == [40]


def test_functions_and_alignment_alone(run, capsys):
    """The folder is all that names it."""
    for name in ("config.json", "environment.json", "metrics.jsonl", "result.json"):
        (run / name).unlink()
    shutil.rmtree(run / "snapshots")
    html, said = reported(run, capsys)
    assert sections_of(html) == ["result", "alignment", "shapes", "functions"]
    assert "<h1>run</h1>" in html
    assert "10 learned functions in 2 layers, one per channel." in html
    assert "There is no config.json: the settings are unknown." in said
    assert NO_CURVES in said
    assert "The run is not finished: it has no result.json." in said
    data = data_of(html)
    assert data["layers"][0]["start"] is None
    assert (data["moments"], data["ended"]) == ([{"step": None, "epoch": None, "phase": None}], True)


def test_a_finished_run_whose_metrics_were_cut_off(run, capsys):
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines[: len(lines) // 2])
    _, said = reported(run, capsys)
    assert "metrics.jsonl is incomplete: it has 2 of 4 epochs." in said


def test_an_unfinished_run(functions, tmp_path, capsys):
    """It shows the last snapshot. A line of the metrics that was cut off does not count."""
    path = write_run(tmp_path / "run", functions, epochs=3, finished=False)
    (path / "config.json").write_text((path / "config.json").read_text().replace('"epochs": 3', '"epochs": 9'))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "st')
    html, said = reported(path, capsys)
    assert sections_of(html) == ["result", "training", "shapes", "functions"]
    assert "The run is not finished: 3 of 9 epochs are done." in said
    assert "There is no alignment.json: shapes are measured between the bounds instead of where the inputs are." in said
    assert "<dt>epochs</dt><dd>3 of 9</dd>" in html
    assert "The functions are from step 30.\n" in said
    assert "10 learned functions in 2 layers, one per channel, at step 30." in html
    assert "with a shape between their bounds." in html
    assert data_of(html)["ended"] is False
    assert [moment["step"] for moment in data_of(html)["moments"]] == [0, 10, 20, 30]


def test_a_run_that_was_killed_early(tmp_path, capsys):
    """12 of 400 epochs, and no snapshot but the first: what is shown is the start, and nothing says that it was learned."""
    changes = {"epochs": 12, "finished": False, "realign_epochs": 20.0, "snapshots": 1}
    path = write_run(tmp_path / "run", functions_of(small_network()), **changes)
    (path / "config.json").write_text((path / "config.json").read_text().replace('"epochs": 12', '"epochs": 400'))
    html, said = reported(path, capsys)
    assert said.splitlines() == [
        "The run is not finished: 12 of 400 epochs are done.",
        "There is no alignment.json: shapes are measured between the bounds instead of where the inputs are.",
        "The functions are from step 0, before they began to learn.",
    ]
    assert ">10 functions in 2 layers, one per channel, at step 0.<" in html.replace("\n", "")
    assert "where their inputs are" not in html
    assert "learned functions" not in html


@pytest.mark.parametrize(("snapshots", "learned"), [(2, False), (3, True)])
def test_functions_learn_after_phase_one(functions, tmp_path, snapshots, learned):
    run = read_run_data(write_run(tmp_path / "run", functions, finished=False, snapshots=snapshots))
    assert (run.learned, run.ended) == (learned, False)
    assert ("10 learned functions" in page(run)) == learned


def test_iterations_may_end_in_the_middle_of_an_epoch(functions, tmp_path, capsys):
    html, said = reported(write_run(tmp_path / "run", functions, finished=False, iterations=77), capsys)
    assert "The run is not finished: 4 epochs are done." in said
    assert "<dt>epochs</dt><dd>4</dd>" in html


def test_a_run_that_has_only_begun(tmp_path, capsys):
    path = tmp_path / "run"
    path.mkdir()
    RunFolder(path).write_json("config.json", {"recipe": "digits", "activation": "pwlu", "seed": 3, "epochs": 9})
    html, said = reported(path, capsys)
    assert sections_of(html) == ["result"]
    assert "<h1>digits, PWLU, seed 3</h1>" in html
    assert "There is no functions.pt: the functions cannot be shown, and there is no snapshot to show instead." in said


NO_CURVES = "No epoch was recorded, so there are no curves."
AGAIN = "Copy it again from where it was trained, or train again. It is left out here."


@pytest.mark.parametrize(
    ("name", "content", "notes"),
    [
        ("config.json", "{", [f"PATH is damaged: Expecting .*\\. {AGAIN}", "The settings are unknown."]),
        ("config.json", "3", [f"PATH is damaged: expected {{...}}, not 3. {AGAIN}", "The settings are unknown."]),
        (
            "config.json",
            '{"recipe": "digits", "activation": 5}',
            ["PATH does not .*: activation must be a string, not 5. .*", "The settings are unknown."],
        ),
        ("environment.json", "3", [f"PATH is damaged: expected {{...}}, not 3. {AGAIN}"]),
        ("result.json", "[]", [f"PATH is damaged: expected {{...}}, not []. {AGAIN}"]),
        ("result.json", '{"accuracy": "high"}', [f"PATH is damaged: accuracy must be a number, not 'high'. {AGAIN}"]),
        ("metrics.jsonl", "5", ["line 1 of PATH is damaged: it must be .*", NO_CURVES]),
        ("metrics.jsonl", '{"foo": 1}', ["line 1 of PATH is damaged: it .*", NO_CURVES]),
        ("alignment.json", "3", ["alignment.json cannot be .*", "Shapes are measured between .*"]),
        ("inputs.json", "{", ["inputs.json cannot be .*", "The 5 % and 95 % quantiles of the inputs are shown instead of .*"]),
        ("functions.pt", "no tensors", ["functions.pt cannot be read and is left out: it does not hold saved functions"]),
    ],
)
def test_one_thing_is_said_of_a_damaged_file(run, capsys, name, content, notes):
    """What is wrong with it, and what follows; not that it is absent, nor that the run is not finished."""
    thin = inputs_of(functions_of(small_network()), bars=False)
    if name != "inputs.json":
        (run / "inputs.json").unlink()
        thin = inputs_of(functions_of(small_network()))
    (run / "alignment.json").write_text(thin.to_json())
    (run / name).write_text(content)
    html, said = reported(run, capsys)
    assert len(said.splitlines()) == len(notes)
    for line, note in zip(said.splitlines(), notes, strict=True):
        pattern = note if ".*" in note else re.escape(note)
        assert re.fullmatch(pattern.replace("PATH", re.escape(str(run / name))), line), line
    assert sections_of(html)[0] == "result"
    assert [moment["step"] for moment in data_of(html)["moments"]][:4] == [0, 10, 20, 30]  # the rest stays


def test_empty_settings(run, capsys):
    (run / "config.json").write_text("{}")
    assert main(["report", str(run)]) == 2
    assert "config.json does not hold the settings of a run: it names no recipe" in capsys.readouterr().err


def test_snapshots_that_do_not_belong(run, functions, capsys):
    """One from after the end, as another try may have left it, and one of another model."""
    RunFolder(run).write_tensors("snapshots/step-00000090.pt", functions)
    RunFolder(run).write_tensors("snapshots/step-00000010.pt", functions_of(small_network("layer")))
    html, said = reported(run, capsys)
    assert [moment["step"] for moment in data_of(html)["moments"]] == [0, 20, 30, 40]
    assert said == "The snapshot of step 10 has other units than the last functions and is left out.\n"


def test_an_alignment_of_another_model(run, capsys):
    (run / "inputs.json").write_text(inputs_of({"other": {"left": torch.zeros(2), "right": torch.ones(2)}}).to_json())
    html, said = reported(run, capsys)
    assert "The alignment does not fit the functions and is left out: describe: the alignment has none of these units" in said
    assert sections_of(html) == ["result", "training", "shapes", "functions"]


def test_a_run_that_diverged(run, functions, capsys):
    """Losses and functions that are not finite."""
    functions["1"]["heights"][0] = torch.nan
    functions["3"]["left"][:] = torch.inf
    RunFolder(run).write_tensors("functions.pt", functions)
    RunFolder(run).add_metrics({"epoch": 5, "step": 50, "loss": None, "phase": 2})
    result = RunFolder(run).json("result.json") | {"accuracy": None, "diverged": True}
    RunFolder(run).write_json("result.json", result)
    html, _ = reported(run, capsys)
    assert (
        '<p class="headline">The training diverged: the loss was no longer finite. Try a smaller --lr.</p>' in html
    )  # and no accuracy
    assert "learned functions" not in html
    assert "The training diverged. This page shows its last state, not a trained network." in html
    assert data_of(html)["moments"][-1]["step"] == 50


# No run at all, or no place for the page.


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("absent", r"there is no folder .*absent\. pwlu train creates run folders, with config\.json and metrics\.jsonl"),
        ("runs/third", r"there is no folder .*third\. Runs nearby: .*runs.first, .*runs.second$"),
        ("file", r"file is a file\. Write the folder of a run\. pwlu train creates run folders"),
        ("empty", r"empty is not a run folder: it has no config\.json and is empty\. pwlu train creates run folders"),
        ("other", r"other is not a run folder: it has no config\.json, only a, b, c, d, e and 1 more\. pwlu train creates"),
        ("runs", r"runs is not .*: it has no config\.json, only first, second\. Runs nearby: .*runs.first, .*runs.second$"),
        ("model", r"config\.json does not hold the settings of a run: it names no recipe"),
    ],
)
def test_paths_without_a_run(tmp_path, capsys, kind, complaint):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    for name in "abcdef":
        (tmp_path / "other" / name).touch()
    for name in ("first", "second"):
        write_run(tmp_path / "runs" / name, {})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"hidden_size": 16}')
    assert main(["report", str(tmp_path / kind)]) == 2
    printed = capsys.readouterr()
    assert re.search("^pwlu report: .*" + complaint, printed.err)
    assert printed.out == ""


def test_where_the_page_goes(run, tmp_path, capsys):
    target = tmp_path / "page.html"
    target.write_text("old")
    html, _ = reported(run, capsys, "-o", target)
    assert html.startswith("<!doctype html>")
    assert not (run / "report.html").exists()
    assert main(["report", str(run), "-o", str(tmp_path)]) == 2
    assert f"-o must be a file, not the folder {tmp_path}. Write -o {tmp_path / 'report.html'}" in capsys.readouterr().err
    assert main(["report", str(run), "-o", str(tmp_path / "no" / "page.html")]) == 2
    assert f"cannot be written: the folder {tmp_path / 'no'} does not exist" in capsys.readouterr().err


# What the script is given.


def decoded(content, moments, channels, columns):
    """The oracle of what ``encode_snapshots`` wrote: (T, C, K), and the scale (C, 2)."""
    scale = torch.frombuffer(bytearray(content[: 4 * channels]), dtype=torch.bfloat16).double().view(channels, 2)
    place, size = 4 * channels, channels * columns
    last = torch.frombuffer(bytearray(content[place : place + 2 * size]), dtype=torch.uint16).double()
    rest = torch.frombuffer(bytearray(content[place + 2 * size :] + b"\0"), dtype=torch.uint8)[:-1].long()
    earlier = (rest.view(moments - 1, size).cumsum(0) % 256).double()
    found = []
    for levels, top in (*((levels, 254) for levels in earlier), (last, 65534)):
        values = scale[:, :1] + (scale[:, 1:] - scale[:, :1]) * levels.view(channels, columns) / top
        found.append(torch.where(levels.view(channels, columns) > top, torch.nan, values))
    return torch.stack(found), scale


@pytest.mark.parametrize("moments", [1, 2, 5])
def test_functions_in_few_bytes(moments):
    """Half a level of the scale is all that is lost; scales are of each channel by itself."""
    values = torch.randn(moments, 4, 9, dtype=torch.float64) * torch.tensor([1e-3, 1.0, 50.0, 0.0])[:, None]
    values[0, 1, 2], values[-1, 1, 3], values[-1, 2, :] = torch.nan, torch.inf, 7.25
    content = encode_snapshots(values)
    assert len(content) == 4 * 4 + 2 * 4 * 9 + (moments - 1) * 4 * 9
    found, scale = decoded(content, moments, 4, 9)
    assert torch.equal(found.isnan(), ~values.isfinite())
    levels = torch.tensor([254.0] * (moments - 1) + [65534.0])[:, None, None]
    half_a_level = (scale[:, 1] - scale[:, 0])[:, None] / levels / 2
    finite = values.isfinite()
    assert ((found - values).abs() <= half_a_level * (1 + 1e-9))[finite].all()
    spread = values.where(finite, 0.0).abs().amax((0, 2))
    assert (scale.abs().amax(1) <= 1.02 * spread + 1e-29).all()


def test_shares_and_halves():
    assert encode_shares(torch.tensor([0.0, 0.5, 1.0, torch.nan, 2.0])) == bytes([0, 127, 254, 255, 254])
    assert encode_float16(torch.tensor([1.0, -2.0, torch.inf])) == bytes([0, 0x3C, 0, 0xC0, 0, 0x7C])


def test_starts_that_stood_there_before(functions, tmp_path):
    """What `init` "same" was, the functions before the first step tell: here a ReLU, and something that has no name."""
    path = write_run(tmp_path / "run", functions, init="same")
    first = functions_of(small_network())
    first["3"]["heights"] += torch.rand(4, 9)
    RunFolder(path).write_tensors("snapshots/step-00000000.pt", first)
    run = read_run_data(path)
    assert run.starts == {"1": "relu"}
    assert [layer["start"] for layer in gallery(run)["layers"]] == ["relu", None]


def test_a_layer_wise_unit_has_the_inputs_of_all_channels(tmp_path):
    functions = functions_of(small_network("layer"))
    aligned = inputs_of(functions, channels=2)
    for unit in aligned:
        unit.low, unit.high = [-4.0, 0.0], [0.0, 4.0]
        unit.histogram = [[100] * 32, [300] * 16 + [0] * 16]
    run = read_run_data(write_run(tmp_path / "run", functions, epochs=1, alignment=aligned, granularity="layer"))
    data = gallery(run)
    content = zlib.decompress(base64.b64decode(data["bytes"]))
    low, high = torch.frombuffer(bytearray(content[-36:-32]), dtype=torch.float16).tolist()
    assert (low, high) == (-4, 4)
    # bars are twice as wide now: 200 in each of the first 16, 600 in each of the next 8, none in the last 8
    assert list(content[-32:]) == [85] * 16 + [255] * 8 + [0] * 8


def test_what_does_not_fit_is_left_out(run):
    """First moments between the first and the last, then the distributions of inputs."""
    run = read_run_data(run)
    whole = gallery(run)
    size = len(whole["bytes"])
    assert whole["left_out"] == []
    assert [moment["step"] for moment in whole["moments"]] == [0, 10, 20, 30, 40]
    some = gallery(run, limit=size - 100)
    assert len(some["bytes"]) <= size - 100
    assert [moment["step"] for moment in some["moments"]] in ([0, 10, 30, 40], [0, 20, 40])
    assert some["left_out"] == [f"{5 - len(some['moments'])} of 5 snapshots"]
    assert some["bars"] == 32
    least = gallery(run, limit=10)
    assert [moment["step"] for moment in least["moments"]] == [0, 40]
    assert least["left_out"] == ["3 of 5 snapshots", "the distributions of inputs"]
    assert least["bars"] == 0


# Charts.


def test_ticks():
    assert charts.ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert charts.ticks(-0.3, 0.31) == [-0.3, -0.2, -0.1, 0, 0.1, 0.2, 0.3]
    assert charts.log_ticks(0.03, 3) == [0.05, 0.1, 0.2, 0.5, 1, 2]
    assert charts.log_ticks(0.001, 3) == [0.001, 0.01, 0.1, 1]
    assert charts.log_ticks(1.31, 1.7) == [1.4, 1.5, 1.6, 1.7]


def test_lines_are_where_their_numbers_are():
    drawn = charts.lines([charts.Line("a", "first", [(1, 10), (2, 1000)])], "x", "y", mark=(1, "here"), log=True)
    (points,) = re.findall(r'class="line first" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', drawn)
    x0, y0, x1, y1 = map(float, points)
    (mark,) = re.findall(r'class="mark" d="M([\d.]+) ', drawn)
    assert float(mark) == x0
    rows = {float(name): float(y) for y, name in re.findall(r'y="([\d.]+)" text-anchor="end">(\d+)<', drawn)}
    assert rows[100] - 4 == pytest.approx((y0 + y1) / 2, abs=0.11)  # the factor from 10 to 100 is that from 100 to 1000
    assert x1 - x0 == pytest.approx(x0 - charts._LEFT, abs=0.11)


def test_names_of_lines_do_not_overlap():
    lines = [charts.Line(name, "first", [(1, y)]) for name, y in (("a", 0), ("b", 0), ("c", 0.1), ("d", 10), ("e", 10))]
    drawn = charts.lines(lines, "x", "y")
    places = sorted(float(y) for y in re.findall(r'class="name first" x="[\d.]+" y="([\d.]+)"', drawn))
    assert all(b - a >= 12.9 for a, b in itertools.pairwise(places))
    assert places[-1] <= charts.HEIGHT - charts._BOTTOM + 0.1
