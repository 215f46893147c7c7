"""Builds the native kernels with the package; everything else about it is in pyproject.toml.

The library is plain C that is loaded with ctypes: it knows nothing of Python, so one wheel serves every version.
Where it cannot be built (no compiler, another system) the package installs without it and runs on torch.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path("src/forerun/models/native/c")


class BuildLibrary(build_ext):
    """Compiles on every core, names the file without a Python version, and asks for no initialiser in it."""

    def build_extension(self, ext: Extension) -> None:
        one_by_one = self.compiler.compile

        def at_once(sources: list[str], **options: object) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
                made = pool.map(lambda source: one_by_one([source], **options), sources)
                return [file for files in made for file in files]

        self.compiler.compile = at_once
        super().build_extension(ext)

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return list(ext.export_symbols)


class AnyPythonWheel(bdist_wheel):
    """Tags the wheel for its platform but for every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "forerun.models.native._native",
            sources=sorted(str(file) for file in NATIVE.rglob("*.c")),
            include_dirs=[str(NATIVE)],
            depends=sorted(str(file) for file in NATIVE.rglob("*.h")),
            extra_compile_args=[
                "-O3", "-g0", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-pthread",
            ],
            extra_link_args=["-pthread"] if sys.platform == "darwin" else ["-pthread", "-lm"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPythonWheel},
)  # fmt: skip
