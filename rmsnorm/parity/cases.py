"""A case: a call of rms_norm as data, and the arrays that it is made with.

Gains are random and not symmetric, gain and bias differ, and rows differ in norm by orders of magnitude so that every
eps shows: with a gain of ones or an eps that vanishes, most mistakes are invisible.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import numpy.typing as npt

from rmsnorm.parity.values import gate_of, signed, tangent_of, values_of
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Axis, Call, Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import GateFunction, GatePosition, Variant, derive

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Case:
    """One situation; ``make`` turns it into arrays of a dtype.

    Attributes:
        name: as in reports.
        shape: of x.
        variants: names of the presets that it runs with, where a table has several.
        data: kind of values: rows (a quarter of them with an outlier), huge, tiny, clamped, at_clamp (integers of norm
            5, times a power of two), zero_rows (half of them, and x the same memory along its first axis), constant
            (and one-hot), non_finite, alike (rows without an outlier: beside one, a long sum in float32 loses what is
            small) or one_sign (no element of x or dy is negative, so that the terms of a sum of gradients add up).
        scale, bias: whether there is one; bias None means as the variant has it.
        parameters: dtype of scale and bias, None for that of x.
        mask: some elements not counted, with NaN in x and in a gate under the mask, and a row with none.
        residual, strided: whether there is a residual; whether x is a strided view.
        gate: gate_function and gate_position of the variant that it runs with; None for no gate.
        fields: further fields of the variant that it runs with.
        options: further arguments of the call.
    """

    name: str
    shape: tuple[int, ...]
    variants: tuple[str, ...] = ()
    data: str = "rows"
    scale: bool = True
    bias: bool | None = None
    parameters: str | None = None
    mask: bool = False
    residual: bool = False
    strided: bool = False
    gate: tuple[GateFunction, GatePosition] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = dtypes.FLOATS
    options: Mapping[str, Any] = field(default_factory=dict)


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


def make(case: Case, variant: str | Variant, dtype: str) -> Data:
    """Draw the arrays of a case; the same ones every time.

    Example:
        >>> make(Case("rows", (48, 96)), "llama", "bfloat16").x.shape
        (48, 96)
    """
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
    """The same arrays and options for another variant."""
    options, names = data.case.options, ("x", "scale", "bias", "mask", "residual", "gate")
    chosen = derive("recast", variant, options.get("eps"), options.get("partial"))
    arrays = {name: array for name in names if (array := getattr(data, name)) is not None}
    return replace(data, variant=chosen, call=call_on("recast", arrays, {**data.options, "variant": chosen}))


def call_on(op: str, arrays: Mapping[str, Array], options: Mapping[str, Any]) -> Call:
    """The call of these arrays, by their names."""
    specs: dict[str, Any] = {name: Spec(array.shape, array.dtype.name) for name, array in arrays.items()}
    return resolve(op, **specs, **options)


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
    return variant.replace(**fields) if fields else variant
