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


@pytest.mark.parametrize("gate", [torch.sigmoid, F.hardsigmoid, nn.Sigmoid(), nn.Hardsigmoid(inplace=True)])
@pytest.mark.parametrize("scale", [torch.mul, torch.Tensor.mul_, lambda x, g: g * x])
@pytest.mark.parametrize("kind", ["conv", "view", "index"])
def test_squeeze_and_excitation_is_left_alone(kind, gate, scale):
    report = pwlu.convert_(se(kind, gate, scale), IMAGES, min_positions=0)
    assert [site.name for site in report.converted] == ["relu"]
    assert {site.name: site.reason for site in report.of("skipped")}["act"] == "it feeds a gate"


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
