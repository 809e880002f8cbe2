"""The kit that holds every implementation to the golden."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rmsnorm.parity.checking import Report, check

__all__ = ["Report", "check"]


def __getattr__(name: str) -> Any:
    """``check`` and ``Report``, loaded when they are used: pytest imports this package in every session."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rmsnorm.parity import checking

    return getattr(checking, name)
