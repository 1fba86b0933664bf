"""FReLU with either norm: against its formula, in training and in evaluation, on maps of any size."""

import copy
import pickle

import pytest
import torch
from torch import nn

from pwlu.baselines import FReLU

NORMS = ("batch", "group")
CHANNELS = 24  # three groups


def funnel(norm, channels=CHANNELS, channel_dim=1):
    """With thresholds of which some are above x and some below."""
    act = FReLU(channels, channel_dim, dtype=torch.float64, norm=norm)
    if norm == "batch":
        act.norm.running_mean.normal_()
        act.norm.running_var.uniform_(0.001, 0.002)
    nn.init.uniform_(act.norm.weight, 0.5, 2)
    nn.init.normal_(act.norm.bias)
    return act


def maps(layout):
    """Random numbers, and where their channels are. No two sizes are the same."""
    x = 2 * torch.randn(3, CHANNELS, 6, 7, dtype=torch.float64)
    x = {
        "NCHW": x,
        "channels_last": x.contiguous(memory_format=torch.channels_last),
        "NHWC": x.permute(0, 2, 3, 1).contiguous(),
        "sliced": x[..., ::2, 1:],
        "one pixel": x[:1, :, :1, :1],
    }[layout]
    return x, -1 if layout == "NHWC" else 1


def naive(act, x, groups):
    """max(x, T(x)), with the mean and variance of batch norm (`groups` is None) or of so many groups."""
    x = x.movedim(act.channel_dim, 1)
    around = nn.functional.pad(x, (1, 1, 1, 1))
    height, width = x.shape[2:]
    weight = act.conv.weight.detach()[:, 0, :, :, None, None]
    window = sum(weight[:, i, j] * around[:, :, i : height + i, j : width + j] for i in range(3) for j in range(3))
    if groups is not None:
        grouped = window.unflatten(1, (groups, -1))
        mean, variance = grouped.mean((2, 3, 4), keepdim=True), grouped.var((2, 3, 4), correction=0, keepdim=True)
        normal = ((grouped - mean) / (variance + act.norm.eps).sqrt()).flatten(1, 2)
    elif act.training:
        mean, variance = window.mean((0, 2, 3), keepdim=True), window.var((0, 2, 3), correction=0, keepdim=True)
        normal = (window - mean) / (variance + act.norm.eps).sqrt()
    else:
        mean, variance = act.norm.running_mean[:, None, None], act.norm.running_var[:, None, None]
        normal = (window - mean) / (variance + act.norm.eps).sqrt()
    threshold = normal * act.norm.weight.detach()[:, None, None] + act.norm.bias.detach()[:, None, None]
    return torch.where(threshold > x, threshold, x).movedim(1, act.channel_dim)


CASES = [
    (norm, training, layout)
    for norm in NORMS
    for training in (True, False)
    for layout in ("NCHW", "channels_last", "NHWC", "sliced", "one pixel")
    if (norm, training, layout) != ("batch", True, "one pixel")  # batch norm has nothing to normalise there
]


@pytest.mark.parametrize(("norm", "training", "layout"), CASES)
def test_formula(norm, training, layout):
    x, dim = maps(layout)
    act = funnel(norm, channel_dim=dim).train(training)
    expected = naive(act, x, 3 if norm == "group" else None)
    assert 0.1 < (expected > x).double().mean() < 0.9
    state = copy.deepcopy(act.state_dict())
    for grad in (True, False):  # by two ways
        act.load_state_dict(state)
        with torch.set_grad_enabled(grad):
            y = act(x)
        torch.testing.assert_close(y, expected, rtol=0, atol=2e-12)  # of up to about 10, in some tens of operations
        assert y.stride() == torch.empty_like(x).stride() or layout == "sliced"


def test_group_norm_does_the_same_in_evaluation():
    act, x = funnel("group"), maps("NCHW")[0]
    trained = act(x)
    assert torch.equal(act.eval()(x), trained)
    torch.testing.assert_close(
        act(x[1:2]), trained[1:2], rtol=0, atol=1e-12
    )  # and the result for an image does not depend on the rest of the batch
    batch = funnel("batch")
    assert not torch.allclose(batch(x), batch.eval()(x), atol=0.1)


@pytest.mark.parametrize(
    ("channels", "groups"), [(1, 1), (5, 1), (8, 1), (15, 1), (16, 2), (36, 4), (64, 8), (256, 32), (257, 1), (1024, 32)]
)
def test_groups(channels, groups):
    """At most 32, of 8 channels at least where there are so many, and as many as divide the channels."""
    assert FReLU(channels, norm="group").norm.num_groups == groups


@pytest.mark.parametrize("channels", [1, 5, 64])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1), (1, 1, 2), (0, 4, 4)])
def test_the_smallest_maps(channels, shape):
    """In training. (Where there is nothing to see, as in an image without objects, nothing comes out.)"""
    images, *size = shape
    torch.manual_seed(0)
    act = FReLU(channels, norm="group")
    nn.init.ones_(act.norm.weight)
    x = torch.randn(images, channels, *size, requires_grad=True)
    y = act(x)
    grads = torch.autograd.grad(y.sum(), [x, *act.parameters()])
    assert y.shape == x.shape
    assert all(value.isfinite().all() for value in (y, *grads))
    if shape == (1, 1, 1):
        if channels == 1:  # minus its mean, it is 0
            assert torch.equal(y, x.relu())
        else:
            assert (y > x.relu()).any()


def test_group_norm_of_equal_numbers():
    """Without variance, T is the shift alone."""
    act = FReLU(8, norm="group")
    nn.init.zeros_(act.conv.weight)
    y = act(torch.full((1, 8, 3, 3), -2.0))
    assert torch.equal(y, torch.zeros(1, 8, 3, 3))


def test_state():
    """What is saved of an ordinary one has not changed."""
    names = ["conv.weight", "norm.weight", "norm.bias"]
    assert list(FReLU(4).state_dict()) == [*names, "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    group = funnel("group")
    assert list(group.state_dict()) == names
    x = maps("NCHW")[0]
    for other in (copy.deepcopy(group), pickle.loads(pickle.dumps(group))):
        assert torch.equal(other(x), group(x))
    group.reset_parameters()
    assert 0.005 < group.conv.weight.std() < 0.015
    assert (group.norm.weight == 0.1).all()
    assert (FReLU(4).norm.weight == 1).all()
    assert (group.norm.bias == 0).all()


def test_the_same_start():
    """The same random numbers are drawn for either."""
    windows = []
    for norm in NORMS:
        torch.manual_seed(0)
        windows.append(FReLU(8, norm=norm).conv.weight)
    assert torch.equal(*windows)


def test_order_in_memory_is_that_of_x():
    """This holds whatever layout the norm returns: on GPUs, torch's group norm returns NCHW."""

    class Contiguous(nn.Module):
        def forward(self, x):
            return x.contiguous()

    act, x = FReLU(8), torch.randn(2, 8, 5, 6).contiguous(memory_format=torch.channels_last)
    act.norm = Contiguous()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert act(x).stride() == x.stride()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(monkeypatch, norm, dtype):
    """The type of x, as with ReLU. On GPUs, autocast has torch's group norm return 32 bits; this test imitates that."""
    group_norm = torch.group_norm
    monkeypatch.setattr(torch, "group_norm", lambda *args: group_norm(*args).float())
    act, x = FReLU(16, norm=norm), torch.randn(2, 16, 4, 4, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        y = act(x)
    assert y.dtype == dtype
    y.sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in act.parameters())


def test_names():
    assert repr(FReLU(8, -1, norm="group")).startswith("FReLU(\n  channels=8, channel_dim=-1, norm='group'\n")
    assert repr(FReLU(8, -1)).startswith("FReLU(\n  channels=8, channel_dim=-1\n")
    for wrong in ("layer", None, nn.GroupNorm):
        with pytest.raises(
            ValueError, match=r"FReLU: norm must be 'batch', or 'group' if it runs several times per forward pass, not"
        ):
            FReLU(8, norm=wrong)
