"""Compiling ``cpu.c``: the flags, and a build into a cache for a package that runs without having been installed.

Imports the standard library alone, because ``setup.py`` loads this file before torch is there.
"""

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
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pwlu"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pwlu"


def compiler() -> list[str] | None:
    """The C compiler's command: ``$CC``, else the one Python was built with, else cc, gcc or clang."""
    candidates = [os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"]
    for candidate in filter(None, candidates):
        command = shlex.split(candidate)
        if command and shutil.which(command[0]):
            return command
    return None


def build(variant: str) -> Path:
    """Compile ``cpu.c`` into the cache, unless it is there, and return the library's path.

    The file's name says what it was made from, and it appears by an atomic rename, so processes that
    start at once cannot see half a library. Raises OSError, saying why, when it cannot be built.
    """
    command = compiler()
    options = flags(variant)
    key = hashlib.sha256(shlex.join([*(command or []), *options]).encode()).hexdigest()[:12]
    name = f"cpu-{variant}-{source_id():08x}-{key}.so"
    folder = cache_folder()
    if (folder / name).exists():
        return folder / name
    if command is None:
        raise OSError("no C compiler was found (looked for $CC, cc, gcc, clang)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder))
    except OSError:  # a cache that cannot be written: this process still gets its kernel
        folder = scratch = Path(tempfile.mkdtemp(prefix="pwlu-"))
    try:
        done = subprocess.run(
            [*command, *options, "-shared", "-fPIC", str(SOURCE), "-o", str(scratch / "library"), "-lm"],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise OSError(f"{command[0]} failed on {SOURCE.name}: {done.stderr.strip()[-500:]}")
        os.replace(scratch / "library", folder / name)
    finally:
        if scratch != folder:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder / name
