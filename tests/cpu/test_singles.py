"""Rows of 16 bits in float32 arithmetic have the bits of the golden, and so have sums with a residual."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from rmsnorm import cpu
from rmsnorm import numpy_impl as golden
from rmsnorm.numpy_impl import fast
from rmsnorm.specification.variants import Variant

if not cpu.is_available():
    pytest.skip("there are no kernels here", allow_module_level=True)
from cpu.test_cpu import check_same


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_sum_of_every_number_and_a_residual(dtype: str) -> None:
    """Also of infinities, subnormal numbers and NaN, and of pairs whose sum is in the middle between two numbers."""
    kind = np.dtype(dtype if dtype == "float16" else ml_dtypes.bfloat16)
    words = np.arange(2**16, dtype=np.uint16)
    one, infinity = (0x3C00, 0x7C00) if dtype == "float16" else (0x3F80, 0x7F80)
    sizes = [0, 1, 2, one, one + 1, infinity - 1, infinity, infinity + 1]
    others = np.array([*sizes, 0x8000, one | 0x8000, *np.random.default_rng(0).integers(0, 2**16, 20)], np.uint16)
    x = np.broadcast_to(words.view(kind), (len(others), 2**16)).copy()
    residual = np.repeat(others.view(kind)[:, None], 2**16, 1)
    with np.errstate(all="ignore"):
        h = fast.rms_norm(x, residual=residual)[1]
        want = (x.astype(np.longdouble) + residual.astype(np.longdouble)).astype(np.float32)
        near = want.astype(kind)  # float32 has more than twice the digits, so it decides no tie
    numbers = h.view(np.uint16)
    assert ((numbers == near.view(np.uint16)) | (np.isnan(want) & np.isnan(h.astype(np.float32)))).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("variant", ["standard", "llama"])
def test_every_number_of_16_bits(variant: str, dtype: str) -> None:
    """In rows of one size and of every size, with gains after which y is subnormal or infinite, too."""
    kind, infinity, width = (np.float16, 0x7C00, 1024) if dtype == "float16" else (ml_dtypes.bfloat16, 0x7F80, 1020)
    wide, words = np.float32, np.arange(2**16, dtype=np.uint16)
    numbers = np.sort(words[words & 0x7FFF < infinity].view(kind).astype(wide)).astype(kind)
    x = np.concatenate([numbers.reshape(-1, width), numbers.reshape(width, -1).T])
    rng = np.random.default_rng(0)
    for gain in (kind, wide):
        scale = (rng.normal(size=width) * 2.0 ** rng.integers(-16, 16, width)).clip(-6e4, 6e4).astype(gain)
        y = golden.rms_norm(x, scale, variant=variant)
        if y.dtype == np.float16:
            assert np.isinf(y).any()
        if y.dtype == kind:
            assert ((y != 0) & (np.abs(y.astype(wide)) < np.finfo(kind if kind is np.float16 else wide).tiny)).any()
        check_same(fast.rms_norm(x, scale, variant=variant), y, int(y.dtype == wide))
        dy = (rng.normal(size=x.shape) * 2.0 ** rng.integers(-20, 4, (len(x), 1))).astype(y.dtype)
        dx = golden.rms_norm_vjp(dy, x, scale, variant=variant)[0]
        check_same(fast.rms_norm_vjp(dy, x, scale, variant=variant)[0], dx)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("variant", ["standard", "llama"])
def test_where_float32_arithmetic_is_wrong(variant: str, dtype: str) -> None:
    """Some elements are so near a tie that float32 arithmetic misses it. These are computed in float64."""
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=(256, 2048)).astype(dtype) for _ in range(2))
    scale = rng.normal(1, 0.3, 2048).astype(dtype)
    y = golden.rms_norm(x, scale, variant=variant)
    dx = golden.rms_norm_vjp(dy, x, scale, variant=variant)[0]

    wide_x, wide_dy, gain = (array.astype(np.float32) for array in (x, dy, scale))
    square = np.mean(wide_x.astype(np.float64) ** 2, 1, keepdims=True)
    inverse_rms = (1 / np.sqrt(square + Variant.get(variant).eps_for(dtype))).astype(np.float32)
    normalised = wide_x * inverse_rms
    if variant != "standard":
        normalised = normalised.astype(dtype).astype(np.float32)
    share = np.mean(wide_dy.astype(np.float64) * gain * wide_x * inverse_rms, 1, keepdims=True).astype(np.float32)
    alone = [
        (normalised * gain).astype(dtype),
        (inverse_rms * (wide_dy * gain - wide_x * inverse_rms * share)).astype(dtype),
    ]
    for got, want in zip(alone, (y, dx), strict=True):
        assert 0 < (got != want).sum() < 1e-3 * want.size

    check_same(fast.rms_norm(x, scale, variant=variant), y)
    check_same(fast.rms_norm_vjp(dy, x, scale, variant=variant)[0], dx)
