"""The operators in every mode torch has: autograd, compile, export, autocast, checkpoint, torch.func, meta."""

import copy
import pickle
import warnings

import pytest
import torch
from helpers import DTYPES, parameter_dtype, unit, weight_of
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import pwlu
from pwlu import ops, reference
from pwlu.functional import pwlu as function
from pwlu.kernels import dispatch


@pytest.fixture
def network(device):
    """Channel-wise and layer-wise units in a network small enough to compile."""
    torch.manual_seed(1)
    units = pwlu.PWLU(6, init="silu"), pwlu.PWLU(1, init="tanh")
    return nn.Sequential(nn.Conv2d(3, 6, 3), units[0], nn.Conv2d(6, 4, 3), units[1]).to(device)


def gradients(model, x, run=None):
    model.zero_grad()
    (run or model)(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


# The operators themselves.

torchs_own_warning = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "dim", "channels"), [((2, 3, 4, 5), 1, 3), ((5, 3), -1, 3), ((4, 3), 0, 1)])
@torchs_own_warning
def test_opcheck(shape, dim, channels, dtype, device):
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    check_operators(x, unit(channels, 4, device=device), dim)


def check_operators(x, parameters, dim):
    weight, intervals = weight_of(parameters)
    pool = torch.zeros(3, parameters[0].shape[0], device=x.device)
    opcheck(ops.forward, (x, weight.requires_grad_(), intervals, dim))
    opcheck(ops.observe, (x, weight, intervals, dim, pool))
    x, weight = x.detach(), weight.detach()
    for needs in ((True, True), (True, False), (False, True)):
        opcheck(ops.backward, (torch.randn_like(x), x, weight, intervals, dim, *needs))
    opcheck(ops.lookup, (x, parameters[0], *reference.tables(*parameters), dim))
    opcheck(ops.moments, (x, dim, pool))


@torchs_own_warning
def test_opcheck_of_plain_torch(monkeypatch):
    """What serves devices without a kernel keeps the same contract."""
    monkeypatch.setattr(dispatch, "kernel_of", lambda x: None)
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    check_operators(x.requires_grad_(), unit(3, 4), 1)


@torchs_own_warning
@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last])
def test_opcheck_layouts(fmt, device):
    x = torch.randn(2, 3, 4, 5, device=device).contiguous(memory_format=fmt)
    weight, intervals = weight_of(unit(3, 4, device=device))
    opcheck(ops.forward, (x.requires_grad_(), weight.requires_grad_(), intervals, 1))
    opcheck(ops.forward, (x.detach()[:, :, ::2], weight.detach(), intervals, 1))


@pytest.mark.parametrize(("shape", "dim", "channels"), [((5, 3, 2), 1, 3), ((4, 3), -1, 3), ((6,), 0, 1), ((), 1, 1)])
def test_gradcheck_of_every_parameter(shape, dim, channels, device):
    inputs = [(3 * torch.randn(shape, dtype=torch.float64, device=device)).requires_grad_()]
    inputs += [p.requires_grad_() for p in unit(channels, 5, torch.float64, device)]
    assert torch.autograd.gradcheck(lambda *a: function(*a, channel_dim=dim), inputs)
    assert torch.autograd.gradgradcheck(lambda *a: function(*a, channel_dim=dim), inputs)


@pytest.mark.parametrize("wanted", range(2))
def test_only_the_gradient_that_is_asked_for(wanted, device):
    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, call, types, arguments=(), keywords=None):
            if call is ops.backward:
                asked.append(arguments[-2:])
            return call(*arguments, **(keywords or {}))

    weight, intervals = weight_of(unit(3, 4, device=device))
    inputs, asked = [torch.randn(4, 3, device=device), weight], []
    inputs[wanted].requires_grad_()
    with Log():
        ops.forward(*inputs, intervals, 1).sum().backward()
    assert asked == [(wanted == 0, wanted == 1)]
    assert [t.grad is not None for t in inputs] == [i == wanted for i in range(2)]


def test_nothing_but_the_inputs_is_held(device):
    weight, intervals = weight_of(unit(3, 4, device=device))
    inputs = [torch.randn(4, 3, device=device, requires_grad=True), weight.requires_grad_()]
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.data_ptr()), lambda t: t):
        ops.forward(*inputs, intervals, 1)
    assert held == [t.data_ptr() for t in inputs]


def test_nothing_is_held_when_no_gradient_is_wanted(device):
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t), lambda t: t):
        assert not function(torch.randn(4, 3, device=device), *unit(3, 4, device=device)).requires_grad
        with torch.no_grad():
            function(torch.randn(4, 3, device=device), *(p.requires_grad_() for p in unit(3, 4, device=device)))
    assert not held


def test_inference_tensors(device):
    with torch.inference_mode():
        x = torch.randn(4, 3, device=device)
        parameters = unit(3, 4, device=device)
        y = function(x, *parameters)
    assert y.is_inference()
    assert torch.equal(y.clone(), function(x.clone(), *(p.clone() for p in parameters)))


def test_negative_views(device):
    z = torch.randn(4, 3, dtype=torch.complex64, device=device)
    x = z.conj().imag
    parameters = unit(3, 4, device=device)
    assert torch.equal(function(x, *parameters), function(x.clone().contiguous(), *parameters))
    dense = torch._neg_view(torch.randn(4, 3, device=device))
    assert torch.equal(function(dense, *parameters), function(dense.clone(), *parameters))
    for position, parameter in enumerate(parameters):
        negated = [*parameters[:position], torch._neg_view(-parameter), *parameters[position + 1 :]]
        assert torch.equal(function(x.clone(), *negated), function(x.clone(), *parameters))


def test_deterministic(device):
    x = torch.randn(16, 8, 50, 50, device=device, requires_grad=True)
    parameters = [p.requires_grad_() for p in unit(8, 16, device=device)]
    grad = torch.randn_like(x)
    first = torch.autograd.grad(function(x, *parameters), (x, *parameters), grad)
    for _ in range(3):
        again = torch.autograd.grad(function(x, *parameters), (x, *parameters), grad)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# Modes.


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_with_dynamic_batch_sizes(network, backend, device):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(network, fullgraph=True, backend=backend)
    for batch in (2, 3, 5, 7):
        x = torch.randn(batch, 3, 10, 10, device=device)
        torch.testing.assert_close(compiled(x), network(x))
        for a, b in zip(gradients(network, x, compiled), gradients(network, x), strict=True):
            torch.testing.assert_close(a, b)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # one for the first size, one for all others


def test_export_with_a_dynamic_batch(network, device):
    x = torch.randn(2, 3, 10, 10, device=device)
    program = torch.export.export(network, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    other = torch.randn(5, 3, 10, 10, device=device)
    torch.testing.assert_close(program.module()(other), network(other))
    assert "pwlu.forward.default" in {str(n.target) for n in program.graph.nodes}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing_but_the_input(dtype, device):
    act = pwlu.PWLU(3, init="silu").to(device)
    x = torch.randn(4, 3, device=device).to(dtype)
    expected = act(x)
    with torch.autocast(device.type, dtype=dtype):
        y = act(x)
        assert act(x.float()).dtype == torch.float32
    assert y.dtype == dtype
    assert torch.equal(y, expected)
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in act.parameters())


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_results(dtype, device):
    x = torch.randn(4, 3, device=device).to(dtype).requires_grad_()
    parameters = [p.requires_grad_() for p in unit(3, 4, parameter_dtype(dtype), device)]
    y = function(x, *parameters)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype
    assert all(p.grad.dtype == p.dtype for p in parameters)


def test_a_model_in_half_precision(network, device):
    half = copy.deepcopy(network).bfloat16()
    y = half(torch.randn(2, 3, 10, 10, device=device).bfloat16())
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.bfloat16 for p in half.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(network, device, reentrant):
    x = torch.randn(2, 3, 10, 10, device=device, requires_grad=True)
    run = lambda x: checkpoint(network, x, use_reentrant=reentrant)  # noqa: E731
    assert all(torch.equal(a, b) for a, b in zip(gradients(network, x, run), gradients(network, x), strict=True))


def test_copies(network, device):
    x = torch.randn(2, 3, 10, 10, device=device)
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert torch.equal(other(x), network(x))


def test_meta():
    with torch.device("meta"):
        act = pwlu.PWLU(5)
    x = torch.empty(2, 5, 7, 8, device="meta").to(memory_format=torch.channels_last)
    y = act(x)
    assert (y.shape, y.stride(), y.device.type) == (x.shape, x.stride(), "meta")
    assert ops.moments(x, 1, torch.zeros(3, 5, device="meta")) is None


def test_fx(network, device):
    x = torch.randn(2, 3, 10, 10, device=device)
    assert torch.equal(torch.fx.symbolic_trace(network)(x), network(x))


def test_moments_have_no_gradient(device):
    x, pool = torch.randn(4, 3, device=device, requires_grad=True), torch.zeros(3, 3, device=device)
    version = pool._version
    ops.moments(x, 1, pool)
    assert pool[0].tolist() == [4.0] * 3
    assert not pool.requires_grad
    assert pool._version > version


def test_observe_is_forward_with_moments_and_parameters_at_rest(device):
    x = torch.randn(4, 3, 5, device=device, requires_grad=True)
    weight, intervals = weight_of(unit(3, 4, device=device))
    weight.requires_grad_()
    pool, expected = torch.zeros(3, 3, device=device), torch.zeros(3, 3, device=device)
    for count in (1, 2):  # the second adds to the first
        version = pool._version
        y = ops.observe(x, weight, intervals, 1, pool)
        ops.moments(x, 1, expected)
        torch.testing.assert_close(pool, expected)
        assert pool[0].tolist() == [20.0 * count] * 3
        assert pool._version > version
        assert not pool.requires_grad
    assert torch.equal(y, ops.forward(x, weight, intervals, 1))
    grad = torch.randn_like(y)
    of_x, of_weight = torch.autograd.grad(y, [x, weight], grad)
    assert torch.equal(of_x, torch.autograd.grad(ops.forward(x, weight, intervals, 1), x, grad)[0])
    assert torch.equal(of_weight, torch.zeros_like(weight))
    assert not ops.observe(x.detach(), weight.detach(), intervals, 1, pool).requires_grad


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_observe_under_compile(backend, device):
    torch._dynamo.reset()
    x = torch.randn(4, 3, 5, device=device, requires_grad=True)
    weight, intervals = weight_of(unit(3, 4, device=device))
    weight.requires_grad_()
    pools = [torch.zeros(3, 3, device=device) for _ in range(2)]

    def step(x, pool):
        return ops.observe(x * 2, weight, intervals, 1, pool)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(compiled(x, pools[0]), step(x, pools[1]))
        torch.testing.assert_close(*pools)
    leaves = [x, weight]
    found, expected = (torch.autograd.grad(f(x, pools[0]).square().sum(), leaves) for f in (compiled, step))
    torch.testing.assert_close(found, expected)


# The short way around the dispatcher is taken only where nobody else takes part.


def test_batched_gradients(device):
    x = torch.randn(4, 3, 5, device=device, dtype=torch.float64, requires_grad=True)
    parameters = [p.requires_grad_() for p in unit(3, 4, torch.float64, device)]
    y = function(x, *parameters)
    grads = torch.randn(2, *y.shape, device=device, dtype=torch.float64)
    together = torch.autograd.grad(y, [x, *parameters], grads, is_grads_batched=True, retain_graph=True)
    for i, grad in enumerate(grads):
        for batched, alone in zip(together, torch.autograd.grad(y, [x, *parameters], grad, retain_graph=True), strict=True):
            torch.testing.assert_close(batched[i], alone)
    call = lambda x: function(x, *parameters)  # noqa: E731
    jacobian = torch.autograd.functional.jacobian
    torch.testing.assert_close(jacobian(call, x, vectorize=True), jacobian(call, x))


def test_recorded_before_dispatch(device):
    x, parameters = torch.randn(4, 3, 5, device=device), unit(3, 4, device=device)
    graph = make_fx(lambda x: function(x, *parameters), pre_dispatch=True)(x)
    assert any(node.target is ops.forward for node in graph.graph.nodes)
    assert torch.equal(graph(x), function(x, *parameters))


def test_a_tensor_of_zeros_without_memory(device):
    x, parameters = torch._efficientzerotensor(4, 3, 5, device=device), unit(3, 4, device=device)
    assert torch.equal(function(x, *parameters), function(torch.zeros(4, 3, 5, device=device), *parameters))


def test_function_modes_see_the_operator(device):
    seen = []

    class Log(TorchFunctionMode):
        def __torch_function__(self, call, types, arguments=(), keywords=None):
            seen.append(call)
            return call(*arguments, **(keywords or {}))

    with Log():
        function(torch.randn(4, 3, device=device), *unit(3, 4, device=device))
    assert ops.forward in seen


@pytest.mark.parametrize("position", range(6))
def test_subclasses_see_the_operator(position, device):
    seen = []

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, call, types, arguments=(), keywords=None):
            seen.append(call)
            return super().__torch_function__(call, types, arguments, keywords or {})

    arguments = [torch.randn(4, 3, device=device), *unit(3, 4, device=device)]
    arguments[position] = arguments[position].as_subclass(Loud)
    function(*arguments)
    assert ops.forward in seen


def test_dispatch_modes_see_the_operators(device):
    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, call, types, arguments=(), keywords=None):
            seen.append(call)
            return call(*arguments, **(keywords or {}))

    with Log():
        y = function(torch.randn(4, 3, device=device, requires_grad=True), *unit(3, 4, device=device))
    with Log():
        y.sum().backward()
    assert ops.forward in seen
    assert ops.backward in seen


def test_tracing_before_dispatch_sees_the_operator(device):
    traced = make_fx(lambda *a: function(*a), pre_dispatch=True)
    graph = traced(torch.randn(4, 3, device=device), *unit(3, 4, device=device))
    assert [node.target for node in graph.graph.nodes if node.target is ops.forward] == [ops.forward]


# torch.func: plain torch does the work, and does it right.


@pytest.mark.parametrize(("shape", "dim", "channels"), [((4, 3, 5), 1, 3), ((4, 3), -1, 3), ((3, 2), 0, 3), ((5,), 1, 1)])
def test_vmap_over_inputs_and_units(shape, dim, channels, device):
    x = torch.randn(2, *shape, dtype=torch.float64, device=device)
    stacked = [torch.stack(p) for p in zip(*(unit(channels, 4, torch.float64, device) for _ in range(2)), strict=True)]
    call = lambda x, *p: function(x, *p, channel_dim=dim)  # noqa: E731
    expected = torch.stack([call(x[i], *(p[i] for p in stacked)) for i in range(2)])
    torch.testing.assert_close(torch.vmap(call)(x, *stacked), expected)
    one = [p[0] for p in stacked]
    torch.testing.assert_close(torch.vmap(lambda x: call(x, *one))(x), torch.stack([call(x[i], *one) for i in range(2)]))


def test_gradients_of_every_sample(device):
    act = pwlu.PWLU(3, init="silu").double().to(device)
    parameters = {k: p.detach() for k, p in act.named_parameters()}
    x = torch.randn(4, 3, dtype=torch.float64, device=device)
    loss = lambda p, x: torch.func.functional_call(act, p, (x[None],)).square().sum()  # noqa: E731
    found = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for i in range(4):
        expected = torch.autograd.grad(act(x[i : i + 1]).square().sum(), list(act.parameters()))
        for (name, _), e in zip(act.named_parameters(), expected, strict=True):
            torch.testing.assert_close(found[name][i], e)


def test_forward_mode_and_hessian(device):
    inputs = [torch.randn(4, 3, dtype=torch.float64, device=device), *unit(3, 4, torch.float64, device)]
    tangents = [torch.randn_like(t) for t in inputs]
    _, tangent = torch.func.jvp(function, tuple(inputs), tuple(tangents))
    leaves = [t.clone().requires_grad_() for t in inputs]
    jacobians = torch.autograd.functional.jacobian(function, tuple(leaves))
    expected = sum((j.flatten(2) @ t.flatten()) for j, t in zip(jacobians, tangents, strict=True))
    torch.testing.assert_close(tangent, expected)
    loss = lambda h: function(inputs[0], *inputs[1:3], h, *inputs[4:]).pow(3).sum()  # noqa: E731
    torch.testing.assert_close(
        torch.func.hessian(loss)(inputs[3]), torch.autograd.functional.hessian(loss, inputs[3].clone().requires_grad_())
    )


def test_tangents_in_a_backward_pass():
    """The gradient of a dual gradient: J^T of its tangent, without a graph for second derivatives."""
    inputs = [t.requires_grad_() for t in (torch.randn(4, 3), *unit(3, 4))]
    y = function(*inputs)
    tangent = torch.randn_like(y)
    expected = torch.autograd.grad(y, inputs, tangent, retain_graph=True)
    with torch.autograd.forward_ad.dual_level():
        grads = torch.autograd.grad(y, inputs, torch.autograd.forward_ad.make_dual(torch.ones_like(y), tangent))
        found = [torch.autograd.forward_ad.unpack_dual(g).tangent for g in grads]
    torch.testing.assert_close(found, list(expected))


@pytest.mark.parametrize("operator", [ops.forward, ops.observe])
def test_compiled_autograd(operator):
    from torch._dynamo import compiled_autograd

    weight, intervals = weight_of(unit(3, 4))
    inputs = [t.requires_grad_() for t in (torch.randn(4, 3), weight)]
    pool = [torch.zeros(3, 3)] if operator is ops.observe else []
    loss = lambda: operator(*inputs, intervals, 1, *pool).square().sum()  # noqa: E731
    expected = torch.autograd.grad(loss(), inputs)
    with warnings.catch_warnings(), compiled_autograd._enable(torch.compile(backend="eager")):
        warnings.simplefilter("ignore")  # torch's own
        loss().backward()
    torch.testing.assert_close([t.grad for t in inputs], list(expected))


def test_the_missing_kernel_is_said_once(monkeypatch):
    from pwlu.kernels import cpu, eager

    monkeypatch.setattr(cpu, "choose", lambda: (None, "no C compiler was found"))
    dispatch._kernel_for_device.cache_clear()
    eager.forget()
    x, parameters = torch.randn(4, 3), unit(3, 4)
    try:
        with pytest.warns(UserWarning, match="no C compiler was found.*pwlu info"):
            y = function(x, *parameters)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(function(x, *parameters), y)
        assert torch.equal(y, reference.forward(x, *parameters, 1))
        x.requires_grad_()
        function(x, *parameters).sum().backward()
        pool = torch.zeros(3, 3)
        ops.moments(x, 1, pool)
        assert pool[0].tolist() == [4.0] * 3
    finally:
        dispatch._kernel_for_device.cache_clear()
