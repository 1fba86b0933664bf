"""Builds the CPU kernel: plain shared libraries, one for each variant, which ctypes loads. All else is in pyproject.toml.

Where there is no C compiler the package installs without them, and pwlu runs on plain torch.
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
    """Compiles with the kernel's own flags; the libraries are no Python modules, so they have plain names."""

    def build_extension(self, ext: Any) -> None:
        """As always, with the flags of this variant."""
        ext.extra_compile_args = kernel["flags"](ext.name.rpartition("_")[2], msvc=self.compiler.compiler_type == "msvc")
        super().build_extension(ext)

    def get_ext_filename(self, fullname: str) -> str:
        """Without the tag of a Python version."""
        return fullname.replace(".", "/") + (".dll" if sys.platform == "win32" else ".so")

    def get_export_symbols(self, ext: Any) -> list[str]:
        """None beyond what the source exports: there is no PyInit function."""
        return list(ext.export_symbols)


class AnyPython(bdist_wheel):
    """One wheel a platform serves every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """The platform alone matters."""
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
