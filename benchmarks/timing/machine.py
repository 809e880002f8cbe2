"""The machine on which something is measured. The programs of experiments/ import this file, too."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

_PACKAGES: Final = ("numpy", "ml_dtypes", "torch", "tensorflow", "keras", "jax", "jaxlib", "flax")


def environment() -> dict[str, Any]:
    """Versions, processor, cores and date. The entry of a backend says which device and how many cores it had."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "versions": versions,
    }


def processor() -> str:
    """The model of the CPU, by its name in Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
