"""The sum of the parts of several ranks, and of a residual, in the orders of rounding that engines have."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add as plus
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np

from rmsnorm.numpy_impl.arithmetic import add
from rmsnorm.numpy_impl.double_double import Array, DoubleDouble
from rmsnorm.specification import dtypes, errors

Order: TypeAlias = Literal["sum_rounded", "each_rounded", "rounded_once", "truncated"]
ORDERS: Final[tuple[Order, ...]] = get_args(Order)


def all_reduced(parts: Sequence[Any] | Array, residual: Any = None, *, order: Order = "sum_rounded") -> Array:
    """The sum over ranks with a residual: h, the x of the norm that follows.

        sum_rounded     h = R(R(p_1 + ... + p_n) + residual)
        each_rounded    h = R(R(... R(R(p_1 + p_2) + p_3) ... + p_n) + residual)
        rounded_once    h = R(p_1 + ... + p_n + residual)
        truncated       h = R(T(p_1 + ... + p_n) + residual)

    R rounds to nearest with ties to even, and T towards zero. What is not rounded is a sum in 106 bits. A norm that
    reads h before the last rounding is ``rms_norm(all_reduced(parts, order=order), residual=residual)`` with
    ``residual_rounding="after"`` of the variant, but for ``rounded_once``.

    Args:
        parts: p_1 to p_n, in the order of the ranks, of one shape and one dtype: f16, bf16, f32 or f64.
        residual: shaped as a part, floating-point; None adds nothing, and the last rounding is left out.
        order: which sums are rounded.

    Returns:
        h, shaped as a part, in the dtype of the parts, with ``residual`` in promote(part, residual).

    Raises:
        TypeError: a part or the residual is not floating-point, or the parts have several dtypes.
        ValueError: there is no part, the shapes differ, or there is no such order.

    Source: vLLM, csrc/custom_all_reduce.cuh: packed_reduce adds in float32 and rounds once; a ring all-reduce in the
    dtype rounds each partial sum.

    Example:
        >>> import numpy as np
        >>> parts = np.float16([[2048], [1], [1]])  # from 2048 on float16 has even numbers alone
        >>> [float(all_reduced(parts, order=order)[0]) for order in ("sum_rounded", "each_rounded")]
        [2050.0, 2048.0]
    """
    op = "all_reduced"
    if order not in ORDERS:
        raise errors.not_a_choice(op, "order", order, ORDERS)
    arrays = [np.asarray(part) for part in parts]
    if not arrays:
        raise errors.out_of_domain(op, "parts", parts, "the part of one rank at least", "pass a list of arrays")
    dtype, shape = arrays[0].dtype.name, arrays[0].shape
    residual = None if residual is None else np.asarray(residual)
    more = {} if residual is None else {"residual": residual}
    for name, array in ({f"parts[{i}]": part for i, part in enumerate(arrays)} | more).items():
        allowed = dtypes.FLOATS if name in ("parts[0]", "residual") else (dtype,)
        if array.dtype.name not in allowed:
            raise errors.wrong_dtype(op, name, array.dtype.name, allowed)
        if array.shape != shape:
            raise errors.wrong_shape(op, name, array.shape, shape, "the first part")
    stored = dtypes.promote(dtype, None if residual is None else residual.dtype.name)
    if order == "each_rounded":
        return add(reduce(lambda total, part: add(total, part, dtype), arrays), residual, stored)
    with np.errstate(all="ignore"):
        total = reduce(plus, map(DoubleDouble, arrays))
        if order == "rounded_once" and residual is not None:
            return (total + DoubleDouble(residual)).round(stored)
        return add(total.truncate(dtype) if order == "truncated" else total.round(dtype), residual, stored)
