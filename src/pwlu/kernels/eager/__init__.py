"""The operators in eager mode without Python, ``eager.cpp``: compiled for the torch that is here, loaded, and taught.

A call through Python takes ten times as long as one of torch's own operators, which shows wherever a GPU waits for its
processor. Compiling takes some 15 seconds of a core and needs a C++ compiler. A thread of the first process that uses a kernel
does it, once on a machine; that process opens the library between two calls, and all later ones when they import pwlu.
"""

import contextlib
import ctypes
import functools
import os
import platform
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from pwlu.kernels import build

SOURCE, *HEADERS = (Path(__file__).with_name(name) for name in ("eager.cpp", "eager_kernels.h", "eager_norm.h"))
_WHATS = (  # enum What
    *("forward", "lookup", "observe", "moments", "backward", "backward_input"),
    *("norm_forward", "norm_add_forward", "norm_observe", "norm_add_observe"),
    *("norm_backward", "norm_add_backward", "norm_input", "norm_add_input", "batch_norm", "running_norm"),
)
_TYPES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}  # c10::ScalarType
_KEY, _NUMBERS = ctypes.c_int64 * 9, ctypes.c_ubyte * 80  # Key, and the end of struct Arguments
_MOST = 4096  # shapes remembered
_ANNOUNCE = (
    "pwlu: compiling its C++ part in the background, once on this machine (15 s of a core or more); this process uses it when "
    "it is ready. PWLU_EAGER=python turns this off."
)


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
why = ""  # it cannot be built
_builder: threading.Thread | None = None
_ready: Path | None = None  # built in the background, to be opened
_known: set[tuple[Any, ...]] = set()  # what it learned of GPUs
_of_cpu: Any = None  # the CPU's kernel that it knows


def _wish() -> str:
    named = os.environ.get("PWLU_EAGER") or "auto"
    if named not in ("auto", "compiled", "python"):
        raise OSError(f"unknown PWLU_EAGER={named!r}: there are compiled and python")
    return named


@functools.cache
def stem() -> Path:
    """Return the path of the library for this torch in the cache, without its digest: see ``build.place``."""
    here = [torch.__version__, str(torch.version.git_version), platform.machine(), *platform.libc_ver()]
    return build.place("eager", [SOURCE, *HEADERS], [*_flags(), *here])


def _flags() -> list[str]:
    include = Path(torch.__file__).parent / "include"
    found = ["-std=c++20", "-O2", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    return [*found, "-isystem", str(include), "-isystem", str(include / "torch" / "csrc" / "api" / "include")]


def _compiler() -> list[str]:
    """Return the compiler's command; OSError says why ``eager.cpp`` cannot be compiled here."""
    if sys.platform == "win32":
        raise OSError("eager.cpp is not built on Windows")
    headers = Path(torch.__file__).parent / "include"
    if not (headers / "torch" / "library.h").exists():
        raise OSError(f"torch was installed without its C++ headers (looked in {headers})")
    command = build.compiler("CXX", ("c++", "g++", "clang++"))
    if command is None:
        raise OSError("no C++ compiler was found (looked for $CXX, c++, g++, clang++)")
    return command


def _libraries() -> list[str]:
    return [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]


def compile_library(keep: bool = False, announce: str = "") -> Path:
    """Return the library's path, compiled if the cache lacks it: see ``build.make``."""
    return build.make(stem(), lambda: [*_compiler(), *_flags()], SOURCE, _libraries(), keep=keep, announce=announce)


# Loading.


def load() -> bool:
    """Load the library if it is there, after the operators were registered; return whether it was.

    ``PWLU_EAGER=compiled`` builds it first where it is missing, and asks for it: that it cannot be had is then an error.
    ``PWLU_EAGER=python`` does without.
    """
    wish = _wish()
    try:
        found = compile_library() if wish == "compiled" else build.find(stem()) if wish == "auto" else None
        if found is not None:
            try:
                _open(found)
            except OSError:  # made on another machine that shares the cache: to be made anew
                found.unlink(missing_ok=True)
                if wish == "compiled":
                    _open(compile_library())
    except OSError as error:
        if wish == "compiled":
            raise OSError(f"PWLU_EAGER=compiled, but {error}") from error
    return library is not None


def _open(found: Path) -> None:
    """Open the library, which registers its kernels: they go before those of Python."""
    global library
    opened = ctypes.CDLL(str(found))
    if not hasattr(opened, "pwlu_register_gpu"):
        raise OSError(f"{found.name} is no library of pwlu")
    opened.pwlu_register_gpu.argtypes = [_KEY, ctypes.POINTER(Launch), ctypes.POINTER(Launch), ctypes.c_int64, ctypes.c_void_p]
    library = opened


@functools.cache
def build_in_background() -> None:
    """Start a thread that compiles the library, unless it is there, is not wanted, or cannot be built."""
    global _builder
    if library is None and _wish() == "auto":
        _builder = threading.Thread(target=_build, name="pwlu-build", daemon=True)
        _builder.start()


def _build() -> None:
    global _ready, why
    try:
        _ready = compile_library(keep=True, announce=_ANNOUNCE)
    except OSError as error:  # it is not needed
        why = str(error)


def load_if_ready() -> None:
    """Open the library that a thread has built since the last call; a call that is under way, and its graph, stay in Python.

    Torch's table of kernels must not change while another thread reads it, hence the conditions.
    """
    global _ready, why
    if _ready is None or not _is_plain():
        return
    found, _ready = _ready, None
    try:
        _open(found)
    except OSError as error:
        why = f"{found.name} was built but cannot be opened: {error}"
        with contextlib.suppress(OSError):  # or every process would build it anew
            found.unlink()
            build.note_of(stem()).write_text(why)


def _is_plain() -> bool:
    """Return whether this is the main thread, outside of backward passes, modes, transforms and tracing."""
    return (
        threading.current_thread() is threading.main_thread()
        and torch._C._current_graph_task_id() == -1
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
        and not torch.compiler.is_compiling()
    )


def state() -> str:
    """Return what serves in eager mode, and why: for ``pwlu info``."""
    if library is not None:
        return f"compiled, loaded ({library._name})"
    if _wish() == "python":
        return "Python (PWLU_EAGER=python)"
    try:
        if found := build.find(stem()):
            return f"Python; built, used by the next {'call' if _ready else 'process'} ({found})"
        if (_builder and _builder.is_alive()) or build.is_being_made(stem()):
            return "Python; being built, used when it is ready"
        _compiler()
        said = why or build.failure(stem())
    except OSError as error:
        said = str(error)
    if said:
        return f"Python; cannot be built here because {said}; once that is mended, `pwlu build` tries again"
    return "Python; not built yet: the first process that uses a kernel does that in the background, `pwlu build` does it now"


# Teaching.


def new(key: tuple[Any, ...]) -> bool:
    """Whether there is something to register: see :func:`register_gpu`."""
    return library is not None and key not in _known


def register_gpu(key: tuple[Any, ...], first: Launch, second: Launch | None, splits: int, launch: Any) -> None:
    """A launch, or two of which the second finishes what the first left in so many splits; `launch`: the driver's function.

    `key`: what, index of the device, types of x and of the parameters, intervals, outer, channels, inner, aligned.
    """
    if len(_known) >= _MOST:
        forget()
    _known.add(key)
    what, index, dtype, kind, *numbers = key
    words = _KEY(_WHATS.index(what), index, _TYPES[dtype], _TYPES[kind], *numbers)
    library.pwlu_register_gpu(words, first, second, splits, ctypes.cast(launch, ctypes.c_void_p))


def register_cpu(kernel: object, parallel: Any, functions: list[Any]) -> None:
    """The functions of ``cpu.c``, in the order of struct CpuKernel."""
    global _of_cpu
    if library is not None and _of_cpu is not kernel:
        addresses = [ctypes.cast(each, ctypes.c_void_p).value for each in (parallel, *functions)]
        library.pwlu_register_cpu((ctypes.c_void_p * len(addresses))(*addresses))
        _of_cpu = kernel


def forget() -> None:
    """All that was taught: another kernel is to serve, or memory is full."""
    global _of_cpu
    _known.clear()
    _of_cpu = None
    if library is not None:
        library.pwlu_forget()
