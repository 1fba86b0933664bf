"""Bad input: the error says what was expected, what came, and what to write instead."""

import pytest
import torch
from helpers import NAMES, unit

from pwlu.functional import observe, pwlu
from pwlu.kernels import eager


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
        for function in (pwlu, observe):
            with pytest.raises(TypeError, match=f"{name} must be of a floating-point type"):
                function(x.to(device), *wrong)


def test_one_error_at_a_time():
    """The kernel's own, which says less, is not shown beside it."""
    with pytest.raises(ValueError, match="make the unit with channels=5") as found:
        pwlu(torch.ones(2, 5), *unit(3, 4))
    assert found.value.__context__ is None


def test_no_memory(device):
    x, parameters = torch.randn(2, 3, device=device), unit(3, 4, device=device)
    for position in range(6):
        for nothing in (freed, torch._efficientzerotensor):
            arguments = [x, *parameters]
            like = arguments[position]
            arguments[position] = nothing(like.shape, device=device)
            if nothing is torch._efficientzerotensor and (position == 0 or eager.library is not None):  # torch makes it
                expected = pwlu(*arguments[:position], torch.zeros_like(like), *arguments[position + 1 :])
                assert torch.equal(pwlu(*arguments), expected)
                continue
            with pytest.raises(RuntimeError, match="has no memory: it was freed"):
                pwlu(*arguments)


def freed(shape, device):
    tensor = torch.ones(shape, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_channels():
    broken(
        ValueError, r"3 channels, but x of shape \(2, 5\) has 5 in dimension 1: make the unit with channels=5", torch.ones(2, 5)
    )
    broken(ValueError, r"has 7 in dimension 1: write channel_dim=2", torch.ones(2, 7, 3))
    broken(ValueError, r"channel_dim is 1, but x has 1 dimensions \(3,\).*channel_dim=-1", torch.ones(3))
    broken(ValueError, r"channel_dim is 5", torch.ones(2, 3), channel_dim=5)
    broken(ValueError, r"channel_dim is -3", torch.ones(2, 3), channel_dim=-3)
    broken(ValueError, r"0 dimensions \(\)\. A number takes a unit of 1 channel", torch.ones(()))


def test_mixed_devices():
    broken(
        ValueError,
        r"left is on meta and x on cpu\. Move the module: act\.to\('cpu'\)",
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
