"""The formula in plain NumPy is the golden, and its gradients are products with the R matrix."""

from __future__ import annotations

import numpy as np
import pytest

from rmsnorm.numpy_impl import formula
from rmsnorm.numpy_impl.paper import derivation
from rmsnorm.parity.cases import CASES, make
from rmsnorm.parity.judge import Outcome, judge

EPS = 1e-6  # of the formula and of the variant standard
PLAIN = [
    case
    for case in CASES
    if "standard" in case.variants and "float64" in case.dtypes and case.data in ("rows", "constant", "zero_rows")
    if case.scale and 0 not in case.shape and not (case.mask or case.residual or case.gate or case.options)
]


def by_formula(data, eps=EPS):
    b = np.zeros(data.scale.shape) if data.bias is None else data.bias
    da, dg, db = data.tangents
    dx, dscale, dbias = formula.rms_norm_vjp(data.dy, data.x, data.scale, eps)
    jvp = formula.rms_norm_jvp(data.x, data.scale, da, dg, np.zeros(b.shape) if db is None else db, eps)
    results = {
        "y": [formula.rms_norm(data.x, data.scale, b, eps)],
        "inverse_rms": [1 / formula.rms(data.x, eps)],
        "dx": [dx],
        "dscale": [dscale],
        "dbias": [dbias],
        "jvp": [jvp],
    }
    return Outcome(results)


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_it_is_the_golden(case):
    """Within the bounds that hold for every implementation in float64 (accuracy.bounds)."""
    verdicts = judge(by_formula, make(case, "standard", "float64"))
    assert {verdict.quantity for verdict in verdicts} >= {"y", "inverse_rms", "dx", "dscale", "jvp"}
    assert all(verdict.passed for verdict in verdicts), verdicts


def test_the_comparison_can_fail():
    verdicts = judge(lambda data: by_formula(data, eps=1.001 * EPS), make(PLAIN[0], "standard", "float64"))
    assert not any(verdict.passed for verdict in verdicts if verdict.quantity in ("y", "inverse_rms", "dx", "jvp"))


def test_the_products_are_those_with_the_r_matrix():
    """A product of n terms, each rounded: within 4 n u of the sum of their absolute values."""
    random = np.random.default_rng(0)
    a, g, v, da = random.normal(size=(4, 24))
    matrix = formula.r_matrix(a, EPS)
    zero, bound = np.zeros(24), 4 * 24 * np.finfo(np.float64).eps / 2
    dx, _, _ = formula.rms_norm_vjp(v, a, g, EPS)
    assert np.all(abs(dx - matrix.T @ (g * v)) <= bound * (abs(matrix.T) @ abs(g * v)))
    moved = formula.rms_norm_jvp(a, np.ones(24), da, zero, zero, EPS)
    assert np.all(abs(moved - matrix @ da) <= bound * (abs(matrix) @ abs(da)))
    same = derivation.Row(a, variant="standard", eps=EPS).r_matrix
    assert np.all(abs(same - matrix) <= bound * (np.eye(24) + np.outer(abs(a), abs(a)) / (a @ a)) / np.sqrt(a @ a / 24))
