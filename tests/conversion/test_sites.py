"""Finding the places where a model applies an activation, and deciding which are left alone."""

import pytest
import torch
import torch.nn.functional as F
from blocks import IMAGES, Net, conv, converted, reasons
from torch import nn

import pwlu


def test_a_module_that_is_called_three_times_is_three_sites():
    class Bottleneck(Net):
        def forward(self, x):
            y = self.act(self.a(x))
            y = self.act(self.b(y))
            return self.act(self.c(y))

    model = Bottleneck(a=conv(3, 4), b=conv(4, 6), c=conv(6, 8), act=nn.ReLU(inplace=True))
    assert converted(model) == {"act": 4, "act_2": 6, "act_3": 8}


def test_calls_on_one_line_and_inside_each_other():
    class Line(Net):
        def forward(self, x):
            return F.relu(self.b(F.relu(self.a(x)))) + F.relu(F.relu(self.c(x)))

    assert converted(Line(a=conv(3, 4), b=conv(4, 6), c=conv(3, 6))) == {"relu": 4, "relu_2": 6, "relu_3": 6, "relu_4": 6}


def test_a_loop_is_one_site():
    class Loop(Net):
        def forward(self, x):
            for layer in self.layers:
                x = F.relu(layer(x))
            return x

    same, growing = (nn.ModuleList([conv(3, 3), conv(3, n)]) for n in (3, 5))
    assert converted(Loop(layers=same)) == {"relu": 3}
    assert converted(Loop(layers=growing), granularity="layer") == {"relu": 3}
    with pytest.raises(ValueError, match=r"impossible +the same place is called with 3, 5 channels: pass granularity='layer'"):
        pwlu.convert_(Loop(layers=nn.ModuleList([conv(3, 3), conv(3, 5)])), IMAGES)


def test_a_head_on_several_levels_is_one_site():
    class Pyramid(Net):
        def forward(self, x):
            return [self.head(level) for level in (x, F.max_pool2d(x, 2), F.max_pool2d(x, 4))]

    model = Pyramid(head=nn.Sequential(conv(), nn.ReLU()))
    (site,) = pwlu.convert_(model, IMAGES)
    assert (site.name, site.calls, site.positions) == ("head.1", 6, 35)  # three levels in two modes, the largest 7 x 5


def test_one_object_registered_in_several_places():
    act = nn.ReLU()
    model = nn.Sequential(conv(3, 4), act, conv(4, 5), act, nn.Sequential(conv(5, 6), act))
    assert converted(model) == {"1": 4, "3": 5, "4.1": 6}
    shared = nn.Sequential(conv(3, 3), nn.ReLU())
    assert converted(nn.Sequential(shared, shared)) == {"0.1": 3}


def test_a_list_of_activations():
    class Zipped(Net):
        def forward(self, x):
            for layer, act in zip(self.layers, self.acts, strict=True):
                x = act(layer(x))
            for act in self.acts if self.twice else ():
                x = act(x)
            return x

    def model(width, twice):
        layers = nn.ModuleList([conv(3, 4), conv(4, width)])
        return Zipped(layers=layers, acts=nn.ModuleList([nn.ReLU(), nn.GELU()]), twice=twice)

    assert converted(model(5, False)) == {"acts.0": 4, "acts.1": 5}
    report = pwlu.convert_(model(4, True), IMAGES)
    assert [site.name for site in report.converted] == ["acts.0", "acts.1"]
    assert [site.reason for site in report.of("skipped")] == [
        f"shares acts.{n}, because the calls cannot be rewritten separately" for n in (0, 1)
    ]


def test_modes():
    class Modes(Net):
        def forward(self, x):
            y = self.conv(x) if x.ndim == 4 else torch.selu(x)
            return F.relu(y) if self.training else F.gelu(y)

    report = pwlu.convert_(Modes(conv=conv(), never=nn.SiLU()), IMAGES)
    assert [(site.name, site.modes, site.action) for site in report] == [
        ("relu", ("train",), "converted"),
        ("gelu", ("eval",), "converted"),
        ("never", (), "unreached"),
        ("selu", (), "unreached"),
    ]
    assert "in train mode only" in str(report)
    assert "the sample does not reach it, in training or in evaluation mode" in str(report)


def test_calls_that_do_not_happen_are_listed():
    class Branches(Net):
        def forward(self, x):
            y = F.relu(self.conv(x))
            return self.other(torch.tanh(y)) if self.flag else y

        def other(self, x):
            return nn.functional.silu(x) + torch.relu(x) + self.act(x)

    report = pwlu.convert_(Branches(conv=conv(), act=nn.ReLU(), flag=False), IMAGES)
    assert [(site.name, site.was) for site in report.of("unreached")] == [
        ("act", "ReLU()"),
        ("silu", "nn.functional.silu"),
        ("relu", "torch.relu"),
    ]
    assert "Branches.other, line" in report.of("unreached")[1].reason


def test_a_mode_that_fails_is_noted():
    class NeedsTargets(Net):
        def forward(self, x, targets=None):
            if self.training and targets is None:
                raise ValueError("targets, please")
            return F.relu(self.conv(x))

    report = pwlu.convert_(NeedsTargets(conv=conv()), IMAGES)
    assert report.converted[0].modes == ("eval",)
    assert "In train mode, the model could not be run on the sample (ValueError: targets, please)." in str(report)


def test_a_model_whose_course_depends_on_values():
    class Careful(Net):
        def forward(self, x):
            y = self.act(self.conv(x))
            assert (y >= 0).all()
            return F.gelu(y) if y.sum() > 0 else y

    assert converted(Careful(conv=conv(), act=nn.ReLU())) == {"act": 4, "gelu": 4}


class WritesInto(Net):
    """An activation in place; `then` makes something of its input, a view of that, and its result."""

    def forward(self, x):
        x = self.conv(x)
        view = x.flatten(2)
        return self.then(x, view, self.act(view if self.of_view else x))


@pytest.mark.parametrize("of_view", [False, True])
@pytest.mark.parametrize(
    ("then", "used_again"),
    [
        (lambda x, view, y: y + y, False),
        (lambda x, view, y: y.reshape(x.shape), False),
        (lambda x, view, y: x + 1, True),
        (lambda x, view, y: torch.add(y.flatten(2), other=view), True),
        (lambda x, view, y: torch.stack([view, view]), True),
        (lambda x, view, y: x, True),
        (lambda x, view, y: {"features": [view], "out": y}, True),
    ],
)
def test_in_place_where_the_input_is_used_again(of_view, then, used_again):
    """Later code then reads the result from the input, but a PWLU never writes into its input."""
    model = WritesInto(conv=conv(), act=nn.ReLU(inplace=True), then=then, of_view=of_view)
    model = nn.Sequential(conv(3, 3), nn.ReLU(), model)  # so that there is something to convert
    expected = ["it works in place, and its input is used again: set inplace=False"] if used_again else []
    assert reasons(model) == expected


def test_in_place_on_one_half():
    class Halves(Net):
        def forward(self, x):
            first, second = self.conv(x).chunk(2, dim=1)
            return self.act(first) * second

    assert converted(Halves(conv=conv(3, 8), act=nn.ReLU(inplace=True))) == {"act": 4}


def test_maps_of_one_position_are_left_alone():
    model = nn.Sequential(
        conv(), nn.ReLU(), nn.AdaptiveAvgPool2d(1), conv(4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(5, 6), nn.ReLU()
    )
    report = pwlu.convert_(model, IMAGES)
    assert [site.action for site in report] == ["converted", "skipped", "converted"]
    assert report.sites[1].reason == "feature maps of 1 position"
    pwlu.restore_(model)
    assert converted(model, min_positions=36) == {"7": 6}


def test_one_place_in_two_notations():
    """1 and -1 are the same dimension of a matrix, and not of an image."""

    class Mixed(Net):
        def forward(self, x):
            return [F.relu(layer(x)) for layer in (self.plain, self.norm)]

    assert converted(Mixed(plain=nn.Linear(3, 4), norm=nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))), torch.randn(2, 3))
    model = nn.Sequential(nn.ReLU(), Mixed(plain=nn.Conv2d(3, 3, 1), norm=nn.Linear(3, 3)))
    assert reasons(model, torch.randn(2, 3, 4, 3)) == ["the same place is called with channels in dimensions -1, 1"]


def test_kinds_and_where():
    model = nn.Sequential(conv(), nn.ReLU(), nn.GELU(), nn.Tanh(), conv(4, 5), nn.ReLU())
    report = pwlu.convert_(model, IMAGES, kinds=("relu", "tanh"), where=lambda site: site.channels == 4)
    assert [(site.action, site.reason) for site in report] == [
        ("converted", ""),
        ("skipped", "gelu is not in kinds"),
        ("converted", ""),
        ("skipped", "where returned False"),
    ]
    assert converted(model, kinds="gelu") == {"2": 4}


OTHERS = {
    "prelu": nn.PReLU(4),
    "rrelu": nn.RReLU(),
    "softsign": nn.Softsign(),
    "logsigmoid": nn.LogSigmoid(),
    "celu": nn.CELU(),
    "hardshrink": nn.Hardshrink(),
    "softshrink": nn.Softshrink(),
    "tanhshrink": nn.Tanhshrink(),
    "threshold": nn.Threshold(0.0, 0.0),
    "clamp": lambda x: x.clamp(min=0),
}


class Called(Net):
    def forward(self, x):
        return F.relu(self.act(self.conv(x)))


@pytest.mark.parametrize("kind", OTHERS)
def test_every_activation_is_visible(kind):
    """Also those that are not converted unless they are asked for."""
    report = pwlu.convert_(Called(conv=conv(), act=OTHERS[kind]), IMAGES)
    assert [site.kind for site in report] == [kind, "relu"]
    assert report.sites[0].reason == ("" if kind == "celu" else f"{kind} is not in kinds")


class Limited(Net):
    """A method that limits; a lambda outside of the module could not be rewritten."""

    def forward(self, x):
        return getattr(self, self.form)(self.conv(x))

    def first(self, x):
        return torch.clamp(x, 0)

    def clip(self, x):
        return torch.clip(x, min=0.0)

    def least(self, x):
        return x.clamp_min(0)

    def as_relu6(self, x):
        return torch.clamp(x, 0, 6)

    def both(self, x):
        return x.clamp(-1, max=2.5)

    def most(self, x):
        return torch.clamp_max(x, 2)

    def of_class(self, x):
        return torch.Tensor.clamp(x, 0)

    def threshold(self, x):
        return F.threshold(x, 0.5, 0.5)


@pytest.mark.parametrize("form", [name for name in vars(Limited) if not name.startswith("_") and name != "forward"])
def test_limits_as_activations(form):
    model = Limited(conv=conv(), form=form)
    x = 3 * IMAGES
    expected = model(x)
    (site,) = pwlu.convert_(model, x, kinds=("clamp", "threshold")).converted
    assert site.error < 1e-12
    torch.testing.assert_close(model(x), expected)


def test_limits_of_other_things_are_no_sites():
    class Limits(Net):
        def forward(self, x):
            scale = self.scale.clamp(min=0.1)
            return F.relu(self.conv(x)).clamp(max=100) * scale * x.long().clamp(min=0).sum()

    report = pwlu.convert_(Limits(conv=conv(), scale=nn.Parameter(torch.ones(()))), IMAGES)
    assert [site.kind for site in report] == ["relu"]


def test_slopes_given_to_a_function():
    class Given(Net):
        def forward(self, x):
            return F.relu(F.prelu(self.conv(x), self.slopes))

    model = Given(conv=conv(), slopes=nn.Parameter(torch.ones(4)))
    assert reasons(model, kinds=("prelu", "relu")) == ["it is F.prelu, whose slopes belong to no module: use nn.PReLU"]


class SiLU(nn.Module):
    """A user-defined class with the name of torch's class, but another function."""

    def forward(self, x):
        return x * torch.sigmoid(1.3 * x)


class Mish(nn.Module):
    def forward(self, x):
        return x - 1


@pytest.mark.parametrize(("act", "sites"), [(SiLU(), ["1.silu"]), (Mish(), [])])
def test_what_was_reached_is_not_said_to_be_unreached(act, sites):
    report = pwlu.convert_(nn.Sequential(conv(), act, nn.ReLU()), IMAGES)
    assert [site.name for site in report] == [*sites, "2"]
    assert not report.of("unreached")


class Square(nn.Module):
    def forward(self, x):
        return x.relu() ** 2


class Cube(Square):
    pass


@pytest.mark.parametrize(
    ("act", "kinds"), [(Square(), (Square,)), (Cube(), Square), (nn.PReLU(4), nn.PReLU), (nn.ReLU(), nn.ReLU)]
)
@pytest.mark.filterwarnings("ignore:convert_. the initial function of 2 PWLUs differs by more than 0.1:UserWarning")
def test_classes_as_kinds(act, kinds):
    """User-defined classes, their subclasses, and classes with parameters."""
    assert converted(nn.Sequential(conv(), act, conv(4, 4), act), kinds=kinds) == {"1": 4, "3": 4}
    assert converted(nn.Sequential(conv(), nn.ReLU(), act)) == {"1": 4} | (
        {"2": 4} if isinstance(act, nn.ReLU) else {"2.relu": 4} if isinstance(act, Square) else {}
    )


class Scaled(Net):
    def forward(self, x):
        return self.relu(self.square(self.conv(x), 2.0))


class Power(nn.Module):
    def forward(self, x, exponent):
        return x.abs() ** exponent


def test_a_call_with_more_than_the_input():
    model = Scaled(conv=conv(), square=Power(), relu=nn.ReLU())
    assert reasons(model, kinds=(Power, "relu")) == ["it is called with more than one argument"]


def test_integers_are_left_alone():
    class Mask(Net):
        def forward(self, x):
            return F.relu(self.conv(x)) * F.relu(x.long())

    assert reasons(Mask(conv=conv(3, 3)), action="skipped") == ["its input is torch.int64"]
