"""The paper's derivation, proved in two ways: in 60 digits, and by the golden's O(n) products.

The error of R. Let tau = K u / (1 - K u), u = 2^-53 and K = 2 n + 10: more roundings than lie on any path to an element
of R (n for the mean square, at most 10 others) or to a product with it (another n). Each factor of
R = (I - x^ slope^T) / rho errs by at most tau times a majorant, x^ by tau (1 + |x^|), slope by tau m (1 / k + |slope|),
1 / rho by tau / rho; so R errs by at most 3 tau (I + (1 + |x^|) (m (1 / k + |slope|))^T) / rho, element by element, and
a product with R by the same product with that matrix and absolute values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import mpmath  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import pytest
from golden.oracle import Row as ExactRow

from rmsnorm import Variant
from rmsnorm.numpy_impl import rms_norm, rms_norm_jvp, rms_norm_vjp
from rmsnorm.numpy_impl.paper.derivation import Row, weight_gradient, weight_gradient_kronecker

Array = npt.NDArray[np.float64]
PAPER = Variant.get("paper")
N, M = 7, 4
U = 2.0**-53
TAU = (2 * N + 10) * U / (1 - (2 * N + 10) * U)

# The variant, and k counted by hand: 7 * 0.4 = 2.8.
FORMS = {
    "paper": (PAPER, 7),
    "inside": (PAPER.replace(eps=0.5), 7),
    "outside": (PAPER.replace(eps=0.3, eps_position="outside"), 7),
    "clamp": (PAPER.replace(eps=0.75, eps_position="clamp"), 7),
    "ceil": (PAPER.replace(partial=0.4), 3),
    "partial clamp": (PAPER.replace(partial=0.4, eps=0.75, eps_position="clamp"), 3),
    "offset": (Variant.get("gemma").replace(eps=0.5), 7),
    "offset partial outside": (PAPER.replace(scale_offset=1.0, partial=0.4, eps=0.3, eps_position="outside"), 3),
}


class Case(NamedTuple):
    variant: Variant
    k: int
    x: Array  # of few bits, as w is: a = W x is exact, and everything else is judged from the same a
    w: Array
    a: Array
    g: Array
    b: Array
    v: Array

    @property
    def row(self) -> Row:
        return Row(self.a, variant=self.variant)

    @property
    def gain(self) -> Array:
        return self.variant.scale_offset + self.g

    def r_error(self) -> Array:
        c = np.where(np.arange(N) < self.k, self.a, 0.0)
        rho, root = self.row.rho, np.linalg.norm(c) / np.sqrt(self.k)
        # |slope| = |c| / (k s) is at most |c| / (k sqrt(q)), for every place of eps.
        slope = (np.arange(N) < self.k) * (1 / self.k + np.abs(c) / (self.k * root))
        return np.asarray(3 * TAU * (np.eye(N) + np.outer(1 + np.abs(self.a / rho), slope)) / rho)


# Powers of two: eps decides, shows, or is lost; the clamp acts at the first and not at the others.
SIZES = (2.0**-10, 1.0, 2.0**10)


@pytest.fixture(params=itertools.product(SIZES, FORMS), ids=lambda entry: f"{entry[0]}-{entry[1]}")
def case(request: pytest.FixtureRequest) -> Case:
    size, form = request.param
    rng = np.random.default_rng(0)
    x, w = (np.round(64 * rng.normal(size=shape)) / 64 for shape in (M, (N, M)))
    return Case(*FORMS[form], x, size * w, size * w @ x, *rng.normal(size=(3, N)))


@pytest.fixture(autouse=True)
def sixty_digits() -> Iterator[None]:
    with mpmath.workdps(60):
        yield


def exact_row(a: list[Any], case: Case) -> list[Any]:
    """RMSNorm as mathematics has it, in 60 digits."""
    normalised = ExactRow(case.variant, case.variant.eps, a, [True] * N).normalised()
    offset = mpmath.mpf(case.variant.scale_offset)
    return [n * (offset + g) + b for n, g, b in zip(normalised, case.g, case.b, strict=True)]


def exact_jacobian(case: Case) -> Array:
    """By differences: with h = 10^-20 of a row near 1 truncation, 10^-40, and rounding, 10^-60 / 10^-20, vanish."""
    h, columns = mpmath.mpf(10) ** -20, []
    for j in range(N):
        high, low = ([mpmath.mpf(a) + sign * h * (i == j) for i, a in enumerate(case.a)] for sign in (1, -1))
        pairs = zip(exact_row(high, case), exact_row(low, case), strict=True)
        columns.append([float((up - down) / (2 * h)) for up, down in pairs])
    return np.array(columns).T


def within(got: Array, want: Array, error: Array) -> None:
    assert got.shape == np.shape(want) == error.shape
    assert got.dtype == np.float64
    assert np.all(np.abs(got - want) <= error), f"got {got}\nwant {want}\nbound {error}"


def test_a_row_is_that_of_sixty_digits_and_the_golden(case: Case) -> None:
    """x^ errs by tau (1 + |x^|) |o + g| at most, and the last two operations by less than another tau."""
    error = 2 * TAU * (np.abs(case.gain) * (1 + np.abs(case.a / case.row.rho)) + np.abs(case.b))
    exact = np.array([float(e) for e in exact_row([mpmath.mpf(e) for e in case.a], case)])
    for want in (exact, rms_norm(case.a, case.g, case.b, variant=case.variant)):
        within(case.row.y(case.g, case.b), want, error)


def test_the_jacobian_is_that_of_sixty_digits_and_without_gain_r(case: Case) -> None:
    within(case.row.jacobian(case.g), exact_jacobian(case), np.abs(case.gain)[:, None] * case.r_error())
    within(case.row.r_matrix, case.row.jacobian(), case.r_error())
    assert np.array_equal(case.row.jacobian(case.g), case.gain[:, None] * case.row.r_matrix)


def test_the_jacobian_gives_the_golden_products(case: Case) -> None:
    """Every row and column of the matrix, and a vector in general position, through the O(n) products."""
    dy_da = case.row.jacobian(case.g)
    error = np.abs(case.gain)[:, None] * case.r_error()
    rows, directions = np.tile(case.a, (N + 1, 1)), np.vstack([np.eye(N), case.v])
    pulled, dscale, dbias = rms_norm_vjp(directions, rows, case.g, case.b, variant=case.variant)
    within(directions @ dy_da, pulled, np.abs(directions) @ error)
    pushed = rms_norm_jvp((rows, case.g, case.b), (directions, None, None), variant=case.variant)
    within(directions @ dy_da.T, pushed, np.abs(directions) @ error.T)
    v, total = directions.sum(axis=0), np.abs(directions).sum(axis=0)
    within(case.row.gain_gradient(v), dscale, 2 * TAU * total * (1 + np.abs(case.a / case.row.rho)))
    assert np.allclose(dbias, v, rtol=0, atol=np.max(2 * N * U * total))


def test_the_gradients_are_transposed_and_kronecker_products(case: Case) -> None:
    """By the golden, and by the O(n) product of the derivation; W enters through a = W x alone."""
    u, arguments = case.gain * case.v, (case.v, case.x, case.w, case.g)
    of_input = case.r_error().T @ np.abs(u)
    dx = rms_norm_vjp(case.v, case.a, case.g, case.b, variant=case.variant)[0]
    for want in (case.row.r_matrix.T @ u, dx):
        within(case.row.input_gradient(case.v, case.g), want, of_input)
    kronecker = weight_gradient_kronecker(*arguments, variant=case.variant)
    for want in (weight_gradient(*arguments, variant=case.variant), np.outer(dx, case.x)):
        within(kronecker, want, np.outer(of_input, np.abs(case.x)))


@pytest.mark.parametrize("position", ["inside", "outside", "clamp"])
def test_a_row_of_zeros(position: str) -> None:
    """With eps R = I / rho, the subgradient every implementation takes; without it NaN, and no warning."""
    variant, v = PAPER.replace(eps_position=position), np.array([1.0, 2.0, 3.0, 4.0])
    rho = {"inside": 0.5, "outside": 0.25, "clamp": 0.125}[position]
    row, without = (Row(np.zeros(4), variant=variant, eps=eps) for eps in (0.25, 0.0))
    assert np.array_equal(row.r_matrix, np.eye(4) / rho)
    assert np.array_equal(row.input_gradient(v), v / rho)
    assert all(np.isnan(array).all() for array in (without.y(), without.r_matrix, without.input_gradient(v)))


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"Row: shape of a is \(1, 1\), expected \[n\], n >= 1; pass one row"):
        Row([[1.0]])
    with pytest.raises(ValueError, match=r"weight_gradient: w has shape \(1, 1\), expected \(1, 2\) to match x f64"):
        weight_gradient([1.0], [1.0, 2.0], [[1.0]])
