"""The CUDA sources, the kernels they hold, and NVRTC, which compiles them where no compiler is installed.

NVRTC comes with torch, and NVIDIA's cuda-core calls it and keeps what it made on disk. The key is made of source, options,
architecture and NVRTC's version, and files appear by an atomic rename. No GPU is needed to compile.
"""

import contextlib
import hashlib
import threading
from pathlib import Path
from typing import Any, NamedTuple

from pwlu.kernels import build

SOURCES = ("element.cuh", "share.cuh", "map.cu", "backward.cu", "finish.cu")
TYPES = {"float32": "float", "bfloat16": "Bfloat16", "float16": "Float16"}

# Elements a thread reads at once, most first, for maps and for backward. Backward in rows needs shared memory for each of them.
VECTORS: dict[str, dict[str, tuple[int, ...]]] = {
    "planes": {"float32": (4, 1), "bfloat16": (8, 4, 1), "float16": (8, 4, 1)},
    "rows": {"float32": (4, 2, 1), "bfloat16": (4, 2, 1), "float16": (4, 2, 1)},
    "mixed": {"float32": (4, 1), "bfloat16": (4, 1), "float16": (4, 1)},
}
BACKWARD_VECTORS: dict[str, dict[str, tuple[int, ...]]] = VECTORS | {
    "rows": {"float32": (2, 1), "bfloat16": (4, 2, 1), "float16": (4, 2, 1)}
}
MANY_AT_ONCE = 4  # vectors a thread of backward_many_planes works on at a time
MAPS = {
    "forward": "FORWARD",
    "lookup": "LOOKUP",
    "observe": "FORWARD | MOMENTS",
    "moments": "MOMENTS",
    "norm_forward": "FORWARD | NORM",
    "norm_add_forward": "FORWARD | NORM | ADD",
    "norm_observe": "FORWARD | NORM | MOMENTS",
    "norm_add_observe": "FORWARD | NORM | ADD | MOMENTS",
}
BACKWARDS = {
    "backward": "SUMS",
    "backward_input": "0",
    "norm_backward": "SUMS | NORM",
    "norm_add_backward": "SUMS | NORM | ADD",
    "norm_input": "NORM",
    "norm_add_input": "NORM | ADD",
}
FORMS = {"planes": ("planes", ""), "rows": ("rows", ", false"), "mixed": ("rows", ", true")}
MAP_THREADS, BACKWARD_THREADS, MIXED_THREADS, FINISH_THREADS = 256, 128, 256, 512

_CACHE_BYTES = 64 << 20
_DIGEST_BYTES = hashlib.sha256().digest_size


class Function(NamedTuple):
    """A kernel: its name, the template it is made from, the most threads a block of it may have, and how many threads of a
    multiprocessor registers have to suffice for ("1": one block will do)."""

    name: str
    template: str
    threads: int
    resident: str = "1"

    def declaration(self) -> str:
        """The lines that make the template a kernel with a name."""
        bounds = f"__launch_bounds__({self.threads}, ({self.resident} + {self.threads - 1}) / {self.threads})"
        return f'extern "C" __global__ void {bounds} {self.name}(const Arguments a) {{ {self.template}(a); }}\n'


def functions() -> dict[str, Function]:
    """Every kernel there is, by name: ``{operation}_{planes|rows|mixed}_{dtype}_{elements at once}``."""
    found = [Function(f"finish_{what}", f"reduce_{what}", FINISH_THREADS) for what in ("gradients", "moments", "norm")]
    for dtype, of_c in TYPES.items():
        for form, (template, last) in FORMS.items():
            for width in VECTORS[form][dtype]:
                for what, kind in MAPS.items():
                    of_template = f"map_{template}<{of_c}, {width}, {kind}{last}>"
                    full = what in ("forward", "lookup")  # others need more registers
                    resident = (
                        ("RESIDENT_THREADS" if full else "1536" if what == "observe" else "1") if form == "planes" else "1"
                    )
                    threads = MIXED_THREADS if form == "mixed" else MAP_THREADS
                    found.append(Function(f"{what}_{form}_{dtype}_{width}", of_template, threads, resident))
            for width in BACKWARD_VECTORS[form][dtype]:
                for what, kind in BACKWARDS.items():
                    threads = MIXED_THREADS if form == "mixed" else BACKWARD_THREADS
                    if form != "planes":
                        of_template = f"backward_{template}<{of_c}, {width}, {kind}{last}>"
                        found.append(Function(f"{what}_{form}_{dtype}_{width}", of_template, threads))
                        continue
                    for name, at_once, resident in ((what, 1, "1024"), (f"{what}_many", MANY_AT_ONCE, "1")):
                        if at_once == 1 or "SUMS" in kind:
                            of_template = f"backward_{template}<{of_c}, {width}, {kind}, {at_once}>"
                            found.append(Function(f"{name}_{form}_{dtype}_{width}", of_template, threads, resident))
    return {function.name: function for function in found}


def source(chosen: list[Function]) -> str:
    """One program that holds the chosen kernels."""
    folder = Path(__file__).parent
    return "".join((folder / name).read_text() for name in SOURCES) + "".join(f.declaration() for f in chosen)


_importing = threading.Lock()


def core() -> Any:
    """The package cuda.core, imported by one thread at a time: two at once find half of it."""
    with _importing:
        import cuda.core
        import cuda.core.utils

        return cuda.core


def compile_functions(chosen: list[Function], architecture: str, keep: bool = True) -> Any:
    """Machine code of the chosen kernels for an architecture such as ``sm_90``: a ``cuda.core.ObjectCode``.

    Taken from the cache, and put there, unless told otherwise; a cache that cannot be used is no error.
    """
    cuda = core()
    options = cuda.ProgramOptions(arch=architecture, std="c++17")
    text = source(chosen)
    key = cuda.utils.make_program_cache_key(code=text, code_type="c++", options=options, target_type="cubin")

    def made() -> Any:
        return cuda.Program(text, "c++", options).compile("cubin")

    if not keep:
        return made()
    try:
        folder = build.cache_folder() / "cuda"
        folder.mkdir(0o700, parents=True, exist_ok=True)
        if not build.is_private(folder):
            raise OSError(f"{folder} must belong to this user and be writable by nobody else")
        with cuda.utils.FileStreamProgramCache(folder, max_size_bytes=_CACHE_BYTES) as cache:
            found = cache.get(key)
            if found is not None and _is_whole(found):
                return cuda.ObjectCode.from_cubin(found[_DIGEST_BYTES:])
            code = made()
            with contextlib.suppress(OSError):  # a full disk
                cache[key] = hashlib.sha256(bytes(code.code)).digest() + bytes(code.code)
            return code
    except OSError:  # no home, or a folder that cannot be made or read, or is another's: compile for this process alone
        return made()


def _is_whole(entry: bytes) -> bool:
    """Whether an entry of the cache is what was written: the driver crashes on half a kernel."""
    return hashlib.sha256(entry[_DIGEST_BYTES:]).digest() == entry[:_DIGEST_BYTES]
