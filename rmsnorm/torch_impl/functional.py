"""RMSNorm on PyTorch tensors, with an analytic backward that keeps x and 1 / rho.

    y = h / rho * (o + g) + b        rho = sqrt(mean(h_i^2) + eps), or as the variant says

Source: Zhang & Sennrich 2019 (arXiv 1910.07467). The arithmetic is in arithmetic.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final, Never

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rmsnorm import errors
from rmsnorm.call import Axis, Call, Spec, resolve, three_of
from rmsnorm.interface import forward_of, gradients_of, unknown_argument
from rmsnorm.torch_impl import arithmetic, inductor, onnx, operators, rows
from rmsnorm.torch_impl.arithmetic import gradients
from rmsnorm.torch_impl.autograd import RMSNormFunction, is_differentiated
from rmsnorm.torch_impl.dynamo import in_graph, untraced
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
        x, scale, bias and options: as for rms_norm; ``out_dtype`` has no effect.

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
    one_dtype = call.x == call.sum and all(t is None or t.dtype == x.dtype for t in (residual, dh))
    results = None
    if one_dtype and not is_transformed() and not is_differentiated(dy, dh, x, residual, scale, gate):
        results = rows.gradients(call, dy, x, residual, scale, bias, mask, dh, gate)
    if results is not None:
        dx, dscale, dbias, dgate = results
        dresidual = None if residual is None else dx.clone()
    else:
        wide, dscale, dbias, dgate = gradients(call, dy, add(x, residual, call.x), scale, bias, mask, dh, gate)
        dx, dresidual = (None if t is None else cast(wide, dtype_name(t.dtype)) for t in (x, residual))
    return dx, dscale, dbias, *(own for own, t in ((dresidual, residual), (dgate, gate)) if t is not None)


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
    return arithmetic.tangents(call, add(x, residual, call.x), scale, bias, mask, gate, dx, dscale, dbias)


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
    tensors = (x, residual, scale, bias, mask, gate)
    results = _watched(options, *tensors) if is_watched() else None
    call, y, h, inverse_rms = results or _eager(options, *tensors, return_inverse_rms)
    if residual is None and not return_inverse_rms:
        return y
    outputs = [y]
    if residual is not None:
        outputs.append(h if call.x == call.sum else cast(h, call.sum))
    if return_inverse_rms:
        outputs.append(cast(inverse_rms.detach(), call.inverse_rms))
    return tuple(outputs)


@untraced
def kept(
    settings: Any, axes: Any, x: Tensor, scale: Tensor | None, bias: Tensor | None, gate: Tensor | None = None
) -> rows.Kept | None:
    """What a layer keeps of a call with its eps, variant and axes, which was computed before, for the next one."""
    eps, variant = settings
    scale_pair, bias_pair, gate_pair = (None if t is None else (t.shape, t.dtype) for t in (scale, bias, gate))
    options = variant, eps, None, *axes, None
    call, own, plan = _planned(
        x.is_cpu or x.device, options, x.shape, x.dtype, scale_pair, bias_pair, None, None, gate_pair
    )
    if own is not call:
        return None
    return rows.keep(settings, call, plan, x.shape, x.dtype, scale_pair, bias_pair, gate_pair and gate_pair[1])


def _watched(options: Any, x: Any, residual: Any, scale: Any, bias: Any, mask: Any, gate: Any) -> Any:
    """The call, y, h and 1 / rho, by what a compiler, a transform or a mode can see. None if it sees none of them."""
    specs = _specs("rms_norm", x=x, scale=scale, bias=bias, mask=mask, residual=residual, gate=gate)
    call = _call(*options, *specs)
    if onnx.is_exported():
        return call, *onnx.forward(call, x, residual, scale, bias, mask, gate)
    if gate is not None:  # plain operations, which a compiler joins with what is beside them
        h = add(x, residual, call.x)
        y, inverse_rms = arithmetic.gated(call, _watched_norm, h, scale, bias, mask, gate)
        return call, y, h, inverse_rms
    if operators.serve(call, x, residual, scale, bias, mask):
        return call, *operators.forward(call, x, residual, scale, bias, mask)
    if is_transformed():
        h = add(x, residual, call.x)
        y, inverse_rms = arithmetic.forward(call, h, scale, bias, mask)
        return call, y, h, inverse_rms
    return None


def _watched_norm(call: Call, h: Tensor, scale: Any, bias: Any, mask: Any) -> tuple[Tensor, Tensor]:
    if operators.serve(call, h, None, scale, bias, mask):
        y, _, inverse_rms = operators.forward(call, h, None, scale, bias, mask)
        return y, inverse_rms
    return arithmetic.forward(call, h, scale, bias, mask)


def _eager(
    options: Any, x: Any, residual: Any, scale: Any, bias: Any, mask: Any, gate: Any, return_inverse_rms: bool
) -> Any:
    """The call, y, h and 1 / rho; h and 1 / rho may be None where they are not asked for."""
    try:
        call, own, plan = _planned(
            x.is_cpu is True or x.device, options, x.shape, x.dtype,  # of a Proxy, is_cpu is a Proxy
            None if scale is None else (scale.shape, scale.dtype),
            None if bias is None else (bias.shape, bias.dtype),
            None if mask is None else (mask.shape, mask.dtype),
            None if residual is None else (residual.shape, residual.dtype),
            None if gate is None else (gate.shape, gate.dtype),
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError):  # not such a tensor, or an option that cannot be looked up
        specs = _specs("rms_norm", x=x, scale=scale, bias=bias, mask=mask, residual=residual, gate=gate)
        own = call = _call(*options, *specs)
        plan = None
    tensors = (x, residual, scale, bias, mask, gate)
    if plan is not None and not (is_plain if x.is_cpu else is_plain_on_gpu)(*tensors):
        own, plan = call, None
    if own is not call:
        x, residual, mask, gate = operators.moved(call, x, residual, mask, gate)
    if is_differentiated(x, residual, scale, bias, gate):
        results = RMSNormFunction.apply(own, plan, return_inverse_rms, x, residual, scale, bias, mask, gate)
    else:
        results = rows.forward(own, plan, x, residual, scale, bias, mask, gate, return_inverse_rms)
    return call, *(results if own is call else operators.moved_back(call, *results))


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
    return resolve(op, x, scale, bias, mask=mask, residual=residual, out_dtype=out_dtype, **options)


def _call(variant: Any, eps: Any, partial: Any, axis: Any, feature_axis: Any, out_dtype: Any, *specs: Any) -> Call:
    *others, gate = specs
    chosen = derive("rms_norm", variant, eps, partial)
    return _resolved("rms_norm", out_dtype, *others, gate=gate, variant=chosen, axis=axis, feature_axis=feature_axis)


@lru_cache(maxsize=4096)
def _planned(device: Any, options: Any, shape: Any, dtype: Any, *others: Any) -> tuple[Call, Call, Any]:
    """The call, it with the axes in the order of the kernels, and the plan of that for a device; else the call, None.

    From shape and dtype of x and pairs of these for others. The device is True for the CPU.
    """
    specs = [None if pair is None else Spec(pair[0], NAMES[pair[1]]) for pair in ((shape, dtype), *others)]
    call = _call(*options, *specs)
    _, scale, bias, mask, residual, gate = specs
    where, own = _CPU if device is True else device, operators.axes_last(call)
    g, b, z = (None if spec is None else spec.dtype for spec in (scale, bias, gate))
    plan = rows.plan(where, own, g, b, mask is not None, z, residual is not None)
    return call, call if plan is None or own == call else own, plan
