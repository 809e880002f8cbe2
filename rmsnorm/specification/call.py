"""What a call of rms_norm means: its axes, sizes and dtypes, checked once for all frameworks. No array library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from operator import index
from typing import Any, NamedTuple, TypeAlias

from rmsnorm.specification import dtypes, errors
from rmsnorm.specification.variants import Variant

Axis: TypeAlias = int | Sequence[int]
Shape: TypeAlias = tuple[Any, ...]  # of int, None for an unknown size, or symbols of a compiler


class Roundings(NamedTuple):
    """Dtypes of a ``Call``, for another call that is to round as it does."""

    norm: str | None
    product: str
    result: str


class Spec(NamedTuple):
    """Shape and dtype name of an array. A size is None if it is not known yet."""

    shape: Shape
    dtype: str

    def __str__(self) -> str:
        return errors.describe(self.shape, self.dtype)


@dataclass(frozen=True)
class Call:
    """A checked call: everything about it that does not depend on the values.

    Attributes:
        variant: the variant with the eps and partial of the call.
        shape: the shape of x.
        axes: the normalised axes, sorted and counted from 0.
        feature_axes: the axes that carry the parameters, also sorted and counted from 0.
        eps: a number.
        x: dtype of what is normalised: that of x, or that to which x + residual is rounded before it is normalised.
        sum: T, the dtype of x, or of the returned x + residual.
        norm: dtype to which h / rho is rounded before the gain; None if it is not rounded there.
        product: dtype of the operations with the parameters if ``norm`` is set.
        result: dtype of y.
        inverse_rms: dtype of the returned 1 / rho.
        gate: dtype of the product with the gate; None without one.
        exact_sum: whether x + residual is normalised before it is rounded to T.
    """

    variant: Variant
    shape: Shape
    axes: tuple[int, ...]
    feature_axes: tuple[int, ...]
    eps: float
    x: str
    sum: str
    norm: str | None
    product: str
    result: str
    inverse_rms: str
    gate: str | None = None
    exact_sum: bool = False

    def __hash__(self) -> int:
        return hash((self.variant, self.shape, self.x))  # fewer fields, to be fast: plans are looked up by it

    @property
    def n(self) -> Any:
        """Number of normalised elements in a row; None if a size is not known yet."""
        return _product(self.shape[axis] for axis in self.axes)

    @property
    def k(self) -> Any:
        """Number of elements that enter the statistic, before a mask."""
        return None if self.n is None else self.variant.counted(self.n)

    @property
    def offset(self) -> float:
        """o of the gain o + g; -0.0 for none, which added to a number changes nothing, not even the sign of a zero."""
        return self.variant.scale_offset or -0.0

    @property
    def leading(self) -> Call | None:
        """The call on the elements that enter the statistic; None if these are all, or are no slice of the array."""
        if len(self.axes) > 1 or self.k == self.n:
            return None
        (axis,) = self.axes
        shape = (*self.shape[:axis], self.k, *self.shape[axis + 1 :])
        return replace(self, shape=shape, variant=self.variant.replace(partial=None))

    @property
    def without_gate(self) -> Call:
        """The norm alone: of h * f(z) before, and after with y in the dtype of the product."""
        assert self.gate is not None  # noqa: S101
        if self.is_gated_before:
            return replace(self, x=self.gate, sum=self.gate, gate=None, exact_sum=False)
        return replace(self, result=self.gate, gate=None)

    @property
    def is_gated_before(self) -> bool:
        return self.gate is not None and self.variant.gate_position == "before"

    @property
    def has_last_axes(self) -> bool:
        """Whether the normalised axes are the last ones."""
        return self.axes == tuple(range(len(self.shape) - len(self.axes), len(self.shape)))

    @property
    def has_neighbours(self) -> bool:
        """Whether no axis is between those of the parameters."""
        first, last = self.feature_axes[0], self.feature_axes[-1]
        return last - first + 1 == len(self.feature_axes)

    @property
    def first_of_row(self) -> int:
        """The axis from which on kernels take the elements as a row, with all that is normalised and all parameters."""
        return min(self.axes[0], self.feature_axes[0])

    @property
    def feature_shape(self) -> Shape:
        """Shape in which the parameters broadcast against x."""
        return tuple(size if axis in self.feature_axes else 1 for axis, size in enumerate(self.shape))

    @property
    def shared_axes(self) -> tuple[int, ...]:
        """Axes over which the gradients of the parameters are summed."""
        return tuple(axis for axis in range(len(self.shape)) if axis not in self.feature_axes)


def resolve(
    op: str,
    x: Spec,
    scale: Spec | None = None,
    bias: Spec | None = None,
    *,
    variant: Variant,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    mask: Spec | None = None,
    residual: Spec | None = None,
    gate: Spec | None = None,
    out_dtype: Any = None,
    dscale: Spec | None = None,
    dbias: Spec | None = None,
    **like_x: Spec | None,
) -> Call:
    """Checks every argument of a call named ``op`` and decides every choice.

    Args:
        out_dtype: dtype of y, or its name; None for the variant's rule.
        dscale, dbias: tangents of the parameters.
        like_x: other arrays that must have the shape of x (dy, dh, tangents of x), by name.

    Raises:
        TypeError: a dtype is not a floating-point format (mask: not bool), or an option has the wrong type.
        ValueError: a shape or an axis is wrong.

    Example:
        >>> resolve("rms_norm", Spec((4, 16), "bfloat16"), Spec((16,), "float32"), variant=Variant.get("llama")).result
        'float32'
    """
    _check_float(op, "x", x)
    if not x.shape:
        raise errors.wrong_rank(op, "x")
    axes = _canonical(op, "axis", axis, x)
    feature_axes = axes if feature_axis is None else _canonical(op, "feature_axis", feature_axis, x)
    for name, tangent, primal in (("dscale", dscale, scale), ("dbias", dbias, bias)):
        if tangent is not None and primal is None:
            raise errors.missing_primal(op, name)
    for name, parameter in {"scale": scale, "bias": bias, "dscale": dscale, "dbias": dbias}.items():
        if parameter is not None:
            _check_float(op, name, parameter)
            _check_parameter(op, name, parameter, x, axis if feature_axis is None else feature_axis, feature_axes)
    if like_x.get("dy", x) is None:
        raise errors.wrong_type(op, "dy", None, "an array shaped as x", "pass the gradient with respect to y")
    for name, array in {"residual": residual, "gate": gate, **like_x}.items():
        if array is not None:
            _check_float(op, name, array)
            if not _agree(array.shape, x.shape):
                raise errors.wrong_shape(op, name, array.shape, x.shape, f"x {x}")
    if mask is not None:
        if mask.dtype != "bool":
            raise errors.wrong_dtype(op, "mask", mask.dtype, ["bool"])
        if not _broadcasts(mask.shape, x.shape):
            raise errors.wrong_mask_shape(op, mask.shape, str(x))
    if out_dtype is not None:
        out_dtype = errors.dtype_named(op, "out_dtype", out_dtype)

    t = dtypes.promote(x.dtype, residual.dtype if residual else None)
    exact_sum = residual is not None and variant.residual_rounding == "after"
    parameters = [parameter.dtype for parameter in (scale, bias) if parameter is not None]
    g = dtypes.promote(*parameters) if parameters else None
    norm, product, result = _roundings(variant, t, g)
    return Call(
        variant=variant,
        shape=tuple(x.shape),
        axes=axes,
        feature_axes=feature_axes,
        eps=variant.eps_for(t),
        x=dtypes.arithmetic(t) if exact_sum else t,
        sum=t,
        norm=norm,
        product=product,
        result=out_dtype or result,
        inverse_rms=dtypes.arithmetic(t),
        gate=None if gate is None else dtypes.arithmetic(dtypes.promote(t, gate.dtype, product)),
        exact_sum=exact_sum,
    )


def three_of(name: str, values: Sequence[Any]) -> list[Any]:
    """The primals or tangents of rms_norm_jvp: x, scale and bias, or their tangents; None for what is left out."""
    if not isinstance(values, Sequence) or not 1 <= len(values) <= 3:
        raise errors.wrong_type("rms_norm_jvp", name, values, "(x, scale, bias)", "leave trailing ones out or None")
    return [*values, None, None][:3]


def without_none(values: Iterable[Any]) -> list[Any]:
    """The values that are not None: what frameworks take that know no None among the arrays of a function."""
    return [value for value in values if value is not None]


def filled(values: Iterable[Any], pattern: Iterable[object]) -> list[Any]:
    """The values in order, with None wherever the pattern has None: what ``without_none`` leaves out.

    >>> filled([1, 2], (True, None, True))
    [1, None, 2]
    """
    rest = iter(values)
    return [None if entry is None else next(rest) for entry in pattern]


def _roundings(variant: Variant, t: str, g: str | None) -> Roundings:
    """Dtypes of h / rho (None: not rounded), of the products with the parameters, and of y."""
    promoted = dtypes.promote(t, g)
    before = variant.rounding == "before_scale"
    if variant.result_dtype == "half_scale" and g is not None:
        result = g if g in dtypes.HALF else dtypes.promote(promoted, "float32")
        return Roundings(result if before and g in dtypes.HALF else None, result, result)
    norm = promoted if variant.result_dtype == "promote_first" else t
    result = {"x": t, "scale": g or t, "half_scale": t}.get(variant.result_dtype, promoted)
    return Roundings(norm if before else None, promoted, result)


def _check_float(op: str, name: str, array: Spec) -> None:
    if array.dtype not in dtypes.FLOATS:
        raise errors.wrong_dtype(op, name, array.dtype, dtypes.FLOATS)


def check_axis(op: str, name: str, axis: Axis) -> list[int]:
    """The axes of an argument, which may be one; refuses what is no integer."""
    entries = list(axis) if isinstance(axis, Sequence) and not isinstance(axis, str) else [axis]
    if not entries:
        raise errors.no_axis(op, name)
    for entry in entries:
        if not isinstance(entry, (int, Integral)) or isinstance(entry, bool):
            raise errors.wrong_type(op, name, axis, "an integer or a sequence of integers", "pass -1 for the last axis")
    return entries


def _canonical(op: str, name: str, axis: Axis, x: Spec) -> tuple[int, ...]:
    entries = check_axis(op, name, axis)
    rank = len(x.shape)
    for entry in entries:
        if not -rank <= entry < rank:
            raise errors.axis_out_of_range(op, name, entry, str(x), rank)
    wrapped = [index(entry) % rank for entry in entries]
    axes = tuple(axis for axis in range(rank) if axis in wrapped)
    if len(axes) < len(wrapped):
        raise errors.axis_repeated(op, name, entries, str(x))
    return axes


def _check_parameter(op: str, name: str, parameter: Spec, x: Spec, axis: Axis, feature_axes: tuple[int, ...]) -> None:
    want = tuple(x.shape[entry] for entry in feature_axes)
    if not _agree(parameter.shape, want):
        raise errors.wrong_shape(op, name, parameter.shape, want, f"axis {_show(axis)} of x {x}")


def _show(axis: Axis) -> str:
    return str(tuple(axis)) if isinstance(axis, Sequence) else str(axis)


def _agree(got: Sequence[Any], want: Sequence[Any]) -> bool:
    return len(got) == len(want) and all(g is None or w is None or g == w for g, w in zip(got, want, strict=True))


def _broadcasts(got: Sequence[Any], want: Sequence[Any]) -> bool:
    return len(got) <= len(want) and all(
        g is None or w is None or g == 1 or g == w for g, w in zip(reversed(got), reversed(want), strict=False)
    )


def _product(sizes: Iterable[Any]) -> Any:
    total: Any = 1
    for size in sizes:
        if size is None:
            return None
        total *= size
    return total
