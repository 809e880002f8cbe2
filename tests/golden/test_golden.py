"""The golden against the equations in 400 bits, and in special cases: empty, zero, infinite."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from golden.cases import CASES
from golden.oracle import BITS, Row, check, exact, nearest
from mpmath import mp

from rmsnorm import PRESETS, Variant
from rmsnorm.numpy_impl import formula, rms_norm, rms_norm_jvp, rms_norm_vjp
from rmsnorm.numpy_impl.paper.derivation import Row as PaperRow
from rmsnorm.parity.cases import make
from rmsnorm.parity.judge import Outcome, judge
from rmsnorm.specification import dtypes


def named(value):
    return getattr(value, "name", value)


EPS = 1e-6  # of the formula in plain NumPy, and of the variant standard


@pytest.mark.parametrize(("case", "dtype"), [(case, dtype) for case in CASES for dtype in case.dtypes], ids=named)
def test_every_quantity_is_the_nearest_number(case, dtype):
    with mp.workprec(BITS):
        missed = {variant: check(make(case, variant, dtype)) for variant in case.variants}
    # 2^-104 of relative error and a border every ulp: one element in 2^50 may miss the nearest float64
    assert not any(missed.values()), missed


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.gate and "eps" not in case.fields], ids=lambda case: case.name
)
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_gradients_with_a_gate_that_cancel(dtype, eps, case):
    """With (o + g) dy within 1e-12 of what is normalised, 2^-40 of the terms is left; within 2^-90 of them."""
    data, random = make(case, PRESETS["standard"].replace(eps=eps), dtype), np.random.default_rng(13)
    data.gate[data.gate == 0] = 1
    x, z, gain = (a.astype(np.float64) for a in (data.x, data.gate, data.scale))
    f = 1 / (1 + np.exp(-z)) * (z if case.gate[0] == "silu" else 1)
    u = x * f / gain if case.gate[1] == "before" else x / (f * gain)
    u = np.where(np.isnan(u), 1.0, u)  # under a mask
    near = 1 + random.uniform(-1e-12, 1e-12, (2, *x.shape))
    with mp.workprec(BITS):
        check(replace(data, dy=u * near[0], tangents=(np.where(np.isnan(x), 1.0, x) * near[1], None, None)), 2.0**-90)


@pytest.mark.parametrize("position", ["inside", "outside", "clamp"])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e30])
def test_derivatives_beside_the_ends_of_the_range(eps, position):
    """Where dx is in range, though h, dy or what is made of them is not: within an ulp, or 2^-90 of the terms."""
    random = np.random.default_rng(0)
    variant = PRESETS["standard"].replace(eps=eps, eps_position=position)
    for n in (2, 3, 17):
        x, v, g = np.ldexp(random.normal(size=(3, n)), random.integers(-1074, 1023, (3, n)))
        with mp.workprec(8000):
            row, t, gain = Row(variant, eps, [exact(e) for e in x], [True] * n), [*map(exact, v)], [*map(exact, g)]
            normalised, u = row.normalised(), [a * b for a, b in zip(t, gain, strict=True)]

            def along(one, other, rho=row.rho):
                return mp.fsum(abs(a * b) for a, b in zip(one, other, strict=True)) / rho

            inner, moved = along(u, normalised), along(row.slope, t)
            wanted = {  # each with the sizes of its terms
                "dx": [(p, abs(a) / row.rho + abs(s) * inner)
                       for p, a, s in zip(row.pull_back(u), u, row.slope, strict=True)],
                "dscale": [(a * b, 0) for a, b in zip(t, normalised, strict=True)],
                "jvp": [(p * c, (abs(a) / row.rho + abs(b) * moved) * abs(c))
                        for p, a, b, c in zip(row.push_forward(t), t, normalised, gain, strict=True)],
            }  # fmt: skip
            got = dict(zip(("dx", "dscale"), rms_norm_vjp(v, x, g, variant=variant), strict=False))
            got["jvp"] = rms_norm_jvp((x, g), (v, None), variant=variant)
            for name, terms in wanted.items():
                for one, (true, size) in zip(got[name], terms, strict=True):
                    close = nearest(true, "float64")
                    assert one == close or abs(one - true) <= np.spacing(abs(close)) + mp.mpf(2) ** -90 * size, name


@pytest.mark.parametrize("dtype", dtypes.FLOATS)
@pytest.mark.parametrize("values", [[math.nan], [math.inf], [-math.inf], [math.inf, -math.inf], [math.inf, math.nan]])
@pytest.mark.parametrize("place", ["x", "gain", "dy"])
def test_nan_and_infinity_propagate_as_in_the_formula(place, values, dtype):
    random = np.random.default_rng(1)
    x, g, v = random.normal(size=(3, 8)), random.normal(size=8), random.normal(size=(3, 8))
    {"x": x[1], "gain": g, "dy": v[1]}[place][2 : 2 + len(values)] = values
    x, g, v = (array.astype(dtype) for array in (x, g, v))
    y, inverse_rms = rms_norm(x, g, return_inverse_rms=True)
    dx, dscale, _ = rms_norm_vjp(v, x, g)
    with np.errstate(all="ignore"):
        x, g, v = (array.astype(np.float64) for array in (x, g, v))
        want = formula.rms_norm(x, g, 0.0, EPS), *formula.rms_norm_vjp(v, x, g, EPS)[:2], 1 / formula.rms(x, EPS)
    for got, plain in zip((y, dx, dscale, inverse_rms), want, strict=True):
        wide = got.astype(np.float64)
        for kind in (np.isnan, np.isinf, lambda array: array == 0):
            assert np.array_equal(kind(wide), kind(plain))


@pytest.mark.parametrize("dtype", dtypes.FLOATS)
def test_a_zero_row_without_eps_gives_nan(dtype):
    x, g, v = np.zeros((1, 5), dtype), np.full(5, 0.5, dtype), np.ones((1, 5), dtype)
    results = rms_norm(x, g, eps=0.0), *rms_norm_vjp(v, x, g, eps=0.0)[:2], rms_norm_jvp((x, g), (v, g), eps=0.0)
    assert all(np.isnan(result).all() for result in results)


@pytest.mark.parametrize(
    ("shape", "axis"), [((0, 4), -1), ((4, 0), -1), ((3, 0, 2), 1), ((0,), 0), ((2, 0, 3), (0, 2))]
)
def test_nothing_in_gives_nothing_out(shape, axis):
    x, g = np.zeros(shape, np.float32), np.ones(np.take(shape, axis), np.float32)
    y, inverse_rms = rms_norm(x, g, g, axis=axis, return_inverse_rms=True)
    dx, dscale, dbias = rms_norm_vjp(x, x, g, g, axis=axis)
    assert y.shape == dx.shape == rms_norm_jvp((x, g, g), (x, g, g), axis=axis).shape == shape
    assert (inverse_rms.ndim, inverse_rms.any()) == (x.ndim, False)
    assert dscale.tolist() == dbias.tolist() == np.zeros(g.shape).tolist()


@pytest.mark.parametrize("dtype", dtypes.FLOATS)
@pytest.mark.parametrize("variant", ["llama", PRESETS["zhang_torch"]], ids=["name", "object"])
def test_eps_and_partial_of_a_call_are_those_of_another_variant(variant, dtype):
    x, v = np.random.default_rng(2).normal(size=(2, 3, 12)).astype(dtype)
    own = {"variant": variant, "eps": 0.3, "partial": 0.4}
    other = {"variant": Variant.get(variant).replace(eps=0.3, partial=0.4)}
    for name, arguments in ((rms_norm, (x,)), (rms_norm_vjp, (v, x)), (rms_norm_jvp, ((x,), (v,)))):
        got, want = (np.asarray(name(*arguments, **options)[0]) for options in (own, other))
        assert got.tobytes() == want.tobytes()
        assert got.tobytes() != np.asarray(name(*arguments, variant=variant)[0]).tobytes()


def test_a_sum_of_two_dtypes_has_the_wider_and_its_gradients_have_both():
    x, r, v = np.random.default_rng(6).normal(size=(3, 3, 8)).astype(np.float32)
    narrow = x.astype(ml_dtypes.bfloat16)
    h = rms_norm(narrow, residual=r)[1]
    assert h.dtype == np.float32
    assert np.array_equal(h, narrow.astype(np.float32) + r)
    dx, *_, dresidual = rms_norm_vjp(v, narrow, residual=r)
    assert (dx.dtype.name, dresidual.dtype.name) == ("bfloat16", "float32")


def test_a_gain_that_is_cast_first_is_rounded_once():
    """Above half way between two bfloat16 by less than float32 shows."""
    gain = np.array([1 + 2.0**-8 + 2.0**-40])
    assert rms_norm(np.ones((1, 1), "bfloat16"), gain, variant="t5x").astype(np.float64).tolist() == [[1 + 2.0**-7]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_an_eps_too_small_to_see_still_breaks_a_tie(dtype):
    """a / sqrt(a^2 + 1e-6) is less than 1, and times a gain half way between two bfloat16 less than half way."""
    g = np.full(4, 1 + 3 * 2.0**-8, np.float32)
    for value in 2.0**60 / np.arange(1.0, 40.0):
        x = np.full((1, 4), value).astype(dtype)
        y = rms_norm(x, g, out_dtype=None if dtype == "bfloat16" else "bfloat16")  # which it is without being asked for
        assert y.astype(np.float64).tolist() == [[1 + 2.0**-7] * 4]
    x = np.full((1, 4), 2.0**60).astype(dtype)
    even = rms_norm(x, g, out_dtype="bfloat16", eps=0.0)
    assert even.astype(np.float64).tolist() == [[1 + 2.0**-6] * 4]


def test_rows_in_blocks_are_rows():
    """More rows than a block holds, and a row longer than a block."""
    random = np.random.default_rng(11)
    for shape in ((1500, 48), (2, 40000)):
        x, v = random.normal(size=(2, *shape)).astype(np.float32)
        g = random.normal(size=shape[1]).astype(np.float32)
        y, dx = rms_norm(x, g), rms_norm_vjp(v, x, g)[0]
        for row in (0, shape[0] // 2, shape[0] - 1):
            assert np.array_equal(y[row], rms_norm(x[row], g))
            assert np.array_equal(dx[row], rms_norm_vjp(v[row], x[row], g)[0])


def by_formula(data, eps=EPS):
    zero = np.zeros(data.scale.shape)
    bias, (da, dg, db) = zero if data.bias is None else data.bias, data.tangents
    results = {
        "y": formula.rms_norm(data.x, data.scale, bias, eps),
        "inverse_rms": 1 / formula.rms(data.x, eps),
        "jvp": formula.rms_norm_jvp(data.x, data.scale, da, dg, zero if db is None else db, eps),
        **dict(zip(("dx", "dscale", "dbias"), formula.rms_norm_vjp(data.dy, data.x, data.scale, eps), strict=True)),
    }
    return Outcome({name: [value] for name, value in results.items()})


@pytest.mark.parametrize("name", ["rows", "wide", "five axes", "width 1", "vector", "zero rows", "constant", "bias"])
def test_the_formula_in_plain_numpy_is_the_golden(name):
    """Within the bounds that hold for every implementation in float64 (accuracy.bounds); with another eps it is not."""
    data = make(next(case for case in CASES if case.name == name), "standard", "float64")
    verdicts = judge(by_formula, data)
    assert {verdict.quantity for verdict in verdicts} >= {"y", "inverse_rms", "dx", "dscale", "jvp"}
    assert all(verdict.passed for verdict in verdicts), verdicts
    if name == "rows":
        verdicts = judge(lambda data: by_formula(data, eps=1.001 * EPS), data)
        assert not any(verdict.passed for verdict in verdicts if verdict.quantity in ("y", "inverse_rms", "dx", "jvp"))


def test_the_gradients_of_the_formula_are_products_with_the_r_matrix():
    """A product of n terms, each rounded: within 4 n u of the sum of their absolute values."""
    a, g, v, da = np.random.default_rng(0).normal(size=(4, 24))
    matrix = formula.r_matrix(a, EPS)
    zero, bound = np.zeros(24), 4 * 24 * np.finfo(np.float64).eps / 2
    dx, _, _ = formula.rms_norm_vjp(v, a, g, EPS)
    assert np.all(abs(dx - matrix.T @ (g * v)) <= bound * (abs(matrix.T) @ abs(g * v)))
    moved = formula.rms_norm_jvp(a, np.ones(24), da, zero, zero, EPS)
    assert np.all(abs(moved - matrix @ da) <= bound * (abs(matrix) @ abs(da)))
    same = PaperRow(a, variant="standard", eps=EPS).r_matrix
    assert np.all(abs(same - matrix) <= bound * (np.eye(24) + np.outer(abs(a), abs(a)) / (a @ a)) / np.sqrt(a @ a / 24))
