"""The PyTorch functions against the golden: values, gradients and tangents."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from options import MAGNITUDES, OPTIONS, make

import rmsnorm
from rmsnorm import dtypes
from rmsnorm import numpy_impl as golden
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.numpy_impl.double_double import DoubleDouble

torch = pytest.importorskip("torch")
from torch.autograd import forward_ad  # noqa: E402
from torch_arrays import to_numpy, to_torch, torch_options  # noqa: E402
from torch_checks import check_gradient, check_values, magnitudes_of_terms  # noqa: E402
from torch_gradients import by_autograd, by_func, by_vjp  # noqa: E402

from rmsnorm.torch_impl import rms_norm, rms_norm_jvp, rms_norm_vjp  # noqa: E402
from rmsnorm.torch_impl.rounding import cast, straight_through  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # forward_ad's own


@pytest.mark.parametrize("dtype", MAGNITUDES)
@pytest.mark.parametrize("variant", rmsnorm.PRESETS)
def test_every_variant_is_the_golden(variant: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    for magnitude, parameters in itertools.product(MAGNITUDES[dtype], MAGNITUDES):
        x = (rng.standard_normal((32, 33)) * magnitude).astype(dtype)
        x[3] = 0
        scale, bias = (rng.standard_normal(33).astype(parameters) for _ in range(2))
        tiny, double = magnitude < 1e-10, "float64" in (dtype, parameters)
        eps = rmsnorm.PRESETS[variant].eps
        if tiny and eps:
            eps *= 1.1  # x / sqrt(1e-6) is 1000 x but for 2e-17: one in 128 products is a tie to float64
        # the floor of the clamp and the mean of the variance are rounded
        share = 0.6 if double and variant in ("x_transformers", "keras_rms_scaling") else 0.999
        # with a bias: float64 does not hold it and 1e-27 as well, nor what a mean not carried along leaves of their sum
        for b in (None,) if tiny or (double and variant == "keras_rms_scaling") else (bias, None):
            want = golden.rms_norm(x, scale, b, variant=variant, eps=eps)
            got = rms_norm(*map(to_torch, (x, scale, b)), variant=variant, eps=eps)
            check_values(got, want, share=share)
    check_values(
        rms_norm(to_torch(x), variant=variant, eps=eps), golden.rms_norm(x, variant=variant, eps=eps), share=share
    )


@pytest.mark.parametrize("dtype", MAGNITUDES)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_the_golden(name: str, dtype: str) -> None:
    for seed, variant in enumerate(("standard", "llama", "gemma", "zhang_torch", "t5", "x_transformers")):
        parameters = list(MAGNITUDES)[(seed + len(name)) % 4]
        x, scale, bias, options = make(OPTIONS[name], dtype, parameters, seed)
        want = golden.rms_norm(x, scale, bias, variant=variant, return_inverse_rms=True, **options)
        got = rms_norm(
            *map(to_torch, (x, scale, bias)), variant=variant, return_inverse_rms=True, **torch_options(options)
        )
        assert len(got) == len(want)
        carried = variant != "x_transformers"
        check_values(got[-1], want[-1], share=0)  # 1 / rho in float64 is a division after a rounding: two ulps
        for g, w in zip(got[:-1], want[:-1], strict=True):
            check_values(g, w, share=0.999 if carried else 0.9)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])  # of the others test_interface has cases
@pytest.mark.parametrize("name", OPTIONS)
def test_every_gradient_is_the_golden(name: str, dtype: str) -> None:
    """By the analytic product, by the Function and by the composite that torch.func derives."""
    variants = ("standard", "llama", "gemma", "zhang_torch", "x_transformers", "keras_rms_scaling", "paper")
    for seed, variant in enumerate(variants):
        # one dtype throughout: gradients then arrive in that of y whatever the variant; "out" has dy of 16 bits
        x, scale, bias, options = make(OPTIONS[name], dtype, dtype, seed)
        dy = np.random.default_rng(seed).standard_normal(x.shape)
        dy = dy.astype("bfloat16").astype(np.float32).astype("float16").astype(dtype)  # exact in every format
        want = golden.rms_norm_vjp(dy, x, scale, bias, variant=variant, **options)[:3]
        terms = magnitudes_of_terms(x, scale, dy, variant, options)
        for gradients in (by_vjp, by_autograd, by_func):
            got = gradients(
                to_torch(dy), [*map(to_torch, (x, scale, bias))], {**torch_options(options), "variant": variant}
            )
            for g, w, t in zip(got[:3], want, terms, strict=True):
                check_gradient(g, w, t, 2 * x.size + 32)


@pytest.mark.parametrize("dtype", MAGNITUDES)
@pytest.mark.parametrize("variant", rmsnorm.PRESETS)
def test_gradients_at_every_magnitude(variant: str, dtype: str) -> None:
    for seed, magnitude in enumerate(MAGNITUDES[dtype]):
        x, scale, bias, _ = make({}, dtype, dtype, seed, magnitude)
        dy = np.random.default_rng(seed).standard_normal(x.shape).astype(dtype)
        want = golden.rms_norm_vjp(dy, x, scale, bias, variant=variant)
        terms = magnitudes_of_terms(x, scale, dy, variant, {})
        for gradients in (by_vjp, by_autograd, by_func):
            got = gradients(to_torch(dy), [*map(to_torch, (x, scale, bias))], {"variant": variant})
            for g, w, t in zip(got, want, terms, strict=True):
                check_gradient(g, w, t, 2 * x.size + 32)


def test_half_gradients_are_rounded_once() -> None:
    rng = np.random.default_rng(0)
    for dtype in dtypes.HALF:
        x, dy = (rng.standard_normal((64, 512)).astype(dtype) for _ in range(2))
        scale, bias = (rng.standard_normal(512).astype(dtype) for _ in range(2))
        want = golden.rms_norm_vjp(dy, x, scale, bias, variant="llama")
        for gradients in (by_vjp, by_autograd):
            got = gradients(to_torch(dy), [*map(to_torch, (x, scale, bias))], {"variant": "llama"})
            assert all((ulps(to_numpy(g), w) == 0).all() for g, w in zip(got, want, strict=True))
        # torch.func casts through float32 where it accumulates: one element in 10^4 rounded twice
        for g, w in zip(
            by_func(to_torch(dy), [*map(to_torch, (x, scale, bias))], {"variant": "llama"}), want, strict=True
        ):
            apart = ulps(to_numpy(g), w)
            assert apart.max() <= 1
            assert (apart == 0).mean() >= 0.999


@pytest.mark.parametrize("dtype", MAGNITUDES)
@pytest.mark.parametrize("name", OPTIONS)
def test_tangents_are_the_golden(name: str, dtype: str) -> None:
    for seed, variant in enumerate(("standard", "llama", "gemma", "zhang_torch", "keras_rms_scaling")):
        x, scale, bias, options = make(OPTIONS[name], dtype, dtype, seed)
        rng = np.random.default_rng(seed)
        tangents = [rng.standard_normal(value.shape).astype(dtype) for value in (x, scale, bias)]
        want = golden.rms_norm_jvp((x, scale, bias), tangents, variant=variant, **options)
        arrays, directions = ([*map(to_torch, values)] for values in ((x, scale, bias), tangents))
        converted = {**torch_options(options), "variant": variant}

        def first(*args: Any, options: dict[str, Any] = converted) -> Any:
            y = rms_norm(*args, **options)
            return y[0] if isinstance(y, tuple) else y

        with forward_ad.dual_level():
            dual = first(*map(forward_ad.make_dual, arrays, directions))
            eager = forward_ad.unpack_dual(dual).tangent
        by_function = rms_norm_jvp(arrays, directions, **converted)
        with torch.no_grad():  # which must not hide the mask from a forward derivative
            by_transform = torch.func.jvp(first, tuple(arrays), tuple(directions))[1]
        # |dy| terms: at most 3 n products of size max|dx| max|1/rho| ...: bounded by the sum over the row
        da, dg, db = (np.abs(np.nan_to_num(t.astype(np.float64))) for t in tangents)
        terms = np.full(x.shape, (da.sum() + dg.sum() + db.sum()) * _largest_slope(x, scale, variant, options))
        for got in (eager, by_function, by_transform):
            check_gradient(got, want, terms, 8)


def _largest_slope(x: Any, scale: Any, variant: str, options: dict[str, Any]) -> float:
    """A bound on |dy_i / dx_j|, |dy_i / dscale_i| and |dy_i / dbias_i|: each term of R is at most 1 / rho times n."""
    h = golden.rms_norm(x, residual=options["residual"])[1] if "residual" in options else x
    kept = {name: options[name] for name in ("axis", "mask", "partial") if name in options}
    _, inverse = golden.rms_norm(h.astype(np.float64), variant=variant, return_inverse_rms=True, **kept)
    a = np.where(np.broadcast_to(options.get("mask", True), x.shape), np.abs(h.astype(np.float64)), 0.0)
    normalised = (a * inverse).max()
    return float((1 + np.abs(scale.astype(np.float64)).max()) * (1 + normalised) ** 2 * (1 + inverse.max()))


def test_residual_takes_both_gradients() -> None:
    x, scale, bias, options = make({"residual": "float32"}, "bfloat16", "float32", 0)
    dy, dh = (np.random.default_rng(s).standard_normal(x.shape).astype(np.float32) for s in (1, 2))
    want = golden.rms_norm_vjp((dy, dh), x, scale, bias, variant="llama", **options)
    leaves = [to_torch(value).requires_grad_() for value in (x, scale, bias, options["residual"])]
    y, h = rms_norm(*leaves[:3], residual=leaves[3], variant="llama")
    got = torch.autograd.grad((y, h), leaves, (to_torch(dy), to_torch(dh)))
    direct = rms_norm_vjp((to_torch(dy), to_torch(dh)), *leaves[:3], residual=leaves[3], variant="llama")
    for g, w in zip(direct, want, strict=True):
        assert ulps(to_numpy(g), w).max() <= 1
    terms = np.abs(golden.rms_norm_vjp(dy, x, scale, bias, variant="llama", **options)[0].astype(np.float64)) + np.abs(
        dh
    )
    for g, w, t in zip(got, want, (terms, 0.0, 0.0, terms), strict=True):
        check_gradient(g, w, t, 2**29)  # autograd rounds dx to float32, then its sum with dh
    assert h.dtype == torch.float32
    only = torch.autograd.grad(rms_norm(*leaves[:3], residual=leaves[3])[1].sum(), leaves[3])[0]
    assert torch.equal(only, torch.ones_like(only))


@pytest.mark.parametrize("dtype", MAGNITUDES)
def test_nan_inf_and_zero_rows(dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal((6, 5))
    x[0, 1], x[1, 2], x[2, 3], x[3] = np.nan, np.inf, -np.inf, 0
    x = x.astype(dtype)
    scale = np.ones(5, dtype)
    for variant, eps in itertools.product(("standard", "llama", "zhang_torch", "x_transformers"), (None, 0.0)):
        want = golden.rms_norm(x, scale, variant=variant, eps=eps, return_inverse_rms=True)
        got = rms_norm(to_torch(x), to_torch(scale), variant=variant, eps=eps, return_inverse_rms=True)
        for g, w in zip(got, want, strict=True):
            check_values(g, w, share=0)  # 1 / rho in float64: two ulps
        assert np.isnan(want[0][3]).all() == (eps == 0)
        dx = by_autograd(torch.ones(6, 5), [to_torch(x)], {"variant": variant, "eps": eps})[0]
        assert dx[4:].isfinite().all()
        if eps is None:  # at q = 0 the direction of a counts as 0
            want = golden.rms_norm_vjp(np.ones_like(x[3]), x[3], variant=variant)[0]
            assert ulps(to_numpy(dx[3]), want).max() <= 1


def test_nothing_under_the_mask_reaches_a_derivative() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((3, 4, 6), generator=generator)
    mask = torch.rand((3, 4, 6), generator=generator) > 0.4
    mask[1] = False
    for variant, eps, filler in itertools.product(rmsnorm.PRESETS, (None, 0.0), (float("nan"), float("inf"), 1e38)):
        spoilt = torch.where(mask, x, filler)
        options = {"variant": variant, "eps": eps, "mask": mask}
        for gradients in (by_vjp, by_autograd, by_func):
            clean, dirty = (
                gradients(torch.ones(3, 4, 6), [values, torch.ones(6), torch.ones(6)], options)
                for values in (x, spoilt)
            )
            for c, d in zip(clean, dirty, strict=True):  # NaN: the variance of one element is 0, as eps
                torch.testing.assert_close(c, d, rtol=0, atol=0, equal_nan=variant == "keras_rms_scaling" and eps == 0)
            assert (dirty[0][~mask] == 0).all()


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0), (0,), (1,), (3, 1)])
@pytest.mark.parametrize("dtype", MAGNITUDES)
def test_empty_and_single(shape: tuple[int, ...], dtype: str) -> None:
    x, scale = np.full(shape, 2.0, dtype), np.full(shape[-1:], 3.0, dtype)
    for masked in (False, True):
        options = {"mask": np.ones(shape, bool)} if masked else {}
        want = golden.rms_norm(x, scale, return_inverse_rms=True, **options)
        got = rms_norm(to_torch(x), to_torch(scale), return_inverse_rms=True, **torch_options(options))
        for g, w in zip(got, want, strict=True):
            check_values(g, w, share=0)  # 1 / rho in float64: two ulps
        want = golden.rms_norm_vjp(x, x, scale, **options)[:2]
        for gradients in (by_vjp, by_autograd, by_func):
            for g, w in zip(
                gradients(to_torch(x), [to_torch(x), to_torch(scale)], torch_options(options)), want, strict=False
            ):
                assert g.shape == w.shape
                # eps = 1e-6 of 4 is left of x x / rho^2 - 1: what float64 rounds there is 2^-53 / 1e-6 of it
                np.testing.assert_allclose(
                    to_numpy(g).astype(np.float64), w.astype(np.float64), rtol=2.0**-7, atol=1e-15
                )


def test_strides_and_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn((2, 3, 4, 5), generator=generator)
    layouts = {
        "channels last": dense.to(memory_format=torch.channels_last),
        "transposed": dense.transpose(1, 3).contiguous().transpose(1, 3),
        "strided": dense.repeat_interleave(2, -1)[..., ::2],
        "expanded": dense[:1].expand(2, 3, 4, 5),
        "offset": torch.cat([dense[:1], dense])[1:],
    }
    for name, x in layouts.items():
        for dtype, axis in itertools.product((torch.bfloat16, torch.float64), (-1, 1, (2, 3))):
            a = x.to(dtype) if name != "expanded" else dense[:1].to(dtype).expand(2, 3, 4, 5)
            before, version = a.clone(), a._version
            y = rms_norm(a, axis=axis, variant="llama")
            assert torch.equal(y, rms_norm(before.contiguous(), axis=axis, variant="llama"))
            assert torch.equal(a, before)
            assert a._version == version
            if name in ("channels last", "transposed"):
                assert y.stride() == a.stride()
    frozen = [dense.clone() for _ in range(3)]
    dy, x, residual = (array.requires_grad_() for array in frozen)
    rms_norm(x, residual=residual, mask=dense > 0)[0].backward(dy)
    assert all(torch.equal(array, dense) and array._version == 0 for array in frozen)


def test_one_rounding_to_16_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(20_000, dtype=torch.float64, generator=generator) * torch.logspace(
        -50, 40, 20_000, dtype=torch.float64
    )
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-60, -1e-60, 1e300, 65519.999999999, 65520.0, 3.3961775292304957e38]
    for dtype in dtypes.HALF:
        near = torch.randn(20_000, generator=generator).to(getattr(torch, dtype)).double()
        tie = near + dtypes.unit_roundoff(dtype) * 2.0 ** (near.frexp().exponent - 1)
        tie = tie * (1 + 1e-14 * torch.randn(20_000, dtype=torch.float64, generator=generator))
        values = torch.cat([wide, tie, torch.tensor(edges, dtype=torch.float64)])
        with np.errstate(all="ignore"):
            want = DoubleDouble(values.numpy()).round(dtype)
        got = cast(values, dtype)
        assert ulps(to_numpy(got), want).max() == 0
        assert ulps(to_numpy(values.to(getattr(torch, dtype))), want).max() > 0  # the values can tell
        assert (got.signbit() == torch.from_numpy(np.signbit(want)))[~got.isnan()].all()

        def through(x: Any, dtype: str = dtype) -> Any:
            return straight_through(cast(x, dtype).double(), x)

        for function in (lambda x, dtype=dtype: cast(x, dtype), through):
            value, tangent = torch.func.jvp(function, (values,), (torch.full_like(values, 0.5),))
            assert torch.equal(value.double().nan_to_num(7), got.double().nan_to_num(7))
            assert (value.signbit() == got.signbit())[~got.isnan()].all()
            assert (tangent[: -len(edges)] == 0.5).all()
        fine = torch.full_like(values, 1 + 2.0**-40)
        assert torch.equal(torch.func.vjp(through, values)[1](fine)[0][: -len(edges)], fine[: -len(edges)])


def test_errors_name_the_tensor() -> None:
    x = torch.ones(4, 16)
    for arguments, error, words in (
        ((x.int(),), TypeError, "x has dtype int32, expected float16"),
        ((x.to(torch.complex64),), TypeError, "x has dtype complex64, expected float16"),
        ((x, torch.ones(16, dtype=torch.int64)), TypeError, "scale has dtype int64, expected float16"),
        (
            (x, torch.ones(8)),
            ValueError,
            r"scale has shape \(8,\), expected \(16,\) to match axis -1 of x f32\[4, 16\]",
        ),
        (([1.0],), TypeError, r"x is \[1.0\] \(list\), expected a torch.Tensor"),
        ((None,), TypeError, "x is None .* expected a torch.Tensor"),
        ((torch.tensor(1.0),), ValueError, "x is 0-d"),
    ):
        with pytest.raises(error, match=words):
            rms_norm(*arguments)
    with pytest.raises(TypeError, match="mask has dtype int64, expected bool"):
        rms_norm(x, mask=torch.ones(16, dtype=torch.int64))
    with pytest.raises(ValueError, match="out_dtype is 'int32', expected 'float16'"):
        rms_norm(x, out_dtype=torch.int32)
    with pytest.raises(TypeError, match=r"dy is \(tensor"):
        rms_norm_vjp((x, x), x)
