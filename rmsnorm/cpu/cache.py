"""Compiled code on disk. A process runs what it reads, so it reads only what it or the system's owner wrote, whole.

A file is named after the function and a digest of all that its code depends on: sources, versions and the processor.
Its first bytes are a digest of the rest. Where no file can be written or read, nothing is kept, and code is compiled.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from stat import S_IWOTH
from typing import Final

import numpy as np

from rmsnorm.cpu import target

_DIGEST: Final = sha256().digest_size
_UNUSABLE: Final = (OSError, PackageNotFoundError)  # no such file, or what it depends on is not known, as in a bundle


def read(name: str) -> bytes | None:
    """The code of a function; None if there is none that can be trusted."""
    for folder in _folders():
        with suppress(*_UNUSABLE), open(folder / _file(name), "rb") as file:
            if _is_trusted(os.fstat(file.fileno())):
                content = file.read()
                if sha256(content[_DIGEST:]).digest() == content[:_DIGEST]:
                    return content[_DIGEST:]
    return None


def write(name: str, code: bytes) -> None:
    """Keeps the code in the first folder that takes it. Other processes see the whole file or none."""
    for folder in _folders():
        with suppress(*_UNUSABLE):
            folder.mkdir(parents=True, exist_ok=True)
            own = folder / f"{_file(name)}.{os.urandom(8).hex()}"
            try:
                with open(own, "xb", opener=_create) as file:  # never what is there already, or where a link leads
                    file.write(sha256(code).digest() + code)
                own.replace(folder / _file(name))
            finally:
                own.unlink(missing_ok=True)
            return


def _create(path: str, flags: int) -> int:
    return os.open(path, flags, 0o644)


def _is_trusted(status: os.stat_result) -> bool:
    """Whether the file belongs to this user or to root, and not everybody can write to it."""
    if not hasattr(os, "geteuid"):  # Windows
        return True
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & S_IWOTH


def _folders() -> Iterator[Path]:
    """NUMBA_CACHE_DIR; without it beside the source, or, if that folder cannot be written to, the user's cache."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        yield Path(chosen) / "rmsnorm"
        return
    yield Path(__file__).parent / "__pycache__"
    with suppress(RuntimeError):  # there is no home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rmsnorm"


def _file(name: str) -> str:
    return f"{name}-{_state()}.o"


@lru_cache(maxsize=1)
def _state() -> str:
    """A digest of all that compiled code depends on. One of _UNUSABLE if that cannot be read."""
    versions = (sys.version, version("numba"), version("llvmlite"), np.__version__)
    state = (sources(), versions, platform.machine(), sys.platform, target.processor())
    return sha256(repr(state).encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def sources() -> str:
    """A digest of the sources. An OSError if they cannot be read."""
    package = Path(__file__).parent
    digest = sha256()
    for path in (package.with_name("dtypes.py"), *sorted(package.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
