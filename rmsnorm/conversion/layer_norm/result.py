"""The result of a conversion, and the comparison of its outputs with those of the model before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rmsnorm.accuracy.bounds import CONVERSION
from rmsnorm.specification import errors


class Layer(NamedTuple):
    """What happened to one LayerNorm.

    Attributes:
        name: its path in the model.
        kind: the name of its class.
        converted: whether it is RMSNorm now.
        why: its eps, or the reason why it stays a LayerNorm.
    """

    name: str
    kind: str
    converted: bool
    why: str

    def __str__(self) -> str:
        result = "now RMSNorm" if self.converted else "left"
        return f"{self.name} ({self.kind}): {result}; {self.why}"


@dataclass(frozen=True)
class Conversion:
    """A model with RMSNorm in place of LayerNorm, and what was changed.

    Attributes:
        model: the new model. It shares nothing with the old one and computes the same in evaluation mode.
        layers: one entry for every LayerNorm.
        centred: names of the weights from which their mean over the features was subtracted.
        notes: sentences about everything else that differs.
        exact: greatest difference of an output on the sample inputs in ``dtype``, relative to the greatest element of
            that output; None where no LayerNorm was replaced, and so nothing was compared.
        error: the same in the model's own dtypes, in which the centred weights were rounded again.
        dtype: float64; float32 where memory has no room for six copies of all parameters in float64.
        unreached: names of the parameters on which no output of the sample depends. They stay as they are, so a branch
            that the sample does not take, as a rare expert, may differ where other inputs take it.
    """

    model: Any
    layers: tuple[Layer, ...]
    centred: tuple[str, ...]
    notes: tuple[str, ...]
    exact: float | None
    error: float | None
    dtype: str = "float64"
    unreached: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [*map(str, self.layers), *self.notes]
        if self.centred:
            lines.append(f"centred {first_names(self.centred)}")
        if self.unreached:
            lines.append(f"{first_names(self.unreached)}: not reached by the sample, so not changed")
        if self.exact is None or self.error is None:
            return "\n".join([*lines, "nothing was replaced, and so no outputs were compared"])
        error = f"outputs differ by {self.error:.1e} of the greatest element, in {self.dtype} by {self.exact:.1e}"
        return "\n".join([*lines, error])


def difference(before: Sequence[Any], after: Sequence[Any]) -> float:
    """The greatest difference, relative to the greatest element of each array. NaN and infinities must be equal."""
    if [(a.shape, a.dtype) for a in before] != [(b.shape, b.dtype) for b in after]:
        return np.inf
    return max((_difference(a, b) for a, b in zip(before, after, strict=True)), default=0.0)


def _difference(before: np.ndarray, after: np.ndarray) -> float:
    if not np.issubdtype(before.dtype, np.inexact) and before.dtype.kind != "V":
        return 0.0 if np.array_equal(before, after) else np.inf
    before, after = before.astype(np.float64), after.astype(np.float64)
    finite = np.isfinite(before) & np.isfinite(after)
    if not np.array_equal(before[~finite], after[~finite], equal_nan=True):
        return np.inf
    before, after = before[finite], after[finite]
    return float(np.abs(before - after).max(initial=0.0) / (np.abs(before).max(initial=0.0) or 1.0))


def require_exact(exact: float, bound: float = CONVERSION) -> float:
    """Returns the difference if it is within rounding; raises ValueError otherwise."""
    if not exact <= bound:
        raise errors.InputValueError(
            f"to_rms_norm: the outputs differ by {exact:.1e} of the greatest element, expected at most {bound:.0e}; "
            "the model holds a weight that is no parameter of a module, or it is random in evaluation mode"
        )
    return exact


def first_names(names: Iterable[str], shown: int = 3) -> str:
    """The first names, and the number of the others."""
    listed = list(names)
    more = f" and {len(listed) - shown} more" if len(listed) > shown else ""
    return ", ".join(listed[:shown]) + more
