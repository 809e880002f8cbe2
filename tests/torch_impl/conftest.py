"""What tests of PyTorch's compiler share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    """Nothing is compiled yet, and nothing stays."""
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
