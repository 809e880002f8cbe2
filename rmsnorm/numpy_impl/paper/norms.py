"""The norms RMSNorm is compared with: LayerNorm, BatchNorm and WeightNorm, with analytic gradients, in float64.

    LayerNorm, BatchNorm: y = (x - mean) / sigma * scale + bias        WeightNorm: w = g v / ||v||

LayerNorm and BatchNorm are one function over different axes: the features of a case, or the cases of a feature.
Each squares its input as it is: beyond about 1e154 that overflows, as the golden does not.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rmsnorm.specification import dtypes, errors
from rmsnorm.specification.call import Axis, Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import derive

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
        y, f64, shaped as x; NaN in constant rows with eps = 0.

    Raises:
        TypeError: x or a parameter is not floating-point.
        ValueError: a shape does not fit, an axis is out of range or repeated, or eps is not valid.

    Source: Ba, Kiros & Hinton 2016, arXiv 1607.06450, equation 3.

    Example:
        >>> layer_norm([1.0, 2.0, 3.0, 6.0], eps=0.5)
        array([-1. , -0.5,  0. ,  1.5])
    """
    call = _resolve("layer_norm", x, scale, bias, eps=eps, axis=axis)
    return _forward(call, *_moments(call.x, call.axes))


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

        dx = (u - mean(u) - x^ mean(u * x^)) / sigma,    u = scale * dy,    x^ = (x - mean) / sigma
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
    call = _resolve("layer_norm_vjp", x, scale, bias, dy, eps=eps, axis=axis)
    return _backward(call, *_moments(call.x, call.axes), call.axes)


class Running(NamedTuple):
    """Running statistics of batch_norm: each f64, of the size of x along the features."""

    mean: Array
    var: Array


def batch_norm(
    x: npt.ArrayLike,
    scale: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
    running: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
    *,
    training: bool = True,
    momentum: float = 0.99,
    eps: float = 1e-5,
    axis: Axis = -1,
) -> tuple[Array, Running]:
    """Batch normalization.

        y = (x - mean) / sigma * scale + bias,    sigma = sqrt(var + eps)

    with mean and var per feature: in training those of the batch, over all other axes, and otherwise the running ones.
    Training moves each running statistic to momentum * running + (1 - momentum) * batch, as Keras and Flax do.
    (PyTorch's momentum is 1 less this one, and to its running var goes N / (N - 1) times that of the batch.)

    Args:
        x: floating-point, at least two axes.
        scale, bias: floating-point, of the size of x along the features; None multiplies by 1, adds 0.
        running: (mean, var), each likewise; None starts training from 0 and 1.
        training: use the statistics of the batch, and update the running ones.
        momentum: share of the running statistics that is kept, in [0, 1].
        eps: a finite number >= 0.
        axis: the features.

    Returns:
        y, f64, shaped as x, and the running statistics, updated in training; nothing is written in place.

    Raises:
        TypeError: x, a parameter or a running statistic is not floating-point, or there are no running statistics
            without training.
        ValueError: a shape does not fit, an axis is out of range, momentum or eps is not valid, or there are no cases
            to train on.

    Source: Ioffe & Szegedy 2015, arXiv 1502.03167, algorithms 1 and 2.

    Example:
        >>> y, running = batch_norm([[1.0], [2.0], [3.0], [6.0]], eps=0.5, momentum=0.5)
        >>> y.ravel(), running.mean, running.var
        (array([-1. , -0.5,  0. ,  1.5]), array([1.5]), array([2.25]))
        >>> batch_norm([[3.0]], running=running, training=False, eps=0.0)[0]
        array([[1.]])
    """
    call = _resolve("batch_norm", x, scale, bias, eps=eps, axis=axis)
    if not 0 <= momentum <= 1:
        raise errors.out_of_domain("batch_norm", "momentum", momentum, "a number in [0, 1]", "pass one such as 0.99")
    old = _running("batch_norm", call, running, training)
    mean, var = _moments(call.x, call.shared) if training else old
    kept = momentum if training else 1.0
    new_mean, new_var = kept * old[0] + (1 - kept) * mean, kept * old[1] + (1 - kept) * var
    return _forward(call, mean, var), Running(new_mean.squeeze(call.shared), new_var.squeeze(call.shared))


def batch_norm_vjp(
    dy: npt.ArrayLike,
    x: npt.ArrayLike,
    scale: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
    running: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
    *,
    training: bool = True,
    eps: float = 1e-5,
    axis: Axis = -1,
) -> Gradients:
    """Gradients of the output of batch_norm: the product of dy with its Jacobian.

        dx = (u - mean(u) - x^ mean(u * x^)) / sigma in training, otherwise u / sigma,    u = scale * dy
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
    call = _resolve("batch_norm_vjp", x, scale, bias, dy, eps=eps, axis=axis)
    old = _running("batch_norm_vjp", call, running, training)
    if training:
        return _backward(call, *_moments(call.x, call.shared), call.shared)
    return _backward(call, *old, ())


def weight_norm(v: npt.ArrayLike, g: npt.ArrayLike) -> Array:
    """Weight normalization: each row of the weight gets the length that its gain says.

        w_i = g_i v_i / ||v_i||

    Args:
        v: direction, [n, m], floating-point.
        g: length, [n], floating-point.

    Returns:
        w, f64[n, m]; NaN in rows of zeros.

    Raises:
        TypeError: v or g is not floating-point.
        ValueError: v is not a matrix, or g has not one element for each of its rows.

    Source: Salimans & Kingma 2016, arXiv 1602.07868, equation 2.

    Example:
        >>> weight_norm([[3.0, 4.0], [0.0, 2.0]], [10.0, 1.0])
        array([[6., 8.],
               [0., 1.]])
    """
    v, g, _ = _matrices("weight_norm", v, g)
    return g * _divide(v, np.linalg.norm(v, axis=1, keepdims=True))


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
        >>> weight_norm_vjp([[1.0, 0.0]], [[3.0, 4.0]], [5.0])
        (array([[ 0.64, -0.48]]), array([0.6]))
    """
    v, g, dw = _matrices("weight_norm_vjp", v, g, dw)
    length = np.linalg.norm(v, axis=1, keepdims=True)
    direction = _divide(v, length)
    along = np.sum(dw * direction, axis=1, keepdims=True)
    return _divide(g, length) * (dw - direction * along), along[:, 0]


class _Call(NamedTuple):
    """Checked arguments in float64, the parameters shaped to broadcast against x."""

    x: Array
    scale: Array | None
    bias: Array | None
    dy: Array  # x itself where there is none
    eps: float
    axes: tuple[int, ...]  # along which the parameters differ
    shared: tuple[int, ...]  # along which they are repeated


def _resolve(
    op: str,
    x: npt.ArrayLike,
    scale: npt.ArrayLike | None,
    bias: npt.ArrayLike | None,
    dy: npt.ArrayLike | None = None,
    *,
    eps: float,
    axis: Axis,
) -> _Call:
    arguments = {"x": x, "scale": scale, "bias": bias, "dy": dy}
    arrays = {name: np.asarray(value) for name, value in arguments.items() if value is not None}
    specs = {name: Spec(array.shape, array.dtype.name) for name, array in arrays.items()}
    call = resolve(
        op, specs["x"], specs.get("scale"), specs.get("bias"),
        variant=derive(op, "standard", eps, None), axis=axis, dy=specs.get("dy", specs["x"]),
    )  # fmt: skip
    wide = {name: array.astype(np.float64) for name, array in arrays.items()}
    for name in wide.keys() & {"scale", "bias"}:
        wide[name] = np.expand_dims(wide[name], call.shared_axes)
    dy = wide.get("dy", wide["x"])
    return _Call(wide["x"], wide.get("scale"), wide.get("bias"), dy, call.eps, call.axes, call.shared_axes)


def _running(
    op: str, call: _Call, running: tuple[npt.ArrayLike, npt.ArrayLike] | None, training: bool
) -> tuple[Array, Array]:
    """The running statistics, shaped to broadcast against x."""
    cases = [call.x.shape[axis] for axis in call.shared]
    if training and (0 in cases or not cases):
        raise errors.out_of_domain(op, "x.shape", call.x.shape, "at least one case", "pass a batch, or training=False")
    sizes = tuple(call.x.shape[axis] for axis in call.axes)
    if running is None:
        if not training:
            raise errors.wrong_type(op, "running", None, "(mean, var) for training=False", "pass those of training")
        running = np.zeros(sizes), np.ones(sizes)
    checked = []
    for name, value in zip(("running mean", "running var"), running, strict=True):
        array = np.asarray(value)
        if array.dtype.name not in dtypes.FLOATS:
            raise errors.wrong_dtype(op, name, array.dtype.name, dtypes.FLOATS)
        if array.shape != sizes:
            raise errors.wrong_shape(op, name, array.shape, sizes, "the features of x")
        checked.append(np.expand_dims(array.astype(np.float64), call.shared))
    return checked[0], checked[1]


def _moments(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Mean and variance; in two passes, so that a large mean costs the variance nothing."""
    mean = _mean(x, axes)
    return mean, _mean((x - mean) ** 2, axes)


def _forward(call: _Call, mean: Array, var: Array) -> Array:
    y = _divide(call.x - mean, np.sqrt(var + call.eps))
    if call.scale is not None:
        y = y * call.scale
    return y if call.bias is None else y + call.bias


def _backward(call: _Call, mean: Array, var: Array, axes: tuple[int, ...]) -> Gradients:
    """Axes are those over which mean and var are taken from x, none where they are constants."""
    sigma = np.sqrt(var + call.eps)
    standardised = _divide(call.x - mean, sigma)
    dx = call.dy if call.scale is None else call.dy * call.scale
    if axes:
        dx = dx - _mean(dx, axes) - standardised * _mean(dx * standardised, axes)
    dscale = None if call.scale is None else np.sum(call.dy * standardised, axis=call.shared)
    dbias = None if call.bias is None else np.sum(call.dy, axis=call.shared)
    return _divide(dx, sigma), dscale, dbias


def _mean(x: Array, axes: tuple[int, ...]) -> Array:
    count = max(1, int(np.prod([x.shape[axis] for axis in axes])))  # a mean of no elements is 0, without a warning
    return np.asarray(np.sum(x, axis=axes, keepdims=True) / count)


def _divide(numerator: Array, denominator: Array) -> Array:
    """NaN where a statistic is 0 and eps is too, as IEEE 754 says, without NumPy's warning."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return numerator / denominator


def _matrices(
    op: str, v: npt.ArrayLike, g: npt.ArrayLike, dw: npt.ArrayLike | None = None
) -> tuple[Array, Array, Array]:
    """Direction [n, m], gain as [n, 1], and upstream gradient [n, m]."""
    arrays = {name: np.asarray(value) for name, value in {"v": v, "g": g, "dw": v if dw is None else dw}.items()}
    for name, array in arrays.items():
        if array.dtype.name not in dtypes.FLOATS:
            raise errors.wrong_dtype(op, name, array.dtype.name, dtypes.FLOATS)
    direction, gain, upstream = (array.astype(np.float64) for array in arrays.values())
    if direction.ndim != 2:
        raise errors.out_of_domain(op, "shape of v", direction.shape, "[n, m]", "pass a matrix")
    described = f"v {errors.describe(direction.shape, arrays['v'].dtype.name)}"
    if gain.shape != direction.shape[:1]:
        raise errors.wrong_shape(op, "g", gain.shape, direction.shape[:1], described)
    if upstream.shape != direction.shape:
        raise errors.wrong_shape(op, "dw", upstream.shape, direction.shape, described)
    return direction, gain[:, None], upstream
