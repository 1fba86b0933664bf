"""Build the CPU kernel as shared libraries, one per variant, which ctypes loads. Everything else is in pyproject.toml.

Without a C compiler the package installs without them, and pwlu uses its plain PyTorch implementation.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

kernel = runpy.run_path(str(Path(__file__).parent / "src/pwlu/kernels/build.py"))


class BuildKernel(build_ext):
    """Compile with the flags of the kernel. The libraries are not Python modules, so their names have no Python tag."""

    def build_extension(self, ext: Any) -> None:
        """Build the library with the flags of its variant."""
        ext.extra_compile_args = kernel["flags"](ext.name.rpartition("_")[2], msvc=self.compiler.compiler_type == "msvc")
        super().build_extension(ext)

    def get_ext_filename(self, fullname: str) -> str:
        """Return the file name without the tag of a Python version."""
        return fullname.replace(".", "/") + (".dll" if sys.platform == "win32" else ".so")

    def get_export_symbols(self, ext: Any) -> list[str]:
        """Return only the symbols that the source exports: there is no PyInit function."""
        return list(ext.export_symbols)


class AnyPython(bdist_wheel):
    """One wheel per platform, for every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return a tag that depends on the platform only."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            f"pwlu.kernels.cpu._cpu_{variant}",
            ["src/pwlu/kernels/cpu/cpu.c"],
            depends=[f"src/pwlu/kernels/cpu/{header.name}" for header in kernel["HEADERS"]],
            optional=True,
        )
        for variant in kernel["variants"]()
    ],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": AnyPython},
)
