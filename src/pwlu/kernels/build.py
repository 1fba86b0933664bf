"""Compiling: the flags of ``cpu/cpu.c``, and a cache of libraries, for a package that runs without having been installed, say.

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
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).with_name("cpu") / "cpu.c"
HEADERS = sorted(SOURCE.parent.glob("*.h"))  # cpu.c includes them

# Contraction to a fused multiply-add would move elements that lie on a knot into another interval.
_GNU_FLAGS = ["-std=c11", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden"]
_GNU_VARIANT = {"avx512": ["-mavx512f", "-mavx2", "-mf16c"], "avx2": ["-mavx2", "-mf16c"], "portable": []}
_MSVC_FLAGS = ["/O2", "/fp:precise", "/std:c11"]
_MSVC_VARIANT = {"avx512": ["/arch:AVX512"], "avx2": ["/arch:AVX2"], "portable": []}
_LONGEST, _DAY = 600, 86400  # seconds to wait for another process, and until what failed is tried again

# Standard input is a pipe from the process that waits: when that has ended, the watch stops all that was started here.
_WATCHED = """
exec 3<&0
(read -r line <&3; trap '' TERM; kill -s TERM 0; rm -rf "$0") & watch=$!
"$@" </dev/null 3<&-; status=$?
exec 2>/dev/null  # some shells tell of the kill
kill $watch
exit $status
"""


def variants() -> tuple[str, ...]:
    """The builds that make sense for this machine's architecture, fastest first."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return ("avx512", "avx2", "portable") if x86 else ("portable",)


def source_id() -> int:
    """Return a number that changes with the sources: a library built from another ``cpu.c``, or another header, is not used."""
    return int(hashlib.sha256(_content([SOURCE, *HEADERS])).hexdigest()[:8], 16)


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
    parts = [*flags(variant), sysconfig.get_platform(), *platform.libc_ver()]
    try:
        stem = place(f"cpu-{variant}", [SOURCE, *HEADERS], parts)
    except OSError:
        if keep:
            raise
        stem = _folder_of_this_process() / f"cpu-{variant}"
    if afresh and (found := find(stem)):
        found.unlink(missing_ok=True)
    return make(stem, lambda: [*_c_compiler(), *flags(variant), "-shared", "-fPIC"], SOURCE, ["-lm"], keep=keep)


def _c_compiler() -> list[str]:
    command = compiler()
    if command is None:
        raise OSError("no C compiler was found (looked for $CC, cc, gcc, clang)")
    return command


# The cache.


def place(name: str, sources: list[Path], made_for: list[str]) -> Path:
    """Return the path of a library without its digest: it says what the library is made from and for."""
    parts = (_content(sources), shlex.join(made_for).encode())
    return cache_folder() / "libraries" / "-".join([name, *(hashlib.sha256(part).hexdigest()[:10] for part in parts)])


def find(stem: Path) -> Path | None:
    """Return the library of that stem, if it is there and whole; delete what is damaged or could be another user's."""
    with contextlib.suppress(OSError):
        if is_private(stem.parent):
            for path in sorted(stem.parent.glob(f"{stem.name}-*.so")):
                if is_private(path) and path.stem == f"{stem.name}-{_digest(path.read_bytes())}":
                    return path
                path.unlink()
    return None


def note_of(stem: Path) -> Path:
    """Return where a failed build is noted."""
    return stem.with_name(f"{stem.name}.failed")


def failure(stem: Path) -> str | None:
    """Return what the compiler said when it failed, unless that was more than a day ago."""
    note = note_of(stem)
    with contextlib.suppress(OSError):
        return note.read_text() if time.time() - note.stat().st_mtime < _DAY else None
    return None


def is_being_made(stem: Path) -> bool:
    """Return whether a process compiles that library now."""
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
    """Return the path of a library, compiled if the cache lacks it; OSError says why that is impossible.

    One process compiles at a time; others wait for it and take what it made. Where the cache cannot be used, the library is for
    this process alone; with `keep` that is an error. `announce` is for a build that nobody asked for: it is printed before the
    compiler starts, and within a day of a failure there is no second try.
    """
    if found := find(stem):
        return found
    import filelock

    compile_it = command()
    with contextlib.ExitStack() as stack:
        try:
            for private in (stem.parent.parent, stem.parent):  # whatever the umask
                private.mkdir(0o755, parents=True, exist_ok=True)
            if not is_private(stem.parent):
                raise OSError(
                    f"{stem.parent} must belong to this user and be writable by nobody else: run chmod go-w on it, or set "
                    "PWLU_CACHE to another folder"
                )
            stack.enter_context(filelock.FileLock(f"{stem}.lock", timeout=_LONGEST))
            if found := find(stem):
                return found
            for left in stem.parent.glob(f"{stem.name}.building-*"):  # when the machine went down
                shutil.rmtree(left, ignore_errors=True)
            folder, scratch = stem.parent, Path(tempfile.mkdtemp(prefix=f"{stem.name}.building-", dir=stem.parent))
            stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
            if keep:
                raise OSError(str(error)) from error
            folder = scratch = _folder_of_this_process()
        if announce:
            if said := failure(stem):
                raise OSError(said)
            print(announce, file=sys.stderr, flush=True)
        made, note = scratch / "library", note_of(folder / stem.name)
        done = _run([*compile_it, str(source), "-o", str(made), *libraries], scratch)
        if done.returncode:
            note.write_text(f"{compile_it[0]} failed on {source.name}: {done.stderr.strip()[-500:]}")
            raise OSError(note.read_text())
        made.chmod(0o755)
        with open(made, "r+b") as file:
            path = folder / f"{stem.name}-{_digest(file.read())}.so"
            os.fsync(file.fileno())  # after a loss of power the name must not be there without the content
        os.replace(made, path)
        note.unlink(missing_ok=True)
    return path


def _folder_of_this_process() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="pwlu-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _content(sources: list[Path]) -> bytes:
    return b"".join(source.read_bytes() for source in sources)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def is_private(path: Path) -> bool:
    """Return whether this user or root owns a file or folder, and nobody else can write it."""
    if sys.platform == "win32":
        return True
    found = path.stat()
    return found.st_uid in (0, os.getuid()) and not found.st_mode & 0o022


def _run(command: list[str], scratch: Path) -> "subprocess.CompletedProcess[str]":
    """Run a compiler that does not outlive this process, nor leaves its folder behind, however this process ends."""
    if sys.platform != "win32":
        command = ["/bin/sh", "-c", _WATCHED, str(scratch), *command]
    ends = os.pipe()
    try:
        return subprocess.run(command, stdin=ends[0], capture_output=True, text=True, errors="replace", start_new_session=True)
    finally:
        for end in ends:
            os.close(end)
