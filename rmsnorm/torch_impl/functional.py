"""RMSNorm on PyTorch tensors, with an analytic backward that keeps x and 1 / rho.

    y = a / rho * (o + g) + b        rho = sqrt(mean(a_i^2) + eps), or as the variant says

Source: Zhang & Sennrich 2019 (arXiv 1910.07467). All arithmetic is float64, so that results in 16 and 32 bits are
correctly rounded and no square of theirs leaves the range. Where x or y is float64 itself, the statistic is scaled by
a power of two and what each operation of the forward pass rounds off is carried along.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rmsnorm import dtypes, errors
from rmsnorm.call import Axis, Call, Spec, resolve
from rmsnorm.variants import Variant, derive



def rms_norm(
    x: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    variant: str | Variant = "standard",
    eps: float | None = None,
    partial: float | Fraction | None = None,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    mask: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: Any = None,
    return_inverse_rms: bool = False,
) -> Any:
    """Root mean square layer normalization.

        y = a / rho * (o + scale) + bias,    a = x + residual,    rho = sqrt(mean(a_i^2) + eps)

    with the place of eps, the offset o, the counted elements and the roundings of the variant.

    Args:
        x: floating-point, any shape of at least one axis: f16, bf16, f32 or f64.
        scale: gain g, of the sizes of x along the feature axes; None multiplies by 1, without the offset.
        bias: b, likewise.
        variant: name of a preset or a Variant.
        eps: in place of the variant's.
        partial: fraction of the elements, from the first, that enter the statistic; in place of the variant's.
        axis: normalised axis or axes.
        feature_axis: axis or axes of the parameters; None for the normalised ones.
        mask: bool, broadcasting to x: True counts in the statistic. Elsewhere y is normalised likewise but constant to
            every derivative, so values under the mask reach no gradient. A row with nothing counted gives 0.
        residual: added to x first, in promote(x, residual), and a returned beside y.
        out_dtype: of y; None for the variant's rule.
        return_inverse_rms: also return 1 / rho, 0 in rows with nothing counted; constant to every derivative.

    Returns:
        y, shaped as x; with ``residual`` (y, a); with ``return_inverse_rms`` followed by 1 / rho, whose normalised
        axes have size 1, in float32, for f64 in float64.

    Raises:
        TypeError: x, a parameter or the residual is not floating-point, the mask is not bool.
        ValueError: a shape does not fit, an axis is out of range or repeated, eps, partial or variant is not valid.

    Source: Zhang & Sennrich 2019, arXiv 1910.07467, equation 4.

    Example:
        >>> import torch
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), variant="paper")
        tensor([[0.8485, 2.2627]])
    """
    call = _resolve(
        "rms_norm", x, scale, bias, mask, residual, out_dtype,
        variant=derive("rms_norm", variant, eps, partial), axis=axis, feature_axis=feature_axis,
    )  # fmt: skip
    a = _add(x, residual, call.x)
    forward = _forward if _is_transformed() else _RMSNorm.apply
    y, inverse_rms = forward(call, a, scale, bias, mask)
    outputs = [y]
    if residual is not None:
        outputs.append(a)
    if return_inverse_rms:
        outputs.append(_cast(inverse_rms.detach(), call.inverse_rms))
    return tuple(outputs) if len(outputs) > 1 else y


def rms_norm_vjp(
    dy: Any,
    x: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    variant: str | Variant = "standard",
    eps: float | None = None,
    partial: float | Fraction | None = None,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    mask: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: Any = None,
) -> Any:
    """Gradients of rms_norm: the product of dy with its Jacobian.

        dx = R^T u,    u = (o + scale) * dy,    dscale = sum over rows of dy * a / rho,    dbias = sum over rows of dy

    A rounding counts as the identity, as in automatic differentiation.

    Args:
        dy: gradient of the loss with respect to y, shaped as x; with ``residual`` it may be a pair (dy, da).
        x, scale, bias and options: as for rms_norm; ``out_dtype`` does not enter.

    Returns:
        (dx, dscale, dbias), each in the dtype of its argument, None where that is None; with ``residual``
        (dx, dscale, dbias, dresidual).

    Raises:
        TypeError, ValueError: as rms_norm; also when dy has another shape than x.

    Source: Zhang & Sennrich 2019, section 4.2 (the R matrix).

    Example:
        >>> import torch
        >>> dx, dscale, _ = rms_norm_vjp(torch.ones(2), torch.tensor([3.0, 4.0]), torch.ones(2), variant="paper")
        >>> dx, dscale
        (tensor([ 0.0453, -0.0339]), tensor([0.8485, 1.1314]))
    """
    dy, da = dy if isinstance(dy, tuple) and residual is not None else (dy, None)
    call = _resolve(
        "rms_norm_vjp", x, scale, bias, mask, residual, out_dtype,
        variant=derive("rms_norm_vjp", variant, eps, partial), axis=axis, feature_axis=feature_axis,
        dy=_spec("rms_norm_vjp", "dy", dy), da=_spec("rms_norm_vjp", "da", da),
    )  # fmt: skip
    a = _add(x, residual, call.x)
    inverse_rms = _statistic(call, a, mask).inverse_rms
    dx, dscale, dbias = _backward(call, dy, a, scale, mask, inverse_rms)
    if da is not None:
        dx = dx + da.double()
    dscale = None if scale is None else _cast(dscale, _name(scale))
    dbias = None if bias is None else _cast(dbias, _name(bias))
    if residual is not None:
        return _cast(dx, _name(x)), dscale, dbias, _cast(dx, _name(residual))
    return _cast(dx, _name(x)), dscale, dbias


def rms_norm_jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    variant: str | Variant = "standard",
    eps: float | None = None,
    partial: float | Fraction | None = None,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    mask: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: Any = None,
) -> Tensor:
    """Directional derivative of rms_norm: the product of its Jacobian with the tangents.

        dy = (R dx) * (o + scale) + a / rho * dscale + dbias

    A rounding counts as the identity, and dy is rounded once.

    Args:
        primals: (x, scale, bias); trailing ones may be left out, and be None.
        tangents: (dx, dscale, dbias), each shaped as its primal; None is zero.
        options: as for rms_norm; the residual is a constant.

    Returns:
        dy, shaped as x, in the dtype of y.

    Raises:
        TypeError, ValueError: as rms_norm; also when a tangent has another shape than its primal.

    Source: Zhang & Sennrich 2019, section 4.2 (the R matrix).

    Example:
        >>> import torch
        >>> rms_norm_jvp((torch.tensor([3.0, 4.0]),), (torch.tensor([4.0, -3.0]),), variant="paper")
        tensor([ 1.1314, -0.8485])
    """
    x, scale, bias = _three("primals", primals)
    dx, dscale, dbias = _three("tangents", tangents)
    call = _resolve(
        "rms_norm_jvp", x, scale, bias, mask, residual, out_dtype,
        variant=derive("rms_norm_jvp", variant, eps, partial), axis=axis, feature_axis=feature_axis,
        dx=_spec("rms_norm_jvp", "dx", dx),
        dscale=_spec("rms_norm_jvp", "dscale", dscale), dbias=_spec("rms_norm_jvp", "dbias", dbias),
    )  # fmt: skip
    a = _add(x, residual, call.x)
    inverse_rms = _statistic(call, a, mask).inverse_rms
    return _cast(_tangent(call, a, scale, mask, inverse_rms, dx, dscale, dbias), call.result)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, a: Tensor, scale: Tensor | None, bias: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        y, inverse_rms = _forward(call, a, scale, bias, mask)
        ctx.call, ctx.bias = call, None if bias is None else bias.dtype
        ctx.save_for_backward(a, scale, mask, inverse_rms)
        ctx.save_for_forward(a, scale, mask)
        ctx.mark_non_differentiable(inverse_rms)
        ctx.set_materialize_grads(False)
        return y, inverse_rms

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Any, ...]:
        a, scale, mask, inverse_rms = ctx.saved_tensors
        if dy is None:
            return None, None, None, None, None
        if torch.is_grad_enabled():  # a second derivative goes through 1 / rho as well
            inverse_rms = _statistic(ctx.call, a, mask).inverse_rms
        dx, dscale, dbias = _backward(ctx.call, dy, a, scale, mask, inverse_rms)
        _, needs_a, needs_scale, needs_bias, _ = ctx.needs_input_grad
        return (
            None,
            _cast(dx, _name(a)) if needs_a else None,
            _cast(dscale, _name(scale)) if needs_scale else None,
            dbias.to(ctx.bias) if needs_bias else None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, _: Any, da: Tensor | None, dscale: Tensor | None, dbias: Tensor | None, __: Any) -> Any:
        a, scale, mask = ctx.saved_tensors
        inverse_rms = _statistic(ctx.call, a, mask).inverse_rms
        return _cast(_tangent(ctx.call, a, scale, mask, inverse_rms, da, dscale, dbias), ctx.call.result), None


class _Round(torch.autograd.Function):
    """float64 to a 16-bit format in one rounding; the identity to every derivative.

    PyTorch casts through float32 and so rounds twice. Rounding to odd first (cut off, then set the last bit if anything
    was lost) makes the second rounding right: Boldo & Melquiond 2008.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.wide, ctx.narrow = x.dtype, dtype
        single = x.float()
        beyond = single.double().abs() > x.abs()
        bits = single.view(torch.int32) - beyond.int()
        inexact = bits.view(torch.float32).double() != x
        return (bits | inexact.int()).view(torch.float32).to(dtype).where(~x.isnan(), torch.nan)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy.to(ctx.wide), None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, _: Any) -> Tensor:
        return dx.to(ctx.narrow)


class _Statistic(NamedTuple):
    """Of every row, the normalised axes kept with size 1; rho belongs to a * inverse_power."""

    counted: Tensor | None  # elements that enter the statistic, None for all
    k: Any
    empty: Tensor | None
    inverse_power: Tensor | float
    rho: Tensor
    rho_error: Tensor | float
    inverse_rms: Tensor


def _statistic(call: Call, a: Tensor, mask: Tensor | None) -> _Statistic:
    exact = _is_exact(call)
    counted, k, empty = _counted(call, a, mask)
    a = a.double() if counted is None else torch.where(counted, a.double(), 0.0)
    inverse_power: Any = _inverse_power(call, a, k) if exact else 1.0
    c = _centred(call, a * inverse_power if exact else a, counted, k)
    q = c.square().sum(call.axes, keepdim=True) / k
    q_error: Any = 0.0
    if exact:
        with torch.no_grad():
            total, total_error = _sum_of_squares(c, call.axes)
            mean = total / k
            product = mean * k
            q_error = (total - product - _product_error(mean, torch.as_tensor(k).to(mean), product) + total_error) / k
            q_error = _finite(mean - q + q_error)
    inside, outside, floor = _eps(call, k, inverse_power)
    radicand = q + inside
    root = torch.where(radicand == 0, 0.0, torch.where(radicand == 0, 1.0, radicand).sqrt())  # a finite slope at 0
    rho = torch.maximum(root + outside, torch.as_tensor(floor, dtype=q.dtype, device=q.device))
    rho_error: Any = 0.0
    if exact:
        with torch.no_grad():
            square = root * root
            lost = radicand - square - _product_error(root, root, square)
            lost = lost + _sum_error(q, inside, radicand) + q_error
            rho_error = _finite(lost / (2 * root)) + _sum_error(root, outside, rho)
            rho_error = torch.where(rho > floor, rho_error, 0.0)
    inverse_rms = inverse_power / rho
    if empty is not None:
        inverse_rms = torch.where(empty, 0.0, inverse_rms)
    return _Statistic(counted, k, empty, inverse_power, rho, rho_error, inverse_rms)


def _forward(
    call: Call, a: Tensor, scale: Tensor | None, bias: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    statistic = _statistic(call, a, mask)
    y = _scaled(call, a, statistic, scale, bias)
    if mask is not None and torch.is_grad_enabled():
        live = _scaled(call, torch.where(mask, a, 0.0), statistic, scale, bias)
        y = torch.where(mask, live, y.detach())
    if statistic.empty is not None:
        y = torch.where(statistic.empty, 0.0, y)
    return y, statistic.inverse_rms


def _scaled(call: Call, a: Tensor, statistic: _Statistic, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """a / rho, the gain and the bias, rounded as the variant says; each ``lost`` is what float64 rounded off."""
    exact = _is_exact(call)
    rho, a = statistic.rho, a.double() * statistic.inverse_power
    y = a / rho
    lost: Any = 0.0
    if exact:
        with torch.no_grad():
            product = y * rho
            lost = _finite((a - product - _product_error(y, rho, product) - y * statistic.rho_error) / rho)
    if call.norm is not None:
        y = _cast(y + lost, call.norm).double()
        if scale is not None:
            gain = _cast(call.variant.scale_offset + _features(call, scale), call.product).double()
            y = _cast(y * gain, call.product).double()
        if bias is not None:
            y = _cast(y + _features(call, bias), call.product).double()
        return _cast(y, call.result)
    if scale is not None:
        g = _features(call, scale)
        gain = call.variant.scale_offset + g
        normalised, y = y, y * gain
        if exact:
            with torch.no_grad():
                gain_error = _sum_error(g, call.variant.scale_offset, gain)
                lost = lost * gain + normalised * gain_error + _product_error(normalised, gain, y)
    if bias is not None:
        b = _features(call, bias)
        product, y = y, y + b
        if exact:
            with torch.no_grad():
                lost = lost + _sum_error(product, b, y)
    return _cast(y + _finite(lost) if exact else y, call.result)


def _backward(
    call: Call, dy: Tensor, a: Tensor, scale: Tensor | None, mask: Tensor | None, inverse_rms: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dscale and dbias in float64, from x and 1 / rho alone."""
    counted, k, empty = _counted(call, a, mask)
    v, a = dy.double(), a.double()
    if mask is not None:
        v, a = torch.where(mask & ~empty, v, 0.0), torch.where(mask, a, 0.0)
    normalised = a * inverse_rms
    u = v if scale is None else v * (call.variant.scale_offset + _features(call, scale))
    along = _centred(call, normalised, counted, k) * _slope(call, k, inverse_rms)
    dx = inverse_rms * (u - along * ((u * normalised).sum(call.axes, keepdim=True) / k))
    return dx, _over_rows(call, v * normalised), _over_rows(call, v)


def _tangent(
    call: Call,
    a: Tensor,
    scale: Tensor | None,
    mask: Tensor | None,
    inverse_rms: Tensor,
    da: Tensor | None,
    dscale: Tensor | None,
    dbias: Tensor | None,
) -> Tensor:
    """dy in float64, from x and 1 / rho alone."""
    counted, k, empty = _counted(call, a, mask)
    a = a.double() if mask is None else torch.where(mask, a.double(), 0.0)
    normalised = a * inverse_rms
    dy = torch.zeros_like(a)
    if da is not None:
        da = da.double() if mask is None else torch.where(mask, da.double(), 0.0)
        along = _centred(call, normalised, counted, k) * _slope(call, k, inverse_rms)
        dy = inverse_rms * (da - normalised * ((along * da).sum(call.axes, keepdim=True) / k))
        if scale is not None:
            dy = dy * (call.variant.scale_offset + _features(call, scale))
    if dscale is not None:
        dy = dy + normalised * _features(call, dscale)
    if dbias is not None:
        dy = dy + _features(call, dbias)
    return dy if mask is None else torch.where(mask & ~empty, dy, 0.0)


def _counted(call: Call, a: Tensor, mask: Tensor | None) -> tuple[Tensor | None, Any, Tensor | None]:
    """Elements that enter the statistic (None for all), how many, and rows without any (None where there are none)."""
    if mask is None and call.k == call.n and call.n:
        return None, call.k, None
    shape = [size if axis in call.axes else 1 for axis, size in enumerate(a.shape)]
    counted = (torch.arange(call.n or 0, device=a.device) < (call.k or 0)).reshape(shape)
    if mask is not None:
        counted = counted & mask
    counted = counted.expand(a.shape)
    k = counted.sum(call.axes, keepdim=True)
    return counted, k.clamp(min=1).double(), k == 0


def _centred(call: Call, a: Tensor, counted: Tensor | None, k: Any) -> Tensor:
    """What the statistic squares: a, or for a variance a less its mean; 0 where not counted."""
    if counted is not None:
        a = torch.where(counted, a, 0.0)
    if call.variant.statistic == "variance":
        a = a - a.sum(call.axes, keepdim=True) / k
        a = a if counted is None else torch.where(counted, a, 0.0)
    return a


def _eps(call: Call, k: Any, inverse_power: Any = 1.0) -> tuple[Any, Any, Any]:
    """Eps under the root, eps beside it, and the floor under rho, in units of the scaled statistic."""
    position, eps = call.variant.eps_position, call.eps
    return (
        eps * inverse_power * inverse_power if position == "inside" else 0.0,
        eps * inverse_power if position == "outside" else 0.0,
        eps * inverse_power / k**0.5 if position == "clamp" else 0.0,
    )


def _slope(call: Call, k: Any, inverse_rms: Tensor) -> Any:
    """rho / s, with drho / da = a / (k s): 1 for eps inside, rho / (rho - eps) outside, 1 or 0 for a clamp."""
    _, outside, floor = _eps(call, k)
    if call.variant.eps_position == "outside":
        share = 1 - outside * inverse_rms
        return torch.where(share > 0, 1 / torch.where(share > 0, share, 1.0), 0.0)
    if call.variant.eps_position == "clamp":  # rho == floor up to the rounding of 1 / rho
        return (inverse_rms * floor < 1 - 2.0**-50).double()
    return 1.0


def _is_exact(call: Call) -> bool:
    return "float64" in (call.x, call.result)


def _inverse_power(call: Call, a: Tensor, k: Any) -> Tensor | float:
    """2^-e with 2^e next to the largest of |a| and eps: keeps every square in range, and scaling by it is exact."""
    if not call.n:
        return 1.0
    length = sum(_eps(call, k)) ** (0.5 if call.variant.eps_position == "inside" else 1)
    with torch.no_grad():
        largest = torch.maximum(
            a.abs().amax(call.axes, keepdim=True), torch.as_tensor(length, dtype=a.dtype, device=a.device)
        )
        power = (largest.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
        return 1 / power.clamp(2.0**-1022, 2.0**1022)


def _product_error(a: Tensor, b: Tensor, product: Tensor) -> Tensor:
    """a * b - product, exactly: Dekker 1971, the halves cut by a bit mask."""
    a1, b1 = ((part.view(torch.int64) & -(2**27)).view(torch.float64) for part in (a, b))
    a2, b2 = a - a1, b - b1
    return ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2


def _sum_of_squares(a: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Sum of a^2 over the axes, in pairs, and what that rounded off."""
    total = a * a
    error = _product_error(a, a, total)
    for axis in axes:
        while (size := total.shape[axis]) > 1:
            parts = [size // 2, size // 2, size % 2]
            first, second, odd = total.split(parts, axis)
            pairs = first + second
            e1, e2, e3 = error.split(parts, axis)
            error = torch.cat([e1 + e2 + _sum_error(first, second, pairs), e3], axis)
            total = torch.cat([pairs, odd], axis)
    return total, error


def _sum_error(a: Tensor, b: Any, total: Tensor) -> Tensor:
    """a + b - total, exactly: Knuth."""
    t = total - a
    return _finite((a - (total - t)) + (b - t))


def _finite(error: Tensor) -> Tensor:
    return torch.where(error.isfinite(), error, 0.0)


def _features(call: Call, parameter: Tensor) -> Tensor:
    return parameter.double().reshape(call.feature_shape)


def _over_rows(call: Call, terms: Tensor) -> Tensor:
    """Sum over the axes that share the parameters, in the shape of the parameters."""
    terms = terms.sum(call.shared_axes) if call.shared_axes else terms
    return terms


def _add(x: Tensor, residual: Tensor | None, dtype: str) -> Tensor:
    return x if residual is None else _cast(x.double() + residual.double(), dtype)


def _cast(x: Tensor, dtype: str) -> Tensor:
    target: torch.dtype = getattr(torch, dtype)
    if dtype not in dtypes.HALF or _is_transformed():
        return x.to(target)
    return _Round.apply(x, target)


def _is_transformed() -> bool:
    """Whether a compiler or torch.func looks on: both derive the composite, which nests; a Function does not."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def _three(name: str, values: Sequence[Any]) -> list[Any]:
    if not isinstance(values, Sequence) or not 1 <= len(values) <= 3:
        raise errors.wrong_type("rms_norm_jvp", name, values, "(x, scale, bias)", "leave trailing ones out or None")
    return [*values, None, None][:3]


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _spec(op: str, name: str, x: Any) -> Spec | None:
    if x is None:
        return None
    if not isinstance(x, Tensor):
        raise errors.wrong_type(op, name, x, "a torch.Tensor", "convert it with torch.as_tensor")
    return Spec(tuple(x.shape), _name(x))


def _resolve(
    op: str, x: Any, scale: Any, bias: Any, mask: Any, residual: Any, out_dtype: Any, **options: Any
) -> Call:
    given = {"scale": scale, "bias": bias, "mask": mask, "residual": residual}
    specs = {name: _spec(op, name, value) for name, value in given.items()}
    if isinstance(out_dtype, torch.dtype):
        out_dtype = str(out_dtype).removeprefix("torch.")
    x_spec = _spec(op, "x", x)
    if x_spec is None:
        raise errors.wrong_type(op, "x", x, "a torch.Tensor", "convert it with torch.as_tensor")
    return resolve(op, x_spec, out_dtype=out_dtype, **specs, **options)
