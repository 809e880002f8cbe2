"""Gradients by the equations in float64: those of each row, and the sums over rows, which may be added up in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from rmsnorm.accuracy.bounds import USES_OF_INVERSE, bound
from rmsnorm.accuracy.rounding import cast
from rmsnorm.accuracy.terms import terms_of_dscale
from rmsnorm.parity.cases import Array, Data
from rmsnorm.parity.equations import Steps
from rmsnorm.parity.judge import Expected, further_error, of_terms
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Call

OF_ROWS: Final = {"dx": "dx", "dresidual": "dx", "dgate": "dgate"}  # and the steps of the equations
_TERMS: Final = {"dscale": "terms", "dbias": "v"}


def values_of(steps: Steps, names: Sequence[str]) -> dict[str, Array]:
    """The gradients of each row by their names, rounded to their dtypes."""
    return {name: cast(getattr(steps, OF_ROWS[name]), _dtype(steps.data, name)) for name in names}


@dataclass
class Sums:
    """The sums over the rows of a call, dscale and dbias, to which each part of the rows is added.

    Attributes:
        call: the whole one.
        names: of the quantities.
        in_sequence: whether a program may add one term after the other.
        value, size: the sums of the terms and of their sizes, by the name of the quantity.
        partial, lost: in sequence, the sum so far, and by how much a float32 sum errs at most that adds the terms in
            their order: each addition errs by at most the unit roundoff of the sum so far. Equal terms are rounded
            alike, so that nothing less holds for them.
        further: as of ``further_error``, the largest of all rows.
    """

    call: Call
    names: Sequence[str]
    in_sequence: bool
    value: dict[str, Any] = field(default_factory=dict)
    size: dict[str, Any] = field(default_factory=dict)
    partial: dict[str, Any] = field(default_factory=dict)
    lost: dict[str, Any] = field(default_factory=dict)
    further: float = 0.0

    def add(self, steps: Steps, weights: Any = 1.0, order: Any = slice(None)) -> None:
        """Add some rows, each as often as its weight says; ``order``: in which they lie in a sequence."""
        axes = steps.call.shared_axes
        least = 0.0 if self.call.norm_dtype is None else dtypes.smallest_normal(self.call.norm_dtype)
        for name in self.names:
            terms = getattr(steps, _TERMS[name])
            sizes = np.abs(terms) if name == "dbias" else terms_of_dscale(np.abs(terms), np.abs(steps.v), least)
            self.value[name] = self.value.get(name, 0.0) + np.sum(weights * terms, axis=axes)
            self.size[name] = self.size.get(name, 0.0) + np.sum(weights * sizes, axis=axes)
            if self.in_sequence:
                self._follow(name, terms[order], axes)
        if self.names:
            of_rows = further_error(steps.data, automatic=True, in_sequence=self.in_sequence)
            self.further = max(self.further, float(of_rows.max(initial=0.0)))

    def _follow(self, name: str, terms: Array, axes: tuple[int, ...]) -> None:
        rows = np.moveaxis(terms, axes, range(len(axes)))
        rows = rows.reshape(-1, *rows.shape[len(axes) :])
        if len(rows):
            partial = self.partial.get(name, 0.0) + np.cumsum(rows, axis=0)
            self.lost[name] = self.lost.get(name, 0.0) + np.sum(np.abs(partial), axis=0)
            self.partial[name] = partial[-1]

    def expected(self, name: str, data: Data) -> Expected:
        """What is expected of a sum; ``data``: some of the rows, with the parameters."""
        dtype = _dtype(data, name)
        limit = bound(name, self.call, dtype, residual=data.residual is not None, automatic=True)
        lost = self.lost.get(name, 0.0) * dtypes.unit_roundoff("float32")  # 0 where terms are not in sequence
        further = self.further * USES_OF_INVERSE[name]
        return of_terms(cast(self.value[name], dtype), self.size[name], limit, further, lost)


def _dtype(data: Data, name: str) -> str:
    return str(getattr(data, name.removeprefix("d")).dtype.name)
