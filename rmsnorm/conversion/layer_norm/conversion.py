"""What a conversion did, and how it is held to the model before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

# Two float64 computations of the same outputs differ by their roundings, 1e-16 each: this leaves six digits to depth
# and to LayerNorms that take a large mean away. A weight that is centred wrongly moves outputs by far more.
BOUND: Final = 1e-10
BOUND_OF_FLOAT32: Final = 1e-4  # likewise three digits, where a framework's RMSNorm is float32 inside


class Layer(NamedTuple):
    """What became of one LayerNorm.

    Attributes:
        name: where it is in the model.
        kind: its class.
        converted: whether it is RMSNorm now.
        why: the weights that were centred for it, or why it was left alone.
    """

    name: str
    kind: str
    converted: bool
    why: str

    def __str__(self) -> str:
        became = "now RMSNorm" if self.converted else "left"
        return f"{self.name} ({self.kind}): {became}; {self.why}"


@dataclass(frozen=True)
class Conversion:
    """A model with RMSNorm in place of LayerNorm, and what was done.

    Attributes:
        model: the new one, which shares nothing with the old; what it computes in evaluation is the same.
        layers: every LayerNorm.
        centred: the weights whose mean over the features was taken away.
        notes: what else is different, in sentences.
        exact: greatest difference of an output on the sample inputs when everything is float64 (float32 in Keras on
            another backend than TensorFlow), relative to the greatest element of that output.
        error: likewise in the dtypes of the model, in which the weights were rounded anew.
    """

    model: Any
    layers: tuple[Layer, ...]
    centred: tuple[str, ...]
    notes: tuple[str, ...]
    exact: float
    error: float

    def __str__(self) -> str:
        differences = f"outputs differ by {self.error:.1e} of the greatest, in wide arithmetic by {self.exact:.1e}"
        return "\n".join([*map(str, self.layers), *self.notes, differences])


def difference(before: Sequence[Any], after: Sequence[Any]) -> float:
    """The greatest difference, relative to the greatest element of each array; NaN and infinities are to be equal."""
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


def proved(exact: float, bound: float = BOUND) -> float:
    """Let a conversion through if the outputs are the same up to rounding."""
    if not exact <= bound:
        raise ValueError(
            f"to_rms_norm: the outputs differ by {exact:.1e} of the greatest, expected at most {bound:.0e}; the model "
            "does what its graph does not show, or another thing in every run"
        )
    return exact


def some(names: Iterable[str], shown: int = 3) -> str:
    """The first names, and how many more there are."""
    held = list(names)
    more = f" and {len(held) - shown} more" if len(held) > shown else ""
    return ", ".join(held[:shown]) + more
