"""The operators in eager mode without Python, ``eager.cpp``: compiled for the torch that is here, loaded, and taught.

A call through Python takes ten times as long as one of torch's own operators, which shows wherever a GPU waits for its
processor. Building takes some 15 seconds of a core and needs a C++ compiler, so it is done once on a machine, aside: the first
process that uses a kernel starts it and runs on with Python, all later ones find the library in the cache.
"""

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from pwlu.kernels import build

SOURCE, *HEADERS = (Path(__file__).with_name(name) for name in ("eager.cpp", "eager_kernels.h"))
_WHATS = ("forward", "lookup", "observe", "backward", "backward_input")  # enum What
_TYPES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}  # c10::ScalarType
_KEY, _NUMBERS = ctypes.c_int64 * 9, ctypes.c_ubyte * 80  # Key, and the end of struct Arguments
_MOST = 4096  # shapes remembered
_HOUR, _DAY = 3600, 86400  # after which a build is taken for dead, and one that failed is tried again
# One process builds: the one that makes the folder. The shell ends at once, and what it started is nobody's child.
_ASIDE = """
library=$1; folder=$library.building; shift
mkdir -p "${library%/*}" && mkdir "$folder" || exit 0
( if "$@" -o "$folder/library" 2> "$folder/said"
then mv "$folder/library" "$library"
else { echo "$1 failed on eager.cpp:"; tail -c 500 "$folder/said"; } > "$folder/why"; mv "$folder/why" "${library%.so}.failed"
fi
rm -rf "$folder" ) &
"""


class Launch(ctypes.Structure):
    """A kernel and how to launch it; ``numbers`` ends its arguments."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("blocks", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint),
        ("shared", ctypes.c_uint),
        ("numbers", _NUMBERS),
    )


library: Any = None  # once it is loaded
why = "not asked for yet"
_known: set[tuple[Any, ...]] = set()  # what it learned of GPUs
_of_cpu: Any = None  # the CPU's kernel that it knows


def _wish() -> str:
    named = os.environ.get("PWLU_EAGER") or "auto"
    if named not in ("auto", "compiled", "python"):
        raise OSError(f"unknown PWLU_EAGER={named!r}: there are compiled and python")
    return named


@functools.cache
def path() -> Path:
    """Where the library for this torch is, once it has been built."""
    here = [torch.__version__, str(torch.version.git_version), platform.machine(), *platform.libc_ver()]
    return build.place("eager", SOURCE, [*(header.read_text() for header in HEADERS), *_flags(), *here])


def _flags() -> list[str]:
    include = Path(torch.__file__).parent / "include"
    found = ["-std=c++20", "-O2", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    return [*found, "-isystem", str(include), "-isystem", str(include / "torch" / "csrc" / "api" / "include")]


def _compiler() -> list[str]:
    if sys.platform == "win32":
        raise OSError("eager.cpp is not built on Windows")
    command = build.compiler("CXX", ("c++", "g++", "clang++"))
    if command is None:
        raise OSError("no C++ compiler was found (looked for $CXX, c++, g++, clang++)")
    return command


def compile_library() -> Path:
    """Compile it now; OSError says why that is impossible."""
    return build.compile_into(path(), [*_compiler(), *_flags()], SOURCE, _libraries())


def _libraries() -> list[str]:
    return [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]


def load() -> bool:
    """Load the library if it is there, before the operators are registered; whether it was.

    ``PWLU_EAGER=compiled`` builds it first where it is missing, and asks for it: that it cannot be had is then an error.
    ``PWLU_EAGER=python`` does without.
    """
    global library, why
    wish = _wish()
    if wish == "python":
        why = "PWLU_EAGER=python"
        return False
    try:
        found = path()
        if wish == "auto" and not found.exists():
            why = _failure() or "not built yet: that is done aside, by the first process that uses a kernel, for later ones"
            return False
        if not found.exists():
            found = compile_library()
        try:
            library = _open(found)
        except OSError:  # damaged, or made on another machine that shares the cache: to be made anew
            found.unlink(missing_ok=True)
            if wish == "auto":
                raise
            library = _open(compile_library())
    except OSError as error:
        if wish == "compiled":
            raise OSError(f"PWLU_EAGER=compiled, but {error}") from error
        why = str(error)
        return False
    library.pwlu_learn_gpu.argtypes = [_KEY, ctypes.POINTER(Launch), ctypes.POINTER(Launch), ctypes.c_int64, ctypes.c_void_p]
    why = library._name
    return True


def _open(found: Path) -> Any:
    """The library, whose kernels are registered by that."""
    opened = ctypes.CDLL(str(found))
    if not hasattr(opened, "pwlu_learn_gpu"):
        raise OSError(f"{found.name} is no library of pwlu")
    return opened


@functools.cache
def build_aside() -> None:
    """Start to build the library for processes to come, unless it is there, is not wanted, or could not be built."""
    try:
        if library is not None or _wish() != "auto" or path().exists() or _failure():
            return
        command = [*_compiler(), *_flags(), str(SOURCE), *_libraries()]
        folder, nothing = Path(f"{path()}.building"), subprocess.DEVNULL
        if folder.exists() and time.time() - folder.stat().st_mtime > _HOUR:
            shutil.rmtree(folder, ignore_errors=True)
        arguments = ["/bin/sh", "-c", _ASIDE, "sh", str(path()), *command]
        subprocess.run(arguments, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
    except OSError:  # it is not needed
        return


def _failure() -> str | None:
    """What the compiler said the last time, unless that is so long ago that it is asked again."""
    note = path().with_suffix(".failed")
    try:
        return note.read_text().strip() if time.time() - note.stat().st_mtime < _DAY else None
    except OSError:
        return None


# Teaching.


def new(key: tuple[Any, ...]) -> bool:
    """Whether there is something to learn: see :func:`learn_gpu`."""
    return library is not None and key not in _known


def learn_gpu(key: tuple[Any, ...], first: Launch, second: Launch | None, splits: int, launch: Any) -> None:
    """A launch, or two of which the second finishes what the first left in so many splits; `launch`: the driver's function.

    `key`: what, index of the device, types of x and of the parameters, intervals, outer, channels, inner, aligned.
    """
    if len(_known) >= _MOST:
        forget()
    _known.add(key)
    what, index, dtype, kind, *numbers = key
    words = _KEY(_WHATS.index(what), index, _TYPES[dtype], _TYPES[kind], *numbers)
    library.pwlu_learn_gpu(words, first, second, splits, ctypes.cast(launch, ctypes.c_void_p))


def learn_cpu(kernel: object, parallel: Any, functions: list[Any]) -> None:
    """The functions of ``cpu.c``: forward, lookup, backward, moments."""
    global _of_cpu
    if library is not None and _of_cpu is not kernel:
        addresses = [ctypes.cast(each, ctypes.c_void_p).value for each in (parallel, *functions)]
        library.pwlu_learn_cpu((ctypes.c_void_p * len(addresses))(*addresses))
        _of_cpu = kernel


def forget() -> None:
    """All that was taught: another kernel is to serve, or memory is full."""
    global _of_cpu
    _known.clear()
    _of_cpu = None
    if library is not None:
        library.pwlu_forget()
