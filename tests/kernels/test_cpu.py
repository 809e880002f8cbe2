"""The compiled kernels have the bits of the golden, in rows of every kind, through numpy_impl.fast."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from agreement import (  # noqa: F401  (two of them are fixtures)
    OF_BOTH,
    OF_DTYPES,
    ROUNDED,
    by_kernels,
    check_call,
    check_same,
    with_golden,
)  # fmt: skip
from golden.cases import CASES

from rmsnorm import cpu
from rmsnorm.engines import prepare
from rmsnorm.numpy_impl import fast
from rmsnorm.parity import judge
from rmsnorm.parity.cases import make
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Variant

if not cpu.is_available():
    pytest.skip("there are no kernels here", allow_module_level=True)
from rmsnorm.cpu import launch

pytestmark = pytest.mark.usefixtures("by_kernels")
OWN_GOLDEN = pytest.mark.usefixtures("with_golden")


def test_parameters_that_are_shared_within_a_row_are_refused() -> None:
    """The kernels would read beyond the end of such a gain."""
    call = resolve("rms_norm", Spec((2, 3, 8), "float32"), variant=Variant.get("llama"), axis=(1, 2), feature_axis=2)
    assert launch.launch_of(call, None, None).n == 24
    with pytest.raises(ValueError, match="parameters of all 24 elements of a row"):
        launch.launch_of(call, "float32", None)


def _is_for_kernels(data: Any) -> bool:
    """Whether the kernels have all that the data of a case need, forward and backward."""
    arrays = (data.x, data.scale, data.bias, data.mask, data.residual, data.gate)
    prepared = prepare("test", (data.variant, None, None, data.axis, data.feature_axis, data.out_dtype), *arrays)
    names = {a.dtype.name for a in (data.dy, data.dh) if a is not None}
    return fast.why_not(prepared, arrays) is None and not names - set(ROUNDED)


@OF_DTYPES
def test_the_whole_table(dtype: str) -> None:
    with_kernels = 0
    for case, variant in ((one, v) for one in CASES if dtype in one.dtypes for v in one.variants):
        data = make(case, variant, dtype)
        if not _is_for_kernels(data):
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


LAYOUTS = [  # the normalised axes, and those of the parameters
    (3, 3), (3, (2, 3)), (3, (0, 1, 2, 3)), ((2, 3), (1, 2, 3)), ((1, 2, 3), (1, 2, 3)),
]  # fmt: skip


@OF_DTYPES
@pytest.mark.parametrize(("axis", "feature_axis"), LAYOUTS, ids=str)
def test_every_element_of_a_row_has_its_parameters(axis: Any, feature_axis: Any, dtype: str) -> None:
    """Every layout that kernels compute: a row may have several groups, each with a statistic of its own."""
    rng, shape = np.random.default_rng(0), (3, 6, 5, 9)
    x, z, dy = rng.normal(size=(3, *shape)).astype(dtype)
    scale, bias = rng.normal(size=(2, *(shape[i] for i in np.atleast_1d(feature_axis)))).astype(dtype)
    for variant, options in itertools.product(("lasagne", "llama"), ({}, {"partial": 0.5}, {"residual": z})):
        check_call(x, scale, bias, dy=dy, variant=variant, axis=axis, feature_axis=feature_axis, **options)


@OF_DTYPES
@pytest.mark.parametrize("variant", ["standard", "llama", "gemma", "t5"])
def test_many_elements(variant: str, dtype: str) -> None:
    """The same bits, except for one float32 in about 2^26 that lies next to a tie."""
    rng = np.random.default_rng(sum(map(ord, variant + dtype)))
    x = (rng.normal(size=(256, 2048)) * 2.0 ** rng.integers(-8, 8, (256, 1))).astype(dtype)
    for width in {dtype, "float32"}:
        scale = rng.normal(0.3, 1, 2048).astype(width)
        check_call(x, scale, variant=variant, doubtful=1)
        check_call(x[::2], scale, dy=rng.normal(size=(128, 2048)), forward=False, variant=variant, doubtful=1)


EXTREME = {  # sizes of a row: the ends of the range, subnormal numbers, and numbers whose squares are out of range
    "float16": (1.0, 6e4, 1e-4, 6e-6, 1.2e-7, 0.0),
    "bfloat16": (1.0, 1e38, 1e20, 1e-20, 1e-38, 2e-40, 0.0),
    "float32": (1.0, 1e38, 1e20, 1e-20, 1e-38, 2e-40, 0.0),
}


@OF_DTYPES
def test_rows_at_the_ends_of_the_range(dtype: str) -> None:
    rng = np.random.default_rng(0)
    magnitude = np.repeat(EXTREME[dtype], 2)[:, None]
    x = np.clip(rng.normal(size=(len(magnitude), 65)), -1, 1) * magnitude
    x[1::2, ::5] = 0
    scale, dy = rng.normal(0.3, 1, 65).astype(dtype), rng.normal(size=x.shape)
    variants = ("standard", "llama", "gemma", "paper", "zhang_torch", "x_transformers", "t5")
    for variant, eps in itertools.product(variants, (2e-6, 0.0)):  # the root of 1e-6 makes ties
        check_call(x.astype(dtype), scale, dy=dy, variant=variant, eps=eps)


@pytest.mark.parametrize("eps", [0.0, 1e-5, 1e-290])
@OF_DTYPES
@OF_BOTH
def test_what_is_not_finite_and_does_not_count(variant: str, dtype: str, eps: float) -> None:
    """The kernels divide with the help of a remainder, which an infinity does not have; rho is finite in these rows."""
    x = np.random.default_rng(0).normal(size=(6, 70)).astype(dtype)
    x[:3, 50] = np.inf, -np.inf, np.nan
    x[3:5, :40] = 0
    for width in {dtype, "float32"}:
        check_call(x, np.linspace(-2, 2, 70).astype(width), variant=variant, partial=0.5, eps=eps)


@OF_BOTH
def test_small_factors_beside_large_ones(variant: str) -> None:
    """bfloat16 rows in which a factor underflows float32, but the product does not."""
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 32, 1024))
    x[:, ::2] *= 2.0**-131
    gain = rng.normal(1, 0.3, 1024)
    for sizes in ((2.0**60, 2.0**16, 2.0**-60, 2.0**-126), (2.0**17, 2.0**30, 2.0**39)):
        for size, width in itertools.product(sizes, ("bfloat16", "float32")):
            check_call(x.astype("bfloat16"), (gain * size).astype(width), variant=variant)
        x[:, 1::4] *= 2.0**19  # x / rho is 0 in float32, but x / rho * gain is not
        x[:, ::2] *= 2.0**-2
    x = rng.normal(size=(32, 1024))
    for size, factor, up in ((2.0**-59, 2.0**-38, 2.0**-100), (2.0**59, 2.0**20, 2.0**30), (1.0, 2.0**-136, 2.0**116)):
        for width in ("bfloat16", "float32"):
            wanted = ("dx", "dscale")[: 1 + (width == "bfloat16")]
            check_call((x * size).astype("bfloat16"), (gain * factor).astype(width), dy=dy * up, forward=False,
                       wanted=wanted, variant=variant, eps=0.0)  # fmt: skip


@OF_DTYPES
@pytest.mark.parametrize("shape", [(1,), (7, 1), (2**16 + 3, 1), (2, 2**18 + 5), (3, 2, 1, 33)])
def test_rows_of_any_length(shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=shape).astype(dtype) for _ in range(2))
    check_call(x, rng.normal(size=shape[-1:]).astype(dtype), dy=dy, variant="gemma", eps=0.3, doubtful=1)


@OWN_GOLDEN
@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (0,), (3, 0, 8)])
def test_of_nothing_the_golden_is_asked(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.float32)
    check_call(x, np.ones(shape[-1:], np.float32), dy=x)


def test_tiny_parts_of_a_residual_of_another_dtype() -> None:
    """x and the residual are added in the wider dtype."""
    x, residual = np.random.default_rng(0).normal(size=(2, 4, 32))
    check_call(x.astype("bfloat16"), residual=residual.astype("float32"))


@OWN_GOLDEN
@pytest.mark.parametrize(("dtype", "other"), [("bfloat16", "float32"), ("float16", "float64"), ("float32", "float64")])
def test_a_gradient_of_another_dtype_beside_x_is_not_rounded_first(dtype: str, other: str) -> None:
    x, residual, dy, dh = np.random.default_rng(0).normal(size=(4, 6, 64))
    for second, third in itertools.product((dtype, other), (other, dtype)):
        options = {"residual": residual.astype(second), "dh": dh.astype(third)}
        check_call(x.astype(dtype), dy=dy, forward=False, **options)


def _rows_that_cancel(dtype: str, n: int) -> tuple[Any, Any]:
    """x, and a dy for which the gradient of x cancels: y, rounded; x; x times 3; and y with a few other elements."""
    rng = np.random.default_rng(n)
    x = np.repeat(rng.normal(size=(16, n)), 4, 0).astype(dtype)
    wide = x.astype("float64")
    dy = wide / np.sqrt((wide**2).mean(1, keepdims=True))
    dy[1::4], dy[2::4] = wide[1::4], 3 * wide[2::4]
    dy[3::4, :: max(n // 3, 1)] *= -1e-3
    return x, dy


@pytest.mark.parametrize("variant", ["standard", "gemma", "zhang_torch", "x_transformers"])
@OF_DTYPES
def test_a_gradient_that_cancels(dtype: str, variant: str) -> None:
    for n in (1, 5, 33, 768):
        x, dy = _rows_that_cancel(dtype, n)
        for scale in (np.ones(n), np.random.default_rng(0).normal(1, 0.2, n)):
            gain = (scale - (variant == "gemma")).astype(dtype)
            for eps in (0.0, 1e-6, 0.29):
                check_call(x, gain, dy=dy, forward=False, variant=variant, eps=eps)


@OF_DTYPES
def test_a_row_without_a_gradient_has_zeros(dtype: str) -> None:
    """+0, whatever the signs in dy, unless a number beside it is not finite: then the product with 0 is a NaN."""
    x = np.random.default_rng(0).normal(size=(6, 40)).astype(dtype)
    dy = np.zeros(x.shape, dtype)
    dy[1], dy[2, 3], dy[3] = -dy[1], 1, x[3]
    for scale in (np.ones(40, dtype), np.zeros(40, dtype)):
        dx = check_call(x, scale, dy=dy, forward=False)[0]
        assert not np.signbit(dx[[0, 1, 4, 5]].astype(float)).any()
    wrong = x.copy()
    wrong[0, 5], wrong[1, 6] = np.inf, np.nan
    check_call(wrong, scale, dy=dy, forward=False)
    scale[7] = np.inf
    assert np.isnan(check_call(x, scale, dy=dy, forward=False)[0][0].astype(float)).any()


def test_the_comparison_can_fail() -> None:
    one = np.ones(3, ml_dtypes.bfloat16)
    for other in (np.float32([1, 1, 1]), one[:2], np.nextafter(one, one + one), one * np.asarray(np.nan, one.dtype)):
        with pytest.raises(AssertionError):
            check_same(other, one)
