"""`make nightly` runs this folder: pytest collects it where it is given the folder or a file of it, and else not."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if any("nightly" in str(argument) for argument in config.args) else True
