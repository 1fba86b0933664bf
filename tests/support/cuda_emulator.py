"""Run the CUDA kernels on the CPU, where there is no GPU: compile their sources as C++ behind ``cuda_emulator.h``."""

import ctypes
import functools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch

from pwlu.kernels import build, cpu, cuda, eager
from pwlu.kernels.cuda import compile as kernels
from pwlu.kernels.cuda import driver
from pwlu.kernels.cuda.plan import Processor, by_shared_memory

H200 = Processor("sm_90", 132, 2048, 228 << 10, 227 << 10)
_PROLOGUE = Path(__file__).with_name("cuda_emulator.h")
_EPILOGUE = """
extern "C" __global__ const char *launch(void (*kernel)(ARGUMENTS), const ARGUMENTS *arguments, const unsigned (&blocks)[3],
                                         unsigned threads, unsigned bytes) {
  return emulator::launch(kernel, arguments, blocks, threads, bytes);
}
"""
_ASSEMBLER = {
    'asm volatile("" : "+r"(address));': "",
    'asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));': "value = emulator::at<float>(address);",
    'asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address));': (
        "pair = emulator::at<float2>(address);"
    ),
    'asm volatile("st.shared.v2.f32 [%0], {%1, %2};" : : "r"(address), "f"(pair.x), "f"(pair.y));': (
        "emulator::at<float2>(address) = pair;"
    ),
    'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));': "word = round(low) | (round(high) << 16);",
    'asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));': "value = emulator::widen(bits);",
    'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));': "bits = emulator::narrow(value);",
}
# Compiling takes longer than running.
_FLAGS = ["-std=c++17", "-O0", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-U_FORTIFY_SOURCE"]


def _as_cpp(text):
    for old, new in _ASSEMBLER.items():
        text = text.replace(old, new)
    if "asm" in text:
        raise NotImplementedError("cuda_emulator.py has no C++ for some statement in assembler")
    shared = r"\1 *const \2 = reinterpret_cast<\1 *>(emulator::shared_memory);"
    return re.sub(r"extern __shared__ (\w+) (\w+)\[\];", shared, text)


def _compiler():
    return build.compiler("CXX", ("c++", "g++", "clang++"))


@functools.cache
def _library(text, races):
    """Return the library of a C++ program. With `races`, calls of functions in ``cuda_emulator.h`` surround its accesses."""
    fma = ["-mfma", "-mf16c"] if "avx2" in cpu.usable_variants() else []  # else functions of the C library
    with tempfile.TemporaryDirectory() as folder:
        source, code, library = (Path(folder, f"kernels.{suffix}") for suffix in ("cpp", "o", "so"))
        source.write_text(text)
        compiling = [*_FLAGS, *fma, *(["-O1", "-fsanitize=thread"] if races else []), "-c", source, "-o", code]
        for command in (compiling, ["-shared", code, "-o", library]):  # two steps, so that the real sanitizer is not linked
            done = subprocess.run([*_compiler(), *command], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr)
        found = ctypes.CDLL(str(library))
    found.launch.restype = ctypes.c_char_p
    return found


class _Loaded:
    """One kernel, in place of ``driver.Loaded``. It is compiled together with those of the same form, dtype and width."""

    def __init__(self, name, processor, races):
        self._processor = processor
        self._function = kernels.functions()[name]
        group = [f for other, f in kernels.functions().items() if _group(other) == _group(name)]
        epilogue = _EPILOGUE.replace("ARGUMENTS", self._function.arguments)
        architecture = f"#define __CUDA_ARCH__ {processor.architecture.removeprefix('sm_')}0\n"
        self._library = _library(architecture + _PROLOGUE.read_text() + _as_cpp(kernels.source(group)) + epilogue, races)

    def resident(self, threads, shared):
        return by_shared_memory(self._processor, threads, shared)

    def __call__(self, plan, addresses, units):
        assert plan.threads <= self._function.threads
        assert plan.shared <= self._processor.shared_of_block
        arguments = (driver._PACK.pack(*addresses, plan.numbers) + units).ljust(driver._LIMIT, b"\0")
        kernel = getattr(self._library, plan.kernel)
        error = self._library.launch(kernel, arguments, (ctypes.c_uint * 3)(*plan.blocks), plan.threads, plan.shared)
        assert error is None, f"{plan}: {error.decode()}"


def _group(name):
    what, _, form = re.fullmatch("(.*?)(_(planes|rows|mixed).*)?", name).groups()
    return [kind in what for kind in ("norm", "nonuniform", "rule")], form


class Emulated(cuda.Kernel):
    """The CUDA kernels on tensors of the CPU. With `races`, it checks for races in shared memory, and takes twice as long."""

    def __init__(self, index=0, processor=H200, races=False):
        super().__init__(index, processor)
        self.races = races

    def load(self, name):
        if name not in self._loaded:
            self._loaded[name] = _Loaded(name, self.processor, self.races)
        return self._loaded[name]

    def _launch(self, plan, addresses, units=b""):
        self.load(plan.kernel)(plan, addresses, units)

    def _run(self, *arguments):
        with mock.patch.object(eager, "library", None):  # eager.cpp launches on GPUs
            super()._run(*arguments)


def put_mistake(monkeypatch, old, new, times=1):
    """Replace code in the sources of the CUDA kernels, where it has to occur `times` times."""
    source = kernels.source
    found = source([]).count(old)
    assert found == times, f"the sources contain {old!r} {found} times, not {times}"
    monkeypatch.setattr(kernels, "source", lambda chosen: source(chosen).replace(old, new))


def kernel_for(device):
    """Return the CUDA kernels for a device: those of a GPU, or emulated ones for a CPU. Skip the test if there are none."""
    if device.type == "cuda":
        return cuda.kernel(torch.cuda.current_device())
    if device.type != "cpu" or sys.platform != "linux" or _compiler() is None:
        pytest.skip("the CUDA kernels need --device cuda or, to emulate them on the CPU, Linux and a C++ compiler")
    return Emulated()
