"""What the tests of the tools share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from rmsnorm.parity import asking


@pytest.fixture
def few_circumstances(monkeypatch: pytest.MonkeyPatch) -> None:
    """``check`` asks an eighth of the circumstances: for tests of what else it does, as all of them take seconds."""
    every = asking.circumstances

    def some(levels: Mapping[str, Sequence[str]], *, strength: int) -> list[asking.Circumstance]:
        return every(levels, strength=strength)[:: 8 if strength > 1 else 1]  # identify asks but few

    monkeypatch.setattr(asking, "circumstances", some)
