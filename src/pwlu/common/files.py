"""Atomic writes: a file is written under a temporary name, then renamed. Readers see the complete old or new file."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"  # suffix of a folder with unfinished files; a killed process leaves it behind


class CannotWrite(OSError):
    """An error of a write. ``what`` says which file and why, ``remedy`` what to do before you try again."""

    def __init__(self, path: Path, error: OSError) -> None:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        self.what = f"no space left on the disk for {path}" if full else f"{path} cannot be written: {error.strerror}"
        self.remedy = "free some space" if full else "fix the problem"
        super().__init__(f"{self.what}. Free some space and try again; an existing file is unchanged" if full else self.what)


@contextmanager
def explain_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert errors of the operating system during a write to `path` into :class:`CannotWrite`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CannotWrite) or error.errno is None:  # not raised by the operating system
            raise
        raise CannotWrite(Path(path), error) from None


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path to write to; rename it to `path` if the block succeeds.

    The temporary path is in a new folder beside `path`. Other files written to that folder are moved too. If anything fails,
    existing files stay unchanged.

    Raises:
        CannotWrite: if the disk is full, or the file cannot be written.
    """
    target = Path(path).resolve()  # if the path is a link, replace the file it points to
    with explain_errors(path):
        if not target.parent.is_dir():
            raise OSError(errno.ENOENT, f"the folder {target.parent} does not exist")
        if target.exists() and not target.is_file():
            raise OSError(errno.EISDIR, "it exists and is not a file")
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=PARTIAL, dir=target.parent))
        try:
            yield folder / target.name
            files = sorted(folder.iterdir(), key=lambda file: file.name == target.name)  # rename the requested file last
            for file in files:
                with file.open("r+b") as opened:
                    os.fsync(opened.fileno())  # so that a power failure cannot leave a name without its content
            for file in files:
                os.replace(file, target.parent / file.name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file atomically."""
    with atomic_write(path) as file, file.open("wb") as opened:
        opened.write(content)
