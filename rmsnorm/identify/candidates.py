"""What a target may compute, and how much of its y is what that gives: the equations, with mistakes as changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from rmsnorm.accuracy.bounds import error_of
from rmsnorm.accuracy.rounding import cast
from rmsnorm.identify.asking import Answer, Probe
from rmsnorm.identify.mistakes import Mistake
from rmsnorm.parity.cases import Case, Data, call_on
from rmsnorm.parity.equations import Change, Steps
from rmsnorm.specification import dtypes
from rmsnorm.specification.variants import Variant
from rmsnorm.targets.bridges import Array

ANY: Final = "any"  # in the place of a dtype of y that follows no rule
HOLDS: Final = 0.9995  # of y: what cancels, or underflows, may be elsewhere
HOLDS_FREELY: Final = 0.99  # where every operation rounds, in an order that is not known


def _sigmoid(z: Array) -> Array:
    return 1 / (1 + np.exp(-z))


def _gelu(z: Array) -> Array:
    return 0.5 * z * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))


ACTIVATIONS: Final[Mapping[str, Callable[[Array], Array]]] = {
    "silu": lambda z: z * _sigmoid(z),
    "sigmoid": _sigmoid,
    "identity": lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "tanh": np.tanh,
    "gelu": _gelu,
    "gelu (tanh)": lambda z: 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "softplus": lambda z: np.logaddexp(z, 0),
}
OF_VARIANTS: Final = ("silu", "sigmoid")  # what ``gate_function`` may be


@dataclass(frozen=True)
class Candidate:
    """A variant, and what no variant says.

    Attributes:
        variant: its fields.
        mistakes: what else it does, in every dtype.
        of_dtype: what it does to x of one dtype.
        activation: the function of its gate, None without one.
        vector: whether the gate is a parameter that multiplies x.
        result: the dtype of y where that is the same for every x.
    """

    variant: Variant
    mistakes: tuple[Mistake, ...] = ()
    of_dtype: tuple[tuple[str, Mistake], ...] = ()
    activation: str | None = None
    vector: bool = False
    result: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the variant says it all."""
        gated = self.activation in (None, *OF_VARIANTS) and not self.vector
        return gated and not (self.mistakes or self.of_dtype or self.result)

    def of(self, **fields: Any) -> Candidate:
        """The same with other fields of the variant."""
        return replace(self, variant=self.variant.replace(**fields))

    def but(self, *mistakes: Mistake) -> Candidate:
        """The same with further mistakes."""
        return replace(self, mistakes=(*self.mistakes, *mistakes))

    def data(self, probe: Probe, arrays: Mapping[str, Array], dy: Array | None = None) -> Data:
        """The arrays of a call as the equations take them."""
        passed = dict(arrays)
        if (vector := passed.pop("gate_vector", None)) is not None:
            sizes = [size if axis in probe.feature_axes else 1 for axis, size in enumerate(passed["x"].shape)]
            wide = "float64" if "float64" in (vector.dtype, passed["x"].dtype) else "float32"
            passed["gate"] = (vector.astype(np.float64).reshape(sizes) * passed["x"]).astype(wide)
        if self.activation is None:
            passed.pop("gate", None)
        return data_of(self.variant, probe.axes, probe.feature_axes, passed, dy)

    def changes(self, dtype: str) -> dict[str, Change]:
        """The changes of the equations for x of a dtype: where two change one step, the later one changes the other."""
        own = [*self.mistakes, *(mistake for name, mistake in self.of_dtype if name == dtype)]
        changes: dict[str, Change] = {}
        if self.activation not in (None, *OF_VARIANTS):
            f = ACTIVATIONS[str(self.activation)]
            changes |= {"f": lambda s, _: f(s.z), "slope": lambda s, _: (f(s.z + 1e-5) - f(s.z - 1e-5)) / 2e-5}
        for mistake in own:
            for step, change in mistake.changes.items():
                changes[step] = after(changes[step], change) if step in changes else change
        return changes

    def holds(self, probe: Probe, answers: Iterable[Answer], *, exact: bool = True) -> bool:
        """Whether it gives y of all of these answers; ``exact``: in their dtypes, too."""
        least = HOLDS_FREELY if self.variant.rounding == "input_dtype" else HOLDS
        return all(self.score(probe, answer, exact=exact) >= least for answer in answers)

    def score(self, probe: Probe, answer: Answer, *, exact: bool = True, where: Array | None = None) -> float:
        """The share of y that is what this candidate gives, within what arithmetic may change; as of ``alike``.

        ``exact``: a y of another dtype is wrong; ``where``: the elements that count, None for all.
        """
        if (
            exact
            and self.result != ANY
            and answer.y.dtype.name != (self.result or self.data(probe, answer.arrays).call.result_dtype)
        ):
            return 0.0
        alike = self.alike(probe, answer)
        return float(np.mean(alike if where is None else alike[where]))

    def alike(self, probe: Probe, answer: Answer) -> Array:
        """Which elements of y are what this candidate gives."""
        return self.gives(self.data(probe, answer.arrays), answer.y)

    def gives(self, data: Data, y: Array) -> Array:
        """Which elements of y are what this candidate gives in a call; float64 may go through float32."""
        changes, error = self.changes(data.x.dtype.name), error_of("y", data.call)
        if "float64" in (data.call.x_dtype, y.dtype.name):
            error *= dtypes.unit_roundoff("float32") / dtypes.unit_roundoff("float64")
        with np.errstate(all="ignore"):
            low, high = self._ends(data, changes, error, y.dtype.name)
            got = y.astype(np.float64)
            return np.asarray(((low <= got) & (got <= high)) | (np.isnan(low + high) & np.isnan(got)))

    def _ends(self, data: Data, changes: Mapping[str, Change], error: float, dtype: str) -> tuple[Array, Array]:
        """The least and the greatest y where 1 / rho errs by a share, rounded to a dtype."""
        call = data.call
        ends = [Steps(data, {**changes, "inverse": times(changes.get("inverse"), 1 + e)}) for e in (-error, error)]
        last = ends[1]
        terms = np.abs(last.normalised) * (np.abs(last.offset) + np.abs(last.gain)) + np.abs(last.bias)
        if "h" in changes or "x" in changes:  # x less its mean, for example
            terms = terms + 2 * np.abs(last.sum * last.inverse)
        terms = np.abs(terms * last.on_y)
        is_named = call.norm_dtype is not None and call.gate_dtype is None and call.product_dtype in dtypes.HALF
        away = 0.0 if is_named else 2 * error * terms * (1 + np.abs(last.z) if self.vector else 1)
        away, shape = np.where(np.isfinite(away), away, 0.0), data.x.shape
        low, high = np.fmin(ends[0].y, last.y) - away, np.fmax(ends[0].y, last.y) + away
        low, high = np.broadcast_to(low, shape), np.broadcast_to(high, shape)
        if dtype in dtypes.HALF:
            return cast(low, dtype).astype(np.float64), cast(high, dtype).astype(np.float64)
        least = dtypes.smallest_subnormal(dtype) if call.gate_dtype is None else dtypes.smallest_normal(dtype)
        room = 4 * dtypes.unit_roundoff(dtype) * terms + least  # exponentials flush what is smaller to 0
        return low - room, high + room


def of_call(data: Data) -> Candidate:
    """What a call asks for, without mistakes."""
    return Candidate(data.variant, activation=None if data.gate is None else data.variant.gate_function)


def after(first: Change, then: Change) -> Change:
    """Two changes of one step, one after the other."""
    return lambda s, value: then(s, first(s, value))


def times(change: Change | None, factor: float) -> Change:
    """A change, or none, and then a product."""
    return lambda s, value: (change(s, value) if change else value) * factor


def data_of(
    variant: Variant, axes: Sequence[int], features: Sequence[int], arrays: Mapping[str, Array], dy: Array | None = None
) -> Data:
    """The arrays of a call, as the judge and the equations take them."""
    call = call_on("identify", arrays, {"variant": variant, "axis": axes, "feature_axis": features})
    x, scale, bias = (arrays.get(name) for name in ("x", "scale", "bias"))
    assert x is not None  # noqa: S101  (every call has one)
    still = None if scale is None else np.zeros_like(scale), None if bias is None else np.zeros_like(bias)
    return Data(
        Case("identify", x.shape), variant, call, x, scale, bias, np.zeros_like(x) if dy is None else dy, None,
        (np.zeros_like(x), *still), arrays.get("mask"),
        arrays.get("residual"), arrays.get("gate"), tuple(axes), tuple(features), None,
    )  # fmt: skip
