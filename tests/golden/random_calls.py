"""Random calls for properties: of any variant, layout, dtype, shape and size of the numbers, by hypothesis."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
from golden.oracle import FORMATS
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from rmsnorm import Variant
from rmsnorm.parity.cases import Case, Data
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve

PROFILE = settings(
    derandomize=True, deadline=None, max_examples=40, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
COMPILED = ((6,), (2, 5), (2, 3, 4), (0, 3), (3, 1))  # XLA compiles for every shape, so JAX gets few of them
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
    narrow = framework != "numpy" and dtype in ("bfloat16", "float32")
    if narrow:  # x, 1 / rho and the terms of a gradient must not be subnormal, nor squares beyond the recipe's range
        least, largest = minimum, -minimum - 40
    if dtype == "float64":
        least, largest = -320, 320  # a product of three ratios, and its rounding error, must be normal numbers
    if variant.eps_position == "outside" and variant.eps != 0 and framework != "numpy":
        # The frameworks store 1 / rho and compute sqrt(q) as rho - eps, which float64 knows to 2^-53 eps only.
        spare = 53 - FORMATS[dtype][0]
        least = max(least, math.frexp(variant.eps_for(dtype))[1] - spare)
    x = draw(arrays(shape, dtype, least=least, most=largest, mixed=not narrow))
    residual = draw(arrays(shape, dtype, least=-4, most=4)) if draw(st.integers(0, 3)) == 0 else None
    mask = None
    if draw(st.integers(0, 2)) == 0:
        mask = np.random.default_rng(draw(st.integers(0, 99))).random(shape) < draw(st.sampled_from([0.0, 0.3, 0.8]))
        x = np.where(mask, x, np.array(draw(st.sampled_from([0.0, 1.0, math.nan]))).astype(x.dtype))

    layout = {"variant": variant, "axis": axis, "feature_axis": feature_axis}
    sizes = tuple(shape[entry] for entry in resolve("draw", Spec(shape, dtype), **layout).feature_axes)
    ordinary = {"least": -3, "most": 3}
    scale = draw(arrays(sizes, width, **ordinary)) if draw(st.integers(0, 3)) else None
    bias = draw(arrays(sizes, width, **ordinary)) if variant.bias else None
    parameter = None if scale is None and bias is None else Spec(sizes, width)
    call = resolve(
        "draw", Spec(shape, dtype), parameter, residual=None if residual is None else Spec(shape, dtype),
        out_dtype=out_dtype, **layout,
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
