"""The CPU kernels in C: one library for each level of vector instructions, chosen at run time.

Everything else about the package is in pyproject.toml. Without a working C compiler the package
still installs, with slower kernels; a worker says so when it starts.
"""

from __future__ import annotations

import platform
from pathlib import Path

from setuptools import Extension, setup

AVX2 = ["-march=x86-64-v3"]
AVX512 = ["-march=x86-64-v4", "-mprefer-vector-width=512"]
LEVELS = {
    "x86_64": {
        "avx2": AVX2,
        "avx512": AVX512,
        "avx512_bf16": [*AVX512, "-mavx512vnni", "-mavx512bf16", "-mavx512vbmi"],
    }
}
SOURCES = sorted(str(path) for path in Path("kernels/csrc").glob("*.c"))
HEADERS = sorted(str(path) for path in Path("kernels/csrc").glob("*.h"))


def extension(level: str, flags: list[str]) -> Extension:
    """The library `legato/kernels/native_<level>`."""
    return Extension(
        f"legato.kernels.native_{level}",
        SOURCES,
        depends=HEADERS,
        extra_compile_args=[
            "-O3",
            "-std=gnu11",
            "-fvisibility=hidden",
            "-ffp-contract=fast",
            "-fno-math-errno",
            "-Wno-psabi",
            *flags,
        ],
        extra_link_args=["-pthread", "-lm"],
        optional=True,
    )


setup(
    ext_modules=[
        extension(level, flags)
        for level, flags in LEVELS.get(platform.machine(), {"base": []}).items()
    ]
)
