"""The page in a real browser: it loads in silence, and what a person does with keys and controls changes what is drawn."""

from itertools import pairwise

import pytest
import torch
from browser import browser, missing
from report_page_helpers import functions_of, grown, inputs_of, small_network, write_run

from pwlu import reference
from pwlu.lab.runs.run_folder import RunFolder
from pwlu.report.page import page
from pwlu.report.run_data import read_run_data

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

MINUS, DASH = "\N{MINUS SIGN}", "\N{EN DASH}"
LEARNED = "document.getElementById('learned').getAttribute('d')"
CAPTION = "document.getElementById('caption').textContent"
LAYERS = (
    "(async () => { const data = JSON.parse(document.getElementById('data').textContent);"
    "return read(data, await inflate(data.bytes)); })()"
)


@pytest.fixture(scope="module")
def window():
    with browser() as tab:
        yield tab


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A V, a line and ReLUs in the first layer, whatever in the second; one moment has a parameter that is not finite."""
    torch.manual_seed(0)
    functions = grown(functions_of(small_network()), 0.3)
    x = torch.linspace(-3, 3, 9)
    functions["1"]["heights"] = torch.stack([x.relu(), x.abs(), x, x.relu(), x.abs(), x.relu()])
    path = write_run(tmp_path_factory.mktemp("runs") / "run", functions, alignment=inputs_of(functions))
    first = functions_of(small_network())
    first["3"]["heights"][0, 3] = torch.nan
    RunFolder(path).write_tensors("snapshots/step-00000000.pt", first)
    written(path)
    return path


def written(path):
    """The page beside what it was made from."""
    (path / "report.html").write_text(page(read_run_data(path)))
    return path / "report.html"


@pytest.fixture
def tab(window, run):
    """The page as it is when it was just opened, on a wide screen, in the light."""
    window.size(1200)
    window.page.emulate_media(color_scheme="light")
    window.open(run / "report.html")
    yield window
    assert window.problems == []


def focus(tab, selector):
    tab.value(f"document.querySelector({selector!r}).focus()")


def choices(tab):
    """Layer, channel and time, as the controls have them."""
    chosen = "Number(document.querySelector('[name=layer]:checked').value)"
    return tuple(tab.value(expression) for expression in (chosen, *(f"Number({i}.value)" for i in ("channel", "time"))))


# Loading.


def test_it_asks_for_nothing_else(tab, run):
    assert tab.requests == [(run / "report.html").as_uri()]
    # and could not: neither may it load anything, nor run a script that is not its own
    assert tab.value("fetch('data:,x').then(() => 'came', () => 'refused')") == "refused"
    tab.value("document.body.appendChild(Object.assign(document.createElement('script'), {text: 'came = 1'})), 0")
    assert tab.value("typeof came") == "undefined"
    assert all("Content Security Policy" in problem for problem in tab.problems)
    assert tab.problems
    tab.problems = []


@pytest.mark.parametrize("kind", ["relu", "kept", "unfinished", "layer", "bare"])
def test_other_runs(window, tmp_path, kind):
    """Each shows what there is, without a complaint in the console."""
    functions = grown(functions_of(small_network("layer" if kind == "layer" else "channel")), 0.3)
    path = tmp_path / "run"
    if kind == "relu":
        write_run(path, {}, activation="relu")
    elif kind == "bare":
        path.mkdir()
        RunFolder(path).write_json("config.json", {"recipe": "digits", "epochs": 3})
    else:
        aligned = None if kind == "unfinished" else inputs_of(functions, 5 if kind == "layer" else None, bars=kind == "layer")
        kept = 0 if kind == "kept" else None
        write_run(path, functions, finished=kind != "unfinished", alignment=aligned, snapshots=kept)
    window.open(written(path))
    assert window.problems == []
    drawn = window.value("document.querySelectorAll('#layers label').length")
    assert drawn == (0 if kind in ("relu", "bare") else 2)
    if drawn:
        assert window.value(LEARNED).count("L") >= 8
        assert window.value("getComputedStyle(document.getElementById('time-control')).display === 'none'") == (kind == "kept")
        bars = {"layer": 32, "kept": 1, "unfinished": 0}[kind]
        assert window.value("document.querySelectorAll('#curve rect.inputs').length") == bars
        assert window.value("channel.disabled") == (kind == "layer")


def test_what_the_script_reads_is_what_was_saved(tab, run):
    """Functions of all moments, and y at many x, as the reference has it."""
    run = read_run_data(run)
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    script = f"Promise.resolve({LAYERS}).then(layers => layers.map(layer => layer.bounds.map((_, moment) => Array.from("
    script += "{length: layer.channels}, (_, channel) => { const unit = unitOf(layer, channel, moment);"
    script += f"return [unit.left, unit.right, {x.tolist()}.map(x => String(valueAt(unit, x)))]; }}))))"
    found = tab.value(script)
    for layer, name in zip(found, run.functions, strict=True):
        for place, (moment, functions) in enumerate(zip(layer, run.snapshots.values(), strict=True)):
            last = place == len(layer) - 1
            unit = [functions[name][key].double() for key in ("left", "right", "heights", "left_slope", "right_slope")]
            for channel, (left, right, values) in enumerate(moment):
                assert left == pytest.approx(unit[0][channel].item(), abs=1e-4 if last else 0.03)
                assert right == pytest.approx(unit[1][channel].item(), abs=1e-4 if last else 0.03)
                y = reference.forward(x, *(p[channel, None] for p in unit), channel_dim=0)
                known = torch.tensor([float(value) for value in values], dtype=torch.float64)
                assert torch.equal(known.isnan(), y.isnan()) or not last
                assert (known - y).abs().nan_to_num().max() <= (1e-3 if last else 0.15)


def test_rounding_is_not_shown_as_a_value(window, tmp_path):
    """A slope of 0 that 16 or 8 bits do not hold exactly; values are shown to the step of their levels."""
    functions = functions_of(small_network())
    for unit in functions.values():
        unit["left_slope"][:], unit["right_slope"][:] = 0.0, 1.0 / 3
        unit["left"][:], unit["right"][:] = -2.0, 3.0
    path = write_run(tmp_path / "run", functions, alignment=inputs_of(functions))
    RunFolder(path).write_tensors("snapshots/step-00000000.pt", functions)
    window.open(written(path))
    facts = "[...document.querySelectorAll('#facts dd')].slice(0, 2).map(e => e.textContent)"
    assert window.value(facts) == [f"{MINUS}2 to 3", "0 and 0.333"]
    window.value("document.getElementById('time').value = 0; document.getElementById('time').dispatchEvent(new Event('input'))")
    assert window.value(facts) == [f"{MINUS}2 to 3", "0 and 0.33"]
    shown = window.value("[-1.67e-6, 8.4e-6, 0.045, 1234.5].map(value => number(value, 3, 1.7e-5))")
    assert shown == ["0", "0", "0.045", "1230"]
    assert window.value("number(-0.0449, 3, 0.006) + number(NaN, 3, 0.1)") == f"{MINUS}0.04{DASH}"
    assert window.problems == []


@pytest.mark.parametrize("known", [True, False])
def test_what_is_shown_before_the_end(window, tmp_path, known):
    """The start of a run that was killed; or functions of which nothing says when they were."""
    functions = functions_of(small_network())
    path = write_run(tmp_path / "run", functions, finished=not known, snapshots=int(known))
    if known:
        RunFolder(path).write_tensors("snapshots/step-00000000.pt", functions)
    else:
        (path / "metrics.jsonl").unlink()
    window.open(written(path))
    when = "step 0, epoch 0, Phase I" if known else "the end of training"
    assert window.value(CAPTION) == f"Layer 1 (1), channel 0 of 6, {when}"
    titles = window.value("[...document.querySelectorAll('#facts dt')].map(e => e.textContent)")
    assert titles[2] == ("shape at step 0" if known else "shape at the end")
    spoken = window.value("curve.getAttribute('aria-label')")
    assert spoken.endswith(f"at {when}; {'at step 0' if known else 'at the end'}: ReLU-like, flat left")
    assert window.value("document.querySelector('.legend li').textContent") == "the function and its bounds"
    assert window.problems == []


def test_shapes_that_are_not_known(window, tmp_path):
    """What units have moved from is not known without their start."""
    functions = functions_of(small_network())
    path = write_run(tmp_path / "run", functions, snapshots=0, init="same")
    window.open(written(path))
    options = window.value("[...shape.options].map(o => [o.textContent, o.disabled])")
    assert [f"moved ({DASH})", True] in options
    assert ["ReLU-like (6)", False] in options


def test_cards(tab):
    """On each, its functions; the first is chosen, as it is in the end."""
    paths = tab.value("[...document.querySelectorAll('#layers label:first-child path')].map(p => p.getAttribute('d'))")
    assert len(paths) == 6
    assert len(set(paths)) > 3
    assert choices(tab) == (0, 0, 4)


# Choosing.


def test_the_channel_by_keyboard(tab):
    focus(tab, "#channel")
    seen = [tab.value(LEARNED)]
    for number in range(1, 3):
        tab.press("ArrowRight")
        seen.append(tab.value(LEARNED))
        assert f"channel {number} of 6" in tab.value(CAPTION)
    assert len(set(seen)) == 3
    tab.press("End")
    assert choices(tab) == (0, 5, 4)
    tab.press("Home")
    assert tab.value(LEARNED) == seen[0]


def test_channels_of_one_shape(tab):
    """Two of the first layer are V-shaped; what no function is cannot be chosen."""
    options = tab.value("[...shape.options].map(o => [o.textContent, o.disabled])")
    assert ["all (6)", False] in options
    assert ["V-shaped (2)", False] in options
    assert ["collapsed (0)", True] in options
    tab.value("shape.value = shape.options[3].value; shape.dispatchEvent(new Event('change'))")
    assert "channel 1 of 6" in tab.value(CAPTION)
    assert "V-shaped" in tab.value("facts.textContent")
    focus(tab, "#channel")
    tab.press("ArrowRight", "ArrowRight")
    assert "channel 4 of 6" in tab.value(CAPTION)


def test_the_layer_by_keyboard(tab):
    before = tab.value(LEARNED)
    focus(tab, "[name=layer]:checked")
    tab.press("ArrowRight")
    assert choices(tab)[0] == 1
    assert tab.value(CAPTION).startswith("Layer 2 (3), channel 0 of 4")
    assert tab.value(LEARNED) != before
    tab.press("ArrowLeft")
    assert tab.value(LEARNED) == before


def test_from_the_table_to_the_layer(tab):
    tab.value("document.querySelectorAll('a[data-layer]')[1].click()")
    assert choices(tab)[0] == 1
    assert tab.value("location.hash") == "#functions"


def test_time(tab):
    """Back to the first step, where it is a ReLU, and on to the end, where it is what it was."""
    last, cards = tab.value(LEARNED), tab.value("layers.innerHTML")
    focus(tab, "#time")
    tab.press("Home")
    assert choices(tab) == (0, 0, 0)
    assert tab.value(CAPTION) == "Layer 1 (1), channel 0 of 6, step 0, epoch 0, Phase I"
    assert tab.value("time.getAttribute('aria-valuetext')") == "step 0, epoch 0, Phase I"
    first = tab.value(LEARNED)
    assert first != last
    assert tab.value("layers.innerHTML") != cards
    # flat to the left of 0: all points left of the middle are on one level, which the 8 bits keep to a pixel or two
    heights = [float(point.split()[1]) for point in first.removeprefix("M").split("L")]
    assert max(heights[:5]) - min(heights[:5]) < 3
    assert heights[0] - heights[-1] > 50
    tab.press("ArrowRight")
    assert tab.value(CAPTION).endswith("step 10, epoch 1, Phase II")
    tab.press("End")
    assert tab.value(LEARNED) == last


def test_axes_stay_as_time_goes_by(tab):
    labels = "[...document.querySelectorAll('#curve text')].map(t => [t.textContent, t.getAttribute('x'), t.getAttribute('y')])"
    before = tab.value(labels)
    focus(tab, "#time")
    for _ in range(4):
        tab.press("ArrowLeft")
        assert tab.value(labels) == before


def test_play(tab):
    """By the space bar; it starts from the beginning and stops at the end."""
    focus(tab, "#play")
    tab.press(" ")
    assert tab.value("play.textContent") == "Pause"
    assert choices(tab)[2] < 4
    tab.page.get_by_role("button", name="Play").wait_for()
    assert choices(tab)[2] == 4
    tab.press(" ")
    tab.press(" ")
    assert tab.value("play.textContent") == "Play"


def test_a_function_that_is_not_finite(tab):
    """Its points that are known are drawn; nothing complains."""
    tab.value("document.querySelectorAll('a[data-layer]')[1].click()")
    focus(tab, "#time")
    tab.press("Home")
    assert "NaN" not in tab.value("curve.outerHTML + layers.innerHTML")


# For everyone.


def test_every_control_is_reached_by_tab_and_seen_there(tab):
    outline = (
        "(() => { const e = document.activeElement; const seen = e.name === 'layer' ? e.parentElement : e;"
        "return [e.id || e.name || e.className, getComputedStyle(seen).outlineStyle, getComputedStyle(seen).outlineWidth]; })()"
    )
    reached = []
    for _ in range(40):
        tab.press("Tab")
        reached.append(tab.value(outline))
    names = [name for name, _, _ in reached]
    for control in ("skip", "theme", "time", "play", "channel", "shape", "layer", "scroll"):
        assert control in names
    assert names.index("theme") < names.index("time") < names.index("channel") < names.index("layer")
    assert all((style, width) == ("solid", "3px") for name, style, width in reached if name)


def test_everything_that_can_be_operated_has_a_name(tab):
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"slider", "button", "combobox", "radio", "link", "image", "radiogroup", "group", "region"}
    found = {}
    for node in nodes:
        role = node.get("role", {}).get("value")
        if role in roles and not node.get("ignored"):
            found.setdefault(role, []).append(node.get("name", {}).get("value", ""))
    assert all(name for role in roles - {"group"} for name in found.get(role, ()))
    assert {"Time", "Channel"} <= set(found["slider"])
    assert {"Dark", "Play"} <= set(found["button"])
    assert {"1 1: 6 channels", "3 2: 4 channels"} <= {" ".join(name.split()) for name in found["radio"]}
    assert any("The function of layer 1 (1), channel 0 of 6" in name for name in found["image"])


def luminance(colour):
    channels = [float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first, second):
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_can_be_read(tab, scheme):
    """The usual measure of contrast: 4.5 for text, 3 for lines that matter."""
    tab.page.emulate_media(color_scheme=scheme)
    paper = tab.value("getComputedStyle(document.body).backgroundColor")
    assert (luminance(paper) > 0.5) == (scheme == "light")
    for selector in ("body", ".kind", ".figures dt", "nav a", "figcaption", ".hint"):
        ink = tab.value(f"getComputedStyle(document.querySelector({selector!r})).color")
        assert contrast(ink, paper) >= 4.5, selector
    for selector in (".chart text", ".chart text.mark"):
        assert contrast(tab.value(f"getComputedStyle(document.querySelector({selector!r})).fill"), paper) >= 4.5, selector
    assert contrast(tab.value("getComputedStyle(document.querySelector('#learned')).stroke"), paper) >= 3
    probe = "(() => { const e = document.body.appendChild(document.createElement('i')); e.style.color = 'var(--heat)';"
    heat = tab.value(probe + "const c = getComputedStyle(e).color; e.remove(); return c; })()")
    assert contrast(heat, tab.value("getComputedStyle(document.body).color")) >= 4.5


def test_the_toggle(tab):
    """It overrules what the system prefers, and says its state."""
    paper = "getComputedStyle(document.body).backgroundColor"
    light, picture = tab.value(paper), tab.page.screenshot()
    assert tab.value("document.getElementById('theme').ariaPressed") == "false"
    focus(tab, "#theme")
    tab.press("Enter")
    assert tab.value("document.getElementById('theme').ariaPressed") == "true"
    assert luminance(tab.value(paper)) < 0.1 < luminance(light)
    assert tab.page.screenshot() != picture
    tab.press("Enter")
    assert tab.value(paper) == light


def test_on_a_phone(tab):
    """Nothing is wider than the screen but what scrolls by itself, and letters are not tiny."""
    tab.size(375, 700, phone=True)
    assert tab.value("document.documentElement.scrollWidth") == 375
    sizes = tab.value(
        "[...document.querySelectorAll('.chart')].map(c => 13.5 * c.getBoundingClientRect().width / c.viewBox.baseVal.width)"
    )
    assert min(sizes) >= 9
    cards = tab.value("[...document.querySelectorAll('#layers label')].map(c => c.getBoundingClientRect().toJSON())")
    assert all(a["top"] == b["top"] and a["width"] == b["width"] > 120 for a, b in pairwise(cards))  # side by side
