"""Images in tar files of the WebDataset layout: NAME.jpg and NAME.cls, which holds the number of the class.

The headers of all shards are read once. After that, any image can be read from its offset in its shard. So the order of
training is the same as for a folder: one random order of all images, whatever the number of processes or workers.
"""

import io
import itertools
import re
import tarfile
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS

from pwlu.lab.data.sources import Stored
from pwlu.lab.recipes.settings import UserError

OPEN_FILES = 128  # the most files that a process keeps open; systems allow about 1,000
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_CLASS = re.compile(rb"[0-9]{1,6}")  # a list of all classes must fit into memory
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")


def is_shards(data: str) -> bool:
    """Return whether ``--data`` names tar files rather than a folder."""
    return data.endswith((".tar", ".tar.gz", ".tgz"))


class Shards(Stored):
    """The images of tar files, numbered in the order of the files. ``{000..146}`` in their path is a range of numbers."""

    def __init__(self, pattern: str) -> None:
        self.paths = expand(pattern)
        missing = [path for path in self.paths if not Path(path).is_file()]
        if missing:
            raise UserError(
                f"{len(missing)} of {len(self.paths)} shards do not exist, the first is {missing[0]}. Write --data "
                "'DIR/NAME-{000..146}.tar' in quotes, with the numbers of the files"
            )
        rows = [(shard, *image) for shard, path in enumerate(self.paths) for image in _read_headers(path)]
        if not rows:
            raise UserError(f"{pattern}: no images. Expected NAME.jpg and NAME.cls in each tar file, as WebDataset writes them")
        # Store arrays: each worker process gets a copy, and sending 1.3 million tuples would take long.
        self.shards, self.offsets, self.sizes, self.labels = np.array(rows, dtype=np.int64).T.copy()
        self.classes = [str(number) for number in range(int(self.labels.max()) + 1)]

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, number: int) -> tuple[io.BytesIO, int]:
        """Return an image as a file, and its label."""
        return io.BytesIO(self._read(number, 0, int(self.sizes[number]))), int(self.labels[number])

    def name(self, number: int) -> str:
        """Return the name of an image for messages."""
        header = tarfile.TarInfo.frombuf(self._read(number, -tarfile.BLOCKSIZE, tarfile.BLOCKSIZE), "utf-8", "replace")
        return f"{header.name} in {self.paths[self.shards[number]]}"

    def _read(self, number: int, start: int, size: int) -> bytes:
        return _open(self.paths[self.shards[number]]).read(int(self.offsets[number]) + start, size)


def expand(pattern: str) -> list[str]:
    """Return the paths that a pattern stands for: ``a-{08..11}.tar`` stands for a-08.tar, a-09.tar, a-10.tar and a-11.tar."""
    found = _RANGE.search(pattern)
    if found is None:
        if "{" in pattern or "*" in pattern:
            raise UserError(f"shards are named by a range of numbers, such as NAME-{{000..146}}.tar, not {pattern}")
        return [pattern]
    first, last = found.groups()
    if int(first) > int(last):
        raise UserError(f"the range {found[0]} of shards must begin with the smaller number. Write {{{last}..{first}}}")
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [path for number in range(int(first), int(last) + 1) for path in expand(f"{before}{number:0{len(first)}}{after}")]


class _OpenFile:
    def __init__(self, path: str) -> None:
        self.file, self.lock = open(path, "rb", buffering=0), threading.Lock()  # noqa: SIM115  closed with this object

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()

    def read(self, offset: int, size: int) -> bytes:
        with self.lock:
            self.file.seek(offset)
            return self.file.read(size)


_open = lru_cache(OPEN_FILES)(_OpenFile)  # keep files open, because opening one may take a request to a file server


def _read_headers(path: str) -> Iterator[tuple[int, int, int]]:
    """Yield where each image of a shard begins, its size, and its label."""
    advice = "Copy it again"
    try:
        with open(path, "rb") as file:
            if file.read(2) == b"\x1f\x8b":
                advice = "Unpack it with gunzip"
        with tarfile.open(path, "r:") as tar:
            for key, members in itertools.groupby(_members(path, tar), lambda member: member[0]):
                yield from _sample(path, key, [(extension, member, content) for _, extension, member, content in members])
            _check_end(tar)
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"the shard {path} cannot be read as a tar file without compression: {error}. {advice}") from None


def _members(path: str, tar: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo, bytes]]:
    """Yield key and extension of each file, which are separated by the first dot, its header, and the content of a class."""
    length = Path(path).stat().st_size
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # otherwise, tarfile keeps all headers in memory
        matched = None if member.isdir() else _NAME.fullmatch(member.name)
        if matched is None:
            continue
        extension = f".{matched[2].lower()}"
        if extension in (*IMG_EXTENSIONS, ".cls") and (not member.isfile() or member.issparse()):
            kind = "sparse file" if member.issparse() else "link"
            raise UserError(f"{path} holds {member.name} as a {kind}. Pack the files themselves, without --sparse")
        if member.offset_data + member.size > length:
            raise tarfile.ReadError(f"it ends within {member.name}")
        content = tar.extractfile(member) if extension == ".cls" else None
        yield matched[1], extension, member, b"" if content is None else content.read()


def _sample(path: str, key: str, files: list[tuple[str, tarfile.TarInfo, bytes]]) -> Iterator[tuple[int, int, int]]:
    """Yield the image of a sample, or nothing if it has neither image nor class. Raise UserError if one of them is missing."""
    images = [(member.offset_data, member.size) for extension, member, _ in files if extension in IMG_EXTENSIONS]
    labels = [content for extension, _, content in files if extension == ".cls"]
    if len(images) > 1:
        raise UserError(f"{path} has two images named {key}. Give each image a different name")
    if len(labels) > 1:
        raise UserError(f"{path} has two classes for {key}. Give each image one file {key}.cls")
    if not images and not labels:
        if dotted := [member.name for extension, member, _ in files if extension.endswith(IMG_EXTENSIONS)]:
            raise UserError(
                f"{path} holds {dotted[-1]}, but the name of a sample ends at the first dot. Write names without other dots: "
                "NAME.jpg and NAME.cls"
            )
        return
    if not images or not labels:
        raise UserError(
            f"{path} has {key}{' without ' + key + '.cls' if images else '.cls without an image'}. Each image needs a "
            f"file {key}.cls right before or after it, with the number of its class"
        )
    if not _CLASS.fullmatch(labels[0].strip()):
        raise UserError(f"{key}.cls in {path} must hold the number of a class, such as 7, not {labels[0][:20]!r}")
    yield *images[0], int(labels[0])


def _check_end(tar: tarfile.TarFile) -> None:
    """Raise an error if the headers end before the archive does: tarfile does not report a damaged header, it just stops."""
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    rest = tar.fileobj.read(2 * tarfile.RECORDSIZE)  # at most one record of zeros
    if len(rest) < tarfile.BLOCKSIZE:
        raise tarfile.ReadError(f"it ends at byte {tar.offset + len(rest):,}, without the zeros that end a tar file")
    if rest[: tarfile.BLOCKSIZE].strip(b"\0"):
        raise tarfile.ReadError(f"the header at byte {tar.offset:,} is damaged")
    if rest.strip(b"\0"):
        raise tarfile.ReadError(f"more data follows the zeros at byte {tar.offset:,} that end a tar file")
