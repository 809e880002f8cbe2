"""RMSNorm on PyTorch tensors, with an analytic backward that keeps x and 1 / rho.

    y = h / rho * (o + g) + b        rho = sqrt(mean(h_i^2) + eps), or as the variant says

Source: Zhang & Sennrich 2019 (arXiv 1910.07467). The arithmetic is in operations.py.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Never

import torch
from torch import Tensor

from rmsnorm.specification.call import Axis
from rmsnorm.specification.interface import forward_of, gradients_of, unknown_argument
from rmsnorm.specification.variants import Preset, Variant
from rmsnorm.torch_impl import engines
from rmsnorm.torch_impl.private import is_dynamo_compiling


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
    options: Any = variant, eps, partial, axis, feature_axis, out_dtype
    others: Any = return_inverse_rms, x, residual, scale, bias, mask, gate
    if is_dynamo_compiling() or (not isinstance(x, Tensor) and isinstance(x, torch.fx.Proxy)):
        from rmsnorm.torch_impl.compiled import rms_norm_in_graph

        return rms_norm_in_graph(_in_graph(*options), *others)
    return engines.rms_norm(options, *others)


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
    options: Any = variant, eps, partial, axis, feature_axis, out_dtype
    if is_dynamo_compiling():
        from rmsnorm.torch_impl.compiled import rms_norm_vjp_in_graph

        return rms_norm_vjp_in_graph(_in_graph(*options), dy, x, residual, scale, bias, mask, gate)
    return engines.rms_norm_vjp(options, dy, x, residual, scale, bias, mask, gate)


def _in_graph(variant: Any, eps: Any, partial: Any, *others: Any) -> tuple[Any, ...]:
    """The options as a graph of torch.compile or torch.fx holds them: a Variant as its text, a Fraction as a pair."""
    if isinstance(variant, Variant):
        variant = variant.json
    if partial is not None and isinstance(partial, Fraction):
        partial = partial.numerator, partial.denominator
    return variant, eps, partial, *others
