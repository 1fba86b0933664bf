"""Alignment: the IOU of bounds and inputs, on models of every kind, which are left as they were."""

import copy
import json
import math
import re

import pytest
import torch
from blocks import IMAGES, Net, conv
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pwlu
from pwlu.analysis.alignment import Alignment, alignment, iou, without_histograms

BOUND = 1 / 128  # what pwlu.analysis.quantiles promises of an IOU


def model_of(*modules):
    return nn.Sequential(*modules)


def exact(x, left, right):
    """Return the quantiles and the IOU of the values x of one channel."""
    x = x.double().flatten().sort().values
    p5, p95 = (x[math.ceil(share * len(x)) - 1].item() for share in (0.05, 0.95))
    common = max(0.0, min(right, p95) - max(left, p5))
    return p5, p95, common / (right - left + p95 - p5 - common)


@pytest.mark.parametrize(
    ("interval", "wanted"),
    [
        ((-3, 3), 1.0),
        ((-1, 2), 0.5),
        ((-6, 6), 0.5),
        ((0, 6), 1 / 3),
        ((-9, 0), 0.25),
        ((4, 5), 0.0),  # disjoint
        ((3, 5), 0.0),  # touching
        ((1, 1), 0.0),  # a constant input
        ((math.nan, math.nan), math.nan),  # no input
    ],
)
def test_formula(interval, wanted):
    tensors = [torch.tensor([float(end)]) for end in (-3, 3, *interval)]
    torch.testing.assert_close(iou(*tensors).item(), wanted, rtol=0, atol=1e-7, equal_nan=True)
    other_way = iou(*tensors[2:], *tensors[:2]).item()
    torch.testing.assert_close(other_way, wanted, rtol=0, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("inputs", [(-1.0, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("bounds", [(3.0, -3.0), (1.0, 1.0)])
def test_formula_where_bounds_have_crossed(bounds, inputs):
    assert iou(*(torch.tensor([end]) for end in (*bounds, *inputs))).item() == 0


def unit_with_bounds(left, right, **options):
    unit = pwlu.PWLU(len(left), **options)
    with torch.no_grad():
        unit.left.copy_(torch.tensor(left))
        unit.right.copy_(torch.tensor(right))
    return unit


def test_channels():
    left, right = [-3.0, 1.0, -0.1, -10.0, 5.0, 2.0], [3.0, 2.0, 0.1, 10.0, 6.0, -2.0]
    unit = unit_with_bounds(left, right)
    batches = [torch.randn(50, 6, 9) for _ in range(4)]
    found = alignment(model_of(unit), batches)
    assert (found.model, found.batches, len(found), found.unreached) == ("Sequential", 4, 1, [])
    (measured,) = found
    assert (measured.name, measured.channels, measured.count) == ("0", 6, [4 * 50 * 9] * 6)
    x = torch.cat(batches)
    for c in range(6):
        assert (measured.left[c], measured.right[c]) == (unit.left[c].item(), unit.right[c].item())
        p5, p95, wanted = exact(x[:, c], left[c], right[c])
        if c == 5:  # the bounds have crossed
            assert (measured.iou[c], measured.outside[c]) == (0.0, 1.0)
            continue
        for value, estimate in ((p5, measured.p5[c]), (p95, measured.p95[c])):
            distance = abs(value - (left[c] + right[c]) / 2)
            assert abs(value - estimate) <= (distance + (right[c] - left[c]) / 2) / 256 + 1e-6
        assert abs(measured.iou[c] - wanted) <= BOUND
        assert measured.outside[c] == ((x[:, c] < unit.left[c]) | (x[:, c] >= unit.right[c])).double().mean().item()
    assert measured.iou[4] == 0  # far from all inputs
    assert 0.1 < measured.iou[1] < 0.4 < measured.iou[0] < 0.7


def test_a_normal_distribution_scores_055():
    """After realignment, bounds are at mu +- 3 sigma, and p5 and p95 at mu +- 1.645 sigma, known to W/512."""
    n = 20_000
    x = 7 + 0.3 * torch.special.ndtri((torch.arange(n, dtype=torch.float64) + 0.5) / n).float()
    model = model_of(pwlu.PWLU())
    (unit,) = model
    unit.statistics.running_mean.copy_(x.mean())
    unit.statistics.running_std.copy_(x.std())
    unit.statistics.updates.fill_(1)
    pwlu.realign_(model)
    found = alignment(model, [x[:, None]])
    assert found.iou == [pytest.approx(2 * 1.6449 / 6, abs=1 / 256)]
    assert found.units[0].outside == [pytest.approx(0.0027, abs=1 / n)]
    assert "median IOU 0.55 over 1 channel; 0.27 % of inputs outside" in str(found)


@pytest.mark.parametrize("channel_dim", [1, -1])
def test_layer_wise(channel_dim):
    """Compare each channel of the input with the shared bounds."""
    x = torch.randn(400, 3, 5) * torch.tensor([0.1, 1.0, 3.0, 5.0, 0.5])
    x = x if channel_dim == -1 else x.transpose(1, 2)
    unit = unit_with_bounds([-2.0], [4.0], channel_dim=channel_dim)
    (measured,) = alignment(model_of(unit), [x])
    assert (measured.left, measured.right) == ([-2.0] * 5, [4.0] * 5)
    for c in range(5):
        assert abs(measured.iou[c] - exact(x.select(channel_dim, c), -2.0, 4.0)[2]) <= BOUND


def test_layer_wise_on_one_dimension():
    (measured,) = alignment(model_of(pwlu.PWLU()), [torch.randn(100), torch.randn(50)])
    assert (measured.channels, measured.count) == (1, [150])


class Levels(Net):
    """Apply one head to several levels; `by_keyword` says how the unit is called."""

    by_keyword = False

    def forward(self, *levels):
        return [self.act(x=level) if self.by_keyword else self.act(level) for level in levels]


@pytest.mark.parametrize("by_keyword", [False, True])
def test_calls_of_one_unit_are_pooled(by_keyword):
    model = Levels(act=unit_with_bounds([-3.0] * 4, [3.0] * 4))
    model.by_keyword = by_keyword
    levels = [torch.randn(5, 4, n, n) + n for n in (1, 3, 6)]
    (measured,) = alignment(model, [tuple(levels)])
    assert measured.count == [5 * (1 + 9 + 36)] * 4
    everything = torch.cat([level.movedim(1, 0).reshape(4, -1) for level in levels], 1)
    for c in range(4):
        assert abs(measured.iou[c] - exact(everything[c], -3.0, 3.0)[2]) <= BOUND


class Heads(Net):
    """Hold units side by side, so that no unit gets the rounded output of another."""

    def forward(self, x):
        return [unit(x) for unit in (self.own, self.shared, self.last)]


def test_on_the_device(device):
    """Inputs are counted on the device, and the counts equal those of the CPU."""
    model = Heads(
        own=unit_with_bounds([-3.0, 1.0, -0.1, 2.0], [3.0, 2.0, 0.1, -2.0]),
        shared=unit_with_bounds([-2.0], [4.0]),
        last=pwlu.PWLU(5, channel_dim=-1),
    )
    batches = [torch.randn(50, 4, 9, 5) * 10.0**power for power in (-1, 0, 1)]
    batches[1][0, :, 0, 0] = torch.tensor([math.nan, math.inf, -math.inf, math.nan])
    wanted = alignment(model, batches)
    model.to(device)
    found = alignment(model, [batch.to(device) for batch in batches])
    assert sum(map(sum, (unit.count for unit in found))) == 3 * (3 * 50 * 4 * 9 * 5 - 4)
    assert found == wanted


def test_levels_with_other_channels_are_taken_as_one():
    levels = [torch.randn(5, n, 7) for n in (4, 6, 4)]
    (measured,) = alignment(Levels(act=pwlu.PWLU()), [tuple(levels)])
    assert measured.count == [5 * 7 * 14]
    assert abs(measured.iou[0] - exact(torch.cat([level.flatten() for level in levels]), -3.0, 3.0)[2]) <= BOUND


def test_a_unit_that_stands_in_two_places_is_one():
    unit = pwlu.PWLU(4)
    (measured,) = alignment(model_of(conv(), unit, conv(4, 4), unit), [IMAGES])
    assert (measured.name, measured.count) == ("1", [2 * 2 * 35] * 4)


def small():
    """Something that behaves otherwise in training, and a flag that differs from the others."""
    torch.manual_seed(3)
    model = model_of(conv(), nn.BatchNorm2d(4), nn.Dropout(0.5), pwlu.PWLU(4), conv(4, 5), pwlu.PWLU())
    model[1].eval()
    return model


def test_in_evaluation_mode_and_without_gradients():
    model, seen = small(), []
    model[-1].register_forward_hook(lambda unit, x, y: seen.append((unit.training, y.requires_grad)))
    (measured, _) = alignment(model, [IMAGES])
    with torch.no_grad():
        x = model[:3].eval()(IMAGES)
    assert seen == [(False, False)]
    for c in range(4):
        assert abs(measured.iou[c] - exact(x[:, c], -3.0, 3.0)[2]) <= BOUND


@pytest.mark.parametrize("what", ["nothing", "the model", "the batches", "a batch"])
def test_the_model_is_left_as_it_was(what):
    """Also when something fails in the middle."""

    def hook(module, args, output):
        calls.append(len(calls))
        if what == "the model" and len(calls) == 2:
            raise ArithmeticError("in the middle")

    def batches():
        yield IMAGES
        assert what != "the batches", "in the middle"
        yield "in the middle" if what == "a batch" else IMAGES

    model, calls = small(), []
    model[3].register_forward_hook(hook)
    pwlu.TwoPhase(model, torch.optim.SGD(model.parameters(), lr=0.1), realign_at=3)
    flags = [module.training for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    hooks = [{k: dict(v) for k, v in vars(m).items() if "hooks" in k and v is not None} for m in model.modules()]
    if what == "nothing":
        alignment(model, batches())
    else:
        with pytest.raises((ArithmeticError, AssertionError, TypeError)):
            alignment(model, batches())
    assert len(calls) == (1 if what in ("the batches", "a batch") else 2)
    assert flags == [module.training for module in model.modules()]
    assert hooks == [{k: dict(v) for k, v in vars(m).items() if "hooks" in k and v is not None} for m in model.modules()]
    assert torch.is_grad_enabled()
    after = model.state_dict()
    assert state.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in state.items())
    assert not model[3].statistics.pool.any()  # Phase I has seen nothing


class Merging(nn.Linear):
    """Change weights when the mode changes, as adapters do that merge their weights for evaluation."""

    def train(self, mode=True):
        with torch.no_grad():
            self.weight.mul_(2)
        return super().train(mode)


def test_no_module_is_told_to_change_its_mode():
    model = model_of(Merging(3, 3), pwlu.PWLU(3))
    before = model[0].weight.clone()
    alignment(model, [torch.randn(9, 3)])
    assert torch.equal(model[0].weight, before)
    assert all(module.training for module in model.modules())


def test_one_pass_over_a_generator():
    taken = []

    def batches():
        for number in range(5):
            taken.append(number)
            yield IMAGES + number

    everything = alignment(small(), batches())
    assert (everything.batches, taken) == (5, [0, 1, 2, 3, 4])
    assert alignment(small(), [IMAGES + number for number in range(5)]) == everything
    taken.clear()
    some = alignment(small(), batches(), limit=2)
    assert (some.batches, taken) == (2, [0, 1])
    assert some == alignment(small(), [IMAGES, IMAGES + 1])


class Scaled(Net):
    def forward(self, x, factor=1.0):
        return self.act(x * factor)


def test_kinds_of_batches():
    model = Scaled(act=pwlu.PWLU(3))
    wanted = alignment(model, [IMAGES * 2])
    for batch in ((IMAGES, 2.0), (IMAGES * 2,), {"x": IMAGES, "factor": 2.0}):
        assert alignment(model, [batch]) == wanted


def test_a_unit_that_is_never_reached_is_listed():
    model = Scaled(act=pwlu.PWLU(3), spare=pwlu.PWLU(3))
    found = alignment(model, [IMAGES])
    assert ([unit.name for unit in found], found.unreached) == (["act"], ["spare"])
    assert str(found).endswith("\nNever reached: spare")


def test_a_model_that_is_a_unit():
    found = alignment(pwlu.PWLU(3), [IMAGES])
    assert found.units[0].name == ""
    assert "\nthe model " in str(found)


def test_what_is_not_finite():
    x = IMAGES.clone()
    x[0, 0, 0, :2], x[:, 2] = torch.tensor([math.inf, math.nan]), math.nan
    (measured,) = found = alignment(pwlu.PWLU(3), [x])
    assert measured.nonfinite == [2, 0, 70]
    assert measured.count == [68, 70, 0]
    assert all(math.isnan(column[2]) for column in (measured.p5, measured.p95, measured.iou, measured.outside, measured.low))
    assert measured.histogram[2] == [0] * 32
    assert len(found.iou) == 2
    assert re.search(r"the model +3 +0\.\d\d +\d\.\d\d % +72\n", str(found))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model(in_place):
    """The compiled code does not contain our hooks."""
    model = model_of(conv(), pwlu.PWLU(4))
    wanted = alignment(model, [IMAGES])
    if in_place:
        model.compile(backend="eager")
        compiled = model
    else:
        compiled = torch.compile(model, backend="eager")
    compiled.eval()
    with torch.no_grad():
        compiled(IMAGES)
    found = alignment(compiled, [IMAGES])
    assert [unit.iou for unit in found] == [unit.iou for unit in wanted]
    assert not found.unreached


def test_autocast_and_float64():
    model = model_of(conv(), pwlu.PWLU(4))
    wanted = alignment(model, [IMAGES]).iou
    with torch.autocast("cpu", torch.bfloat16):
        assert alignment(model, [IMAGES]).iou == pytest.approx(wanted, abs=0.05)
    assert alignment(model.double(), [IMAGES.double()]).iou == pytest.approx(wanted, abs=1e-5)


def test_whatever_the_default_device_is():
    model = small()
    wanted = alignment(model, [IMAGES])
    with torch.device("meta"):
        assert alignment(model, [IMAGES]) == wanted


def test_histogram():
    """Of 10,000 inputs: all but two thousandths, and half a one lost or won in each bar."""
    x = torch.randn(3000, 3)
    (measured,) = found = alignment(pwlu.PWLU(3), [x])
    assert all(len(bars) == 32 for bars in measured.histogram)
    assert all(10_000 * 0.998 - 16 <= sum(bars) <= 10_000 + 16 for bars in measured.histogram)
    for c in range(3):
        assert measured.low[c] < measured.p5[c] < measured.p95[c] < measured.high[c]
    (unit,) = bare = alignment(pwlu.PWLU(3), [x], histogram=False)
    assert (unit.low, unit.high, unit.histogram) == ([], [], [])
    assert without_histograms(found) == bare
    assert measured.histogram  # a copy was made


def test_rows():
    rows = alignment(small(), [IMAGES]).as_dicts()
    assert len(rows) == 4 + 5
    assert list(rows[4]) == ["unit", "channel", "left", "right", "p5", "p95", "iou", "outside", "count", "nonfinite"]
    assert (rows[3]["unit"], rows[3]["channel"], rows[8]["unit"], rows[8]["channel"]) == ("3", 3, "5", 4)
    assert rows[8]["iou"] == alignment(small(), [IMAGES]).units[1].iou[4]


def test_json():
    x = torch.randn(3000, 64)
    x[:, 5] = math.nan
    found = alignment(model_of(pwlu.PWLU(64), pwlu.PWLU()), [x])
    text = found.to_json()
    assert len(text) < 128 * 250
    json.loads(text, parse_constant=pytest.fail)
    again = Alignment.from_json(text)
    assert again.to_json() == text
    assert math.isnan(again.units[0].iou[5])
    for name in ("left", "p5", "p95", "iou", "outside", "high"):
        wanted = torch.tensor([getattr(unit, name) for unit in found], dtype=torch.float64)
        back = torch.tensor([getattr(unit, name) for unit in again], dtype=torch.float64)
        torch.testing.assert_close(back, wanted, rtol=5e-6, atol=0, equal_nan=True)
    assert [unit.histogram for unit in again] == [unit.histogram for unit in found]
    assert len(alignment(model_of(pwlu.PWLU(64)), [x], histogram=False).to_json()) < 64 * 90


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"units": [{"name": "1"}]}', '{"units": [], "batches": 1, "modle": "x"}'])
def test_json_of_something_else(text):
    with pytest.raises(ValueError, match=r"from_json: the text is not JSON written by Alignment\.to_json: "):
        Alignment.from_json(text)


@pytest.mark.parametrize("change", [{"low": [None, -1.0]}, {"p95": [1.0, None]}, {"count": [1e308, 3]}, {"count": [-3, 3]}])
def test_json_with_impossible_numbers(change):
    content = json.loads(alignment(model_of(pwlu.PWLU()), [torch.randn(3, 2)]).to_json())
    content["units"][0] |= change
    with pytest.raises(ValueError, match=f"{next(iter(change))} of '.*' must be (finite|integers)"):
        Alignment.from_json(json.dumps(content))


def test_table():
    assert re.search(r"\nSequential, 1 batch: median IOU 0\.\d\d over 9 channels; ", str(alignment(small(), [IMAGES])))
    lines = str(alignment(small(), [IMAGES, IMAGES])).splitlines()
    assert re.match(r"unit  channels  median IOU  inputs outside  not finite$", lines[0])
    assert re.match(r"3            4        0\.\d\d          0\.00 %           0$", lines[2])
    assert re.match(r"5            5        0\.\d\d +\d\.\d\d %           0$", lines[3])
    assert re.match(
        r"Sequential, 2 batches: median IOU 0\.\d\d over 9 channels; 0\.\d\d % of inputs outside of the bounds", lines[4]
    )
    assert len(lines) == 5


class Two(Net):
    """Requires two arguments, takes three."""

    def forward(self, x, y, mask=None):
        assert mask is None
        return self.small(x + y)


class Any(Net):
    def forward(self, *inputs):
        return self.small(inputs[0])


LABELS = torch.zeros(len(IMAGES), dtype=torch.int64)


@pytest.mark.parametrize(
    ("model", "data", "expected"),
    [
        (lambda: small(), (IMAGES, LABELS), (IMAGES,)),
        (lambda: Two(small=small()), (IMAGES, IMAGES, LABELS), (IMAGES, IMAGES)),
        (lambda: Any(small=small()), (IMAGES, LABELS), (IMAGES,)),
        (lambda: torch.compile(small(), backend="eager"), (IMAGES, LABELS), (IMAGES,)),
    ],
    ids=["one", "two", "any", "compiled"],
)
def test_a_loader_of_inputs_and_labels(model, data, expected):
    """Batches are lists, as DataLoader gives them, or tuples with more items than forward takes."""
    model = model()
    loader = DataLoader(TensorDataset(*data), batch_size=len(IMAGES))
    assert isinstance(next(iter(loader)), list)
    wanted = alignment(model, [expected]).as_dicts()
    assert alignment(model, loader).as_dicts() == wanted
    if not isinstance(model, (Two, Any)):
        assert alignment(model, [data]).as_dicts() == wanted


def test_batches_of_a_loader_go_to_the_device_of_the_model(device):
    model = small().to(device)
    loader = DataLoader(TensorDataset(IMAGES, LABELS), batch_size=4)
    assert alignment(model, loader).as_dicts() == alignment(model, [x.to(device) for x, _ in loader]).as_dicts()


def fused():
    model = small()
    pwlu.fuse_(model)
    return model


@pytest.mark.parametrize(
    ("model", "batches", "options", "text"),
    [
        (conv(), [IMAGES], {}, r"alignment: Conv2d has no PWLU. Convert it first: pwlu\.convert_\(model, sample\)"),
        (fused(), [IMAGES], {}, r"Sequential has no PWLU. It is already fused: call pwlu\.alignment before pwlu\.fuse_"),
        ("model", [IMAGES], {}, r"alignment: model must be a torch\.nn\.Module, not str\. Write pwlu\.alignment\(model, "),
        (small(), [], {}, "batches is empty. Was it a generator that is already exhausted"),
        (small(), IMAGES, {}, r"batches must be a list of batches or a loader, not a single Tensor: write \[x\]"),
        (small(), {"x": IMAGES}, {}, r"not a single dict: write \[x\]"),
        (small(), None, {}, "batches must be a list of batches or a loader, not None"),
        (small(), [[3, IMAGES]], {}, r"a batch is of type list\. A batch must be .*\(batch\['image'\] for batch in loader\)"),
        (small(), [IMAGES.numpy()], {}, "a batch is of type ndarray. A batch must be an input of the model: a tensor"),
        (small(), [(3, IMAGES)], {}, r"raised this on batch 1\. A batch must be .* \(batch\['image'\] for batch in loader\)"),
        (small(), [IMAGES, IMAGES[:, 1:]], {}, "the model raised this on batch 2"),
        (small(), [IMAGES], {"limit": 0}, r"limit must be an integer of at least 1 \(.*None for all of them\), not 0"),
        (small(), [IMAGES], {"limit": 1.5}, r"limit must be an integer .*None for all of them\), not 1.5"),
        (small(), [IMAGES], {"limit": True}, "not True"),
    ],
)
def test_bad_input(model, batches, options, text):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=text):
        alignment(model, batches, **options)
