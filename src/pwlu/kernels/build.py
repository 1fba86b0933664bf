"""Compiling: the flags of ``cpu.c``, and builds into a cache, for a package that runs without having been installed, say.

Imports the standard library alone, because ``setup.py`` loads this file before torch is there.
"""

import atexit
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("cpu.c")

# Contraction to a fused multiply-add would move elements that lie on a knot into another interval.
_GNU_FLAGS = ["-std=c11", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden"]
_GNU_VARIANT = {"avx512": ["-mavx512f", "-mavx2", "-mf16c"], "avx2": ["-mavx2", "-mf16c"], "portable": []}
_MSVC_FLAGS = ["/O2", "/fp:precise", "/std:c11"]
_MSVC_VARIANT = {"avx512": ["/arch:AVX512"], "avx2": ["/arch:AVX2"], "portable": []}


def variants() -> tuple[str, ...]:
    """The builds that make sense for this machine's architecture, fastest first."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return ("avx512", "avx2", "portable") if x86 else ("portable",)


def source_id() -> int:
    """A number that changes with the source: a library built from another ``cpu.c`` is not used."""
    return int(hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:8], 16)


def flags(variant: str, msvc: bool = False) -> list[str]:
    """Compiler options of one variant."""
    if msvc:
        return [*_MSVC_FLAGS, *_MSVC_VARIANT[variant], f"/DPWLU_SOURCE_ID={source_id()}u"]
    return [*_GNU_FLAGS, *_GNU_VARIANT[variant], f"-DPWLU_SOURCE_ID={source_id()}u"]


def cache_folder() -> Path:
    """Where libraries built on first use are kept: ``$PWLU_CACHE``, else the user's cache folder."""
    if named := os.environ.get("PWLU_CACHE"):
        return Path(named).absolute()
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named).absolute() / "pwlu"
    try:
        home = Path.home()
    except RuntimeError as error:  # a user without a home
        raise OSError(f"no folder for a cache ({error}); set PWLU_CACHE") from error
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "pwlu"


def compiler(variable: str = "CC", usual: tuple[str, ...] = ("cc", "gcc", "clang")) -> list[str] | None:
    """The C compiler's command: ``$CC``, else the one Python was built with, else cc, gcc or clang. ("CXX", ...): for C++.

    OSError if ``$CC`` names none: what was asked for by name is not replaced in silence.
    """
    if named := os.environ.get(variable):
        try:
            command = [named] if shutil.which(named) else shlex.split(named)
        except ValueError:
            command = []
        if not command or not shutil.which(command[0]):
            raise OSError(f"the compiler {variable}={named!r} was not found")
        return command
    for candidate in (sysconfig.get_config_var(variable) or usual[0], *usual):
        if shutil.which(shlex.split(candidate)[0]):
            return shlex.split(candidate)
    return None


def build(variant: str, afresh: bool = False) -> Path:
    """Compile ``cpu.c`` into the cache, unless it is there (and not to be made afresh), and return the library's path."""
    made_for = [*flags(variant), sysconfig.get_platform(), *platform.libc_ver()]
    path = place(f"cpu-{variant}", SOURCE, made_for)
    if path.exists() and not afresh:
        return path
    command = compiler()
    if command is None:
        raise OSError("no C compiler was found (looked for $CC, cc, gcc, clang)")
    return compile_into(path, [*command, *flags(variant), "-shared", "-fPIC"], SOURCE, ["-lm"])


def place(name: str, source: Path, made_for: list[str]) -> Path:
    """Where in the cache a library belongs: its name says what it was made from and for."""
    parts = (source.read_bytes(), shlex.join(made_for).encode())
    return cache_folder() / ("-".join([name, *(hashlib.sha256(part).hexdigest()[:10] for part in parts)]) + ".so")


def compile_into(path: Path, command: list[str], source: Path, libraries: list[str]) -> Path:
    """Run the compiler, and return where the library is: at that path, or elsewhere if nothing can be written there.

    It appears by an atomic rename, so processes that start at once cannot see half a library. Raises OSError, saying why, when
    it cannot be built.
    """
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder))
    except OSError:  # a cache that cannot be written: this process still gets its kernel
        folder = scratch = Path(tempfile.mkdtemp(prefix="pwlu-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        arguments = [*command, str(source), "-o", str(scratch / "library"), *libraries]
        done = subprocess.run(arguments, capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise OSError(f"{command[0]} failed on {source.name}: {done.stderr.strip()[-500:]}")
        os.replace(scratch / "library", folder / path.name)
    finally:
        if scratch != folder:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder / path.name
