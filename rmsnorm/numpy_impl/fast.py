"""rms_norm and its gradients by the compiled kernels of rmsnorm.cpu, hundreds of times as fast as the golden.

    from rmsnorm.numpy_impl.fast import rms_norm, rms_norm_vjp

The arithmetic has the 53 bits of float64, that of the golden 106. So the results equal the golden's unless the exact
result is within a few 2^-53 of the middle between two numbers: docs/exactness.md. Where no kernel computes a call,
these functions call the golden: with float64, a mask or a gate, for other axes than the last ones, for a gain that
elements of a row share, for a residual whose sum is rounded after the norm, and for gradients where residual or dh
have another dtype than x.

dscale and dbias are summed in float64 over chunks of rows, from the first row to the last, and then over the chunks,
from the first to the last. The size of a chunk depends on the number and the length of the rows alone: not on how they
are batched, and not on the number of threads.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import numpy as np

from rmsnorm import cpu
from rmsnorm.cpu.threads import own_threads
from rmsnorm.engines import Prepared, prepare
from rmsnorm.numpy_impl import functional as golden
from rmsnorm.numpy_impl.double_double import Array
from rmsnorm.numpy_impl.functional import ArrayLike, arrays, narrowed
from rmsnorm.specification.call import Call
from rmsnorm.specification.interface import Forward, Gradients, Options, declared


def _rms_norm(options: Options, return_inverse_rms: bool, *values: Any) -> Any:
    names = ("x", "scale", "bias", "mask", "residual", "gate")
    x, scale, bias, mask, residual, gate = arrays("rms_norm", **dict(zip(names, values, strict=True)))
    prepared = prepare("rms_norm", options, x, scale, bias, mask, residual, gate)
    call, launch = prepared.call, _launch(prepared)
    if launch is None:
        return golden.compute(options, return_inverse_rms, x, scale, bias, mask, residual, gate)
    y, h, inverse_rms = run_kernel(launch, call, return_inverse_rms, x, residual, narrowed(call, scale), bias)
    outputs = [y] if h is None else [y, h]
    if inverse_rms is not None:
        with np.errstate(over="ignore"):  # in rows whose norm is subnormal
            outputs.append(inverse_rms.astype(call.inverse_rms_dtype, copy=False))
    return tuple(outputs) if len(outputs) > 1 else y


def run_kernel(
    launch: Any, call: Call, with_inverse_rms: bool, x: Array, residual: Array | None, scale: Array | None,
    bias: Array | None,
) -> tuple[Array, Array | None, Array | None]:  # fmt: skip
    """y, x + residual (None without one) and, if asked for, 1 / rho in float64."""
    h, inverse_rms = None, np.empty(launch.reduced) if with_inverse_rms else None
    if residual is not None:
        x, residual = x.astype(call.x_dtype, copy=False), np.ascontiguousarray(residual, call.x_dtype)
        h = np.empty(call.shape, call.x_dtype)
    y = np.empty(call.shape, call.result_dtype)
    x, x_step = _rows(launch.n, x)
    threads, gomp_parallel = launch.forward_threads(own_threads)
    launch.native.forward(
        threads=threads, gomp_parallel=gomp_parallel, x=x, x_step=x_step, residual=residual, scale=_gapless(scale),
        bias=_gapless(bias), y=y, h=h, inverse_rms=inverse_rms,
    )  # fmt: skip
    return y, h, inverse_rms


def _rms_norm_vjp(options: Options, *values: Any) -> Any:
    names = ("dy", "dh", "x", "scale", "bias", "mask", "residual", "gate")
    dy, dh, x, scale, bias, mask, residual, gate = arrays("rms_norm_vjp", **dict(zip(names, values, strict=True)))
    prepared = prepare("rms_norm_vjp", options, x, scale, bias, mask, residual, gate, dy, dh)
    call, launch = prepared.call, _launch(prepared)
    one_dtype = {array.dtype.name for array in (x, residual, dh) if array is not None} == {call.x_dtype}
    if launch is None or not one_dtype:
        return golden.differentiate(options, dy, dh, x, scale, bias, mask, residual, gate)
    with np.errstate(all="ignore"):
        h = x if residual is None else x + residual  # all have one dtype: each sum is rounded once
    dx, scale = np.empty(call.shape, call.x_dtype), _gapless(narrowed(call, scale))
    dscale, dbias = (None if p is None else np.empty(p.shape, p.dtype.newbyteorder("=")) for p in (scale, bias))
    h, h_step = _rows(launch.n, h)
    threads, gomp_parallel = launch.backward_threads(own_threads)
    launch.native.backward(
        threads=threads, gomp_parallel=gomp_parallel, h=h, h_step=h_step, scale=scale, inverse_rms=None,
        dy=_gapless(dy), dh=_gapless(dh), dx=dx, dscale=dscale, dbias=dbias,
    )  # fmt: skip
    return dx, dscale, dbias, *(() if residual is None else (dx.copy(),))


rms_norm: Forward[ArrayLike, Array]
rms_norm_vjp: Gradients[ArrayLike, Array]
rms_norm, rms_norm_vjp = declared(__name__, "numpy.array", _rms_norm, _rms_norm_vjp)


def _launch(prepared: Prepared) -> Any:
    """What the kernels need for a call; None if they do not compute it."""
    call = prepared.call
    if call.exact_sum or call.in_rows is not call or _say_what_is_missing() is not None:
        return None
    return prepared.in_memory()[0]


def why_not(prepared: Prepared, _: Any) -> str | None:
    """Why no kernel computes a call; None if one does."""
    call = prepared.call
    reason: str | None = prepared.in_memory()[1]
    if reason is not None:
        return reason
    if call.gate_dtype is not None:
        return "it has a gate"
    if call.exact_sum:
        return "x + residual is normalised before it is rounded"
    return None if call.in_rows is call else "elements of a row share a parameter"


def _gapless(array: Array | None) -> Any:
    """The array without gaps, in the byte order of this machine."""
    if array is None or (array.flags.c_contiguous and array.dtype.isnative):
        return array
    return np.ascontiguousarray(array, array.dtype.newbyteorder("="))


def _rows(n: int, x: Array) -> tuple[Array, int]:
    """A matrix of rows of n, each without a gap, and the bytes from one to the next: x, a view of it, or a copy."""
    if not x.flags.c_contiguous or not x.dtype.isnative:
        x = x.reshape(-1, n)
        if (x.strides[1] == x.itemsize or n == 1) and x.dtype.isnative:
            return x, x.strides[0]
        x = np.ascontiguousarray(x, x.dtype.newbyteorder("="))
    return x, n * x.itemsize


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
