"""The kernels read, add and round every number of 16 bits, and round float64 once: bit by bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from agreement import OF_BOTH, OF_DTYPES, OF_HALF, by_kernels, check_call  # noqa: F401  (a fixture)

from rmsnorm import cpu
from rmsnorm.numpy_impl import fast
from rmsnorm.numpy_impl.double_double import DoubleDouble
from rmsnorm.specification.variants import Variant

if not cpu.is_available():
    pytest.skip("there are no kernels here", allow_module_level=True)
from rmsnorm.cpu import _native

pytestmark = pytest.mark.usefixtures("by_kernels")


def _plan(n: int, rows: int, **dtypes_of: str | None) -> Any:
    options: dict[str, Any] = {"x": "float32", "norm": None, "product": None, "scale": None, "bias": None, **dtypes_of}
    return _native.Plan(rows=rows, n=n, k=n, groups=1, step=rows, eps=1.0, offset=0.0, position="inside", **options)


def _store(name: str, wide: Any) -> Any:
    """Numbers of float64 in a format, by the kernels: the gradient of a gain is the sum of dy h / rho over the rows.

    Three rows with three parts of 24 bits add up to a number of float64 exactly. Half of its exponent is in h, as dy
    alone has too few.
    """
    exponent = np.where(np.isfinite(wide) & (wide != 0), np.frexp(wide)[1], 0)
    dy, left = np.zeros((3, wide.size), np.float32), np.ldexp(wide, -exponent)
    h = np.ldexp(np.ones(dy.shape, np.float32), exponent - exponent // 2)
    with np.errstate(invalid="ignore"):
        for part in dy:
            part[:] = left
            left = np.where(np.isfinite(wide), left - part, 0.0)
        dy = np.ldexp(dy, exponent // 2)
        assert np.array_equal((dy.astype(np.float64) * h).sum(0), wide, equal_nan=True)
    got = np.full(wide.size, np.nan, name)
    _plan(wide.size, 3, y="float32", scale=name).backward(
        threads=1, gomp_parallel=0, h=h, h_step=h.strides[0], scale=np.ones(wide.size, name), inverse_rms=np.ones(3),
        dy=dy, dh=None, dx=None, dscale=got, dbias=None,
    )  # fmt: skip
    return got


def _borders(name: str) -> Any:
    """Numbers of a format, the ties between neighbours, and the neighbours of both in float64."""
    if name == "float32":
        some = np.random.default_rng(1).integers(0, 0x7F7FFFFF, 2**17, np.uint32)
        powers = (np.arange(255, dtype=np.uint32) << 23)[:, None] + np.arange(-2, 3).astype(np.uint32)
        pattern = np.concatenate([some, powers.ravel()[2:], np.arange(2**10, dtype=np.uint32)])
    else:
        pattern = np.arange(0x7C00 if name == "float16" else 0x7F80, dtype=np.uint16)
    low, high = (bits.view(name).astype(np.float64) for bits in (pattern, pattern + 1))
    high[np.isinf(high)] = 2.0**16 if name == "float16" else 2.0**128  # where the next number would be
    middle = (low + high) / 2
    return np.concatenate([low, *(np.nextafter(number, to) for number in (low, middle) for to in (-1, np.inf)), middle])


@OF_DTYPES
def test_one_rounding_to_nearest_even(dtype: str) -> None:
    rng = np.random.default_rng(0)
    inside = rng.normal(size=2**19) * 2.0 ** rng.integers(-26 if dtype == "float16" else -152, 18, 2**19)
    with np.errstate(over="ignore"):
        anywhere = rng.normal(size=2**18) * 2.0 ** rng.integers(-190, 190, 2**18)
    special = [0.0, np.inf, np.nan, 1e-60, 65519.99999999999, 65520.0, 65536.0, 3.5e38, 1e60]
    wide = np.concatenate([anywhere, inside, _borders(dtype), special])
    wide = np.concatenate([wide, -wide])
    wide = wide[(wide == 0) | ~(np.abs(wide) < 2.0**-190)]  # what `_store` can make
    want = DoubleDouble(wide).round(dtype)
    got = _store(dtype, wide).astype(np.float64)
    assert np.array_equal(got, want.astype(np.float64), equal_nan=True)
    has_sign = ~np.isnan(wide)
    assert np.array_equal(np.signbit(got[has_sign]), (np.signbit(wide) & (wide != 0))[has_sign])


@pytest.mark.parametrize("pair", [("float64", "float32"), ("float32", "float64"), ("float16", "bfloat16")], ids=str)
def test_formats_without_kernels_are_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="may not be"):
        _plan(8, 1, x=pair[0], y=pair[1])


@OF_HALF
def test_the_sum_of_every_number_and_a_residual(dtype: str) -> None:
    """Also of infinities, subnormal numbers and NaN, and of pairs whose sum is in the middle between two numbers.

    The sum with 0 is the number.
    """
    one, infinity = (0x3C00, 0x7C00) if dtype == "float16" else (0x3F80, 0x7F80)
    sizes = [0, 1, 2, one, one + 1, infinity - 1, infinity, infinity + 1]
    others = np.array([*sizes, 0x8000, one | 0x8000, *np.random.default_rng(0).integers(0, 2**16, 20)], np.uint16)
    x = np.broadcast_to(np.arange(2**16, dtype=np.uint16).view(dtype), (len(others), 2**16)).copy()
    residual = np.repeat(others.view(dtype)[:, None], 2**16, 1)
    with np.errstate(all="ignore"):
        h = fast.rms_norm(x, residual=residual)[1]
        want = (x.astype(np.longdouble) + residual.astype(np.longdouble)).astype(np.float32)
        near = want.astype(dtype)  # float32 has more than twice the digits, so it decides no tie
    assert ((h.view(np.uint16) == near.view(np.uint16)) | (np.isnan(want) & np.isnan(h.astype(np.float32)))).all()


@OF_HALF
@OF_BOTH
def test_every_number_of_16_bits(variant: str, dtype: str) -> None:
    """In rows of one size and of every size, with gains after which y is subnormal or infinite, too."""
    infinity, width = (0x7C00, 1024) if dtype == "float16" else (0x7F80, 1020)
    words = np.arange(2**16, dtype=np.uint16)
    numbers = np.sort(words[words & 0x7FFF < infinity].view(dtype).astype(np.float32)).astype(dtype)
    x = np.concatenate([numbers.reshape(-1, width), numbers.reshape(width, -1).T])
    rng = np.random.default_rng(0)
    for gain in (dtype, "float32"):
        scale = (rng.normal(size=width) * 2.0 ** rng.integers(-16, 16, width)).clip(-6e4, 6e4).astype(gain)
        dy = rng.normal(size=x.shape) * 2.0 ** rng.integers(-20, 4, (len(x), 1))
        y = check_call(x, scale, dy=dy, variant=variant, wanted=("dx",), doubtful=1)[0]
        wide = np.abs(y.astype(np.float32))
        assert y.dtype != np.float16 or np.isinf(y).any()
        assert y.dtype != dtype or ((wide != 0) & (wide < float(ml_dtypes.finfo(dtype).smallest_normal))).any()


@OF_HALF
@OF_BOTH
def test_where_float32_arithmetic_is_wrong(variant: str, dtype: str) -> None:
    """Some elements are so near a tie that float32 arithmetic misses it. These are computed in float64."""
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=(256, 2048)).astype(dtype) for _ in range(2))
    scale = rng.normal(1, 0.3, 2048).astype(dtype)
    y, _, dx = check_call(x, scale, dy=dy, variant=variant, wanted=("dx",))

    wide_x, wide_dy, gain = (array.astype(np.float32) for array in (x, dy, scale))
    square = np.mean(wide_x.astype(np.float64) ** 2, 1, keepdims=True)
    inverse_rms = (1 / np.sqrt(square + Variant.get(variant).eps_for(dtype))).astype(np.float32)
    norm = wide_x * inverse_rms
    rounded = norm if variant == "standard" else norm.astype(dtype).astype(np.float32)
    share = np.mean(wide_dy.astype(np.float64) * gain * norm, 1, keepdims=True).astype(np.float32)
    for alone, right in ((rounded * gain, y), (inverse_rms * (wide_dy * gain - norm * share), dx)):
        assert 0 < (alone.astype(dtype) != right).sum() < 1e-3 * right.size
