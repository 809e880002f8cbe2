"""Wrong RMSNorms with one mistake each. The kit must reject all of them, and accept the same code without a mistake."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from rmsnorm import dtypes
from rmsnorm.parity.equations import candidate
from rmsnorm.parity.judge import Implementation


@dataclass(frozen=True)
class Mutant:
    """A mistake, the (case, variant) pairs in which it shows, and the dtypes of x in which it is visible."""

    fault: str
    story: str
    pairs: tuple[tuple[str, str], ...] = (("rows", "standard"),)
    dtypes: tuple[str, ...] = dtypes.FLOATS

    @property
    def implementation(self) -> Implementation:
        return partial(candidate, fault=self.fault)


_WIDE: Final = ("float32", "float64")
_SPREAD: Final = ("bfloat16", "float32")

MUTANTS: Final = (
    Mutant("gain dropped", "the gain is not applied"),
    Mutant("bias dropped", "the bias is not applied", (("bias", "standard"), ("two axes", "equinox"))),
    Mutant("gain and bias swapped", "bias multiplies, gain is added", (("bias", "standard"),)),
    Mutant("offset dropped", "w instead of 1 + w", (("rows", "gemma"),)),
    Mutant("rounded on the other side", "after the gain instead of before", (("rows", "llama"),), dtypes.HALF),
    Mutant("rounded on the other side", "before the gain instead of after", (("rows", "standard"),), dtypes.HALF),
    Mutant("eps on the other side", "sqrt(q) + eps", (("rows", "standard"), ("eps 0.1", "standard"))),
    Mutant("eps on the other side", "sqrt(q + eps)", (("eps 0.1", "zhang_torch"),)),
    Mutant("no eps", "eps left out", (("rows", "standard"), ("rows", "nematus"))),
    Mutant("eps twice", "another eps", (("rows", "standard"),)),
    Mutant("mean subtracted", "LayerNorm"),
    Mutant("mean in the statistic", "the variance in the denominator, as rms_scaling has it"),
    Mutant("n - 1", "the unbiased estimate", (("rows", "standard"), ("vector", "standard"))),
    Mutant("n for k", "the partial sum divided by all of n", (("partial 0.3", "paper"),)),
    Mutant("floor for ceil", "k rounded down", (("partial 0.3", "paper"), ("partial 0.001", "paper"))),
    Mutant("ceil for floor", "k rounded up", (("partial 0.3", "zhang_tf"),), ("float16", "float32", "float64")),
    Mutant("k in floating point", "ceil(100 * 0.07) is 8", (("partial 0.07", "paper"),)),
    Mutant("k in floating point", "int(100 * 0.29) is 28", (("partial 0.29", "zhang_tf"),), _WIDE),
    Mutant("last k for first k", "the statistic of the last elements", (("partial 0.3", "paper"),)),
    Mutant("1/rho in bfloat16", "the inverse RMS kept in 16 bits"),
    Mutant("mean square in bfloat16", "the statistic kept in 16 bits"),
    Mutant("squares in the dtype of x", "squared before the cast to float32", dtypes=dtypes.HALF),
    Mutant("squares in float32", "squares overflow", (("huge", "standard"), ("huge", "llama")), _SPREAD),
    Mutant("squares in float32", "squares underflow", (("tiny", "paper"),), _SPREAD),
    Mutant("axis", "first axis for last", (("rows", "standard"), ("middle axis", "keras"))),
    Mutant("mask ignored", "masked elements counted",
           (("mask", "standard"), ("gate, mask", "llama"), ("gate of x, masked sum", "llama"))),
    Mutant("n for k", "the sum over the mask divided by all of n", (("mask", "standard"),)),
    Mutant("eps on the other side beside a mask", "sqrt(q) + eps where there is one", (("mask", "standard"),)),
    Mutant("mask ignored beside a residual", "two options, of which one is applied", (("mask, residual", "standard"),)),
    Mutant("gate forgotten beside a mask", "two options, of which one is applied", (("gate, mask", "standard"),)),
    Mutant("gate forgotten beside a residual", "y alone", (("gate, residual", "standard"),)),
    Mutant("NaN under the mask", "NaN reaches the gain's gradient", (("mask", "standard"),)),
    Mutant("NaN under the mask", "NaN reaches the gate's gradient", (("gate, mask", "standard"),)),
    Mutant("empty rows", "a row with nothing counted is not 0", (("mask", "standard"),)),
    Mutant("residual dropped", "x alone is normalised", (("residual", "standard"), ("gate, residual", "standard"))),
    Mutant("residual after the gate", "x f(z) + residual", (("gate of x, masked sum", "llama"),)),
    Mutant("gradient of the residual branch dropped", "dh does not reach dx",
           (("residual", "llama"), ("gate, residual", "apex"), ("gate of x, masked sum", "llama"))),
    Mutant("sum rounded on the other side", "before the norm", (("residual, exact sum", "llama"),), dtypes.HALF),
    Mutant("sum rounded on the other side", "after the norm", (("residual", "llama"),), dtypes.HALF),
    Mutant("no second term in dx", "1/rho taken for a constant"),
    Mutant("eps forgotten in dx", "the gradient of another eps", (("rows", "standard"), ("width 1", "standard"))),
    Mutant("gain dropped from dx", "u = v"),
    Mutant("no dscale", "no gradient for the gain"),
    Mutant("dscale of x", "x in position of the normalised x"),
    Mutant("dscale of dbias", "the gain's gradient is the bias's"),
    Mutant("float32 result", "the result is not cast back", dtypes=("float16", "bfloat16", "float64")),
    Mutant("writes x", "the input is overwritten"),
    Mutant("factor beyond two axes", "x of three axes", (("odd", "standard"),)),
    Mutant("factor beyond two axes", "x of four axes", (("constant", "standard"),)),
    Mutant("factor beyond two axes", "x of five axes", (("tall", "standard"),)),
    Mutant("rows from 8192 on not normalised", "as they are", (("many rows", "standard"),)),
    Mutant("rows from 8192 on not normalised", "of 3 axes", (("long sequences", "standard"),)),
    Mutant("rows from 65535 on not computed", "more than the blocks of a grid", (("many rows", "standard"),)),
    Mutant("rows from 4097 on scaled", "by 1.01, along the second axis", (("long sequences", "standard"),)),
    Mutant("first index from 300 on scaled", "by 1.01, of two axes", (("many, 3 axes", "standard"),)),
    Mutant("gain dropped from column 20000 on", "more than a block has", (("very wide", "standard"),)),
    Mutant("dscale summed in the dtype of x", "terms of one sign", (("one sign", "standard"),), dtypes.HALF),
    Mutant("dscale summed in the dtype of x", "of a wide gain, too", (("one sign", "llama"),), dtypes.HALF),
    Mutant("strides ignored", "x read as if it were contiguous", (("strided", "standard"), ("strided", "llama"))),
    Mutant("clipped at 4.5", "outliers cut off"),
    Mutant("clipped at 60", "large outliers cut off", (("wide", "standard"),)),
    Mutant("row of an outlier doubled", "a branch for rows that start with an outlier"),
    Mutant("gate forgotten", "y alone", (("gate", "standard"), ("sigmoid gate", "standard"))),
    Mutant("gate forgotten", "the norm of x alone", (("gate of x", "llama"), ("sigmoid gate of x", "standard"))),
    Mutant("gate on the other side", "of x for of y", (("gate", "standard"), ("sigmoid gate", "standard"))),
    Mutant("gate on the other side", "of y for of x", (("gate of x", "llama"), ("sigmoid gate of x", "standard"))),
    Mutant("another function of the gate", "sigmoid for SiLU", (("gate", "apex"), ("gate of x", "llama"))),
    Mutant("another function of the gate", "SiLU for sigmoid", (("sigmoid gate", "standard"),)),
    Mutant("f(z) rounded", "SiLU in 16 bits", (("gate", "standard"), ("gate of x", "llama")), dtypes.HALF),
    Mutant("y rounded before the gate", "two roundings", (("gate", "standard"),), dtypes.HALF),
    Mutant("x f(z) rounded", "to the dtype of x", (("gate of x", "llama"),), dtypes.HALF),
    Mutant("z cut off", "exponentials are feared", (("gate", "standard"), ("gate of x", "llama"))),
    Mutant("bias after the gate", "y f(z) + b", (("sigmoid gate", "standard"),)),
    Mutant("groups ignored", "one statistic for all groups", (("groups", "standard"),)),
    Mutant("groups ignored", "one statistic of x f(z) for all groups", (("gate of x", "llama"),)),
    Mutant("no gate in dx", "dy for dy f(z)", (("gate", "standard"),)),
    Mutant("no gate in dx", "dh for dh f(z)", (("gate of x", "llama"),)),
    Mutant("no dgate", "no gradient for the gate", (("gate", "standard"), ("gate of x", "llama"))),
    Mutant("f for f' in dgate", "the gate itself", (("gate", "standard"), ("sigmoid gate of x", "standard"))),
    Mutant("s(z) for f' in dgate", "z is a constant in z s(z)", (("gate", "standard"), ("gate of x", "llama"))),
)  # fmt: skip
