"""Builds the package by scikit-build-core, which compiles the kernels as CMakeLists.txt says, with two additions.

Where they cannot be compiled, as without a compiler, the package is built without them: it works by plain operations.
An editable installation puts the compiled module into the checkout, beside the files that import it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from scikit_build_core import build as scikit
from scikit_build_core.build import *  # noqa: F403 - what this file does not change

FAILED = "rmsnorm: the kernels could not be compiled, see above. This package works without them, by slower operations."


def build_wheel(folder: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    try:
        return scikit.build_wheel(folder, settings, metadata)
    except (SystemExit, Exception) as error:  # scikit-build-core exits where CMake or the compiler fails
        print(error, FAILED, sep="\n")
    return scikit.build_wheel(folder, {**(settings or {}), "wheel.cmake": "false"})


def get_requires_for_build_editable(settings: dict[str, Any] | None = None) -> list[str]:
    return scikit.get_requires_for_build_wheel(settings)


def build_editable(folder: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    with tempfile.TemporaryDirectory() as compiled:
        with ZipFile(Path(compiled, build_wheel(compiled, settings))) as wheel:
            for name in wheel.namelist():
                if name.startswith("rmsnorm/cpu/_native"):
                    wheel.extract(name)
    return scikit.build_editable(folder, settings, metadata)
