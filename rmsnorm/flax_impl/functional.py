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
    """``rms_norm``; with another space than that of one device for rows that are spread over several."""
    *others, out_dtype = options
    x, scale, bias, mask, residual, gate = arrays(
        "rms_norm", x=x, scale=scale, bias=bias, mask=mask, residual=residual, gate=gate
    )
    options = *others, _checked(out_dtype, "rms_norm")  # type: ignore[assignment]
    prepared = prepare("rms_norm", options, x, scale, bias, mask, residual, gate)
    call, kernel_call = prepared.call, None
    given = (x, scale, bias, mask, residual, gate)
    if not ops.is_spread and kernels.why_not_traced(prepared.kernel_call, prepared.formats, given) is None:
        kernel_call = prepared.kernel_call
    y, total, inverse_rms = _forward(call, kernel_call, ops, returns_inverse_rms, *given)
    results = without_none((y, total, inverse_rms))
    return tuple(results) if len(results) > 1 else y


def gradients(
    options: Options, dy: Any, dh: Any, x: Any, scale: Any, bias: Any, mask: Any, residual: Any, gate: Any
) -> Any:
    *others, out_dtype = options
    x, scale, bias, mask, residual, gate, dy, dh = arrays(
        "rms_norm_vjp", x=x, scale=scale, bias=bias, mask=mask, residual=residual, gate=gate, dy=dy, dh=dh
    )
    options = *others, _checked(out_dtype, "rms_norm_vjp")  # type: ignore[assignment]
    prepared = prepare("rms_norm_vjp", options, x, scale, bias, mask, residual, gate, dy, dh)
    call, kernel_call, given = prepared.call, prepared.kernel_call, (x, scale, bias, mask, residual, gate, dy, dh)
    is_plain = gate is None and kernel_call.feature_axes == call.feature_axes
    is_plain = is_plain and {array.dtype.name for array in without_none((x, residual, dh))} == {call.x}
    if not is_plain or kernels.why_not_traced(kernel_call, prepared.formats, given) is not None:
        kernel_call = None
    return _gradients(call, kernel_call, *given)


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

    def norm(x: Any, residual: Any, scale: Any, bias: Any) -> Any:
        h, total = _summed(kernel_call, x, residual)
        return kernels.norm(kernel_call, Operands(h, scale, bias)), total

    if kernel_call is not None:
        y, total = recipe.around(HERE, call, norm, x, residual, scale, bias, gate)
    else:
        h, total = _summed(call, x, residual)
        of = Operands(h, scale, bias, gate, mask)
        if ops.is_spread or kernels.is_divided(of):  # JAX differentiates what is summed over devices
            y = jax.checkpoint(bind(kernels.forward, call, ops=ops))(of)
        else:
            y = kernels.norm(call, of)
    inverse_rms = None
    if returns_inverse_rms:
        row = recipe.forward(ops, call, x, residual, scale, bias, mask, gate)[2]
        inverse_rms = recipe.inverse_rms(ops, call, row)
    return y, total, inverse_rms


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
    wide = dtypes.arithmetic(call.x)  # which has the digits to round the sum of two numbers of 16 bits once
    exact = x.astype(wide) + residual.astype(wide)
    return exact.astype(call.x), exact.astype(call.sum)


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
