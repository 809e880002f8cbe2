"""Is RMSNorm as good as LayerNorm? What the seeds of a run say, with an interval that assumes no distribution.

A seed gives a pair: both norms begin with the same weights and train on the same batches. The differences of the pairs
are independent, so that the number of those below their median has the distribution of heads among tossed coins. With
five seeds the median is below all of them, or above all of them, with a probability of 1/32 each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

LEAST: Final = 5  # seeds
_TAIL: Final = 0.05  # the largest probability with which the median is below the interval; likewise above


def interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """Where the median of such differences is, with at least 90 % confidence. None if these are too few.

    >>> interval([0.1, -0.2, 0.3, 0.0, 0.2])
    (-0.2, 0.3)
    >>> interval([0.1, 0.2, 0.3, 0.4])
    """
    count, left, tail = len(differences), 0, 0.0
    while (tail := tail + math.comb(count, left) / 2**count) <= _TAIL:
        left += 1
    ordered = sorted(differences)
    return (ordered[left - 1], ordered[-left]) if left else None


def is_not_worse(differences: Sequence[float], margin: float) -> str:
    """Whether the median difference is not below -margin: yes, no, or not decided.

    >>> is_not_worse([0.0, 0.0, -0.01, 0.01, 0.0], 0.02), is_not_worse([-0.1] * 5, 0.02), is_not_worse([0.0], 0.02)
    ('yes', 'no', 'not decided')
    """
    own = interval(differences)
    if own is None or not all(map(math.isfinite, own)):
        return "not decided"
    low, high = own
    return "yes" if low >= -margin else ("no" if high < -margin else "not decided")
