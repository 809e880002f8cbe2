"""The norms RMSNorm is compared with: LayerNorm, BatchNorm and WeightNorm, with analytic gradients, in float64.

    LayerNorm, BatchNorm: y = (x - mean) / sigma * g + b        WeightNorm: w = g v / ||v||

LayerNorm and BatchNorm are one function over different axes: the features of a case, or the cases of a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rmsnorm import dtypes, errors
from rmsnorm.call import Axis, Spec, resolve

Array: TypeAlias = npt.NDArray[np.float64]
Gradients: TypeAlias = tuple[Array, Array | None, Array | None]

__all__ = [
    "Running",
    "batch_norm",
    "batch_norm_vjp",
    "layer_norm",
    "layer_norm_vjp",
    "weight_norm",
    "weight_norm_vjp",
]


def layer_norm(
    x: npt.ArrayLike,
    scale: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    axis: Axis = -1,
) -> Array:
    """Layer normalization.

        y = (x - mean) / sigma * scale + bias,    sigma = sqrt(var + eps)

    with mean and var, the mean of (x - mean)^2, over the normalised axes.

    Args:
        x: floating-point, any shape of at least one axis.
        scale, bias: floating-point, of the sizes of x along the normalised axes; None multiplies by 1, adds 0.
        eps: a finite number >= 0.
        axis: normalised axis or axes.

    Returns:
        y, f64, shaped as x.

    Raises:
        TypeError: x or a parameter is not floating-point.
        ValueError: a shape does not fit, an axis is out of range or repeated, or eps is not valid.

    Source: Ba, Kiros & Hinton 2016, arXiv 1607.06450, equation 3.

    Example:
        >>> layer_norm([1.0, 2.0, 3.0, 6.0], eps=0.5)
        array([-1. , -0.5,  0. ,  1.5])
    """
    x, scale, bias, axes, _ = _arguments("layer_norm", x, scale, bias, eps, axis)
    standardised, _ = _standardise(x, axes, eps)
    return _affine(standardised, scale, bias)


def layer_norm_vjp(
    dy: npt.ArrayLike,
    x: npt.ArrayLike,
    scale: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    axis: Axis = -1,
) -> Gradients:
    """Gradients of layer_norm: the product of dy with its Jacobian.

        dx = (u - mean(u) - x^ mean(u x^)) / sigma,    u = scale * dy,    x^ = (x - mean) / sigma
        dscale = sum of dy * x^,    dbias = sum of dy,    over the axes that are not normalised

    Args:
        dy: gradient of the loss with respect to y, floating-point, shaped as x.
        x, scale, bias, eps, axis: as for layer_norm.

    Returns:
        (dx, dscale, dbias), f64, each shaped as its argument, None where that is None.

    Raises:
        TypeError, ValueError: as layer_norm; also when dy has another shape than x.

    Source: Ba, Kiros & Hinton 2016, arXiv 1607.06450, equation 3, differentiated.

    Example:
        >>> layer_norm_vjp([0.0, 0.0, 0.0, 1.0], [1.0, 2.0, 3.0, 6.0], eps=0.5)[0]
        array([ 0.0625 , -0.03125, -0.125  ,  0.09375])
    """
    x, scale, bias, axes, dy = _arguments("layer_norm_vjp", x, scale, bias, eps, axis, dy=dy)
    standardised, sigma = _standardise(x, axes, eps)
    u, dscale, dbias = _affine_vjp(dy, standardised, scale, bias)
    return _standardise_vjp(u, standardised, sigma, axes), dscale, dbias


class Running(NamedTuple):
    """Running statistics of batch_norm, one of each per feature."""

    mean: npt.ArrayLike
    var: npt.ArrayLike


def batch_norm(
    x: npt.ArrayLike,
    scale: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
    running: Running | None = None,
    *,
    training: bool = True,
    momentum: float = 0.99,
    eps: float = 1e-5,
    axis: int = -1,
) -> tuple[Array, Running]:
    """Batch normalization.

        y = (x - mean) / sigma * scale + bias,    sigma = sqrt(var + eps)

    with mean and var per feature: in training those of the batch, over all other axes, and otherwise the running ones.
    Training moves each running statistic to momentum * running + (1 - momentum) * batch, as Keras and Flax do
    (PyTorch's momentum is 1 less this one, and its running var is multiplied by N / (N - 1)).

    Args:
        x: floating-point, at least two axes.
        scale, bias: floating-point, of the size of x along ``axis``; None multiplies by 1, adds 0.
        running: (mean, var), each of that size; None starts training from 0 and 1.
        training: use the statistics of the batch, and update the running ones.
        momentum: share of the running statistics that is kept, in [0, 1].
        eps: a finite number >= 0.
        axis: the features.

    Returns:
        y, f64, shaped as x, and the running statistics, f64: updated in training; nothing is written in place.

    Raises:
        TypeError: x, a parameter or a running statistic is not floating-point.
        ValueError: a shape does not fit, an axis is out of range, momentum or eps is not valid, there are no running
            statistics without training, or no cases to train on.

    Source: Ioffe & Szegedy 2015, arXiv 1502.03167, algorithms 1 and 2.

    Example:
        >>> y, running = batch_norm([[1.0], [2.0], [3.0], [6.0]], eps=0.5, momentum=0.5)
        >>> y.ravel(), running.mean, running.var
        (array([-1. , -0.5,  0. ,  1.5]), array([1.5]), array([2.25]))
        >>> batch_norm([[3.0]], running=running, training=False, eps=0.0)[0]
        array([[1.]])
    """
    op = "batch_norm"
    if not 0 <= momentum <= 1:
        raise errors.out_of_domain(op, "momentum", momentum, "a number in [0, 1]", "pass one such as 0.99")
    axes = _all_but(op, axis, x)
    x, scale, bias, axes, _ = _arguments(op, x, scale, bias, eps, axes, axis)
    mean, var = _running(op, running, x, axes, training)
    if training:
        batch_mean = _mean(x, axes)
        standardised, _ = _standardise(x, axes, eps)
        mean = momentum * mean + (1 - momentum) * batch_mean
        var = momentum * var + (1 - momentum) * _mean((x - batch_mean) ** 2, axes)
    else:
        standardised = _divide(x - mean, np.sqrt(var + eps))
    return _affine(standardised, scale, bias), Running(mean.ravel(), var.ravel())


def batch_norm_vjp(
    dy: npt.ArrayLike,
    x: npt.ArrayLike,
    scale: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
    running: Running | None = None,
    *,
    training: bool = True,
    eps: float = 1e-5,
    axis: int = -1,
) -> Gradients:
    """Gradients of the output of batch_norm: the product of dy with its Jacobian.

        dx = (u - mean(u) - x^ mean(u x^)) / sigma in training, else u / sigma,    u = scale * dy
        dscale = sum of dy * x^,    dbias = sum of dy,    over all axes but the features

    The running statistics are constant to every derivative.

    Args:
        dy: gradient of the loss with respect to y, floating-point, shaped as x.
        x, scale, bias, running, training, eps, axis: as for batch_norm.

    Returns:
        (dx, dscale, dbias), f64, each shaped as its argument, None where that is None.

    Raises:
        TypeError, ValueError: as batch_norm; also when dy has another shape than x.

    Source: Ioffe & Szegedy 2015, arXiv 1502.03167, section 3.

    Example:
        >>> dy, x = [[0.0], [0.0], [0.0], [1.0]], [[1.0], [2.0], [3.0], [6.0]]
        >>> batch_norm_vjp(dy, x, eps=0.5)[0].ravel()
        array([ 0.0625 , -0.03125, -0.125  ,  0.09375])
    """
    op = "batch_norm_vjp"
    axes = _all_but(op, axis, x)
    x, scale, bias, axes, dy = _arguments(op, x, scale, bias, eps, axes, axis, dy=dy)
    if training:
        standardised, sigma = _standardise(x, axes, eps)
        u, dscale, dbias = _affine_vjp(dy, standardised, scale, bias)
        return _standardise_vjp(u, standardised, sigma, axes), dscale, dbias
    mean, var = _running(op, running, x, axes, training)
    sigma = np.sqrt(var + eps)
    u, dscale, dbias = _affine_vjp(dy, _divide(x - mean, sigma), scale, bias)
    return _divide(u, sigma), dscale, dbias


def weight_norm(v: npt.ArrayLike, g: npt.ArrayLike) -> Array:
    """Weight normalization: each row of the weight is given the length of its gain.

        w_i = g_i v_i / ||v_i||_2

    Args:
        v: direction, [n, m], floating-point.
        g: length, [n], floating-point.

    Returns:
        w, f64[n, m]; NaN in rows of zeros.

    Raises:
        TypeError: v or g is not floating-point.
        ValueError: v is not a matrix, or g has not one element per row.

    Source: Salimans & Kingma 2016, arXiv 1602.07868, equation 2.

    Example:
        >>> weight_norm([[3.0, 4.0], [0.0, 2.0]], [10.0, 1.0])
        array([[6., 8.],
               [0., 1.]])
    """
    v, g, _ = _directions("weight_norm", v, g)
    return g * _divide(v, _length(v))


def weight_norm_vjp(dw: npt.ArrayLike, v: npt.ArrayLike, g: npt.ArrayLike) -> tuple[Array, Array]:
    """Gradients of weight_norm: the product of dw with its Jacobian.

        dv_i = (g_i / ||v_i||) (dw_i - d_i <dw_i, d_i>),    dg_i = <dw_i, d_i>,    d_i = v_i / ||v_i||

    Args:
        dw: gradient of the loss with respect to w, [n, m], floating-point.
        v, g: as for weight_norm.

    Returns:
        (dv, dg), f64[n, m] and f64[n].

    Raises:
        TypeError, ValueError: as weight_norm; also when dw has another shape than v.

    Source: Salimans & Kingma 2016, arXiv 1602.07868, equation 3.

    Example:
        >>> weight_norm_vjp([[1.0, 0.0]], [[3.0, 4.0]], [10.0])
        (array([[ 1.28, -0.96]]), array([0.6]))
    """
    v, g, dw = _directions("weight_norm_vjp", v, g, dw)
    length = _length(v)
    direction = _divide(v, length)
    along = (dw * direction).sum(axis=1, keepdims=True)
    return _divide(g, length) * (dw - direction * along), along[:, 0]


def _standardise(x: Array, axes: tuple[int, ...], eps: float) -> tuple[Array, Array]:
    """x^ = (x - mean) / sigma, and sigma = sqrt(var + eps)."""
    centred = x - _mean(x, axes)
    sigma = np.sqrt(_mean(centred**2, axes) + eps)
    return _divide(centred, sigma), sigma


def _standardise_vjp(u: Array, standardised: Array, sigma: Array, axes: tuple[int, ...]) -> Array:
    """(u - mean(u) - x^ mean(u x^)) / sigma: mean and scale of x do not pass, so u loses its parts along 1 and x^."""
    return _divide(u - _mean(u, axes) - standardised * _mean(u * standardised, axes), sigma)


def _affine(standardised: Array, scale: Array | None, bias: Array | None) -> Array:
    y = standardised if scale is None else standardised * scale
    return y if bias is None else y + bias


def _affine_vjp(dy: Array, standardised: Array, scale: Array | None, bias: Array | None) -> Gradients:
    """Gradients with respect to x^, scale and bias."""
    u = dy if scale is None else scale * dy
    return u, _over_shared(dy * standardised, scale), _over_shared(dy, bias)


def _over_shared(terms: Array, parameter: Array | None) -> Array | None:
    """Sum over the axes along which the parameter was repeated, and drop them."""
    if parameter is None:
        return None
    shared: Sequence[int] = getattr(parameter, "shared", ())
    return terms.sum(axis=tuple(shared))


def _mean(x: Array, axes: tuple[int, ...]) -> Array:
    count = int(np.prod([x.shape[axis] for axis in axes]))
    return np.asarray(x.sum(axis=axes, keepdims=True) / max(1, count))
