"""Builds the package by scikit-build-core, which compiles the kernels as CMakeLists.txt says, with four additions.

A build prints what it does, which pip shows with -v. The metadata alone compiles nothing.

Where they cannot be compiled, as without a compiler, the package is built without them: it works by plain operations.

A wheel of Python 3.12 or newer is one for all of these (CPython's stable ABI, which nanobind has from 3.12 on); that of
3.11 is one for it alone.

An editable installation puts the compiled module into the checkout, beside the files that import it, and adds the
checkout to the path. That of scikit-build-core would import this checkout even where PYTHONPATH names another one.
"""

from __future__ import annotations

import base64
import hashlib
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from scikit_build_core import build as scikit
from scikit_build_core.build import *  # noqa: F403 - what this file does not change

STABLE = {"wheel.py-api": "cp312"}
FAILED = "rmsnorm: the kernels could not be compiled, see above. This package works without them, by slower operations."


def build_wheel(folder: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    if (settings or {}).get("wheel.cmake") == "false":
        print("rmsnorm: builds the package without its kernels, as wheel.cmake is false", flush=True)
        return scikit.build_wheel(folder, settings, metadata)
    print("rmsnorm: compiles the kernels for each level of this kind of processor, in half a minute", flush=True)
    start = time.monotonic()
    try:
        name = scikit.build_wheel(folder, _stable(settings), metadata)
    except (SystemExit, Exception) as error:  # scikit-build-core exits where CMake or the compiler fails
        print(error, FAILED, sep="\n", flush=True)
        return scikit.build_wheel(folder, {**(settings or {}), "wheel.cmake": "false"})
    print(f"rmsnorm: {name} has the kernels, compiled in {time.monotonic() - start:.0f} s", flush=True)
    return name


def prepare_metadata_for_build_wheel(folder: str, settings: dict[str, Any] | None = None) -> str:
    return scikit.prepare_metadata_for_build_wheel(folder, _stable(settings))  # scikit-build-core compares the two


def _stable(settings: dict[str, Any] | None) -> dict[str, Any]:
    return dict(settings or {}) if (settings or {}).get("wheel.cmake") == "false" else {**STABLE, **(settings or {})}


def get_requires_for_build_editable(settings: dict[str, Any] | None = None) -> list[str]:
    return scikit.get_requires_for_build_wheel(settings)


def build_editable(folder: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    files = {"rmsnorm.pth": f"{Path.cwd()}\n".encode()}
    with tempfile.TemporaryDirectory() as compiled:
        name = build_wheel(
            compiled, {"wheel.py-api": "", **(settings or {})}
        )  # of this Python alone, as the file below
        if (settings or {}).get("wheel.cmake") != "false":  # none of an earlier build; and processes may have it in use
            Path(f"rmsnorm/cpu/_native{sysconfig.get_config_var('EXT_SUFFIX')}").unlink(missing_ok=True)
        with ZipFile(Path(compiled, name)) as wheel:
            for file in wheel.namelist():
                if file.startswith("rmsnorm/cpu/_native"):
                    wheel.extract(file)
                elif file.endswith(".dist-info/RECORD"):
                    record = file
                elif not file.startswith("rmsnorm/"):
                    files[file] = wheel.read(file)
    lines = [f"{record},,\n"]
    for file, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        lines.append(f"{file},sha256={digest},{len(content)}\n")
    with ZipFile(Path(folder, name), "w") as wheel:
        for file, content in {**files, record: "".join(lines)}.items():
            wheel.writestr(file, content)
    return name
