"""Compiling: the flags of ``cpu.c``, and a cache of libraries, for a package that runs without having been installed, say.

Opening half a library, or one that somebody else put there, can end or take over the process. So a library's name ends with
the digest of its content, and only what this user or root owns, and nobody else can write, is used.

Imports the standard library alone, because ``setup.py`` loads this file before torch and filelock are there.
"""

import atexit
import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

SOURCE = Path(__file__).with_name("cpu.c")

# Contraction to a fused multiply-add would move elements that lie on a knot into another interval.
_GNU_FLAGS = ["-std=c11", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden"]
_GNU_VARIANT = {"avx512": ["-mavx512f", "-mavx2", "-mf16c"], "avx2": ["-mavx2", "-mf16c"], "portable": []}
_MSVC_FLAGS = ["/O2", "/fp:precise", "/std:c11"]
_MSVC_VARIANT = {"avx512": ["/arch:AVX512"], "avx2": ["/arch:AVX2"], "portable": []}
_LONGEST, _DAY = 600, 86400  # seconds to wait for another process, and until what failed is tried again


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


def build(variant: str, afresh: bool = False, keep: bool = False) -> Path:
    """Return the library of a variant of ``cpu.c``, compiled if the cache lacks it or it is to be made afresh; see make."""
    stem = place(f"cpu-{variant}", SOURCE, [*flags(variant), sysconfig.get_platform(), *platform.libc_ver()])
    if not afresh and (found := find(stem)):
        return found
    command = compiler()
    if command is None:
        raise OSError("no C compiler was found (looked for $CC, cc, gcc, clang)")
    return make(stem, [*command, *flags(variant), "-shared", "-fPIC"], SOURCE, ["-lm"], afresh=afresh, keep=keep)


# The cache.


def place(name: str, source: Path, made_for: list[str]) -> Path:
    """Return the path of a library without its digest: it says what the library is made from and for."""
    parts = (source.read_bytes(), shlex.join(made_for).encode())
    return cache_folder() / "libraries" / "-".join([name, *(hashlib.sha256(part).hexdigest()[:10] for part in parts)])


def find(stem: Path) -> Path | None:
    """Return the library of that stem, if it is there and whole; delete what is damaged or could be another user's."""
    with contextlib.suppress(OSError):
        if _is_private(stem.parent):
            for path in sorted(stem.parent.glob(f"{stem.name}-*.so")):
                if _is_private(path) and path.stem == f"{stem.name}-{_digest(path.read_bytes())}":
                    return path
                path.unlink()
    return None


def failure(stem: Path) -> str | None:
    """Return what the compiler said when it failed, unless that was more than a day ago."""
    note = Path(f"{stem}.failed")
    with contextlib.suppress(OSError):
        return note.read_text() if _is_private(note) and time.time() - note.stat().st_mtime < _DAY else None
    return None


def is_being_made(stem: Path) -> bool:
    """Return whether a process compiles that library now."""
    import filelock

    lock = Path(f"{stem}.lock")
    try:
        if lock.exists():
            with filelock.FileLock(lock, timeout=0):
                pass
    except filelock.Timeout:
        return True
    except OSError:  # a cache that cannot be written
        pass
    return False


def make(
    stem: Path,
    command: list[str],
    source: Path,
    libraries: list[str],
    afresh: bool = False,
    keep: bool = False,
    announce: str = "",
) -> Path:
    """Compile a library into the cache and return its path; OSError says why that is impossible.

    One process compiles at a time. The others wait for it and take what it made, unless they are to make it afresh. Where the
    cache cannot be used, the library is for this process alone; with `keep` that is an error.

    `announce` is for a build that nobody asked for: it is printed before the compiler starts, and there is no second try on the
    day of a failure.
    """
    import filelock

    with contextlib.ExitStack() as stack:
        try:
            stem.parent.mkdir(0o755, parents=True, exist_ok=True)
            if not _is_private(stem.parent):
                raise OSError(
                    f"{stem.parent} must belong to this user and be writable by nobody else: run chmod go-w on it, or set "
                    "PWLU_CACHE to another folder"
                )
            stack.enter_context(filelock.FileLock(f"{stem}.lock", timeout=_LONGEST))
            if not afresh and (found := find(stem)):
                return found
            folder, scratch = stem.parent, Path(f"{stem}.building")
            shutil.rmtree(scratch, ignore_errors=True)  # left by a process that was killed
            scratch.mkdir(0o700)
            stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
            if keep:
                raise OSError(str(error)) from error
            folder = scratch = Path(tempfile.mkdtemp(prefix="pwlu-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        if announce and (said := failure(stem)):
            raise OSError(said)
        made, note = scratch / "library", Path(f"{stem}.failed")
        status, said = _run([*command, str(source), "-o", str(made), *libraries], scratch, announce)
        if status:
            said = f"{command[0]} failed on {source.name}: {said.strip()[-500:]}"
            if folder == stem.parent:
                note.write_text(said)
                note.chmod(0o644)
            raise OSError(said)
        made.chmod(0o755)
        with open(made, "r+b") as file:
            path = folder / f"{stem.name}-{_digest(file.read())}.so"
            os.fsync(file.fileno())  # after a loss of power the name must not be there without the content
        os.replace(made, path)
        if folder == stem.parent:
            note.unlink(missing_ok=True)
    return path


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _is_private(path: Path) -> bool:
    """Return whether this user or root owns a file or folder, and nobody else can write it."""
    if sys.platform == "win32":
        return True
    found = path.stat()
    return found.st_uid in (0, os.getuid()) and not found.st_mode & 0o022


# The compiler's process, and all that it starts, must not outlive this one.

_guard = threading.Lock()  # held where a compiler starts, and for good when this process ends
_running: dict["subprocess.Popen[str]", Path] = {}


def _run(command: list[str], scratch: Path, announce: str) -> tuple[int, str]:
    """Run a compiler; return its exit status and what it said."""
    with _guard:
        if announce:
            print(announce, file=sys.stderr, flush=True)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        _running[process] = scratch
    try:
        said = process.communicate()[1]
    finally:
        with _guard:  # a thread that comes here when the process ends must not take the killed compiler for a failure
            del _running[process]
            _kill(process)
    return process.returncode, said


def _kill(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(OSError):
        if process.poll() is None:
            process.kill() if sys.platform == "win32" else os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _end() -> None:
    _guard.acquire()
    for process, scratch in _running.items():
        _kill(process)
        shutil.rmtree(scratch, ignore_errors=True)


def _forget() -> None:
    global _guard
    _guard = threading.Lock()
    _running.clear()


atexit.register(_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)  # a child must not kill its parent's compiler
