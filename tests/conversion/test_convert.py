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
from pwlu.analysis.curves import curves_of
from pwlu.conversion.kinds import ARGUMENTS, prelu_function
from pwlu.initial_functions import INITIAL_FUNCTIONS


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class NewGELUActivation(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


class Sharp(nn.Module):
    """A user-defined activation with outer slopes and unknown bounds."""

    def forward(self, x):
        return 0.5 * x + torch.tanh(3 * x)


class Wide(nn.Module):
    """A user-defined activation with a parameter, much wider than (-3, 3)."""

    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(0.2))

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


PIECEWISE_LINEAR = [
    nn.ReLU(),
    nn.ReLU6(),
    nn.LeakyReLU(0.2),
    nn.Hardtanh(-2, 2),
    nn.Hardtanh(0.0, 1.0),
    nn.Hardtanh(-0.7, 2.2),
    nn.Hardsigmoid(),
    nn.PReLU(),
    nn.Threshold(0.5, 0.5),
    nn.Softshrink(0.7),
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
    nn.LogSigmoid(),
    nn.Tanhshrink(),
    QuickGELU(),
    NewGELUActivation(),
    Sharp(),
    Wide(),
]
EVERYTHING = (*ARGUMENTS, Sharp, Wide)


@pytest.mark.parametrize("intervals", [7, 16])
@pytest.mark.parametrize("act", PIECEWISE_LINEAR + SMOOTH, ids=str)
@pytest.mark.filterwarnings("ignore:convert_. the initial function of 1 PWLU differs by more than 0.1:UserWarning")
def test_starts_as_what_stood_there(act, intervals):
    """The PWLU equals the old activation within the reported error: 0 for functions that bend only at knots."""
    model = nn.Sequential(nn.Conv2d(1, 1, 1), copy.deepcopy(act)).requires_grad_(False)
    (site,) = pwlu.convert_(model, torch.randn(1, 1, 4, 4), kinds=EVERYTHING, init="same", intervals=intervals)
    x = torch.cat([torch.linspace(-100, 100, 5001), 3 * torch.randn(5000)]).view(1, 1, 1, -1)
    # The error is the largest on points 0.01 apart where functions bend: 0.005^2 / 2 max|f''| more in between, and rounding.
    unit = pickled(model)[1]
    bound = (
        site.error
        + 0.005**2 * (4 if isinstance(act, Sharp) else 1)
        + 8 * torch.finfo().eps * (x.abs() + sum(map(abs, unit.bounds)))
    )
    assert ((unit(x) - act(x)).abs() <= bound).all()
    unit.reset_parameters()
    assert torch.equal(unit(x), model[1](x))
    scale = {Sharp: 2, Wide: 5}.get(type(act), 1)
    assert site.error < (1e-12 if act in PIECEWISE_LINEAR else 0.6 / intervals * scale)


class Random(nn.Module):
    def forward(self, x):
        return x.relu() * torch.rand(x.shape)


class WithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x.tanh())


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x.tanh()


class OfAll(nn.Module):
    def forward(self, x):
        return x - x.mean()


class OfMode(nn.Module):
    def forward(self, x):
        return x.sin() if self.training else x.cos()


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (Random(), "is random, or changes its state"),
        (WithDropout(), "is random, or changes its state"),
        (Counting(), "is random, or changes its state"),
        (nn.RReLU(), "is random, or changes its state"),
        (OfAll(), "is not an elementwise function"),
        (OfMode(), "differs between training and evaluation mode"),
    ],
    ids=str,
)
def test_what_nothing_can_start_as_is_refused(act, why):
    """The model stays unchanged, and another start is possible."""
    model = nn.Sequential(conv(), act)
    random = torch.get_rng_state()
    with pytest.raises(
        ValueError, match=rf"convert_: 1 \((.|\n)*\) {why}, so it cannot be the initial function of a PWLU\. .*init='relu'"
    ):
        pwlu.convert_(model, IMAGES, kinds=type(act))
    assert model[1] is act
    assert torch.equal(torch.get_rng_state(), random)
    assert converted(model, kinds=type(act), init="relu") == {"1": 4}


@pytest.mark.parametrize(("tolerance", "intervals"), [(0.03, [16, 16]), (1e-2, [16, 36]), (1e-3, [16, 183])])
def test_a_tolerance_chooses_the_number_of_intervals(tolerance, intervals):
    model = nn.Sequential(conv(), nn.ReLU(), nn.SiLU())
    report = pwlu.convert_(model, IMAGES, tolerance=tolerance)
    assert [unit.intervals for unit in units(model).values()] == intervals
    assert all(site.error <= tolerance for site in report)


class Squared(nn.Module):
    def forward(self, x):
        return x.relu().square()


def test_a_start_that_is_far_off_is_told():
    model = nn.Sequential(conv(), nn.ReLU(), Squared())
    with pytest.warns(UserWarning, match=r"function of 1 PWLU differs by more than 0\.1 from .*, at 2 \(Squared\(\)\)"):
        pwlu.convert_(model, IMAGES, kinds=("relu", Squared))
    assert units(model)["2"].bounds[1] > 5
    with pytest.warns(UserWarning, match=r"differs by more than 1e-09 from .*, at 1 \(Softsign\(\)\)"):
        pwlu.convert_(nn.Sequential(conv(), nn.Softsign()), IMAGES, kinds="softsign", tolerance=1e-9)


def test_bounds_that_the_sample_needs():
    """The reported error then covers the range from the smallest to the largest input."""
    model = nn.Sequential(conv(), Squared()).eval()
    inputs = model[0](IMAGES).detach()
    expected = model(IMAGES)
    (site,) = pwlu.convert_(model, IMAGES, kinds=Squared, bounds="sample")
    assert model[1].bounds == pytest.approx((inputs.min().item(), inputs.max().item()))
    width = (inputs.max() - inputs.min()).item() / 16
    assert 0 < site.error < width**2 / 4 * 1.01  # d^2 / 8 times the second derivative, 2
    assert (model(IMAGES) - expected).abs().max() < site.error + 1e-5


def test_bounds_of_the_sample_that_leave_no_knot_for_a_kink():
    """Then the bounds are the same as without a sample."""
    model = nn.Sequential(conv(), nn.ReLU6())
    (site,) = pwlu.convert_(model, 1e4 * IMAGES, bounds="sample")
    assert site.error < 1e-12
    assert model[1].bounds == pytest.approx((-2.727, 6), abs=1e-3)


# Starts that differ from channel to channel.


@pytest.mark.parametrize("kinds", ["prelu", nn.PReLU])
@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_prelu_exactly(ndim, kinds):
    """nn.PReLU always has its channels in dimension 1, also after a linear layer, which has them in the last."""
    torch.manual_seed(0)
    act = nn.PReLU(4)
    nn.init.normal_(act.weight)
    layer = nn.Conv2d(3, 4, 1) if ndim == 4 else nn.Linear(5, 6 if ndim == 3 else 4)
    x = {2: torch.randn(9, 5), 3: torch.randn(9, 4, 5), 4: IMAGES}[ndim]
    model = nn.Sequential(layer, act).eval()
    expected = copy.deepcopy(model)(x)
    (site,) = pwlu.convert_(model, x, kinds=kinds)
    assert (site.channels, site.channel_dim, site.action) == (4, 1, "converted")
    assert site.error < 1e-12
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    unit = pickled(model)[1]
    unit.reset_parameters()
    assert torch.equal(unit.weight, model[1].weight)
    assert unit.left_slope.tolist() == pytest.approx(act.weight.tolist(), abs=1e-6)
    assert curves_of(model, "test")["1"].start is None  # there is no single one


@pytest.mark.parametrize("act", [nn.LeakyReLU(0.2), nn.PReLU(4)], ids=str)
def test_realign_keeps_the_start(act):
    """Also one that differs from channel to channel, and after pickling."""
    if isinstance(act, nn.PReLU):
        nn.init.uniform_(act.weight, -0.5, 2)
    model = nn.Sequential(conv(), copy.deepcopy(act))
    pwlu.convert_(model, IMAGES, kinds=("leaky_relu", "prelu"))
    optimizer = torch.optim.SGD(pwlu.parameter_groups(model, lr=0.0, weight_decay=0.0))
    pwlu.TwoPhase(model, optimizer, realign_at=1)
    model(IMAGES).sum().backward()
    optimizer.step()
    unit = pickled(model)[1]
    knots = torch.stack([torch.linspace(a, b, 17) for a, b in zip(unit.left.tolist(), unit.right.tolist(), strict=True)])
    assert not torch.equal(unit.left, torch.full((4,), -3.0))
    torch.testing.assert_close(unit.heights.detach(), act(knots.T).T.detach())


def test_a_start_for_other_channels():
    start = prelu_function(torch.tensor([0.1, 0.2]))
    assert pwlu.PWLU(2, init=start).left_slope.tolist() == pytest.approx([0.1, 0.2])
    with pytest.raises(ValueError, match="PWLU: init='prelu' has 2 functions and needs channels=2, not channels=4"):
        pwlu.PWLU(4, init=start)


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
    assert report.notes == ["In evaluation mode, the shapes of the outputs on the sample changed."]
    with torch.device("meta"):
        report = pwlu.convert_(nn.Sequential(conv(), nn.SiLU()), torch.empty(2, 3, 7, 5))
    (note,) = report.notes
    assert note == "The change of the outputs could not be measured (RuntimeError: the model is on the meta device)."


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
    model = net()
    pwlu.convert_(
        model, IMAGES, to=lambda channels, site: nn.Sequential()
    )  # no activation; a container without entries is falsy
    assert all(type(model[i]) is nn.Sequential for i in (1, 3))


def test_every_start_is_a_kind():
    """A kind that is not the name of a start gets a start from its arguments."""
    assert set(INITIAL_FUNCTIONS) - {"identity", "swish"} == set(ARGUMENTS) - {
        "prelu",
        "rrelu",
        "threshold",
        "clamp",
        "hardshrink",
    }


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
    with pytest.raises(TypeError, match=r"restore_: model must be a torch\.nn\.Module, not str"):
        pwlu.restore_("model")
    with pytest.raises(ValueError, match=r"restore_: Everything was not converted by pwlu\.convert_"):
        pwlu.restore_(model)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", nn.GELU()])
def test_the_fast_path_of_transformers(activation, root, padded):
    """In evaluation, torch runs a whole layer as one kernel with its own activation."""
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
