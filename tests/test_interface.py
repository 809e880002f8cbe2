"""Every argument of the functions, in every framework, against the golden: on the cases of the kit and in each form."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from kit import BY_NAME, hold

from rmsnorm import PRESETS, Variant, cpu
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.numpy_impl import rms_norm, rms_norm_jvp, rms_norm_vjp
from rmsnorm.parity.cases import make, select
from rmsnorm.parity.judge import golden, judge
from rmsnorm.specification import dtypes
from rmsnorm.specification.interface import dy_and_dh

needs_kernels = pytest.mark.skipif(not cpu.is_available(), reason="there are no kernels")


@pytest.mark.parametrize(
    ("framework", "dtype"),
    [  # float16 goes through the code of bfloat16; TensorFlow and JAX compile it again
        *(("torch", dtype) for dtype in dtypes.FLOATS),
        *((framework, dtype) for framework in ("tf", "flax") for dtype in ("bfloat16", "float32", "float64")),
    ],
    indirect=["framework"],
)
def test_automatic_differentiation_and_formulas_agree_with_the_golden_on_every_case(framework, dtype):
    """16 bits: at least 99.9 % of y bit-identical in every variant, never more than 1 ulp; 32 bits: 2 ulp; float64: the
    bounds of the kit.
    """
    hold(framework.name, framework.implementation, select(types=(dtype,), brief=True))


@pytest.mark.parametrize("framework", ["torch", "tf", "flax"], indirect=True)
def test_the_sum_with_a_residual_is_normalised_before_it_is_rounded(framework):
    """And the sum that is returned is rounded once."""
    case = BY_NAME["residual, exact sum"]
    for implementation in (framework.implementation, framework.direct):
        hold(framework.name, implementation, [(case, "llama", dtype) for dtype in ("bfloat16", "float32", "float64")])
    data = make(case, "llama", "bfloat16")
    x, scale, variant, residual = data.x, data.scale, data.variant, data.residual
    got, want, rounded = (
        function(x, scale, variant=chosen, residual=residual)
        for function, chosen in ((framework.rms_norm, variant), (rms_norm, variant), (framework.rms_norm, "llama"))
    )
    assert [part.tobytes() for part in got] == [part.tobytes() for part in want]
    assert got[1].tobytes() == rounded[1].tobytes()
    assert np.mean(got[0] != rounded[0]) > 0.1
    alone, usual = (framework.rms_norm(x, scale, variant=chosen) for chosen in (variant, "llama"))
    assert alone.tobytes() == usual.tobytes()


@pytest.mark.parametrize("dtype", dtypes.FLOATS)
def test_every_argument_means_what_it_means_in_the_golden(framework, dtype):
    """Each option is its own argument: name of the variant, eps, partial, axes, mask, residual, out_dtype."""
    combinations = select(types=(dtype,), brief=True)
    if framework.name == "flax":  # it compiles: the variants are those of the test above
        combinations = [run for run in combinations if run[1] == run[0].variants[0]]
    hold(framework.name, framework.direct, combinations)


def test_every_variant_with_a_rounding_point_was_counted():
    """Otherwise the shares above could be shares of nothing."""
    for dtype in dtypes.HALF:
        counted = {variant for _, variant, _ in select(types=(dtype,), brief=True)}
        assert counted == set(PRESETS)
        for variant in PRESETS:
            assert sum(make(*run).x.size for run in select((variant,), (dtype,), brief=True)) >= 4000


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("magnitude", [1e20, 1e-30])
def test_squares_that_leave_float32_do_no_harm(framework, magnitude, dtype):
    """x = 1e20 gives 0 and 1e-30 with a small eps infinity where the statistic is kept in float32."""
    variant = Variant.get("paper") if magnitude < 1 else Variant.get("standard")
    x = np.full((2, 6), magnitude).astype(dtype)
    x[1, ::2] *= -2
    g = np.linspace(0.5, 2.0, 6).astype(dtype)
    y = framework.rms_norm(x, g, variant=variant)
    assert y.tobytes() == rms_norm(x, g, variant=variant).tobytes()
    assert np.array_equal(y[0], g)
    exact = np.array([-2, 1] * 3) / np.sqrt(2.5) * g.astype(np.float64)
    assert np.all(np.abs(y[1].astype(np.float64) - exact) <= dtypes.epsilon(dtype) * np.abs(exact))
    dx, dscale, _ = framework.rms_norm_vjp(g * np.ones_like(x), x, g, variant=variant)
    want_dx, want_dscale, _ = rms_norm_vjp(g * np.ones_like(x), x, g, variant=variant)
    assert np.isfinite(dx.astype(np.float64)).all()
    assert ulps(dx, want_dx).max() <= 1
    assert ulps(dscale, want_dscale).max() <= 1


def _drawn(dtype="float32", parameters=None, seed=0):
    random = np.random.default_rng(seed)
    x, r, v, w, t = (random.normal(size=(3, 4, 5)).astype(dtype) for _ in range(5))
    g, b, dg, db = (random.normal(size=5).astype(parameters or dtype) for _ in range(4))
    return x, r, v, w, t, g, b, dg, db


def _same(got, want):
    """16 bits within one ulp, the others within eight units of the terms, which are near 1."""
    got, want = (result if isinstance(result, tuple) else (result,) for result in (got, want))
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            if other.dtype in (np.float32, np.float64):
                units = 8 * dtypes.unit_roundoff(other.dtype.name)
                np.testing.assert_allclose(one, other, rtol=units, atol=units)
            else:
                assert ulps(one, other).max(initial=0) <= 1


def test_what_is_returned(framework):
    """y; (y, x + residual); and 1 / rho last."""
    x, r, *_ = _drawn()
    assert not isinstance(framework.rms_norm(x), tuple)
    for options in ({}, {"residual": r}, {"return_inverse_rms": True}, {"residual": r, "return_inverse_rms": True}):
        _same(framework.rms_norm(x, **options), rms_norm(x, **options))
    _y, h, inverse_rms = framework.rms_norm(x, residual=r, return_inverse_rms=True)
    assert h.tobytes() == (x + r).tobytes()
    assert inverse_rms.shape == (3, 4, 1)
    assert framework.rms_norm(x, axis=(0, 1), return_inverse_rms=True)[1].shape == (1, 1, 5)


@needs_kernels
@pytest.mark.parametrize("dtype", [*dtypes.HALF, "float32"])
def test_gradients_in_the_bits_of_the_golden(framework, dtype):
    """By the CPU kernels."""
    random = np.random.default_rng(0)
    x, r, v, w = (random.normal(size=(6, 5, 40)).astype(dtype) for _ in range(4))
    g, b = (random.normal(size=40).astype(dtype) for _ in range(2))
    for variant in ("standard", "llama", "gemma", "zhang_torch"):
        for options in ({}, {"partial": 0.3}, {"residual": r}, {"residual": r, "partial": 0.3}):
            for dy in (v, (v, w), (v, None)) if "residual" in options else (v,):
                got, want = (f(dy, x, g, b, variant=variant, **options) for f in (framework.rms_norm_vjp, rms_norm_vjp))
                assert [gradient.dtype for gradient in got] == [gradient.dtype for gradient in want]
                for one, other in zip(got, want, strict=True):
                    assert ulps(one, other).max() == 0


@needs_kernels
@pytest.mark.parametrize("framework", ["torch", "tf", "flax"], indirect=True)
@pytest.mark.parametrize(
    ("variant", "shape"),
    [
        ("standard", (3, 7)),
        ("llama", (5, 41, 33)),
        ("gemma", (5, 41, 33)),
        *((variant, (131, 1025)) for variant in ("standard", "llama", "gemma", "zhang_torch")),  # which is shared out
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [*dtypes.HALF, "float32"])
def test_automatic_differentiation_rounds_once(framework, dtype, variant, shape):
    """Twice would be another number than the golden's in one element of 10^4 or more."""
    data = make(dataclasses.replace(BY_NAME["bias"], shape=shape), variant, dtype)
    want, results = golden(data), framework.implementation(data).results
    for name in ("y", "dx", "dscale", "dbias"):
        assert len(results[name]) == (1 if name == "y" else 2)
        for got in results[name]:
            assert ulps(got, want[name]).max() == 0


def test_tangents_may_be_left_out():
    x, r, _, _, t, g, b, dg, db = _drawn()
    for primals, tangents in (
        ((x,), (t,)), ((x, g), (t,)), ((x, g), (t, dg)), ((x, g, b), (None, dg, None)), ((x, g, b), (None, None, db)),
        ((x, None, b), (t, None, db)), ((x, g, b), (t, dg, db)), ((x, g, b), (None,)),
    ):  # fmt: skip
        pairs = [*itertools.zip_longest(primals, tangents)]
        whole = [None if p is None else np.zeros_like(p) if tangent is None else tangent for p, tangent in pairs]
        for options in ({}, {"residual": r}, {"out_dtype": "bfloat16"}):
            _same(rms_norm_jvp(primals, tangents, **options), rms_norm_jvp(primals, whole, **options))


def test_out_dtype_may_be_the_frameworks_own(framework):
    x, *_ = _drawn()
    own = {
        "numpy": lambda: (ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)),
        "torch": lambda: (pytest.importorskip("torch").bfloat16,),
        "tf": lambda: (pytest.importorskip("tensorflow").bfloat16,),
        "flax": lambda: (pytest.importorskip("jax").numpy.bfloat16, np.dtype(ml_dtypes.bfloat16)),
    }[framework.name]()
    want = rms_norm(x, out_dtype="bfloat16")
    for out_dtype in ("bfloat16", *own):
        assert framework.rms_norm(x, out_dtype=out_dtype).tobytes() == want.tobytes()
    integer = importlib.import_module(
        {"tf": "tensorflow", "flax": "jax.numpy"}.get(framework.name, framework.name)
    ).int32
    with pytest.raises(ValueError, match="out_dtype is 'int32', expected 'float16'"):
        framework.rms_norm(x, out_dtype=integer)


def test_forms_of_the_options(framework):
    """Lists and tuples, positive and negative axes, a Variant and its name, a fraction and its decimal."""
    x, _, v, _, _, g, b, *_ = _drawn()
    wide = np.concatenate([g] * 4)[:20].reshape(4, 5)
    tall = np.arange(1.0, 4.0, dtype=np.float32)
    for options, scale in (
        ({"axis": 2}, g), ({"axis": [-1]}, g), ({"axis": np.int64(-1)}, g), ({"axis": (1, 2)}, wide),
        ({"axis": (2, 1)}, wide), ({"axis": [-1, -2]}, wide), ({"axis": (1, 2), "feature_axis": 0}, tall),
        ({"axis": 0}, tall), ({"axis": -1, "feature_axis": (1, 2)}, wide), ({"axis": (0, 1, 2), "feature_axis": -1}, g),
        ({"variant": Variant.get("gemma")}, g), ({"variant": "gemma", "eps": 0}, g), ({"eps": np.float32(0.5)}, g),
        ({"partial": 0.5}, g), ({"partial": Fraction(1, 3)}, g), ({"partial": 1}, g), ({"partial": 1.0}, g),
        ({"variant": Variant(name="mine", eps=0.1, eps_position="outside", scale_offset=-2.5, partial=0.7)}, g),
    ):  # fmt: skip
        _same(framework.rms_norm(x, scale, **options), rms_norm(x, scale, **options))
        got, want = (f(v, x, scale, **options) for f in (framework.rms_norm_vjp, rms_norm_vjp))
        assert [e.shape for e in got[:2]] == [e.shape for e in want[:2]]
    same = [framework.rms_norm(x, g, b, partial=p).tobytes() for p in (0.2, Fraction(1, 5), Fraction("0.2"))]
    assert len(set(same)) == 1
    named, made = (
        framework.rms_norm(x, g, variant=variant, eps=0.5, partial=0.6)
        for variant in ("llama", Variant.get("llama").replace(eps=0.1, partial=0.2))
    )
    assert named.tobytes() == made.tobytes(), "eps and partial of the call replace those of a Variant, too"


@pytest.mark.parametrize("eps", [None, 0.0])
@pytest.mark.parametrize("variant", ["standard", "llama", "zhang_torch", "x_transformers"])
def test_what_is_under_a_mask_reaches_no_derivative(framework, variant, eps):
    """By the formulas and by automatic differentiation; a row counts nothing, and one zeros: for no eps 1 / 0."""
    chosen = Variant.get(variant) if eps is None else Variant.get(variant).replace(eps=eps)
    data = make(dataclasses.replace(BY_NAME["mask"], variants=()), chosen, "float32")
    data.x[5] = 0

    def results(implementation, value):
        x, dy, tangent = (np.where(data.mask, a, np.float32(value)) for a in (data.x, data.dy, data.tangents[0]))
        filled = dataclasses.replace(data, x=x, dy=dy, tangents=(tangent, *data.tangents[1:]))
        return implementation(filled).results

    for implementation in (framework.implementation, framework.direct):
        want = results(implementation, 0.0)
        for value in (1e30, np.nan, np.inf):
            for name, found in results(implementation, value).items():
                counted = data.mask if name == "y" else ...
                for got, expected in zip(found, want[name], strict=True):
                    assert np.array_equal(got[counted], expected[counted], equal_nan=True), name
                    assert np.isfinite(got[counted]).all() or eps == 0, name
        for name in ("dx", "jvp"):
            assert not any(found[~data.mask].any() for found in want[name])
        assert not any(found[2].any() for found in (*want["y"], *want["dx"]))


def test_a_verdict_can_fail(framework):
    """The judge sees an eps of 1e-5 instead of 1e-6, and a doubled gain."""
    data = make(BY_NAME["rows"], "standard", "float32")
    for wrong in ({"variant": Variant.get("standard").replace(eps=1e-5)}, {"scale": 2 * data.scale}):
        changed = dataclasses.replace(data, **wrong)
        case = dataclasses.replace(data.case, variants=())  # so that the variant is passed as it is
        outcome = framework.direct(dataclasses.replace(changed, case=case))
        assert not all(verdict.passed for verdict in judge(lambda _, outcome=outcome: outcome, data))


def test_dy_is_an_array_or_a_pair_with_dh() -> None:
    assert dy_and_dh(1, None) == dy_and_dh(1, 2) == (1, None)
    assert dy_and_dh((1, 3), 2) == (1, 3)
    with pytest.raises(TypeError, match=r"dy is .* expected an array or a pair"):
        rms_norm_vjp((np.ones(2),) * 3, np.ones(2), residual=np.ones(2))
