"""convert_: what the new activations are and start as; and restore_."""

import copy
import pickle
from collections import OrderedDict, UserDict

import pytest
import torch
import torch.nn.functional as F
from blocks import IMAGES, Net, conv, converted, units
from torch import nn

import pwlu
from pwlu.starts import STARTS


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class NewGELUActivation(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


class Softsign(nn.Module):
    """Of one's own, with slopes far out that nobody knows."""

    def forward(self, x):
        return x / (1 + x.abs())


PIECEWISE_LINEAR = [
    nn.ReLU(),
    nn.ReLU6(),
    nn.LeakyReLU(0.2),
    nn.Hardtanh(-2, 2),
    nn.Hardtanh(0.0, 1.0),
    nn.Hardtanh(-0.7, 2.2),
    nn.Hardsigmoid(),
]
SMOOTH = [
    nn.ELU(0.5),
    nn.CELU(2.0),
    nn.SELU(),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.SiLU(),
    nn.Mish(),
    nn.Hardswish(),
    nn.Softplus(2.0),
    nn.Sigmoid(),
    nn.Tanh(),
    QuickGELU(),
    NewGELUActivation(),
    Softsign(),
]
EVERYTHING = (*pwlu.DEFAULT_KINDS, "hardtanh", "hardsigmoid", "softplus", "sigmoid", "tanh", Softsign)


@pytest.mark.parametrize("intervals", [7, 16])
@pytest.mark.parametrize("act", PIECEWISE_LINEAR + SMOOTH, ids=str)
def test_starts_as_what_stood_there(act, intervals):
    """Within the error that the report tells: 0 for what bends only at knots."""
    model = nn.Sequential(nn.Conv2d(1, 1, 1), copy.deepcopy(act))
    (site,) = pwlu.convert_(model, torch.randn(1, 1, 4, 4), kinds=EVERYTHING, init="same", intervals=intervals)
    x = torch.cat([torch.linspace(-100, 100, 5001), 3 * torch.randn(5000)]).view(1, 1, 1, -1)
    # The error is the largest on points 0.01 apart where functions bend: 0.005^2 / 2 max|f''| more in between, and rounding.
    unit = pickled(model)[1]
    bound = site.error + 0.005**2 + 8 * torch.finfo().eps * (x.abs() + sum(map(abs, unit.bounds)))
    assert ((unit(x) - act(x)).abs() <= bound).all()
    unit.reset_parameters()
    assert torch.equal(unit(x), model[1](x))
    if not isinstance(act, Softsign):
        assert site.error < (1e-12 if act in PIECEWISE_LINEAR else 0.6 / intervals)


def test_relu_exactly():
    model = nn.Sequential(conv(), nn.ReLU())
    pwlu.convert_(model, IMAGES, init="same")
    x = 5 * torch.randn(2, 4, 30, 30)
    assert torch.equal(model[1](x), F.relu(x))


@pytest.mark.parametrize(
    ("act", "kinks"),
    [(nn.ReLU6(), (0, 6)), (nn.LeakyReLU(0.2), (0,)), (nn.ELU(0.5), (0,)), (nn.Hardtanh(-2, 2), (-2, 2)), (nn.SELU(), (0,))],
    ids=str,
)
def test_knots_on_kinks(act, kinks):
    model = nn.Sequential(conv(), act)
    pwlu.convert_(model, IMAGES, init="same", intervals=13, kinds=EVERYTHING)
    left, right = model[1].bounds
    places = [(kink - left) / (right - left) * 13 for kink in kinks]
    assert places == pytest.approx([round(place) for place in places], abs=1e-9)


@pytest.mark.parametrize(
    ("options", "bounds", "inits", "known"),
    [
        ({"init": "relu"}, [(-3, 3)] * 2, ["relu"] * 2, [False, False]),
        ({}, [(-2.727, 6), (-2.75, 2.75)], ["relu6", "gelu"], [True, True]),
        ({"init": "same", "bounds": (-2, 2)}, [(-2, 6), (-2, 2)], ["relu6", "gelu"], [True, True]),
        ({"init": "gelu"}, [(-2.75, 2.75)] * 2, ["gelu"] * 2, [False, True]),
        ({"init": F.gelu, "bounds": (-4, 4)}, [(-4, 4)] * 2, ["gelu"] * 2, [False, True]),
        ({"init": torch.sin, "bounds": (-4, 4)}, [(-4, 4)] * 2, [torch.sin] * 2, [False, False]),
        ({"init": "relu6"}, [(-2.727, 6)] * 2, ["relu6"] * 2, [True, False]),
    ],
)
def test_bounds_and_starts(options, bounds, inits, known):
    """Bounds fit the start, unless they are given; an error is known where the start is what stood there."""
    model = nn.Sequential(conv(), nn.ReLU6(), conv(4, 5), nn.GELU())
    report = pwlu.convert_(model, IMAGES, **options)
    new = list(units(model).values())
    for unit, expected in zip(new, bounds, strict=True):
        assert unit.bounds == pytest.approx(expected, abs=1e-3)
    assert [getattr(unit.init, "function", unit.init) for unit in new] == inits
    assert [site.error is not None for site in report] == known


class Noisy(Net):
    """Draws random numbers in evaluation too, and counts its calls in a buffer."""

    def __init__(self):
        super().__init__(conv=conv(), act=nn.SiLU())
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return {"y": [F.dropout(self.act(self.conv(x)), 0.5, training=True)], "calls": self.calls.clone()}


@pytest.mark.parametrize(("options", "most"), [({}, 0.06), ({"init": "relu"}, 1.0)])
def test_the_report_says_how_far_outputs_change(options, most):
    """On the sample, with the same random numbers before and after; the model and its random state are not touched."""
    torch.manual_seed(3)
    model, before = Noisy(), torch.get_rng_state()
    original = copy.deepcopy(model)
    report = pwlu.convert_(model, IMAGES, **options)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.calls == 0
    expected = original.eval()(IMAGES)["y"][0]
    torch.set_rng_state(before)
    difference = (model.eval()(IMAGES)["y"][0] - expected).abs().max().item()
    assert 0 < report.change.maximum < most
    assert report.change.maximum == pytest.approx(difference, rel=1e-6)
    assert report.change.relative == pytest.approx(difference / max(expected.abs().max().item(), 1.0), rel=1e-6)  # 1: the calls
    text = f"outputs change by up to {difference:.2g}, {report.change.relative:.2g} of the largest output"
    assert f"On the sample, in evaluation mode, {text}." in str(report)


def test_nothing_is_said_of_outputs_that_do_not_change():
    report = pwlu.convert_(nn.Sequential(conv(), nn.ReLU()), IMAGES)
    assert report.change is None
    assert "outputs" not in str(report)


class Filtered(Net):
    def forward(self, x):
        y = self.act(self.conv(x))
        return y[y < 0]


def test_outputs_that_cannot_be_compared():
    report = pwlu.convert_(Filtered(conv=conv(), act=nn.SiLU()), IMAGES, init="relu")
    assert report.notes == ["In evaluation mode the outputs on the sample have other shapes than before."]
    with torch.device("meta"):
        report = pwlu.convert_(nn.Sequential(conv(), nn.SiLU()), torch.empty(2, 3, 7, 5))
    (note,) = report.notes
    assert note == "How far the outputs changed could not be measured (RuntimeError: the model is on the meta device)."


def test_options_are_given_by_name():
    with pytest.raises(TypeError, match="positional"):
        pwlu.convert_(nn.Sequential(conv(), nn.ReLU()), IMAGES, "relu")


def test_realign_keeps_the_start():
    model = nn.Sequential(conv(), nn.LeakyReLU(0.2))
    pwlu.convert_(model, IMAGES, init="same")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pwlu.TwoPhase(model, optimizer, realign_at=1)
    model(IMAGES).sum().backward()
    optimizer.step()
    unit = pickled(model)[1]
    knots = torch.stack([torch.linspace(a, b, 17) for a, b in zip(unit.left.tolist(), unit.right.tolist(), strict=True)])
    assert not torch.equal(unit.left, torch.full((4,), -3.0))
    torch.testing.assert_close(unit.heights.detach(), F.leaky_relu(knots, 0.2))


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize(("granularity", "channels"), [("channel", 4), ("layer", 1)])
def test_the_units(granularity, channels):
    model = nn.Sequential(conv(), nn.ReLU()).double()
    report = pwlu.convert_(model, IMAGES.double(), intervals=8, granularity=granularity)
    unit = model[1]
    assert (unit.channels, unit.intervals, unit.channel_dim, unit.left.dtype) == (channels, 8, 1, torch.float64)
    assert report.parameters == report.converted[0].parameters == channels * 13
    half = nn.Sequential(conv(), nn.ReLU()).bfloat16()
    pwlu.convert_(half, IMAGES.bfloat16())
    assert half[1].left.dtype == torch.float32
    assert half(IMAGES.bfloat16()).dtype == torch.bfloat16


def test_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(conv(), nn.GELU())
        (site,) = pwlu.convert_(model, torch.empty(2, 3, 7, 5), init="same")
    assert site.error < 0.02
    assert all(p.is_meta for p in model[1].parameters())


class Sum(Net):
    def forward(self, images, *, more):
        return F.relu(self.conv(images)) + F.relu(self.conv(more[0]))


class Product(Net):
    def forward(self, a, b):
        return F.relu(self.layer(a, b))


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
def test_samples(kind):
    """What the model is called with: a tensor, a tuple of arguments, or a dictionary of keyword arguments, of any sort."""
    assert converted(Sum(conv=conv()), kind(images=IMAGES, more=[IMAGES])) == {"relu": 4, "relu_2": 4}
    assert converted(Product(layer=nn.Bilinear(3, 4, 5)), (torch.randn(2, 3), torch.randn(2, 4))) == {"relu": 5}


def test_other_activations():
    def net():
        return nn.Sequential(conv(), nn.ReLU(), conv(4, 5), nn.ReLU())

    model = net()
    converted(model, to="swish")
    assert all(type(model[i]) is nn.SiLU for i in (1, 3))
    model, seen = net(), []
    pwlu.convert_(model, IMAGES, to=lambda channels, site: seen.append((channels, site.name)) or nn.PReLU(channels))
    assert seen == [(4, "1"), (5, "3")]
    assert [model[i].num_parameters for i in (1, 3)] == [4, 5]
    model = net()
    pwlu.convert_(model, IMAGES, to=lambda channels, site: nn.PReLU(channels), granularity="layer")
    assert model[3].num_parameters == 1


def test_every_start_is_a_kind():
    assert set(EVERYTHING) - {Softsign} == set(STARTS) - {"identity", "swish"}


# Taking it back.


class Doubled(nn.Module):
    """A module without state that is an activation of its own and has one inside."""

    def forward(self, x):
        return 2 * F.relu(x)


class Everything(Net):
    def __init__(self):
        act, doubled = nn.GELU(), Doubled()
        super().__init__(
            conv=conv(), act=act, again=act, doubled=doubled, twin=doubled, last=nn.TransformerEncoderLayer(4, 2, 8, 0.0)
        )

    def forward(self, x):
        x = self.doubled(self.again(self.act(self.act(self.conv(x)))))
        x = self.twin(x)
        return F.elu(self.last(x.flatten(2).transpose(1, 2)))


def once(model):
    pwlu.convert_(model, IMAGES)


def fused(model):
    once(model)
    pwlu.fuse_(model)


def in_steps(model):
    pwlu.convert_(model, IMAGES, kinds="elu")
    pwlu.convert_(model, IMAGES, kinds="relu", to="relu")
    pwlu.convert_(model, IMAGES, init="same")
    pwlu.convert_(model, IMAGES, kinds=Doubled, init="relu")


@pytest.mark.parametrize("convert", [once, fused, in_steps])
def test_restore(convert):
    model = Everything().eval()
    original = copy.deepcopy(model)
    convert(model)
    assert len(units(model)) == {once: 7, fused: 0, in_steps: 7}[convert]
    removed = pwlu.restore_(model)
    assert {"act", "act_2", "again", "elu", "last.relu"} < set(removed)
    assert repr(model) == repr(original)
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]
    assert [sorted(vars(m)) for m in model.modules()] == [sorted(vars(m)) for m in original.modules()]
    assert list(model.state_dict()) == list(original.state_dict())
    assert torch.equal(model(IMAGES), original(IMAGES))
    with pytest.raises(ValueError, match=r"restore_: Everything has nothing that pwlu\.convert_ put there"):
        pwlu.restore_(model)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", nn.GELU()])
def test_the_fast_path_of_transformers(activation, root, padded):
    """torch has, for evaluation, one kernel for a whole layer, with an activation of its own."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, activation=activation, batch_first=True)
    model = (layer if root else nn.TransformerEncoder(layer, 2)).eval()
    flags = [
        (m.activation_relu_or_gelu, getattr(model, "use_nested_tensor", None))
        for m in model.modules()
        if type(m) is type(layer)
    ]
    x, options = torch.randn(2, 5, 4), {}
    if padded:
        options = {"src_key_padding_mask": torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]).bool()}
    expected = model(x, **options)  # with gradients, so not on the fast path
    error = max(site.error for site in pwlu.convert_(model, x, init="same").converted)
    with torch.no_grad():
        y = model(x, **options)
        torch.testing.assert_close(y, expected, rtol=0, atol=10 * error + 1e-5)
        for unit in units(model).values():
            unit.heights += 1
        assert not torch.allclose(model(x, **options), y, atol=0.1)
    pwlu.restore_(model)
    assert flags == [
        (m.activation_relu_or_gelu, getattr(model, "use_nested_tensor", None))
        for m in model.modules()
        if type(m) is type(layer)
    ]
