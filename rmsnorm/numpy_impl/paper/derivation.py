"""The derivation of the paper, matrix by matrix: one row a = W x, in plain float64.

    y = a / rho * (o + g) + b        R = d(a / rho) / da        dL/dW = sum_i [x^T (kron) (diag((o + g) * v) R)]_i

Here R is a matrix and the Kronecker product is formed, as the paper writes them, for reading and for proof: O(n^2) and
O(n^2 m). The golden computes the same gradients in O(n), and without overflow. The two share no arithmetic.
Throughout, a is [n], x is [m], W is [n, m], and v = dL/dy is [n]; without a gain, (o + g) is 1.

Source: Zhang & Sennrich 2019, arXiv 1910.07467, section 4.2.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rmsnorm.specification import dtypes, errors
from rmsnorm.specification.variants import CLAMPED, Variant, derive

Array: TypeAlias = npt.NDArray[np.float64]

__all__ = ["Row", "weight_gradient", "weight_gradient_kronecker"]


class Row:
    """RMSNorm of one row, and its derivatives.

        rho = sqrt(q + eps) | sqrt(q) + eps | max(sqrt(q), eps / sqrt(k)),    q = (1 / k) sum over S of a_i^2

    S holds the first k of the n elements.

    Args:
        a: the row, [n], n >= 1, floating-point.
        variant: name of a preset or a Variant; its roundings do not enter.
        eps: in place of the variant's.
        partial: fraction of the elements, from the first, that enter q; in place of the variant's.

    Attributes:
        rho: the denominator.
        normalised: a / rho, f64[n]; NaN for a row of zeros with eps = 0.
        slope: d rho / da = (m * a) / (k s), f64[n]. m is the indicator of the k counted elements; s = rho for eps
            inside, sqrt(q) for eps outside. Where the clamp acts, or the row is 0 and eps is not, rho is constant: 0.

    Raises:
        TypeError: a is not floating-point; or, of every method, g, b or v.
        ValueError: a is not one row, or eps, partial or variant is not valid; of a method, g, b or v has another shape.

    Source: Zhang & Sennrich 2019, equation 4, and section 4.3 for pRMSNorm.

    Example:
        >>> row = Row([1.0, 7.0])
        >>> float(row.rho), row.y([1.0, 2.0])
        (5.0, array([0.2, 2.8]))
        >>> row.r_matrix
        array([[ 0.196, -0.028],
               [-0.028,  0.004]])
    """

    def __init__(
        self,
        a: npt.ArrayLike,
        *,
        variant: str | Variant = "paper",
        eps: float | None = None,
        partial: float | Fraction | None = None,
    ) -> None:
        chosen = derive("Row", variant, eps, partial)
        a = _float64("Row", "a", a, 1)
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
            rho, s = max(root, floor), np.inf if root < floor * CLAMPED else root  # the clamped rho is constant
        # At a row of zeros the slope 0 is the subgradient that every implementation takes; eps = 0 gives NaN there.
        self.slope: Array = m * a / (k * s) if root > 0 else np.zeros(n)
        self.offset, self.rho = chosen.scale_offset, np.float64(rho)
        with np.errstate(invalid="ignore"):
            self.normalised: Array = a / rho

    def y(self, g: npt.ArrayLike | None = None, b: npt.ArrayLike | None = None) -> Array:
        """y = a / rho * (o + g) + b, f64[n]; without g the factor is 1."""
        y = self.normalised * self._gain("y", g)
        return y if b is None else y + self._vector("y", "b", b)

    @property
    def r_matrix(self) -> Array:
        """R = d(a / rho) / da = (1 / rho) (I - a (m * a)^T / (k s rho)), f64[n, n].

        For full statistics and eps = 0 it is the paper's R = (1 / RMS) (I - a a^T / (n RMS^2)); for partial statistics
        R is not symmetric.
        """
        return (np.eye(self.slope.size) - np.outer(self.normalised, self.slope)) / self.rho

    def jacobian(self, g: npt.ArrayLike | None = None) -> Array:
        """dy/da = diag(o + g) R, f64[n, n]."""
        return np.diag(self._gain("jacobian", g)) @ self.r_matrix

    def input_gradient(self, v: npt.ArrayLike, g: npt.ArrayLike | None = None) -> Array:
        """dL/da = R^T u = (u - (m * a) <u, a> / (k s rho)) / rho, u = (o + g) * v, in O(n): f64[n]."""
        u = self.upstream("input_gradient", v, g)
        return (u - self.slope * (u @ self.normalised)) / self.rho

    def gain_gradient(self, v: npt.ArrayLike) -> Array:
        """dL/dg = v * a / rho, f64[n]; with respect to the bias the gradient is v itself."""
        return self._vector("gain_gradient", "v", v) * self.normalised

    def upstream(self, op: str, v: npt.ArrayLike, g: npt.ArrayLike | None) -> Array:
        """u = (o + g) * v, f64[n]."""
        return self._gain(op, g) * self._vector(op, "v", v)

    def _gain(self, op: str, g: npt.ArrayLike | None) -> Array:
        return np.ones_like(self.normalised) if g is None else self.offset + self._vector(op, "g", g)

    def _vector(self, op: str, name: str, value: npt.ArrayLike) -> Array:
        vector, shape = _float64(op, name, value, 1), self.normalised.shape
        if vector.shape != shape:
            raise errors.wrong_shape(op, name, vector.shape, shape, f"a {errors.describe(shape, 'float64')}")
        return vector


def weight_gradient_kronecker(
    v: npt.ArrayLike, x: npt.ArrayLike, w: npt.ArrayLike, g: npt.ArrayLike | None = None, **options: Any
) -> Array:
    """The gradient with respect to the weight, as the paper writes it.

        dL/dW = sum_i [x^T (kron) (diag((o + g) * v) R)]_i,    a = W x

    Row i of the Kronecker product, of size n m, is the part that passes through y_i, with W read column by column.

    Args:
        v, g: gradient of the loss with respect to y, and the gain, [n], floating-point.
        x: input, [m], m >= 1, floating-point.
        w: weight, [n, m], floating-point.
        options: those of Row.

    Returns:
        dL/dW, f64[n, m].

    Raises:
        TypeError, ValueError: as Row; also when x or w is not floating-point, or their shapes do not fit.

    Source: Zhang & Sennrich 2019, section 4.2.

    Example:
        >>> weight_gradient_kronecker([1.0, 0.0], [2.0, 1.0], [[0.0, 1.0], [3.0, 1.0]])
        array([[ 0.392,  0.196],
               [-0.056, -0.028]])
    """
    x, a = _linear("weight_gradient_kronecker", x, w)
    row = Row(a, **options)
    through_y = np.kron(x, np.diag(row.upstream("weight_gradient_kronecker", v, g)) @ row.r_matrix)
    total: Array = np.sum(through_y, axis=0)
    return total.reshape((a.size, x.size), order="F")


def weight_gradient(
    v: npt.ArrayLike, x: npt.ArrayLike, w: npt.ArrayLike, g: npt.ArrayLike | None = None, **options: Any
) -> Array:
    """The same as it is computed, the Kronecker form summed by hand: dL/dW = (R^T u) x^T.

    Args, Returns, Raises, Source: as weight_gradient_kronecker.

    Example:
        >>> weight_gradient([1.0, 0.0], [2.0, 1.0], [[0.0, 1.0], [3.0, 1.0]])
        array([[ 0.392,  0.196],
               [-0.056, -0.028]])
    """
    x, a = _linear("weight_gradient", x, w)
    return np.outer(Row(a, **options).input_gradient(v, g), x)


def _linear(op: str, x: npt.ArrayLike, w: npt.ArrayLike) -> tuple[Array, Array]:
    """The input and the row a = W x."""
    x, w = _float64(op, "x", x, 1), _float64(op, "w", w, 2)
    if w.shape[1] != x.size:
        raise errors.wrong_shape(op, "w", w.shape, (w.shape[0], x.size), f"x {errors.describe(x.shape, 'float64')}")
    return x, w @ x


def _float64(op: str, name: str, value: npt.ArrayLike, rank: int) -> Array:
    array = np.asarray(value)
    if array.dtype.name not in dtypes.FLOATS:
        raise errors.wrong_dtype(op, name, array.dtype.name, dtypes.FLOATS)
    if array.ndim != rank or not array.size:
        wanted, fix = ("[n], n >= 1", "pass one row") if rank == 1 else ("[n, m], n, m >= 1", "pass a matrix")
        raise errors.out_of_domain(op, f"shape of {name}", array.shape, wanted, fix)
    return array.astype(np.float64)
