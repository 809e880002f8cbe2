"""The kernels: the four formats, and the bits of the golden through numpy_impl.fast."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rmsnorm import cpu
from rmsnorm import numpy_impl as golden
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.cpu.prepared import why_not
from rmsnorm.numpy_impl import fast, kernels
from rmsnorm.numpy_impl.double_double import DoubleDouble
from rmsnorm.parity import judge
from rmsnorm.parity.cases import make, select
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Variant

if not cpu.is_available():
    pytest.skip("there are no kernels here", allow_module_level=True)
from rmsnorm.cpu import _native, launch

ROUNDED = ("float16", "bfloat16", "float32")
EXTREME = {  # sizes of a row: the ends of the range, subnormal numbers, and numbers whose squares are out of range
    "float16": (1.0, 6e4, 1e-4, 6e-6, 1.2e-7, 0.0),
    "bfloat16": (1.0, 1e38, 1e20, 1e-20, 1e-38, 2e-40, 0.0),
    "float32": (1.0, 1e38, 1e20, 1e-20, 1e-38, 2e-40, 0.0),
}


def _plan(n: int, rows: int = 1, **dtypes_of: str | None) -> Any:
    options: dict[str, Any] = {"x": "float32", "norm": None, "product": None, "scale": None, "bias": None, **dtypes_of}
    return _native.Plan(rows=rows, n=n, k=n, groups=1, step=rows, eps=1.0, offset=0.0, position="inside", **options)


def _load(stored: Any) -> Any:
    """The numbers as float32, by the kernels: the gradient of a bias is dy if there is one row."""
    x, wide = np.zeros(stored.size, np.float32), np.full(stored.size, np.nan, np.float32)
    _plan(x.size, y=stored.dtype.name, bias="float32").backward(
        threads=1, gomp_parallel=0, h=x, h_step=x.nbytes, scale=None, inverse_rms=None, dy=stored, dh=None, dx=None,
        dscale=None, dbias=wide,
    )  # fmt: skip
    return wide


def _store(name: str, wide: Any) -> Any:
    """Numbers of float64 in a format, by the kernels: the gradient of a gain is the sum of dy h / rho over the rows.

    Three rows with three parts of 24 bits add up to a number of float64 exactly. Half of its exponent is in h, as dy
    alone has too few.
    """
    exponent = np.where(np.isfinite(wide) & (wide != 0), np.frexp(wide)[1], 0)
    dy, left = np.zeros((3, wide.size), np.float32), np.ldexp(wide, -exponent)
    with np.errstate(invalid="ignore"):
        for part in dy:
            part[:] = left
            left = np.where(np.isfinite(wide), left - part, 0.0)
    h = np.ldexp(np.ones(dy.shape, np.float32), exponent - exponent // 2)
    dy = np.ldexp(dy, exponent // 2)
    with np.errstate(invalid="ignore"):
        assert np.array_equal((dy.astype(np.float64) * h).sum(0), wide, equal_nan=True)
    got = np.full(wide.size, np.nan, name)
    _plan(wide.size, 3, y="float32", scale=name).backward(
        threads=1, gomp_parallel=0, h=h, h_step=h.strides[0], scale=np.ones(wide.size, name), inverse_rms=np.ones(3),
        dy=dy, dh=None, dx=None, dscale=got, dbias=None,
    )  # fmt: skip
    return got


def check_same(got: Any, want: Any, doubtful: int = 0) -> None:
    """The same dtype, shape and numbers, NaN where NaN. Zeros may differ in sign, which the golden's sums lose.

    So many elements may be doubtful: their exact value is within about 2^-52 of the middle between two float32.
    """
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    apart = ulps(got, want)
    assert apart.max(initial=0) <= (1 if doubtful else 0)
    assert (apart != 0).sum() <= doubtful


def check_all_same(got: Any, want: Any, doubtful: int = 0) -> None:
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        if w is not None:
            check_same(g, w, doubtful)


@pytest.fixture(autouse=True)
def _no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that uses the golden in place of a kernel fails. The tests themselves import the golden elsewhere."""
    monkeypatch.setattr(fast, "golden", None)


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
def _memory_is_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "np", _NumPyOfNaN())


def test_every_16_bit_number_loads() -> None:
    for name in dtypes.HALF:
        every = np.arange(2**16, dtype=np.uint16).view(name)
        with np.errstate(invalid="ignore"):  # of signalling NaN
            want = every.astype(np.float32)
        wide = _load(every)
        assert np.array_equal(wide, want, equal_nan=True)
        assert np.array_equal(np.signbit(wide[want != 0]), np.signbit(want[want != 0]))  # a sum has no -0
        back = _store(name, wide.astype(np.float64))
        finite = ~np.isnan(want)
        assert np.array_equal(back[finite], every[finite])
        assert np.isnan(back.astype(np.float64)[~finite]).all()


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


@pytest.mark.parametrize("name", ROUNDED)
def test_one_rounding_to_nearest_even(name: str) -> None:
    rng = np.random.default_rng(0)
    inside = rng.normal(size=2**19) * 2.0 ** rng.integers(-26 if name == "float16" else -152, 18, 2**19)
    with np.errstate(over="ignore"):
        anywhere = rng.normal(size=2**18) * 2.0 ** rng.integers(-190, 190, 2**18)
    special = [0.0, np.inf, np.nan, 1e-60, 65519.99999999999, 65520.0, 65536.0, 3.5e38, 1e60]
    wide = np.concatenate([anywhere, inside, _borders(name), special])
    wide = np.concatenate([wide, -wide])
    wide = wide[(wide == 0) | ~(np.abs(wide) < 2.0**-190)]  # what `_store` can make
    want = DoubleDouble(wide).round(name)
    got = _store(name, wide).astype(np.float64)
    assert np.array_equal(got, want.astype(np.float64), equal_nan=True)
    has_sign = ~np.isnan(wide)
    assert np.array_equal(np.signbit(got[has_sign]), (np.signbit(wide) & (wide != 0))[has_sign])


@pytest.mark.parametrize("pair", [("float64", "float32"), ("float32", "float64"), ("float16", "bfloat16")], ids=str)
def test_formats_without_kernels_are_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="may not be"):
        _plan(8, x=pair[0], y=pair[1])


def test_parameters_that_are_shared_within_a_row_are_refused() -> None:
    """The kernels would read beyond the end of such a gain."""
    call = resolve("rms_norm", Spec((2, 3, 8), "float32"), variant=Variant.get("llama"), axis=(1, 2), feature_axis=2)
    assert launch.launch_of(call, None, None).n == 24
    with pytest.raises(ValueError, match="parameters of all 24 elements of a row"):
        launch.launch_of(call, "float32", None)


def _is_for_kernels(data: Any) -> bool:
    """Whether the kernels have all that the data of a case need: a sum that is not rounded is left to the golden."""
    call = data.call
    names = {a.dtype.name for a in (data.x, data.scale, data.bias, data.residual, data.dy, data.dh) if a is not None}
    return (
        data.mask is None
        and data.gate is None
        and not call.exact_sum
        and why_not(call) is None
        and call.feature_axes == tuple(range(call.first_of_row, len(call.shape)))
        and not names - set(ROUNDED)
        and {call.x, call.result} != {"float16", "bfloat16"}
    )


@pytest.mark.parametrize("dtype", ROUNDED)
def test_the_whole_table(dtype: str) -> None:
    """Every case equals the golden in every bit."""
    with_kernels = 0
    for case, variant, _ in select(types=(dtype,), brief=dtype != "float32"):
        data = make(case, variant, dtype)
        if not _is_for_kernels(data):
            continue
        with_kernels += 1
        want = judge.golden(data)
        for name, (got,) in _outcome(data).results.items():
            check_same(got, want[name])
    assert with_kernels > (60 if dtype == "float32" else 25)


def _outcome(data: Any) -> judge.Outcome:
    options = {**data.options, **data.arrays}
    y, *_, inverse_rms = fast.rms_norm(data.x, data.scale, data.bias, return_inverse_rms=True, **options)
    dy = data.dy if data.dh is None else (data.dy, data.dh)
    gradients = fast.rms_norm_vjp(dy, data.x, data.scale, data.bias, **options)
    jvp = golden.rms_norm_jvp((data.x, data.scale, data.bias), data.tangents, **options)
    results = {"y": y, "inverse_rms": inverse_rms, "jvp": jvp}
    results |= judge.named_gradients(data, gradients)
    return judge.Outcome({name: [value] for name, value in results.items() if value is not None})


def test_the_table_leaves_out_what_is_not_in_rows() -> None:
    left = set()
    for case, variant, dtype in select():
        data = make(case, variant, dtype)
        if not (case.fields or why_not(data.call) is None):
            left.add(case.name)
    assert left == {"no rows", "no batch", "no columns", "middle axis"}


LAYOUTS = [  # the normalised axes, and those of the parameters
    (3, 3), (3, (2, 3)), (3, (0, 1, 2, 3)), ((2, 3), (1, 2, 3)), ((1, 2, 3), (1, 2, 3)), (1, 1), ((0, 2), (0, 2)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize(("axis", "feature_axis"), LAYOUTS, ids=str)
def test_every_element_of_a_row_has_its_parameters(axis: Any, feature_axis: Any, dtype: str) -> None:
    """Every layout that kernels compute: a row may have several groups, each with a statistic of its own."""
    rng, shape = np.random.default_rng(0), (3, 6, 5, 9)
    x, z, dy = rng.normal(size=(3, *shape)).astype(dtype)
    scale, bias = rng.normal(size=(2, *(shape[i] for i in np.atleast_1d(feature_axis)))).astype(dtype)
    layout = {"axis": axis, "feature_axis": feature_axis}
    for variant, options in itertools.product(("lasagne", "llama"), ({}, {"partial": 0.5}, {"residual": z})):
        every: dict[str, Any] = {"variant": variant, **layout, **options}
        if "partial" in options and isinstance(axis, tuple) and axis == (0, 2):
            continue  # the first elements are those of x, which is not in rows
        want = golden.rms_norm(x, scale, bias, **every)
        upstream = dy.astype((want if isinstance(want, np.ndarray) else want[0]).dtype)
        check_all_same(fast.rms_norm(x, scale, bias, **every), want)
        check_all_same(
            fast.rms_norm_vjp(upstream, x, scale, bias, **every), golden.rms_norm_vjp(upstream, x, scale, bias, **every)
        )


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("variant", ["standard", "llama", "gemma", "t5"])
def test_many_elements(variant: str, dtype: str) -> None:
    """512 x 2048: the same bits, except for one float32 in about 2^26 that lies next to a tie."""
    rng = np.random.default_rng(sum(map(ord, variant + dtype)))
    x = (rng.normal(size=(512, 2048)) * 2.0 ** rng.integers(-8, 8, (512, 1))).astype(dtype)
    for width in {dtype, "float32"}:
        scale = rng.normal(0.3, 1, 2048).astype(width)
        y = golden.rms_norm(x, scale, variant=variant)
        doubtful = int(y.dtype == np.float32)
        check_same(fast.rms_norm(x, scale, variant=variant), y, doubtful)
        rows = slice(0, 512, 4)  # the golden takes a second
        dy = rng.normal(size=(128, 2048)).astype(y.dtype)
        want = golden.rms_norm_vjp(dy, x[rows], scale, variant=variant)
        check_all_same(fast.rms_norm_vjp(dy, x[rows], scale, variant=variant), want, int(dtype == "float32"))


def _extreme(dtype: str) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    magnitude = np.repeat(EXTREME[dtype], 2)[:, None]
    x = np.clip(rng.normal(size=(len(magnitude), 65)), -1, 1) * magnitude
    x[1::2, ::5] = 0
    return x.astype(dtype), rng.normal(0.3, 1, 65).astype(dtype), rng.normal(size=x.shape).astype(dtype)


@pytest.mark.parametrize("dtype", ROUNDED)
def test_rows_at_the_ends_of_the_range(dtype: str) -> None:
    x, scale, dy = _extreme(dtype)
    variants = ("standard", "llama", "gemma", "paper", "zhang_torch", "x_transformers", "t5")
    for variant, eps in itertools.product(variants, (2e-6, 0.0)):  # the root of 1e-6 makes ties
        options: dict[str, Any] = {"variant": variant, "eps": eps}
        want = golden.rms_norm(x, scale, return_inverse_rms=True, **options)
        check_all_same(fast.rms_norm(x, scale, return_inverse_rms=True, **options), want)
        v = dy.astype(want[0].dtype)
        check_all_same(fast.rms_norm_vjp(v, x, scale, **options), golden.rms_norm_vjp(v, x, scale, **options))


@pytest.mark.parametrize("eps", [0.0, 1e-5, 1e-290])
@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("variant", ["standard", "llama"])
def test_what_is_not_finite_and_does_not_count(variant: str, dtype: str, eps: float) -> None:
    """The kernels divide with the help of a remainder, which an infinity does not have; rho is finite in these rows."""
    x = np.random.default_rng(0).normal(size=(6, 70)).astype(dtype)
    x[:3, 50] = np.inf, -np.inf, np.nan
    x[3:5, :40] = 0
    for gain_dtype in {dtype, "float32"}:
        scale = np.linspace(-2, 2, 70).astype(gain_dtype)
        options: dict[str, Any] = {"variant": variant, "partial": 0.5, "eps": eps}
        with np.errstate(all="ignore"):
            check_same(fast.rms_norm(x, scale, **options), golden.rms_norm(x, scale, **options))


@pytest.mark.parametrize("variant", ["standard", "llama"])
def test_small_factors_beside_large_ones(variant: str) -> None:
    """bfloat16 rows in which a factor underflows float32, but the product does not."""
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 32, 1024))
    x[:, ::2] *= 2.0**-131
    gain = rng.normal(1, 0.3, 1024)
    for size, width in itertools.product((2.0**60, 2.0**16, 2.0**-60, 2.0**-126), ("bfloat16", "float32")):
        half, scale = x.astype("bfloat16"), (gain * size).astype(width)
        check_same(fast.rms_norm(half, scale, variant=variant), golden.rms_norm(half, scale, variant=variant))
    x[:, 1::4] *= 2.0**19  # x / rho is 0 in float32, but x / rho * gain is not
    x[:, ::2] *= 2.0**-2
    for size, width in itertools.product((2.0**17, 2.0**30, 2.0**39), ("bfloat16", "float32")):
        half, scale = x.astype("bfloat16"), (gain * size).astype(width)
        check_same(fast.rms_norm(half, scale, variant=variant), golden.rms_norm(half, scale, variant=variant))
    x = rng.normal(size=(32, 1024))
    for size, factor, up in ((2.0**-59, 2.0**-38, 2.0**-100), (2.0**59, 2.0**20, 2.0**30), (1.0, 2.0**-136, 2.0**116)):
        for width in ("bfloat16", "float32"):
            half, scale = (x * size).astype("bfloat16"), (gain * factor).astype(width)
            upstream = (dy * up).astype(golden.rms_norm(half[:1], scale, variant=variant).dtype)
            options = {"variant": variant, "eps": 0.0}
            want = golden.rms_norm_vjp(upstream, half, scale, **options)
            got = fast.rms_norm_vjp(upstream, half, scale, **options)
            check_same(got[0], want[0])
            if width == "bfloat16":
                check_same(got[1], want[1])


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("shape", [(1,), (7, 1), (2**16 + 3, 1), (2, 2**19 + 5), (3, 2, 1, 33)])
def test_rows_of_any_length(shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=shape).astype(dtype) for _ in range(2))
    scale = rng.normal(size=shape[-1:]).astype(dtype)
    options = {"variant": "gemma", "eps": 0.3}
    check_same(fast.rms_norm(x, scale, **options), golden.rms_norm(x, scale, **options), int(dtype == "float32"))
    want = golden.rms_norm_vjp(dy, x, scale, **options)
    check_all_same(fast.rms_norm_vjp(dy, x, scale, **options), want, int(dtype == "float32"))


@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (0,), (3, 0, 8)])
def test_of_nothing_the_golden_is_asked(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "golden", golden)
    x, scale = np.zeros(shape, np.float32), np.ones(shape[-1:], np.float32)
    check_all_same(*((own.rms_norm(x, scale), *own.rms_norm_vjp(x, x, scale)) for own in (fast, golden)))


def test_tiny_parts_of_a_residual_of_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """x and the residual are added in the wider dtype; gradients of two dtypes come from the golden."""
    rng = np.random.default_rng(0)
    x, residual = rng.normal(size=(4, 32)).astype("bfloat16"), rng.normal(size=(4, 32)).astype(np.float32)
    check_all_same(fast.rms_norm(x, residual=residual), golden.rms_norm(x, residual=residual))
    monkeypatch.setattr(fast, "golden", golden)
    check_all_same(*(own.rms_norm_vjp(residual, x, residual=residual) for own in (fast, golden)))


@pytest.mark.parametrize(("dtype", "other"), [("bfloat16", "float32"), ("float16", "float64"), ("float32", "float64")])
def test_a_gradient_of_another_dtype_beside_x_is_not_rounded_first(
    dtype: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "golden", golden)
    rng = np.random.default_rng(0)
    x, residual, dy = (rng.normal(size=(6, 64)).astype(dtype) for _ in range(3))
    for second in (residual, residual.astype(other)):
        for dh in (rng.normal(size=(6, 64)).astype(name) for name in (other, dtype)):
            check_all_same(*(own.rms_norm_vjp((dy, dh), x, residual=second) for own in (fast, golden)))


def test_the_comparison_can_fail() -> None:
    one = np.ones(3, ml_dtypes.bfloat16)
    for other in (np.float32([1, 1, 1]), one[:2], np.nextafter(one, one + one), one * np.asarray(np.nan, one.dtype)):
        with pytest.raises(AssertionError):
            check_same(other, one)
