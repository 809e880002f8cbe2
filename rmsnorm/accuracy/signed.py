"""Whether results err to one side: an error of one ulp that always has the same sign adds up in every layer.

Of a row the mean signed error is taken, as its elements share 1 / rho, and rows are independent samples: the standard
error is that of the mean over rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rmsnorm.accuracy.ulps import ulps

Array = npt.NDArray[Any]
_BEYOND: Final = 6  # standard errors, which no mean of unbiased errors reaches
_ROWS: Final = 16  # of fewer, the standard error is not known well enough


class Signed(NamedTuple):
    """In ulps, below 0 towards zero: the mean over rows and its standard error; the largest |error| of an element."""

    mean: float
    error: float
    rows: int
    largest: float

    @property
    def bias(self) -> str:
        """``biased towards zero`` with the numbers, or its opposite; empty where no bias is shown."""
        if self.rows < _ROWS or abs(self.mean) <= _BEYOND * self.error:
            return ""
        side = "towards" if self.mean < 0 else "away from"
        return f"biased {side} zero: the mean signed error is {self.text}"

    @property
    def text(self) -> str:
        return f"{self.mean:+.2g} ulp, standard error {self.error:.1g}, of {self.rows} rows"


class SignedErrors:
    """Gathers the errors of a quantity in a dtype, from call to call."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], list[Array]] = defaultdict(list)
        self._largest: dict[tuple[str, str], float] = defaultdict(float)

    def add(self, quantity: str, got: Array, want: Array) -> None:
        """Results beside the golden's, each row along the last axis; those that are 0 or not finite do not count.

        >>> errors = SignedErrors()
        >>> one, above = np.ones((2, 8), np.float32), np.nextafter(np.ones((2, 8), np.float32), np.float32(2))
        >>> errors.add("y", one, above)
        >>> errors.summary()["y", "float32"].mean
        -1.0
        """
        if (got.shape, got.dtype) != (want.shape, want.dtype) or not want.ndim:
            return
        wide, right = got.astype(np.float64), want.astype(np.float64)
        counts = np.isfinite(wide) & np.isfinite(right) & (right != 0)
        towards = np.where(counts, np.sign(right) * (wide - np.where(counts, right, 0)), 0)
        distances = np.where(counts, ulps(got, want), 0)
        with np.errstate(invalid="ignore"):
            means = np.sum(distances * np.sign(towards), axis=-1) / np.sum(counts, axis=-1)
        key = quantity, want.dtype.name
        self._rows[key].append(means[np.isfinite(means)])
        self._largest[key] = max(self._largest[key], float(distances.max(initial=0)))

    def summary(self) -> dict[tuple[str, str], Signed]:
        """By quantity and dtype."""
        summary = {}
        for key, parts in self._rows.items():
            means = np.concatenate(parts)
            if len(means) > 1:
                error = float(means.std(ddof=1)) / math.sqrt(len(means))
                summary[key] = Signed(float(means.mean()), error, len(means), self._largest[key])
        return summary
