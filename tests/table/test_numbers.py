"""Zeros, infinities, the ends of the range, sums that cancel: in every framework what IEEE arithmetic gives."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from rmsnorm import PRESETS, cpu, numpy_impl
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.numpy_impl import fast
from rmsnorm.specification import dtypes

needs_kernels = pytest.mark.skipif(not cpu.is_available(), reason="there are no kernels")


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize(("variant", "dtype"), [("llama", "bfloat16"), ("gemma", "float32"), ("theano", "float64")])
def test_a_zero_has_the_sign_of_its_product(framework, variant, dtype, axis):
    x = np.array([[0.0, -0.0, 0.0, -0.0, 1.0, -1.0], [-0.0, -0.0, 3.0, -0.0, 0.0, 1.0]]).astype(dtype)
    scale = np.array([2.0, 2.0, -2.0, -2.0, 0.0, -0.0]).astype(dtype)
    bias = np.full(6, -0.0).astype(dtype)  # the sum of two negative zeros is one
    gain = scale.astype(np.float64) + (PRESETS[variant].scale_offset or -0.0)
    want = np.signbit(x.astype(np.float64) * gain)
    for parameters in ((scale,), (scale, bias)):
        rows = x if axis else np.ascontiguousarray(x.T)
        y = framework.rms_norm(rows, *parameters, variant=variant, axis=axis)
        y = (y if axis else y.T).astype(np.float64)
        assert np.array_equal(np.signbit(y), want)
        assert np.array_equal(y == 0, x.astype(np.float64) * gain == 0)


@needs_kernels
@pytest.mark.parametrize("partial", [None, 0.3])
@pytest.mark.parametrize("position", ["inside", "outside", "clamp"])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 1e30])
def test_special_numbers_in_kernels_and_golden(eps, position, partial):
    """What is not counted does not feel the projection: there dx is u / rho, whatever the row holds."""
    variant = PRESETS["standard"].replace(eps=eps, eps_position=position, partial=partial)
    numbers = (np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0, -2.0)
    rows = np.array(list(itertools.product(numbers, repeat=4)), np.float32)
    x, dy = rows[:, :2].copy(), rows[:, 2:].copy()
    for golden, ours in (
        (numpy_impl.rms_norm(x, variant=variant), fast.rms_norm(x, variant=variant)),
        (numpy_impl.rms_norm_vjp(dy, x, variant=variant)[0], fast.rms_norm_vjp(dy, x, variant=variant)[0]),
    ):
        assert np.array_equal(golden, ours, equal_nan=True)
        assert np.array_equal(np.signbit(golden)[~np.isnan(golden)], np.signbit(ours)[~np.isnan(golden)])


@pytest.mark.parametrize("axis", [-1, 0])
def test_what_is_not_counted_does_not_feel_an_infinite_sum(framework, axis):
    arrays = np.array([[[np.inf, 1.0, 2.0, 3.0]], [[1.0, 2.0, 3.0, 4.0]]], np.float32)
    dy, x = arrays if axis else arrays.swapaxes(1, 2).copy()
    dx = framework.rms_norm_vjp(dy, x, partial=0.5, axis=axis)[0]
    assert np.allclose(dx.ravel()[2:], dy.ravel()[2:] / np.sqrt(2.5 + 1e-6), rtol=1e-6)


def test_float64_beside_the_ends_of_the_range():
    root = Fraction(math.isqrt(2 * 10**80), 10**40)
    y = numpy_impl.rms_norm(np.array([1e30, 1e-300]), np.array([1.0, 1e100]))
    assert abs(y[0] - float(root)) <= 2 * np.spacing(y[0])
    assert abs(y[1] - float(root * Fraction(1e-300) * Fraction(1e100) / Fraction(1e30))) <= 4 * np.spacing(y[1])
    tiny = numpy_impl.rms_norm(np.array([1e-310, 1.0]), eps=0.0)[0]
    assert abs(tiny - float(Fraction(1e-310) * root)) <= np.spacing(tiny)  # a subnormal number


@pytest.mark.parametrize("axis", [-1, 0])
def test_float64_of_very_different_sizes_is_within_four_ulp(framework, axis):
    """While h / rho, its product with the gain, and h times 2^-640 are normal: so the recipe takes large rows."""
    random = np.random.default_rng(0)
    x = np.ldexp(random.normal(size=(16, 24)), random.integers(-400, 400, (16, 24)))
    scale = np.ldexp(random.normal(size=24), random.integers(-90, 90, 24))
    rows = x if axis else np.ascontiguousarray(x.T)
    y = framework.rms_norm(rows, scale, axis=axis)
    want = numpy_impl.rms_norm(x, scale)
    in_range = np.abs(x) > 2.0**-382
    assert in_range.mean() > 0.9
    assert (np.abs((y if axis else y.T) - want) <= 4 * np.spacing(np.abs(want)))[in_range].all()


@needs_kernels
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6])
@pytest.mark.parametrize("with_mask", [False, True])
def test_a_gradient_that_cancels_has_the_bits_of_the_golden(dtype, eps, with_mask):
    random = np.random.default_rng(0)
    one_hot, constant = np.zeros((4, 33)), np.repeat(random.normal(size=(4, 1)), 33, axis=1)
    one_hot[range(4), [0, 5, 20, 32]] = random.normal(size=4)
    ordinary = random.normal(size=(4, 33))
    for x, dy in (
        (random.normal(size=(8, 1)), random.normal(size=(8, 1))),
        (ordinary, ordinary), (one_hot, ordinary), (constant, constant), (np.abs(ordinary), 3 * np.abs(ordinary)),
    ):  # fmt: skip
        x, dy = x.astype(dtype), dy.astype(dtype)
        mask = random.random(x.shape) < 0.8 if with_mask else None
        golden, ours = (f(dy, x, eps=eps, mask=mask)[0] for f in (numpy_impl.rms_norm_vjp, fast.rms_norm_vjp))
        golden, ours = golden.astype(np.float64), ours.astype(np.float64)
        assert np.array_equal(golden, ours, equal_nan=True)
        assert np.array_equal(np.signbit(golden)[~np.isnan(golden)], np.signbit(ours)[~np.isnan(golden)])
        if eps == 0 and (x.shape[1] == 1 or x is dy):
            assert not golden.any()


def test_a_projection_on_x_is_0(framework):
    x, dy = np.array([[0.0, 2.0]], np.float32), np.array([[0.3, -0.7]], np.float32)
    dx = framework.rms_norm_vjp(dy, x, eps=0.0)[0]
    assert dx[0, 1] == 0.0
    assert dx[0, 0] == np.float32(np.float64(dy[0, 0]) / np.sqrt(2.0))


def _at_the_clamp(dtype):
    """Rows whose norm is 1, exactly or as nearly as the dtype has it, of more than 1 and of less."""
    random = np.random.default_rng(0)
    unit = random.normal(size=(8, 7))
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    exact = [[1, 0, 0, 0, 0, 0, 0], [0.5, -0.5, 0.5, 0.5, 0, 0, 0], [0] * 7]
    x = np.concatenate([exact, unit, 1.25 * unit[:2], 0.75 * unit[:2]]).astype(dtype)
    return random.normal(size=x.shape).astype(dtype), x, random.normal(size=7).astype(dtype)


@pytest.mark.parametrize("options", [{}, {"partial": 0.6}], ids=str)
@pytest.mark.parametrize("dtype", dtypes.FLOATS)
def test_a_row_whose_norm_is_the_clamp_has_the_slope_of_its_root(framework, dtype, options):
    """Also where rounding puts it beside the clamp: a row that was normalised before is one."""
    arrays = _at_the_clamp(dtype)
    options = {**options, "variant": "x_transformers", "eps": 1.0}
    got, want = (f.rms_norm_vjp(*arrays, **options)[0].astype(float) for f in (framework, numpy_impl))
    assert np.allclose(got, want, rtol=4 * dtypes.unit_roundoff(dtype), atol=8 * dtypes.unit_roundoff(dtype))


@pytest.mark.parametrize(("x_dtype", "y_dtype"), [("bfloat16", "float16"), ("float16", "bfloat16")])
def test_y_in_the_other_format_of_16_bits(framework, x_dtype, y_dtype):
    """No kernel computes it."""
    random = np.random.default_rng(4)
    x, dy = random.normal(size=(5, 24)).astype(x_dtype), random.normal(size=(5, 24)).astype(y_dtype)
    y, want = (f.rms_norm(x, out_dtype=y_dtype) for f in (framework, numpy_impl))
    assert y.dtype == want.dtype == y_dtype
    assert ulps(y, want).max() <= 1
    dx, want = (f.rms_norm_vjp(dy, x, out_dtype=y_dtype)[0] for f in (framework, numpy_impl))
    assert dx.dtype == want.dtype == x_dtype
    assert np.allclose(dx.astype(float), want.astype(float), rtol=0, atol=2.0**-7 * np.abs(want.astype(float)).max())
