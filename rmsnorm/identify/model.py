"""What a target computes, as a function: a Variant, and what no Variant can say."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from rmsnorm.accuracy.rounding import cast, rounded
from rmsnorm.specification.call import Call, Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Variant
from rmsnorm.targets.bridges import Array

Position = Literal["before", "after"]  # of the normalisation


def _sigmoid(z: Array) -> Array:
    return 1 / (1 + np.exp(-z))


def _gelu(z: Array) -> Array:
    return 0.5 * z * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))


Activation = Callable[[Array], Array]
ACTIVATIONS: Final[dict[str, Activation]] = {
    "identity": lambda z: z,
    "sigmoid": _sigmoid,
    "silu": lambda z: z * _sigmoid(z),
    "gelu": _gelu,
    "gelu (tanh)": lambda z: 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "relu": lambda z: np.maximum(z, 0),
    "tanh": np.tanh,
    "softplus": lambda z: np.logaddexp(z, 0),
}


class Inputs(NamedTuple):
    """Rows, and the parameters and the gate at each of their elements; None where there is none."""

    x: Array
    scale: Array | None = None
    bias: Array | None = None
    gate: Array | None = None

    @property
    def wide(self) -> Inputs:
        """All of them in float64."""
        return Inputs(*(None if array is None else array.astype(np.float64) for array in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Gate:
    """A factor act(gate) of x or of y; the gate is an input, or for ``vector`` a parameter times x.

    The latter is the gated RMSNorm after zero's ReLA attention, which somebody who ports such a model writes again.
    """

    activation: str
    position: Position
    vector: bool = False

    @property
    def function(self) -> str:
        """Its name, as of a variant's ``gate_function``."""
        return f"{self.activation} of gate * x" if self.vector else self.activation

    def __call__(self, x: Array, gate: Array) -> Array:
        return ACTIVATIONS[self.activation](gate * x if self.vector else gate)


class Stages(NamedTuple):
    """Which intermediate results of 1 / rho are rounded to a narrow dtype: of squares, mean, rho and inverse."""

    dtype: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Model:
    """y = h / rho * (o + gain) + bias, with every way to differ from a Variant that identify knows.

    It is written apart from the golden, which has none of these ways and rounds no step of 1 / rho.

    Attributes:
        variant: the choices that a Variant names.
        centred: the mean is subtracted from the numerator too, as LayerNorm does.
        size: what the sum of squares is divided by, None for k.
        eps_of_max: eps was not rescaled with x / max|x|, and is eps * max^2, as in coremltools (its issue 2821).
        gain_first: the gain multiplies x before the statistic is taken.
        factor: a constant factor of y.
        eps_scale: what eps is multiplied by at this width.
        gate: a factor that depends on another input or parameter.
        narrow_eps: eps for 16-bit x, by dtype, where it is another.
        gain_rounded: o + gain is rounded to the dtype of the gain.
    """

    variant: Variant
    centred: bool = False
    size: float | None = None
    eps_of_max: bool = False
    gain_first: bool = False
    factor: float = 1.0
    eps_scale: float = 1.0
    gate: Gate | None = None
    narrow_eps: tuple[tuple[str, float], ...] = ()
    gain_rounded: bool = False

    def eps_for(self, dtype: str) -> float:
        """eps for x of a dtype."""
        return dict(self.narrow_eps).get(dtype, self.variant.eps_for(dtype)) * self.eps_scale

    @property
    def plain(self) -> bool:
        """Whether the variant alone says it all."""
        return self == Model(self.variant)

    def counted(self, n: int) -> Array:
        """Which of n elements enter the statistic."""
        return np.arange(n) < self.variant.counted(n)

    def inverse_rms(self, x: Array, eps: float, stages: Stages | None = None) -> Array:
        """1 / rho of every row, in float64 but for the roundings of ``stages``."""

        def staged(values: Array, stage: str) -> Array:
            return rounded(values, stages.dtype) if stages and stage in stages.names else values

        h = x.astype(np.float64)
        counted = self.counted(h.shape[-1])
        k = int(counted.sum())
        c = np.where(counted, h, 0.0)
        if self.centred:
            c = np.where(counted, h - c.sum(-1, keepdims=True) / k, 0.0)
        size = k if self.size is None else self.size
        q = staged(staged(c * c, "squares").sum(-1, keepdims=True) / size, "mean")
        if self.eps_of_max:
            eps = eps * np.max(np.abs(h), axis=-1, keepdims=True) ** 2
        if self.variant.eps_position == "inside":
            rho = np.sqrt(staged(q + eps, "mean"))
        elif self.variant.eps_position == "outside":
            rho = np.sqrt(q) + eps
        else:
            rho = np.maximum(np.sqrt(q), eps / math.sqrt(size))
        return staged(1 / staged(rho, "rho"), "inverse")

    def call(self, at: Inputs) -> Call:
        """Dtypes of a call of the variant on such rows."""
        specs = [None if p is None else Spec((at.x.shape[-1],), p.dtype.name) for p in (at.scale, at.bias)]
        return resolve("identify", Spec(at.x.shape, at.x.dtype.name), *specs, variant=self.variant)

    def terms(self, at: Inputs) -> Array:
        """Sum of the absolute values of the terms of y: the unit of its rounding error."""
        plain = replace(self, variant=self.variant.replace(rounding="after_scale", result_dtype="x"))
        x, gain, bias, gate = at.wide
        base = np.abs(plain.predict(Inputs(x, gain if self.gain_first else None, None, gate), result="float64"))
        if self.centred:  # x less its mean
            mean = np.abs(x.mean(-1, keepdims=True))
            base = base + 2 * mean * self.inverse_rms(x, self.eps_for(at.x.dtype.name)) * self.factor
        if gain is not None and not self.gain_first:
            base = base * (abs(self.variant.scale_offset) + np.abs(gain))
        after = self.gate is not None and gate is not None and self.gate.position == "after"
        activation: Any = np.abs(self.gate(x, gate)) if after else 1.0  # type: ignore[misc, arg-type]
        return base if bias is None else base + np.abs(bias) * activation

    @np.errstate(all="ignore")
    def predict(self, at: Inputs, stages: Stages | None = None, result: str | None = None) -> Array:
        """y, in the dtype that the variant gives it, or in that of ``result``."""
        call, (h, gain, bias, gate) = self.call(at), at.wide
        activation = None if self.gate is None or gate is None else self.gate(h, gate)
        before = self.gate is not None and self.gate.position == "before"
        if activation is not None and before:
            h = h * activation
        if gain is not None:
            gain = self.variant.scale_offset + (gain if call.gain_dtype is None else rounded(gain, call.gain_dtype))
            gain = rounded(gain, at.scale.dtype.name) if self.gain_rounded and at.scale is not None else gain
            if self.gain_first:
                h, gain = rounded(h * gain, call.x_dtype), None
        inverse = self.inverse_rms(h, self.eps_for(at.x.dtype.name), stages)
        if self.centred:
            counted = self.counted(h.shape[-1])
            h = h - np.where(counted, h, 0.0).sum(-1, keepdims=True) / counted.sum()
        free = self.variant.rounding == "input_dtype" and stages is not None
        norm, product = (call.x_dtype, call.x_dtype) if free else (call.norm_dtype, call.product_dtype)

        def stepped(values: Array, dtype: str | None) -> Array:
            return values if norm is None else rounded(values, dtype or norm)

        y = stepped(h * inverse * self.factor, norm)
        if gain is not None:
            y = stepped(y * stepped(gain, product), product)
        if bias is not None:
            y = stepped(y + bias, product)
        if activation is not None and not before:
            y = y * activation
        return cast(y, result or call.result_dtype)
