"""Has the gradient of x a derivative, and is it the right one?"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from rmsnorm.accuracy.bounds import FORMULA
from rmsnorm.numpy_impl import rms_norm_vjp
from rmsnorm.parity.cases import Array, Case, Data
from rmsnorm.parity.comparison import Comparison, Skip
from rmsnorm.parity.fitting import adapted_data, in_groups, without_groups
from rmsnorm.parity.judge import failed
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import Target, TargetError

SECOND: Final = "second_derivative"
_CASE: Final = Case("dx", (4, 64), ("standard",), "the derivative of dx", "alike")
_STEP: Final = 2.0**-17  # of a difference in float64 for numbers of size 1: near the cube root of the unit roundoff
_MEND: Final = "mark backward with once_differentiable, so that it raises, or let it differentiate dx"


def of_second(target: Target, variant: Variant, group_size: int | None, skipped: list[Skip]) -> list[Comparison]:
    """Whether the derivative of sum(u dx) for x is the golden's, for numbers u, within a thousandth of its largest.

    One that is refused, as after ``once_differentiable``, is no difference: nobody computes with it. One that is
    missing in silence is.
    """
    if target.derivatives is not None:
        return []
    sized, data = adapted_data(target, _CASE, variant, "float32", group_size)
    u = np.random.default_rng(61).normal(size=data.x.shape).astype(np.float32)
    names = ("x", "scale", "bias", "mask", "residual", "gate")
    present = {name: array for name in names if (array := getattr(data, name)) is not None}
    try:
        got = sized.twice(data.dy, u, **present)
    except (TargetError, NotImplementedError) as error:
        skipped.append(Skip("second derivatives", "", str(error) or f"not asked in {target.framework}"))
        return []
    if got is None:
        return [failed(SECOND, f"dx is a constant to automatic differentiation; {_MEND}")]
    want = _golden(data, u, group_size)
    share = float(np.max(np.abs(got - want)) / np.max(np.abs(want)))
    detail = "" if share <= FORMULA else f"that of dx is off by {share:.3g} of its largest element; {_MEND}"
    return [Comparison(SECOND, share, FORMULA, 0.0, 0.0, 0.0, not detail, detail)]


def _golden(data: Data, u: Array, group_size: int | None) -> Array:
    """The derivative of dx along u: as dx is a gradient itself, its derivatives are symmetric."""
    few = data if group_size is None else in_groups(data, group_size)
    along = u.astype(np.float64).reshape(few.x.shape)

    def dx(step: float) -> Array:
        def wide(array: Any) -> Any:
            return array if array is None or array.dtype == bool else array.astype(np.float64)

        arrays = {name: wide(array) for name, array in few.arrays.items()}
        x, options = wide(few.x) + step * along, {**few.options, "eps": few.call.eps}
        return rms_norm_vjp(wide(few.dy), x, wide(few.scale), wide(few.bias), **options, **arrays)[0]

    return without_groups((dx(_STEP) - dx(-_STEP)) / (2 * _STEP), group_size)
