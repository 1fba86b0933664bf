"""Non-uniform PWLUs: the definition, the operators against it, the module, and everything that handles it."""

import copy
import math

import pytest
import torch
from helpers import knot_weight, laid_out
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import pwlu
from pwlu.kernels import cpu, dispatch
from pwlu.ops import nonuniform as nonuniform_ops
from pwlu.reference import nonuniform as nonuniform_reference
from pwlu.reference.nonuniform import pack_knots, unpack_knots


def line_by_line(x: float, knots: list[float], heights: list[float], left_slope: float, right_slope: float) -> float:
    """Compute y in plain Python numbers."""
    if x < knots[0]:
        return (x - knots[0]) * left_slope + heights[0]
    for b, c, y, z in zip(knots, knots[1:], heights, heights[1:]):  # noqa: B905  # pairs of neighbours
        if x < c:
            return (x - b) / (c - b) * (z - y) + y
    return (x - knots[-1]) * right_slope + heights[-1]


def test_the_definition():
    weight = knot_weight(3, 5)
    knots, heights, left_slope, right_slope = unpack_knots(weight, 5)
    x = torch.cat([torch.linspace(-6, 6, 200, dtype=torch.float64), knots.flatten()])
    x = x[:, None].expand(-1, 3)
    y = nonuniform_reference.forward(x, *unpack_knots(weight, 5), channel_dim=1)
    for c in range(3):
        numbers = [knots[c].tolist(), heights[c].tolist(), float(left_slope[c]), float(right_slope[c])]
        expected = torch.tensor([line_by_line(float(v), *numbers) for v in x[:, c]], dtype=torch.float64)
        torch.testing.assert_close(y[:, c], expected, rtol=1e-13, atol=1e-13)


def test_equal_widths_give_a_pwlu():
    unit = pwlu.PWLU(3, 8, init="silu", dtype=torch.float64)
    new = pwlu.NonUniformPWLU.from_uniform(unit)
    x = torch.randn(500, 3, dtype=torch.float64) * 3
    torch.testing.assert_close(new(x), unit(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("intervals", [1, 4, 17])
@pytest.mark.parametrize("channels", [1, 3])
def test_gradcheck(intervals, channels):
    weight = knot_weight(channels, intervals).requires_grad_()
    knots = unpack_knots(weight.detach(), intervals).knots
    x = torch.linspace(-4, 4, 30, dtype=torch.float64).reshape(10, 3)
    x = x[((x[..., None] - knots.reshape(-1)).abs().amin(-1) > 1e-3).all(1)].contiguous().requires_grad_()  # off the knots
    assert len(x) > 3
    assert gradcheck(lambda x, w: nonuniform_ops.forward(x, w, intervals, 1), (x, weight))
    assert gradgradcheck(lambda x, w: nonuniform_ops.forward(x, w, intervals, 1), (x, weight))
    module = pwlu.NonUniformPWLU(channels, intervals, init="silu", dtype=torch.float64)

    def through_parameters(w):
        return nonuniform_ops.forward(x.detach(), nonuniform_reference.to_knots(w, intervals), intervals, 1)

    assert gradcheck(through_parameters, (module.weight,))


def test_the_backward_of_the_reference_is_autograd():
    weight = knot_weight(3, 5)
    x = torch.randn(50, 3, dtype=torch.float64)
    grad = torch.randn_like(x)
    blocks = [b.clone().requires_grad_() for b in unpack_knots(weight, 5)]
    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(nonuniform_reference.forward(leaf, *blocks, 1), [leaf, *blocks], grad)
    grad_x, grads = nonuniform_reference.backward(grad, x, *unpack_knots(weight, 5), 1)
    for found, wanted in zip([grad_x, *grads], expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_opcheck():
    for dtype in (torch.float32, torch.float64):
        weight = knot_weight(3, 4, dtype).requires_grad_()
        x = torch.randn(6, 3, 5, dtype=dtype, requires_grad=True)
        torch.library.opcheck(nonuniform_ops.forward, (x, weight, 4, 1))
        torch.library.opcheck(nonuniform_ops.backward, (x.detach(), x.detach(), weight.detach(), 4, 1, True, True))


def kernels():
    """Return the implementations to compare with the reference: every CPU kernel that has the operators."""
    return [kernel for kernel in map(cpu.load, cpu.usable_variants()) if hasattr(kernel, "nonuniform_forward")]


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "sliced", "reversed_dims"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("channels", "intervals", "side"), [(5, 4, 9), (1, 4, 9), (64, 3, 3), (40, 16, 2), (3, 64, 20), (7, 33, 1)]
)
def test_kernels_agree_with_the_reference(layout, dtype, channels, intervals, side):
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    weight = knot_weight(channels, intervals, compute)
    random = torch.Generator().manual_seed(1)
    x = (2 * torch.randn(6, max(channels, 5), side, side, generator=random, dtype=torch.float64)).to(dtype)
    if channels > 1:
        x = x[:, :channels]
    knots = unpack_knots(weight, intervals).knots
    flat = x.reshape(-1)  # put some elements on knots, which belong to the interval on the right
    flat[: min(knots.numel(), flat.numel() // 2)] = knots.reshape(-1)[: flat.numel() // 2].to(dtype)
    x = laid_out(flat.reshape(x.shape), layout)
    grad = torch.randn(x.shape, generator=random, dtype=torch.float64).to(dtype)
    exact = [b.double() for b in unpack_knots(weight, intervals)]
    y = nonuniform_reference.forward(x.double(), *exact, 1)
    grad_x, grads = nonuniform_reference.backward(grad.double(), x.double(), *exact, 1)
    eps, wide = torch.finfo(dtype).eps, torch.finfo(compute).eps
    smallest = torch.finfo(dtype).smallest_normal * eps  # numbers below the normal ones are rounded to its multiples
    size = 64 * wide * (x.double().abs().max() + exact[0].abs().max()) * _steepest(exact) + 8 * wide
    for kernel in [None, *kernels()]:
        run = dispatch.plain_nonuniform_forward if kernel is None else kernel.nonuniform_forward
        found = run(x, weight, intervals, 1)
        assert found.stride() == torch.empty_like(x).stride()
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), y, rtol=2 * eps, atol=float(size))
        back = dispatch.plain_nonuniform_backward if kernel is None else kernel.nonuniform_backward
        found_x, found_w = back(grad, x, weight, intervals, 1, True, True)
        torch.testing.assert_close(found_x.double(), grad_x, rtol=2 * eps + 8 * wide, atol=smallest)
        for got, wanted in zip(unpack_knots(found_w.double(), intervals), grads, strict=True):
            bound = 64 * wide * _steepest(exact) * float(grad.double().abs().sum()) * (1 + float(x.double().abs().max()))
            torch.testing.assert_close(got, wanted, rtol=0, atol=bound / math.sqrt(x.numel()) + 1e-12)
        only_x, nothing = back(grad, x, weight, intervals, 1, True, False)
        assert torch.equal(only_x, found_x)
        assert nothing.numel() == 0
        nothing, only_w = back(grad, x, weight, intervals, 1, False, True)
        assert torch.equal(only_w, found_w)
        assert nothing.numel() == 0


def _steepest(blocks) -> float:
    knots, heights, left_slope, right_slope = blocks
    inner = (heights.diff(dim=1) / knots.diff(dim=1)).abs().max()
    return float(torch.stack([inner, left_slope.abs().max(), right_slope.abs().max(), torch.ones(())]).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_wild_values(dtype):
    weight = knot_weight(3, 4, torch.float64 if dtype == torch.float64 else torch.float32)
    unpack_knots(weight, 4).left_slope[0] = 0  # a slope of 0 at minus infinity gives the height
    huge = torch.finfo(dtype).max
    x = torch.tensor([math.nan, math.inf, -math.inf, huge, -huge, 0.0, -0.0], dtype=dtype)[:, None].expand(7, 3).contiguous()
    expected = dispatch.plain_nonuniform_forward(x, weight, 4, 1)
    assert expected[0].isnan().all()
    assert not expected[1:].isnan().any()
    assert expected[2, 0] == unpack_knots(weight, 4).heights[0, 0].to(dtype)
    grad = torch.ones_like(x)
    for kernel in kernels():
        torch.testing.assert_close(kernel.nonuniform_forward(x, weight, 4, 1), expected, equal_nan=True)
        torch.testing.assert_close(
            kernel.nonuniform_backward(grad, x, weight, 4, 1, True, False)[0],
            dispatch.plain_nonuniform_backward(grad, x, weight, 4, 1, True, False)[0],
        )


def test_coinciding_knots_leave_an_empty_interval():
    weight = pack_knots(
        torch.tensor([[-1.0, 0.0, 0.0, 1.0]]), torch.tensor([[0.0, 1.0, 5.0, 6.0]]), torch.zeros(1), torch.zeros(1)
    )
    x = torch.tensor([-0.5, 0.0, 0.5, -1e-30])
    for run in [dispatch.plain_nonuniform_forward, *(k.nonuniform_forward for k in kernels())]:
        torch.testing.assert_close(run(x, weight, 3, 0), torch.tensor([0.5, 5.0, 5.5, 1.0]))
    for back in [dispatch.plain_nonuniform_backward, *(k.nonuniform_backward for k in kernels())]:
        grad_x, grad_w = back(torch.ones(4), x, weight, 3, 0, True, True)
        torch.testing.assert_close(grad_x, torch.ones(4))
        assert grad_w.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("intervals", [2, 40])
def test_knots_that_overflow(dtype, intervals):
    """An infinite input counts as the largest number, which is less than an infinite knot."""
    knots = torch.arange(intervals + 1.0).where(torch.arange(intervals + 1) < intervals, torch.inf)[None]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weight = pack_knots(knots, torch.ones(1, intervals + 1), torch.ones(1), torch.ones(1)).to(wide)
    x = torch.tensor([-1.0, 0.5, 1.0, math.inf, -math.inf, math.nan], dtype=dtype).repeat(20)
    expected = dispatch.plain_nonuniform_forward(x, weight, intervals, 0)
    torch.testing.assert_close(nonuniform_ops.forward(x, weight, intervals, 0), expected, rtol=0, atol=0, equal_nan=True)


def test_empty_input():
    act = pwlu.NonUniformPWLU(3)
    y = act(torch.empty(0, 3, requires_grad=True))
    assert y.shape == (0, 3)
    y.sum().backward()
    assert torch.equal(act.weight.grad, torch.zeros_like(act.weight))


def test_blocks_are_views_and_can_be_assigned():
    act = pwlu.NonUniformPWLU(2, 4)
    assert act.weight.shape == (2 * 12,)
    torch.testing.assert_close(act.knots, torch.tensor([-3.0, -1.5, 0.0, 1.5, 3.0]).expand(2, 5))
    torch.testing.assert_close(act.right, torch.tensor([3.0, 3.0]))
    act.assign(log_widths=torch.zeros(2, 4), left=torch.tensor([-2.0, -1.0]))
    assert torch.equal(act.knots, torch.tensor([[-2.0, -1.0, 0.0, 1.0, 2.0], [-1.0, 0.0, 1.0, 2.0, 3.0]]))
    with pytest.raises(TypeError, match=r"right is not a block of the weight. The blocks are left, log_widths, heights"):
        act.assign(right=torch.zeros(2))
    with pytest.raises(AttributeError, match="log_widths is a block of the weight"):
        act.log_widths = torch.zeros(2, 4)
    act.scale_gradients(log_widths=0.0)
    act(torch.randn(50, 2)).square().sum().backward()
    grads = nonuniform_reference.unpack(act.weight.grad, 4)
    assert torch.equal(grads.log_widths, torch.zeros(2, 4))
    assert grads.heights.any()


def test_starts_as_relu_and_knots_learn():
    torch.manual_seed(0)
    act = pwlu.NonUniformPWLU(1, 3, init="relu")
    x = torch.randn(4000)
    torch.testing.assert_close(act(x), x.relu(), rtol=1e-6, atol=1e-6)
    target = (x - 0.7).abs()
    optimizer = torch.optim.Adam(act.parameters(), lr=0.02)
    for _ in range(400):
        optimizer.zero_grad()
        loss = (act(x) - target).square().mean()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 1e-3
    assert (act.knots - 0.7).abs().min() < 0.05
    assert (act.knots.diff(dim=1) > 0).all()


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: pwlu.NonUniformPWLU(0), ValueError, "channels must be an integer of at least 1"),
        (lambda: pwlu.NonUniformPWLU(3, 0), ValueError, "intervals must be an integer of at least 1"),
        (lambda: pwlu.NonUniformPWLU(3)(torch.zeros(2, 4)), ValueError, "the activation has 3 channels"),
        (lambda: pwlu.NonUniformPWLU(3)(torch.zeros(2, 3).int()), TypeError, "x must be float32"),
        (lambda: pwlu.NonUniformPWLU(3)([1.0]), TypeError, "x must be a tensor, not list"),
        (
            lambda: nonuniform_ops.forward(torch.zeros(3), torch.zeros(11), 4, 0),
            ValueError,
            r"channels \* \(2 intervals \+ 4\)",
        ),
        (lambda: pwlu.NonUniformPWLU.from_uniform(nn.ReLU()), TypeError, "expected a pwlu.PWLU, not ReLU"),
        (lambda: pwlu.NonUniformPWLU(3).to_uniform(2), ValueError, "write a number between 0 and 1, not 2"),
        (
            lambda: pwlu.constrain_(pwlu.NonUniformPWLU(3), lipschitz=1.0),
            TypeError,
            "the projections need equally spaced knots",
        ),
        (
            lambda: setattr(pwlu.NonUniformPWLU(), "right", torch.ones(1)),
            AttributeError,
            "right is computed from left and log_w",
        ),
        (lambda: setattr(pwlu.NonUniformPWLU(), "knots", torch.ones(1)), AttributeError, "knots is computed from left"),
        (lambda: pwlu.NonUniformPWLU().assign(left=-2.0), TypeError, r"left must be a tensor, not -2.0. Write torch.full"),
        (lambda: pwlu.curvature(pwlu.NonUniformPWLU(3)), TypeError, "the penalty needs equally spaced knots"),
    ],
)
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_to_uniform_of_a_weight_that_is_not_finite():
    """Say that it is not finite. The error used to say that no number of intervals suffices."""
    unit = pwlu.NonUniformPWLU(2, 2, init="identity")
    unit.assign(heights=torch.tensor([[0.0, 1.0, 2.0], [0.0, math.nan, 1.0]]))
    with pytest.raises(ValueError, match="the weight has values that are not finite"):
        unit.to_uniform()


def test_crossed_bounds_are_refused():
    unit = pwlu.PWLU(2)
    unit.assign(left=torch.tensor([0.0, 4.0]))
    with pytest.raises(ValueError, match="channel 1 has crossed bounds"):
        pwlu.NonUniformPWLU.from_uniform(unit)


@pytest.mark.parametrize("tolerance", [1e-1, 1e-2, 1e-3])
@torch.no_grad()
def test_to_uniform_reports_its_error(tolerance):
    torch.manual_seed(0)
    act = pwlu.NonUniformPWLU(3, 4, init="silu", dtype=torch.float64)
    act.assign(log_widths=act.log_widths + 0.5 * torch.randn(3, 4, dtype=torch.float64))
    unit, error, relative = act.to_uniform(tolerance)
    assert type(unit) is pwlu.PWLU
    x = torch.linspace(-12, 12, 20001, dtype=torch.float64)[:, None].expand(-1, 3)
    measured = float((unit(x) - act(x)).abs().max())
    assert measured <= error * (1 + 1e-9) + 1e-12
    assert measured > 0.9 * error
    assert relative <= tolerance
    fewer = pwlu.PWLU(3, unit.intervals - 1, init="identity", dtype=torch.float64) if unit.intervals > 1 else None
    if fewer is not None:  # one interval fewer, interpolating in the same way, is not enough
        knots = act.left[:, None] + (act.right - act.left)[:, None] * torch.linspace(0, 1, unit.intervals, dtype=torch.float64)
        heights = act(knots.T.contiguous()).T
        slopes = {"left_slope": act.left_slope, "right_slope": act.right_slope}
        fewer.assign(left=act.left, right=act.right, heights=heights, **slopes)
        ranges = act.heights.amax(1) - act.heights.amin(1)
        assert float(((fewer(x) - act(x)).abs().amax(0) / ranges).max()) > tolerance


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)
    )


def converted() -> nn.Sequential:
    model = network()
    sample = torch.randn(2, 3, 8, 8)
    model(sample)
    pwlu.convert_(model, sample, to="nonuniform_pwlu", intervals=4)
    return model


def test_conversion_keeps_the_function():
    model, sample = network(), torch.randn(2, 3, 8, 8)
    model(sample)
    model.eval()
    expected = model(sample)
    pwlu.convert_(model, sample, to="nonuniform_pwlu", intervals=4)
    assert isinstance(model[2], pwlu.NonUniformPWLU)
    assert model[2].intervals == 4
    torch.testing.assert_close(model(sample), expected, rtol=1e-5, atol=1e-5)


def test_two_phases_and_resume():
    model = converted()
    optimizer = torch.optim.SGD(pwlu.parameter_groups(model, lr=0.05), momentum=0.9)
    pwlu.TwoPhase(model, optimizer, realign_at=3)
    start = model[2].weight.detach().clone()

    def step(model, optimizer, seed):
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if model[2].phase == 1:  # zeros, not None: DistributedDataParallel waits for them
            assert torch.equal(model[2].weight.grad, torch.zeros_like(model[2].weight))
        optimizer.step()

    for seed in range(2):
        step(model, optimizer, seed)
    assert torch.equal(model[2].weight, start)
    step(model, optimizer, 2)
    unit = model[2]
    assert unit.phase == 2
    mu, sigma = unit.statistics.running_mean, unit.statistics.running_std
    torch.testing.assert_close(unit.left, mu - 3 * sigma, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(unit.right, mu + 3 * sigma, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(unit.knots.diff(dim=1), (1.5 * sigma)[:, None].expand(-1, 4), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(unit.heights, unit.knots.relu(), rtol=1e-4, atol=1e-5)
    state = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    step(model, optimizer, 3)
    again = converted()
    other = torch.optim.SGD(pwlu.parameter_groups(again, lr=0.05), momentum=0.9)
    again.load_state_dict(state[0])
    pwlu.TwoPhase(again, other, realign_at=3)
    other.load_state_dict(state[1])
    step(again, other, 3)
    assert torch.equal(again[2].weight, model[2].weight)
    assert not torch.equal(again[2].log_widths, state[0]["2.weight"][24:56].view(8, 4))


def test_frozen_widths_keep_their_values_at_realignment():
    act = pwlu.NonUniformPWLU(2, 3, init="silu")
    act.assign(log_widths=torch.tensor([[0.0, 0.5, -0.5], [0.1, 0.2, 0.3]]))
    act.scale_gradients(log_widths=0.0)
    optimizer = torch.optim.SGD(act.parameters(), lr=0.1)
    phases = pwlu.TwoPhase(act, optimizer, realign_at=100)
    act(torch.randn(64, 2)).sum().backward()
    optimizer.step()
    old = act.log_widths.detach().clone()
    pwlu.realign_(act)
    assert torch.equal(act.log_widths, old)
    torch.testing.assert_close(act.heights, nn.functional.silu(act.knots), rtol=1e-5, atol=1e-6)
    phases.remove()


def test_save_and_load(tmp_path):
    model = converted()
    with torch.no_grad():
        model[2].log_widths.add_(0.3)
    pwlu.save(model, tmp_path / "model.safetensors")
    plain = network()
    plain(torch.randn(2, 3, 8, 8))
    pwlu.load_into(plain, tmp_path / "model.safetensors")
    assert type(plain[2]) is pwlu.NonUniformPWLU
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(plain.eval()(x), model.eval()(x))


def test_fuse():
    model = converted().eval()
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    assert pwlu.fuse_(model) == ["2", "4"]
    assert not list(model[2].parameters())
    assert torch.equal(model(x), expected)
    with pytest.raises(RuntimeError, match="a fused PWLU is for inference"):
        model.train()(x)


def test_onnx(tmp_path):
    pytest.importorskip("onnxruntime")
    model = converted().eval()
    with torch.no_grad():
        model[2].log_widths.add_(0.3 * torch.randn(8, 4))
    pwlu.export_onnx(model, torch.randn(2, 3, 8, 8), tmp_path / "model.onnx")


def test_a_fused_unit_is_named_in_errors_and_exported(tmp_path):
    model = converted().eval()
    fused = copy.deepcopy(model)
    pwlu.fuse_(fused)
    with pytest.raises(RuntimeError, match="holds the parameters of a PWLU, but this model is fused"):
        fused.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="holds a fused PWLU, but the PWLU of this model is not fused"):
        model.load_state_dict(fused.state_dict())
    with pytest.raises(ValueError, match=r"already fused: call pwlu\.describe before"):
        pwlu.describe(fused)
    pytest.importorskip("onnxruntime")
    pwlu.export_onnx(fused, torch.randn(2, 3, 8, 8), tmp_path / "model.onnx")


def test_compile_and_vmap():
    act = pwlu.NonUniformPWLU(3, 4, init="silu")
    x = torch.randn(5, 3)
    torch.testing.assert_close(torch.vmap(act)(x.expand(2, 5, 3)), act(x).expand(2, 5, 3))
    torch.testing.assert_close(torch.compile(act, backend="aot_eager", fullgraph=True)(x), act(x))


def test_autocast_does_not_change_the_result():
    act, x = pwlu.NonUniformPWLU(3), torch.randn(5, 3)
    expected = act(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(act(x), expected)


def test_alignment():
    model = converted()
    found = pwlu.alignment(model, [torch.randn(4, 3, 8, 8)])
    assert len(found) == 2


def test_describe_and_plot():
    """The blocks were read as those of a PWLU: widths as the right bound."""
    model = nn.Sequential(nn.Linear(3, 4), pwlu.NonUniformPWLU(4, intervals=4, bounds=(-2.0, 2.0)))
    assert pwlu.describe(model).share("relu_like") == 1.0
    (unit,) = pwlu.describe(model)
    assert (unit.low, unit.high) == ([-2.0] * 4, [2.0] * 4)
    pytest.importorskip("matplotlib")
    pwlu.plot_functions(model, alignment=pwlu.alignment(model, [torch.randn(8, 3)]))
