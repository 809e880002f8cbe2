"""The frameworks, as fixtures for the tests that hold for all of them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from rmsnorm.specification.frameworks import FRAMEWORKS


@pytest.fixture(params=["torch", "tf", "flax"])
def adapter(request: pytest.FixtureRequest) -> Any:
    """The module ``<key>_nematus`` of a framework; ``nematus_framework`` says what it has."""
    row = FRAMEWORKS[request.param]
    if row.missing:
        pytest.skip(f"{row.missing} is not installed; pip install '.[{row.extra}]'")
    return importlib.import_module(f"{row.key}_nematus")


@pytest.fixture
def quick(adapter: Any) -> Iterator[None]:
    """In float64, and without compiling anything."""
    with adapter.quick():
        yield
