"""Compile libraries on first use: the compiler flags of ``cpu/cpu.c``, and a cache of compiled libraries.

Opening a damaged library can crash the process, and a library from another user could take it over. So the name of a library
ends with the digest of its content. A library is used only if this user or root owns it, and nobody else can write it.

This file imports only the standard library, because ``setup.py`` loads it before torch and filelock are installed.
"""

import atexit
import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).with_name("cpu") / "cpu.c"
HEADERS = sorted(SOURCE.parent.glob("*.h"))  # cpu.c includes them

# Without -ffp-contract=off, fused multiply-adds would move elements that lie on a knot into another interval.
_GNU_FLAGS = ["-std=c11", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden"]
_GNU_VARIANT = {"avx512": ["-mavx512f", "-mavx2", "-mf16c"], "avx2": ["-mavx2", "-mf16c"], "portable": []}
_MSVC_FLAGS = ["/O2", "/fp:precise", "/std:c11"]
_MSVC_VARIANT = {"avx512": ["/arch:AVX512"], "avx2": ["/arch:AVX2"], "portable": []}
_LOCK_TIMEOUT = 600  # seconds to wait for another process that compiles
_RETRY_AFTER = 86400  # seconds after a failed build in which no background build starts

# Run a command and a watcher. Standard input is a pipe from our process. When our process ends, the pipe closes, and the
# watcher
# kills the command and its children and deletes the scratch folder.
_WATCHED = """
exec 3<&0
(read -r line <&3; trap '' TERM; kill -s TERM 0; rm -rf "$0") & watch=$!
"$@" </dev/null 3<&-; status=$?
exec 2>/dev/null  # some shells print a message about the kill
kill $watch
exit $status
"""


def variants() -> tuple[str, ...]:
    """Return the variants of the CPU kernel for this architecture, fastest first."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return ("avx512", "avx2", "portable") if x86 else ("portable",)


def source_id() -> int:
    """Return a hash of ``cpu.c`` and its headers. A library that was built from other sources is not used."""
    return int(hashlib.sha256(_content([SOURCE, *HEADERS])).hexdigest()[:8], 16)


def flags(variant: str, msvc: bool = False) -> list[str]:
    """Return the compiler flags of a variant."""
    if msvc:
        return [*_MSVC_FLAGS, *_MSVC_VARIANT[variant], f"/DPWLU_SOURCE_ID={source_id()}u"]
    return [*_GNU_FLAGS, *_GNU_VARIANT[variant], f"-DPWLU_SOURCE_ID={source_id()}u"]


def cache_folder() -> Path:
    """Return the folder of compiled libraries: ``$PWLU_CACHE``, else ``pwlu`` in the cache folder of the user."""
    if named := os.environ.get("PWLU_CACHE"):
        return Path(named).absolute()
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named).absolute() / "pwlu"
    try:
        home = Path.home()
    except RuntimeError as error:  # the user has no home directory
        raise OSError(f"there is no folder for the cache ({error}). Set PWLU_CACHE to a folder") from error
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "pwlu"


def compiler(variable: str = "CC", names: tuple[str, ...] = ("cc", "gcc", "clang")) -> list[str] | None:
    """Return the command of the C compiler, or None: ``$CC``, else the compiler of Python, else cc, gcc or clang.

    `variable` is "CXX" for C++, and `names` are the commands to try.

    Raises:
        OSError: if the variable is set, but there is no such command.
    """
    if named := os.environ.get(variable):
        try:
            command = [named] if shutil.which(named) else shlex.split(named)
        except ValueError:
            command = []
        if not command or not shutil.which(command[0]):
            raise OSError(f"the compiler {variable}={named!r} was not found")
        return command
    for candidate in (sysconfig.get_config_var(variable) or names[0], *names):
        if shutil.which(shlex.split(candidate)[0]):
            return shlex.split(candidate)
    return None


def build(variant: str, keep: bool = False) -> Path:
    """Return the library of a variant of ``cpu.c``. Compile it if it is not in the cache; see :func:`make`."""
    parts = [*flags(variant), sysconfig.get_platform(), *platform.libc_ver()]
    try:
        stem = library_stem(f"cpu-{variant}", [SOURCE, *HEADERS], parts)
    except OSError:
        if keep:
            raise
        stem = _temporary_folder() / f"cpu-{variant}"
    return make(stem, lambda: [*_c_compiler(), *flags(variant), "-shared", "-fPIC"], SOURCE, ["-lm"], keep=keep)


def _c_compiler() -> list[str]:
    command = compiler()
    if command is None:
        raise OSError("no C compiler was found (looked for $CC, cc, gcc, clang)")
    return command


# The cache.


def library_stem(name: str, sources: list[Path], settings: list[str]) -> Path:
    """Return the path of a library without the digest of its content. It has digests of the sources and of the settings."""
    parts = (_content(sources), shlex.join(settings).encode())
    return cache_folder() / "libraries" / "-".join([name, *(hashlib.sha256(part).hexdigest()[:10] for part in parts)])


def find(stem: Path) -> Path | None:
    """Return the library with a stem from the cache, or None. Delete libraries that are damaged or that others can write."""
    with contextlib.suppress(OSError):
        if is_private(stem.parent):
            for path in sorted(stem.parent.glob(f"{stem.name}-*.so")):
                if is_private(path) and path.stem == f"{stem.name}-{_digest(path.read_bytes())}":
                    return path
                path.unlink()
    return None


def failure_file(stem: Path) -> Path:
    """Return the path of the file that holds the error of a failed build."""
    return stem.with_name(f"{stem.name}.failed")


def last_failure(stem: Path) -> str | None:
    """Return the error of a build that failed within the last day, or None."""
    file = failure_file(stem)
    with contextlib.suppress(OSError):
        return file.read_text() if time.time() - file.stat().st_mtime < _RETRY_AFTER else None
    return None


def is_being_compiled(stem: Path) -> bool:
    """Return whether another process is compiling the library."""
    import filelock

    lock = Path(f"{stem}.lock")
    try:
        with filelock.FileLock(lock, timeout=0) if lock.exists() else contextlib.nullcontext():
            return False
    except OSError as error:
        return isinstance(error, filelock.Timeout)


def make(
    stem: Path, command: Callable[[], list[str]], source: Path, libraries: list[str], *, keep: bool = False, announce: str = ""
) -> Path:
    """Return the path of a library. Compile it if it is not in the cache.

    Only one process compiles at a time; others wait for it and use its library.

    Args:
        stem: the path of the library, as :func:`library_stem` returns it.
        command: returns the command of the compiler with its flags.
        source: the file to compile.
        libraries: flags that follow the source.
        keep: raise an error if the cache cannot be used. Default: False, which compiles the library for this process only.
        announce: a message to print before a build in the background starts. Such a build does not start within a day after a
            failure.

    Raises:
        OSError: if the library cannot be compiled.
    """
    if found := find(stem):
        return found
    import filelock

    compile_it = command()
    with contextlib.ExitStack() as stack:
        try:
            for private in (stem.parent.parent, stem.parent):  # with these permissions, whatever the umask is
                private.mkdir(0o755, parents=True, exist_ok=True)
            if not is_private(stem.parent):
                raise OSError(
                    f"{stem.parent} must belong to this user and be writable by nobody else. Run chmod go-w on it, or set "
                    "PWLU_CACHE to another folder"
                )
            stack.enter_context(filelock.FileLock(f"{stem}.lock", timeout=_LOCK_TIMEOUT))
            if found := find(stem):
                return found
            for leftover in stem.parent.glob(f"{stem.name}.building-*"):  # from a crash of the machine
                shutil.rmtree(leftover, ignore_errors=True)
            folder, scratch = stem.parent, Path(tempfile.mkdtemp(prefix=f"{stem.name}.building-", dir=stem.parent))
            stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        except (OSError, NotImplementedError) as error:  # NotImplementedError: the file system has no locks
            if keep:
                raise OSError(str(error)) from error
            folder = scratch = _temporary_folder()
        if announce:
            if message := last_failure(stem):
                raise OSError(message)
            print(announce, file=sys.stderr, flush=True)
        built, failed = scratch / "library", failure_file(folder / stem.name)
        done = _run([*compile_it, str(source), "-o", str(built), *libraries], scratch)
        if done.returncode:
            failed.write_text(f"{compile_it[0]} failed on {source.name}: {done.stderr.strip()[-500:]}")
            raise OSError(failed.read_text())
        built.chmod(0o755)
        with open(built, "r+b") as file:
            path = folder / f"{stem.name}-{_digest(file.read())}.so"
            os.fsync(file.fileno())  # so that a power failure cannot leave a name without its content
        os.replace(built, path)
        failed.unlink(missing_ok=True)
    return path


def _temporary_folder() -> Path:
    """Create a folder that is deleted when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="pwlu-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _content(sources: list[Path]) -> bytes:
    return b"".join(source.read_bytes() for source in sources)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def is_private(path: Path) -> bool:
    """Return whether this user or root owns a path, and nobody else can write it."""
    if sys.platform == "win32":
        return True
    found = path.stat()
    return found.st_uid in (0, os.getuid()) and not found.st_mode & 0o022


def _run(command: list[str], scratch: Path) -> "subprocess.CompletedProcess[str]":
    """Run a compiler. If this process is killed, the compiler is killed too, and the folder `scratch` is deleted."""
    if sys.platform != "win32":
        command = ["/bin/sh", "-c", _WATCHED, str(scratch), *command]
    ends = os.pipe()
    try:
        return subprocess.run(command, stdin=ends[0], capture_output=True, text=True, errors="replace", start_new_session=True)
    finally:
        for end in ends:
            os.close(end)
