"""The module: its start, its arguments, its state."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune

import pwlu
from pwlu import reference
from pwlu.initial_functions import INITIAL_FUNCTIONS, fit_bounds


def test_starts_as_relu_exactly():
    x = 5 * torch.randn(8, 64, 7, 7)
    assert torch.equal(pwlu.PWLU(64)(x), F.relu(x))
    assert torch.equal(pwlu.PWLU()(x), F.relu(x))


@pytest.mark.parametrize("name", INITIAL_FUNCTIONS)
def test_starts_as_the_named_function(name):
    """Exact to rounding on the knots; between them within the error of linear interpolation, d^2/8 max|f''|."""
    bounds = (-4.0, 8.0)
    act = pwlu.PWLU(intervals=48, bounds=bounds, init=name).double()
    left, right = act.bounds
    x = torch.linspace(left, right, 2001, dtype=torch.float64)
    step = (right - left) / 48
    curvature = 1.8  # no named function bends more: SELU's second derivative at 0- is 1.76
    assert (
        act(x) - INITIAL_FUNCTIONS[name].function(x)
    ).abs().max() < step**2 / 8 * curvature + 1e-6  # parameters were float32


@pytest.mark.parametrize(
    ("bounds", "intervals", "kinks", "expected"),
    [
        ((-3.0, 3.0), 16, (0.0,), (-3.0, 3.0)),
        ((-3.0, 3.0), 15, (0.0,), (-3.2, 2.8)),
        ((-3.0, 3.0), 1, (0.0,), (0.0, 6.0)),
        ((-1.0, 3.0), 8, (0.0,), (-1.0, 3.0)),
        ((-4.0, 8.0), 16, (0.0, 6.0), (-3.75, 8.25)),
        ((-3.0, 3.0), 16, (-3.0, 3.0), (-3.0, 3.0)),
        ((0.0, 6.0), 1, (0.0, 6.0), (0.0, 6.0)),
        ((-3.0, 3.0), 15, (), (-3.0, 3.0)),
    ],
)
def test_a_knot_lies_on_every_kink(bounds, intervals, kinks, expected):
    fitted = fit_bounds(bounds, intervals, kinks, "f")
    assert fitted == pytest.approx(expected)
    step = (fitted[1] - fitted[0]) / intervals
    for kink in kinks:
        place = (kink - fitted[0]) / step
        assert place == pytest.approx(round(place), abs=1e-9)
        assert -1e-9 <= place <= intervals + 1e-9


def test_the_default_device_does_not_matter():
    with torch.device("meta"):
        act = pwlu.PWLU(2, device="cpu")
    assert torch.equal(act(torch.ones(1, 2)), torch.ones(1, 2))


def test_relu6_has_its_kinks_on_knots():
    x = 6 * torch.randn(1000)
    torch.testing.assert_close(pwlu.PWLU(bounds=(-4, 8), init="relu6")(x), F.relu6(x), rtol=1e-6, atol=1e-6)


def test_starts_as_any_function():
    act = pwlu.PWLU(2, init=torch.sin)
    knots = torch.linspace(-3, 3, 17)
    torch.testing.assert_close(act(knots[:, None].expand(-1, 2))[:, 0], knots.sin())
    assert "init='sin'" in repr(act)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"channels": 0}, "channels must be an integer of at least 1.*not 0"),
        ({"channels": 2.0}, "channels must be an integer"),
        ({"intervals": 0}, "intervals must be an integer of at least 1.*8 to 16 work well.*not 0"),
        ({"intervals": True}, "intervals must be an integer"),
        ({"bounds": (3.0, -3.0)}, r"left < right in float32, .* such as \(-3.0, 3.0\), not \(3.0, -3.0\)"),
        ({"bounds": (1.0, 1.0)}, "left < right"),
        ({"bounds": (1.0, 1.00000001)}, r"left < right in float32, .* not \(1.0, 1.00000001\)"),
        ({"bounds": (float("nan"), 1.0)}, "finite"),
        ({"bounds": (-float("inf"), 1.0)}, "finite"),
        ({"bounds": 3.0}, "two numbers such as"),
        ({"bounds": (1, 2, 3)}, "two numbers such as"),
        ({"bounds": (1.0, 4.0)}, r"has a kink at 0, outside of bounds=\(1, 4\)\. Write bounds that contain 0"),
        ({"channel_dim": None}, "channel_dim must be an integer.*not None"),
        ({"init": "relu6"}, "has a kink at 6, outside.*contain 0, 6"),
        ({"init": "relu6", "bounds": (-100, 100)}, "too wide to place a knot on each kink.*Write more intervals"),
        ({"init": 3}, "init must be a name such as 'relu' or a function of a tensor, not 3"),
        ({"init": nn.SiLU()}, r"a name or a function, not the module SiLU\(\)\. Write 'silu'"),
        ({"bounds": (-1e39, 1e39)}, "finite"),
        ({"bounds": (-3.0, 1e6), "dtype": torch.float16}, "finite"),
        ({"init": "rleu"}, "init 'rleu' is not known. Write one of relu, relu6"),
    ],
)
def test_bad_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        pwlu.PWLU(**arguments)


def test_parameters_and_repr():
    act = pwlu.PWLU(5, intervals=8, channel_dim=-1, dtype=torch.float64)
    assert {k: tuple(p.shape) for k, p in act.named_parameters()} == {"weight": (5 * 13,)}
    shapes = {"left": (5,), "right": (5,), "heights": (5, 9), "left_slope": (5,), "right_slope": (5,)}
    assert {k: tuple(p.shape) for k, p in act.blocks()._asdict().items()} == shapes
    for name, shape in shapes.items():
        assert getattr(act, name).shape == shape
    assert all(p.dtype == torch.float64 for p in act.parameters())
    assert repr(act) == "PWLU(channels=5, intervals=8, bounds=(-3, 3), init='relu', channel_dim=-1)"


class Rising(nn.Module):
    """A function that never falls."""

    def forward(self, weight):
        blocks = reference.unpack(weight, 4)
        return reference.pack(*blocks._replace(heights=blocks.heights.abs().cumsum(1)))


def test_a_weight_that_is_computed():
    """As torch.nn.utils.parametrize makes it: the unit has no parameter of that name then, and realignment cannot write it."""
    act, x = pwlu.PWLU(3, intervals=4), torch.randn(5, 3)
    nn.utils.parametrize.register_parametrization(act, "weight", Rising())
    assert torch.equal(act(x), pwlu.functional.pwlu(x, *act.blocks()))
    assert (act.heights.diff() >= 0).all()
    act(x).sum().backward()
    assert act.parametrizations.weight.original.grad.abs().sum() > 0
    with pytest.raises(RuntimeError, match=r"the weight is computed \(parametrized or pruned\).*remove_parametrizations"):
        act.reset_parameters()


def test_a_weight_that_is_pruned():
    act, x = pwlu.PWLU(3, intervals=4, init="silu"), torch.randn(5, 3)
    prune.l1_unstructured(act, "weight", amount=5)
    assert torch.equal(act(x), pwlu.functional.pwlu(x, *act.blocks()))
    act(x).sum().backward()
    assert act.weight_orig.grad.abs().sum() > 0
    prune.remove(act, "weight")
    act.reset_parameters()


# Blocks of the weight.


def test_blocks_are_written_in_place():
    act = pwlu.PWLU(3, intervals=4)
    with torch.no_grad():
        act.left -= 1
        act.heights[1] = 7.0
        act.right_slope.copy_(torch.tensor([1.0, 2.0, 3.0]))
    expected = reference.unpack(act.weight, 4)
    assert expected.left.tolist() == [-4.0] * 3
    assert expected.heights[1].tolist() == [7.0] * 5
    assert act.right_slope.tolist() == [1.0, 2.0, 3.0]
    weight = act.weight
    act.assign(left=torch.zeros(3), heights=torch.ones(3, 5, dtype=torch.float64))
    assert act.weight is weight
    assert (act.left.tolist(), act.heights.unique().tolist(), act.right_slope.tolist()) == ([0.0] * 3, [1.0], [1.0, 2.0, 3.0])


@pytest.mark.parametrize("name", reference.Blocks._fields)
def test_what_cannot_be_done_to_a_block(name):
    """Freezing and replacing: the error names what can."""
    act = pwlu.PWLU(3, intervals=4)
    with pytest.raises(
        RuntimeError, match=r"a view of its weight.*act\.scale_gradients\(left=0\.0\).*act\.requires_grad_\(False\)"
    ):
        getattr(act, name).requires_grad_(False)
    for value in (torch.zeros(3), nn.Parameter(torch.zeros(3)), 3):
        with pytest.raises(AttributeError, match=rf"{name} is a block of the weight.*act\.assign\({name}=value\)"):
            setattr(act, name, value)
    with pytest.raises(ValueError, match=rf"{name} must have the shape \(3.*not \(7,\)"):
        act.assign(**{name: torch.zeros(7)})
    assert act.left.tolist() == [-3.0] * 3


@pytest.mark.parametrize("name", ["left", "heights", "right_slope"])
@pytest.mark.parametrize(
    "compute",
    [
        lambda act, name: parametrize.register_parametrization(act, name, nn.Identity()),
        lambda act, name: nn.utils.parametrizations.weight_norm(act, name),
        lambda act, name: prune.l1_unstructured(act, name, 0.5),
    ],
)
@pytest.mark.parametrize("before", [False, True])
def test_a_block_cannot_be_parametrized(compute, name, before):
    """The error names what to write instead; the unit stays as it was."""
    act = pwlu.PWLU(3)
    if before:
        parametrize.register_parametrization(act, "weight", nn.Identity())
    expected = act.weight.clone()
    message = rf"{name} is a block of the weight.*Parametrize 'weight'.*act\.scale_gradients\({name}=0\.0\)"
    with pytest.raises(ValueError, match=message):
        compute(act, name)
    assert torch.equal(act.weight, expected)
    assert not parametrize.is_parametrized(act, name)
    assert parametrize.is_parametrized(act) == before
    assert hasattr(act, "parametrizations") == before


def test_assign_knows_the_blocks():
    with pytest.raises(
        TypeError, match=r"bounds is not a block of the weight. The blocks are left, right, heights, left_slope, right_slope"
    ):
        pwlu.PWLU(3).assign(bounds=torch.zeros(3))


@pytest.mark.parametrize("phase", [0, 1])
def test_scaled_gradients(phase):
    """Also under torch.compile and in copies; not in the state dict, and gone with all factors 1."""
    act, x = pwlu.PWLU(3, intervals=4, init="silu"), torch.randn(20, 3)
    keys = act.state_dict().keys()
    (whole,) = torch.autograd.grad(act(x).square().sum(), act.weight)
    act.scale_gradients(left=0.0, right=0.0, heights=0.25)
    act.phase = phase
    for unit in (act, copy.deepcopy(act)):
        y = unit(x)
        assert torch.equal(y, pwlu.functional.pwlu(x, *act.blocks()))
        (scaled,) = torch.autograd.grad(y.square().sum(), unit.weight)
        found, expected = reference.unpack(scaled, 4), reference.unpack(whole, 4)
        if phase == 1 and unit is act:
            assert not scaled.any()
            continue
        assert not found.left.any()
        assert not found.right.any()
        assert torch.equal(found.heights, expected.heights / 4)
        assert torch.equal(found.left_slope, expected.left_slope)
    assert act.state_dict().keys() == keys
    act.scale_gradients()
    act.phase = 0
    assert torch.equal(torch.autograd.grad(act(x).square().sum(), act.weight)[0], whole)


def test_bad_input_through_the_module():
    with pytest.raises(ValueError, match="the activation has 4 channels"):
        pwlu.PWLU(4)(torch.randn(2, 3))
