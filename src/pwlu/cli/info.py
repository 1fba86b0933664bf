"""``pwlu info``: show versions, devices, and which kernel each device uses."""

import argparse
import os
import platform

import torch

from pwlu.kernels import cpu, cuda, eager
from pwlu.kernels.cuda.compile import cache_folder
from pwlu.version import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the help text. There are no options."""
    parser.epilog = (
        "environment variables:\n"
        "  PWLU_CPU_KERNEL=avx512|avx2|portable|reference  use this kernel on CPUs, or fail if it cannot run\n"
        "  PWLU_CUDA_KERNEL=cuda|reference                 use this kernel on GPUs, or fail if it cannot run\n"
        "  PWLU_EAGER=compiled|python                      call kernels in eager mode from C++ or from Python\n"
        "  PWLU_CACHE=DIR                                  store compiled libraries in this folder\n"
        "  CC, CXX                                         use these compilers"
    )


def run(_options: argparse.Namespace) -> int:
    """Print the table."""
    rows = [
        ("pwlu", __version__),
        ("torch", torch.__version__),
        ("python", f"{platform.python_version()}, {platform.platform()}"),
        ("processor", f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"),
        ("CPU", _cpu()),
        ("eager mode", eager.state()),
        *((f"cuda:{i}", _cuda(i)) for i in range(torch.cuda.device_count())),
        *((name, "plain torch (pwlu.reference): pwlu has no kernel for this device") for name in _other_devices()),
    ]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:<{width}}  {text}")
    return 0


def _cpu() -> str:
    try:
        kernel, why = cpu.choose()
    except OSError as error:
        return f"none: {error}"
    if kernel is not None:
        return f"C kernel, variant {kernel.variant} ({why}): {kernel.path.name}"
    remedy = "unset PWLU_CPU_KERNEL" if "PWLU_CPU_KERNEL" in os.environ else "install a C compiler (gcc or clang) or correct CC"
    return f"plain torch (pwlu.reference), many times slower ({why}); for the fast kernel {remedy}, then start again"


def _cuda(index: int) -> str:
    name = torch.cuda.get_device_name(index)
    try:
        kernel, why = cuda.choose(index)
    except OSError as error:
        return f"{name}, none: {error}"
    if kernel is None:
        return f"{name}, plain torch (pwlu.reference), many times slower: {why}"
    try:
        cached = f"cached in {cache_folder()}"
    except OSError as error:
        cached = f"not cached: {error}"
    return f"{name}, CUDA kernels for {kernel.processor.architecture} ({why}, {cached})"


def _other_devices() -> list[str]:
    found = ["mps"] if torch.backends.mps.is_available() else []
    return [*found, "xpu"] if hasattr(torch, "xpu") and torch.xpu.is_available() else found
