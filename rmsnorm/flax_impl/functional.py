"""RMSNorm on JAX arrays, of which differentiation keeps no more than the arguments.

    y = h / rho * (o + g) + b        rho = sqrt(mean(h_i^2) + eps), or as the variant says

Source: Zhang & Sennrich 2019 (arXiv 1910.07467). Kernels compute it (kernels.py), or recipe.py.
"""

from __future__ import annotations

from functools import partial as bind
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from rmsnorm import recipe
from rmsnorm.engines import prepare
from rmsnorm.flax_impl import kernels
from rmsnorm.flax_impl.kernels import HERE, Operands, why_not
from rmsnorm.flax_impl.space import Space
from rmsnorm.specification import dtypes, errors
from rmsnorm.specification.absent import without_none
from rmsnorm.specification.call import Call
from rmsnorm.specification.interface import Forward, Gradients, Options, declared


def forward(
    options: Options, returns_inverse_rms: bool, x: Any, scale: Any = None, bias: Any = None, mask: Any = None,
    residual: Any = None, gate: Any = None, ops: Space = HERE,
) -> Any:  # fmt: skip
    """``rms_norm``; of rows that are spread over devices with the space of these."""
    *others, out_dtype = options
    given = arrays("rms_norm", x=x, scale=scale, bias=bias, mask=mask, residual=residual, gate=gate)
    prepared = prepare("rms_norm", (*others, _checked(out_dtype, "rms_norm")), *given)
    kernel_call: Call | None = prepared.kernel_call
    if ops.is_spread or kernels.why_not_traced(prepared.kernel_call, prepared.formats, given) is not None:
        kernel_call = None
    results = without_none(_forward(prepared.call, kernel_call, ops, returns_inverse_rms, *given))
    return tuple(results) if len(results) > 1 else results[0]


def gradients(
    options: Options, dy: Any, dh: Any, x: Any, scale: Any, bias: Any, mask: Any, residual: Any, gate: Any
) -> Any:
    *others, out_dtype = options
    given = arrays("rms_norm_vjp", x=x, scale=scale, bias=bias, mask=mask, residual=residual, gate=gate, dy=dy, dh=dh)
    prepared = prepare("rms_norm_vjp", (*others, _checked(out_dtype, "rms_norm_vjp")), *given)
    kernel_call: Call | None = prepared.kernel_call
    x, *_, residual, gate, _, dh = given
    is_plain = gate is None and prepared.kernel_call.feature_axes == prepared.call.feature_axes
    is_plain = is_plain and {array.dtype.name for array in without_none((x, residual, dh))} == {prepared.call.x_dtype}
    if not is_plain or kernels.why_not_traced(prepared.kernel_call, prepared.formats, given) is not None:
        kernel_call = None
    return _gradients(prepared.call, kernel_call, *given)


__all__ = ["rms_norm", "rms_norm_vjp", "why_not"]
rms_norm: Forward[jax.typing.ArrayLike, jax.Array]
rms_norm_vjp: Gradients[jax.typing.ArrayLike, jax.Array]
rms_norm, rms_norm_vjp = declared(__name__, "jax.numpy.array", forward, gradients)


@bind(jax.jit, static_argnums=(0, 1, 2, 3))
def _forward(
    call: Call, kernel_call: Call | None, ops: Space, returns_inverse_rms: bool, x: Any, scale: Any, bias: Any,
    mask: Any, residual: Any, gate: Any,
) -> Any:  # fmt: skip
    """y, x + residual and 1 / rho, the last two None if they are not returned."""

    if kernel_call is None:
        y, total = _norm(call, x, residual, scale, bias, gate, mask, ops)
    else:
        y, total = recipe.around(HERE, call, bind(_norm, kernel_call), x, residual, scale, bias, gate)
    inverse_rms = None
    if returns_inverse_rms:
        row = recipe.forward(ops, call, x, residual, scale, bias, mask, gate)[2]
        inverse_rms = recipe.inverse_rms(ops, call, row)
    return y, total, inverse_rms


def _norm(
    call: Call, x: Any, residual: Any, scale: Any, bias: Any, gate: Any = None, mask: Any = None, ops: Space = HERE
) -> tuple[Any, Any]:
    h, total = _summed(call, x, residual)
    of = Operands(h, scale, bias, gate, mask)
    if ops.is_spread or kernels.is_divided(of):  # what is summed over devices, and what not, JAX knows itself
        return jax.checkpoint(bind(kernels.forward, call, ops=ops))(of), total
    return kernels.norm(call, of), total


@bind(jax.jit, static_argnums=(0, 1))
def _gradients(
    call: Call, kernel_call: Call | None, x: Any, scale: Any, bias: Any, mask: Any, residual: Any, gate: Any, dy: Any,
    dh: Any,
) -> Any:  # fmt: skip
    of = Operands(_summed(call, x, residual)[0], scale, bias, gate, mask)
    if kernel_call is not None:
        dx, dscale, dbias, dgate = kernels.gradients(kernel_call, of, dy, dh)
    else:
        dx, dscale, dbias, dgate = kernels.backward(call, of, dy, dh)
    terms = [dx.astype(term.dtype) for term in without_none((x, residual))]  # the gradient of a sum is that of each
    return terms[0], dscale, dbias, *terms[1:], *without_none([dgate])


def _summed(call: Call, x: Any, residual: Any) -> tuple[Any, Any]:
    """What is normalised, and x + residual as it is returned."""
    if residual is None:
        return x, None
    wide = dtypes.arithmetic(call.x_dtype)  # which has the digits to round the sum of two numbers of 16 bits once
    exact = x.astype(wide) + residual.astype(wide)
    return exact.astype(call.x_dtype), exact.astype(call.sum_dtype)


def arrays(op: str, **values: Any) -> list[Any]:
    """The arguments as arrays of JAX, which has float64 only with x64 enabled."""
    return [value if isinstance(value, jax.Array) else _array(op, name, value) for name, value in values.items()]


def _array(op: str, name: str, value: Any) -> jax.Array | None:
    if value is None and name not in ("x", "dy"):
        return None
    if not isinstance(value, (np.ndarray, np.generic)):
        raise errors.wrong_type(op, name, value, "a jax.Array", "convert it with jnp.asarray")
    return jnp.asarray(dtypes.native(value))


def _checked(out_dtype: Any, op: str) -> str | None:
    if out_dtype is None:
        return None
    name = errors.dtype_named(op, "out_dtype", out_dtype)
    if name == "float64" and not jax.config.jax_enable_x64:
        raise errors.out_of_domain(op, "out_dtype", name, "at most 32 bits while x64 is off", "set jax_enable_x64")
    return name
