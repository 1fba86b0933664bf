"""Compile, load and configure ``eager.cpp``, which runs the operators in eager mode without Python.

A call through Python takes ten times as long as a call of a built-in operator of PyTorch. This matters whenever the GPU waits
for the CPU. Compiling takes about 15 seconds on one core and needs a C++ compiler. The first process that uses a kernel on a
machine compiles the library in a background thread, and opens it between two calls. Later processes open it when they import
pwlu.
"""

import contextlib
import ctypes
import functools
import os
import platform
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from pwlu.kernels import build

SOURCE, *HEADERS = (
    Path(__file__).with_name(name) for name in ("eager.cpp", "eager_kernels.h", "eager_norm.h", "eager_dynamic.h")
)
_OPERATIONS = (  # enum What
    *("forward", "lookup", "observe", "backward", "backward_input"),
    *("norm_forward", "norm_add_forward", "norm_observe", "norm_add_observe"),
    *("norm_backward", "norm_add_backward", "norm_input", "norm_add_input", "batch_norm", "running_norm"),
    *("dynamic_forward", "dynamic_backward", "dynamic_input"),
)
_TYPES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}  # c10::ScalarType
_KEY, _NUMBERS = ctypes.c_int64 * 14, ctypes.c_ubyte * 104  # Key, and the numbers at the end of struct Arguments
_MAX_LAUNCHES = 4096
_ANNOUNCE = (
    "pwlu: compiling its C++ extension in the background, once on this machine (about 15 s on one core); this process will use "
    "it when it is ready. Set PWLU_EAGER=python to turn this off."
)


class Launch(ctypes.Structure):
    """A kernel and its launch configuration. ``numbers`` are the last of its arguments."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("blocks", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint),
        ("shared", ctypes.c_uint),
        ("numbers", _NUMBERS),
    )


library: Any = None  # the loaded library
why = ""  # the reason why it cannot be built
_builder: threading.Thread | None = None
_ready: Path | None = None  # a library that was built in the background and is not open yet
_known: set[tuple[Any, ...]] = set()  # the keys of registered GPU launches
_registered_cpu_kernel: Any = None


def _requested_mode() -> str:
    mode = os.environ.get("PWLU_EAGER") or "auto"
    if mode not in ("auto", "compiled", "python"):
        raise OSError(f"PWLU_EAGER must be compiled, python or auto, not {mode!r}")
    return mode


@functools.cache
def stem() -> Path:
    """Return the path of the library for this version of PyTorch, without its digest: see :func:`build.library_stem`."""
    here = [torch.__version__, str(torch.version.git_version), platform.machine(), *platform.libc_ver()]
    return build.library_stem("eager", [SOURCE, *HEADERS], [*_flags(), *here])


def _flags() -> list[str]:
    include = Path(torch.__file__).parent / "include"
    found = ["-std=c++20", "-O2", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    return [*found, "-isystem", str(include), "-isystem", str(include / "torch" / "csrc" / "api" / "include")]


def _compiler() -> list[str]:
    """Return the command of the compiler; raise OSError if ``eager.cpp`` cannot be compiled here."""
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
    """Return the path of the library. Compile it if it is not in the cache: see :func:`build.make`."""
    return build.make(stem(), lambda: [*_compiler(), *_flags()], SOURCE, _libraries(), keep=keep, announce=announce)


# Loading.


def load() -> None:
    """Load the library if it is in the cache. The operators must be registered before.

    With ``PWLU_EAGER=compiled``, compile the library if it is missing, and raise OSError if that fails. With
    ``PWLU_EAGER=python``, do nothing.
    """
    mode = _requested_mode()
    try:
        found = compile_library() if mode == "compiled" else build.find(stem()) if mode == "auto" else None
        if found is not None:
            try:
                _open(found)
            except OSError:  # built on another machine that shares the cache: build it again
                found.unlink(missing_ok=True)
                if mode == "compiled":
                    _open(compile_library())
    except OSError as error:
        if mode == "compiled":
            raise OSError(f"PWLU_EAGER=compiled, but {error}") from error


def _open(found: Path) -> None:
    """Open the library. It registers its implementations, which take precedence over those in Python."""
    global library
    opened = ctypes.CDLL(str(found))
    if not hasattr(opened, "pwlu_register_gpu"):
        raise OSError(f"{found.name} is not a library of pwlu")
    opened.pwlu_register_gpu.argtypes = [_KEY, ctypes.POINTER(Launch), ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    library = opened


@functools.cache
def build_in_background() -> None:
    """Start a thread that compiles the library, unless it is loaded or PWLU_EAGER is set."""
    global _builder
    if library is None and _requested_mode() == "auto":
        _builder = threading.Thread(target=_build, name="pwlu-build", daemon=True)
        _builder.start()


def _build() -> None:
    global _ready, why
    try:
        _ready = compile_library(keep=True, announce=_ANNOUNCE)
    except OSError as error:  # pwlu works without it
        why = str(error)


def load_if_ready() -> None:
    """Open the library if the background thread has built it since the last call. The current call still runs in Python.

    The dispatch table of PyTorch must not change while another thread reads it, so the library is not opened at all times.
    """
    global _ready, why
    if _ready is None or not _can_open_now():
        return
    found, _ready = _ready, None
    try:
        _open(found)
    except OSError as error:
        why = f"{found.name} was built but cannot be opened: {error}"
        with contextlib.suppress(OSError):  # record the failure, or every process would build the library again
            found.unlink()
            build.failure_file(stem()).write_text(why)


def _can_open_now() -> bool:
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
    """Return which implementation eager mode uses and why, for ``pwlu info``."""
    if library is not None:
        return f"compiled, loaded ({library._name})"
    if _requested_mode() == "python":
        return "Python (PWLU_EAGER=python)"
    try:
        if found := build.find(stem()):
            return f"Python; the C++ extension is compiled, and used by the next {'call' if _ready else 'process'} ({found})"
        if (_builder and _builder.is_alive()) or build.is_being_compiled(stem()):
            return "Python; the C++ extension is being compiled and will be used when it is ready"
        _compiler()
        reason = why or build.last_failure(stem())
    except OSError as error:
        reason = str(error)
    if reason:
        return f"Python; the C++ extension cannot be compiled: {reason}. Fix this, then run `pwlu build`"
    return (
        "Python; the C++ extension is not compiled yet: the first process that uses a kernel compiles it in the background. "
        "Run `pwlu build` to compile it now"
    )


# Registering launches, so that later calls with the same shapes need no Python.


def is_new(key: tuple[Any, ...]) -> bool:
    """Return whether a launch has to be registered: see :func:`register_gpu`. ``eager.cpp`` does not know all operators."""
    return library is not None and key[0] in _OPERATIONS and key not in _known


def register_gpu(key: tuple[Any, ...], launches: list[Launch], splits: int, launch: Any) -> None:
    """Register launches on a GPU, which run one after another with the same tensors.

    Args:
        key: operation, device index, dtypes of x and of the parameters, intervals, outer, channels, inner, aligned. For dynamic
            units, see ``dynamic_key_of`` in eager_dynamic.h.
        launches: the launches.
        splits: the number of partial results of the first.
        launch: cuLaunchKernel of the CUDA driver.
    """
    if len(_known) >= _MAX_LAUNCHES:
        forget()
    _known.add(key)
    operation, index, dtype, kind, *numbers = key
    words = _KEY(_OPERATIONS.index(operation), index, _TYPES[dtype], _TYPES[kind], *numbers)
    all_launches = (Launch * len(launches))(*launches)
    library.pwlu_register_gpu(words, all_launches, len(launches), splits, ctypes.cast(launch, ctypes.c_void_p))


def register_cpu(kernel: object, parallel: Any, functions: Iterable[Any]) -> None:
    """Register the functions of ``cpu.c``, in the order of struct CpuKernel; those that follow are not used."""
    global _registered_cpu_kernel
    if library is not None and _registered_cpu_kernel is not kernel:
        addresses = [ctypes.cast(each, ctypes.c_void_p).value for each in (parallel, *functions)]
        library.pwlu_register_cpu((ctypes.c_void_p * len(addresses))(*addresses))
        _registered_cpu_kernel = kernel


def forget() -> None:
    """Remove all registered launches and functions."""
    global _registered_cpu_kernel
    _known.clear()
    _registered_cpu_kernel = None
    if library is not None:
        library.pwlu_forget()
