"""Compiles the layers for a CPU, once for each instruction set; the rest is in pyproject.toml.

What the compiler here cannot do is left out, and without all of them torch computes the layers.
"""

import runpy
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("kernels/cpu")
FLAGS = {"_layers_v4": ["-march=x86-64-v4"], "_layers_v3": ["-march=x86-64-v3"], "_layers": []}

# The layers say of which sources they are: whoever loads them beside others leaves them out.
digest: str = runpy.run_path("src/outrider/kernels/cpu/sources.py")["digest_of_sources"](FOLDER)
are_stale = any(digest.encode() not in built.read_bytes() for built in FOLDER.glob("*.so"))

setup(
    ext_modules=[
        Extension(
            f"outrider.kernels.cpu.{name}",
            sources=sorted(map(str, FOLDER.glob("*.cpp"))),
            depends=sorted(map(str, FOLDER.glob("*.h"))),
            define_macros=[("OUTRIDER_SOURCES", f'"{digest}"')],
            extra_compile_args=["-std=c++20", "-O3", *flags, "-fno-math-errno", "-Wno-psabi"],
            optional=True,
        )
        for name, flags in FLAGS.items()
    ],
    options={"build_ext": {"force": are_stale}},  # whatever the times of files say
)
