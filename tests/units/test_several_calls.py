"""A unit that is called several times in one pass, as the heads of detectors are: gradients add up, whoever adds them."""

import gc
import warnings
import weakref

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

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


def assert_gradients(act, expected):
    close([act.weight.grad], [expected])


def close(found, expected):
    """To rounding: 540 numbers are added up, whose errors grow like a random walk, to 23 of one; twice that."""
    scale = max(e.abs().max().item() for e in expected)
    torch.testing.assert_close(list(found), list(expected), rtol=0, atol=46 * torch.finfo(expected[0].dtype).eps * scale)


def test_gradients_add_up(act, inputs):
    expected = separately(act, inputs)
    for _ in range(3):  # each with a graph of its own
        act.zero_grad()
        sum(loss(act(x)) for x in inputs).backward()
        assert_gradients(act, expected)


def test_over_backward_passes_too(act, inputs):
    for _ in range(2):
        sum(loss(act(x)) for x in inputs).backward()
    assert_gradients(act, 2 * separately(act, inputs))


@pytest.mark.parametrize("first", [True, False])
def test_with_another_use_of_the_parameters(act, inputs, first):
    expected = separately(act, inputs)
    terms = [lambda: sum(loss(act(x)) for x in inputs), lambda: 3 * act.heights.sum() + act.left.square().sum()]
    sum(term() for term in (terms if first else terms[::-1])).backward()
    blocks = pwlu.reference.unpack(expected, act.intervals)
    blocks.heights.add_(3)
    blocks.left.add_(2 * act.left.detach())
    assert_gradients(act, expected)


def test_only_some_are_asked_for(act, inputs):
    expected = separately(act, inputs)
    inputs[1].requires_grad_()
    total = sum(loss(act(x)) for x in inputs)
    grad_x, weight = torch.autograd.grad(total, (inputs[1], act.weight), retain_graph=True)
    assert grad_x.shape == inputs[1].shape
    close([weight], [expected])
    total.backward(inputs=[act.weight], retain_graph=True)
    assert inputs[1].grad is None
    assert_gradients(act, expected)
    total.backward(inputs=[inputs[1]])
    assert_gradients(act, expected)  # as it was
    assert torch.equal(inputs[1].grad, grad_x)


def test_only_some_learn(act, inputs):
    """A block that stands still, and then all of them."""
    expected = separately(act, inputs)
    act.scale_gradients(left=0.0, right_slope=0.5)
    sum(loss(act(x)) for x in inputs).backward()
    blocks = pwlu.reference.unpack(expected, act.intervals)
    blocks.left.zero_()
    blocks.right_slope.mul_(0.5)
    assert_gradients(act, expected)
    act.requires_grad_(False)
    inputs[0].requires_grad_()
    sum(loss(act(x)) for x in inputs).backward()
    assert_gradients(act, expected)  # as it was
    assert inputs[0].grad is not None


def test_graphs_that_live_on(act, inputs):
    """Two of the same parameters, which meanwhile have changed in place; each is asked for its gradients, one twice."""
    first = [loss(act(x)) for x in inputs]
    expected = separately(act, inputs)
    sum(first).backward(retain_graph=True)
    assert_gradients(act, expected)
    second = [loss(act(x)) for x in inputs[:2]]
    act.zero_grad()
    sum(first).backward()
    assert_gradients(act, expected)
    act.zero_grad()
    sum(second).backward()
    assert_gradients(act, separately(act, inputs[:2]))
    with torch.no_grad():
        act.heights *= 2
    act.zero_grad()
    third = [loss(act(x)) for x in inputs]
    sum(third).backward()
    assert_gradients(act, separately(act, inputs))
    assert len(first + second) == 6  # still there


def test_a_parameter_that_is_replaced(act, inputs):
    """While graphs of the old one live."""
    old = act.weight
    graphs = [loss(act(x)) for x in inputs]
    act.weight = torch.nn.Parameter(old.detach() - 0.5)
    expected = separately(act, inputs)
    sum(loss(act(x)) for x in inputs).backward()
    assert old.grad is None
    assert_gradients(act, expected)
    assert graphs


def test_parameters_that_are_computed(act, inputs):
    """By a parametrization: no leaves, and new ones at every call."""

    class Double(torch.nn.Module):
        def forward(self, raw):
            return 2 * raw

    plain = separately(act, inputs)
    with torch.no_grad():
        act.weight /= 2
    torch.nn.utils.parametrize.register_parametrization(act, "weight", Double())
    sum(loss(act(x)) for x in inputs).backward()
    close([act.parametrizations.weight.original.grad], [2 * plain])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(act, inputs, reentrant):
    expected = separately(act, inputs)
    for x in inputs:
        x.requires_grad_()
    sum(loss(checkpoint(act, x, use_reentrant=reentrant)) for x in inputs).backward()
    assert_gradients(act, expected)


def test_second_derivatives(act, inputs):
    act, inputs = act.double(), [x.double() for x in inputs]
    weight = act.weight.detach().clone().requires_grad_()
    blocks = pwlu.reference.unpack(weight, act.intervals)
    separate = sum(loss(pwlu.reference.forward(x, *blocks, 1)) for x in inputs)
    results = []
    for total, leaves in ((separate, [weight]), (sum(loss(act(x)) for x in inputs), [act.weight])):
        gradients = torch.autograd.grad(total, leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves))
    close(results[1], results[0])


def test_batches_of_gradients(act, inputs):
    outputs = [act(x) for x in inputs]
    total = torch.cat([y.flatten() for y in outputs])
    directions = torch.randn(3, len(total), device=total.device)
    leaves = [act.weight]
    batched = torch.autograd.grad(total, leaves, directions, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(total, leaves, d, retain_graph=True) for d in directions]
    close(batched, [torch.stack(of_one) for of_one in zip(*each, strict=True)])


def test_compiled_autograd(inputs):
    """In a loop in which the last loss, and with it the last graph, lives on."""
    from torch._dynamo import compiled_autograd

    act = pwlu.PWLU(3, intervals=5, init="silu", device=inputs[0].device)
    expected = separately(act, inputs)
    with warnings.catch_warnings(), compiled_autograd._enable(torch.compile(backend="eager")):
        warnings.simplefilter("ignore")  # torch's own
        for _ in range(3):
            total = sum(loss(act(x)) for x in inputs)
            act.zero_grad()
            total.backward()
            assert_gradients(act, expected)


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


def test_gradients_come_in_order(device):
    """Those of a head before those of the layers below it, also where the last graph lives on: others wait for them."""
    body = torch.nn.Sequential(*(torch.nn.Conv2d(3, 3, 1, device=device) for _ in range(3)))
    head, x, order = pwlu.PWLU(3, device=device), torch.randn(1, 3, 8, 8, device=device), []
    for name, parameter in (("0", body[0].weight), ("1", body[1].weight), ("2", body[2].weight), ("head", head.weight)):
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    for _ in range(3):
        order.clear()
        features = body(x)
        total = loss(head(features)) + loss(head(features[:, :, ::2, ::2]))
        total.backward()
        assert order == ["head", "2", "1", "0"]


def test_hooks_see_the_sum(act, inputs):
    seen = []
    act.weight.register_hook(seen.append)
    act.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    expected = separately(act, inputs)
    sum(loss(act(x)) for x in inputs).backward()
    assert len(seen) == 2
    close(seen, [expected, expected])


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
