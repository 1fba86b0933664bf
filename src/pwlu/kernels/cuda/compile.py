"""List the CUDA kernels, and compile them with NVRTC, which needs no installed compiler and no GPU.

NVRTC comes with PyTorch. NVIDIA's cuda-core calls it and caches the results on disk. The key of a cache entry consists of
source, options, architecture and the version of NVRTC. Files appear by an atomic rename.
"""

import contextlib
import hashlib
import itertools
import threading
from pathlib import Path
from typing import Any, NamedTuple

from pwlu.kernels import build

SOURCES = ("element.cuh", "share.cuh", "map.cu", "backward.cu", "finish.cu", "dynamic.cu", "rule.cu")
TYPES = {"float32": "float", "bfloat16": "Bfloat16", "float16": "Float16"}

# Vector widths: the number of elements that a thread reads at once, largest first, for maps and for backward kernels. Backward
# kernels with "rows" need shared memory for each element, so their vectors are shorter.
VECTORS: dict[str, dict[str, tuple[int, ...]]] = {
    "planes": {"float32": (4, 1), "bfloat16": (8, 4, 1), "float16": (8, 4, 1)},
    "rows": {"float32": (4, 2, 1), "bfloat16": (4, 2, 1), "float16": (4, 2, 1)},
    "mixed": {"float32": (4, 1), "bfloat16": (4, 1), "float16": (4, 1)},
}
BACKWARD_VECTORS: dict[str, dict[str, tuple[int, ...]]] = VECTORS | {
    "rows": {"float32": (2, 1), "bfloat16": (4, 2, 1), "float16": (4, 2, 1)}
}
MANY_AT_ONCE = 4  # vectors that a thread of backward_many_planes processes at a time
MAPS = {
    "forward": "FORWARD",
    "nonuniform_forward": "FORWARD | KNOTS",
    "dynamic_forward": "FORWARD | DYNAMIC",
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
    "nonuniform_backward": "SUMS | KNOTS",
    "nonuniform_backward_input": "KNOTS",
    "dynamic_backward": "SUMS | DYNAMIC",
    "norm_backward": "SUMS | NORM",
    "norm_add_backward": "SUMS | NORM | ADD",
    "norm_input": "NORM",
    "norm_add_input": "NORM | ADD",
}
NETWORK = ("first_layer", "second_layer", "second_layer_backward", "first_layer_backward")
FORMS = {"planes": ("planes", ""), "rows": ("rows", ", false"), "mixed": ("rows", ", true")}
RESIDENT_IN_PLANES = {  # the others need more registers
    "forward": "RESIDENT_THREADS",
    "lookup": "RESIDENT_THREADS",
    "observe": "1536",
    "nonuniform_forward": "1024",
    "dynamic_forward": "1536",
}
RESIDENT_IN_ROWS = {"dynamic_forward": "512"}  # as many as without mixing
MAP_THREADS, BACKWARD_THREADS, MIXED_THREADS, FINISH_THREADS, RULE_THREADS = 256, 128, 256, 512, 512
MEANS_THREADS = 512
TILE = 16  # in dynamic.cu: a block of TILE * TILE threads computes a tile of a matrix product
RULE_UNITS = 128  # per launch, as in rule.cu

_CACHE_BYTES = 64 << 20
_DIGEST_BYTES = hashlib.sha256().digest_size


class Function(NamedTuple):
    """A kernel.

    Attributes:
        name: its name.
        template: the template that it instantiates.
        threads: the largest number of threads per block.
        resident: the number of threads per multiprocessor that the registers must suffice for; "1" means one block.
        arguments: the type of its argument.
    """

    name: str
    template: str
    threads: int
    resident: str = "1"
    arguments: str = "Arguments"

    def declaration(self) -> str:
        """Return the code that instantiates the template as a named kernel."""
        bounds = f"__launch_bounds__({self.threads}, ({self.resident} + {self.threads - 1}) / {self.threads})"
        return f'extern "C" __global__ void {bounds} {self.name}(const {self.arguments} a) {{ {self.template}(a); }}\n'


def functions() -> dict[str, Function]:
    """Return all kernels by name: ``{operation}_{planes|rows|mixed}_{dtype}_{vector width}``, ``finish_*`` and others."""
    finishing = {
        "gradients": "reduce_gradients<0>",
        "knots": "reduce_gradients<KNOTS>",
        "moments": "reduce_moments",
        "norm": "reduce_norm",
    }
    found = [Function(f"finish_{what}", template, FINISH_THREADS) for what, template in finishing.items()]
    found.append(Function("finish_samples", "reduce_samples", FINISH_THREADS, "1024"))
    found += [Function(f"network_{what}", what, TILE * TILE, "768") for what in NETWORK]
    for dtype, of_c in TYPES.items():
        widths = VECTORS["planes"][dtype]
        found += [Function(f"add_means_{dtype}_{width}", f"add_means<{of_c}, {width}>", MAP_THREADS) for width in widths]
        found += [Function(f"means_{dtype}_{width}", f"means<{of_c}, {width}>", MEANS_THREADS) for width in widths]
    found += [Function(f"rule_{what}", what, RULE_THREADS, arguments="RuleArguments") for what in ("share_gradients", "smooth")]
    for (dtype, of_c), (form, (template, last)) in itertools.product(TYPES.items(), FORMS.items()):
        for width, (what, kind) in itertools.product(VECTORS[form][dtype], MAPS.items()):
            of_template = f"map_{template}<{of_c}, {width}, {kind}{last}>"
            resident = (RESIDENT_IN_PLANES if form == "planes" else RESIDENT_IN_ROWS).get(what, "1")
            threads = MIXED_THREADS if form == "mixed" else MAP_THREADS
            if "DYNAMIC" in kind and form != "planes":  # planes: samples are folded into channels
                of_template = f"per_sample<{of_c}, {of_template}>"
            found.append(Function(f"{what}_{form}_{dtype}_{width}", of_template, threads, resident))
        for width, (what, kind) in itertools.product(BACKWARD_VECTORS[form][dtype], BACKWARDS.items()):
            threads = MIXED_THREADS if form == "mixed" else BACKWARD_THREADS
            if form != "planes":
                of_template = f"backward_{template}<{of_c}, {width}, {kind}{last}>"
                if "DYNAMIC" in kind:
                    of_template = f"per_sample<{of_c}, {of_template}>"
                found.append(Function(f"{what}_{form}_{dtype}_{width}", of_template, threads))
                continue
            for name, at_once, resident in ((what, 1, "1024"), (f"{what}_many", MANY_AT_ONCE, "1")):
                if at_once == 1 or "SUMS" in kind:
                    of_template = f"backward_{template}<{of_c}, {width}, {kind}, {at_once}>"
                    found.append(Function(f"{name}_{form}_{dtype}_{width}", of_template, threads, resident))
    return {function.name: function for function in found}


def source(chosen: list[Function]) -> str:
    """Return the source of one program with the chosen kernels."""
    folder = Path(__file__).parent
    return "".join((folder / name).read_text() for name in SOURCES) + "".join(f.declaration() for f in chosen)


_importing = threading.Lock()


def core() -> Any:
    """Return the package cuda.core. One thread imports it at a time: a concurrent import sees it half initialized."""
    with _importing:
        import cuda.core
        import cuda.core.utils

        return cuda.core


def compile_functions(chosen: list[Function], architecture: str, keep: bool = True) -> Any:
    """Compile the chosen kernels for an architecture such as ``sm_90``; return the ``cuda.core.ObjectCode``.

    If `keep`, use the cache on disk, but ignore a cache that cannot be used.
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
        with cuda.utils.FileStreamProgramCache(cache_folder(), max_size_bytes=_CACHE_BYTES) as cache:
            found = cache.get(key)
            if found is not None and _is_intact(found):
                return cuda.ObjectCode.from_cubin(found[_DIGEST_BYTES:])
            code = made()
            with contextlib.suppress(OSError):  # a full disk
                cache[key] = hashlib.sha256(bytes(code.code)).digest() + bytes(code.code)
            return code
    except OSError:  # the cache folder does not exist or cannot be used: compile for this process only
        return made()


def cache_folder() -> Path:
    """Create the folder of the compiled kernels if it is missing, and return it; raise OSError if it cannot be used."""
    folder = build.cache_folder() / "cuda"
    folder.mkdir(0o700, parents=True, exist_ok=True)
    if not build.is_private(folder):
        raise OSError(f"{folder} must belong to this user and be writable by nobody else")
    return folder


def _is_intact(entry: bytes) -> bool:
    """Return whether an entry of the cache is complete: the driver crashes on a truncated kernel."""
    return hashlib.sha256(entry[_DIGEST_BYTES:]).digest() == entry[:_DIGEST_BYTES]
