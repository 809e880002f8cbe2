"""RMSNorm on JAX arrays, with an analytic backward that keeps x and 1 / rho.

    y = h / rho * (o + g) + b        rho = sqrt(mean(h_i^2) + eps), or as the variant says

Source: Zhang & Sennrich 2019 (arXiv 1910.07467). The arithmetic is in operations.py.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Never

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from rmsnorm.cpu.prepared import Options, prepare
from rmsnorm.flax_impl.kernels import gradients, normalise
from rmsnorm.flax_impl.operations import Across
from rmsnorm.flax_impl.rounding import add, cast, double
from rmsnorm.specification import dtypes, errors
from rmsnorm.specification.absent import without_none
from rmsnorm.specification.call import Axis, Call
from rmsnorm.specification.interface import dy_and_dh, forward_of, gradients_of, unknown_argument
from rmsnorm.specification.variants import Preset, Variant


@forward_of(jax.Array)
def rms_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None = None,
    bias: jax.typing.ArrayLike | None = None,
    *,
    variant: Preset | Variant = "standard",
    eps: float | None = None,
    partial: float | Fraction | None = None,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    mask: jax.typing.ArrayLike | None = None,
    residual: jax.typing.ArrayLike | None = None,
    gate: jax.typing.ArrayLike | None = None,
    out_dtype: Any = None,
    return_inverse_rms: bool = False,
    **unknown: Never,
) -> Any:
    """Root mean square layer normalization.

        y = h / rho * (o + scale) + bias,    h = x + residual,    rho = sqrt(mean(h_i^2) + eps)

    with the place of eps, the offset o, the counted elements and the roundings of the variant.

    Args:
        x: floating-point, any shape of at least one axis: f16, bf16, f32 or f64.
        scale: gain g, of the sizes of x along the feature axes; None multiplies by 1, without the offset.
        bias: b, of the same sizes; None adds nothing.
        variant: name of a preset or a Variant.
        eps: replaces the variant's eps.
        partial: fraction of the elements, counted from the first, that the statistic uses; replaces the variant's.
        axis: normalised axis or axes.
        feature_axis: axis or axes of the parameters; None for the normalised ones.
        mask: bool, broadcasts to x: True counts in the statistic. Elsewhere y is normalised, too, but every derivative
            takes it as a constant, so values under the mask reach no gradient. A row without counted elements gives 0.
        residual: added to x first, in promote(x, residual); the sum h is returned beside y. ``residual_rounding`` of
            the variant says whether y is that of h before or after it is rounded.
        gate: z, floating-point, shaped as x: y is multiplied by f(z), or h is before it is normalised, as
            ``gate_function`` and ``gate_position`` of the variant say.
        out_dtype: dtype of y; None for the variant's rule.
        return_inverse_rms: also return 1 / rho, 0 in rows without counted elements; derivatives take it as a constant.

    Returns:
        y, shaped as x; with ``residual`` (y, h). With ``return_inverse_rms`` 1 / rho follows: its normalised axes have
        size 1, its dtype is float32, or float64 for f64.

    Raises:
        TypeError: x, a parameter, the residual or the gate is not floating-point, the mask is not bool.
        ValueError: a shape does not fit, an axis is out of range or repeated, eps, partial or variant is not valid.

    Source: Zhang & Sennrich 2019, arXiv 1910.07467, equation 4.

    Example:
        >>> import jax.numpy as jnp
        >>> rms_norm(jnp.array([[3.0, 4.0]]), jnp.array([1.0, 2.0]), variant="paper")
        Array([[0.84852815, 2.2627418 ]], dtype=float32)
    """
    if unknown:
        raise unknown_argument("rms_norm", rms_norm, unknown)
    options = (variant, eps, partial, axis, feature_axis, _checked(out_dtype, "rms_norm"))
    call, y, h, inverse_rms = forward(options, x, scale, bias, mask, residual, gate)
    outputs = [y]
    if h is not None:
        outputs.append(h)
    if return_inverse_rms:
        outputs.append(cast(lax.stop_gradient(inverse_rms), call.inverse_rms))
    return tuple(outputs) if len(outputs) > 1 else y


@gradients_of(jax.Array)
def rms_norm_vjp(
    dy: Any,
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None = None,
    bias: jax.typing.ArrayLike | None = None,
    *,
    variant: Preset | Variant = "standard",
    eps: float | None = None,
    partial: float | Fraction | None = None,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    mask: jax.typing.ArrayLike | None = None,
    residual: jax.typing.ArrayLike | None = None,
    gate: jax.typing.ArrayLike | None = None,
    out_dtype: Any = None,
    **unknown: Never,
) -> Any:
    """Gradients of rms_norm: the product of dy with its Jacobian.

        dx = R^T u,    u = (o + scale) * dy,    dscale = sum over rows of dy * h / rho,    dbias = sum over rows of dy

    A rounding counts as the identity, as in automatic differentiation.

    Args:
        dy: gradient of the loss with respect to y, shaped as x; with ``residual`` it may be a pair (dy, dh).
        x, scale, bias and options: as for rms_norm; ``out_dtype`` has no effect.

    Returns:
        (dx, dscale, dbias), each in the dtype of its argument, None where that is None. With ``residual`` dresidual
        follows, and with ``gate`` dgate.

    Raises:
        TypeError, ValueError: as rms_norm; also when dy has another shape than x.

    Source: Zhang & Sennrich 2019, section 4.2 (the R matrix).

    Example:
        >>> import jax.numpy as jnp
        >>> dx, dscale, _ = rms_norm_vjp(jnp.ones(2), jnp.array([3.0, 4.0]), jnp.ones(2), variant="paper")
        >>> dx, dscale
        (Array([ 0.04525483, -0.03394112], dtype=float32), Array([0.84852815, 1.1313709 ], dtype=float32))
    """
    if unknown:
        raise unknown_argument("rms_norm_vjp", rms_norm_vjp, unknown)
    dy, dh = dy_and_dh(dy, residual)
    x, scale, bias, mask, residual, gate, dy, dh = arrays(
        "rms_norm_vjp", x=x, scale=scale, bias=bias, mask=mask, residual=residual, gate=gate, dy=dy, dh=dh
    )
    options = (variant, eps, partial, axis, feature_axis, _checked(out_dtype, "rms_norm_vjp"))
    call = prepare("rms_norm_vjp", options, x, scale, bias, mask, residual, gate, dy, dh).call
    terms = tuple(t.dtype.name for t in without_none((x, residual)))  # of the sum: its gradient is that of each
    h = add(x, residual, call.x)
    (dx, *dresidual), dscale, dbias, dgate = gradients(call, terms, dy, h, scale, bias, mask, gate, dh)
    return dx, dscale, dbias, *dresidual, *without_none([dgate])


def forward(
    options: Options, x: Any, scale: Any, bias: Any, mask: Any, residual: Any, gate: Any, across: Across | None = None
) -> tuple[Call, jax.Array, jax.Array | None, jax.Array]:
    """The checked call, y, x + residual (None without one), and 1 / rho in float64."""
    x, scale, bias, mask, residual, gate = arrays(
        "rms_norm", x=x, scale=scale, bias=bias, mask=mask, residual=residual, gate=gate
    )
    call = prepare("rms_norm", options, x, scale, bias, mask, residual, gate).call
    h = add(x, residual, call.x)
    y, inverse_rms = normalise(call, across, h, scale, bias, mask, gate)
    total = None if residual is None else h if call.x == call.sum else cast(double(h), call.sum)
    return call, y, total, inverse_rms


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
