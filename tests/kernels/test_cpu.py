"""The compiled kernels have the bits of the golden, in rows of every kind, through numpy_impl.fast."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from golden.cases import CASES

from rmsnorm import cpu
from rmsnorm import numpy_impl as golden
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.engines import prepare
from rmsnorm.numpy_impl import fast
from rmsnorm.parity import judge
from rmsnorm.parity.cases import make
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Variant

if not cpu.is_available():
    pytest.skip("there are no kernels here", allow_module_level=True)
from rmsnorm.cpu import launch

ROUNDED = ("float16", "bfloat16", "float32")
OF_DTYPES = pytest.mark.parametrize("dtype", ROUNDED)
OF_HALF = pytest.mark.parametrize("dtype", dtypes.HALF)
OF_BOTH = pytest.mark.parametrize("variant", ["standard", "llama"])  # y rounded once, and before the gain, too


class _NumPyOfNaN:
    """NumPy whose new arrays are NaN, or negative integers: an element that a kernel does not write shows."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def empty(shape: Any, dtype: Any = float) -> Any:
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8).fill(0xFF)
        return array


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that uses the golden in place of a kernel fails."""
    monkeypatch.setattr(fast, "golden", None)
    monkeypatch.setattr(fast, "np", _NumPyOfNaN())


def check_same(got: Any, want: Any, doubtful: int = 0) -> None:
    """The same but for the sign of zeros, which sums lose, and so many numbers within 2^-52 of a tie of float32."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    apart = ulps(got, want)
    assert apart.max(initial=0) <= (1 if doubtful else 0)
    assert (apart != 0).sum() <= doubtful


def check_call(
    x: Any, scale: Any = None, bias: Any = None, *, dy: Any = None, dh: Any = None, forward: bool = True,
    doubtful: int = 0, wanted: tuple[str, ...] = ("dx", "dscale", "dbias", "dresidual"), **options: Any,
) -> list[Any]:  # fmt: skip
    """Every result of a call, forward and for an upstream dy backward, is the golden's; returns the kernels'."""
    got, want = [], []
    with np.errstate(all="ignore"):
        for results, own in ((got, fast), (want, golden)):
            if forward:
                results += own.rms_norm(x, scale, bias, return_inverse_rms=True, **options)
            if dy is not None:
                given = (options.get("variant", "standard"), None, None, -1, None, None)
                up = dy.astype(prepare("test", given, x, scale, bias).call.result_dtype)
                gradients = own.rms_norm_vjp(up if dh is None else (up, dh), x, scale, bias, **options)
                names = ("dx", "dscale", "dbias", "dresidual")
                results += [g for name, g in zip(names, gradients, strict=False) if name in wanted]
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        if w is not None:
            check_same(g, w, doubtful if w.dtype == np.float32 else 0)
    return got


def test_parameters_that_are_shared_within_a_row_are_refused() -> None:
    """The kernels would read beyond the end of such a gain."""
    call = resolve("rms_norm", Spec((2, 3, 8), "float32"), variant=Variant.get("llama"), axis=(1, 2), feature_axis=2)
    with pytest.raises(ValueError, match="parameters of all 24 elements of a row"):
        launch.launch_of(call, "float32", None)


@OF_DTYPES
def test_the_whole_table(dtype: str) -> None:
    with_kernels = 0
    for case, variant in ((one, v) for one in CASES if dtype in one.dtypes for v in one.variants):
        data = make(case, variant, dtype)
        arrays = (data.x, data.scale, data.bias, data.mask, data.residual, data.gate)
        prepared = prepare("test", (data.variant, None, None, data.axis, data.feature_axis, data.out_dtype), *arrays)
        if fast.why_not(prepared, arrays) is not None or "float64" in (data.dy.dtype, getattr(data.dh, "dtype", None)):
            continue
        with_kernels += 1
        want, options = judge.golden(data), {**data.options, **data.arrays}
        y, *_, inverse_rms = fast.rms_norm(data.x, data.scale, data.bias, return_inverse_rms=True, **options)
        dy = data.dy if data.dh is None else (data.dy, data.dh)
        gradients = judge.named_gradients(data, fast.rms_norm_vjp(dy, data.x, data.scale, data.bias, **options))
        for name, got in {"y": y, "inverse_rms": inverse_rms, **gradients}.items():
            if got is not None:
                check_same(got, want[name])
    assert with_kernels > 60


@OF_DTYPES
@pytest.mark.parametrize("variant", ["standard", "llama", "gemma", "t5"])
def test_many_elements(variant: str, dtype: str) -> None:
    """The same bits, except for one float32 in about 2^26 that lies next to a tie."""
    rng = np.random.default_rng(sum(map(ord, variant + dtype)))
    x = (rng.normal(size=(128, 2048)) * 2.0 ** rng.integers(-8, 8, (128, 1))).astype(dtype)
    for width in {dtype, "float32"}:
        scale = rng.normal(0.3, 1, 2048).astype(width)
        check_call(x, scale, variant=variant, doubtful=1)
        check_call(x[::2], scale, dy=rng.normal(size=(64, 2048)), forward=False, variant=variant, doubtful=1)


@OF_BOTH
def test_small_factors_beside_large_ones(variant: str) -> None:
    """bfloat16 rows in which a factor underflows float32, but the product does not."""
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 16, 1024))
    x[:, ::2] *= 2.0**-131
    gain = rng.normal(1, 0.3, 1024)
    for sizes in ((2.0**60, 2.0**16, 2.0**-60, 2.0**-126), (2.0**17, 2.0**30, 2.0**39)):
        for size, width in itertools.product(sizes, ("bfloat16", "float32")):
            check_call(x.astype("bfloat16"), (gain * size).astype(width), variant=variant)
        x[:, 1::4] *= 2.0**19  # x / rho is 0 in float32, but x / rho * gain is not
        x[:, ::2] *= 2.0**-2
    x = rng.normal(size=(16, 1024))
    for size, factor, up in ((2.0**-59, 2.0**-38, 2.0**-100), (2.0**59, 2.0**20, 2.0**30), (1.0, 2.0**-136, 2.0**116)):
        for width in ("bfloat16", "float32"):
            wanted = ("dx", "dscale")[: 1 + (width == "bfloat16")]
            check_call((x * size).astype("bfloat16"), (gain * factor).astype(width), dy=dy * up, forward=False,
                       wanted=wanted, variant=variant, eps=0.0)  # fmt: skip


@OF_DTYPES
@pytest.mark.parametrize("shape", [(1,), (7, 1), (2**16 + 3, 1), (2, 2**16 + 5), (3, 2, 1, 33)])
def test_rows_of_any_length(shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=shape).astype(dtype) for _ in range(2))
    check_call(x, rng.normal(size=shape[-1:]).astype(dtype), dy=dy, variant="gemma", eps=0.3, doubtful=1)


@pytest.mark.parametrize(("dtype", "other"), [("bfloat16", "float32"), ("float16", "float64"), ("float32", "float64")])
def test_what_is_added_has_a_dtype_of_its_own(dtype: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A residual, and a gradient beside x, which is not rounded before the sum. float64 is the golden's."""
    monkeypatch.setattr(fast, "golden", golden.functional)
    x, residual, dy, dh = np.random.default_rng(0).normal(size=(4, 6, 64))
    for second, third in itertools.product((dtype, other), (other, dtype)):
        check_call(x.astype(dtype), dy=dy, residual=residual.astype(second), dh=dh.astype(third))


@OF_DTYPES
def test_a_row_without_a_gradient_has_zeros(dtype: str) -> None:
    """+0, whatever the signs in dy, unless a number beside it is not finite: then the product with 0 is a NaN."""
    x, dy = np.random.default_rng(0).normal(size=(6, 40)).astype(dtype), np.zeros((6, 40), dtype)
    dy[1], dy[2, 3], dy[3] = -dy[1], 1, x[3]
    for scale in (np.ones(40, dtype), np.zeros(40, dtype)):
        dx = check_call(x, scale, dy=dy, forward=False)[0]
        assert not np.signbit(dx[[0, 1, 4, 5]].astype(float)).any()
    scale[7] = np.inf
    assert np.isnan(check_call(x, scale, dy=dy, forward=False)[0][0].astype(float)).any()


@OF_DTYPES
def test_one_rounding_to_nearest_even(dtype: str) -> None:
    """Of numbers, ties between neighbours, and what is beside these in float32: forward as bias, backward as dbias."""
    if dtype == "float32":
        random = np.random.default_rng(0)
        # products of 25 bits or fewer: half of them are ties of float32
        x, gain = random.integers(2**11, 2**13, (2, 64, 1024)).astype(np.float32)
        x[:, 0] = 1.0
        for row, factors in zip(x, gain, strict=True):
            check_call(row[None], factors, variant="paper", partial=1e-9)
        return
    bits = np.arange(0x7C00 if dtype == "float16" else 0x7F80, dtype=np.uint16)
    low, high = (pattern.view(dtype).astype(np.float32) for pattern in (bits, bits + 1))
    high[-1] = 2.0**16 if dtype == "float16" else np.inf
    tie = low + (high - low) / 2
    numbers = np.concatenate([low, tie, np.nextafter(tie, np.float32(0)), np.nextafter(tie, np.float32(np.inf))])
    numbers = np.concatenate([numbers, -numbers])
    ones = np.ones((1, numbers.size), np.float32)
    parameter = ones[0].astype(dtype)
    check_call(ones, parameter, parameter, dy=numbers[None], wanted=("dscale", "dbias"))
    check_call((ones - ones).astype(dtype), None, numbers)


@OF_HALF
def test_the_sum_of_every_number_and_a_residual(dtype: str) -> None:
    """Also of infinities, subnormal numbers and NaN, and of pairs whose sum is in the middle between two numbers."""
    one, infinity = (0x3C00, 0x7C00) if dtype == "float16" else (0x3F80, 0x7F80)
    sizes = [0, 1, 2, one, one + 1, infinity - 1, infinity, infinity + 1]
    others = np.array([*sizes, 0x8000, one | 0x8000, *np.random.default_rng(0).integers(0, 2**16, 20)], np.uint16)
    x = np.broadcast_to(np.arange(2**16, dtype=np.uint16).view(dtype), (len(others), 2**16)).copy()
    residual = np.repeat(others.view(dtype)[:, None], 2**16, 1)
    with np.errstate(all="ignore"):
        h = fast.rms_norm(x, residual=residual)[1]
        want = (x.astype(np.float64) + residual.astype(np.float64)).astype(np.float32)
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
