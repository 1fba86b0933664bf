"""The CUDA kernels as far as no GPU is needed: they compile for every architecture, the cache, and how work is shared out."""

import ctypes
import hashlib
import importlib.util
import os
import re
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from cuda_emulator import H200
from hypothesis import given, settings
from hypothesis import strategies as st
from imported import SOURCES

from pwlu.cli import main
from pwlu.kernels import cuda
from pwlu.kernels.cuda import compile as kernels
from pwlu.kernels.cuda import plan as plans

# The conditions of the sources, and the architectures that they tell apart: the last two kinds by RESIDENT_THREADS alone.
CONDITIONS = [
    "__CUDA_ARCH__ == 750",
    "__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1100",
    "__CUDA_ARCH__ >= 800",
]
OLD, NEW = ("sm_75",), (("sm_80", "sm_90", "sm_100"), ("sm_86", "sm_89", "sm_120"))
needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None,
    reason="cuda-core is not installed",
)


@pytest.mark.slow
@needs_nvrtc
def test_every_kernel_compiles_for_every_architecture():
    """Architectures for which the preprocessor makes the same text of a function share it among them."""
    text = kernels.source([])
    assert re.findall(r"#\s*(?:el)?if\w*\s+(.*)", text) == CONDITIONS
    assert text.count("__CUDA_ARCH__") == " ".join(CONDITIONS).count("__CUDA_ARCH__")
    assert text.count("RESIDENT_THREADS") == text.count("#define RESIDENT_THREADS") == 3
    functions = list(kernels.functions().values())
    telling = [function for function in functions if "RESIDENT_THREADS" in function.declaration()]
    norms = [function for function in functions if function.name.startswith(("norm_", "dynamic_", "network_", "add_means_"))]
    plain = [function for function in functions if function not in norms]
    others = [function for function in plain if function not in telling]
    assert len(telling) == 16
    chosen = {architecture: [] for architecture in (*OLD, *NEW[0], *NEW[1])}
    every = OLD + NEW[0] + NEW[1]  # they are many, and made of the same parts: each is compiled once
    for alike, those in ((OLD, plain), (NEW[0], telling), (NEW[1], telling), (NEW[0] + NEW[1], others), (every, norms)):
        for i, architecture in enumerate(alike):
            chosen[architecture] += those[i :: len(alike)]
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # NVRTC lets other threads run
        codes = list(threads.map(lambda a: bytes(kernels.compile_functions(chosen[a], a, keep=False).code), chosen))
    for code, those in zip(codes, chosen.values(), strict=True):
        assert all(function.name.encode() in code for function in those)
    assert len(set(codes)) == len(chosen) == 7


@needs_nvrtc
def test_some_kernels_compile():
    """One function of each family, for one architecture; all of them, for all: the test above."""
    families = {}
    for function in kernels.functions().values():
        families.setdefault(re.split(r"_(?:planes|rows|mixed)_", function.name)[0], function)
    assert len(families) > 10
    code = bytes(kernels.compile_functions(list(families.values()), "sm_90", keep=False).code)
    assert all(function.name.encode() in code for function in families.values())


def test_sources_need_no_header():
    assert "#include" not in kernels.source([])


def fields_of(source, struct_name):
    """Return the type and the name of each member of a struct."""
    text = re.search(rf"struct {struct_name} \{{(.*?)\n\}};", source, re.S).group(1)
    fields = []
    for line in re.sub(r"//.*", "", text).split(";"):
        kind, _, names = line.strip().removeprefix("const ").partition(" ")
        for name in filter(None, (n.strip(" *\n") for n in names.split(","))):
            found = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", name)
            fields += [(kind, found.group(1))] * int(found.group(2) or 1)
    return fields


def test_arguments_are_packed_in_the_order_of_the_struct():
    fields, network = (fields_of(kernels.source([]), name) for name in ("Arguments", "Network"))
    addresses = [name for kind, name in fields if kind in ("void", "float", "Network")]
    head = ["x", "grad", "out", *["parameters"] * 5, *["gradients"] * 5, "partial", "pool", "residual", "norm", "sums"]
    assert addresses == [*head, "network", "factor", "eps"]
    assert {kind for kind, _ in network} == {"float"}
    assert len(head) + len(network) + 1 == cuda.driver.ADDRESSES  # the last two are floats in the place of one address
    codes = {"i64": "q", "int": "i", "unsigned": "I"}
    numbers = [(codes[kind], name) for kind, name in fields if kind in codes]
    assert tuple(name for _, name in numbers) == plans._Numbers._fields
    packed = struct.calcsize("".join(code for code, _ in numbers))
    assert -(-packed // 8) * 8 == plans.NUMBERS_BYTES  # a C struct with 64-bit members has a multiple of 8 bytes


def test_arguments_of_the_learning_rule_fit():
    assert f"constexpr int RULE_UNITS = {kernels.RULE_UNITS};" in kernels.source([])
    assert cuda.driver._PACK.size + kernels.RULE_UNITS * cuda.calls._UNIT.size <= cuda.driver._LIMIT


def test_units_follow_the_other_arguments(monkeypatch):
    launched = []
    monkeypatch.setattr(cuda.driver, "launcher", lambda: lambda *given: launched.append(ctypes.string_at(given[9][0], 500)))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    loaded = cuda.driver.Loaded.__new__(cuda.driver.Loaded)
    loaded.index, loaded.handle = 0, 1
    plan = plans.plan_rule("smooth", 2, 16, H200)
    loaded(plan, range(cuda.driver.ADDRESSES), b"units")
    assert launched[0].startswith(cuda.driver._PACK.pack(*range(cuda.driver.ADDRESSES), plan.numbers) + b"units")


@needs_nvrtc
def test_several_threads_at_once(printed_by):
    """In a process where cuda.core has not been imported."""
    code = (
        "from concurrent.futures import ThreadPoolExecutor\nfrom pwlu.kernels.cuda import compile as k\n"
        "f = k.functions()['finish_moments']\n"
        "with ThreadPoolExecutor(8) as threads:\n"
        "    print(len(set(threads.map(lambda _: bytes(k.compile_functions([f], 'sm_80', keep=False).code), range(8)))))"
    )
    assert printed_by(code) == "1\n"


# The cache.

COMPILE = (
    "from pwlu.kernels.cuda import compile as k; f = k.functions()['finish_moments'];"
    "print(len(bytes(k.compile_functions([f], 'sm_80').code)))"
)


def variables(cache):
    """Return the environment of a process with that cache, into which it does not first compile eager.cpp."""
    return os.environ | {"PWLU_CACHE": str(cache), "PWLU_EAGER": "python", "PYTHONPATH": str(SOURCES)}


@pytest.fixture
def printed_by(processes):
    def printed_by(code, cache=""):
        done = processes(["-c", code], variables(cache))
        assert done.returncode == 0, done.stderr
        return done.stdout

    return printed_by


@pytest.mark.slow
@needs_nvrtc
def test_two_processes_share_a_cache(printed_by, tmp_path):
    fork = f"import os; copy = os.fork(); {COMPILE}; assert not copy or os.waitpid(copy, 0)[1] == 0"
    printed = printed_by(fork, tmp_path).splitlines(keepends=True)
    assert len(printed) == 2
    assert printed[0] == printed[1]
    (entry,) = (p for p in (tmp_path / "cuda").rglob("*") if p.is_file() and p.stat().st_size == int(printed[0]) + 32)
    # a third finds it
    stamp = entry.stat().st_mtime_ns
    assert printed_by(COMPILE, tmp_path) == printed[0]
    assert entry.stat().st_mtime_ns == stamp
    # half a kernel would crash the driver: it is made anew
    entry.write_bytes(entry.read_bytes()[:500])
    assert printed_by(COMPILE, tmp_path) == printed[0]
    assert entry.stat().st_size == int(printed[0]) + 32
    # another architecture, or another source, has another key
    printed_by(COMPILE.replace("sm_80", "sm_90"), tmp_path)
    printed_by(
        "from pwlu.kernels.cuda import compile as k; s = k.source; k.source = lambda c: s(c) + '//';" + COMPILE, tmp_path
    )
    assert len([p for p in (tmp_path / "cuda").rglob("*") if p.is_file() and p.stat().st_size > 1000]) == 3


@needs_nvrtc
def test_a_cache_that_cannot_be_written_is_no_error(printed_by, tmp_path):
    (tmp_path / "file").touch()
    assert int(printed_by(COMPILE, tmp_path / "file" / "folder")) > 1000


@needs_nvrtc
def test_a_cache_of_another_user_is_not_used(monkeypatch, tmp_path):
    """Neither is a cache that others can write: a kernel that they put there would run."""
    monkeypatch.setenv("PWLU_CACHE", str(tmp_path))
    folder, chosen = tmp_path / "cuda", [kernels.functions()["finish_moments"]]
    code = bytes(kernels.compile_functions(chosen, "sm_80").code)
    assert folder.stat().st_mode & 0o777 == 0o700
    (entry,) = (p for p in folder.rglob("*") if p.is_file() and p.stat().st_size == len(code) + 32)
    planted = b"no kernel"
    entry.write_bytes(hashlib.sha256(planted).digest() + planted)
    assert bytes(kernels.compile_functions(chosen, "sm_80").code) == planted  # what would run
    folder.chmod(0o777)
    assert bytes(kernels.compile_functions(chosen, "sm_80").code) == code


# Where it cannot work.


@pytest.fixture
def one_gpu(monkeypatch):
    """Pretend that this machine has one GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.delenv("PWLU_CUDA_KERNEL", raising=False)
    cuda.choose.cache_clear()
    yield
    cuda.choose.cache_clear()


def info(capsys):
    assert main(["info"]) == 0
    return capsys.readouterr().out


def test_without_cuda_core(one_gpu, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    printed = info(capsys)
    assert "a GPU, plain torch (pwlu.reference), many times slower: cuda-core is missing" in printed
    assert "pip install '.[cuda]'" in printed
    with pytest.warns(UserWarning, match=r"without its CUDA kernels.*pip install '\.\[cuda\]'"):
        assert cuda.kernel(0) is None
    cuda.choose.cache_clear()
    monkeypatch.setenv("PWLU_CUDA_KERNEL", "cuda")
    with pytest.raises(OSError, match="PWLU_CUDA_KERNEL=cuda, but cuda-core is missing"):
        cuda.choose(0)


def test_info_about_the_cache(one_gpu, monkeypatch, capsys, tmp_path):
    """A missing folder is no reason to fail. The kernels would need a GPU, and the command shows only their architecture."""
    compiled = SimpleNamespace(processor=SimpleNamespace(architecture="sm_90"))
    monkeypatch.setattr(cuda, "_load", lambda index: compiled)
    monkeypatch.setenv("PWLU_CACHE", str(tmp_path / "cache"))
    assert f"a GPU, CUDA kernels for sm_90 (compiled by NVRTC at first use, cached in {tmp_path}/cache/cuda)\n" in info(capsys)
    (tmp_path / "file").touch()
    monkeypatch.setenv("PWLU_CACHE", str(tmp_path / "file" / "cache"))
    assert "at first use, not cached: [Errno" in info(capsys)
    for name in ("PWLU_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home")))
    assert "not cached: there is no folder for the cache (no home). Set PWLU_CACHE to a folder)\n" in info(capsys)


def test_an_old_gpu(one_gpu, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    assert "a GPU is older than compute capability 7.5" in info(capsys)


def test_asked_for_by_name(one_gpu, monkeypatch, capsys):
    monkeypatch.setenv("PWLU_CUDA_KERNEL", "reference")
    assert "PWLU_CUDA_KERNEL=reference" in info(capsys)
    assert cuda.kernel(0) is None  # and no warning
    cuda.choose.cache_clear()
    monkeypatch.setenv("PWLU_CUDA_KERNEL", "fast")
    assert "PWLU_CUDA_KERNEL must be cuda or reference, not 'fast'" in info(capsys)


def test_warm_up_refuses_what_has_no_kernel():
    with pytest.raises(TypeError, match=r"float32, bfloat16 and float16, not torch\.float64"):
        cuda.warm_up(0, (torch.float64,))


# How work is shared out.

RTX = plans.Processor("sm_86", 28, 1536, 100 << 10, 99 << 10)
SMALL = plans.Processor("sm_75", 2, 1024, 64 << 10, 64 << 10)  # many rounds and splits even for few elements


def gpu(processor):
    return plans.Gpu(processor, lambda _, threads, shared: plans.by_shared_memory(processor, threads, shared))


def elements(plan, geometry):
    """How often a plan's kernel touches every element of a channel-first view: the index arithmetic of share.cuh."""
    _, channels, inner = geometry
    n = plans._Numbers(*struct.unpack(plans._FORMAT, plan.numbers))
    seen = torch.zeros(n.outer * n.channels * n.inner, dtype=torch.int32)
    vector, threads = int(plan.kernel.rpartition("_")[2]), plan.threads
    grid_x, grid_y, grid_z = plan.blocks
    if "_planes_" in plan.kernel:
        units = n.inner // vector
        for y in range(grid_y):
            planes = n.of_split + (y < n.outer - n.of_split * grid_y)
            for z in range(grid_z):
                length = max(min(n.piece, units - z * n.piece), 0)
                i = torch.arange(planes * length)
                plane = (((i * n.magic) >> 32) + i) >> n.shift if n.magic else torch.zeros_like(i)
                at = plane * grid_y * channels * units + (i - plane * units)
                for x in range(grid_x):
                    base = (y * channels + x) * units + z * n.piece
                    where = ((base + at)[:, None] * vector + torch.arange(vector)).reshape(-1)
                    assert ((where // n.inner) % channels == x).all()  # of that channel alone
                    seen.index_add_(0, where, torch.ones_like(where, dtype=torch.int32))
    else:
        rows, length = threads // n.width, channels * inner
        for x in range(grid_x):
            begin = x * n.width * vector
            assert begin % inner == 0  # panels hold whole channels
            mine = torch.arange(begin, min(begin + n.width * vector, length))
            for y in range(grid_y):
                for down in range(rows):
                    first, apart = y * rows + down, grid_y * rows
                    count = n.of_split + (first + n.of_split * apart < n.outer)
                    where = ((first + apart * torch.arange(count))[:, None] * length + mine).reshape(-1)
                    seen.index_add_(0, where, torch.ones_like(where, dtype=torch.int32))
    return seen


OPERATIONS = [what for what in {**kernels.MAPS, **kernels.BACKWARDS} if "_add_" not in what]
MOST_ELEMENTS = 1_000_000  # of a tensor that the tests walk through
INNER = [1, 2, 3, 7, 8, 9, 32, 49, 64, 81, 196, 1024, 4096, 8192 * 3]


@st.composite
def shapes(draw):
    """Draw (outer, channels, inner) with at most MOST_ELEMENTS elements."""
    channels = draw(st.sampled_from([1, 2, 3, 8, 20, 64, 100]))
    inner = draw(st.sampled_from([n for n in INNER if channels * n <= MOST_ELEMENTS]))
    return draw(st.integers(1, min(300, MOST_ELEMENTS // (channels * inner)))), channels, inner


@settings(max_examples=300)
@given(
    shape=shapes(),
    intervals=st.sampled_from([1, 4, 16, 64, 256]),
    dtype=st.sampled_from(list(kernels.TYPES)),
    aligned=st.booleans(),
    what=st.sampled_from(OPERATIONS),
    processor=st.sampled_from([H200, RTX, SMALL]),
)
def test_every_element_is_taken_once(shape, intervals, dtype, aligned, what, processor):
    check_plan(*shape, intervals, dtype, aligned, what, processor)


@settings(max_examples=100)
@given(
    outer=st.integers(2, 300),
    channels=st.sampled_from([2, 3, 20, 64, 100]),
    inner=st.sampled_from([1, 3, 7, 49]),
    samples=st.integers(2, 200),
    intervals=st.sampled_from([4, 16]),  # with many more, samples are folded into channels
    what=st.sampled_from(["dynamic_forward", "dynamic_backward"]),
    processor=st.sampled_from([H200, RTX]),
)
def test_every_element_of_every_sample_is_taken_once(outer, channels, inner, samples, intervals, what, processor):
    check_plan(outer, channels, inner, intervals, "bfloat16", True, what, processor, samples)


@settings(max_examples=60)
@given(
    outer=st.integers(40, 200),
    inner=st.sampled_from([1, 3, 49, 1025, 4100, 4225]),
    what=st.sampled_from(["forward", "backward"]),
)
def test_when_the_grid_is_full(outer, inner, what):
    """As for more than 65535 planes: their pieces do not become blocks."""
    most = plans._MOST_BLOCKS
    plans._MOST_BLOCKS = 50
    try:
        check_plan(outer, 2, inner, 16, "float32", True, what, H200)
    finally:
        plans._MOST_BLOCKS = most


def check_plan(outer, channels, inner, intervals, dtype, aligned, what, processor, samples=1):
    geometry = (1, 1, outer * inner) if channels == 1 else (outer, channels, inner)
    if what in kernels.BACKWARDS:
        plan = plans.plan_backward(what, dtype, geometry, intervals, 0, aligned, gpu(processor), samples)
    else:
        plan = plans.plan_map(what, dtype, geometry, intervals, 0, aligned, gpu(processor), samples)
    lines = plans.sum_lines(what, intervals) if what in kernels.BACKWARDS else 0
    least = lines * ((8 if "nonuniform" in what else 4) + 8 * 32)  # bytes: tables, and the columns of one warp
    assert (plan is None) == (least > processor.shared_of_block)  # plain torch then does the work
    if plan is None:
        return
    assert plan.kernel in kernels.functions()
    assert plan.threads % 32 == 0
    assert 32 <= plan.threads <= kernels.functions()[plan.kernel].threads
    assert plan.shared <= processor.shared_of_block
    assert plan.splits * samples == plan.blocks[1] * plan.blocks[2]
    assert samples == 1 or plan.blocks[2] == samples
    assert max(plan.blocks[1:]) <= plans._MOST_BLOCKS
    assert (elements(plan, geometry) == 1).all()
    if lines:
        last = plans.plan_finish(what, plan, channels, lines)
        assert last.kernel in kernels.functions()
        assert last.shared <= 48 << 10
        assert last.threads <= kernels.FINISH_THREADS


@given(divisor=st.integers(1, 2**31 - 1), number=st.integers(0, 2**31 - 1))
def test_division_by_multiplication(divisor, number):
    magic, shift = plans.divider(divisor)
    for n in (number, number // divisor * divisor, max(number // divisor * divisor - 1, 0)):
        assert (((n * magic) >> 32) + n) >> shift == n // divisor


def test_too_many_intervals_are_left_to_plain_torch():
    for geometry in [(64, 256, 3136), (4096, 256, 1), (64, 256, 49)]:
        assert plans.plan_backward("backward", "float32", geometry, 256, 0, True, gpu(RTX)) is not None
        assert plans.plan_backward("backward", "float32", geometry, 5000, 0, True, gpu(H200)) is None


def test_rows_too_far_apart_for_32_bits(monkeypatch):
    monkeypatch.setattr(plans, "choose_splits", lambda *_: plans._MOST_BLOCKS)
    near, far = (plans.plan_backward("backward", "bfloat16", (2**30, c, 1), 16, 0, True, gpu(H200)) for c in (2**16, 2**17))
    assert "rows" in near.kernel
    assert far is None or "rows" not in far.kernel


def test_more_than_2_to_the_31_elements():
    for geometry in [(1, 1, 2**33), (2**31, 4, 1), (8, 2, 2**30), (2**20, 3, 2**12 + 1), (2**27, 3, 49)]:
        for plan in (
            plans.plan_map("forward", "float32", geometry, 16, 0, True, gpu(H200)),
            plans.plan_backward("backward", "float32", geometry, 16, 0, True, gpu(H200)),
        ):
            n = plans._Numbers(*struct.unpack(plans._FORMAT, plan.numbers))
            assert max(plan.blocks[1:]) <= 65535
            assert (n.of_split + 1) * (n.piece if "_planes_" in plan.kernel else 1) < 2**31
