"""rms_norm and its gradients by the compiled kernels of rmsnorm.cpu, hundreds of times as fast as the golden.

    from rmsnorm.numpy_impl.fast import rms_norm, rms_norm_vjp

The arithmetic has the 53 bits of float64, that of the golden 106. So f16, bf16 and f32 equal the golden's results
unless the exact result is within a few 2^-53 of the middle between two numbers, and y in f64 is within an ulp:
docs/numbers.md. For a residual whose sum is rounded after the norm, for gradients where residual or dh have
another dtype than x, and without kernels, these functions call the golden.

dscale and dbias are summed in float64 over chunks of rows, from the first row to the last, and then over the chunks,
from the first to the last. The size of a chunk depends on the number and the length of the rows alone: not on how they
are batched, and not on the number of threads.
"""

from __future__ import annotations

import warnings
from fractions import Fraction
from functools import lru_cache
from typing import Any, Never

import numpy as np

from rmsnorm import cpu
from rmsnorm.cpu.prepared import Prepared, prepare
from rmsnorm.numpy_impl import functional as golden
from rmsnorm.numpy_impl import kernels
from rmsnorm.numpy_impl.functional import ArrayLike, arrays
from rmsnorm.specification.call import Axis
from rmsnorm.specification.interface import dy_and_dh, forward_of, gradients_of, unknown_argument
from rmsnorm.specification.variants import Preset, Variant


@forward_of(np.ndarray)
def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    variant: Preset | Variant = "standard",
    eps: float | None = None,
    partial: float | Fraction | None = None,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    mask: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    gate: ArrayLike | None = None,
    out_dtype: Any = None,
    return_inverse_rms: bool = False,
    **unknown: Never,
) -> Any:
    """Root mean square layer normalization: numpy_impl.rms_norm, its arguments, results, errors and bits.

    Example:
        >>> import numpy as np
        >>> rms_norm(np.array([[3.0, 4.0]]), np.array([1.0, 2.0]), variant="paper").round(4)
        array([[0.8485, 2.2627]])
    """
    if unknown:
        raise unknown_argument("rms_norm", rms_norm, unknown)
    x, scale, bias, mask, residual, gate = arrays(
        "rms_norm", x=x, scale=scale, bias=bias, mask=mask, residual=residual, gate=gate
    )
    options = (variant, eps, partial, axis, feature_axis, out_dtype)
    prepared = prepare("rms_norm", options, x, scale, bias, mask, residual, gate)
    call = prepared.call
    if call.exact_sum or not _has_kernels(prepared):  # the kernels normalise a rounded sum
        return golden.rms_norm(
            x, scale, bias, variant=call.variant, axis=axis, feature_axis=feature_axis, mask=mask, residual=residual,
            gate=gate, out_dtype=out_dtype, return_inverse_rms=return_inverse_rms,
        )  # fmt: skip
    y, h, inverse_rms = kernels.forward(prepared, x, scale, bias, mask, residual, gate, return_inverse_rms)
    outputs = [y]
    if h is not None:
        outputs.append(h)
    if inverse_rms is not None:
        with np.errstate(over="ignore"):  # in rows whose norm is subnormal
            outputs.append(inverse_rms.astype(call.inverse_rms, copy=False))
    return tuple(outputs) if len(outputs) > 1 else y


@gradients_of(np.ndarray)
def rms_norm_vjp(
    dy: Any,
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    variant: Preset | Variant = "standard",
    eps: float | None = None,
    partial: float | Fraction | None = None,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    mask: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    gate: ArrayLike | None = None,
    out_dtype: Any = None,
    **unknown: Never,
) -> Any:
    """Gradients of rms_norm: numpy_impl.rms_norm_vjp, its arguments, results, errors and bits.

    Example:
        >>> import numpy as np
        >>> dx, dscale, _ = rms_norm_vjp(np.ones(2), np.array([3.0, 4.0]), np.ones(2), variant="paper")
        >>> dx.round(4), dscale.round(4)
        (array([ 0.0453, -0.0339]), array([0.8485, 1.1314]))
    """
    if unknown:
        raise unknown_argument("rms_norm_vjp", rms_norm_vjp, unknown)
    dy, dh = dy_and_dh(dy, residual)
    x, scale, bias, mask, residual, gate, dy, dh = arrays(
        "rms_norm_vjp", x=x, scale=scale, bias=bias, mask=mask, residual=residual, gate=gate, dy=dy, dh=dh
    )
    options = (variant, eps, partial, axis, feature_axis, out_dtype)
    prepared = prepare("rms_norm_vjp", options, x, scale, bias, mask, residual, gate, dy, dh)
    call = prepared.call
    one_dtype = {array.dtype.name for array in (x, residual, dh) if array is not None} == {call.x}
    if call.exact_sum or not one_dtype or not _has_kernels(prepared):
        return golden.rms_norm_vjp(
            dy if dh is None else (dy, dh), x, scale, bias, variant=call.variant, axis=axis, feature_axis=feature_axis,
            mask=mask, residual=residual, gate=gate, out_dtype=out_dtype,
        )  # fmt: skip
    with np.errstate(all="ignore"):
        h = x if residual is None else x + residual  # all have one dtype: each sum is rounded once
    dx, dscale, dbias, dgate = kernels.backward(prepared, dy, h, scale, bias, mask, dh, gate)
    return dx, dscale, dbias, *(() if residual is None else (dx.copy(),)), *(() if gate is None else (dgate,))


def _has_kernels(prepared: Prepared) -> bool:
    """Whether kernels compute a call. Without any, the one warning is that of this module."""
    return _say_what_is_missing() is None and prepared.in_memory()[1] is None


@lru_cache(maxsize=1)
def _say_what_is_missing() -> str | None:
    """If there are no kernels, a warning that has the line that imported or first called this module."""
    missing = None if cpu.is_switched_off() else cpu.what_is_missing()
    if missing is not None:
        warnings.warn(
            f"rmsnorm: numpy_impl.fast is now the golden, 200 to 1,600 times as slow, as {missing}", stacklevel=3
        )
    return missing


_say_what_is_missing()  # before any work
