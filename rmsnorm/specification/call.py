"""What a call of rms_norm means: its axes, sizes and dtypes, checked once for all frameworks. No array library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from rmsnorm.specification import errors
from rmsnorm.specification.variants import Variant

Axis: TypeAlias = int | Sequence[int]
Shape: TypeAlias = tuple[Any, ...]  # of int, None for an unknown size, or symbols of a compiler


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
        x_dtype: of what is normalised: that of x, or that to which x + residual is rounded before it is normalised.
        sum_dtype: T, that of x, or of the returned x + residual.
        norm_dtype: to which h / rho is rounded before the gain; None if it is not rounded there.
        product_dtype: of the operations with the parameters if ``norm_dtype`` is set.
        result_dtype: of y.
        inverse_rms_dtype: of the returned 1 / rho.
        gate_dtype: of the product with the gate; None without one.
        exact_sum: whether x + residual is normalised before it is rounded to T.
        masked: whether a mask says which elements count.
        gain_dtype: to which the gain is rounded first; None if it is taken as it is.
    """

    variant: Variant
    shape: Shape
    axes: tuple[int, ...]
    feature_axes: tuple[int, ...]
    eps: float
    x_dtype: str
    sum_dtype: str
    norm_dtype: str | None
    product_dtype: str
    result_dtype: str
    inverse_rms_dtype: str
    gate_dtype: str | None = None
    exact_sum: bool = False
    masked: bool = False
    gain_dtype: str | None = None

    def __hash__(self) -> int:
        return hash((self.variant, self.shape, self.x_dtype))  # fewer fields, to be fast: plans are looked up by it

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
    def without_gate(self) -> Call:
        """The norm alone: of h * f(z) before, and after with y in the dtype of the product."""
        assert self.gate_dtype is not None  # noqa: S101
        if self.is_gated_before:
            return replace(self, x_dtype=self.gate_dtype, sum_dtype=self.gate_dtype, gate_dtype=None, exact_sum=False)
        return replace(self, result_dtype=self.gate_dtype, gate_dtype=None)

    @property
    def is_gated_before(self) -> bool:
        return self.gate_dtype is not None and self.variant.gate_position == "before"

    @property
    def has_last_axes(self) -> bool:
        """Whether the normalised axes are the last ones."""
        return self.axes == tuple(range(len(self.shape) - len(self.axes), len(self.shape)))

    @property
    def first_of_row(self) -> int:
        """The axis from which on kernels take the elements as a row, with all that is normalised and all parameters."""
        return min(self.axes[0], self.feature_axes[0])

    @property
    def in_rows(self) -> Call:
        """The call as kernels compute it: without the gate, and with a gain and a bias for each element of a row."""
        norm = self if self.gate_dtype is None else self.without_gate
        axes = tuple(range(self.first_of_row, len(self.shape)))
        return norm if self.feature_axes == axes else replace(norm, feature_axes=axes)

    @property
    def feature_shape(self) -> Shape:
        """Shape in which the parameters broadcast against x."""
        return tuple(size if axis in self.feature_axes else 1 for axis, size in enumerate(self.shape))

    @property
    def shared_axes(self) -> tuple[int, ...]:
        """Axes over which the gradients of the parameters are summed."""
        return tuple(axis for axis in range(len(self.shape)) if axis not in self.feature_axes)


def _product(sizes: Iterable[Any]) -> Any:
    total: Any = 1
    for size in sizes:
        if size is None:
            return None
        total *= size
    return total
