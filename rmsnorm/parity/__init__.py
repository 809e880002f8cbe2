"""The kit that holds every implementation to the golden."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmsnorm.specification.frameworks import lazy

if TYPE_CHECKING:
    from rmsnorm.parity.checking import check
    from rmsnorm.parity.quantised import check_quantised
    from rmsnorm.parity.report import Report

__all__ = ["Report", "check", "check_quantised"]
# pytest imports this package in every session
__getattr__, __dir__ = lazy(
    __name__,
    {"check": "checking", "check_quantised": "quantised", "Report": "report"},
)
