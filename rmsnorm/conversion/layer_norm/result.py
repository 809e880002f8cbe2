"""The result of a conversion, and the comparison of its outputs with those of the model before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rmsnorm.conversion.replacement.report import Replacement


@dataclass(frozen=True)
class Conversion:
    """A model with RMSNorm in place of LayerNorm, and what was changed.

    Attributes:
        model: the new model. It shares nothing with the old one and computes the same in evaluation mode.
        layers: one entry for every LayerNorm: its variant, which is None if it stays, and why.
        centred: names of the weights from which their mean over the features was subtracted.
        notes: sentences about everything else that differs.
        exact: greatest difference of an output on the sample inputs in float64, relative to the element or to the
            median of its array where that is more; None where no LayerNorm was replaced and nothing was compared.
        error: the same in the model's own dtypes, to which the centred weights were rounded once more.
        unreached: names of the parameters on which no output of the sample depends. They stay as they are, so a branch
            that the sample does not take, as a rare expert, may differ where other inputs take it.
    """

    model: Any
    layers: tuple[Replacement, ...]
    centred: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    exact: float | None = None
    error: float | None = None
    unreached: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [*map(str, self.layers), *self.notes]
        if self.centred:
            lines.append(f"centred {first_names(self.centred)}")
        if self.unreached:
            lines.append(f"{first_names(self.unreached)}: not reached by the sample, so not changed")
        last = "nothing was replaced, and so no outputs were compared"
        if self.exact is not None:
            last = f"outputs differ by {self.error:.1e}, in float64 by {self.exact:.1e}"
        return "\n".join([*lines, last])


def difference(before: Sequence[Any], after: Sequence[Any]) -> float:
    """The greatest difference; NaN, infinities and what is no floating-point number must be equal.

    It is relative to the element, or to the median of its array where that is more: the greatest element may be a
    number that masks, such as -1e9.
    """
    if [(a.shape, a.dtype) for a in before] != [(b.shape, b.dtype) for b in after]:
        return np.inf
    return max((_difference(a, b) for a, b in zip(before, after, strict=True)), default=0.0)


def _difference(before: np.ndarray, after: np.ndarray) -> float:
    if before.dtype.kind not in "fcV":
        return 0.0 if np.array_equal(before, after) else np.inf
    if before.dtype.kind != "c":
        before, after = before.astype(np.float64), after.astype(np.float64)  # also of bfloat16
    finite = np.isfinite(before) & np.isfinite(after)
    if not np.array_equal(before[~finite], after[~finite], equal_nan=True):
        return np.inf
    before, after = before[finite], after[finite]
    sizes = np.maximum(np.abs(before), median(before))
    return float((np.abs(before - after) / np.where(sizes > 0, sizes, 1.0)).max(initial=0.0))


def median(array: np.ndarray) -> float:
    """That of the sizes of the finite elements that are not 0; 0 where there are none."""
    sizes = np.abs(array[np.isfinite(array) & (array != 0)])
    return float(np.median(sizes)) if sizes.size else 0.0


def first_names(names: Iterable[str], shown: int = 3) -> str:
    """The first names, and the number of the others."""
    listed = list(names)
    more = f" and {len(listed) - shown} more" if len(listed) > shown else ""
    return ", ".join(listed[:shown]) + more
