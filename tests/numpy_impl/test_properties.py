"""Properties of random calls: for any variant, shape, dtype and values, every framework agrees with the golden."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from mpmath import mp
from oracle import FORMATS, check

from rmsnorm import Variant, cpu
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.numpy_impl import rms_norm
from rmsnorm.parity.cases import Case, Data
from rmsnorm.parity.judge import golden, judge
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # from forward_ad
PROFILE = settings(
    derandomize=True, deadline=None, max_examples=40, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
# XLA compiles for every shape and every call. So JAX gets few shapes and examples, and a failure is not shrunk.
COMPILED = ((6,), (2, 5), (2, 3, 4), (0, 3), (3, 1))
EXAMPLES = {"numpy": 40, "torch": 20, "tf": 20, "flax": 8}
PHASES = {"flax": [Phase.generate]}
# TensorFlow's kernels flush subnormal inputs and outputs to zero (tsl::port::ScopedFlushDenormal). This includes the
# float32 and float64 numbers to which 16-bit numbers are converted; subnormal float16 numbers are normal there. XLA
# does the same on the CPU. The CPU kernels of rmsnorm, which eager TensorFlow and JAX use for rows, do not.
FLUSHED = {"tf": ("bfloat16", "float32", "float64"), "flax": ("bfloat16", "float32", "float64")}

VARIANTS = st.builds(
    Variant,
    name=st.just("drawn"),
    eps=st.sampled_from([None, 0.0, 1e-12, 1e-6, 1e-5, 0.1, 3.0]),
    eps_position=st.sampled_from(["inside", "outside", "clamp"]),
    rounding=st.sampled_from(["before_scale", "after_scale", "input_dtype"]),
    scale_offset=st.sampled_from([0.0, 0.0, 1.0, -0.75]),
    bias=st.booleans(),
    partial=st.none() | st.sampled_from([0.07, 0.29, 0.5, Fraction(1, 3), 1.0]),
    partial_rounding=st.sampled_from(["ceil", "floor"]),
    result_dtype=st.sampled_from(["x", "scale", "promote", "promote_first", "half_scale"]),
)


@st.composite
def arrays(draw: Any, shape: tuple[int, ...], dtype: str, *, least: int, most: int, mixed: bool = True) -> Any:
    """Random digits times powers of two from 2^least to 2^most, some zeros; magnitudes of rows similar or not."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    center = draw(st.integers(max(least, -12), min(most, 3)) | st.integers(least, most))
    spread = draw(st.sampled_from([0, 3, most - least if mixed else 1]))
    rows = random.integers(max(least, center - spread), min(most, center + spread) + 1, [*shape[:-1], 1])
    values = np.ldexp(random.uniform(1.0, 2.0, shape), rows) * random.choice([-1.0, 1.0, 1.0, 1.0], shape)
    if draw(st.integers(0, 5)) == 0:
        values *= random.random(shape) < 0.7
    with np.errstate(over="ignore"):
        values = values.astype(dtype)
    if draw(st.booleans()) and shape:  # a view with gaps
        wide = np.zeros([2 * size + 1 for size in shape], values.dtype)
        view = wide[tuple(slice(1, None, 2) for _ in shape)]
        view[...] = values
        values = view
        assert not values.size or values.shape == shape
    return values


@st.composite
def calls(draw: Any, framework: str) -> Data:
    """The arguments of one call, and the gradient and tangents for its derivatives."""
    dtype = draw(st.sampled_from(dtypes.FLOATS))
    if framework == "flax":
        shape = draw(st.sampled_from(COMPILED))
    else:
        shape = tuple(draw(st.lists(st.integers(0, 5) | st.sampled_from([1, 7, 33]), min_size=1, max_size=4)))
    rank = len(shape)
    axes = draw(st.lists(st.integers(-rank, rank - 1), min_size=1, max_size=rank, unique_by=lambda axis: axis % rank))
    axis = draw(st.sampled_from([tuple(axes), axes[0]]))
    feature_axis = draw(st.none() | st.integers(-rank, rank - 1))
    variant = draw(VARIANTS)
    width = draw(st.sampled_from([dtype, *dtypes.FLOATS]))
    out_dtype = draw(st.sampled_from([None, None, None, *dtypes.FLOATS]))
    if framework == "flax" and out_dtype == "float64" and "float64" not in (dtype, width):
        out_dtype = None  # JAX needs x64 for it

    digits, minimum, last = FORMATS[dtype]
    least, largest = minimum - digits + 1, math.frexp(last)[1] - 2
    flushed = dtype in FLUSHED.get(framework, ())
    if flushed:  # x, 1 / rho and the terms of a gradient must not be subnormal
        least, largest = minimum, -minimum - 40
    if dtype == "float64":
        least, largest = -320, 320  # a product of three ratios, and its rounding error, must be normal numbers
    if variant.eps_position == "outside" and variant.eps != 0 and framework != "numpy":
        # The frameworks store 1 / rho and compute sqrt(q) as rho - eps, which float64 knows to 2^-53 eps only.
        spare = 53 - FORMATS[dtype][0]
        least = max(least, math.frexp(variant.eps_for(dtype))[1] - spare)
    x = draw(arrays(shape, dtype, least=least, most=largest, mixed=not flushed))
    residual = draw(arrays(shape, dtype, least=-4, most=4)) if draw(st.integers(0, 3)) == 0 else None
    mask = None
    if draw(st.integers(0, 2)) == 0:
        mask = np.random.default_rng(draw(st.integers(0, 99))).random(shape) < draw(st.sampled_from([0.0, 0.3, 0.8]))
        x = np.where(mask, x, np.array(draw(st.sampled_from([0.0, 1.0, math.nan]))).astype(x.dtype))

    call = resolve(
        "draw", Spec(shape, dtype), variant=variant, axis=axis, feature_axis=feature_axis,
    )  # fmt: skip
    sizes = tuple(shape[entry] for entry in call.feature_axes)
    ordinary = {"least": -3, "most": 3}
    scale = draw(arrays(sizes, width, **ordinary)) if draw(st.integers(0, 3)) else None
    bias = draw(arrays(sizes, width, **ordinary)) if variant.bias else None
    parameter = None if scale is None and bias is None else Spec(sizes, width)
    call = resolve(
        "draw", Spec(shape, dtype), parameter, variant=variant, axis=axis, feature_axis=feature_axis,
        residual=None if residual is None else Spec(shape, dtype), out_dtype=out_dtype,
    )  # fmt: skip
    random = np.random.default_rng(draw(st.integers(0, 99)))
    # a tangent along x, so that the derivative has the size of y
    tangent = (np.where(np.isfinite(x.astype(np.float64)), x.astype(np.float64), 0.0) / 2).astype(x.dtype)
    return Data(
        case=Case("drawn", shape, (), "drawn"),
        variant=variant, call=call, x=x, scale=scale, bias=bias,
        dy=draw(arrays(shape, call.result_dtype, **ordinary)),
        dh=None if residual is None else draw(arrays(shape, dtype, **ordinary)),
        tangents=(tangent, *(None if p is None else random.normal(size=sizes).astype(p.dtype) for p in (scale, bias))),
        mask=mask, residual=residual, gate=None, axis=axis, feature_axis=feature_axis, out_dtype=out_dtype,
    )  # fmt: skip


def _subnormal(result: Any, flushed: tuple[str, ...]) -> bool:
    _, minimum, _ = FORMATS[result.dtype.name]
    wide = np.abs(result.astype(np.float64))
    return result.dtype.name in flushed and bool(np.any((wide > 0) & (wide < 2.0**minimum)))


@pytest.mark.slow
def test_a_framework_agrees_with_the_golden(framework):
    @settings(PROFILE, max_examples=EXAMPLES[framework.name], phases=PHASES.get(framework.name, PROFILE.phases))
    @given(data=calls(framework.name))
    def agree(data: Data) -> None:
        if framework.name in FLUSHED:  # a flushed result is no disagreement
            assume(not any(_subnormal(result, FLUSHED[framework.name]) for result in golden(data).values()))
        failed = [verdict for verdict in judge(framework.direct, data) if not verdict.passed]
        assert not failed, failed[0]

    agree()


def test_without_eps_a_power_of_two_changes_nothing_in_any_framework(framework):
    random = np.random.default_rng(0)
    for dtype in dtypes.FLOATS:
        x, v = (random.normal(size=(3, 7)).astype(dtype) for _ in range(2))
        g = random.normal(size=7).astype(dtype)
        want = [framework.rms_norm(x, g, variant="paper"), *framework.rms_norm_vjp(v, x, g, variant="paper")[:2]]
        for power in (-5, 1, 4):
            factor = x.dtype.type(2.0**power)
            y, (dx, dscale, _) = (
                framework.rms_norm(factor * x, g, variant="paper"),
                framework.rms_norm_vjp(v, factor * x, g, variant="paper"),
            )
            for got, expected in zip((y, (dx * factor).astype(dtype), dscale), want, strict=True):
                assert dtype == "float16" or got.tobytes() == expected.tobytes()
                assert np.allclose(got.astype(np.float64), expected.astype(np.float64), rtol=0, atol=2.0**-10)


def test_subnormal_numbers_are_numbers_where_they_are_kept(framework):
    """If a framework stops to flush them, this test fails. In many rows, as XLA's own threads would flush them."""
    for dtype in dtypes.FLOATS:
        digits, minimum, _ = FORMATS[dtype]
        least = 2.0 ** (minimum - digits + 1)
        x = (np.array([[3.0, 4.0, 100.0, 7.0]] * 2**15) * least).astype(dtype)
        g = (np.array([100.0, 50.0, 30.0, 77.0]) * least).astype(dtype)
        whole = np.array([[1.0, 2.0, 3.0, 4.0]] * 2**15).astype(dtype)
        flushed = dtype in FLUSHED.get(framework.name, ()) and (dtype == "float64" or not cpu.is_available())
        for arguments in ((x,), (whole, g)):  # subnormal x, subnormal gains
            got, want = (f(*arguments, variant="paper") for f in (framework.rms_norm, rms_norm))
            units = 4 if dtype == "float64" and framework.name != "numpy" else 0
            assert (ulps(got, want).max() <= units) == (not flushed), dtype


@PROFILE
@given(data=calls("numpy"))
def test_the_golden_is_the_nearest_number(data):
    """In 2500 bits, which show even the square of 2^-640 beside 1. If terms cancel, to 2^-98 of the terms."""
    assume(data.x.size)
    if data.call.eps == 0:  # test_golden.py tests NaN from 0 / 0
        assume(data.residual is None and (data.x != 0).all())
    with mp.workprec(2500):
        check(data, slack=2.0**-98)


@pytest.mark.parametrize("framework", ["numpy"], indirect=True)
@pytest.mark.slow
def test_the_random_calls_can_tell(framework):
    """The property fails for a golden with another eps.

    Of 480 calls, drawn with twelve seeds, 33 % showed it: 200 show at least 25 % with 2.4 standard deviations to
    spare. The seed makes the calls independent of the names in this test, which hypothesis would derive them from.
    """
    agreements = []

    @settings(PROFILE, max_examples=200)
    @seed(0)
    @given(data=calls("numpy"))
    def disagree(data: Data) -> None:
        other = dataclasses.replace(data, variant=data.variant.replace(eps=data.call.eps * 1.25 + 1e-3))
        agreements.append(all(verdict.passed for verdict in judge(lambda _: framework.direct(other), data)))

    disagree()
    assert len(agreements) == 200
    assert agreements.count(False) > 200 / 4
