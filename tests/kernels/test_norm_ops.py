"""A unit behind a batch norm: the parts of the operator against the oracle, and the whole against torch's batch norm."""

import pytest
import torch
import torch.nn.functional as F
from helpers import CPU_VARIANTS, assert_within, laid_out, oracle, rounding, segment_probe, unit, weight_of

import pwlu
from pwlu import reference
from pwlu.kernels import cpu, dispatch, eager
from pwlu.ops import norm as norm_ops

SHAPES = {
    "planes": (3, 5, 32, 32),
    "many planes": (40, 6, 12, 12),
    "odd planes": (2, 3, 1025),
    "small planes": (6, 40, 7, 7),
    "tiny planes": (50, 24, 3),
    "rows": (700, 40),
    "many channels": (9, 700),
    "odd rows": (333, 37),
    "volumes": (2, 4, 3, 6, 8),
    "one channel": (4, 1, 9, 9),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EPS = 1e-5


def problem(shape, dtype, device, residual, layout="contiguous", intervals=16):
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    x, grad, added = (laid_out(torch.randn(shape, device=device).to(dtype), layout) for _ in range(3))
    gamma, beta = (torch.randn(shape[1], device=device, dtype=compute) for _ in range(2))
    return 2 * x + 1, grad, (added if residual else None), gamma, beta, unit(shape[1], intervals, compute, device)


def statistics(x, gamma, beta, training=True, pool=None, factor=0.1, code=norm_ops):
    """The norm by the operator, with the running statistics that it changed."""
    running = [torch.full_like(gamma, 0.25), torch.full_like(gamma, 1.5), torch.tensor(3, device=x.device)]
    return code.normalization(x, gamma, beta, *running, factor, EPS, training, pool), running


def over(x):
    return [d for d in range(x.ndim) if d != 1]


def _forward_by(code):
    """Return norm_forward of the operators, or of a kernel, which takes a pool as well."""
    return code.norm_forward if code is norm_ops else lambda *arguments: code.norm_forward(*arguments, None)


def check_parts(x, grad, added, gamma, beta, parameters, code=norm_ops):
    """Every part against the oracle, given the norm: z is the same to the last bit, so segments are."""
    norm, _ = statistics(x, gamma, beta, code=code)
    weight, intervals = weight_of(parameters)
    z = reference.normalize(x, added, norm)
    assert z.dtype == norm.dtype == reference.compute_dtype(x)
    y, bound, gradients, bounds = oracle(z, parameters, 1, grad.to(z.dtype))
    assert_within(_forward_by(code)(x, added, norm, weight, intervals), y, bound + rounding(y, x.dtype))

    grad_z, sums, grad_weight = code.norm_backward(grad, x, added, norm, weight, intervals)
    of_z, of_z_bound = gradients[0], bounds[0] + rounding(gradients[0], x.dtype)
    if added is None:
        assert not grad_z.numel()
    else:
        assert_within(grad_z, of_z, of_z_bound)
    for actual, expected, limit in zip(reference.unpack(grad_weight, intervals), gradients[1:], bounds[1:], strict=True):
        assert_within(actual, expected, limit)
    # A sum of n terms by threads that each add up a few of them: 8 roundings of the sum of sizes, as for the unit's own sums.
    u = torch.finfo(z.dtype).eps / 2
    centred = x.double() - reference.along(norm[0].double(), x, 1)
    inv_std = norm[1].double()
    for actual, terms, scale in ((sums[0], of_z, 1.0), (sums[1], of_z * centred, 1.0), (sums[2], of_z * centred, inv_std)):
        size = (terms.abs() + bounds[0] / u * (1 if terms is of_z else centred.abs())).sum(over(x)) * scale
        total = terms.sum(over(x)) * scale
        assert_within(actual, total, 8 * u * size + rounding(total, z.dtype))

    count = x.numel() // x.shape[1]
    for of_batch in (True, False):
        given = grad if added is None else grad_z
        used = sums if of_batch else None
        grad_x = code.norm_input(given, x, norm, weight, intervals, used, float(count), added is not None)
        through = of_z if added is None else grad_z.double()
        mean_of_g = reference.along(sums[0].double() / count, x, 1) if of_batch else 0 * through
        of_centred = reference.along(sums[1].double() / count * inv_std**2, x, 1) if of_batch else 0 * through
        scale = reference.along(norm[2].double(), x, 1)
        expected = scale * (through - mean_of_g - centred * of_centred)
        size = scale.abs() * (through.abs() + mean_of_g.abs() + (centred * of_centred).abs())
        slack = scale.abs() * bounds[0] * (added is None)
        assert_within(grad_x, expected, 8 * u * size + slack + rounding(expected, x.dtype))


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_parts_against_the_oracle(shape, dtype, residual, device):
    check_parts(*problem(shape, dtype, device, residual))


@pytest.mark.parametrize("variant", CPU_VARIANTS)
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_kernels_of_the_cpu(variant, threads):
    """Every variant, through every form, with sums of several threads, and twice with the same bits."""
    kernel, before = cpu.load(variant), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape in (*SHAPES.values(), (4, 64, 28, 28)):
            for dtype in DTYPES:
                for residual in (False, True):
                    for layout in ("contiguous", "channels_last"):
                        x, grad, added, gamma, beta, parameters = problem(shape, dtype, "cpu", residual, layout)
                        weight, intervals = weight_of(parameters)
                        check_parts(x, grad, added, gamma, beta, parameters, kernel)
                        norm, _ = statistics(x, gamma, beta, code=kernel)
                        pools = [torch.zeros(3, shape[1], dtype=norm.dtype) for _ in range(2)]
                        found = [
                            [
                                *(statistics(x, gamma, beta, code=kernel)[0], pool),
                                kernel.norm_forward(x, added, norm, weight, intervals, pool),
                                *kernel.norm_backward(grad, x, added, norm, weight, intervals),
                            ]
                            for pool in pools
                        ]
                        assert all(torch.equal(*both) for both in zip(*found, strict=True))
                        z = reference.normalize(x, added, norm).double()
                        variance, mean = torch.var_mean(z, over(z), correction=0)
                        u = torch.finfo(norm.dtype).eps * (8 if dtype == torch.float64 else 1)  # of doubles both sums are
                        assert_within(pools[0][1], mean, 4 * u * (mean.abs() + z.abs().amax(over(z))))
                        assert_within(pools[0][2], variance * (z.numel() / shape[1]), 8 * u * z.square().sum(over(z)))
    finally:
        torch.set_num_threads(before)


def test_kernels_of_the_cpu_serve(monkeypatch):
    """Plain torch computes nothing if the types fit."""

    def refuse(*arguments):
        raise AssertionError

    for name in ("plain_moments", "plain_forward", "plain_backward"):
        monkeypatch.setattr(dispatch, name, refuse)
    monkeypatch.setattr(reference, "normalize", refuse)
    monkeypatch.setattr(reference, "normalization", refuse)
    for dtype in DTYPES:
        x, grad, added, gamma, beta, parameters = problem((6, 24, 5, 7), dtype, "cpu", True)
        weight, intervals = weight_of(parameters)
        norm, _ = statistics(x, gamma, beta)
        norm_ops.norm_observe(x, added, norm, weight, intervals, torch.zeros(3, 24, dtype=norm.dtype))
        grad_z, sums, _ = norm_ops.norm_backward(grad, x, added, norm, weight, intervals)
        norm_ops.norm_input(grad_z, x, norm, weight, intervals, sums, 210.0, True)
        statistics(x, gamma, beta, training=False)


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("layout", ["channels_last", "transposed", "sliced", "reversed_dims"])
def test_layouts(layout, residual, device):
    for dtype in (torch.float32, torch.bfloat16):
        check_parts(*problem((6, 24, 5, 7), dtype, device, residual, layout))
        check_parts(*problem((4, 64, 16, 16), dtype, device, residual, layout))


@pytest.mark.parametrize("intervals", [1, 4, 40, 64, 200])
def test_numbers_of_intervals(intervals, device):
    for shape in ((6, 24, 5, 7), (70, 40), (4, 8, 16, 16)):
        for residual in (False, True):
            check_parts(*problem(shape, torch.bfloat16, device, residual, intervals=intervals))


@pytest.mark.parametrize("shape", [(9, 4, 16, 16), (800, 40), (30, 24, 7, 7)])
def test_z_is_rounded_as_the_definition_says(shape, device):
    check_rounding(shape, device)


def check_rounding(shape, device, code=norm_ops):
    """The residual takes z to zero, which is the left bound: one bit less, and the slope is that of the left."""
    channels, intervals = shape[1], 16
    x, _, _, gamma, beta, _ = problem(shape, torch.float32, device, True)
    parameters = [p.to(device).expand(channels, *p.shape[1:]) for p in segment_probe(intervals, 0.0, 6.0)]
    weight, _ = weight_of(parameters)
    norm, _ = statistics(x, gamma, beta, code=code)
    grad_z, _, _ = code.norm_backward(torch.ones_like(x), x, -reference.normalize(x, None, norm), norm, weight, intervals)
    assert not grad_z.any()


@pytest.mark.parametrize("mistake", ["residual", "rounding", "sum", "weight", "mean", "variance"])
def test_the_comparison_can_fail(mistake, device, monkeypatch):
    arguments = problem((6, 24, 5, 7), torch.float32, device, True)
    forward, backward, of_input = norm_ops.norm_forward, norm_ops.norm_backward, norm_ops.norm_input

    def wrong_forward(x, added, norm, *rest):
        norm = norm * torch.tensor([1, 1, 1 + 1e-5 * (mistake == "rounding"), 1], device=device)[:, None]
        return forward(x, None if mistake == "residual" else added, norm, *rest)

    def wrong_backward(*rest):
        grad_z, sums, grad_weight = backward(*rest)
        sums[1] *= 1 + 1e-4 * (mistake == "sum")
        grad_weight[-1] += 0.1 * (mistake == "weight")
        return grad_z, sums, grad_weight

    def wrong_input(grad, x, norm, weight, intervals, sums, *rest):
        lost = (
            None if sums is None else sums * torch.tensor([mistake != "mean", mistake != "variance", 1], device=device)[:, None]
        )
        return of_input(grad, x, norm, weight, intervals, lost, *rest)

    check_parts(*arguments)
    monkeypatch.setattr(norm_ops, "norm_forward", wrong_forward)
    monkeypatch.setattr(norm_ops, "norm_backward", wrong_backward)
    monkeypatch.setattr(norm_ops, "norm_input", wrong_input)
    with pytest.raises(AssertionError):
        check_parts(*arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_statistics_as_torch_computes_them(shape, dtype, device):
    x, _, _, gamma, beta, _ = problem(shape, dtype, device, False)
    compute = gamma.dtype
    norm, running = statistics(x, gamma, beta)
    values = x.double().movedim(1, 0).reshape(shape[1], -1)
    variance, mean = torch.var_mean(values, 1, correction=0)
    unbiased = values.var(1)
    inv_std = 1 / (variance + EPS).sqrt()
    # Shifted sums: an error of some roundings of the deviations, not of the mean. In float64 the oracle makes it too.
    u = torch.finfo(compute).eps * (4 if compute == torch.float64 else 1)
    expected = torch.stack([mean, inv_std, gamma.double() * inv_std, beta.double()])
    assert_within(
        norm, expected, 16 * u * torch.stack([variance.sqrt() + mean.abs(), inv_std, inv_std * gamma.double().abs(), 0 * mean])
    )
    for actual, start, new in ((running[0], 0.25, mean), (running[1], 1.5, unbiased)):
        assert_within(actual, 0.9 * start + 0.1 * new, 16 * u * (start + new.abs() + variance.sqrt()))
    assert running[2] == 4
    of_running, unchanged = statistics(x, gamma, beta, training=False)
    inv = 1 / torch.tensor(1.5 + EPS, device=device, dtype=torch.float64).sqrt()
    assert_within(of_running[1], inv.expand_as(mean), 4 * u * inv.expand_as(mean))
    assert of_running[0].tolist() == [0.25] * shape[1]
    assert unchanged[2] == 3
    assert unchanged[0].tolist() == [0.25] * shape[1]


@pytest.mark.parametrize("training", [True, False])
def test_parameters_of_16_bits(training, device, monkeypatch):
    """A model in bfloat16: the same kernels, with results that are rounded once; Python has no part in it."""
    x, grad, _, gamma, beta, parameters = problem((8, 24, 9, 9), torch.bfloat16, device, False)
    weight, intervals = weight_of(parameters)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        norm = [t.bfloat16().to(dtype) for t in (gamma, beta, torch.full_like(gamma, 0.25), torch.full_like(gamma, 1.5))]
        pool = torch.zeros(3, 24, device=device).to(dtype)
        leaves = [t.requires_grad_() for t in (x.detach().clone(), *norm[:2])]
        if dtype == torch.bfloat16 and eager.library is not None:
            norm_ops.norm_act(x, None, weight, intervals, *norm, None, 0.1, EPS, training, pool)  # kernels are known now
            norm[2].fill_(0.25), norm[3].fill_(1.5), pool.zero_()
            monkeypatch.setattr(dispatch, "_normalization", None)
        y, _ = norm_ops.norm_act(leaves[0], None, weight, intervals, *leaves[1:], *norm[2:], None, 0.1, EPS, training, pool)
        monkeypatch.undo()
        y.backward(grad)
        found.append([y, leaves[0].grad, *(leaf.grad for leaf in leaves[1:]), *norm[2:], pool])
    for one, other in zip(*found, strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, other.bfloat16())


def test_moments_of_z_follow_from_the_norm(device):
    """Without a pass over x; with a residual z is observed."""
    x, _, added, gamma, beta, parameters = problem((16, 24, 9, 9), torch.float32, device, True)
    weight, intervals = weight_of(parameters)
    for residual in (None, added):
        pool = torch.zeros(3, 24, device=device)
        running = (torch.zeros(24, device=device), torch.ones(24, device=device), None)
        for _ in range(2):
            norm_ops.norm_act(x, residual, weight, intervals, gamma, beta, *running, 0.1, EPS, True, pool)
        norm, _ = statistics(x, gamma, beta)
        z = reference.normalize(x, residual, norm).double()
        variance, mean = torch.var_mean(z, over(z), correction=0)
        assert pool[0].tolist() == [2 * 16 * 81] * 24
        torch.testing.assert_close(pool[1].double(), mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(pool[2].double(), variance * 2 * 16 * 81, rtol=1e-4, atol=1e-6)


def norm_then_unit(x, added, gamma, beta, weight, intervals, running, training):
    z = F.batch_norm(x, *running, gamma, beta, training, 0.1, EPS)
    return pwlu.functional.packed(z if added is None else z + added, weight, intervals)


@torch.no_grad()
def bounds_of_gradients(x, grad, added, gamma, beta, weight, intervals, mean=None, variance=None):
    """How far z may be off in norm and unit apart, and so the gradients of x, gamma, beta, the weight and the residual.

    The derivatives of a unit are linear in z between knots, with slopes of up to `steep`, and may jump there. If z is off by
    `off` and no two knots are that close, a derivative f changes by no more than |f(z +- off) - f(z)| + 2 off steep. A gradient
    of z that is stored is rounded, in either. A sum is off by as many roundings of the sum of sizes as additions follow each
    other: n in float64; float32 is added up in float64 on a CPU and in trees on a GPU, 64 at the most.
    """
    u, eps = torch.finfo(x.dtype).eps / 2, torch.finfo(gamma.dtype).eps
    of_sum = eps * (x.numel() // x.shape[1] if x.dtype == torch.float64 else 64)
    training = mean is None
    x, grad, gamma, beta = (t.double() for t in (x, grad, gamma, beta))
    if training:
        variance, mean = torch.var_mean(x, over(x), correction=0)
    mean, inv_std, gamma, beta = (reference.along(t, x, 1) for t in (mean, (variance + EPS).rsqrt(), gamma, beta))
    x_hat, scale = (x - mean) * inv_std, gamma.abs() * inv_std
    plain = gamma * x_hat + beta
    z = plain if added is None else plain + added.double()
    size = plain.abs() + (0 if added is None else z.abs())
    off = u * size + 16 * eps * (size + beta.abs().max() + x.abs().max() * scale.max())  # the second: of the arithmetic

    blocks = reference.unpack(weight.double(), intervals)
    there, *around = (reference.partials(at, *blocks, 1) for at in (z, z + off, z - off))
    step = (blocks.right - blocks.left).min() / intervals
    of_x = (blocks.heights.diff(dim=1).abs().max() / step).clamp(min=1)
    of_bounds = of_x / step / intervals
    steep = {"left": of_bounds, "right": of_bounds, "heights": 1 / step, "left_slope": 1.0, "right_slope": 1.0}

    def spread(t, like):
        return t.unsqueeze(-1) if like.ndim > t.ndim else t

    def of_channel(name):
        f = there[name]
        change = torch.stack([(other[name] - f).abs() for other in around]).amax(0) + 2 * spread(off, f) * steep[name]
        return (spread(grad.abs(), f) * (change + of_sum * f.abs())).sum(over(x))

    g_z = grad * there["x"]
    error = grad.abs() * torch.stack([(other["x"] - there["x"]).abs() for other in around]).amax(0) + 2 * u * g_z.abs()
    summed = error + of_sum * g_z.abs()
    of_x_hat = summed * x_hat.abs() + 16 * eps * g_z.abs() * (x_hat.abs() + mean.abs() * inv_std)
    means = [t.mean(over(x), keepdim=True) if training else torch.zeros(()) for t in (summed, of_x_hat)]
    of_input = scale * (error + 16 * eps * g_z.abs() + means[0] + (x_hat.abs() + 16 * eps * mean.abs() * inv_std) * means[1])
    of_weight = reference.pack(*(of_channel(name) for name in reference.Blocks._fields))
    found = [off, of_input, of_x_hat.sum(over(x)), summed.sum(over(x)), of_weight]
    return [*found, error] if added is not None else found


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_as_norm_and_unit_apart(dtype, residual, training, layout, device):
    """y and all gradients. In 16 bits, torch rounds z behind the norm and behind the addition; here it is not rounded.

    So z may differ by those two roundings, y by that times the largest slope, 1.1, and by its own rounding; gradients by what
    `bounds_of_gradients` says.
    """
    shape, intervals = (8, 12, 10, 10), 16
    x, grad, added, gamma, beta, _ = problem(shape, dtype, device, residual, layout)
    weight = pwlu.PWLU(12, intervals, init="silu", device=device, dtype=gamma.dtype).weight.detach()
    leaves = [t.detach().clone().requires_grad_() for t in (x, gamma, beta, weight)]
    leaves += [added.detach().clone().requires_grad_()] if residual else []
    running = [[torch.full_like(gamma, 0.25), torch.full_like(gamma, 1.5)] for _ in range(2)]
    r = leaves[4] if residual else None
    state = (*leaves[1:3], *running[0], None, 0.1, EPS, training, None)
    y, _ = norm_ops.norm_act(leaves[0], r, leaves[3], intervals, *state)
    apart = norm_then_unit(leaves[0], r, *leaves[1:4], intervals, running[1], training)
    assert y.dtype == apart.dtype
    assert y.stride() == apart.stride()
    before = [torch.full_like(gamma, value, dtype=torch.float64) for value in (0.25, 1.5)]
    off, *bounds = bounds_of_gradients(x, grad, added, gamma, beta, weight, intervals, *((None, None) if training else before))
    assert_within(y, apart.double(), 1.1 * off + 2 * rounding(apart.double(), dtype))
    both = zip(torch.autograd.grad(y, leaves, grad), torch.autograd.grad(apart, leaves, grad), strict=True)
    for (found, expected), bound in zip(both, bounds, strict=True):
        assert found.dtype == expected.dtype
        assert_within(found, expected.double(), bound + 2 * rounding(expected.double(), expected.dtype))
    for found, expected in zip(*running, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_gradcheck_through_the_definition(training, device):
    x, added = (torch.randn(3, 2, 4, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
    gamma, beta = (torch.randn(2, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
    weight = pwlu.PWLU(2, 4, init="silu", dtype=torch.float64, device=device).weight.detach().requires_grad_()

    def act(x, added, gamma, beta, weight):
        running = [torch.zeros(2, dtype=torch.float64, device=device), torch.ones(2, dtype=torch.float64, device=device)]
        return norm_ops.norm_act(x, added, weight, 4, gamma, beta, *running, None, 0.1, EPS, training, None)[0]

    def alone(x, gamma, beta, weight):
        return act(x, None, gamma, beta, weight)

    for function, inputs in ((act, (x, added, gamma, beta, weight)), (alone, (x, gamma, beta, weight))):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own
def test_opcheck(device):
    for residual in (False, True):
        x, grad, added, gamma, beta, parameters = problem((3, 4, 5, 6), torch.float32, device, residual)
        weight, intervals = weight_of(parameters)
        running = [torch.zeros(4, device=device), torch.ones(4, device=device), torch.tensor(0, device=device)]
        norm, _ = statistics(x, gamma, beta)
        torch.library.opcheck(norm_ops.normalization, (x, gamma, beta, *running, 0.1, EPS, True, None))
        torch.library.opcheck(norm_ops.norm_forward, (x, added, norm, weight, intervals))
        torch.library.opcheck(norm_ops.norm_observe, (x, added, norm, weight, intervals, torch.zeros(3, 4, device=device)))
        for statistics_of in ((None, None), running[:2]):
            torch.library.opcheck(norm_ops.norm_of, (x, gamma, beta, *statistics_of, EPS))
        torch.library.opcheck(norm_ops.norm_backward, (grad, x, added, norm, weight, intervals))
        _, sums, _ = norm_ops.norm_backward(grad, x, added, norm, weight, intervals)
        torch.library.opcheck(norm_ops.norm_input, (grad, x, norm, weight, intervals, sums, 90.0, residual))
        x, added, gamma, beta, weight = (None if t is None else t.requires_grad_() for t in (x, added, gamma, beta, weight))
        torch.library.opcheck(norm_ops.norm_act, (x, added, weight, intervals, gamma, beta, *running, 0.1, EPS, True, None))


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "added"])
def test_deterministic(residual, device):
    for dtype in (torch.float32, torch.bfloat16):
        x, grad, added, gamma, beta, parameters = problem((16, 40, 14, 14), dtype, device, residual, "channels_last")
        weight, intervals = weight_of(parameters)

        def once(x=x, added=added, gamma=gamma, beta=beta, weight=weight, intervals=intervals, grad=grad):
            norm, running = statistics(x, gamma, beta)
            first = norm_ops.norm_forward(x, added, norm, weight, intervals)
            return [norm, *running, first, *norm_ops.norm_backward(grad, x, added, norm, weight, intervals)]

        assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


def test_wild_values_behave_as_norm_and_unit_apart(device):
    """NaN and infinity in a channel: the norm makes all of that channel NaN, and leaves the others alone."""
    for wild in (torch.nan, torch.inf):
        x, _, _, gamma, beta, parameters = problem((4, 6, 8, 8), torch.float32, device, False)
        x[1, 2, 3, 3] = wild
        weight, intervals = weight_of(parameters)
        running = [[torch.zeros(6, device=device), torch.ones(6, device=device)] for _ in range(3)]
        y, _ = norm_ops.norm_act(x, None, weight, intervals, gamma, beta, *running[0], None, 0.1, EPS, True, None)
        apart = norm_then_unit(x, None, gamma, beta, weight, intervals, running[1], True)
        assert torch.equal(y.isnan(), apart.isnan())
        torch.testing.assert_close(y, apart, equal_nan=True, rtol=1e-4, atol=1e-4)
        fixed, _ = norm_ops.norm_act(x, None, weight, intervals, gamma, beta, *running[2], None, 0.1, EPS, False, None)
        apart = norm_then_unit(x, None, gamma, beta, weight, intervals, running[2], False)
        torch.testing.assert_close(fixed, apart, equal_nan=True, rtol=1e-4, atol=1e-4)


def test_bad_input_says_what_is_wrong(device):
    x, _, added, gamma, beta, parameters = problem((3, 4, 5, 6), torch.float32, device, True)
    weight, intervals = weight_of(parameters)
    norm, _ = statistics(x, gamma, beta)
    with pytest.raises(ValueError, match=r"residual must have the shape, dtype and device of x.*not \(3, 4, 5, 1\)"):
        norm_ops.norm_forward(x, added[..., :1], norm, weight, intervals)
    with pytest.raises(
        ValueError,
        match=r"a norm of shape \(4, channels\).*x has the shape \(3, 4, 5, 6\), the norm \(3, 4\), and the weight 4 channels",
    ):
        norm_ops.norm_forward(x, None, norm[:3], weight, intervals)
    with pytest.raises(ValueError, match="needs running_mean and running_var"):
        norm_ops.normalization(x, gamma, beta, None, None, None, 0.1, EPS, False, None)
    with pytest.raises(ValueError, match=r"gamma must have the shape \(4,\), one per channel, not \(3,\)"):
        norm_ops.normalization(x, gamma[:3], beta, None, None, None, 0.1, EPS, True, None)
    with pytest.raises(ValueError, match=r"x must have the shape \(batch, channels, \.\.\.\) to be normalized, not \(4,\)"):
        norm_ops.normalization(gamma, None, None, None, None, None, 0.1, EPS, True, None)


def test_plain_torch_gives_the_same(device):
    """Plain torch runs where there is no kernel."""
    for residual in (False, True):
        x, grad, added, gamma, beta, parameters = problem((6, 8, 9, 9), torch.float32, device, residual)
        weight, intervals = weight_of(parameters)
        norm, _ = statistics(x, gamma, beta)
        plain = dispatch.norm_forward_apart(x, added, norm, weight, intervals, None)
        y, bound = oracle(reference.normalize(x, added, norm), parameters, 1)
        assert_within(plain, y, bound)
        for found, expected in zip(
            dispatch.norm_backward_apart(grad, x, added, norm, weight, intervals),
            norm_ops.norm_backward(grad, x, added, norm, weight, intervals),
            strict=True,
        ):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "added"])
def test_compiled_autograd(residual, device):
    from torch._dynamo.compiled_autograd import _enable

    x, grad, added, gamma, beta, parameters = problem((3, 4, 5, 6), torch.float64, device, residual)
    weight, intervals = weight_of(parameters)
    leaves = [None if t is None else t.requires_grad_() for t in (x, added, weight, gamma, beta)]

    def gradients():
        for leaf in leaves:
            if leaf is not None:
                leaf.grad = None
        running = (torch.zeros(4, dtype=torch.float64, device=device), torch.ones(4, dtype=torch.float64, device=device), None)
        y, _ = norm_ops.norm_act(*leaves[:3], intervals, *leaves[3:], *running, 0.1, EPS, True, None)
        y.backward(grad)
        return [leaf.grad for leaf in leaves if leaf is not None]

    expected = gradients()
    with _enable(torch.compile(backend="eager")):
        found = gradients()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
