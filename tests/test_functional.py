"""Bad input: the error says what was expected, what came, and what to write instead."""

import pytest
import torch
from helpers import NAMES, unit, weight_of

from pwlu import ops
from pwlu.functional import packed, pwlu


def broken(error, text, x, change=None, **keywords):
    parameters = dict(zip(NAMES, unit(3, 4), strict=True)) | (change or {})
    with pytest.raises(error, match=text):
        pwlu(x, **parameters, **keywords)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.uint8])
def test_dtype_of_x(dtype):
    broken(TypeError, r"float32, bfloat16, float16 or float64, not torch\..*x\.float\(\)", torch.ones(2, 3).to(dtype))


def test_heights():
    broken(ValueError, r"\(channels, intervals \+ 1\).*not \(5,\)", torch.ones(2, 3), {"heights": torch.ones(5)})
    broken(ValueError, r"at least 1 interval, not \(3, 1\)", torch.ones(2, 3), {"heights": torch.ones(3, 1)})
    broken(TypeError, r"heights must be of a floating-point type", torch.ones(2, 3), {"heights": torch.ones(3, 5).int()})


@pytest.mark.parametrize("name", ["left", "right", "left_slope", "right_slope"])
def test_shape_of_parameters(name):
    broken(ValueError, rf"{name} must have the shape \(3,\).*not \(2,\)", torch.ones(2, 3), {name: torch.ones(2)})
    broken(ValueError, rf"{name} must have the shape \(3,\).*not \(3, 1\)", torch.ones(2, 3), {name: torch.ones(3, 1)})
    broken(TypeError, rf"{name} must be of a floating-point type.*int64", torch.ones(2, 3), {name: torch.ones(3).long()})


@pytest.mark.parametrize("x", [torch.ones(0, 3), torch.ones(2, 3, dtype=torch.float64)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn])
def test_types_are_looked_at_whatever_x_is(x, dtype, device):
    parameters = [p.to(device) for p in unit(3, 4)]
    for position, name in enumerate(NAMES):
        wrong = [*parameters[:position], parameters[position].to(dtype), *parameters[position + 1 :]]
        with pytest.raises(TypeError, match=f"{name} must be of a floating-point type"):
            pwlu(x.to(device), *wrong)
    weight, intervals = weight_of(parameters)
    with pytest.raises(TypeError, match="weight must be of a floating-point type"):
        packed(x.to(device), weight.to(dtype), intervals)


@pytest.mark.parametrize("operator", ["forward", "observe", "backward"])
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"x": torch.ones(2, 5)}, ValueError, "Create it with channels=5 or 1"),
        ({"x": torch.ones(2, 3).int()}, TypeError, "x must be float32, bfloat16, float16 or float64, not torch.int32"),
        ({"weight": torch.ones(26)}, ValueError, r"\(channels \* \(intervals \+ 5\),\).*not \(26,\) with intervals=4.*pack"),
        ({"weight": torch.ones(27, 1)}, ValueError, r"not \(27, 1\) with intervals=4"),
        ({"weight": torch.ones(0)}, ValueError, r"at least 1 channel and 1 interval, not \(0,\)"),
        ({"intervals": 0}, ValueError, "with intervals=0"),
        ({"weight": torch.ones(27, device="meta")}, ValueError, r"weight is on meta but x is on cpu.*act\.to\('cpu'\)"),
        ({"grad": torch.ones(3, 3)}, ValueError, r"grad must have the shape and device of x, \(2, 3\)"),
        ({"pool": torch.zeros(3, 4)}, ValueError, "4 channels|pool must have 3 channels"),
        ({"pool": torch.zeros(2, 3)}, ValueError, r"pool must have the shape \(3, channels\).*not \(2, 3\)"),
    ],
)
def test_operators_check_on_every_call(operator, change, error, text):
    """The first call teaches eager.cpp; a wrong one after it gets the same error, and only that."""
    weight, intervals = weight_of(unit(3, 4))
    right = {
        "x": torch.ones(2, 3),
        "weight": weight,
        "intervals": intervals,
        "grad": torch.ones(2, 3),
        "pool": torch.zeros(3, 3),
    }

    def call(x, weight, intervals, grad, pool):
        arguments = (x, weight, intervals, 1)
        if operator == "backward":
            return ops.backward(grad, *arguments, True, True)
        return ops.forward(*arguments) if operator == "forward" else ops.observe(*arguments, pool)

    call(**right)
    if change.keys() <= {"forward": {"grad", "pool"}, "observe": {"grad"}, "backward": {"pool"}}[operator]:
        return
    for _ in range(2):
        with pytest.raises(error, match=text) as found:
            call(**right | change)
        assert found.value.__context__ is None


def test_x_that_is_no_tensor():
    with pytest.raises(TypeError, match=r"x must be a tensor, not list\. Write torch\.as_tensor\(x\)"):
        packed([1.0, 2.0], *weight_of(unit(1, 4)))


def test_no_memory(device):
    x, (weight, intervals) = torch.randn(2, 3, device=device), weight_of(unit(3, 4, device=device))
    for arguments in ((freed(x.shape, device), weight), (x, freed(weight.shape, device))):
        with pytest.raises(RuntimeError, match="has no memory: it was freed"):
            packed(*arguments, intervals)


def freed(shape, device):
    tensor = torch.ones(shape, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_channels():
    broken(
        ValueError,
        r"3 channels, but x of shape \(2, 5\) has 5 in dimension 1\. Create it with channels=5 or 1",
        torch.ones(2, 5),
    )
    broken(ValueError, r"has 7 in dimension 1\. Write channel_dim=2", torch.ones(2, 7, 3))
    broken(ValueError, r"channel_dim=1 is not a dimension of x, which has the shape \(3,\).*channel_dim=-1", torch.ones(3))
    broken(ValueError, r"channel_dim=5 is not a dimension of x", torch.ones(2, 3), channel_dim=5)
    broken(ValueError, r"channel_dim=-3 is not a dimension of x", torch.ones(2, 3), channel_dim=-3)
    broken(ValueError, r"the shape \(\)\. A 0-d tensor needs PWLU\(channels=1\)", torch.ones(()))


def test_mixed_devices():
    broken(
        ValueError,
        r"left is on meta but x is on cpu\. Move the module: act\.to\('cpu'\)",
        torch.ones(2, 3),
        {"left": torch.ones(3, device="meta")},
    )
    broken(ValueError, r"heights is on meta", torch.ones(2, 3), {"heights": torch.ones(3, 5, device="meta")})


def test_one_channel_fits_everything():
    parameters = unit(1, 4)
    for shape in [(), (0,), (7,), (2, 3), (2, 3, 4, 5, 6)]:
        assert pwlu(torch.randn(shape), *parameters).shape == shape
        assert pwlu(torch.randn(shape), *parameters, channel_dim=9).shape == shape


@pytest.mark.parametrize("dim", range(-4, 4))
def test_channels_anywhere(dim):
    x = torch.randn(3, 3, 3, 3)
    parameters = unit(3, 4)
    expected = pwlu(x.movedim(dim, 1), *parameters).movedim(1, dim)
    assert torch.equal(pwlu(x, *parameters, channel_dim=dim), expected)
