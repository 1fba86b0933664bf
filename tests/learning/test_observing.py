"""The forward pass of Phase I in every mode torch has: what a unit sees is counted once, whoever runs it."""

import pytest
import torch
from networks import network, units, watching
from torch import nn
from torch.utils.checkpoint import checkpoint

import pwlu


def observing(channels=3):
    """A unit that has something before it, as its own parameters do not learn in Phase I."""
    return nn.Sequential(nn.Linear(3, channels), watching(pwlu.PWLU(channels)))


@pytest.fixture(autouse=True)
def _gpu_is_ready():
    """The compiler looks for GPUs, and torch refuses to checkpoint a forward pass that is the first to do so."""
    if torch.cuda.is_available():
        torch.cuda.init()


def counts(model):
    return [unit.statistics.pool[0, 0].item() for unit in units(model)]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_a_forward_that_checkpointing_runs_again_counts_once(reentrant, backend):
    torch._dynamo.reset()
    model = network()
    for act in units(model):
        watching(act)
    block = torch.compile(model, backend=backend) if backend else model
    x = torch.randn(16, 5, requires_grad=True)
    for calls in (1, 2, 3):
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()
        assert [act.statistics.pool[0, 0].item() for act in units(model)] == [16 * calls, 16 * 8 * calls]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_checkpointing_inside_compiled_code_counts_once(backend):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = network()

        def forward(self, x):
            return checkpoint(self.model, x, use_reentrant=False)

    torch._dynamo.reset()
    model = Checkpointed()
    for act in units(model):
        watching(act)
    compiled = torch.compile(model, backend=backend)
    for calls in (1, 2):
        compiled(torch.randn(16, 5)).sum().backward()
        assert [act.statistics.pool[0, 0].item() for act in units(model)] == [16 * calls, 16 * 8 * calls]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_pools_what_eager_code_does(backend):
    """The inputs themselves may differ by rounding: 3 products and sums, each of numbers of size 10 at most."""
    torch._dynamo.reset()
    model, compiled = observing().double(), observing().double()
    compiled.load_state_dict(model.state_dict())
    run = torch.compile(compiled, backend=backend, fullgraph=True)
    for batch in (5, 2, 9):
        x = torch.randn(batch, 3, dtype=torch.float64)
        run(x).sum().backward()
        model(x).sum().backward()
    count, mean, m2 = compiled[1].statistics.pool
    assert (count == 16).all()
    roundings = 2.0**-53 * 8 * 16 * 10
    torch.testing.assert_close(mean, model[1].statistics.pool[1], rtol=0, atol=roundings)
    torch.testing.assert_close(m2, model[1].statistics.pool[2], rtol=0, atol=roundings * 16 * 10)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    """A pass through a model in training mode is one, as it is for the statistics of batch normalization."""
    model = observing()
    with mode():
        model(torch.randn(4, 3))
    model(torch.randn(5, 3)).sum().backward()
    assert counts(model) == [9]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """Inputs of 16 bits, statistics of 32: a sum of a thousand ones would stop at 256 in bfloat16."""
    act = watching(pwlu.PWLU(1))
    with torch.autocast("cpu", dtype=dtype):
        for _ in range(2):
            assert act(torch.ones(1000, dtype=dtype)).dtype == dtype
    assert act.statistics.pool.dtype == torch.float32
    assert act.statistics.pool[:, 0].tolist() == [2000.0, 1.0, 0.0]


def test_the_derivative_is_that_of_the_function_at_rest():
    """Of the input as always; of the parameters zero, so that nobody misses them."""
    act = pwlu.PWLU(3, init="silu")
    x = torch.randn(4, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(act(x).square().sum(), x)
    watching(act)(x).square().sum().backward()
    assert torch.equal(x.grad, expected)
    assert all(not p.grad.any() for p in act.parameters())


def test_nothing_comes_back():
    """Where what follows has no gradient to give, the parameters still have theirs."""

    class Silent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    act, x = watching(pwlu.PWLU(3)), torch.randn(4, 3, requires_grad=True)
    Silent.apply(act(x)).sum().backward()
    assert x.grad is None
    assert all(not p.grad.any() for p in act.parameters())


def test_a_penalty_on_gradients():
    """Derivatives of derivatives: one forward pass, counted once."""
    model = observing()
    x = torch.randn(4, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert model[0].weight.grad.any()
    assert counts(model) == [4]


def test_gradients_of_every_sample():
    """torch.vmap: each sample is a pass of its own, and the pool ends as with all of them at once."""
    model, together = observing().double(), observing().double()
    together.load_state_dict(model.state_dict())
    parameters = {k: p.detach() for k, p in model.named_parameters()}
    loss = lambda p, x: torch.func.functional_call(model, p, (x[None],)).square().sum()  # noqa: E731
    x = torch.randn(4, 3, dtype=torch.float64)
    torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    together(x)
    torch.testing.assert_close(model[1].statistics.pool, together[1].statistics.pool, rtol=0, atol=2.0**-53 * 64 * 10)
    model(x)
    assert counts(model) == [8]


def test_other_transforms():
    model = observing()
    x = torch.randn(4, 3)
    torch.func.jvp(model, (x,), (x,))
    assert counts(model) == [4]
    torch.func.grad(lambda x: model(x).sum())(x)
    assert counts(model) == [8]


def test_tracing_counts_nothing():
    """It passes no data. What fx has traced is the function alone, for looking into a model or taking it apart."""
    model = observing()
    x = torch.randn(4, 3)
    traced = torch.fx.symbolic_trace(model)
    torch.export.export(model, (x,))
    assert counts(model) == [0]
    y = model(x)
    assert counts(model) == [4]
    assert torch.equal(traced(x), y)


def test_looking_at_the_pool_during_a_backward_pass():
    """What checkpointing runs again then is not counted, but what has been seen is not forgotten."""
    model, seen = observing(), []
    y = model(torch.randn(4, 3))
    y.register_hook(lambda gradient: seen.append(model.state_dict()["1.statistics._extra_state"][0, 0].item()))
    y.sum().backward()
    assert seen == counts(model) == [4]
