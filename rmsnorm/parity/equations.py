"""RMSNorm in plain NumPy and float64, from the equations: the golden in other words, one line for each step.

It is written apart from the golden because most mistakes lie between two steps, which the golden does not open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from rmsnorm.accuracy.rounding import cast, rounded
from rmsnorm.parity.cases import Array, Data, Outcome
from rmsnorm.specification import dtypes
from rmsnorm.specification.variants import CLAMPED

Change = Callable[["Steps", Any], Any]  # gets the steps and the right value of one of them, and returns another value


class Steps:
    """The steps of one call: each is an attribute, computed once by its equation, and changed where that is asked."""

    def __init__(self, data: Data, changes: Mapping[str, Change]) -> None:
        self.data, self.call, self.variant, self.changes = data, data.call, data.variant, changes

    def __getattr__(self, name: str) -> Any:
        if name not in EQUATIONS:
            raise AttributeError(name)
        value = EQUATIONS[name](self)
        vars(self)[name] = self.changes[name](self, value) if name in self.changes else value
        return vars(self)[name]

    def wide(self, name: str) -> Array:
        """An argument of the call in float64."""
        return np.asarray(getattr(self.data, name).astype(np.float64))

    def parameter(self, name: str, without: float) -> Any:
        """The gain or the bias, in float64 and along its axes of x, and a number where there is none."""
        return without if getattr(self.data, name) is None else self.along(self.wide(name))

    def along(self, array: Array) -> Array:
        return array.reshape(self.call.feature_shape)

    def inner(self, array: Array) -> Array:
        """The sum of each row."""
        return np.asarray(np.sum(array, axis=self.axes, keepdims=True))

    def mean(self, array: Array) -> Array:
        """The sum of what counts in each row, over the size of the statistic."""
        return np.asarray(self.inner(np.where(self.counted, array, 0.0)) / self.size)


EQUATIONS: Final[dict[str, Callable[[Steps], Any]]] = {
    # Which elements of a row count: the first k of n, without those under the mask. A row where none does gives 0.
    "x": lambda s: s.data.x,
    "axes": lambda s: s.call.axes,
    "n": lambda s: math.prod(s.x.shape[axis] for axis in s.axes),
    "k": lambda s: s.variant.counted(s.n),
    "order": lambda s: np.arange(s.n).reshape([size if i in s.axes else 1 for i, size in enumerate(s.x.shape)]),
    "first": lambda s: np.broadcast_to(s.order < s.k, s.x.shape),
    "mask": lambda s: np.broadcast_to(True if s.data.mask is None else s.data.mask, s.x.shape),
    "counted": lambda s: s.first & s.mask,
    "shown": lambda s: s.counted.any(axis=s.axes, keepdims=True),
    # The gate: f(z) is z sigmoid(z) or sigmoid(z), and multiplies x before the norm or y after it.
    "gate": lambda s: s.data.gate is not None,
    "is_before": lambda s: s.call.is_gated_before,
    "function": lambda s: s.variant.gate_function,
    "z": lambda s: s.wide("gate"),
    "sigmoid": lambda s: 1 / (1 + np.exp(-s.z)),
    "f": lambda s: 1.0 if not s.gate else s.z * s.sigmoid if s.function == "silu" else s.sigmoid,
    "rest": lambda s: 1 / (1 + np.exp(s.z)),
    "slope": lambda s: s.sigmoid * (1 + s.z * s.rest if s.function == "silu" else s.rest),
    "on_x": lambda s: s.f if s.is_before else 1.0,
    "on_y": lambda s: 1.0 if s.is_before else s.f,
    # h: x, with the residual, and the gate before.
    "extra": lambda s: -0.0 if s.data.residual is None else s.wide("residual"),
    "sum": lambda s: s.x.astype(np.float64) + s.extra,
    "is_rounded": lambda s: s.data.residual is not None and s.variant.residual_rounding == "before",
    "input": lambda s: rounded(s.sum, s.call.sum_dtype) if s.is_rounded else s.sum,
    "h": lambda s: s.input * s.on_x,
    # rho, from the mean square of what counts; s is the derivative's.
    "size": lambda s: np.maximum(s.inner(s.counted), 1).astype(np.float64),
    "c": lambda s: s.h,
    "squares": lambda s: s.c * s.c,
    "q": lambda s: s.mean(s.squares),
    "eps": lambda s: s.call.eps,
    "position": lambda s: s.variant.eps_position,
    "root": lambda s: np.sqrt(s.q),
    "floor": lambda s: s.eps / np.sqrt(s.size),
    "rho": lambda s: {
        "inside": np.sqrt(s.q + s.eps), "outside": s.root + s.eps, "clamp": np.maximum(s.root, s.floor)}[s.position],
    "is_clamped": lambda s: (s.position == "clamp") & (s.root < s.floor * CLAMPED),
    "s": lambda s: s.rho if s.position == "inside" else np.where(s.is_clamped, 0.0, s.root),
    "inverse": lambda s: np.where(s.shown, 1 / s.rho, 0.0),
    "normalised": lambda s: np.where(s.shown, s.h * s.inverse, 0.0),
    # y: gain, bias and the gate after. ``norm`` is the dtype to which h / rho is rounded, None where only y is.
    "gain": lambda s: (
        s.parameter("scale", 1.0)
        if s.call.gain_dtype is None
        else rounded(s.parameter("scale", 1.0), s.call.gain_dtype)
    ),
    "bias": lambda s: s.parameter("bias", -0.0),
    "offset": lambda s: -0.0 if s.data.scale is None else s.call.offset,
    "norm": lambda s: s.call.norm_dtype,
    "steps_to": lambda s: s.call.product_dtype,
    "factor": lambda s: s.offset + s.gain if s.norm is None else rounded(np.asarray(s.offset + s.gain), s.steps_to),
    "gained": lambda s: (
        s.normalised * s.factor if s.norm is None else rounded(rounded(s.normalised, s.norm) * s.factor, s.steps_to)
    ),
    "biased": lambda s: s.gained + s.bias if s.norm is None else rounded(s.gained + s.bias, s.steps_to),
    "y": lambda s: np.where(s.shown, s.biased * s.on_y, 0.0),
    "result": lambda s: s.call.result_dtype,
    # Gradients, of y = (h / rho (o + g) + b) f(z); dh = u / rho - R h / rho, where R is the same for all u of a row.
    "live": lambda s: s.mask & s.shown,
    "v": lambda s: np.where(s.live, s.wide("dy") * s.on_y, 0.0),
    "inside": lambda s: np.where(s.mask, s.normalised, 0.0),
    "u": lambda s: s.v * (s.offset + s.gain),
    "direction": lambda s: np.where(
        s.counted & np.isfinite(s.s) & (s.s != 0), s.c * s.inverse / np.where(s.s == 0, 1.0, s.s), 0.0),
    "transposed": lambda s: s.u * s.inverse - s.direction * s.inner(s.u * s.inside) / s.size,
    "dh": lambda s: np.where(s.live, s.transposed, 0.0),
    "dx_of_y": lambda s: np.where(s.live, s.dh * s.on_x, 0.0),
    "dx": lambda s: s.dx_of_y if s.data.dh is None else s.dx_of_y + s.wide("dh"),
    "df": lambda s: s.dh * s.input if s.call.is_gated_before else s.wide("dy") * s.biased,
    "dgate": lambda s: np.where(s.live, s.df * s.slope, 0.0),
    "terms": lambda s: s.v * s.inside,
    "dscale": lambda s: np.sum(s.terms, axis=s.call.shared_axes),
    "dbias": lambda s: np.sum(s.v, axis=s.call.shared_axes),
    # The derivative along t, of the gain and of the bias.
    "tangents": lambda s: [0.0 if t is None else t.astype(np.float64) for t in s.data.tangents],
    "t": lambda s: np.where(s.mask, s.tangents[0] * s.on_x, 0.0),
    "product": lambda s: s.t * s.inverse - s.inside * s.inner(s.direction * s.t) / s.size,
    "of_parameters": lambda s: [t if np.ndim(t) == 0 else s.along(t) for t in s.tangents[1:]],
    "moved": lambda s: s.product * (s.offset + s.gain) + s.inside * s.of_parameters[0] + s.of_parameters[1],
    "jvp": lambda s: np.where(s.live, s.moved * s.on_y, 0.0),
    "touched": lambda s: (),
}  # fmt: skip


def candidate(data: Data, changes: Mapping[str, Change] | None = None) -> Outcome:
    """RMSNorm and its gradients, where some steps are changed."""
    with np.errstate(all="ignore"):
        s = Steps(data, changes or {})
        results = {
            "y": cast(s.y, s.result),
            "inverse_rms": cast(s.inverse, s.call.inverse_rms_dtype),
            "dx": cast(s.dx, data.x.dtype.name),
            "jvp": cast(s.jvp, s.call.result_dtype),
        }
        for name, step in {"scale": "dscale", "bias": "dbias", "residual": "dx", "gate": "dgate"}.items():
            if (argument := getattr(data, name)) is not None:
                results[f"d{name}"] = cast(getattr(s, step), argument.dtype.name)
        return Outcome({name: [value] for name, value in results.items()}, s.touched)


def lost(data: Data) -> Array:
    """What a float32 sum of the squares of each row loses beside an outlier, one after the other, as a share of it."""
    s = Steps(data, {})
    with np.errstate(all="ignore"):
        squares = np.where(s.counted, s.squares, 0.0)
        total = s.inner(squares)
        spacing = np.exp2(np.floor(np.log2(total))) * dtypes.epsilon("float32")
        share = np.abs(s.inner(np.rint(squares / spacing) * spacing - squares)) / total
    return np.where(np.isfinite(share), share, 0.0)


def added_in_sequence(data: Data) -> Array:
    """By how much a float32 sum of the squares of each row errs at most, one after the other, as a share of it.

    Each addition errs by at most the unit roundoff of the sum so far. Equal squares are all rounded alike, so that
    nothing less holds for them.
    """
    s = Steps(data, {})
    last = tuple(range(-len(s.axes), 0))
    with np.errstate(all="ignore"):
        squares = np.moveaxis(np.where(s.counted, s.squares, 0.0), s.axes, last)
        partial = np.cumsum(squares.reshape(*squares.shape[: -len(last)], s.n), axis=-1)
        share = partial[..., 1:].sum(-1) * dtypes.unit_roundoff("float32") / partial[..., -1]
    return np.expand_dims(np.where(np.isfinite(share), share, 0.0), s.axes)


def ends(data: Data, want: Array, error: Array, away: Array) -> tuple[Array, Array]:
    """The least and the greatest y that is right, where 1/rho may err by ``error``, relative, and y by ``away``.

    Each rounding that the variant names is made at both ends; ``want``, the golden's y, is between them. Products and
    sums in 16 bits are such roundings, and so exact: only what is computed in more bits errs by ``away``.
    """
    call = data.call
    is_named = call.norm_dtype is not None and call.gate_dtype is None and call.product_dtype in dtypes.HALF
    factors = (1 - error, 1 + error) if call.norm_dtype is not None else (np.ones(()),)

    def times(factor: Array) -> Change:
        return lambda s, inverse: inverse * factor

    with np.errstate(all="ignore"):
        y = [Steps(data, {"inverse": times(factor)}).y for factor in factors]
        more = 0.0 if is_named else away
        low, high = np.fmin(y[0], y[-1]) - more, np.fmax(y[0], y[-1]) + more
        # In float64 a real number may lie on the other side of a tie than in the golden.
        low, high = (np.where(np.isnan(want), want, cast(end, want.dtype.name)) for end in (low, high))
        return np.fmin(low, want).astype(want.dtype), np.fmax(high, want).astype(want.dtype)
