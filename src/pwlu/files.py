"""How every file is written: under another name first, so that whoever looks finds it whole, or as it was before."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"  # how a folder ends in which files are being written; a process that is killed leaves it behind


class CannotWrite(OSError):
    """A file could not be written. ``what`` says which and why, ``remedy`` what to do before it is tried again."""

    def __init__(self, path: Path, error: OSError) -> None:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        self.what = f"no space left on the disk for {path}" if full else f"{path} cannot be written: {error.strerror}"
        self.remedy = "free some" if full else "put that right"
        super().__init__(f"{self.what}. Free some, then try again; what stood there before is unchanged" if full else self.what)


@contextmanager
def explain_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let what the system says of a write to `path` become a :class:`CannotWrite`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CannotWrite) or error.errno is None:  # none of the system's
            raise
        raise CannotWrite(Path(path), error) from None


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a file to write, in a folder of its own beside `path`, which gets that name when all went well.

    Other files that are written beside it go with it. Whatever goes wrong, what stood there before stays.

    Raises:
        CannotWrite: on a full disk, or where nothing may be written.
    """
    target = Path(path).resolve()  # a link stays a link
    with explain_errors(path):
        if not target.parent.is_dir():
            raise OSError(errno.ENOENT, f"there is no folder {target.parent}")
        if target.exists() and not target.is_file():
            raise OSError(errno.EISDIR, "it is no file")
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=PARTIAL, dir=target.parent))
        try:
            yield folder / target.name
            files = sorted(folder.iterdir(), key=lambda file: file.name == target.name)  # the one asked for comes last
            for file in files:
                with file.open("r+b") as opened:
                    os.fsync(opened.fileno())  # after a loss of power the name must not be there without the content
            for file in files:
                os.replace(file, target.parent / file.name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file: it appears complete, or what stood there before stays."""
    with atomic_write(path) as file, file.open("wb") as opened:
        opened.write(content)
