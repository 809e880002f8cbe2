"""RMSNorm on PyTorch tensors, with an analytic backward that keeps x and 1 / rho.

    y = h / rho * (o + g) + b        rho = sqrt(mean(h_i^2) + eps), or as the variant says

Source: Zhang & Sennrich 2019 (arXiv 1910.07467). The arithmetic is in arithmetic.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final, Never

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rmsnorm import errors
from rmsnorm.call import Axis, Call, Roundings, Spec, resolve, three_of
from rmsnorm.interface import forward_of, gradients_of, unknown_argument
from rmsnorm.torch_impl import gate as gates
from rmsnorm.torch_impl import gated_operators, inductor, onnx, operators, rows
from rmsnorm.torch_impl.arithmetic import forward, gradients, statistic, tangent
from rmsnorm.torch_impl.autograd import RMSNormFunction, is_differentiated
from rmsnorm.torch_impl.dynamo import in_graph, untraced
from rmsnorm.torch_impl.gate import factor, slope
from rmsnorm.torch_impl.memory import check_storage, is_plain, is_plain_on_gpu
from rmsnorm.torch_impl.rounding import NAMES, add, cast, dtype_name, is_transformed, is_watched
from rmsnorm.variants import Preset, Variant, derive

_CPU: Final = torch.device("cpu")

inductor.register()


@forward_of(Tensor)
def rms_norm(
    x: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    variant: Preset | Variant = "standard",
    eps: float | None = None,
    partial: float | Fraction | None = None,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    mask: Tensor | None = None,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
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
        partial: fraction of the elements, from the first, that enter the statistic; replaces the variant's.
        axis: normalised axis or axes.
        feature_axis: axis or axes of the parameters; None for the normalised ones.
        mask: bool, broadcasts to x: True counts in the statistic. Elsewhere y is normalised, too, but every derivative
            takes it as a constant, so values under the mask reach no gradient. A row with nothing counted gives 0.
        residual: added to x first, in promote(x, residual); the sum h is returned beside y. ``residual_rounding`` of
            the variant says whether y is that of h before or after it is rounded.
        gate: z, floating-point, shaped as x: y is multiplied by f(z), or h is before it is normalised, as
            ``gate_function`` and ``gate_position`` of the variant say.
        out_dtype: dtype of y; None for the variant's rule.
        return_inverse_rms: also return 1 / rho, 0 in rows with nothing counted; derivatives take it as a constant.

    Returns:
        y, shaped as x; with ``residual`` (y, h). With ``return_inverse_rms`` 1 / rho follows: its normalised axes have
        size 1, its dtype is float32, or float64 for f64.

    Raises:
        TypeError: x, a parameter, the residual or the gate is not floating-point, the mask is not bool.
        ValueError: a shape does not fit, an axis is out of range or repeated, eps, partial or variant is not valid.

    Source: Zhang & Sennrich 2019, arXiv 1910.07467, equation 4.

    Example:
        >>> import torch
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), variant="paper")
        tensor([[0.8485, 2.2627]])
    """
    if unknown:
        raise unknown_argument("rms_norm", rms_norm, unknown)
    run: Any = _rms_norm
    options: Any = variant, eps, partial, axis, feature_axis, mask, residual, gate, out_dtype, return_inverse_rms
    if torch.compiler.is_dynamo_compiling() and not isinstance(partial, Fraction):
        # Dynamo would trace every check of the arguments, and compare each value that it had read in every later call
        run, options = _in_graph, (variant.json if isinstance(variant, Variant) else variant, *options[1:])
    return run(x, scale, bias, *options)


@gradients_of(Tensor)
def rms_norm_vjp(
    dy: Any,
    x: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    variant: Preset | Variant = "standard",
    eps: float | None = None,
    partial: float | Fraction | None = None,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    mask: Tensor | None = None,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    out_dtype: Any = None,
    **unknown: Never,
) -> Any:
    """Gradients of rms_norm: the product of dy with its Jacobian.

        dx = R^T u,    u = (o + scale) * dy,    dscale = sum over rows of dy * h / rho,    dbias = sum over rows of dy

    A rounding counts as the identity, as in automatic differentiation.

    Args:
        dy: gradient of the loss with respect to y, shaped as x; with ``residual`` it may be a pair (dy, dh).
        x, scale, bias and options: as for rms_norm; ``out_dtype`` does not enter.

    Returns:
        (dx, dscale, dbias), each in the dtype of its argument, None where that is None. With ``residual`` dresidual
        follows, and with ``gate`` dgate.

    Raises:
        TypeError, ValueError: as rms_norm; also when dy has another shape than x.

    Source: Zhang & Sennrich 2019, section 4.2 (the R matrix).

    Example:
        >>> import torch
        >>> dx, dscale, _ = rms_norm_vjp(torch.ones(2), torch.tensor([3.0, 4.0]), torch.ones(2), variant="paper")
        >>> dx, dscale
        (tensor([ 0.0453, -0.0339]), tensor([0.8485, 1.1314]))
    """
    if unknown:
        raise unknown_argument("rms_norm_vjp", rms_norm_vjp, unknown)
    dy, dh = dy if isinstance(dy, tuple) and residual is not None else (dy, None)
    call = _resolve(
        "rms_norm_vjp", x, scale, bias, mask, residual, gate, out_dtype,
        variant=derive("rms_norm_vjp", variant, eps, partial), axis=axis, feature_axis=feature_axis,
        others={"dy": dy, "dh": dh},
    )  # fmt: skip
    if gate is not None or (call.axes != call.feature_axes and mask is None and residual is None):
        return _gated_vjp(call, dy, x, scale, bias, gate, mask, residual, dh)
    one_dtype = call.x == call.sum and all(t is None or t.dtype == x.dtype for t in (residual, dh))
    if one_dtype and not is_transformed() and not is_differentiated(dy, dh, x, residual, scale):
        results = rows.gradients(call, dy, x, residual, scale, bias, mask, dh)
        if results is not None:
            return results if residual is None else (*results, results[0].clone())
    h, bias_dtype = add(x, residual, call.x), None if bias is None else bias.dtype
    dx, dscale, dbias = gradients(call, dy, h, scale, bias_dtype, mask, dh)
    if residual is not None:
        return cast(dx, dtype_name(x.dtype)), dscale, dbias, cast(dx, dtype_name(residual.dtype))
    return cast(dx, dtype_name(x.dtype)), dscale, dbias


def rms_norm_jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    variant: Preset | Variant = "standard",
    eps: float | None = None,
    partial: float | Fraction | None = None,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    mask: Tensor | None = None,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    out_dtype: Any = None,
    **unknown: Never,
) -> Tensor:
    """Directional derivative of rms_norm: the product of its Jacobian with the tangents.

        dy = (R dx) * (o + scale) + h / rho * dscale + dbias

    A rounding counts as the identity, and dy is rounded once.

    Args:
        primals: (x, scale, bias); the last ones may be None or left out.
        tangents: (dx, dscale, dbias), each shaped as its primal; None is zero.
        options: as for rms_norm; the residual and the gate are constants.

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
    if unknown:
        raise unknown_argument("rms_norm_jvp", rms_norm_jvp, unknown)
    x, scale, bias = three_of("primals", primals)
    dx, dscale, dbias = three_of("tangents", tangents)
    call = _resolve(
        "rms_norm_jvp", x, scale, bias, mask, residual, gate, out_dtype,
        variant=derive("rms_norm_jvp", variant, eps, partial), axis=axis, feature_axis=feature_axis,
        others={"dx": dx, "dscale": dscale, "dbias": dbias},
    )  # fmt: skip
    if gate is not None:
        h = add(x, residual, call.x)
        return _gated_jvp(call, [h, scale, bias], [dx, dscale, dbias], mask, gate)
    h = add(x, residual, call.x).double()
    inverse_rms = statistic(call, h, mask).inverse_rms
    return cast(tangent(call, h, scale, mask, inverse_rms, dx, dscale, dbias), call.result)


def _gated_sum(
    options: Any, x: Tensor, scale: Tensor | None, bias: Tensor | None, mask: Tensor | None, residual: Tensor,
    gate: Tensor, return_inverse_rms: bool,
) -> Any:  # fmt: skip
    """The results of a call with a gate and a residual: of x + residual as x, with the roundings of this call."""
    call, _ = _gated_call(options, x, scale, bias, mask, residual, gate)
    h = onnx.total(call, x, residual) if onnx.is_exported() else add(x, residual, call.x)
    roundings = Roundings(call.norm, call.product, call.result)
    options = (call.variant, call.eps, None, call.axes, call.feature_axes, roundings)
    results = _gated(options, h, scale, bias, mask, gate, return_inverse_rms)
    y, *inverse_rms = results if return_inverse_rms else (results,)
    return y, cast(h, call.sum), *inverse_rms


def _gated(
    options: Any, x: Tensor, scale: Tensor | None, bias: Tensor | None, mask: Tensor | None, gate: Tensor | None,
    return_inverse_rms: bool,
) -> Any:  # fmt: skip
    """The results of a call with a gate or in groups; None without a gate where there is no kernel."""
    call, plan = _gated_call(options, x, scale, bias, mask, None, gate)
    results = None if mask is not None else _by_kernels(options, call, plan, x, scale, bias, gate, return_inverse_rms)
    if results is None:
        if gate is None:
            return None
        check_storage("rms_norm", x, scale=scale, bias=bias, mask=mask, gate=gate)
        f = factor(call, _held(gate, mask))
        x = _held(x, mask).to(f.dtype) * f if call.is_gated_before else x
        y, inverse_rms = rms_norm(x, scale, bias, mask=mask, return_inverse_rms=True, **call.inside_gate)
        results = y if call.is_gated_before else _held(cast(y * f, call.result), mask), inverse_rms
    y, inverse_rms = results
    return (y, cast(inverse_rms, call.inverse_rms)) if return_inverse_rms else y


def _by_kernels(
    options: Any, call: Call, plan: Any, x: Tensor, scale: Tensor | None, bias: Tensor | None, gate: Tensor | None,
    with_inverse_rms: bool,
) -> Any:  # fmt: skip
    """y and, if asked for, 1 / rho, by the kernels for gates and groups; None where they cannot compute them."""
    if plan is not None and gates.is_served(x, scale, gate):
        if is_differentiated(x, scale, gate):
            return gates.GatedFunction.apply(call, plan, _gated_vjp, with_inverse_rms, x, scale, gate)
        return gates.forward(call, plan, x, scale, gate, with_inverse_rms)
    if _is_gated_operator(call, x, scale, bias, gate):
        return gated_operators.forward(call, x, scale, gate)
    order = (*call.shared_axes, *call.feature_axes)
    if plan is None and order != tuple(range(len(order))) and gates.is_served(x, scale, gate):
        own = _moved(call, order)
        if gated_operators.serve(own, x, scale, bias, gate):
            x, gate = (None if t is None else t.permute(order) for t in (x, gate))
            variant, eps, partial, _, _, out_dtype = options
            options = (variant, eps, partial, own.axes, own.feature_axes, out_dtype)
            moved = _gated_call(options, x, scale, bias, None, None, gate)
            results = _by_kernels(options, *moved, x, scale, bias, gate, with_inverse_rms)
            back = sorted(range(len(order)), key=order.__getitem__)
            return results and tuple(None if t is None else t.permute(back) for t in results)
    return None


def _moved(call: Call, order: tuple[int, ...]) -> Call:
    """The call on x with its axes in that order."""
    axes, feature_axes = (tuple(sorted(map(order.index, part))) for part in (call.axes, call.feature_axes))
    return replace(call, shape=tuple(call.shape[axis] for axis in order), axes=axes, feature_axes=feature_axes)


def _is_gated_operator(call: Call, x: Tensor, scale: Any, bias: Any, gate: Tensor | None) -> bool:
    return is_watched() and not onnx.is_exported() and gated_operators.serve(call, x, scale, bias, gate)


def _gated_vjp(
    call: Call, dy: Tensor, x: Tensor, scale: Tensor | None, bias: Tensor | None, gate: Tensor | None,
    mask: Tensor | None = None, residual: Tensor | None = None, dh: Tensor | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    if residual is not None:
        own, h = replace(call, sum=call.x, exact_sum=False), add(x, residual, call.x)
        dx, dscale, dbias, dgate = _gated_vjp(own, dy, h, scale, bias, gate, mask)
        dx = dx if dh is None else dx.double() + dh.double()
        return cast(dx, dtype_name(x.dtype)), dscale, dbias, cast(dx, dtype_name(residual.dtype)), dgate
    results, is_plain = None, mask is None and bias is None
    if is_plain and gates.is_served(dy, x, scale, gate) and not is_differentiated(dy, x, scale, gate):
        results = gates.gradients(call, dy, x, scale, gate)
    elif is_plain and _is_gated_operator(call, x, scale, bias, gate):
        results = gated_operators.gradients(call, dy, x, scale, gate)
    if results is not None:
        dx, dscale, dgate = results
        return (dx, dscale, None) if gate is None else (dx, dscale, None, dgate)
    if gate is None:
        dx, dscale, dbias = gradients(call, dy, x, scale, None if bias is None else bias.dtype, None, None)
        return cast(dx, dtype_name(x.dtype)), dscale, dbias
    f = factor(call, gate)
    wide = x.to(f.dtype)
    if call.is_gated_before:
        gradient, dscale, dbias = rms_norm_vjp(dy, wide * f, scale, bias, mask=mask, **call.inside_gate)
        dx, dgate = _unmasked(gradient * f, mask), gradient * wide
    else:
        dx, dscale, dbias = rms_norm_vjp(dy * f, x, scale, bias, mask=mask, **call.inside_gate)
        dgate = dy * rms_norm(x, scale, bias, mask=mask, **call.inside_gate)
    dgate = cast(_unmasked(dgate * slope(call, gate), mask), dtype_name(gate.dtype))
    return cast(dx, dtype_name(x.dtype)), dscale, dbias, dgate


def _gated_jvp(call: Call, primals: list[Any], tangents: list[Any], mask: Tensor | None, gate: Tensor) -> Tensor:
    f = factor(call, gate)
    if not call.is_gated_before:
        dy = rms_norm_jvp(primals, tangents, mask=mask, **call.inside_gate)
        return cast(_unmasked(dy * f, mask), call.result)
    x, dx = (None if t is None else t.to(f.dtype) * f for t in (primals[0], tangents[0]))
    return rms_norm_jvp([x, *primals[1:]], [dx, *tangents[1:]], mask=mask, **call.inside_gate)


def _held(values: Tensor, mask: Tensor | None) -> Tensor:
    """The values, of which derivatives take those under the mask as constants."""
    return values if mask is None else torch.where(mask, values, values.detach())


def _unmasked(values: Tensor, mask: Tensor | None) -> Tensor:
    """0 under the mask, where gate and x may be NaN."""
    return values if mask is None else torch.where(mask, values, 0.0)


@in_graph
def _in_graph(
    x: Tensor, scale: Any, bias: Any, variant: Any, eps: Any, partial: Any, axis: Any, feature_axis: Any, *others: Any
) -> Any:
    if isinstance(variant, str) and variant.startswith("{"):
        variant = Variant.from_json(variant)
    # a number that the caller computed is a symbol to the compiler: as a number it becomes a condition of the program
    eps, partial = (float(number) if isinstance(number, torch.SymFloat) else number for number in (eps, partial))
    axis, feature_axis = (tree_map_only(torch.SymInt, int, numbers) for numbers in (axis, feature_axis))
    return _rms_norm(x, scale, bias, variant, eps, partial, axis, feature_axis, *others)


@untraced
def _rms_norm(
    x: Tensor, scale: Tensor | None, bias: Tensor | None, variant: Any, eps: Any, partial: Any, axis: Any,
    feature_axis: Any, mask: Tensor | None, residual: Tensor | None, gate: Tensor | None, out_dtype: Any,
    return_inverse_rms: bool,
) -> Any:  # fmt: skip
    options = (variant, eps, partial, axis, feature_axis, out_dtype)
    if gate is not None and residual is not None:
        return _gated_sum(options, x, scale, bias, mask, residual, gate, return_inverse_rms)
    if gate is not None or (feature_axis is not None and mask is None and residual is None):
        results = _gated(options, x, scale, bias, mask, gate, return_inverse_rms)
        if results is not None:
            return results
    call, y, h, inverse_rms = _computed(options, x, residual, scale, bias, mask, return_inverse_rms)
    if residual is None and not return_inverse_rms:
        return y
    outputs = [y]
    if residual is not None:
        outputs.append(h if call.x == call.sum else cast(h, call.sum))
    if return_inverse_rms:
        outputs.append(cast(inverse_rms.detach(), call.inverse_rms))
    return tuple(outputs)


@untraced
def kept(settings: Any, axes: Any, x: Tensor, scale: Tensor | None, bias: Tensor | None) -> rows.Kept | None:
    """What a layer keeps of a call with its eps, variant and axes, which was computed before, for the next one."""
    eps, variant = settings
    parameters = [None if p is None else (p.shape, p.dtype) for p in (scale, bias)]
    options = variant, eps, None, axes, None, None
    call, plan = _planned(x.is_cpu or x.device, options, x.shape, x.dtype, *parameters, None, None)
    return rows.keep(settings, call, plan, x.shape, x.dtype, *parameters)


def _computed(options: Any, x: Any, residual: Any, scale: Any, bias: Any, mask: Any, return_inverse_rms: bool) -> Any:
    """The call, y, h and 1 / rho; h and 1 / rho may be None where they are not asked for."""
    results = _watched(options, x, residual, scale, bias, mask) if is_watched() else None
    return results or _eager(options, x, residual, scale, bias, mask, return_inverse_rms)


def _watched(options: Any, x: Any, residual: Any, scale: Any, bias: Any, mask: Any) -> Any:
    """The call, y, h and 1 / rho, by what a compiler, a transform or a mode can see; None if the eager way will do."""
    call = _call(*options, *_specs("rms_norm", x=x, scale=scale, bias=bias, mask=mask, residual=residual))
    if onnx.is_exported():
        return call, *onnx.forward(call, x, residual, scale, bias, mask)
    if operators.serve(call, x, residual, scale, bias, mask):
        if not call.has_last_axes:
            return _with_axes_last(call, options, x, residual, scale, bias, mask, True)
        return call, *operators.forward(call, x, residual, scale, bias, mask)
    if is_transformed():
        h = add(x, residual, call.x)
        y, inverse_rms = forward(call, h, scale, bias, mask)
        return call, y, h, inverse_rms
    return None


def _eager(options: Any, x: Any, residual: Any, scale: Any, bias: Any, mask: Any, return_inverse_rms: bool) -> Any:
    try:
        call, plan = _planned(
            x.is_cpu is True or x.device, options, x.shape, x.dtype,  # of a Proxy, is_cpu is a Proxy
            None if scale is None else (scale.shape, scale.dtype),
            None if bias is None else (bias.shape, bias.dtype),
            None if mask is None else (mask.shape, mask.dtype),
            None if residual is None else (residual.shape, residual.dtype),
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError):  # not such a tensor, or an option that cannot be looked up
        specs = _specs("rms_norm", x=x, scale=scale, bias=bias, mask=mask, residual=residual)
        call, plan = _call(*options, *specs), None
    if plan is not None and not (is_plain if x.is_cpu else is_plain_on_gpu)(x, residual, scale, bias, mask):
        plan = None
    tensors = (x, residual, scale, bias, mask)
    if (
        not call.has_last_axes
        and operators.serve(call, *tensors)
        and (is_plain if x.is_cpu else is_plain_on_gpu)(*tensors)
    ):
        return _with_axes_last(call, options, *tensors, return_inverse_rms)
    if is_differentiated(x, residual, scale, bias):
        return call, *RMSNormFunction.apply(call, plan, return_inverse_rms, x, residual, scale, bias, mask)
    return call, *rows.forward(call, plan, x, residual, scale, bias, mask, return_inverse_rms)


def _gated_call(options: Any, x: Any, scale: Any, bias: Any, mask: Any, residual: Any, gate: Any) -> tuple[Call, Any]:
    """The call, and its plan where there may be one."""
    tensors = (x, scale, bias, mask, residual, gate)
    if not is_watched():
        try:
            *pairs, z = (None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors[1:])
            return _gated_planned(x.is_cpu is True or x.device, options, x.shape, x.dtype, *pairs, gate=z)
        except (AttributeError, KeyError, TypeError):
            pass
    specs = _specs("rms_norm", **dict(zip(("x", "scale", "bias", "mask", "residual", "gate"), tensors, strict=True)))
    return _call(*options, *specs[:5], gate=specs[5]), None


def _with_axes_last(
    call: Call, options: Any, x: Tensor, residual: Tensor | None, scale: Any, bias: Any, mask: Tensor | None,
    return_inverse_rms: bool,
) -> Any:  # fmt: skip
    """As ``_computed``, by the kernels, on a view in which the normalised axes are the last ones."""
    order = (*call.shared_axes, *call.axes)
    back = sorted(range(len(order)), key=order.__getitem__)
    x, residual, mask = (t if t is None else t.expand(call.shape).permute(order) for t in (x, residual, mask))
    variant, eps, partial, _, _, out_dtype = options
    options = (variant, eps, partial, tuple(range(-len(call.axes), 0)), None, out_dtype)
    own, *results = _computed(options, x, residual, scale, bias, mask, return_inverse_rms)
    return own, *(t if t is None else t.permute(back) for t in results)


def _spec(op: str, name: str, x: Any) -> Spec | None:
    if x is None:
        return None
    if not isinstance(x, Tensor):
        raise errors.wrong_type(op, name, x, "a torch.Tensor", "convert it with torch.as_tensor")
    return Spec(x.shape, dtype_name(x.dtype))


def _specs(op: str, **tensors: Any) -> list[Any]:
    if tensors["x"] is None:
        raise errors.wrong_type(op, "x", None, "a torch.Tensor", "convert it with torch.as_tensor")
    specs = [_spec(op, name, x) for name, x in tensors.items()]
    check_storage(op, **tensors)
    return specs


def _resolve(
    op: str, x: Any, scale: Any, bias: Any, mask: Any, residual: Any, gate: Any, out_dtype: Any,
    others: dict[str, Any], **options: Any,
) -> Call:  # fmt: skip
    tensors = {"x": x, "scale": scale, "bias": bias, "mask": mask, "residual": residual, "gate": gate, **others}
    specs = dict(zip(tensors, _specs(op, **tensors), strict=True))
    return _resolved(op, out_dtype, **specs, **options)


def _resolved(op: str, out_dtype: Any, x: Any, scale: Any, bias: Any, mask: Any, residual: Any, **options: Any) -> Call:
    if isinstance(out_dtype, torch.dtype):
        out_dtype = dtype_name(out_dtype)
    if isinstance(out_dtype, Roundings):  # of a call inside of one with a gate
        out_dtype, options["roundings"] = None, out_dtype
    return resolve(op, x, scale, bias, mask=mask, residual=residual, out_dtype=out_dtype, **options)


def _call(
    variant: Any, eps: Any, partial: Any, axis: Any, feature_axis: Any, out_dtype: Any, *specs: Any, gate: Any = None
) -> Call:
    chosen = derive("rms_norm", variant, eps, partial)
    return _resolved("rms_norm", out_dtype, *specs, gate=gate, variant=chosen, axis=axis, feature_axis=feature_axis)


@lru_cache(maxsize=4096)
def _planned(device: Any, options: Any, shape: Any, dtype: Any, *others: Any) -> tuple[Call, Any]:
    """The call and its plan for a device, True for the CPU, from shape and dtype of x and pairs of these for others."""
    specs = [None if pair is None else Spec(pair[0], NAMES[pair[1]]) for pair in ((shape, dtype), *others)]
    call = _call(*options, *specs)
    _, scale, bias, mask, _ = specs
    where = _CPU if device is True else device
    return call, rows.plan(where, call, scale and scale.dtype, bias and bias.dtype, mask is not None)


@lru_cache(maxsize=4096)
def _gated_planned(device: Any, options: Any, shape: Any, dtype: Any, *others: Any, gate: Any) -> tuple[Call, Any]:
    """Likewise, for the kernels for gates and groups."""
    pairs = ((shape, dtype), *others, gate)
    *specs, z = [None if pair is None else Spec(pair[0], NAMES[pair[1]]) for pair in pairs]
    call = _call(*options, *specs, gate=z)
    _, scale, bias, *_ = specs
    where = _CPU if device is True else device
    return call, gates.plan(where, call, scale and scale.dtype, bias, z and z.dtype)


gated_operators.register(rms_norm, rms_norm_vjp)
