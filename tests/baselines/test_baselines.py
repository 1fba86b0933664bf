"""The activations to compare with: their formulas, gradients, what they keep for backward, and their starts."""

import copy
import pickle

import pytest
import torch
from helpers import DTYPES, assert_within, over_channel, parameter_dtype, rounding
from torch import nn

import pwlu
from pwlu import reference
from pwlu.baselines import APL, NAMES, PAU, FReLU, PReLU, rational
from pwlu.initial_functions import INITIAL_FUNCTIONS, find_initial_function

LAYOUTS = ("NCHW", "channels_last", "NHWC", "sliced", "BTC", "vector", "empty")


def batch(layout, dtype=torch.float32):
    """Random numbers, some of them small, and where their channels are. No two sizes are the same."""
    x = 2 * torch.randn(3, 5, 6, 7, dtype=torch.float64)
    x[:, :, 1] /= 1000
    x = {
        "NCHW": x,
        "channels_last": x.contiguous(memory_format=torch.channels_last),
        "NHWC": x,
        "sliced": x[..., ::2, 1:],
        "BTC": x[0],
        "vector": x[0, 0, 0],
        "empty": x[:0],
    }[layout]
    return x.to(dtype), -1 if layout in ("NHWC", "BTC", "vector") else 1


def apl(channels, hinges=3, channel_dim=1, dtype=torch.float32):
    """Hinges on both sides of 0."""
    act = APL(channels, hinges, channel_dim, dtype=dtype)
    with torch.no_grad():
        act.slopes.normal_()
        act.offsets.normal_()
    return act


def pau(dtype=torch.float32):
    """A function without symmetry, whose denominator has terms of either sign."""
    act = PAU("relu", dtype=dtype)
    with torch.no_grad():
        act.numerator.add_(0.1 * torch.randn(6))
        act.denominator.add_(torch.tensor([-0.2, 0.0, 0.05, 0.0]))
    return act


# The formulas, as they are written.


def naive_apl(x, slopes, offsets, channel_dim):
    y = x.clamp_min(0)
    for a, b in zip(slopes.unbind(1), offsets.unbind(1), strict=True):
        y = y + reference.along(a, x, channel_dim) * (reference.along(b, x, channel_dim) - x).clamp_min(0)
    return y


def naive_pau(x, numerator, denominator):
    top = sum(a * x**j for j, a in enumerate(numerator))
    return top / (1 + sum(b * x**k for k, b in enumerate(denominator, 1)).abs())


def in_float64(function, x, parameters, *rest):
    """y and the gradients of x and the parameters, for a random gradient of y, by autograd."""
    inputs = [t.detach().double().requires_grad_() for t in (x, *parameters)]
    y = function(*inputs, *rest)
    grad = torch.randn_like(y).to(x.dtype)
    return y.detach(), grad, torch.autograd.grad(y, inputs, grad.double())


def computed(act, x, grad):
    """The same by the module, and what it must keep: type, and order in memory."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = act(x)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    assert y.stride() == torch.empty_like(x).stride()
    return y.detach(), torch.autograd.grad(y, [x, *act.parameters()], grad)


def check_apl(act, x, dim, rounding=rounding, sums=16):
    """Values and gradients to rounding; `sums`: how many half units those over many elements may be off."""
    channels, hinges = act.slopes.shape
    y, grad, grads = in_float64(naive_apl, x, act.parameters(), dim)
    found, found_grads = computed(act, x, grad)
    u, v, g = torch.finfo(reference.compute_dtype(x)).eps / 2, x.double(), grad.double().abs()
    a, b = ([reference.along(p, x, dim) for p in t.detach().double().abs().unbind(1)] for t in (act.slopes, act.offsets))
    size = v.abs() + sum(slope * (v.abs() + 2 * offset) for slope, offset in zip(a, b, strict=True))
    assert_within(found, y, (hinges + 4) * u * size + rounding(y, x.dtype))
    slope = 1 + sum(a)
    assert_within(found_grads[0], grads[0], (hinges + 2) * u * g * slope + rounding(grads[0], x.dtype))
    u = torch.finfo(act.slopes.dtype).eps / 2
    by_hinge = [over_channel(g * (v.abs() + offset), x, channels, dim, False) for offset in b]
    assert_within(found_grads[1], grads[1], sums * u * torch.stack(by_hinge, 1))
    total = over_channel(g, x, channels, dim, False)[:, None]
    assert_within(found_grads[2], grads[2], sums * u * act.slopes.detach().double().abs() * total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("hinges", [1, 3, 5])
def test_apl(layout, hinges, dtype):
    x, dim = batch(layout, dtype)
    for channels in (1, x.shape[dim]):
        check_apl(apl(channels, hinges, dim, parameter_dtype(dtype)), x, dim)


def check_pau(act, x, rounding=rounding, sums=48):
    """Check values and gradients like check_apl."""
    y, grad, grads = in_float64(naive_pau, x, act.parameters())
    found, found_grads = computed(act, x, grad)
    u, v, g = torch.finfo(reference.compute_dtype(x)).eps / 2, x.double().abs(), grad.double().abs()
    a, b = (p.detach().double().abs() for p in act.parameters())

    def polynomial(coefficients, first=0, derivative=False):
        terms = [(k * c * v ** (k - 1) if k else 0 * v) if derivative else c * v**k for k, c in enumerate(coefficients, first)]
        return sum(terms)

    # Horner's rule is off by at most 2 n u times the sum of the sizes of the terms, which is the size of P and of Q at most.
    bottom = in_float64(lambda x, b: 1 + sum(c * x**k for k, c in enumerate(b, 1)).abs(), x, [act.denominator])[0]
    top, worse = polynomial(a) / bottom, (1 + polynomial(b, 1)) / bottom
    assert_within(found, y, 24 * u * top * worse + rounding(y, x.dtype))
    slope = (polynomial(a, 0, True) + top * polynomial(b, 1, True)) / bottom
    assert_within(found_grads[0], grads[0], 48 * u * g * slope * worse**2 + rounding(grads[0], x.dtype))
    u = torch.finfo(act.numerator.dtype).eps / 2
    for j in range(6):
        assert_within(found_grads[1][j], grads[1][j], sums * u * (g * v**j / bottom * worse).sum())
    for k in range(4):
        assert_within(found_grads[2][k], grads[2][k], sums * u * (g * v ** (k + 1) * top / bottom * worse**2).sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pau(layout, dtype):
    check_pau(pau(parameter_dtype(dtype)), batch(layout, dtype)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_prelu(layout, dtype):
    x, dim = batch(layout, dtype)
    for channels in (1, x.shape[dim]):
        act = PReLU(channels, dim, dtype=parameter_dtype(dtype))
        with torch.no_grad():
            act.weight.normal_().copy_(act.weight.to(dtype))
        naive = lambda x, weight: x.clamp_min(0) + reference.along(weight, x, dim) * x.clamp_max(0)  # noqa: E731
        y, grad, grads = in_float64(naive, x, act.parameters())
        found, found_grads = computed(act, x, grad)
        assert_within(found, y, rounding(y, dtype))
        assert_within(found_grads[0], grads[0], rounding(grads[0], dtype))
        size = over_channel((grad.double() * x.double()).abs(), x, channels, dim, False)
        assert_within(found_grads[1], grads[1], 16 * torch.finfo(dtype).eps * size)


def test_nan_is_not_hidden():
    x = torch.randn(2, 4, 5, 5)
    x[0, 1, 2, 2] = torch.nan
    for act, count in ((APL(4), 1), (PAU(), 1), (PReLU(4), 1), (FReLU(4).eval(), 9)):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                found = act(x).isnan()
            assert found[0, 1, 2, 2]
            assert found.sum() == count


GRADIENTS = {
    "apl": lambda: apl(5, 3, dtype=torch.float64),
    "apl, one for all": lambda: apl(1, 2, dtype=torch.float64),
    "pau": lambda: pau(torch.float64),
    "prelu": lambda: PReLU(5, dtype=torch.float64),
    "frelu": lambda: FReLU(5, dtype=torch.float64),
    "frelu, group norm": lambda: FReLU(5, dtype=torch.float64, norm="group"),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradcheck(name):
    act = GRADIENTS[name]()
    names, parameters = zip(*act.named_parameters(), strict=True)
    if isinstance(act, FReLU):
        act.norm.momentum = 0.0  # or batch norm would be another function at every call
        nn.init.normal_(act.conv.weight)

    def function(x, *values):
        return torch.func.functional_call(act, dict(zip(names, values, strict=True)), x)

    x = torch.randn(2, 5, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x, *(p.detach().requires_grad_() for p in parameters)))


@pytest.mark.parametrize("name", ["apl", "pau"])
def test_gradients_that_are_not_needed(name):
    act, x = GRADIENTS[name](), torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(act(x).square().sum(), [x, *act.parameters()])
    for i, wanted in enumerate([x, *act.parameters()]):
        for tensor in (x, *act.parameters()):
            tensor.requires_grad_(tensor is wanted)
        torch.testing.assert_close(torch.autograd.grad(act(x).square().sum(), wanted)[0], expected[i], rtol=0, atol=0)
    (first,) = torch.autograd.grad(act(x).square().sum(), wanted, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def saved(act, x):
    """Bytes that autograd keeps for backward, parameters and statistics apart; what is kept twice counts once."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        act(x).sum()
    small = {t.untyped_storage()._cdata for t in (*act.parameters(), *act.buffers())}
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in small and t.numel() > 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_saved_for_backward(dtype):
    x = torch.randn(2, 8, 16, 16).to(dtype).requires_grad_()
    size = x.untyped_storage().nbytes()
    for act in (nn.ReLU(), PReLU(8).to(dtype), APL(8), APL(8, 5), PAU(), pwlu.PWLU(8)):
        assert saved(act, x) == size
    mask = x.numel()
    assert saved(FReLU(8).to(dtype), x) == 2 * size + mask  # x, what the batch norm took in, and which of the two was larger


@pytest.mark.parametrize("name", ["prelu", "apl", "pau", "frelu"])
def test_autocast(name):
    act, x = pwlu.activation(name, 5), torch.randn(2, 5, 6, 7)
    for given in (x, x.bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            y = act(given)
        assert y.dtype == torch.bfloat16 if name == "prelu" else given.dtype  # torch lists it among what is computed in 16 bits
        if name in ("apl", "pau"):
            assert torch.equal(y, act(given))
        y.sum().backward()
        assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in act.parameters())


@pytest.mark.parametrize("act", [PReLU(5), APL(5), PAU(), FReLU(5), FReLU(5, norm="group")], ids=str)
def test_compile(act):
    """The compiler sees through them."""
    x = torch.randn(2, 5, 6, 7, requires_grad=True)
    by_compiler = torch.compile(act, fullgraph=True, backend="aot_eager")
    results = [torch.autograd.grad(call(x).square().sum(), [x, *act.parameters()]) for call in (act, by_compiler)]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(act.eval()(x), by_compiler(x))


# Starts.


def test_starts():
    torch.manual_seed(0)
    for hinges in (3, 5):
        act = APL(10000, hinges)
        n = act.slopes.numel()
        assert act.slopes.abs().max() <= 0.5 / hinges
        assert abs(act.slopes.std() - 1 / hinges / 12**0.5) < 5 * 0.5 / hinges / (2 * n) ** 0.5
        assert abs(act.offsets.std() - 0.5) < 5 * 0.5 / (2 * n) ** 0.5
    frelu = FReLU(10000)
    assert abs(frelu.conv.weight.std() - 0.01) < 5 * 0.01 / (2 * 90000) ** 0.5
    assert (frelu.norm.weight == 1).all()
    assert (frelu.norm.bias == 0).all()
    assert (PReLU(3).weight == 0.25).all()


@pytest.mark.parametrize(
    ("name", "error"), [("relu", 0.06), ("leaky_relu", 0.06), ("hardswish", 0.04), ("gelu", 0.003), ("silu", 0.0003)]
)
def test_pau_starts_as_a_fit(name, error):
    act = PAU(name, dtype=torch.float64)
    x = torch.linspace(-10, 10, 20001, dtype=torch.float64)
    off, near = (act(x) - INITIAL_FUNCTIONS[name].function(x)).detach().abs(), x.abs() <= 3
    assert off[near].max() < error
    assert off[near].max() == pytest.approx(act.start_error, rel=0.02)
    assert off.max() < 0.6  # it does not run away where it is nearly without weight
    # and is a minimum: any change of a coefficient makes it worse
    weight = torch.where(near, 1.0, 1e-3)
    loss = (weight * off**2).mean().item()
    for parameter in act.parameters():
        for i in range(len(parameter)):
            for change in (1e-3, -1e-3):
                with torch.no_grad():
                    parameter[i] += change
                    assert (weight * (act(x) - INITIAL_FUNCTIONS[name].function(x)) ** 2).mean().item() > loss * (1 - 1e-3)
                    parameter[i] -= change


def test_every_start_has_a_fit():
    for name, start in INITIAL_FUNCTIONS.items():
        fitted = rational.fit(start)
        assert fitted.error < 0.08, name
        for once, again in zip(fitted, rational.fit.__wrapped__(start), strict=True):
            assert again == pytest.approx(once, abs=1e-7)  # libraries may add up in another order each time
        assert max(map(abs, fitted.numerator + fitted.denominator)) < 10
    assert rational.fit(find_initial_function(torch.relu)) is rational.fit(INITIAL_FUNCTIONS["relu"])
    assert PAU(lambda x: x / (1 + x.abs())).start_error < 0.01
    with pytest.raises(ValueError, match="PAU: the initial function log must be finite between -10 and 10"):
        PAU(torch.log)


# As modules.


@pytest.mark.parametrize("name", NAMES)
def test_copies(name):
    act, x = pwlu.activation(name, 5, start=lambda x: x * torch.sigmoid(x)), torch.randn(2, 5, 6, 7)
    act(x)  # so that a batch norm has statistics
    act.eval()
    for other in (copy.deepcopy(act), pickle.loads(pickle.dumps(act))):
        assert torch.equal(other(x), act(x))
        assert repr(other) == repr(act)
    fresh = pwlu.activation(name, 5).eval()
    fresh.load_state_dict(act.state_dict())
    assert torch.equal(fresh(x), act(x))
    with torch.device("meta"):
        assert all(p.is_meta for p in pwlu.activation(name, 5).parameters())


@pytest.mark.parametrize("name", ["apl", "pau", "frelu"])
def test_reset(name):
    torch.manual_seed(3)
    act = pwlu.activation(name, 5)
    start = copy.deepcopy(act.state_dict())
    act(torch.randn(2, 5, 6, 7))
    with torch.no_grad():
        for parameter in act.parameters():
            parameter.fill_(9.0)
    torch.manual_seed(3)
    if name == "frelu":
        nn.Conv2d(5, 5, 3, groups=5, bias=False)  # what its construction drew
    act.reset_parameters()
    assert all(torch.equal(value, start[key]) for key, value in act.state_dict().items())


def test_names():
    assert repr(pwlu.activation("apl", 6, -1)) == "APL(channels=6, hinges=3, channel_dim=-1)"
    assert pwlu.activation("apl5").hinges == 5
    assert repr(pwlu.activation("pau")) == "PAU(start='leaky_relu', start_error=0.055)"
    assert repr(pwlu.activation("prelu", 6)) == "PReLU(channels=6, channel_dim=1)"
    assert repr(pwlu.activation("frelu", 6)).startswith("FReLU(\n  channels=6, channel_dim=1\n  (conv): Conv2d(6, 6")
    assert isinstance(pwlu.activation("prelu"), nn.PReLU)
    assert pwlu.activation("pwlu", 6, -1).channel_dim == -1
    fixed = {"relu": nn.ReLU, "swish": nn.SiLU, "silu": nn.SiLU, "gelu": nn.GELU, "hardswish": nn.Hardswish}
    assert all(type(pwlu.activation(name, 6)) is cls for name, cls in fixed.items())


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: pwlu.activation("rleu"), "'rleu' is not known. Write one of relu, swish, .*, prelu, apl, .*, pwlu"),
        (lambda: APL(0), r"APL: channels must be an integer of at least 1 \(the size of channel_dim\), not 0"),
        (lambda: APL(2.0), r"APL: channels must be an integer of at least 1 .*, not 2\.0"),
        (lambda: APL(2, 0), r"APL: hinges must be an integer of at least 1 \(S, 3 in the paper\), not 0"),
        (lambda: APL(2, channel_dim=None), r"APL: channel_dim must be an integer \(1 for images, -1 for the last dimension\)"),
        (lambda: PReLU(True), "PReLU: channels must be an integer"),
        (lambda: FReLU("3"), "FReLU: channels must be an integer"),
        (lambda: PAU("rleu"), "init 'rleu' is not known"),
        (lambda: APL(4)(torch.randn(2, 5)), r"has 4 channels, but x of shape \(2, 5\) has 5 in dimension 1"),
        (lambda: APL(4)(torch.randn(2, 1)), r"has 4 channels, but x of shape \(2, 1\) has 1 in dimension 1"),
        (lambda: PReLU(4)(torch.randn(2, 6, 4)), r"has 4 channels, .*\. Write channel_dim=2"),
        (lambda: PAU()(torch.arange(3)), r"x must be float32, .*, not torch\.int64"),
        (lambda: APL()(torch.arange(3)), r"x must be float32, .*, not torch\.int64"),
        (lambda: FReLU(4)(torch.randn(2, 4)), r"not the shape \(2, 4\)\. If x is not an image, write nn\.ReLU\(\)"),
        (lambda: FReLU(4)(torch.randn(2, 5, 3, 3)), "FReLU: x must have four dimensions, with 4 channels"),
    ],
)
def test_bad_input(call, text):
    with pytest.raises((ValueError, TypeError), match=text):
        call()
