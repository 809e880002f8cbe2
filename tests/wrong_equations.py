"""Wrong RMSNorms as changes of the equations, one mistake each, with what the tools must say of each.

Most are mistakes that the package itself knows by a sentence; the others are written here. tools/test_equations.py asks
for each: the kit rejects it, `identify` says what it is, and the static vectors refuse it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.accuracy.rounding import cast
from rmsnorm.identify import mistakes
from rmsnorm.parity.cases import Case, Data, make
from rmsnorm.parity.equations import Change, Steps
from rmsnorm.specification import dtypes

_ROWS: Final = (16, 48)
_GROUPS: Final = {"axis": -1, "feature_axis": (-2, -1)}
CASES: Final = {
    "rows": Case("rows", (32, 48)),
    "odd": Case("odd", (5, 3, 41)),
    "tall": Case("tall", (3, 2, 3, 2, 8)),
    "wide": Case("wide", (2, 4096)),
    "width 1": Case("width 1", (7, 1)),
    "vector": Case("vector", (64,)),
    "many rows": Case("many rows", (65792, 3)),
    "long sequences": Case("long sequences", (2, 8224, 3)),
    "many, 3 axes": Case("many, 3 axes", (320, 2, 3)),
    "very wide": Case("very wide", (2, 20011), data="alike"),
    "one sign": Case("one sign", (4112, 8), data="one_sign"),
    "strided": Case("strided", (12, 30), strided=True),
    "huge": Case("huge", (8, 33), data="huge"),
    "tiny": Case("tiny", (8, 33), data="tiny"),
    "zero rows": Case("zero rows", (3, 2, 20), data="zero_rows"),
    "constant": Case("constant", (2, 3, 5, 16), data="constant"),
    "non-finite": Case("non-finite", (6, 20), data="non_finite"),
    "bias": Case("bias", _ROWS, bias=True),
    "no gain, bias": Case("no gain, bias", _ROWS, scale=False, bias=True),
    "partial 0.3": Case("partial 0.3", _ROWS, options={"partial": 0.3}),
    "partial 0.07": Case("partial 0.07", (8, 100), options={"partial": 0.07}),
    "partial 0.29": Case("partial 0.29", (8, 100), options={"partial": 0.29}),
    "partial 0.001": Case("partial 0.001", (8, 10), options={"partial": 0.001}),
    "mask": Case("mask", _ROWS, mask=True),
    "mask, partial": Case("mask, partial", (5, 6, 9), mask=True, options={"partial": 0.7, "axis": (-1, -2)}),
    "mask, residual": Case("mask, residual", _ROWS, mask=True, residual=True),
    "residual": Case("residual", _ROWS, residual=True),
    "residual, exact sum": Case("residual, exact sum", _ROWS, residual=True, fields={"residual_rounding": "after"}),
    "eps 0.1": Case("eps 0.1", _ROWS, options={"eps": 0.1}),
    "channels": Case("channels", (3, 6, 5, 7), options={"axis": (2, 3), "feature_axis": 1}),
    "middle axis": Case("middle axis", (4, 6, 5), options={"axis": 1}),
    "two axes": Case("two axes", (5, 4, 6), options={"axis": (-1, -2)}),
    "apart": Case("apart", (5, 4, 6), options={"axis": (1, 2), "feature_axis": -1}),
    "groups": Case("groups", (6, 4, 12), options=_GROUPS),
    "gain f32": Case("gain f32", _ROWS, parameters="float32", dtypes=dtypes.HALF),
    "gain bf16": Case("gain bf16", _ROWS, parameters="bfloat16", dtypes=("float16", "float32")),
    "out f32": Case("out f32", _ROWS, dtypes=dtypes.HALF, options={"out_dtype": "float32"}),
    "gate": Case("gate", _ROWS, gate=("silu", "after")),
    "gate of x": Case("gate of x", (6, 4, 12), gate=("silu", "before"), options=_GROUPS),
    "sigmoid gate": Case("sigmoid gate", _ROWS, bias=True, gate=("sigmoid", "after")),
    "sigmoid gate of x": Case("sigmoid gate of x", _ROWS, gate=("sigmoid", "before")),
    "gate, mask": Case("gate, mask", _ROWS, mask=True, gate=("silu", "after")),
    "gate, residual": Case("gate, residual", _ROWS, residual=True, gate=("silu", "after")),
    "gate, masked sum": Case("gate, masked sum", (6, 4, 12), mask=True, residual=True, gate=("silu", "before"),
                             options=_GROUPS),
}  # fmt: skip


def data_of(call: str, dtype: str) -> Data:
    """The arrays of a call, which is the name of a case and that of a preset: "mask llama"."""
    case, _, variant = call.rpartition(" ")
    return make(CASES[case], variant, dtype)


class Wrong(NamedTuple):
    """A mistake."""

    changes: Mapping[str, Change]  # by the name of the step, what its value becomes
    # words of a defect or a difference to the variant; nothing where identify asks for nothing in which it shows
    says: str = ""
    calls: str = "rows standard"  # in which the kit must reject it: cases with presets, separated by semicolons
    dtypes: tuple[str, ...] = dtypes.FLOATS  # of x, in which it shows there
    vectors: tuple[str, ...] = ()  # dtypes of x, in which the static vectors refuse it


def _other(one: Any, other: Any) -> Change:
    """The other one of two values."""
    return lambda s, value: other if value == one else one


def _to(value: Any) -> Change:
    return lambda s, right: value


def _beside(option: str, changes: Mapping[str, Change]) -> dict[str, Change]:
    """Changes in calls with an option alone."""

    def only(change: Change) -> Change:
        return lambda s, value: value if getattr(s.data, option) is None else change(s, value)

    return {name: only(change) for name, change in changes.items()}


def _from_row(first: int, wrong: Callable[[Steps], Any]) -> dict[str, Change]:
    """Another h / rho in the rows from one on, which are along all axes but the last."""

    def change(s: Steps, y: Any) -> Any:
        return np.where(np.arange(y.size // y.shape[-1]).reshape((*y.shape[:-1], 1)) < first, y, wrong(s))

    return {"normalised": change}


def _in_floating_point(rounding: Callable[[float], int]) -> Change:
    return lambda s, k: rounding(s.n * float(s.variant.partial or 1))


def _rounded_by(rounding: Any) -> Change:
    return lambda s, k: s.variant.replace(partial_rounding=rounding).counted(s.n)


def _rows_one_by_one(s: Steps, right: Any) -> Any:
    return np.add.reduce(cast(s.terms, s.x.dtype.name), axis=0).astype(np.float64)


def _as_if_contiguous(s: Steps, x: Any) -> Any:
    return np.lib.stride_tricks.as_strided(x, x.shape, np.empty_like(x, order="C", subok=False).strides)


def _known() -> Mapping[str, Mapping[str, Change]]:
    """The package's mistakes by their sentences, for bfloat16 x in rows of 48."""
    every = [
        mistakes.CENTRED, mistakes.GAIN_DROPPED, mistakes.BIAS_DROPPED, mistakes.GATE_DROPPED,
        *mistakes.of_statistic("bfloat16"), *mistakes.of_product("bfloat16"), *mistakes.of_range(),
        *mistakes.of_options({"mask", "residual", "gate"}, "bfloat16"),
        *mistakes.of_dx(48), *mistakes.of_parameter("dscale"), *mistakes.of_gate(),
    ]  # fmt: skip
    return {mistake.says: mistake.changes for mistake in every}


_BY_WORDS: Final = _known()


def known(
    sentence: str, calls: str = "rows standard", types: tuple[str, ...] = dtypes.FLOATS,
    says: str | None = None, vectors: tuple[str, ...] = (),
) -> Wrong:  # fmt: skip
    return Wrong(_BY_WORDS[sentence], sentence if says is None else says, calls, types, vectors)


_ALL: Final = ("float32", "bfloat16", "float16")
_HALF: Final = ("bfloat16", "float16")
_BF16: Final = ("bfloat16",)
_WIDE: Final = ("float32", "float64")
_SPREAD: Final = ("bfloat16", "float32")
_NONE: Final = "kind is 'none', {name} is RMSNorm"
_GATED: Final = "with a gate, y is not what a known function of it gives"
_OTHER_EPS: Final = {"position": _other("inside", "outside")}
_NO_GATE: Final = {"f": _to(1.0), "slope": _to(0.0)}
_NO_MASK: Final[dict[str, Change]] = {"counted": lambda s, _: s.first}
_ALL_N: Final[dict[str, Change]] = {"size": lambda s, size: np.full_like(size, s.n)}
_OTHER_ROUNDING: Final[dict[str, Change]] = {"norm": lambda s, norm: None if norm else s.call.x_dtype}
_DX: Final = "the gradient for x"
_DSCALE: Final = "the gradient for the gain"
_DGATE: Final = "the gradient for the gate"

WRONG: Final = {
    # what the package knows by name
    "gain dropped": known("the gain is not applied", vectors=_ALL),
    "bias dropped": known("the bias is not applied", "bias standard; two axes equinox"),
    "gate dropped": known(
        "the gate is not applied",
        "gate standard; sigmoid gate standard; gate of x llama; sigmoid gate of x standard"),
    "mean subtracted": known("the mean is subtracted", says="kind is 'layernorm', {name} is RMSNorm", vectors=_ALL),
    "1/rho in bfloat16": known("for bfloat16 x, 1 / rho is rounded to bfloat16 before the product with x",
                               says="1 / rho is rounded to bfloat16", vectors=_ALL),
    "mean square in bfloat16": known("for bfloat16 x, the mean square is rounded to bfloat16",
                                     says="the mean square is rounded to bfloat16", vectors=_ALL),
    "squares in bfloat16": known(
        "for bfloat16 x, the squares are rounded to bfloat16, before the cast to float32", types=_BF16),
    "mask ignored": known(
        "the mask is ignored", "mask standard; mask llama; gate, mask llama; gate, masked sum llama; "
        "mask, partial paper"),
    "n for the counted": known("the sum is divided by n, not by the number of elements that count", "mask standard",
                               says="divided by n, not by the number of elements that count"),
    "residual dropped": known(
        "the residual is not added", "residual standard; gate, residual standard", vectors=_ALL),
    "clipped at 4.5": known("x / rho is cut off at 4.5", vectors=_ALL),
    "f(z) rounded": known("for bfloat16 x, f(gate) is rounded", "gate standard; gate of x llama", _HALF,
                          "f(gate) is rounded"),
    "y rounded before the gate": known("for bfloat16 x, y is rounded before the gate", "gate standard", _HALF,
                                       "y is rounded before the gate"),
    "x f(z) rounded": known("for bfloat16 x, x f(gate) is rounded", "gate of x llama", _HALF, "x f(gate) is rounded"),
    "bias after the gate": known("the bias is added after the gate", "sigmoid gate standard", says=_GATED),
    "no second term in dx": known(f"{_DX} takes 1 / rho for a constant", vectors=_ALL),
    "eps left out of dx": known(f"{_DX} leaves eps out", "rows standard; width 1 standard", vectors=_ALL),
    "gain dropped from dx": known(f"{_DX} leaves the gain out", vectors=_ALL),
    "no gate in dx": known(f"{_DX} leaves the gate out", "gate standard; gate of x llama"),
    "dh dropped": known(f"{_DX} lacks that of the returned sum x + residual",
                        "residual llama; gate, residual apex; gate, masked sum llama", says=""),
    "no dscale": known(f"{_DSCALE} is 0"),
    "dscale of x": known(f"{_DSCALE} is that of x, not of the normalised x", vectors=_ALL),
    "dscale of dbias": known(f"{_DSCALE} is the gradient for the bias"),
    "no dgate": known(f"{_DGATE} is 0", "gate standard; gate of x llama"),
    "f for f' in dgate": known(
        f"{_DGATE} takes {{f}}(gate) for the derivative of {{f}}", "gate standard; sigmoid gate of x standard",
        says="(gate) for the derivative of s"),
    # the formula
    "gain and bias swapped": Wrong(
        {"gain": lambda s, _: s.parameter("bias", 1.0), "bias": lambda s, _: s.parameter("scale", -0.0)},
        _NONE, "bias standard"),
    "offset dropped": Wrong({"offset": _to(-0.0)}, "scale_offset is 0.0, {name} has 1.0", "rows gemma", vectors=_ALL),
    "rounded on the other side": Wrong(
        _OTHER_ROUNDING, "rounding is '{rounding}', {name} has", "rows llama; rows standard", _HALF, _HALF),
    "eps on the other side": Wrong(
        _OTHER_EPS, "eps_position is '{place}', {name} has", "rows standard; eps 0.1 standard; eps 0.1 zhang_torch",
        vectors=_ALL),
    "no eps": Wrong({"eps": _to(0.0)}, "eps is 0.0, {name} has {eps}", "rows standard; rows nematus", vectors=_ALL),
    "mean in the statistic": Wrong({"c": lambda s, c: c - s.mean(c)}, _NONE),
    "n - 1": Wrong({"size": lambda s, n: np.maximum(n - 1, 1)}, "the sum of squares is divided by n - 1 = 47",
                   "rows standard; vector standard", vectors=_ALL),
    "n for k": Wrong(_ALL_N, "the sum of squares is divided by all 48 elements, of which 15 are summed",
                     "partial 0.3 paper"),
    "floor for ceil": Wrong({"k": _rounded_by("floor")}, "partial_rounding is 'floor', {name} has 'ceil'",
                            "partial 0.3 paper"),
    "ceil for floor": Wrong({"k": _rounded_by("ceil")}, "partial_rounding is 'ceil', {name} has 'floor'",
                            "partial 0.3 zhang_tf"),
    "k of 0": Wrong({"k": _to(0)}, "", "partial 0.001 paper; partial 0.001 zhang_tf"),
    "ceil in floating point": Wrong({"k": _in_floating_point(math.ceil)}, "is computed in floating point",
                                    "partial 0.07 paper"),
    "floor in floating point": Wrong({"k": _in_floating_point(math.floor)}, "is computed in floating point",
                                     "partial 0.29 zhang_tf", _WIDE),
    "last k for first k": Wrong({"order": lambda s, order: s.n - 1 - order}, _NONE, "partial 0.3 paper"),
    "axis": Wrong({"axes": lambda s, axes: tuple((axis + 1) % s.x.ndim for axis in axes)}, "over axis 0 of 2",
                  "rows standard; middle axis keras"),
    "groups ignored": Wrong({"axes": lambda s, _: s.call.feature_axes}, "", "groups standard; gate of x llama"),
    # dtypes
    "squares in float32": Wrong(
        {"squares": lambda s, _: (s.c.astype(np.float32) ** 2).astype(np.float64)}, "",
        "huge standard; huge llama; tiny paper", _SPREAD),
    "float32 result": Wrong({"result": _to("float32")}, "y is float32 whatever x is", "rows standard",
                            ("float16", "bfloat16", "float64")),
    "dscale summed in the dtype of x": Wrong({"dscale": _rows_one_by_one}, "", "one sign standard; one sign llama",
                                             _HALF),
    # options; with a mask identify asks for no eps, and passes one of them alone
    "eps on the other side beside a mask": Wrong(_beside("mask", _OTHER_EPS), "", "mask standard"),
    "mask ignored beside a residual": Wrong(_beside("residual", _NO_MASK), "", "mask, residual standard"),
    "gate forgotten beside a mask": Wrong(_beside("mask", _NO_GATE), "", "gate, mask standard"),
    "gate forgotten beside a residual": Wrong(_beside("residual", _NO_GATE), "", "gate, residual standard"),
    "NaN under the mask": Wrong({"inside": lambda s, _: s.normalised, "dgate": lambda s, _: s.df * s.slope}, "",
                                "mask standard; gate, mask standard"),
    "empty rows": Wrong({"shown": lambda s, shown: np.full_like(shown, True)}, "", "mask standard"),
    "residual after the gate": Wrong({"input": lambda s, _: s.wide("x"), "h": lambda s, h: h + s.extra},
                                     "residual_rounding is 'after'", "gate, masked sum llama"),
    "sum rounded on the other side": Wrong(
        {"is_rounded": lambda s, is_rounded: not is_rounded}, "residual_rounding is '",
        "residual, exact sum llama; residual llama", _HALF),
    "gate on the other side": Wrong(
        {"is_before": lambda s, is_before: not is_before}, "gate_position is '",
        "gate standard; sigmoid gate standard; gate of x llama; sigmoid gate of x standard"),
    "another function of the gate": Wrong({"function": _other("silu", "sigmoid")}, "gate_function is '",
                                          "gate apex; gate of x llama; sigmoid gate standard"),
    "z cut off": Wrong({"z": lambda s, z: np.clip(z, -10, 10)}, _GATED, "gate standard; gate of x llama"),
    # memory and sizes; identify does not ask for so many axes, rows or columns, or for strides
    "writes x": Wrong({"touched": _to(("x",))}, "it writes to its arguments: x"),
    "strides ignored": Wrong({"x": _as_if_contiguous}, "", "strided standard; strided llama"),
    "factor beyond two axes": Wrong({"normalised": lambda s, y: y if y.ndim < 3 else 1.1 * y}, "",
                                    "odd standard; constant standard; tall standard"),
    "rows from 8192 on not normalised": Wrong(_from_row(8192, lambda s: s.h), "",
                                              "many rows standard; long sequences standard"),
    "rows from 65535 on not computed": Wrong(_from_row(65535, lambda s: 0.0), "", "many rows standard"),
    "rows from 4097 on scaled": Wrong(_from_row(4097, lambda s: 1.01 * s.h * s.inverse), "", "long sequences standard"),
    "first index from 300 on scaled": Wrong(
        {"normalised": lambda s, y: np.concatenate([y[:300], 1.01 * y[300:]])}, "", "many, 3 axes standard"),
    "gain dropped from column 20000 on": Wrong({"gain": lambda s, g: np.where(np.arange(s.n) < 20000, g, 1.0)}, "",
                                               "very wide standard"),
}  # fmt: skip
