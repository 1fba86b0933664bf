"""What convert_ knows from watching data flow: in which dimension the channels are, and what feeds a gate."""

import pytest
import torch
import torch.nn.functional as F
from blocks import IMAGES, Net, conv, converted
from torch import nn

import pwlu


def se(kind, gate=torch.sigmoid, scale=torch.mul):
    """Squeeze-and-excitation, written in one of the usual ways."""

    class SE(Net):
        def forward(self, x):
            x = self.relu(self.conv(x))
            if kind == "conv":
                return scale(x, gate(self.b(self.act(self.a(x.mean((2, 3), keepdim=True))))))
            g = gate(self.b(self.act(self.a(x.mean((2, 3))))))
            g = {"view": lambda: g.view(*g.shape, 1, 1), "index": lambda: g[..., None, None]}[kind]()
            return scale(x, g.expand_as(x))

    layer = conv if kind == "conv" else nn.Linear
    return SE(conv=conv(), relu=nn.ReLU(), a=layer(4, 6), act=nn.ReLU(), b=layer(6, 4))


class HardSigmoid(nn.Module):
    """As older MobileNetV3 and GhostNet write it."""

    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU6(inplace=True)

    def forward(self, x):
        return self.relu(x + 3) / 6


class HardSwish(nn.Module):
    def __init__(self):
        super().__init__()
        self.sigmoid = HardSigmoid()

    def forward(self, x):
        return x * self.sigmoid(x)


GATES = [
    torch.sigmoid,
    F.hardsigmoid,
    nn.Sigmoid(),
    nn.Hardsigmoid(inplace=True),
    lambda y: F.relu6(y + 3.0, inplace=True) / 6.0,
    HardSigmoid(),
    torch.tanh,
    lambda y: y.softmax(1),
    lambda y: (0.2 * y + 0.5).clamp(0, 1),
    lambda y: torch.clip(y, min=0.0, max=1.0),
    lambda y: 1 - y.sigmoid(),
    lambda y: 1 + torch.tanh(y),
    lambda y: 1 / (1 + torch.exp(-y)),
    lambda y: y.sigmoid() * torch.tanh(y + 1),
    lambda y: F.dropout(F.hardtanh(y), 0.1),
    lambda y: y.sigmoid().to(torch.float32).clone(),
]


def assert_only_the_features_are_converted(model):
    report = pwlu.convert_(model, IMAGES, min_positions=0)
    assert [site.name for site in report.converted] == ["relu"]
    assert {site.name: site.reason for site in report.of("skipped")}["act"] == "it feeds a gate"


@pytest.mark.parametrize(
    ("kind", "gate"), [*(("conv", gate) for gate in GATES), ("view", torch.sigmoid), ("index", torch.sigmoid)]
)
def test_what_feeds_a_gate_is_left_alone(kind, gate):
    assert_only_the_features_are_converted(se(kind, gate))


@pytest.mark.parametrize(
    "scale",
    [
        torch.Tensor.mul_,
        lambda x, g: g * x,
        lambda x, g: torch.addcmul(x, g, x),
        lambda x, g: torch.einsum("bchw,bchw->bchw", x, g),
        lambda x, g: torch.einsum("b c h w, b c -> b c h w", [x, g[:, :, 0, 0]]),
        lambda x, g: torch.lerp(x, self_attention(x), g),
        lambda x, g: torch.multiply(input=x, other=g),
    ],
)
@pytest.mark.parametrize("kind", ["conv", "view"])
def test_all_ways_to_multiply_by_a_gate(kind, scale):
    assert_only_the_features_are_converted(se(kind, scale=scale))


def self_attention(x):
    return x.flip(2)


def test_features_that_are_bounded_too():
    """A gate is narrower than what it multiplies."""
    model = se("conv")
    model.relu = nn.ReLU6()
    assert_only_the_features_are_converted(model)


def test_a_gate_that_is_an_activation_by_its_kind():
    class Gated(Net):
        def forward(self, x):
            x = F.relu(self.a(x))
            return x * (F.relu6(self.b(x) + 3) / 6)

    report = pwlu.convert_(Gated(a=conv(), b=conv(4, 4)), IMAGES)
    assert [(site.kind, site.action, site.reason) for site in report] == [
        ("relu", "converted", ""),
        ("relu6", "skipped", "it is a gate"),
    ]


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (HardSwish, "hardswish"),
        (lambda: WrittenOut(lambda x: x * torch.sigmoid(x)), "silu"),
        (lambda: WrittenOut(lambda x: x.mul(x.sigmoid())), "silu"),
        (lambda: WrittenOut(lambda x: x * torch.tanh(F.softplus(x))), "mish"),
        (lambda: WrittenOut(lambda x: x * F.relu6(x + 3) / 6), "hardswish"),
        (lambda: WrittenOut(lambda x: x * (x + 3).clamp(0, 6) / 6), "hardswish"),
        (lambda: WrittenOut(lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5))), "gelu"),
        (lambda: WrittenOut(lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))), "gelu"),
        (lambda: WrittenOut(lambda x: x.clamp(min=0)), "relu"),
    ],
)
def test_activations_that_a_module_writes_out(module, kind):
    """The module is the site, whatever it consists of; one object in two places is two sites."""
    act = module()
    model = nn.Sequential(conv(), act, conv(4, 5), act).eval()
    expected = model(IMAGES)
    report = pwlu.convert_(model, IMAGES)
    assert [(site.name, site.kind, site.action) for site in report] == [("1", kind, "converted"), ("3", kind, "converted")]
    assert all(site.error < 0.03 for site in report)
    assert (model(IMAGES) - expected).abs().max() < 0.2


class WrittenOut(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda y: y * torch.sigmoid(y), "silu"),
        (lambda y: y * F.relu6(y + 3) / 6, "hardswish"),
        (lambda y: y * torch.tanh(F.softplus(y)), "mish"),
        (lambda y: 0.5 * y * (1 + torch.erf(y / 2**0.5)), "gelu"),
    ],
)
def test_activations_that_are_written_out_in_between(function, kind):
    """They cannot be rewritten, but the report names them; their parts are not sites."""

    class Between(Net):
        def forward(self, x):
            return F.relu(self.b(function(self.a(x))))

    report = pwlu.convert_(Between(a=conv(), b=conv(4, 5)), IMAGES)
    assert [(site.kind, site.action) for site in report] == [(kind, "impossible"), ("relu", "converted")]
    assert report.sites[0].reason == (
        f"it is written as a formula: call F.{kind}, or pass the class of its module in kinds if it computes only that"
    )


def test_a_mask_is_no_features():
    """What multiplies a part of the sample is an output."""

    class Masked(Net):
        def forward(self, x, mask):
            return torch.tanh(self.b(F.relu(self.a(x)))) * mask

    sample = IMAGES, torch.ones(2, 5, 7, 5)
    assert converted(Masked(a=conv(), b=conv(4, 5)), sample) == {"relu": 4}


def test_a_norm_is_no_gate():
    class Normed(Net):
        def forward(self, x):
            y = F.relu6(self.a(x))
            return self.b(y * torch.rsqrt(y.square().mean(1, keepdim=True) + 1e-6))

    assert converted(Normed(a=conv(), b=conv(4, 5))) == {"relu6": 4}


class SwiGLU(Net):
    """As Llama writes it, or with both halves in one layer."""

    def forward(self, x):
        if self.up is None:
            gate, up = self.gate(x).chunk(2, -1)
        else:
            gate, up = self.gate(x), self.up(x)
        return self.down(self.act(gate) * up)


@pytest.mark.parametrize("layers", [(8, nn.Linear(3, 8)), (16, None)], ids=["two layers", "one layer"])
@pytest.mark.parametrize("act", [nn.SiLU(), F.gelu, nn.ReLU()], ids=str)
def test_gated_linear_units_are_marked(act, layers):
    width, up = layers
    model = SwiGLU(gate=nn.Linear(3, width), up=up, down=nn.Linear(8, 3), act=act)
    report = pwlu.convert_(nn.Sequential(model, nn.Linear(3, 5), nn.ReLU()), torch.randn(2, 7, 3))
    assert [(site.glu, site.action) for site in report] == [(True, "converted"), (False, "converted")]
    assert "GLU: its output is multiplied with another path" in str(report)
    with pytest.raises(ValueError, match="where returned False; GLU"):
        pwlu.convert_(
            SwiGLU(gate=nn.Linear(3, width), up=up, down=nn.Linear(8, 3), act=act),
            torch.randn(2, 7, 3),
            where=lambda site: not site.glu,
        )


def test_half_of_a_layer_gates_the_other():
    class Halves(Net):
        def forward(self, x):
            a, b = self.second(F.relu(self.first(x))).chunk(2, 1)
            return F.relu(self.third(a * torch.sigmoid(b)))

    assert converted(Halves(first=conv(3, 6), second=conv(6, 8), third=conv(4, 5))) == {"relu": 6, "relu_2": 5}


@pytest.mark.parametrize(
    "end",
    [
        lambda y, weight: y.sigmoid(),
        lambda y, weight: 255 * y.sigmoid(),
        lambda y, weight: weight * y.sigmoid(),
        lambda y, weight: weight.exp() * y.sigmoid(),
        lambda y, weight: y.sigmoid() * torch.arange(4.0)[:, None, None],
        lambda y, weight: (y.sigmoid() * (y + 1).sigmoid()).sqrt(),
        lambda y, weight: y * y.sigmoid(),
        lambda y, weight: (y * y.sigmoid(), y),
    ],
)
def test_a_sigmoid_that_multiplies_no_features_is_no_gate(end):
    """The output of a decoder, the scores of a detector, a Swish written by hand."""

    class Ends(Net):
        def forward(self, x):
            return end(self.last(F.relu(self.conv(x))), self.weight)

    assert converted(Ends(conv=conv(), last=conv(4, 4), weight=nn.Parameter(torch.ones(4, 1, 1)))) == {"relu": 4}


def test_a_gate_on_the_input_of_the_model():
    class Select(Net):
        def forward(self, x):
            return F.relu(self.c(x * self.b(F.relu(self.a(x))).sigmoid()))

    report = pwlu.convert_(Select(a=nn.Linear(4, 5), b=nn.Linear(5, 4), c=nn.Linear(4, 6)), torch.randn(2, 4))
    assert [(site.channels, site.reason) for site in report if site.kind == "relu"] == [(5, "it feeds a gate"), (6, "")]


class Permuted(Net):
    def forward(self, x):
        return F.relu(self.then(self.linear(x.permute(0, 2, 3, 1))))


@pytest.mark.parametrize(
    ("layers", "shape", "dim", "channels"),
    [
        ((nn.Conv2d(3, 4, 1),), (2, 3, 7, 5), 1, 4),
        ((nn.Conv2d(3, 4, 1),), (3, 7, 5), 0, 4),
        ((nn.Conv1d(3, 4, 1),), (2, 3, 7), 1, 4),
        ((nn.Conv3d(3, 4, 1),), (2, 3, 7, 5, 6), 1, 4),
        ((nn.ConvTranspose2d(3, 4, 2), nn.BatchNorm2d(4), nn.MaxPool2d(2)), (2, 3, 7, 5), 1, 4),
        ((nn.Linear(3, 4),), (2, 3), -1, 4),
        ((nn.Linear(3, 4),), (3,), -1, 4),
        ((nn.Linear(3, 4), nn.LayerNorm(4), nn.Dropout()), (2, 7, 3), -1, 4),
        ((nn.Linear(3, 4),), (2, 7, 5, 3), -1, 4),
        ((nn.Linear(3, 4), nn.BatchNorm1d(4)), (2, 3), 1, 4),
        ((nn.BatchNorm1d(3),), (2, 3, 7), 1, 3),
        ((nn.Conv2d(3, 4, 1), nn.Flatten(2)), (2, 3, 7, 5), 1, 4),
        ((nn.Conv2d(3, 4, 1), nn.Flatten(1)), (2, 3, 7, 5), -1, 140),
        ((nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(1)), (2, 3, 7, 5), 1, 4),
        ((nn.Identity(),), (2, 3, 7, 5), 1, 3),
        ((nn.Identity(),), (2, 7, 3), -1, 3),
    ],
)
def test_the_channel_dimension(layers, shape, dim, channels):
    (site,) = pwlu.convert_(nn.Sequential(*layers, nn.ReLU()), torch.randn(shape))
    assert (site.channel_dim, site.channels) == (dim, channels)


@pytest.mark.parametrize(
    ("permute", "dim"),
    [
        (lambda y: y.permute(0, 3, 1, 2), 1),
        (lambda y: torch.permute(input=y, dims=(0, 3, 1, 2)), 1),
        (lambda y: y.transpose(-1, 1), 1),
        (lambda y: y.swapdims(1, 3).swapaxes(1, 2), 2),
        (lambda y: y.movedim(-1, 1), 1),
        (lambda y: y.moveaxis((3, 0), (0, 2)), 0),
        (lambda y: y.moveaxis(0, 1), -1),
        (lambda y: y.reshape(-1, 4), -1),
        (lambda y: y.permute(0, 3, 1, 2).unsqueeze(-1), 1),
        (lambda y: y + torch.zeros(5, 1), -1),
    ],
)
def test_the_channel_dimension_moves(permute, dim):
    (site,) = pwlu.convert_(Permuted(linear=nn.Linear(3, 4), then=permute), IMAGES)
    assert (site.channel_dim, site.channels) == (dim, 4)


class LinearAttention(Net):
    """A feature map on queries: (batch, tokens, heads, dimensions of a head)."""

    def forward(self, x):
        b, n, _ = x.shape
        q = self.q(x).view(b, n, 3, 4)
        q = self.move(q)
        return F.elu(q) + 1


@pytest.mark.parametrize("move", [lambda q: q, lambda q: q.transpose(1, 2), lambda q: q.permute(0, 2, 1, 3).contiguous()])
def test_channels_that_are_split_have_one_function(move):
    model = LinearAttention(q=nn.Linear(5, 12), move=move)
    report = pwlu.convert_(model, torch.randn(2, 7, 5))
    (site,) = report
    assert (site.channels, site.layout, site.action) == (1, "several", "converted")
    assert "one function for the layer: its channels are spread over several dimensions" in str(report)
    assert model(torch.randn(3, 9, 5)).numel() == 3 * 9 * 12  # another length


@pytest.mark.parametrize(
    ("view", "dim", "channels"),
    [
        (lambda y: y.unflatten(1, (1, 4)), 2, 4),
        (lambda y: y.view(2, 4, 1, 7, 5), 1, 4),
        (lambda y: y.flatten(2).view(2, 2, 2, 35), None, 1),
    ],
)
def test_views_that_split_channels(view, dim, channels):
    class Views(Net):
        def forward(self, x):
            return F.relu(view(self.conv(x)))

    (site,) = pwlu.convert_(Views(conv=conv()), IMAGES)
    assert (site.channels, site.layout) == (channels, "" if dim else "several")
    assert dim is None or site.channel_dim == dim


class Unknown(Net):
    """Nothing says which dimension has the channels."""

    def forward(self, x):
        return F.relu(torch.fft.fft(x).real)


@pytest.mark.parametrize(
    ("shapes", "dim", "channels", "layout"),
    [
        ([(2, 6, 7, 5)], 1, 6, "guess"),
        ([(2, 6, 7)], -1, 7, "guess"),
        ([(2, 6, 7), (2, 6, 7)], -1, 7, "guess"),
        ([(2, 6, 7), (2, 6, 9)], 1, 6, ""),
        ([(2, 6, 7), (3, 8, 7)], -1, 7, ""),
        ([(2, 6, 7, 5), (2, 8, 7, 9)], 2, 7, ""),
        ([(2, 6, 7, 5), (4, 8, 7, 5)], None, 1, "several"),
        ([(2, 6, 7), (4, 8, 9)], None, 1, "several"),
        ([(2, 7)], -1, 7, "guess"),
        ([(7,)], -1, 7, ""),
    ],
)
def test_an_unknown_layout(shapes, dim, channels, layout):
    """With several samples the channels are in the dimension whose size does not change, but for the batch."""
    model = Unknown()
    model.layer = nn.Identity()
    samples = [torch.randn(shape) for shape in shapes]
    report = pwlu.convert_(model, samples if len(samples) > 1 else samples[0])
    (site,) = report
    assert (site.channels, site.layout) == (channels, layout)
    assert dim is None or site.channel_dim == dim
    assert ("a guess" in str(report)) == (layout == "guess")
    for sample in samples:
        model(sample)


def test_a_guess_matters_for_channels_alone():
    model = Unknown(layer=nn.Identity())
    assert "guess" not in str(pwlu.convert_(model, torch.randn(2, 6, 7, 5), granularity="layer"))


class Images(Net):
    """Takes a list, as detectors do."""

    def forward(self, images):
        return [F.relu(self.conv(image)) for image in images]


def test_a_list_is_several_samples():
    """Each a tensor, a tuple of arguments or a dictionary; one list as an argument is given in a tuple."""
    model = Images(conv=conv())
    report = pwlu.convert_(model, ([IMAGES, IMAGES],))
    assert (report.converted[0].calls, report.notes) == (4, [])
    pwlu.restore_(model)
    report = pwlu.convert_(model, [([IMAGES],), {"images": [IMAGES[..., :3]]}])
    assert (report.converted[0].calls, report.notes) == (4, [])
    pwlu.restore_(model)
    report = pwlu.convert_(model, [([IMAGES],), (IMAGES[:, :2],)])
    assert all("could not be run on sample 1 (" in note for note in report.notes)
    assert len(report.notes) == 2
    with pytest.raises(RuntimeError, match=r"A list holds several samples; if the model takes a list, pass \(images,\)"):
        pwlu.convert_(Images(conv=conv()), [IMAGES[:, :2]])
    with pytest.raises(ValueError, match="sample is an empty list"):
        pwlu.convert_(model, [])
