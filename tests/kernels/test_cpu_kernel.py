"""What is special to the C kernel: threads, determinism, poisoned outputs, mutations, the sanitizers, its build."""

import functools
import math
import mmap
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from helpers import CPU_VARIANTS, DTYPES, Unpacked, assert_within, oracle, parameter_dtype, unit, weight_of
from test_norm_ops import check_parts, check_rounding, problem

import pwlu
from pwlu.kernels import build, cpu

HERE = Path(__file__).parent
needs_compiler = pytest.mark.skipif(build.compiler() is None or sys.platform == "win32", reason="no C compiler here")


@pytest.fixture(params=CPU_VARIANTS)
def kernel(request):
    return Unpacked(cpu.load(request.param))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def results(kernel, x, grad, parameters, dim=1):
    grad_x, grads = kernel.backward(grad, x, *parameters, dim, True, True)
    return [kernel.forward(x, *parameters, dim), grad_x, *grads, *kernel.moments(x, parameters[0].shape[0], dim)]


@functools.cache
def random_case(shape, dim):
    """Return x, grad, parameters and the oracle's results, which take most of the time."""
    torch.manual_seed(0)
    x, grad, parameters = torch.randn(shape), torch.randn(shape), unit(shape[dim] if len(shape) > 1 else 1, 16)
    return x, grad, parameters, oracle(x, parameters, dim, grad, double_sums=True)


BIG = [((4, 7, 181, 181), 1), ((30_000, 19), 1), ((300_001,), 0), ((9, 12_000, 3), 1)]


@pytest.mark.parametrize(("shape", "dim"), BIG)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_many_threads(kernel, threads, shape, dim, count):
    threads(count)
    x, grad, parameters, (y, bound, gradients, bounds) = random_case(shape, dim)
    first = results(kernel, x, grad, parameters, dim)
    for actual, expected, b in zip(first, [y, *gradients], [bound, *bounds], strict=False):
        assert_within(actual, expected, b)
    for _ in range(3):  # bitwise the same, run after run
        for a, b in zip(results(kernel, x, grad, parameters, dim), first, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(2, 7, 181, 181), (30_000, 19), (900, 512)])
def test_outputs_are_the_same_bits_with_any_number_of_threads(kernel, threads, shape):
    x, grad, parameters = torch.randn(shape), torch.randn(shape), unit(shape[1], 16)
    found = []
    for count in (1, 2, 5):
        threads(count)
        found.append(results(kernel, x, grad, parameters)[:2])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), [((3, 5, 40), 1), ((64, 37), 1), ((37, 9), 1), ((40, 512), 1), ((9, 31, 17), 1)])
def test_outputs_of_all_variants_are_the_same_bits(dtype, shape, dim):
    x, grad = (torch.randn(shape).to(dtype) for _ in range(2))
    parameters = unit(shape[dim], 16, parameter_dtype(dtype))
    first, *others = (Unpacked(cpu.load(variant)) for variant in CPU_VARIANTS)
    for other in others:
        ours, theirs = (results(kernel, x, grad, parameters, dim)[:2] for kernel in (first, other))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_parameter_gradients_have_the_accuracy_of_doubles(kernel):
    """A million elements in one interval: the float32 gradient is off by its last rounding alone."""
    x, grad = 1e3 + torch.rand(1_000_000), torch.rand(1_000_000)
    parameters = [torch.tensor([1e3]), torch.tensor([1e3 + 1]), torch.tensor([[0.0, 1.0]]), torch.zeros(1), torch.ones(1)]
    _, grads = kernel.backward(grad, x, *parameters, 1, False, True)
    share = ((x.double() - 1e3) * grad).sum()
    exact = torch.stack([grad.double().sum() - share, share])[None]
    assert_within(grads[2], exact, exact.abs() * torch.finfo(torch.float32).eps / 2 * 1.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_output_is_written(kernel, dtype, monkeypatch):
    """Outputs begin as NaN; a place the kernel forgot would stay so."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(torch.nan))
    shapes = [(3, 5, 117), (515, 9), (37, 9), (40, 512), (33, 131), (9, 31, 17), (7, 33, 2), (1025,), (2, 3)]
    for shape, dim in [(shape, 1 if len(shape) > 1 else 0) for shape in shapes]:
        x, grad = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        channels = shape[dim] if len(shape) > 1 else 1
        for result in results(kernel, x, grad, unit(channels, 16, parameter_dtype(dtype)), dim):
            assert not result.isnan().any()


def test_threads_of_python_give_the_same(kernel, threads):
    """Python threads replace OpenMP on platforms without GOMP_parallel."""
    threads(3)
    stand_in = Unpacked(cpu.Kernel(kernel.code.variant, kernel.code.path, parallel=cpu.python_threads))
    x, grad, parameters = torch.randn(40, 8, 33, 33), torch.randn(40, 8, 33, 33), unit(8, 16)
    for a, b in zip(results(stand_in, x, grad, parameters), results(kernel, x, grad, parameters), strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(sys.platform != "linux", reason="where torch brings GNU OpenMP")
def test_torchs_own_threads_do_the_work():
    assert cpu.torch_threads() is not None


def test_weights_of_any_dtype_and_layout(kernel):
    x, (weight, intervals) = torch.randn(4, 6, 9), weight_of(unit(6, 5, torch.float64))
    forward, backward = kernel.code.forward, kernel.code.backward
    strided = torch.stack([weight, weight], -1)[..., 0]
    assert torch.equal(forward(x, strided, intervals, 1), forward(x, weight.float(), intervals, 1))
    assert backward(x, x, strided, intervals, 1, False, True)[1].dtype == torch.float64
    half = weight.bfloat16()
    assert torch.equal(forward(x, half, intervals, 1), forward(x, half.float(), intervals, 1))


# what to break, and in which variant: the portable code, or that of vector registers
MUTATIONS = {
    "an interval too far": ("(int32_t)clipped + 1;", "(int32_t)(clipped + (REAL)0.001) + 1;"),
    "contracted arithmetic": ("(x[i] - left[k]) * scale[k];", "x[i] * scale[k] - left[k] * scale[k];"),
    "the right bound belongs to the last interval": ("x[i] >= right[k]) ? outside", "x[i] > right[k]) ? outside"),
    "a lost element": ("for (; i < n; i++) out[i] = grad[i]", "for (i = 1; i < n; i++) out[i] = grad[i]"),
    "a wrong offset": (
        "(heights[i] - (left + i * step) * slope);",
        "(heights[i] - (left + i * step) * slope * 1.00001);",
    ),
    "a sum in the wrong place": (
        "gradients[2][c * (n + 1) + i] = (REAL)(height + g - share);",
        "gradients[2][c * (n + 1) + i] = (REAL)(height + g);",
    ),
    "vectors: an interval too far": (
        "V(min_ps)(V(set1_ps)((float)(intervals - 1)), t)",
        "V(min_ps)(V(set1_ps)((float)(intervals - 1)), V(add_ps)(t, V(set1_ps)(0.001f)))",
    ),
    "vectors: NaN goes to the last interval": (
        "V(min_ps)(V(set1_ps)((float)(intervals - 1)), t)",
        "V(min_ps)(t, V(set1_ps)((float)(intervals - 1)))",
    ),
    "vectors: the last of a plane not read": ("load_some(x + i, n - i), base", "load_some(x + i, n - i - 1), base"),
    "vectors: a part of the table forgotten": ("if (parts > 2) ", "if (parts > 9) "),
    "vectors: tiles not transposed back": (
        "            transpose(v + k);\n        }",
        "        }",
    ),
    "a look-up that is off by one": ("(lookup ? t >= end", "(lookup ? t > end"),
    "a mean without its shift": ("c, (REAL)(shift + mean), ", "c, (REAL)(shift + mean * 1.001), "),
    "a row of moments forgotten": (
        "SUMS_OF_ROWS(NULL, 0, x, j->norm ? WIDTH : row, (const REAL *)j->left + p, count,",
        "SUMS_OF_ROWS(NULL, 0, x, j->norm ? WIDTH : row, (const REAL *)j->left + p, count - 1,",
    ),
    "squares that are off": ("const double m2 = total[1] - total[0] * mean;", "const double m2 = total[1];"),
    "a gradient that is slightly off": (
        "slope * (share + (double)i * g);",
        "slope * (share + (double)i * g) * 1.00002;",
    ),
    "norm: a residual forgotten": ("+ shift[along * i] + residual[i];", "+ shift[along * i] + 0 * residual[i];"),
    "norm: another order of rounding": (
        "(x[i] - mean[along * i]) * gain[along * i] + shift[along * i] + residual[i];",
        "(x[i] - mean[along * i]) * gain[along * i] + (shift[along * i] + residual[i]);",
    ),
    "norm: a mean not taken off": ("(grad[i] - g_term[along * i] - ", "(grad[i] - "),
    "norm: the sums of another channel": (
        "sums + 2 * ((column ? 1 : c + 1) * j->segments - 1)",
        "sums + 2 * ((column ? 1 : first + 1) * j->segments - 1)",
    ),
    "norm: a row of sums forgotten": (
        "FOR_REAL(vector)(j, MEAN, p), count, n, totals",
        "FOR_REAL(vector)(j, MEAN, p), count - 1, n, totals",
    ),
    "norm: a gradient of gamma that is not scaled": ("(REAL)(total[1] * inv_std)", "(REAL)(total[1])"),
    "norm, vectors: half a register": ("ADD_HALF(second_half, (k) + 1", "ADD_HALF(first_half, (k) + 1"),
}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparisons_can_fail(mutation, tmp_path):
    """A kernel with a small mistake in it must not pass what the real one passes."""
    old, new = MUTATIONS[mutation]
    sources = {path.name: path.read_text() for path in (build.SOURCE, *build.HEADERS)}
    found = sorted(name for name, text in sources.items() for _ in range(text.count(old)))
    assert found == ["avx2.h", "avx512.h"] or len(found) == 1, f"{old!r} was found in {found}"
    vectors = mutation.partition(":")[0].endswith("vectors")
    variant = CPU_VARIANTS[0] if vectors else "portable"
    if vectors and variant == "portable":
        pytest.skip("this processor has no variant with vector registers")
    for name, text in sources.items():
        (tmp_path / name).write_text(text.replace(old, new))
    library = tmp_path / "mutant.so"
    options = [*build.flags(variant), "-O1", "-shared", "-fPIC"]  # as wrong as with -O3, and sooner
    command = [*build.compiler(), *options, str(tmp_path / "cpu.c"), "-o", str(library), "-lm"]
    subprocess.run(command, check=True)
    mutant = Unpacked(cpu.Kernel("mutant", library))
    with pytest.raises(AssertionError):
        _pass_all(mutant)


def test_the_comparisons_pass(kernel):
    _pass_all(kernel)


def _pass_all(kernel):
    """Planes, rows and tiles; half of the elements on knots; tables that fill one register and several; a NaN."""
    for shape in ((3, 5, 117), (6, 9, 20), (80, 70)):
        for residual in (False, True):
            check_parts(*problem(shape, torch.float32, "cpu", residual), kernel.code)
        check_rounding(shape, "cpu", kernel.code)
    for shape, dim, intervals in [
        ((3, 5, 117), 1, 16),
        ((515, 9), 1, 16),
        ((80, 70), 1, 16),
        ((3, 5, 117), 1, 40),
        ((80, 70), 1, 20),
    ]:
        parameters = unit(shape[dim], intervals)
        along = [-1 if d == dim else 1 for d in range(len(shape))]
        left, width = parameters[0].reshape(along), (parameters[1] - parameters[0]).reshape(along)
        knots = left + width * torch.randint(-8, 24, shape) / 16
        x = torch.where(torch.rand(shape) < 0.5, knots, 3 * torch.randn(shape))
        grad = torch.randn(shape)
        y, bound, gradients, bounds = oracle(x, parameters, dim, grad, double_sums=True)
        forward, *others, _, mean, m2 = results(kernel, x, grad, parameters, dim)
        for a, e, b in zip([forward, *others], [y, *gradients], [bound, *bounds], strict=True):
            assert_within(a, e, b)
        values = x.double().movedim(dim, 0).flatten(1)
        assert_within(mean, values.mean(1), 1e-6 * values.abs().amax(1))
        deviations = values.var(1, correction=0) * values.shape[1]
        assert_within(m2, deviations, 1e-6 * deviations)

        x[0].view(-1)[0] = torch.nan
        first = kernel.forward(x, *parameters, dim)
        assert first.isnan().sum() == 1
        slope, _ = kernel.backward(torch.ones_like(x), x, *parameters, dim, True, False)
        inside = (parameters[2][0, 1] - parameters[2][0, 0]) / (width.view(-1)[0] / intervals)
        assert_within(slope[0].view(-1)[:1], inside.double()[None], 1e-5 * inside.abs()[None])

        # a look-up whose offsets are the numbers of the segments and whose slopes are 0
        scale = intervals / (parameters[1] - parameters[0])
        offsets = torch.arange(-1.0, intervals + 1).expand(shape[dim], -1).contiguous()
        found = kernel.lookup(knots, parameters[0], scale, torch.zeros_like(offsets), offsets, dim)
        position = ((knots - left) * scale.reshape(along)).floor().clamp(-1, intervals)
        assert torch.equal(found, position)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"intervals": 0}, "at least 1"),
        ({"weight": torch.zeros(28)}, "weight"),
        ({"weight": torch.zeros(3, 9)}, "weight"),
        ({"x": torch.zeros(2, 4)}, "3 channels"),
        ({"x": torch.zeros(1, 2)}, "3 channels"),
        ({"x": torch.zeros(3)}, "is not a dimension of x"),
        ({"grad": torch.zeros(2)}, "grad must have the shape"),
        ({"x": torch.zeros(2, 3).long(), "grad": torch.zeros(2, 3).long()}, "x must be float32"),
    ],
)
def test_shapes_are_checked_before_c_sees_them(change, text):
    """The operators check shapes themselves, because a traced model does not call functional.pwlu."""
    weight, intervals = weight_of(unit(3, 4))
    parts = {"weight": weight, "intervals": intervals, "x": torch.zeros(2, 3), "grad": torch.zeros(2, 3)} | change
    unit_of = parts["weight"], parts["intervals"], 1
    with pytest.raises((ValueError, TypeError), match=text):
        torch.ops.pwlu.backward(parts["grad"], parts["x"], *unit_of, True, True)
    if "grad" not in change or "x" in change:
        with pytest.raises((ValueError, TypeError), match=text):
            torch.ops.pwlu.forward(parts["x"], *unit_of)
        with pytest.raises((ValueError, TypeError), match=text):
            torch.ops.pwlu.observe(parts["x"], *unit_of, torch.zeros(3, 3))
    if "x" in change:
        with pytest.raises((ValueError, TypeError), match=text):
            torch.ops.pwlu.moments(parts["x"], 1, torch.zeros(3, 3))


def test_more_intervals_than_the_kernel_supports():
    intervals = 2**24
    with pytest.raises(ValueError, match=r"fewer than 2\^24 intervals.*not 1 channels with 16777216 intervals"):
        torch.ops.pwlu.forward(torch.zeros(1), torch.zeros(intervals + 5), intervals, 0)


def test_a_traced_model_refuses_wrong_channels():
    traced = torch.jit.trace(torch.nn.Sequential(pwlu.PWLU(64)), torch.randn(2, 64))
    assert traced(torch.randn(5, 64)).shape == (5, 64)
    with pytest.raises(Exception, match="the activation has 64 channels"):
        traced(torch.randn(2, 65))


def test_threads_that_cannot_be_started(threads, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    threads(4)
    kernel = cpu.load(CPU_VARIANTS[0])
    stand_in = cpu.Kernel(kernel.variant, kernel.path, parallel=cpu.python_threads)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    x, weight = torch.randn(40, 8, 33, 33), weight_of(unit(8, 16))
    assert torch.equal(stand_in.forward(x, *weight, 1), kernel.forward(x, *weight, 1))


@pytest.mark.slow
@needs_compiler
def test_nothing_is_read_or_written_outside(tmp_path):
    """The C file alone, built with the address and undefined-behaviour sanitizers, on wild bits of every dtype."""
    for variant in [*CPU_VARIANTS, "portable-no-simd"]:
        program = tmp_path / f"sanitize-{variant}"
        flags = [*build.flags(variant.partition("-no-simd")[0])]
        if variant.endswith("no-simd"):
            flags += ["-U__SSE2__"]
        sanitizers = ["-g1", "-Og", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
        command = [
            *build.compiler(),
            *flags,
            *sanitizers,
            f"-I{build.SOURCE.parent}",
            str(HERE / "sanitize.c"),
            "-o",
            str(program),
            "-lm",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode and re.search("cannot find|unsupported", done.stderr):
            pytest.skip("this compiler has no sanitizers")
        assert not done.returncode, done.stderr
        done = subprocess.run([program], capture_output=True, text=True, env=os.environ | {"ASAN_OPTIONS": "detect_leaks=1"})
        assert not done.returncode, done.stderr
        assert done.stdout.startswith("checked ")


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("variant", CPU_VARIANTS)
def test_compiles_without_warnings(variant, tmp_path):
    # The buffers of `block` are written before they are read, in a call the compiler does not see through.
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-maybe-uninitialized", "-pedantic"]
    command = [
        *build.compiler(),
        *build.flags(variant),
        *warnings,
        "-shared",
        "-fPIC",
        str(build.SOURCE),
        "-o",
        str(tmp_path / "x.so"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr


def _free_memory():
    """Return the bytes of available memory, including the page cache; 0 if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), 0)


@pytest.mark.slow
@pytest.mark.skipif(_free_memory() < 6 * 2**30, reason="needs 6 GB of free memory")
@pytest.mark.parametrize(("shape", "dim"), [((2, 2**30 + 5), 0), ((2**31 // 61 + 5, 61), 1)])
def test_more_than_two_to_the_31_elements(shape, dim):
    """In planes and in rows; the ends of a tensor whose offsets do not fit 32 bits are right, and so are its moments."""
    kernel = Unpacked(cpu.load(CPU_VARIANTS[0]))
    memory = mmap.mmap(-1, 2 * math.prod(shape), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # zeros, which take no memory until
    x = torch.frombuffer(memory, dtype=torch.bfloat16).view(shape)  # they are written
    last = x.narrow(1 - dim, shape[1 - dim] - 5, 5)
    last.copy_(torch.randn(last.shape))
    parameters = unit(shape[dim], 16)
    y = kernel.forward(x, *parameters, dim)
    assert torch.equal(y.narrow(1 - dim, shape[1 - dim] - 5, 5), kernel.forward(last.contiguous(), *parameters, dim))
    del y
    _, mean, m2 = kernel.moments(x, shape[dim], dim)
    exact = last.double()
    count = shape[1 - dim]
    torch.testing.assert_close(mean.double(), exact.sum(1 - dim) / count, rtol=1e-6, atol=0)
    torch.testing.assert_close(m2.double(), exact.square().sum(1 - dim), rtol=1e-6, atol=1e-6)
    _, grads = kernel.backward(x, x, *parameters, dim, False, True)
    _, expected = kernel.backward(last.contiguous(), last.contiguous(), *parameters, dim, False, True)
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b)
