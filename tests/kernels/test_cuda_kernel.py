"""The CUDA kernels against the oracle, on a GPU or in emulation on the CPU; streams, graphs, threads and devices on a GPU only.

Run with ``pytest --device cuda``; test_kernels.py and test_ops.py compare every operator with the oracle there, too.
"""

import subprocess
import sys
import threading
import warnings

import pytest
import test_norm_ops
import torch
from cuda_emulator import put_mistake
from helpers import Unpacked, assert_within, oracle, unit, weight_of, wild_values

import pwlu
from pwlu import ops, reference
from pwlu.functional import pwlu as function
from pwlu.kernels import cuda, dispatch, eager
from pwlu.kernels.cuda import compile as kernels


@pytest.fixture
def on_gpu(device):
    if device.type != "cuda":
        pytest.skip("needs --device cuda")


needs_gpu = pytest.mark.usefixtures("on_gpu")


def fresh(kernel, **processor):
    """The kernels of the same device, without the plans made so far, as on a processor with these properties."""
    return type(kernel)(kernel.index, kernel.processor._replace(**processor))


@pytest.fixture
def wide(kernel, monkeypatch):
    """Reads several elements at once where there are few, too."""
    monkeypatch.setattr(cuda.plan, "_ELEMENTS_OF_THREAD", 0)
    return fresh(kernel)


# (shape, channel_dim) of every form a kernel has: planes, pieces of planes, small planes, rows, one channel.
FORMS = {
    "planes": ((3, 5, 32, 32), 1),
    "many planes": ((64, 5, 16, 16), 1),
    "one block per channel": ((2, 5, 8, 8), 1),
    "few large planes": ((1, 2, 300, 300), 1),
    "planes of no even size": ((2, 3, 1025), 1),
    "small planes": ((6, 40, 7, 7), 1),
    "tiny planes": ((50, 24, 3), 1),
    "rows": ((700, 40), 1),
    "many channels": ((9, 700), 1),
    "rows of no even length": ((333, 37), 1),
    "one channel": ((7, 8192), None),
    "one channel, no even size": ((7, 1001), None),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERVALS = [pytest.param(n, marks=() if n == 16 else pytest.mark.slow) for n in (1, 2, 16, 39, 40, 100, 256)]


def problem(form, dtype, device, intervals=16):
    shape, dim = FORMS[form]
    x = (2 * torch.randn(shape, device=device)).to(dtype)
    grad = torch.randn(shape, device=device).to(dtype)
    channels = 1 if dim is None else shape[dim]
    return grad, x, unit(channels, intervals, device=device), 1 if dim is None else dim


def compare(kernel, form, dtype, device, intervals=16):
    """Everything the kernels compute against the oracle."""
    kernel = Unpacked(kernel)
    grad, x, parameters, dim = problem(form, dtype, device, intervals)
    y, bound, gradients, bounds = oracle(x, parameters, dim, grad)
    found = kernel.forward(x, *parameters, dim)
    assert_within(found, y, bound)
    tables = [t.float() for t in reference.tables(*(p.double() for p in parameters))]
    assert_within(kernel.lookup(x, parameters[0], *tables, dim), y, 2 * bound)  # either line, next to a knot
    grad_x, others = kernel.backward(grad, x, *parameters, dim, True, True)
    for actual, expected, limit in zip([grad_x, *others], gradients, bounds, strict=True):
        assert_within(actual, expected, limit)
    assert torch.equal(kernel.backward(grad, x, *parameters, dim, True, False)[0], grad_x)
    again = kernel.backward(grad, x, *parameters, dim, False, True)[1]
    assert all(torch.equal(a, b) for a, b in zip(again, others, strict=True))  # bit for bit
    observed, *moments = kernel.observe(x, *parameters, dim)
    assert torch.equal(observed, found)
    channels = len(parameters[0])
    values = x.double().movedim(dim, 0).reshape(channels, -1) if channels > 1 else x.double().reshape(1, -1)
    for count, mean, m2 in (moments, kernel.moments(x, channels, dim)):
        assert count.tolist() == [values.shape[1]] * channels
        torch.testing.assert_close(mean.double(), values.mean(1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(m2.double(), values.var(1, correction=0) * values.shape[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("intervals", INTERVALS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_forms_and_numbers_of_intervals(kernel, device, form, dtype, intervals):
    compare(kernel, form, dtype, device, intervals)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["rows", "many channels", "rows of no even length"])
def test_wide_vectors_in_rows(wide, device, form, dtype):
    for intervals in (1, 16, 64):
        compare(wide, form, dtype, device, intervals)
    assert {name.rpartition("_")[2] for name in wide._loaded} >= ({"1"} if "no even" in form else {"4", "2"})


def compare_last_knot(kernel, device):
    """The last numbers below B_R = 3 fall into the last interval, although (x + 3) * (16/6) is rounded up to 16."""
    x = torch.full((1000,), 3.0, device=device).nextafter(torch.zeros((), device=device))
    parameters = [torch.tensor([-3.0], device=device), torch.tensor([3.0], device=device), *unit(1, 16, device=device)[2:]]
    assert ((x + 3) * (16 / torch.tensor(6.0, device=device)) >= 16).all()
    y, bound, gradients, bounds = oracle(x, parameters, 0, torch.ones_like(x))
    kernel = Unpacked(kernel)
    assert_within(kernel.forward(x, *parameters, 0), y, bound)
    grad_x, others = kernel.backward(torch.ones_like(x), x, *parameters, 0, True, True)
    for actual, expected, limit in zip([grad_x, *others], gradients, bounds, strict=True):
        assert_within(actual, expected, limit)


def test_rounded_up_to_the_last_knot(kernel, device):
    compare_last_knot(kernel, device)


@pytest.mark.parametrize("form", ["planes", "small planes", "rows"])
def test_many_splits(kernel, device, form, monkeypatch):
    """As on a GPU with more multiprocessors than there is work for: every block has one step."""
    monkeypatch.setattr(cuda.plan.Gpu, "slots", lambda *_: 100_000)
    compare(fresh(kernel), form, torch.float32, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["planes", "small planes", "rows", "many channels"])
def test_little_shared_memory(kernel, device, form, dtype):
    """As on sm_86 and sm_89: blocks have fewer threads, and vectors are narrower."""
    small = fresh(kernel, multiprocessors=8, shared=100 << 10, shared_of_block=99 << 10)
    for intervals in (16, 30, 64, 256):
        compare(small, form, dtype, device, intervals)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_wild_values_everywhere(kernel, device, form, dtype):
    """NaN, infinities and numbers of every size, in every place a vector has: as the reference, element by element."""
    kernel, (_, x, parameters, dim) = Unpacked(kernel), problem(form, dtype, device)
    wild = wild_values(dtype, [p.cpu() for p in parameters]).to(device)
    x = wild[torch.randint(len(wild), x.shape, device=device)]
    y = kernel.forward(x, *parameters, dim)
    expected, bound = oracle(x.nan_to_num(0.0, posinf=torch.inf, neginf=-torch.inf), parameters, dim)
    assert y.isnan().tolist() == x.isnan().tolist()
    tame = x.isfinite() & (x.abs() < 1e30) & (expected.abs() < torch.finfo(dtype).max / 2)  # beyond, results overflow
    assert_within(torch.where(tame, y, 0), torch.where(tame, expected, 0), torch.where(tame, bound, 1))
    grad_x, gradients = kernel.backward(torch.zeros_like(x), x, *parameters, dim, True, True)
    assert not grad_x.any()
    assert all(not g.isinf().any() for g in gradients)  # 0 times anything that is a number


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_in_16_bits(kernel, device, dtype):
    kernel = Unpacked(kernel)
    for form in ("planes", "small planes", "rows"):
        grad, x, parameters, dim = problem(form, dtype, device)
        short = [p.to(dtype) for p in parameters]
        wide = [p.float() for p in short]
        assert torch.equal(kernel.forward(x, *short, dim), kernel.forward(x, *wide, dim))
        for narrow, expected in zip(
            kernel.backward(grad, x, *short, dim, True, True)[1],
            kernel.backward(grad, x, *wide, dim, True, True)[1],
            strict=True,
        ):
            assert torch.equal(narrow, expected.to(dtype))


@pytest.mark.parametrize("offset", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_that_start_anywhere(kernel, device, dtype, offset):
    """Vectors have to lie at multiples of their size; where they do not, elements are read one by one."""
    kernel = Unpacked(kernel)
    for shape in ((4, 6, 64), (50, 24), (6, 8, 49)):
        whole = (2 * torch.randn(torch.Size(shape).numel() + offset, device=device)).to(dtype)
        x, parameters = whole[offset:].view(shape), unit(shape[1], 16, device=device)
        y, bound = oracle(x, parameters, 1)
        assert_within(kernel.forward(x, *parameters, 1), y, bound)


def test_more_intervals_than_fit_run_on_plain_torch(kernel, device):
    x, parameters = torch.randn(4, 3, 50, device=device), unit(3, 5000, device=device)
    assert kernel.backward(x, x, *weight_of(parameters), 1, True, True) is NotImplemented
    y, bound, gradients, bounds = oracle(x, parameters, 1, torch.ones_like(x))
    x.requires_grad_()
    result = function(x, *(p.requires_grad_() for p in parameters))
    assert_within(result, y, bound)
    assert_within(torch.autograd.grad(result.sum(), x)[0], gradients[0], bounds[0])


# The pool.


def compare_pools(kernel, device, shape=(6, 37, 8)):
    """Bit for bit as plain torch merges, call after call: of nothing, numbers of every size, and what is not finite."""
    kinds, channels = ["normal", "none", "far", "wild"], shape[1]
    pool, expected = (torch.zeros(3, channels, device=device) for _ in range(2))
    for kind in ["none", *kinds, *kinds]:
        x, alone = torch.randn(shape, device=device), torch.zeros(3, channels, device=device)
        if kind == "none":
            x = x[:0]
        if kind == "far":
            x += 1e3 ** torch.arange(channels, device=device).remainder(9)[:, None]
        if kind == "wild":
            wild = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, 1.0, -0.0, 1e-40], device=device)
            x[0, :, 0] = wild[torch.randint(len(wild), (channels,), device=device)]
        for target in (alone, pool):
            assert kernel.moments(x, 1, target) is None
        expected = reference.merge(expected, torch.tensor(x.numel() // channels, device=device), *alone[1:])
        assert torch.equal(pool.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0)), kind
        assert torch.equal(pool.isnan(), expected.isnan()), kind


@pytest.mark.parametrize(
    "shape", [(3, 1, 50), (4, 2, 1), (2, 31, 7), (2, 129, 16), pytest.param((2, 70_000, 1), marks=pytest.mark.slow)]
)
def test_pools(kernel, device, shape):
    compare_pools(kernel, device, shape)


def test_pools_that_are_left_to_plain_torch(kernel, device):
    """The operator falls back to the reference for pools that the kernel does not support."""
    x = torch.randn(6, 4, device=device)
    for pool in (torch.rand(3, 4, device=device).double(), torch.rand(4, 3, device=device).t()):
        expected = reference.merge(pool, torch.tensor(6, device=device), *reference.moments(x, 4, 1))
        assert kernel.moments(x, 1, pool) is NotImplemented
        ops.moments(x, 1, pool)
        assert torch.equal(pool, expected)


@needs_gpu
def test_a_captured_forward_of_phase_one():
    """In a process where the pool has not been touched before: run once, then capture, and every replay adds to the pool."""
    code = """
import torch, pwlu
act, x = pwlu.PWLU(5).cuda(), torch.randn(8, 5, 30, 30, device="cuda")
act.phase = 1
act(x)
once = act.statistics.pool.clone()
act.statistics.pool.zero_()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    act(x)
assert not act.statistics.pool.any()
for _ in range(2):
    graph.replay()
count, mean, m2 = once
assert torch.equal(act.statistics.pool, torch.stack([2 * count, mean, 2 * m2])), (act.statistics.pool, once)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.returncode, done.stderr


# Streams, graphs, threads, devices.


@needs_gpu
def test_the_current_stream(device):
    """The kernel waits for what is queued before it on a stream of its own, and nothing waits on the host."""
    grad, x, parameters, dim = problem("planes", torch.float32, device)
    arguments, pool = (*weight_of(parameters), dim), torch.zeros(3, x.shape[dim], device=device)
    expected = ops.forward(x + 1, *arguments), ops.backward(grad, x + 1, *arguments, True, True)
    ops.observe(x, *arguments, pool)  # compiled now, not while the stream sleeps
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    try:
        with torch.cuda.stream(side), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
            late = x.clone()
            torch.cuda._sleep(50_000_000)  # some 30 ms
            late += 1
            y, grads = ops.forward(late, *arguments), ops.backward(grad, late, *arguments, True, True)
            observed = ops.observe(late, *arguments, pool)
        assert not side.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side.synchronize()
    assert torch.equal(y, expected[0])
    assert torch.equal(observed, y)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected[1], strict=True))


@needs_gpu
def test_a_captured_step_of_training(device):
    act = pwlu.PWLU(5, init="silu").to(device)
    x = torch.randn(8, 5, 30, 30, device=device, requires_grad=True)
    leaves = [x, *act.parameters()]

    def step():
        return torch.autograd.grad(act(x).square().sum(), leaves)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        act.left.sub_(0.1)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, step(), strict=True))


@needs_gpu
def test_a_first_use_inside_a_capture_is_a_clear_error(kernel, device):
    _, x, parameters, dim = problem("planes", torch.float32, device)
    unused = fresh(kernel)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(RuntimeError, match=r"first use of kernel forward_planes_float32_4 .* pwlu\.warm_up"):
            unused.forward(x, *weight_of(parameters), dim)
        x + 1  # a graph of nothing is a warning
    torch.cuda.synchronize()


@needs_gpu
def test_warm_up(device, monkeypatch):
    number = pwlu.warm_up(device, [torch.bfloat16])
    assert number == sum("bfloat16" in name or name.startswith(("finish", "rule", "network")) for name in kernels.functions())
    monkeypatch.setattr(cuda.calls, "Loaded", lambda name, *_: pytest.fail(f"{name} is loaded only now"))
    for form in FORMS:
        _, x, parameters, dim = problem(form, torch.bfloat16, device)
        function(x, *(p.requires_grad_() for p in parameters), channel_dim=dim).sum().backward()
    assert pwlu.warm_up("cpu") == 1


@needs_gpu
def test_warm_up_then_a_capture_at_once():
    """In a process where nothing else has run: the first launch of all is a captured one."""
    code = """
import torch, pwlu
act, x = pwlu.PWLU(5).cuda(), torch.randn(8, 5, 30, 30, device="cuda", requires_grad=True)
pwlu.warm_up("cuda", [torch.float32])
torch.ones(3, device="cuda", requires_grad=True).sum().backward()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = act(x)
    grads = torch.autograd.grad(y.square().sum(), [x, *act.parameters()])
graph.replay()
assert torch.equal(y, act(x))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.returncode, done.stderr


@needs_gpu
def test_a_thread_that_never_used_cuda(device):
    _, x, parameters, dim = problem("rows", torch.float32, device)
    expected, results = function(x, *parameters, channel_dim=dim), []
    worker = threading.Thread(target=lambda: results.append(function(x, *parameters, channel_dim=dim)))
    worker.start()
    worker.join()
    assert torch.equal(results[0], expected)


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_device_that_is_not_the_current_one():
    for index in reversed(range(torch.cuda.device_count())):
        compare(cuda.kernel(index), "planes", torch.float32, torch.device("cuda", index))
        compare(cuda.kernel(index), "rows", torch.bfloat16, torch.device("cuda", index))


@needs_gpu
def test_tensors_on_two_devices(device):
    _, x, parameters, dim = problem("planes", torch.float32, device)
    with pytest.raises(ValueError, match="heights is on cpu"):
        function(x, *parameters[:2], parameters[2].cpu(), *parameters[3:], channel_dim=dim)
    weight, intervals = weight_of(parameters)
    with pytest.raises(ValueError, match="weight is on cpu"):
        ops.forward(x, weight.cpu(), intervals, dim)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", ["planes", "rows", "small planes", "one channel"])
def test_more_than_2_to_the_31_elements(kernel, device, form, dtype):
    """The first and the last elements, and the sums."""
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB")
    shape, dim = {
        "planes": ((2, 2, 2**29 + 1024), 1),
        "rows": ((2**29 + 1024, 4), 1),
        "small planes": ((2**24, 3, 49), 1),
        "one channel": ((2**31 + 8192,), 0),
    }[form]
    channels = 1 if form == "one channel" else shape[dim]
    parameters, kernel = unit(channels, 16, device=device), Unpacked(kernel)
    x = torch.full(shape, 0.25, dtype=dtype, device=device)
    flat = x.view(-1)
    ends = (2 * torch.randn(shape[-1] * 4 if shape[-1] < 10_000 else 4096, device=device)).to(dtype)
    flat[: len(ends)], flat[-len(ends) :] = ends, ends
    y = kernel.forward(x, *parameters, dim).view(-1)
    rows = flat.view(-1, shape[-1]) if form == "rows" else None
    if form == "rows":
        sample = torch.cat([rows[:4], rows[-4:]])
        expected, bound = oracle(sample, parameters, 1)
        assert_within(torch.cat([y[: 4 * 4], y[-4 * 4 :]]).view(-1, 4), expected, bound)
    else:  # the ends lie in the first and the last channel
        for part, channel in ((slice(0, 48), 0), (slice(-48, None), channels - 1)):
            expected, bound = oracle(flat[part], [p[channel : channel + 1] for p in parameters], 0)
            assert_within(y[part], expected, bound)
    del y
    grad_x, gradients = kernel.backward(torch.ones_like(x), x, *parameters, dim, True, True)
    assert (
        grad_x.view(-1)[-1]
        == kernel.backward(torch.ones_like(ends), ends, *(p[-1:] for p in parameters), 0, True, False)[0][-1]
    )
    # every element's gradient falls on the heights, whose shares add up to one
    torch.testing.assert_close(
        gradients[2].double().sum(1), torch.full((channels,), x.numel() / channels, device=device).double(), rtol=1e-4, atol=0
    )
    count, mean, _ = kernel.moments(x, channels, dim)
    assert count.tolist() == [x.numel() // channels] * channels
    torch.testing.assert_close(mean, torch.full_like(mean, 0.25), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("shape", "dim"), [((8, 7, 4, 7), 2), *(FORMS[form] for form in ("planes", "tiny planes", "many channels"))]
)
def test_a_mean_far_from_zero(kernel, device, shape, dim):
    """Check that merging adds little: the means of parts and the result are rounded, by half a unit each."""
    for _ in range(6):
        x = 1e4 + 3 * torch.randn(shape, device=device)
        _, mean, _ = Unpacked(kernel).moments(x, shape[dim], dim)
        values = x.double().movedim(dim, 0).reshape(shape[dim], -1)
        assert_within(mean, values.mean(1), torch.finfo(x.dtype).eps * values.abs().amax(1))


# Norms: test_norm_ops.py has the comparisons, and makes them for the operators on a GPU.


@pytest.mark.parametrize("dtype", [torch.float32, *(pytest.param(d, marks=pytest.mark.slow) for d in DTYPES[1:])])
@pytest.mark.parametrize("form", ["planes", pytest.param("small planes", marks=pytest.mark.slow), "rows"])
def test_norms(kernel, device, form, dtype):
    shape, _ = FORMS[form]
    for residual in (False, True):
        test_norm_ops.check_parts(*test_norm_ops.problem(shape, dtype, device, residual), kernel)
    test_norm_ops.check_rounding(shape, device, kernel)


# A comparison has to be able to fail: each of these mistakes is found.

MISTAKES = [
    ("p.shifted = __fadd_rd(p.t, MAGIC);", "p.shifted = __fadd_rn(p.t, MAGIC);"),
    ("p.t = __fmul_rn(p.u, scale);", "p.t = fmaf(x, scale, -left * scale);"),
    ("    if (x < left) p.shifted = MAGIC - 1.0f;\n", "    if (x <= left) p.shifted = MAGIC - 1.0f;\n", 2),
    ("    if (x >= right) p.shifted =", "    if (x > right) p.shifted =", 2),
    ("before - (float)(k - 1) * (after - before)", "before - (float)k * (after - before)"),
    ("return base + plane * stride + (i - plane * units);", "return base + plane * stride + i % units / 2;"),
    ("c % W * PANEL + c / W", "c"),
    ("place[j] = MIXED ? (active ? within : 0)", "place[j] = MIXED ? 0"),
    ("if (same) a.x += h, a.y = fmaf(h, s, a.y);", ""),
    ("{ x = {}, grad = {}, residual = {}; }", "{}"),
    ("pair.y -= i * pair.x;", ""),
    ("pair.x += more.x, pair.y += more.y;", ""),
    ("for (int group = 1; group < groups; ++group) {", "for (int group = 2; group < groups; ++group) {"),
    ("__fadd_rn(*pool_mean, __fmul_rn(distance, share))", "fmaf(distance, share, *pool_mean)"),
    ("__fmul_rn(__fmul_rn(distance, n_1), __fmul_rn(distance, share))", "distance * distance * n_1 * share"),
    ("*pool_m2 = pool_mean + a.channels", "*pool_m2 = pool_mean"),
    (
        "if (threadIdx.x % 32 == 0) add_to_pool",
        "if (threadIdx.x % 32 == 0 && channel + 1 < a.channels) add_to_pool",
    ),
    ("sum.m2 + part.m2 + difference * difference * sum.count * share", "sum.m2 + part.m2"),
]


MISTAKES_IN_NORMS = [
    ("__fadd_rn(__fmul_rn(centred(x), scale), shift)", "fmaf(centred(x), scale, shift)"),
    ("__fadd_rn(z(x), residual)", "z(x)"),
    ("{ x = {}, grad = {}, residual = {}; }", "{}"),
    ("centred_term = fmaf(g_z, centred, centred_term)", "centred_term = fmaf(g_z, g_z, centred_term)"),
    ("scale * (g_z - g_term - centred * centred_term)", "scale * (g_z - centred * centred_term)"),
    ("a.factor * inv_std * inv_std", "a.factor * inv_std"),
    ("panel.channel[j] != panel.channel[0] ? OWN - 1 : 0", "panel.channel[j] == panel.channel[0] ? OWN - 1 : 0"),
    ("total.y / (a.per_channel - 1)", "total.y / a.per_channel"),
    ("(float)(gamma * inv_std)", "(float)inv_std"),
    ("++*static_cast<i64 *>(a.gradients[2])", "*static_cast<i64 *>(a.gradients[2]) = 1"),
]


# Mistakes that a GPU need not notice, and what the emulator says of them.
MISTAKES_IN_BLOCKS = [
    (
        "    __syncthreads();\n    if (threadIdx.x == 0) {",
        "    if (threadIdx.x == 0) {\n      __syncthreads();",
        "different barriers",
    ),
    (
        "for (int step = 16; step; step >>= 1) value",
        "for (int step = threadIdx.x ? 16 : 8; step; step >>= 1) value",
        "different barriers",
    ),
    ("((kind) & KNOTS ? 2 : 3)", "4", "beyond shared memory"),
    ("lines_from<KIND>(address_of(table), 8)", "lines_from<KIND>(address_of(table), 4)", "not in shared memory"),
    ("store_pair(own + k * stride, make_float2(0.0f, 0.0f));", ";", "differ; the worst is nan"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "message"), MISTAKES_IN_BLOCKS)
def test_the_emulator_finds_mistakes_in_blocks(kernel, device, old, new, message, monkeypatch):
    if device.type == "cuda":
        pytest.skip("needs no GPU")
    put_mistake(monkeypatch, old, new)
    with pytest.raises(AssertionError, match=message):
        compare(fresh(kernel), "planes", torch.float32, device)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES_IN_NORMS)
def test_mistakes_in_norms_are_found(kernel, device, mistake, monkeypatch):
    put_mistake(monkeypatch, *mistake)
    monkeypatch.setattr(cuda.plan, "_ELEMENTS_OF_THREAD", 0)
    broken = fresh(kernel)
    monkeypatch.setattr(dispatch, "_kernel_for_device", lambda device: broken)
    eager.forget()
    try:
        with pytest.raises(AssertionError):  # noqa: PT012
            for shape in ((3, 5, 32, 32), (6, 40, 7, 7), (333, 37), (700, 40), (50, 24, 3)):
                for residual in (False, True):
                    test_norm_ops.check_parts(*test_norm_ops.problem(shape, torch.float32, device, residual))
                test_norm_ops.test_statistics_as_torch_computes_them(shape, torch.float32, device)
                test_norm_ops.test_z_is_rounded_as_the_definition_says(shape, device)
    finally:
        eager.forget()


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(kernel, device, mistake, monkeypatch):
    put_mistake(monkeypatch, *mistake)
    monkeypatch.setattr(cuda.plan.Gpu, "slots", lambda *_: 64)
    monkeypatch.setattr(cuda.plan, "_ELEMENTS_OF_THREAD", 0)
    broken = fresh(kernel)
    with pytest.raises(AssertionError):  # noqa: PT012
        compare_last_knot(broken, device)
        compare_pools(broken, device)
        for form in FORMS:
            for intervals in (3, 64):
                compare(broken, form, torch.float32, device, intervals)
        knots = wild_values(torch.float32, [p.cpu() for p in unit(1, 40)]).to(device)
        x = knots[knots.isfinite()].repeat(50)
        parameters = unit(1, 40, device=device)
        step = (parameters[1] - parameters[0]) / 40
        x = torch.cat([x, parameters[0] + step * torch.arange(41, device=device), parameters[1]])
        slope = reference.backward(torch.ones_like(x), x, *parameters, 0)[0]
        assert torch.allclose(
            Unpacked(broken).backward(torch.ones_like(x), x, *parameters, 0, True, False)[0], slope, rtol=1e-5
        )
