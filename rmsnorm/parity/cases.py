"""The cases on which implementations are compared, as data; tests, the command line and benchmarks use them.

Gains are random and not symmetric, gain and bias differ, and rows differ in norm by orders of magnitude so that every
eps shows: with a gain of ones or an eps that vanishes, most mistakes are invisible.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import numpy.typing as npt

from rmsnorm.parity.values import gate_of, signed, tangent_of, values_of
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Axis, Call, Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import (
    CHOICES,
    PRESETS,
    GateFunction,
    GatePosition,
    ResidualRounding,
    Variant,
    derive,
)

Array = npt.NDArray[Any]
_EVERY: Final = tuple(PRESETS)
_LARGE: Final = 2**14  # elements


@dataclass(frozen=True)
class Case:
    """One situation; ``make`` turns it into arrays of a dtype.

    Attributes:
        name: as in reports.
        shape: of x.
        variants: names of the presets that it runs with.
        reason: what it can tell.
        data: kind of values: rows (a quarter of them with an outlier), huge, tiny, clamped, at_clamp (integers of norm
            5, times a power of two), zero_rows (half of them, and x the same memory along its first axis), constant
            (and one-hot), non_finite, alike (rows without an outlier: beside one, a long sum in float32 loses what is
            small) or one_sign (no element of x or dy is negative, so that the terms of a sum of gradients add up).
        scale, bias: whether there is one; bias None means as the variant has it.
        parameters: dtype of scale and bias, None for that of x.
        mask: some elements not counted, with NaN in x and in a gate under the mask, and a row with none.
        residual, strided: whether there is a residual; whether x is a strided view.
        gate: gate_function and gate_position of the variant that it runs with; None for no gate.
        residual_rounding: that of the variant that it runs with; None for that of the variant itself.
        fields: further fields of the variant that it runs with.
        options: further arguments of the call.
        repeats: how often the values are repeated along each axis of x, powers of two; empty for once. The golden
            computes them once, so that a case may have many rows. Not for sums of one sign: there equal terms are
            rounded alike, and a right sum errs by more than its bound, which takes roundings as random.
        edge: whether an implementation may refuse such an x.
    """

    name: str
    shape: tuple[int, ...]
    variants: tuple[str, ...]
    reason: str
    data: str = "rows"
    scale: bool = True
    bias: bool | None = None
    parameters: str | None = None
    mask: bool = False
    residual: bool = False
    strided: bool = False
    gate: tuple[GateFunction, GatePosition] | None = None
    residual_rounding: ResidualRounding | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = dtypes.FLOATS
    options: Mapping[str, Any] = field(default_factory=dict)
    repeats: tuple[int, ...] = ()
    edge: bool = False

    @property
    def is_large(self) -> bool:
        """Whether it has so many elements that what computes each in many digits leaves it out."""
        return math.prod(self.shape) > _LARGE


@dataclass(frozen=True)
class Data:
    """Arguments of one call in NumPy arrays, with the cotangents and tangents of its derivatives."""

    case: Case
    variant: Variant
    call: Call
    x: Array
    scale: Array | None
    bias: Array | None
    dy: Array
    dh: Array | None
    tangents: tuple[Array, Array | None, Array | None]
    mask: Array | None
    residual: Array | None
    gate: Array | None
    axis: Axis
    feature_axis: Axis | None
    out_dtype: str | None
    once: Data | None = None  # the values that are repeated
    is_dense: bool = True  # the elements of a row lie side by side, so that a program adds them in vectors

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of rms_norm, without the arrays among them."""
        return {
            "variant": self.variant,
            "axis": self.axis,
            "feature_axis": self.feature_axis,
            "out_dtype": self.out_dtype,
        }

    @property
    def arrays(self) -> dict[str, Any]:
        """Keyword arguments of rms_norm that are arrays."""
        return {"mask": self.mask, "residual": self.residual, "gate": self.gate}


@dataclass(frozen=True)
class Outcome:
    """The results of an implementation: of every way to compute each quantity; and the inputs that it changed."""

    results: Mapping[str, list[Array]]
    touched: tuple[str, ...] = ()


def _drawn(count: int) -> Iterator[Case]:
    """Cases with fields of the variant, options and data that no preset and no other case combines."""
    random = np.random.default_rng(9)

    def one_of(*choices: Any) -> Any:
        return choices[random.integers(len(choices))]

    for number in range(1, count + 1):
        fields = {name: one_of(*choices) for name, choices in CHOICES.items() if name != "scale_dtype"}
        fields["scale_dtype"] = CHOICES["scale_dtype"][number % 2]
        fields |= {"scale_offset": one_of(0.0, 1.0, -0.75), "eps": one_of(None, 0.0, 1e-5, 0.3)}
        layout = one_of({}, {"axis": (-2, -1)}, {"axis": -1, "feature_axis": (-2, -1)}, {"axis": 1})
        gate = one_of(None, (fields["gate_function"], fields["gate_position"]))
        yield Case(
            f"drawn {number}", (5, 6, 12), ("standard",), "options that no preset combines", one_of("rows", "alike"),
            scale=one_of(True, True, False), bias=one_of(True, False), parameters=one_of(None, "float32", "bfloat16"),
            mask=one_of(True, False), residual=one_of(True, False), gate=gate, fields=fields,
            options=layout | one_of({}, {"partial": 0.4}) | one_of({}, {"out_dtype": "float32"}),
        )  # fmt: skip


CASES: Final = (
    Case("rows", (48, 96), _EVERY, "every variant on rows of very different norm, some with an outlier"),
    Case("odd", (5, 3, 41), ("standard", "llama"), "an odd width leaves a remainder in vectorised loops"),
    Case("wide", (3, 4096), ("standard", "llama"), "a long sum of squares"),
    Case("tall", (3, 7, 5, 11, 8), ("standard", "torch"), "five axes, and a long sum of parameter gradients"),
    Case("width 1", (7, 1), ("standard", "gemma"), "the gradient cancels but for eps"),
    Case("vector", (64,), ("standard", "llama"), "no axis but the normalised one"),
    Case("no rows", (0, 16), ("standard",), "empty along the rows", edge=True),
    Case("no batch", (2, 0, 3, 16), ("standard",), "empty along another axis", edge=True),
    Case("no columns", (4, 0), ("standard",), "empty along the normalised axis", edge=True),
    Case("one element", (1, 1), ("standard",), "nothing but one number", edge=True),
    Case("many rows", (65792, 3), ("standard",), "more rows than 16 bits count, or a grid has",
         repeats=(256, 1)),
    Case("long sequences", (2, 8224, 3), ("standard",), "many rows along the second axis", repeats=(1, 32, 1)),
    Case("many, 3 axes", (8224, 2, 3), ("standard",), "a first index that is large", repeats=(32, 1, 1)),
    Case("very wide", (2, 66001), ("standard",), "more columns than 16 bits count", "alike", edge=True),
    Case("one sign", (4112, 8), ("standard", "llama"), "a sum of gradients that grows with every row", "one_sign"),
    Case("strided", (12, 30), ("standard", "llama"), "a view with gaps in both axes", strided=True),
    Case("huge", (8, 33), ("standard", "llama", "gemma", "paper", "zhang_torch", "x_transformers"),
         "squares that overflow float32", "huge"),
    Case("tiny", (8, 33), ("paper", "standard", "zhang_torch"), "squares that underflow float32", "tiny"),
    Case("at the clamp", (12, 5), ("x_transformers",), "the norms of rows are eps, half of it and twice", "at_clamp",
         options={"eps": 5.0}),
    Case("clamped", (8, 33), ("x_transformers",), "norms on both sides of the clamp", "clamped",
         dtypes=("bfloat16", "float32", "float64")),
    Case("zero rows", (3, 2, 20), ("standard", "torch", "zhang_torch"),
         "q = 0, and an x that was expanded", "zero_rows"),
    Case("constant", (2, 3, 5, 16), ("standard", "paper", "llama", "gemma"), "ties, and a gradient that cancels",
         "constant"),
    Case("non-finite", (6, 20), ("standard", "llama"), "NaN and infinity propagate as in the formula", "non_finite"),
    Case("bias", (16, 48), ("standard", "llama", "gemma"), "a bias where the preset has none", bias=True),
    Case("no gain", (16, 48), ("standard", "llama", "gemma", "onnx"), "no parameters at all", scale=False),
    Case("no gain, bias", (16, 48), ("standard", "apex"), "a bias alone", scale=False, bias=True),
    Case("partial 0.3", (16, 48), ("paper", "zhang_torch", "zhang_tf", "llama", "x_transformers"),
         "the statistic of the first k elements", options={"partial": 0.3}),
    Case("partial 0.07", (8, 100), ("paper", "zhang_tf"), "ceil(100 * 0.07) is 7", options={"partial": 0.07}),
    Case("partial 0.29", (8, 100), ("paper", "zhang_tf"), "floor(100 * 0.29) is 29", options={"partial": 0.29}),
    Case("partial 0.001", (8, 10), ("paper", "zhang_tf"), "at least one element", options={"partial": 0.001}),
    Case("mask", (16, 48), ("standard", "flax", "llama", "x_transformers"), "a masked mean, NaN under it", mask=True),
    Case("mask, partial", (16, 48), ("paper",), "both at once", mask=True, options={"partial": 0.5}),
    Case("mask, partial, 2 axes", (5, 6, 9), ("paper",), "the first k of what the mask lets through, over two axes",
         mask=True, options={"partial": 0.7, "axis": (-1, -2)}),
    Case("mask, residual", (16, 48), ("standard", "llama"), "the masked statistic of a sum", mask=True, residual=True),
    Case("residual", (16, 48), ("standard", "llama", "gemma"), "the fused add of pre-norm blocks", residual=True),
    Case("residual, exact sum", (16, 48), ("standard", "llama"), "the sum is normalised before it is rounded",
         residual=True, residual_rounding="after"),
    Case("eps 0.1", (16, 48), ("standard", "zhang_torch"), "eps of the call",
         options={"eps": 0.1}),
    Case("channels", (3, 6, 5, 7), ("lasagne", "standard"), "per-channel parameters",
         options={"axis": (2, 3), "feature_axis": 1}),
    Case("middle axis", (4, 6, 5), ("keras", "llama"), "normalised and scaled along an inner axis",
         options={"axis": 1}),
    Case("two axes", (5, 4, 6), ("torch", "equinox"), "the last two axes, parameters along both",
         options={"axis": (-1, -2)}),
    Case("apart", (5, 4, 6), ("flax",), "two normalised axes, one of parameters",
         options={"axis": (1, 2), "feature_axis": -1}),
    Case("groups", (6, 4, 12), ("standard", "llama"), "a statistic of each group of features",
         options={"axis": -1, "feature_axis": (-2, -1)}),
    Case("gain f32", (24, 48), _EVERY, "16-bit activations with a float32 gain", parameters="float32",
         dtypes=dtypes.HALF),
    Case("gain bf16", (24, 48), ("t5", "llama", "onnx", "mlx", "standard", "apex"), "wide activations, 16-bit gain",
         parameters="bfloat16", dtypes=("float16", "float32")),
    Case("out f32", (24, 48), ("standard", "llama"), "float32 results asked for", dtypes=dtypes.HALF,
         options={"out_dtype": "float32"}),
    Case("out bf16", (24, 48), ("standard", "apex"), "bfloat16 results asked for", dtypes=("float32", "float64"),
         options={"out_dtype": "bfloat16"}),
    Case("gate", (16, 48), ("standard", "apex"), "y f(z): Kimi Linear, Falcon-H1; Qwen3-Next rounds y before it",
         gate=("silu", "after")),
    Case("gate of x", (6, 4, 12), ("llama",), "the norm of x f(z) in groups: Mamba-2", gate=("silu", "before"),
         options={"axis": -1, "feature_axis": (-2, -1)}),
    Case("sigmoid gate", (16, 48), ("standard",), "another f, which is not 0 for z = 0", bias=True,
         gate=("sigmoid", "after")),
    Case("sigmoid gate of x", (16, 48), ("standard",), "and before the norm", gate=("sigmoid", "before")),
    Case("gate, mask", (16, 48), ("standard", "llama"), "no gradient under the mask, where gate and x are NaN",
         mask=True, gate=("silu", "after")),
    Case("gate, residual", (16, 48), ("standard", "apex"), "a sum and its gate", residual=True,
         gate=("silu", "after")),
    Case("gate of x, masked sum", (6, 4, 12), ("llama",), "the masked statistic of (x + residual) f(z) in groups",
         mask=True, residual=True, gate=("silu", "before"), options={"axis": -1, "feature_axis": (-2, -1)}),
    Case("gate, exact sum", (16, 48), ("standard",), "a sum that is not rounded, and its gate", residual=True,
         gate=("sigmoid", "before"), residual_rounding="after"),
    *_drawn(24),
)  # fmt: skip


def select(
    variants: tuple[str, ...] = (), types: tuple[str, ...] = (), *, brief: bool = False, large: bool = True
) -> Iterator[tuple[Case, str, str]]:
    """Every (case, variant, dtype) of the table, or those with these variants and dtypes.

    ``brief`` is every variant in every dtype, and each case once, in one dtype after the other. Without ``large`` the
    cases of more than 16,384 elements are left out.
    """
    for i, case in enumerate(CASES):
        if case.is_large and not large:
            continue
        for variant in case.variants:
            for j, dtype in enumerate(case.dtypes):
                if (variants and variant not in variants) or (types and dtype not in types):
                    continue
                if brief and case.name != "rows" and (variant, j) != (case.variants[0], i % len(case.dtypes)):
                    continue
                yield case, variant, dtype


def make(case: Case, variant: str | Variant, dtype: str) -> Data:
    """Draw the arrays of a case; the same ones every time.

    Example:
        >>> make(CASES[0], "llama", "bfloat16").x.shape
        (48, 96)
    """
    if any(count > 1 for count in case.repeats):
        shape = tuple(size // count for size, count in zip(case.shape, case.repeats, strict=True))
        return _repeated(make(replace(case, shape=shape, repeats=()), variant, dtype), case)
    chosen = _chosen(case, derive("make", variant, case.options.get("eps"), case.options.get("partial")))
    random = np.random.default_rng(zlib.crc32(f"{case.name}/{chosen.name}/{dtype}".encode()))
    axis, feature_axis = case.options.get("axis", -1), case.options.get("feature_axis")
    layout = resolve("make", Spec(case.shape, dtype), variant=chosen, axis=axis, feature_axis=feature_axis)
    along_last = "axis" not in case.options or axis == (-1,)
    x = values_of(case.data, case.shape, dtype, random, along_last=along_last)
    sizes = tuple(case.shape[entry] for entry in layout.feature_axes)
    width = case.parameters or dtype
    scale = random.normal(0.3, 1.0, sizes).astype(width) if case.scale else None
    has_bias = chosen.bias if case.bias is None else case.bias
    bias = random.normal(-0.2, 0.5, sizes).astype(width) if has_bias else None
    residual = None
    if case.residual:
        residual = values_of(case.data, case.shape, dtype, random, along_last=along_last)
    mask = None
    if case.mask:
        mask = random.random(case.shape) < 0.6
        mask[2] = False
        x[~mask] = np.nan
    if case.strided:
        room = np.zeros([2 * size + 1 for size in case.shape], x.dtype)
        room[1::2, 1::2] = x
        x = room[1::2, 1::2]
    gate = gate_of(case.shape, dtype, random) if case.gate else None
    if gate is not None and mask is not None:
        gate[~(mask & (mask & _first(layout)).any(axis=layout.axes, keepdims=True))] = np.nan  # y is 0 or constant
    call = _call(case, chosen, dtype, scale, bias)
    return Data(
        case=case,
        variant=chosen,
        call=call,
        x=x,
        scale=scale,
        bias=bias,
        dy=signed(case.data, random.normal(0.1, 1.0, case.shape)).astype(call.result_dtype),
        dh=random.normal(0.0, 1.0, case.shape).astype(call.sum_dtype) if case.residual else None,
        tangents=(
            tangent_of(x, random),
            None if scale is None else random.normal(size=sizes).astype(width),
            None if bias is None else random.normal(size=sizes).astype(width),
        ),
        mask=mask,
        residual=residual,
        gate=gate,
        axis=axis,
        feature_axis=feature_axis,
        out_dtype=case.options.get("out_dtype"),
    )


def _first(call: Call) -> Array:
    """Which elements are among the first ones that enter the statistic, as an array that broadcasts."""
    return (np.arange(call.n) < call.k).reshape([s if a in call.axes else 1 for a, s in enumerate(call.shape)])


def recast(data: Data, variant: Variant) -> Data:
    """The same arrays for another variant, with the options of the case."""
    options = data.case.options
    chosen = derive("recast", variant, options.get("eps"), options.get("partial"))
    call = _call(data.case, chosen, data.x.dtype.name, data.scale, data.bias)
    return replace(data, variant=chosen, call=call, once=data.once and recast(data.once, variant))


def _repeated(once: Data, case: Case) -> Data:
    """The arrays of a call, each repeated along the axes of x as often as the case says."""

    def tiled(array: Any) -> Any:
        return None if array is None else np.tile(array, case.repeats)

    names = ("x", "dy", "dh", "mask", "residual", "gate")
    return replace(
        once,
        **{name: tiled(getattr(once, name)) for name in names},
        case=case,
        call=_call(case, once.variant, once.x.dtype.name, once.scale, once.bias),
        tangents=(tiled(once.tangents[0]), *once.tangents[1:]),
        once=once,
    )


def call_of(case: Case, data: Data) -> Call:
    """The call of a case with the variant and the parameters of a ``Data``, for a shape of another number of rows."""
    return _call(case, data.variant, data.x.dtype.name, data.scale, data.bias)


def _call(case: Case, variant: Variant, dtype: str, scale: Array | None, bias: Array | None) -> Call:
    return resolve(
        "make",
        Spec(case.shape, dtype),
        None if scale is None else Spec(scale.shape, scale.dtype.name),
        None if bias is None else Spec(bias.shape, bias.dtype.name),
        variant=variant,
        axis=case.options.get("axis", -1),
        feature_axis=case.options.get("feature_axis"),
        residual=Spec(case.shape, dtype) if case.residual else None,
        mask=Spec(case.shape, "bool") if case.mask else None,
        gate=Spec(case.shape, dtype) if case.gate else None,
        out_dtype=case.options.get("out_dtype"),
    )


def _chosen(case: Case, variant: Variant) -> Variant:
    """The variant with the fields that the case has of its own."""
    fields = dict(case.fields)
    if case.gate is not None:
        fields |= zip(("gate_function", "gate_position"), case.gate, strict=True)
    if case.residual_rounding is not None:
        fields["residual_rounding"] = case.residual_rounding
    return variant.replace(**fields) if fields else variant
