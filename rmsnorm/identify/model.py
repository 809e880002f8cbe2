"""What a target computes, as a function: a Variant, and what no Variant can say."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from rmsnorm.accuracy.rounding import cast, rounded
from rmsnorm.call import Call, Spec, resolve
from rmsnorm.targets.bridges import Array
from rmsnorm.variants import Variant

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


@dataclass(frozen=True)
class Gate:
    """A factor act(gate) of x or of y; the gate is an input, or for ``vector`` a parameter times x.

    Beyond ``low`` and ``high`` the gate is cut off.
    """

    activation: str
    position: Position
    vector: bool = False
    low: float = -math.inf
    high: float = math.inf

    def __call__(self, x: Array, gate: Array) -> Array:
        return ACTIVATIONS[self.activation](np.clip(gate * x if self.vector else gate, self.low, self.high))


@dataclass(frozen=True)
class Stages:
    """Which intermediate results of 1 / rho are rounded to a narrow dtype."""

    dtype: str
    squares: bool = False
    mean: bool = False
    rho: bool = False
    inverse: bool = False

    @property
    def count(self) -> int:
        return self.squares + self.mean + self.rho + self.inverse


@dataclass(frozen=True)
class Model:
    """y = h / rho * (o + gain) + bias, with every way to differ from a Variant that identify knows.

    Attributes:
        variant: the choices that a Variant names.
        centred: the mean is subtracted from the numerator too, as LayerNorm does.
        size: what the sum of squares is divided by, None for k.
        last: the counted elements are the last k.
        eps_of_max: eps was not rescaled with x / max|x|, and is eps * max^2.
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
    last: bool = False
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
        order = np.arange(n)[::-1] if self.last else np.arange(n)
        return order < self.variant.counted(n)

    def inverse_rms(self, x: Array, eps: float, stages: Stages | None = None) -> Array:
        """1 / rho of every row, in float64 but for the roundings of ``stages``."""
        h = x.astype(np.float64)
        counted = self.counted(h.shape[-1])
        k = int(counted.sum())
        c = np.where(counted, h, 0.0)
        if self.centred or self.variant.statistic == "variance":
            c = np.where(counted, h - c.sum(-1, keepdims=True) / k, 0.0)
        squares = rounded(c * c, stages.dtype) if stages and stages.squares else c * c
        size = k if self.size is None else self.size
        q = squares.sum(-1, keepdims=True) / size
        if stages and stages.mean:
            q = rounded(q, stages.dtype)
        if self.eps_of_max:
            eps = eps * np.max(np.abs(h), axis=-1, keepdims=True) ** 2
        if self.variant.eps_position == "inside":
            q = q + eps
            rho = np.sqrt(rounded(q, stages.dtype) if stages and stages.mean else q)
        elif self.variant.eps_position == "outside":
            rho = np.sqrt(q) + eps
        else:
            rho = np.maximum(np.sqrt(q), eps / math.sqrt(size))
        if stages and stages.rho:
            rho = rounded(rho, stages.dtype)
        return rounded(1 / rho, stages.dtype) if stages and stages.inverse else 1 / rho

    def call(self, x: Array, gain: Array | None, bias: Array | None) -> Call:
        """Dtypes of a call of the variant on such rows."""
        specs = [None if p is None else Spec((x.shape[-1],), p.dtype.name) for p in (gain, bias)]
        return resolve("identify", Spec(x.shape, x.dtype.name), *specs, variant=self.variant)

    def predict(
        self,
        x: Array,
        gain: Array | None = None,
        bias: Array | None = None,
        gate: Array | None = None,
        stages: Stages | None = None,
        result: str | None = None,
    ) -> Array:
        """y of rows, for the parameters at each of their elements, in the dtype that the variant gives it."""
        with np.errstate(all="ignore"):
            return self._predict(x, gain, bias, gate, stages, result)

    def terms(self, x: Array, gain: Array | None, bias: Array | None, gate: Array | None) -> Array:
        """Sum of the absolute values of the terms of y: the unit of its rounding error."""
        wide = replace(self, variant=self.variant.replace(scale_offset=0.0, rounding="after_scale", result_dtype="x"))
        ones = None if gain is None or self.gain_first else np.ones(x.shape)
        g = None if gain is None else self.variant.scale_offset + gain.astype(np.float64)
        base = np.abs(wide.predict(x.astype(np.float64), g if self.gain_first else ones, None, gate, result="float64"))
        if self.centred:  # x less its mean
            mean = np.abs(x.astype(np.float64).mean(-1, keepdims=True))
            base = base + 2 * mean * self.inverse_rms(x, self.eps_for(x.dtype.name)) * self.factor
        if self.gate is None or gate is None or self.gate.position == "before":
            activation: Any = 1.0
        else:
            activation = np.abs(self.gate(x.astype(np.float64), gate.astype(np.float64)))
        if gain is not None and not self.gain_first:
            base = base * (abs(self.variant.scale_offset) + np.abs(gain.astype(np.float64)))
        return base if bias is None else base + np.abs(bias.astype(np.float64)) * activation

    def _predict(
        self,
        x: Array,
        gain: Array | None,
        bias: Array | None,
        gate: Array | None,
        stages: Stages | None,
        result: str | None,
    ) -> Array:
        call = self.call(x, gain, bias)
        wide = x.astype(np.float64)
        g = None if gain is None else gain.astype(np.float64)
        if gain is not None and self.gain_rounded:
            offset = self.variant.scale_offset
            g = rounded(offset + gain.astype(np.float64), gain.dtype.name) - offset
        o = self.variant.scale_offset if g is not None else 0.0
        activation = None if self.gate is None or gate is None else self.gate(wide, gate.astype(np.float64))
        h = wide * activation if self.gate and self.gate.position == "before" and activation is not None else wide
        if self.gain_first and g is not None:
            h, g, o = rounded(h * (o + g), call.x), None, 0.0
        inverse = self.inverse_rms(h, self.eps_for(x.dtype.name), stages)
        if self.centred:
            counted = self.counted(h.shape[-1])
            h = h - np.where(counted, h, 0.0).sum(-1, keepdims=True) / counted.sum()
        free = self.variant.rounding == "input_dtype" and stages is not None
        norm, product = (call.x, call.x) if free else (call.norm, call.product)
        y = h * inverse * self.factor
        if norm is not None:
            y = rounded(y, norm)
        if g is not None:
            factor = o + g
            y = y * factor if norm is None else rounded(y * rounded(factor, product), product)
        if bias is not None:
            y = y + bias.astype(np.float64)
            y = y if norm is None else rounded(y, product)
        if self.gate and self.gate.position == "after" and activation is not None:
            y = y * activation
        return cast(y, result or call.result)
