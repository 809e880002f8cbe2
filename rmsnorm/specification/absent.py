"""Arrays that a call may have or not, in lists: None is one that is absent. No array library."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def without_none(values: Iterable[Any]) -> list[Any]:
    """The values that are not None: what frameworks take that know no None among the arrays of a function."""
    return [value for value in values if value is not None]


def filled(values: Iterable[Any], pattern: Iterable[object]) -> list[Any]:
    """The values in order, with None wherever the pattern has None: what ``without_none`` leaves out.

    >>> filled([1, 2], (True, None, True))
    [1, None, 2]
    """
    present = iter(values)
    return [None if entry is None else next(present) for entry in pattern]
