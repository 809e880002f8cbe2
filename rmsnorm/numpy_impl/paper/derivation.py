"""The derivation of the paper, matrix by matrix: one row a = W x, in plain float64.

    y = a / rho * (o + g) + b        R = d(a / rho) / da        dL/dW = sum_i [x^T (kron) (diag((o + g) * v) R)]_i

Here R is a matrix and the Kronecker product is formed, as the paper writes them, for reading and for proof: O(n^2) and
O(n^2 m). The golden computes the same gradients in O(n), and without overflow. The two share no arithmetic.
Throughout, a is [n], x is [m], W is [n, m], and v = dL/dy is [n]; without a gain, (o + g) is 1.

Source: Zhang & Sennrich 2019, arXiv 1910.07467, section 4.2.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rmsnorm.specification import dtypes, errors
from rmsnorm.specification.variants import CLAMPED, Variant, derive

Array: TypeAlias = npt.NDArray[np.float64]

__all__ = [
    "gain_gradient",
    "input_gradient",
    "jacobian",
    "r_matrix",
    "rms",
    "rms_norm_row",
    "weight_gradient",
    "weight_gradient_kronecker",
]


def rms(
    a: npt.ArrayLike,
    *,
    variant: str | Variant = "paper",
    eps: float | None = None,
    partial: float | Fraction | None = None,
) -> float:
    """The denominator rho of one row.

        rho = sqrt(q + eps) | sqrt(q) + eps | max(sqrt(q), eps / sqrt(k)),    q = (1 / k) sum over S of a_i^2

    S holds the first k of the n elements.

    Args:
        a: the row, [n], n >= 1, floating-point.
        variant: name of a preset or a Variant; its roundings do not enter.
        eps: in place of the variant's.
        partial: fraction of the elements, from the first, that enter q; in place of the variant's.

    Returns:
        rho, a float.

    Raises:
        TypeError: a is not floating-point.
        ValueError: a is not one row, or eps, partial or variant is not valid.

    Source: Zhang & Sennrich 2019, equation 4, and section 4.3 for pRMSNorm.

    Example:
        >>> rms([1.0, 7.0])
        5.0
    """
    return float(_row("rms", a, variant, eps, partial).rho)


def rms_norm_row(
    a: npt.ArrayLike,
    g: npt.ArrayLike | None = None,
    b: npt.ArrayLike | None = None,
    *,
    variant: str | Variant = "paper",
    eps: float | None = None,
    partial: float | Fraction | None = None,
) -> Array:
    """RMSNorm of one row.

        y = a / rho * (o + g) + b

    Args:
        a: the row, [n], n >= 1, floating-point.
        g: gain, [n], floating-point; None multiplies by 1, without the offset.
        b: bias, [n], floating-point; None adds nothing.
        variant, eps, partial: as for rms.

    Returns:
        y, f64[n]; NaN for a row of zeros with eps = 0.

    Raises:
        TypeError, ValueError: as rms; also when g or b has another shape than a.

    Source: Zhang & Sennrich 2019, equation 4.

    Example:
        >>> rms_norm_row([1.0, 7.0], [1.0, 2.0])
        array([0.2, 2.8])
    """
    row = _row("rms_norm_row", a, variant, eps, partial)
    y = row.normalised * _gain("rms_norm_row", g, row)
    return y if b is None else y + _vector("rms_norm_row", "b", b, row.normalised)


def r_matrix(
    a: npt.ArrayLike,
    *,
    variant: str | Variant = "paper",
    eps: float | None = None,
    partial: float | Fraction | None = None,
) -> Array:
    """The R matrix: the Jacobian of the normalised row with respect to the row.

        R = d(a / rho) / da = (1 / rho) (I - a (m * a)^T / (k s rho))

    m is the indicator of the k counted elements; s = rho for eps inside, sqrt(q) for eps outside. Where the clamp acts,
    or the row is 0 and eps is not, rho is constant and R = I / rho. For full statistics and eps = 0 it is the paper's
    R = (1 / RMS) (I - a a^T / (n RMS^2)); for partial statistics R is not symmetric.

    Args:
        a: the row, [n], n >= 1, floating-point.
        variant, eps, partial: as for rms.

    Returns:
        R, f64[n, n], R[i, j] = d(a_i / rho) / d a_j.

    Raises:
        TypeError, ValueError: as rms.

    Source: Zhang & Sennrich 2019, section 4.2.

    Example:
        >>> r_matrix([1.0, 7.0])
        array([[ 0.196, -0.028],
               [-0.028,  0.004]])
    """
    return _r_matrix(_row("r_matrix", a, variant, eps, partial))


def jacobian(
    a: npt.ArrayLike,
    g: npt.ArrayLike | None = None,
    *,
    variant: str | Variant = "paper",
    eps: float | None = None,
    partial: float | Fraction | None = None,
) -> Array:
    """The Jacobian of the output with respect to the row.

        dy/da = diag(o + g) R

    Args:
        a: the row, [n], n >= 1, floating-point.
        g: gain, [n], floating-point; None multiplies by 1, without the offset.
        variant, eps, partial: as for rms.

    Returns:
        dy/da, f64[n, n].

    Raises:
        TypeError, ValueError: as rms; also when g has another shape than a.

    Source: Zhang & Sennrich 2019, section 4.2.

    Example:
        >>> jacobian([1.0, 7.0], [1.0, 2.0])
        array([[ 0.196, -0.028],
               [-0.056,  0.008]])
    """
    row = _row("jacobian", a, variant, eps, partial)
    return np.diag(_gain("jacobian", g, row)) @ _r_matrix(row)


def input_gradient(
    v: npt.ArrayLike,
    a: npt.ArrayLike,
    g: npt.ArrayLike | None = None,
    *,
    variant: str | Variant = "paper",
    eps: float | None = None,
    partial: float | Fraction | None = None,
) -> Array:
    """The gradient with respect to the row, in O(n).

        dL/da = R^T u = (u - (m * a) <u, a> / (k s rho)) / rho,    u = (o + g) * v

    Args:
        v: gradient of the loss with respect to y, [n], floating-point.
        a: the row, [n], n >= 1, floating-point.
        g: gain, [n], floating-point; None multiplies by 1, without the offset.
        variant, eps, partial: as for rms.

    Returns:
        dL/da, f64[n].

    Raises:
        TypeError, ValueError: as rms; also when v or g has another shape than a.

    Source: Zhang & Sennrich 2019, section 4.2.

    Example:
        >>> input_gradient([1.0, 0.0], [1.0, 7.0])
        array([ 0.196, -0.028])
    """
    row = _row("input_gradient", a, variant, eps, partial)
    return _input_gradient(row, _upstream("input_gradient", v, g, row))


def gain_gradient(
    v: npt.ArrayLike,
    a: npt.ArrayLike,
    *,
    variant: str | Variant = "paper",
    eps: float | None = None,
    partial: float | Fraction | None = None,
) -> Array:
    """The gradient with respect to the gain; with respect to the bias it is v itself.

        dL/dg = v * a / rho,    dL/db = v

    Args:
        v: gradient of the loss with respect to y, [n], floating-point.
        a: the row, [n], n >= 1, floating-point.
        variant, eps, partial: as for rms.

    Returns:
        dL/dg, f64[n].

    Raises:
        TypeError, ValueError: as rms; also when v has another shape than a.

    Source: Zhang & Sennrich 2019, section 4.2.

    Example:
        >>> gain_gradient([1.0, 2.0], [1.0, 7.0])
        array([0.2, 2.8])
    """
    row = _row("gain_gradient", a, variant, eps, partial)
    return _vector("gain_gradient", "v", v, row.normalised) * row.normalised


def weight_gradient_kronecker(
    v: npt.ArrayLike,
    x: npt.ArrayLike,
    w: npt.ArrayLike,
    g: npt.ArrayLike | None = None,
    *,
    variant: str | Variant = "paper",
    eps: float | None = None,
    partial: float | Fraction | None = None,
) -> Array:
    """The gradient with respect to the weight, as the paper writes it.

        dL/dW = sum_i [x^T (kron) (diag((o + g) * v) R)]_i,    a = W x

    Row i of the Kronecker product, of size n m, is the part that passes through y_i, with W read column by column.

    Args:
        v: gradient of the loss with respect to y, [n], floating-point.
        x: input, [m], m >= 1, floating-point.
        w: weight, [n, m], floating-point.
        g: gain, [n], floating-point; None multiplies by 1, without the offset.
        variant, eps, partial: as for rms.

    Returns:
        dL/dW, f64[n, m].

    Raises:
        TypeError: v, x, w or g is not floating-point.
        ValueError: a shape does not fit, or eps, partial or variant is not valid.

    Source: Zhang & Sennrich 2019, section 4.2.

    Example:
        >>> weight_gradient_kronecker([1.0, 0.0], [2.0, 1.0], [[0.0, 1.0], [3.0, 1.0]])
        array([[ 0.392,  0.196],
               [-0.056, -0.028]])
    """
    op = "weight_gradient_kronecker"
    x, a = _linear(op, x, w)
    row = _row(op, a, variant, eps, partial)
    through_y = np.kron(x, np.diag(_upstream(op, v, g, row)) @ _r_matrix(row))
    total: Array = np.sum(through_y, axis=0)
    return total.reshape((a.size, x.size), order="F")


def weight_gradient(
    v: npt.ArrayLike,
    x: npt.ArrayLike,
    w: npt.ArrayLike,
    g: npt.ArrayLike | None = None,
    *,
    variant: str | Variant = "paper",
    eps: float | None = None,
    partial: float | Fraction | None = None,
) -> Array:
    """The gradient with respect to the weight, as it is computed: the Kronecker form, summed by hand.

        dL/dW = (R^T u) x^T,    u = (o + g) * v,    a = W x

    Args, Returns, Raises:
        as weight_gradient_kronecker.

    Source: Zhang & Sennrich 2019, section 4.2.

    Example:
        >>> weight_gradient([1.0, 0.0], [2.0, 1.0], [[0.0, 1.0], [3.0, 1.0]])
        array([[ 0.392,  0.196],
               [-0.056, -0.028]])
    """
    x, a = _linear("weight_gradient", x, w)
    row = _row("weight_gradient", a, variant, eps, partial)
    return np.outer(_input_gradient(row, _upstream("weight_gradient", v, g, row)), x)


class _Row(NamedTuple):
    """What all derivatives of one row are made of: R = (I - normalised slope^T) / rho."""

    offset: float
    rho: np.float64
    normalised: Array  # a / rho
    slope: Array  # d rho / da = (m * a) / (k s)


def _row(
    op: str, a: npt.ArrayLike, variant: str | Variant, eps: float | None, partial: float | Fraction | None
) -> _Row:
    chosen = derive(op, variant, eps, partial)
    a = _float64(op, "a", a, 1)
    n, epsilon = a.size, chosen.eps_for("float64")
    k = chosen.counted(n)
    m = (np.arange(n) < k).astype(np.float64)
    q = np.sum(m * a**2) / k
    root = np.sqrt(q)
    if chosen.eps_position == "inside":
        rho = s = np.sqrt(q + epsilon)
    elif chosen.eps_position == "outside":
        rho, s = root + epsilon, root
    else:
        floor = epsilon / np.sqrt(k)
        rho, s = max(root, floor), np.inf if root < floor * CLAMPED else root  # the clamped rho is constant: slope 0
    # At a row of zeros the slope 0 is the subgradient that every implementation takes; eps = 0 gives 0 / 0 = NaN there.
    slope = m * a / (k * s) if root > 0 else np.zeros(n)
    with np.errstate(invalid="ignore"):
        return _Row(chosen.scale_offset, rho, a / rho, slope)


def _r_matrix(row: _Row) -> Array:
    return (np.eye(row.slope.size) - np.outer(row.normalised, row.slope)) / row.rho


def _input_gradient(row: _Row, u: Array) -> Array:
    return (u - row.slope * (u @ row.normalised)) / row.rho


def _upstream(op: str, v: npt.ArrayLike, g: npt.ArrayLike | None, row: _Row) -> Array:
    """u = (o + g) * v."""
    return _gain(op, g, row) * _vector(op, "v", v, row.normalised)


def _gain(op: str, g: npt.ArrayLike | None, row: _Row) -> Array:
    return np.ones_like(row.normalised) if g is None else row.offset + _vector(op, "g", g, row.normalised)


def _linear(op: str, x: npt.ArrayLike, w: npt.ArrayLike) -> tuple[Array, Array]:
    """The input and the row a = W x."""
    x, w = _float64(op, "x", x, 1), _float64(op, "w", w, 2)
    if w.shape[1] != x.size:
        raise errors.wrong_shape(op, "w", w.shape, (w.shape[0], x.size), f"x {errors.describe(x.shape, 'float64')}")
    return x, w @ x


def _vector(op: str, name: str, value: npt.ArrayLike, a: Array) -> Array:
    vector = _float64(op, name, value, 1)
    if vector.shape != a.shape:
        raise errors.wrong_shape(op, name, vector.shape, a.shape, f"a {errors.describe(a.shape, 'float64')}")
    return vector


def _float64(op: str, name: str, value: npt.ArrayLike, rank: int) -> Array:
    array = np.asarray(value)
    if array.dtype.name not in dtypes.FLOATS:
        raise errors.wrong_dtype(op, name, array.dtype.name, dtypes.FLOATS)
    if array.ndim != rank or not array.size:
        wanted, fix = ("[n], n >= 1", "pass one row") if rank == 1 else ("[n, m], n, m >= 1", "pass a matrix")
        raise errors.out_of_domain(op, f"shape of {name}", array.shape, wanted, fix)
    return array.astype(np.float64)
