"""assert_rms_norm and rms_norm_interval: arrays of every framework hold where they are right, and nothing else does."""

from __future__ import annotations

import re
import tracemalloc
from typing import Any

import numpy as np
import pytest
from programs import printed

from rmsnorm import PRESETS, Variant
from rmsnorm.identify import mistakes
from rmsnorm.numpy_impl import fast
from rmsnorm.parity.arrays import arrays_of
from rmsnorm.parity.equations import candidate
from rmsnorm.targets.bridges import bridge
from rmsnorm.testing import assert_rms_norm, rms_norm_interval

TYPES = ("float16", "bfloat16", "float32", "float64")
STANDARD = {"variant": "standard"}


def drawn(seed: int, shape: tuple[int, ...], dtype: str) -> tuple[Any, Any, Any]:
    """x of rows of different size, a gain and dy."""
    random = np.random.default_rng(seed)
    x = random.normal(size=shape) * 10.0 ** random.uniform(-2, 1, (*shape[:-1], 1))
    scale, dy = random.normal(0.5, 1.0, shape[-1:]), random.normal(size=shape)
    return x.astype(dtype), scale.astype(dtype), dy.astype(dtype)


@pytest.mark.parametrize("variant", PRESETS)
def test_the_golden_holds_in_every_variant_and_dtype(variant: str) -> None:
    for dtype in TYPES:
        x, scale, dy = drawn(3, (6, 5, 40), dtype)
        bias = scale if Variant.get(variant).bias else None
        y = fast.rms_norm(x, scale, bias, variant=variant)
        dy = dy.astype(y.dtype)
        dx, dscale, dbias = fast.rms_norm_vjp(dy, x, scale, bias, variant=variant)
        assert_rms_norm(y, x, scale, bias, variant=variant, dy=dy, dx=dx, dscale=dscale, dbias=dbias)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_of_300_right_ys_none_fails(dtype: str) -> None:
    """Of a kernel that multiplies by the reciprocal root in float32."""
    for seed in range(300):
        x, scale, _ = drawn(seed, (3, 96), dtype)
        wide = x.astype(np.float32)
        inverse = np.float32(1) / np.sqrt((wide * wide).mean(-1, keepdims=True) + np.float32(1e-6))
        assert_rms_norm((wide * inverse * scale.astype(np.float32)).astype(dtype), x, scale, variant="standard")


TWICE = Variant.get("gemma").replace(scale_offset=2.0)
WRONG = [
    mistakes.GAIN_DROPPED, mistakes.GAIN_FIRST, mistakes.CENTRED, mistakes.OF_SUM,
    mistakes.divisor("n - 1", lambda s: s.n - 1), *list(mistakes.of_statistic("bfloat16"))[:6],
    *list(mistakes.of_width(100))[:5], next(mistakes.of_rows(3)),
    mistakes.eps_of("eps is 1e-5", lambda s: 1e-5), mistakes.eps_of("no eps", lambda s: 0.0),
    mistakes.factor("0.1 % too large", lambda s: 1.001), mistakes.eps_of_max(1e-6),
]  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG, ids=lambda mistake: mistake.says[:60])
def test_a_wrong_y_fails_in_32_or_in_16_bits(mistake: mistakes.Mistake) -> None:
    messages = []
    for dtype in ("float32", "bfloat16"):
        x, scale, _ = drawn(5, (3, 100), dtype)
        data = arrays_of("test", {"x": x, "scale": scale}, Variant.get("standard"), -1, None, None).data()
        (y,) = candidate(data, mistake.changes).results["y"]
        try:
            assert_rms_norm(y, x, scale, variant="standard")
        except AssertionError as error:
            messages.append(str(error))
    assert messages
    assert all(re.match(r"y is not standard: y\[\d+,\d+\] is .*, expected .*, \d+ ulp away", m) for m in messages)


@pytest.mark.parametrize(
    ("y", "variant", "words"),
    [
        (lambda x, w: fast.rms_norm(x, w, variant="gemma"), "llama", "; it is gemma: it rounds once, after the gain"),
        (lambda x, w: fast.rms_norm(x, w, variant="llama"), "gemma", "; it is llama: it rounds x / rho before"),
        (lambda x, w: fast.rms_norm(x, w, variant=TWICE), "gemma", "; 1 is added to the gain twice"),
        (lambda x, w: fast.rms_norm(x, w, variant="llama", eps=1e-5), "llama", "; its eps is 1e-05"),
        (lambda x, w: 0 * x, "llama", "; all of these rows are 0"),
        (lambda x, w: fast.rms_norm(x, None), "standard", "; the gain is not applied"),
    ],
)  # fmt: skip
def test_the_first_line_names_what_it_is(y: Any, variant: str, words: str) -> None:
    x, scale, _ = drawn(7, (9, 64), "float16")
    x = (x * np.float16(0.1)).astype(np.float16)  # so that eps shows
    with pytest.raises(AssertionError, match=re.escape(words)):
        assert_rms_norm(y(x, scale), x, scale, variant=variant)


def test_another_eps_is_named_along_any_axes() -> None:
    x = np.float32(0.01) * drawn(8, (3, 16, 4), "float32")[0]  # so that eps shows
    for axis, sizes in ((1, 16), ((1, 2), (16, 4))):
        scale = np.ones(sizes, np.float32)
        y = fast.rms_norm(x, scale, axis=axis, eps=1e-5)
        with pytest.raises(AssertionError, match="; its eps is 1e-05"):
            assert_rms_norm(y, x, scale, **STANDARD, axis=axis)


CONSTANT = r"^dx is not standard: .*; the gradient for x takes 1 / rho for a constant"


def test_wrong_gradients_are_named() -> None:
    x, scale, dy = drawn(9, (33, 64), "float32")
    y, (dx, dscale, _) = fast.rms_norm(x, scale), fast.rms_norm_vjp(dy, x, scale)
    steps = arrays_of("test", {"x": x, "scale": scale, "dy": dy}, Variant.get("standard"), -1, None, None).data()
    constant = candidate(steps, next(m for m in mistakes.of_dx(64) if "constant" in m.says).changes).results["dx"][0]
    for gradients, words in (
        ({"dx": constant}, CONSTANT),
        ({"dscale": 0 * dscale}, "; the gradient for the gain is 0"),
        ({"dx": dx, "dscale": dscale * np.float32(1.001)}, "64 elements of dscale are outside"),
        ({"dx": dx[:5]}, r"^dx is not standard: it is f32\[5, 64\], expected f32\[33, 64\]"),
    ):
        with pytest.raises(AssertionError, match=words):
            assert_rms_norm(y, x, scale, **STANDARD, dy=dy, **gradients)
    assert_rms_norm(None, x, scale, **STANDARD, dy=dy, dx=dx, dscale=dscale)


def test_options_layouts_and_blocks() -> None:
    """Masks, gates, residuals, channels, one row, none, strided arrays, and more rows than one block has."""
    x, scale, dy = drawn(11, (700, 4, 48), "bfloat16")
    random = np.random.default_rng(12)
    more = {"residual": x[::-1], "gate": dy, "mask": random.random(x.shape) < 0.7}
    y, h = fast.rms_norm(x, scale, variant="llama", **more)
    dy = dy.astype(y.dtype)
    dx, dscale, _, dresidual, dgate = fast.rms_norm_vjp((dy, 0 * h), x, scale, variant="llama", **more)
    assert_rms_norm(y, x, scale, variant="llama", **more, h=h, dy=dy, dh=0 * h, dx=dx, dscale=dscale,
                    dresidual=dresidual, dgate=dgate)  # fmt: skip
    y[650, 3, 47] = 40
    with pytest.raises(AssertionError, match=r"y\[650,3,47\] is 40, expected .*\n1 of 134400 elements"):
        assert_rms_norm(y, x, scale, variant="llama", **more)
    gain = np.linspace(-1, 1, 700, dtype=np.float32)
    strided = np.asfortranarray(x)[:, ::2]
    for of, w, options in (
        (x, gain, {"axis": (-1, -2), "feature_axis": 0}), (x[0, 0], scale, {}), (x[:0], scale, {}), (strided, scale, {})
    ):  # fmt: skip
        assert_rms_norm(fast.rms_norm(of, w, **options), of, w, **STANDARD, **options)


@pytest.mark.parametrize("dtype", TYPES)
def test_an_interval_has_the_golden_and_little_else(dtype: str) -> None:
    x, scale, dy = drawn(13, (40, 256), dtype)
    for of, golden in (("y", fast.rms_norm(x, scale)), ("dx", fast.rms_norm_vjp(dy, x, scale)[0])):
        low, high = rms_norm_interval(x, scale, variant="standard", of=of, dy=dy, exact=True)
        assert low.dtype == high.dtype == golden.dtype
        assert np.all((low <= golden) & (golden <= high))
        wide, size = high.astype(np.float64) - low.astype(np.float64), np.max(np.abs(golden.astype(np.float64)))
        unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}[dtype]
        assert np.max(wide) <= (4 if dtype in ("float16", "bfloat16") else 150) * unit * size


def test_it_takes_ten_times_the_memory_of_x_at_most() -> None:
    x, scale, _ = drawn(14, (512, 4096), "bfloat16")
    y = fast.rms_norm(x, scale, variant="llama")
    tracemalloc.start()
    assert_rms_norm(y, x, scale, variant="llama")
    rms_norm_interval(x, scale, variant="llama")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 10 * x.nbytes


def test_what_cannot_be_judged_is_refused() -> None:
    x, scale, dy = drawn(15, (4, 8), "float32")
    for words, arrays, more in (
        ("y is None, expected an array of NumPy, PyTorch, TensorFlow or JAX; pass it, or a gradient", (None, x), {}),
        (r"x is \[1.0\] \(list\), expected an array", (x, [1.0]), {}),
        (r"scale has shape \(5,\), expected \(8,\)", (x, x, scale[:5]), {}),
        ("dy is None, expected the gradient of the loss for y", (x, x, scale), {"dx": x}),
        ("residual is None, expected the residual of the call that has h; pass it", (x, x, scale), {"h": x}),
        ("bias is None, expected the bias of the call that has dbias", (x, x, scale), {"dy": dy, "dbias": scale}),
        ("residual is None, expected the residual of the call that has dh", (x, x, scale), {"dh": dy}),
        ("variant is 'lama', expected .* did you mean 'llama'", (x, x, scale), {"variant": "lama"}),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            assert_rms_norm(*arrays, **{**STANDARD, **more})
    with pytest.raises(ValueError, match="of is 'dbias', expected 'y', 'dx' or 'dscale'"):
        rms_norm_interval(x, scale, **STANDARD, of="dbias", dy=dy)
    with pytest.raises(AssertionError, match=r"y is not standard: it is f64\[4, 8\], expected f32\[4, 8\]; pass out_"):
        assert_rms_norm(x.astype(np.float64), x, scale, **STANDARD)


@pytest.mark.torch
@pytest.mark.parametrize("layout", ["meta", "sparse"])
def test_an_array_without_values_here_is_refused(layout: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = torch.ones(2, 8)
    y = x.to("meta") if layout == "meta" else x.to_sparse()
    with pytest.raises(TypeError, match=r"y is f32\[2, 8\] \(Tensor\), .*; pass a dense array that has values"):
        assert_rms_norm(y, x, **STANDARD)


FRAMEWORKS = [pytest.param("torch", marks=pytest.mark.torch), pytest.param("tf", marks=pytest.mark.tf),
              pytest.param("flax", marks=pytest.mark.flax)]  # fmt: skip


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_arrays_of_every_framework(framework: str) -> None:
    """x of PyTorch is strided and requires a gradient, and the gain of TensorFlow is a variable."""
    package = pytest.importorskip({"torch": "torch", "tf": "tensorflow", "flax": "jax"}[framework])
    arrays = drawn(17, (3, 5, 32), "bfloat16")[:2]
    x, scale, y = map(bridge(framework).send, (*arrays, fast.rms_norm(arrays[0], None)))
    if framework == "torch":
        x = x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    if framework == "tf":
        scale = package.Variable(scale)
    assert_rms_norm(y, x, **STANDARD)
    with pytest.raises(AssertionError, match="the gain is not applied"):
        assert_rms_norm(y, x, scale, **STANDARD)
    low, high = rms_norm_interval(x, **STANDARD)
    assert isinstance(low, type(y))
    assert low.dtype == high.dtype == y.dtype
    assert np.all(np.asarray(low <= y)) & np.all(np.asarray(y <= high))


def test_it_imports_no_framework_but_that_of_the_arrays() -> None:
    printed(
        "-c",
        "import sys, numpy as np\n"
        "from rmsnorm.testing import assert_rms_norm\n"
        "x = np.ones((2, 4), 'float32')\n"
        "try:\n    assert_rms_norm(2 * x, x, variant='standard')\n"
        "except AssertionError:\n    pass\n"
        "assert not {'torch', 'tensorflow', 'keras', 'jax', 'flax'} & {*sys.modules}\n",
    )
