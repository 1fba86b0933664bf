"""A unit that is called several times in one pass, as the heads of detectors are: its gradients add up."""

import gc
import weakref

import pytest
import torch
from torch.autograd import forward_ad

import pwlu


@pytest.fixture(params=[1, 3], ids=["layer", "channel"])
def act(request, device):
    act = pwlu.PWLU(request.param, intervals=5, init="silu", device=device)
    with torch.no_grad():
        for parameter in act.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return act


@pytest.fixture
def inputs(device):
    return [torch.randn(2, 3, size, size, device=device) for size in (8, 4, 3, 1)]


def loss(y):
    return y.square().sum()


def separately(act, inputs):
    """The gradient of the weight, call by call by the reference in float64, added up."""
    gradients = []
    for x in inputs:
        weight = act.weight.detach().double().requires_grad_()
        blocks = pwlu.reference.unpack(weight, act.intervals)
        gradients.append(torch.autograd.grad(loss(pwlu.reference.forward(x.detach().double(), *blocks, 1)), weight)[0])
    return sum(gradients).float()


def close(found, expected):
    """To rounding: 540 numbers are added up, whose errors grow like a random walk, to 23 of one; twice that."""
    scale = max(e.abs().max().item() for e in expected)
    torch.testing.assert_close(list(found), list(expected), rtol=0, atol=46 * torch.finfo(expected[0].dtype).eps * scale)


def test_gradients_add_up(act, inputs):
    """Over calls, and over backward passes."""
    for passes in (1, 2):
        sum(loss(act(x)) for x in inputs).backward()
        close([act.weight.grad], [passes * separately(act, inputs)])


def test_graphs_that_live_on(act, inputs):
    """Two graphs of one weight, each used twice, and one after the weight has changed in place."""
    first, second = ([loss(act(x)) for x in some] for some in (inputs, inputs[:2]))
    for graph, some in ((first, inputs), (second, inputs[:2]), (first, inputs), (second, inputs[:2])):
        act.zero_grad()
        sum(graph).backward(retain_graph=True)
        close([act.weight.grad], [separately(act, some)])
    with torch.no_grad():
        act.heights *= 2
    act.zero_grad()
    sum(loss(act(x)) for x in inputs).backward()
    close([act.weight.grad], [separately(act, inputs)])


def test_gradients_with_tangents(act, device):
    """What comes behind the unit has a tangent, and so its gradients have: against differences."""
    x, weight, tangent = (torch.randn(shape, device=device) for shape in ((2, 3, 4, 4), (3, 3, 1, 1), (3, 3, 1, 1)))
    parameters = [act.weight]

    def gradients(weight, of):
        return torch.autograd.grad(loss(torch.nn.functional.conv2d(sum(act(x * k) for k in (1, 2, 3)), weight)), of)

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weight, tangent)
        tangents = [forward_ad.unpack_dual(g).tangent.clone() for g in gradients(dual, parameters)]
    step = 0.01  # the gradients are quadratic in the weight: central differences are exact but for rounding
    ahead, behind = (gradients(weight + sign * step * tangent, parameters) for sign in (1, -1))
    differences = [(a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True)]
    scale = max(d.abs().max().item() for d in differences)
    torch.testing.assert_close(tangents, differences, rtol=0, atol=50 / step * torch.finfo(torch.float32).eps * scale)


def test_phase_one_gives_zeros(act, inputs):
    """Not missing, however often it is called; and the gradients of inputs."""
    optimizer = torch.optim.SGD(act.parameters(), lr=0.1)
    controller = pwlu.TwoPhase(act, optimizer, realign_at=5)
    for count in (1, 4, 2):
        for x in inputs:
            x.grad = None
            x.requires_grad_()
        sum(loss(act(x)) for x in inputs[:count]).backward()
        assert torch.equal(act.weight.grad, torch.zeros_like(act.weight))
        for x in inputs[:count]:
            close([x.grad], torch.autograd.grad(loss(pwlu.reference.forward(x, *act.blocks(), 1)), x))
        optimizer.step()
        act.zero_grad()
    assert controller.steps == 3


def test_nothing_is_kept_alive(device, inputs):
    act = pwlu.PWLU(3, device=device)
    total = sum(loss(act(x)) for x in inputs)
    watched = [weakref.ref(act.weight)]
    total.backward()
    del total, act
    gc.collect()
    assert not any(w() for w in watched)
