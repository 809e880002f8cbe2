"""The version of this package, as it is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("rmsnorm")
except PackageNotFoundError:  # its sources are read, as a build does
    VERSION = "not installed"
