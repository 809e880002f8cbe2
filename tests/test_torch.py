"""The PyTorch functions against the golden, and everything PyTorch may do with them."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rmsnorm
from rmsnorm import dtypes
from rmsnorm import numpy_impl as golden
from rmsnorm.numpy_impl.double_double import DoubleDouble

torch = pytest.importorskip("torch")
from torch.autograd import forward_ad  # noqa: E402

from rmsnorm.torch_impl import arithmetic, functional, rms_norm, rms_norm_jvp, rms_norm_vjp  # noqa: E402
from rmsnorm.torch_impl.rounding import cast, rounded  # noqa: E402

MAGNITUDES = {
    "float16": (1.0, 1e4, 1e-6),
    "bfloat16": (1.0, 1e20, 1e-30),
    "float32": (1.0, 1e20, 1e-30),
    "float64": (1.0, 1e20, 1e-30, 1e300, 1e-300),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rows": {"axis": 0},
    "image": {"axis": (2, 3), "feature_axis": 1},
    "pair": {"axis": (-1, 1)},
    "all": {"axis": (0, 1, 2, 3), "feature_axis": 3},
    "partial": {"partial": 0.3},
    "mask": {"mask": (2, 3, 4, 5)},
    "broadcast mask": {"mask": (3, 1, 5)},
    "partial mask": {"mask": (2, 3, 4, 5), "partial": 0.7, "axis": (1, 3)},
    "residual": {"residual": "float32"},
    "residual mask": {"residual": "bfloat16", "mask": (2, 3, 4, 5)},
    "half out": {"out_dtype": "bfloat16"},
    "double out": {"out_dtype": "float64"},
}


def to_torch(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.astype(np.float32)).bfloat16()  # exact
    return torch.from_numpy(value.copy())


def to_numpy(value: Any) -> Any:
    if value is None:
        return None
    value = value.detach()
    return value.float().numpy().astype(ml_dtypes.bfloat16) if value.dtype == torch.bfloat16 else value.numpy()


def ulps(got: Any, want: Any) -> Any:
    """How many numbers of the format lie between; a NaN is next to a NaN only."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    integer, double = f"i{got.dtype.itemsize}", want.dtype.itemsize == 8
    ordered = []
    for value in (got, want):
        bits = np.where(np.isnan(value), 0, value).astype(value.dtype).view(integer).astype(object if double else "i8")
        ordered.append(np.where(bits < 0, -(bits - int(np.iinfo(integer).min)), bits))
    return np.where(np.isnan(got) == np.isnan(want), abs(ordered[0] - ordered[1]), 2**62).astype(np.int64)


def check_values(got: Any, want: Any, most: int | None = None, share: float = 0.999) -> None:
    """16 bits: float64 rounded once, another number than the golden's only next to a tie. 32 bits: likewise, but where
    a / rho is rounded before the scale a tie may move y by two. 64 bits: two ulps, what is carried along makes it none.
    """
    apart = ulps(to_numpy(got), want)
    assert apart.max(initial=0) <= (most if most is not None else 1 if want.dtype.itemsize == 2 else 2)
    assert (apart == 0).sum() >= share * apart.size


def check_gradient(got: Any, want: Any, terms: Any, count: int) -> None:
    """One ulp of the dtype, and what float64 rounds: an operation or addition each 2^-53 of the terms' absolute sum."""
    got = to_numpy(got)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    u, tiny = dtypes.unit_roundoff(want.dtype.name), dtypes.smallest_subnormal(want.dtype.name)
    got, want = got.astype(np.float64), want.astype(np.float64)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(all="ignore"):
        near = np.abs(got - want) <= 2 * u * np.abs(want) + tiny + count * 2.0**-53 * terms
    assert (same | near).all()


def make(options: dict[str, Any], dtype: str, parameters: str, seed: int, magnitude: float = 1.0) -> Any:
    """Arguments of the golden: x, scale, bias, options; every mask has an empty row and NaN under it."""
    rng = np.random.default_rng(seed)
    shape, options = (2, 3, 4, 5), dict(options)
    axis = options.get("feature_axis", options.get("axis", -1))
    axes = sorted(a % 4 for a in (axis if isinstance(axis, tuple) else (axis,)))
    sizes = [shape[a] for a in axes]
    x = (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape[:-1] + (1,))) * magnitude).astype(dtype)
    scale, bias = (rng.standard_normal(sizes).astype(parameters) for _ in range(2))
    if "residual" in options:
        options["residual"] = (rng.standard_normal(shape) * magnitude).astype(options["residual"])
    if "mask" in options:
        mask = rng.random(options["mask"]) > 0.3
        mask[-1] = False
        options["mask"] = mask
        x = np.where(np.broadcast_to(mask, shape), x, np.asarray(np.nan, dtype)).astype(dtype)
    return x, scale, bias, options


def torch_options(options: dict[str, Any]) -> dict[str, Any]:
    converted = {name: to_torch(value) for name, value in options.items()}
    if "out_dtype" in options:
        converted["out_dtype"] = getattr(torch, options["out_dtype"])
    return converted


def magnitudes_of_terms(x: Any, scale: Any, dy: Any, variant: Any, options: dict[str, Any]) -> Any:
    """The sums of absolute values of the terms of dx, dscale and dbias (from the equations, in float64)."""
    if (residual := options.get("residual")) is not None:
        x = golden.rms_norm(x, residual=residual)[1]
    kept = {name: options[name] for name in ("axis", "mask", "partial") if name in options}
    chosen = rmsnorm.Variant.get(variant)
    axis = options.get("axis", -1)
    axes = tuple(a % 4 for a in (axis if isinstance(axis, tuple) else (axis,)))
    _, inverse = golden.rms_norm(x.astype(np.float64), variant=chosen, return_inverse_rms=True, **kept)
    mask = np.broadcast_to(options.get("mask", True), x.shape)
    a = np.where(mask, np.abs(x.astype(np.float64)), 0.0)
    v = np.where(mask, np.abs(dy.astype(np.float64)), 0.0)
    feature = options.get("feature_axis", axis)
    features = tuple(f % 4 for f in (feature if isinstance(feature, tuple) else (feature,)))
    gain = np.abs(chosen.scale_offset + scale.astype(np.float64))
    gain = gain.reshape([size if i in features else 1 for i, size in enumerate(x.shape)])
    normalised = a * inverse
    if chosen.statistic == "variance":
        normalised = normalised + normalised.sum(axes, keepdims=True)
    k = max(1, chosen.replace(partial=options.get("partial")).counted(int(np.prod([x.shape[i] for i in axes]))) // 4)
    slope = 1.0
    if chosen.eps_position == "outside":
        slope = 1 / np.maximum(1 - chosen.eps * inverse, 2.0**-52)
    u = v * gain
    dx = inverse * (u + normalised * slope * (u * normalised).sum(axes, keepdims=True) / k)
    shared = tuple(i for i in range(4) if i not in features)
    return dx, (v * normalised).sum(shared), v.sum(shared)


@pytest.mark.parametrize("dtype", MAGNITUDES)
@pytest.mark.parametrize("variant", rmsnorm.PRESETS)
def test_every_variant_is_the_golden(variant: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    for magnitude, parameters in itertools.product(MAGNITUDES[dtype], MAGNITUDES):
        x = (rng.standard_normal((32, 33)) * magnitude).astype(dtype)
        x[3] = 0
        scale, bias = (rng.standard_normal(33).astype(parameters) for _ in range(2))
        tiny, double = magnitude < 1e-10, "float64" in (dtype, parameters)
        if tiny and double and dtype != "float64" and rmsnorm.PRESETS[variant].rounding == "before_scale":
            continue  # x / sqrt(1e-6) is 1000 x but for 2e-17: of 128 float32 numbers one is a tie to float64
        # the floor of the clamp and the mean of the variance are rounded; and 1000 x again
        uncarried = double and variant in ("x_transformers", "keras_rms_scaling")
        share = 0.6 if uncarried else 0.99 if tiny and dtype == "float32" else 0.999
        # with a bias: float64 does not hold it and 1e-27 as well, nor what a mean not carried along leaves of their sum
        for b in (None,) if tiny or (double and variant == "keras_rms_scaling") else (bias, None):
            want = golden.rms_norm(x, scale, b, variant=variant)
            check_values(rms_norm(to_torch(x), to_torch(scale), to_torch(b), variant=variant), want, share=share)
    check_values(rms_norm(to_torch(x), variant=variant), golden.rms_norm(x, variant=variant), share=share)


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
        check_values(got[-1], want[-1], share=0.3)  # 1 / rho in float64 is not carried along
        for g, w in zip(got[:-1], want[:-1], strict=True):
            check_values(g, w, share=0.999 if carried else 0.9)


def by_vjp(dy: Any, arrays: list[Any], options: dict[str, Any]) -> Any:
    return rms_norm_vjp(dy, *arrays, **options)


def by_autograd(dy: Any, arrays: list[Any], options: dict[str, Any]) -> Any:
    leaves = [array.clone().requires_grad_() for array in arrays]
    y = rms_norm(*leaves, **options)
    y = y[0] if isinstance(y, tuple) else y
    return torch.autograd.grad(y, leaves, dy.to(y.dtype))


def by_func(dy: Any, arrays: list[Any], options: dict[str, Any]) -> Any:
    def first(*args: Any) -> Any:
        y = rms_norm(*args, **options)
        return y[0] if isinstance(y, tuple) else y

    y, pull_back = torch.func.vjp(first, *arrays)
    return pull_back(dy.to(y.dtype))


@pytest.mark.parametrize("dtype", MAGNITUDES)
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
            got = gradients(to_torch(dy), [*map(to_torch, (x, scale, bias))], {**torch_options(options), "variant": variant})
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
        for g, w in zip(by_func(to_torch(dy), [*map(to_torch, (x, scale, bias))], {"variant": "llama"}), want, strict=True):
            apart = ulps(to_numpy(g), w)
            assert apart.max() <= 1 and (apart == 0).mean() >= 0.999  # noqa: PT018


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
    for values in (got, direct):
        for g, w in zip(values, want, strict=True):
            assert ulps(to_numpy(g), w).max() <= 1  # autograd adds dh after the rounding of dx to float32
    assert h.dtype == torch.float32
    only = torch.autograd.grad(rms_norm(*leaves[:3], residual=leaves[3])[1].sum(), leaves[3])[0]
    assert torch.equal(only, torch.ones_like(only))


DIFFERENTIABLE = {
    "plain": {},
    "image": {"axis": (1, 2), "feature_axis": 0},
    "partial": {"partial": 0.5},
    "mask": {"mask": True},
    "mask and eps 0": {"mask": True, "eps": 0.0},
    "outside": {"variant": "zhang_torch", "eps": 0.3},
    "clamp": {"variant": "x_transformers", "eps": 3.0},
    "variance": {"variant": "keras_rms_scaling"},
    "offset": {"variant": "gemma", "eps": 0.5},
    "before scale": {"variant": "llama", "mask": True, "partial": 0.5},
}


def small(name: str) -> tuple[Any, list[Any]]:
    """A function of (x, scale, bias) and its arguments, in float64."""
    options: dict[str, Any] = dict(DIFFERENTIABLE[name])
    generator = torch.Generator().manual_seed(0)
    features = (2,) if "feature_axis" in options else (4,)
    arrays = [torch.randn(s, dtype=torch.float64, generator=generator) for s in ((2, 3, 4), features, features)]
    if "mask" in options:
        options["mask"] = torch.rand((2, 3, 4), generator=generator) > 0.3
        options["mask"][0, 1] = False

    def function(*args: Any) -> Any:
        return rms_norm(*args, **options)

    return function, arrays


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # forward_ad's own decompositions
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradcheck(name: str) -> None:
    """Against central differences: first and second derivatives, forward, backward, batched, forward over backward."""
    function, arrays = small(name)
    leaves = [array.clone().requires_grad_() for array in arrays]
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(
        function, leaves, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True
    )


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_jacobians_and_hessians(name: str) -> None:
    """jacrev, jacfwd, vmap over vjp and jvp give the golden's Jacobian; four nestings give one Hessian."""
    function, arrays = small(name)
    options = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in _options_of(function).items()}
    flat = arrays[0].numel()
    basis = torch.eye(flat, dtype=torch.float64).reshape(flat, 2, 3, 4)
    values = [to_numpy(array) for array in arrays]
    rows = [golden.rms_norm_vjp(to_numpy(v), *values, **options) for v in basis]
    columns = [golden.rms_norm_jvp((*values,), (to_numpy(v),), **options) for v in basis]
    want = np.stack([row[0].ravel() for row in rows])
    near = {"rtol": 2.0**-44, "atol": 2.0**-44}  # 2 n + 32 operations of 2^-53 on terms of at most 1 / rho < 10
    np.testing.assert_allclose(np.stack([c.ravel() for c in columns], 1), want, **near)
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        jacobians = transform(function, (0, 1, 2))(*arrays)
        np.testing.assert_allclose(jacobians[0].reshape(flat, flat), want, **near)
        for i in (1, 2):
            np.testing.assert_allclose(jacobians[i].reshape(flat, -1), np.stack([r[i].ravel() for r in rows]), **near)
    weight = torch.linspace(-1, 2, flat, dtype=torch.float64).reshape(2, 3, 4)

    def loss(x: Any) -> Any:
        return (function(x, *arrays[1:]) * weight).sum()

    eager = torch.autograd.functional.hessian(loss, arrays[0])
    assert eager.abs().max() > 0.1
    nestings = [f(g(loss)) for f in (torch.func.jacrev, torch.func.jacfwd) for g in (torch.func.jacrev, torch.func.jacfwd)]
    for hessian in (*nestings, torch.func.hessian(loss)):
        np.testing.assert_allclose(hessian(arrays[0]), eager, rtol=2.0**-40, atol=2.0**-40)


def _options_of(function: Any) -> dict[str, Any]:
    return next(cell.cell_contents for cell in function.__closure__ if isinstance(cell.cell_contents, dict))


def test_a_second_derivative_needs_the_recomputed_statistic(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the saved 1 / rho held constant gradgradcheck fails: the test above can tell."""
    function, arrays = small("plain")
    leaves = [array.clone().requires_grad_() for array in arrays]
    monkeypatch.setattr(functional, "statistic", lambda *args: _detached(arithmetic.statistic(*args)))
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradgradcheck(function, leaves)


def _detached(row: Any) -> Any:
    return row._replace(inverse_rms=row.inverse_rms.detach())


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_forward_over_backward_without_create_graph() -> None:
    function, arrays = small("mask")
    weight, direction = torch.rand(2, 2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with forward_ad.dual_level():
        x = forward_ad.make_dual(arrays[0].clone().requires_grad_(), direction)
        (gradient,) = torch.autograd.grad((function(x, *arrays[1:]) * weight).sum(), x)
        tangent = forward_ad.unpack_dual(gradient).tangent
    want = torch.func.jvp(torch.func.grad(lambda x: (function(x, *arrays[1:]) * weight).sum()), (arrays[0],), (direction,))
    np.testing.assert_allclose(tangent, want[1], rtol=2.0**-40, atol=2.0**-40)


def test_half_second_derivatives() -> None:
    """A Hessian-vector product in bf16 is that of float64, rounded: three times at most, in dx, in it and in a sum."""
    x, v = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    def product(x: Any, v: Any) -> Any:
        x = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(rms_norm(x).pow(2).mul(v).sum(), x, create_graph=True)
        return torch.autograd.grad((dx * v).sum(), x)[0].double()

    want = product(x.double(), v.double())
    # y, y^2 v, dx and dx v are rounded to bf16: four roundings, which cancellation over 64 terms enlarges
    assert (product(x, v) - want).abs().max() <= 4 * 2.0**-8 * 8 * want.abs().max()


@pytest.mark.parametrize("variant", ["standard", "llama", "zhang_torch", "x_transformers", "keras_rms_scaling"])
def test_vmap(variant: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((3, 2, 4, 8), generator=generator)
    scale, mask = torch.randn((3, 8), generator=generator), torch.rand((3, 4, 8), generator=generator) > 0.3

    def one(x: Any, scale: Any, mask: Any) -> Any:
        return rms_norm(x, scale, variant=variant, mask=mask, partial=0.6)

    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        a, g = x.to(dtype), scale.to(dtype)
        want = torch.stack([one(a[i], g[i], mask[i]) for i in range(3)])
        assert torch.equal(torch.vmap(one)(a, g, mask), want)
        assert torch.equal(torch.vmap(torch.vmap(one, (0, None, None)))(a, g, mask), want)
        assert torch.equal(torch.vmap(one, (1, None, None))(a, g[0], mask[0]), one(a.transpose(0, 1), g[0], mask[0]))
        per_sample = torch.vmap(torch.func.grad(lambda g, a, m: one(a, g, m).square().sum()))(g, a, mask)
        for i in range(3):
            leaf = g[i].clone().requires_grad_()
            (alone,) = torch.autograd.grad(one(a[i], leaf, mask[i]).square().sum(), leaf)
            assert ulps(to_numpy(per_sample[i]), to_numpy(alone)).max() <= (16 if dtype == torch.float64 else 1)


def test_backward_keeps_only_x_the_parameters_the_mask_and_the_statistic() -> None:
    for dtype, residual, masked in itertools.product((torch.bfloat16, torch.float64), (False, True), (False, True)):
        x, r = (torch.randn(6, 16, dtype=dtype).requires_grad_() for _ in range(2))
        scale, bias = (torch.randn(16, dtype=dtype).requires_grad_() for _ in range(2))
        mask = torch.rand(6, 16) > 0.3 if masked else None
        saved: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            out = rms_norm(x, scale, bias, residual=r if residual else None, mask=mask, variant="llama")
        kept = {tensor.data_ptr(): tensor for tensor in saved}
        h = out[1] if residual else x
        expected = [h, scale, *([mask] if masked else [])]
        assert all(tensor.data_ptr() in kept for tensor in expected)
        rest = [tensor for at, tensor in kept.items() if at not in {t.data_ptr() for t in expected}]
        assert [tuple(tensor.shape) for tensor in rest] == [(6, 1)]


def test_only_what_is_asked_for() -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(s, generator=generator) for s in ((3, 8), (8,), (8,))]
    full = by_autograd(torch.ones(3, 8), values, {})
    for chosen in itertools.product((False, True), repeat=3):
        leaves = [v.clone().requires_grad_(c) for v, c in zip(values, chosen, strict=True)]
        y = rms_norm(*leaves)
        assert y.requires_grad == any(chosen)
        if y.requires_grad:
            y.sum().backward()
        for leaf, wanted, c in zip(leaves, full, chosen, strict=True):
            assert torch.equal(leaf.grad, wanted) if c else leaf.grad is None
    leaf = values[0].clone().requires_grad_()
    _, inverse_rms = rms_norm(leaf, return_inverse_rms=True)
    assert not inverse_rms.requires_grad


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
            check_values(g, w)
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
                gradients(torch.ones(3, 4, 6), [values, torch.ones(6), torch.ones(6)], options) for values in (x, spoilt)
            )
            for c, d in zip(clean, dirty, strict=True):
                assert torch.equal(c, d)
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
            check_values(g, w)
        want = golden.rms_norm_vjp(x, x, scale, **options)
        for gradients in (by_vjp, by_autograd, by_func):
            for g, w in zip(gradients(to_torch(x), [to_torch(x), to_torch(scale)], torch_options(options)), want, strict=False):
                assert g.shape == w.shape
                # eps = 1e-6 of 4 is left of x x / rho^2 - 1: what float64 rounds there is 2^-53 / 1e-6 of it
                np.testing.assert_allclose(to_numpy(g).astype(np.float64), w.astype(np.float64), rtol=2.0**-7, atol=1e-15)


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


def test_meta_tensors_have_the_shapes() -> None:
    for dtype, masked in itertools.product((torch.float64, torch.bfloat16), (False, True)):
        x = torch.empty((4, 8), device="meta", dtype=dtype, requires_grad=True)
        scale = torch.empty(8, device="meta", requires_grad=True)
        mask = torch.empty((4, 1), device="meta", dtype=torch.bool) if masked else None
        y, inverse_rms = rms_norm(x, scale, mask=mask, partial=0.3, variant="llama", return_inverse_rms=True)
        assert (y.device.type, y.shape, inverse_rms.shape) == ("meta", (4, 8), (4, 1))
        y.sum().backward()
        assert (x.grad.shape, x.grad.dtype, scale.grad.dtype) == ((4, 8), dtype, torch.float32)


def test_one_rounding_to_16_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(50_000, dtype=torch.float64, generator=generator) * torch.logspace(-50, 40, 50_000)
    tie = torch.randn(50_000, generator=generator).bfloat16().double() * (1 + 2.0**-9)
    tie = tie * (1 + 1e-14 * torch.randn(50_000, dtype=torch.float64, generator=generator))
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-60, -1e-60, 1e300, 65519.999999999, 65520.0, 3.3961775292304957e38]
    values = torch.cat([wide, tie, torch.tensor(edges, dtype=torch.float64)])
    for dtype in dtypes.HALF:
        with np.errstate(all="ignore"):
            want = DoubleDouble(values.numpy()).round(dtype)
        got = cast(values, dtype)
        assert ulps(to_numpy(got), want).max() == 0
        assert ulps(to_numpy(values.to(getattr(torch, dtype))), want).max() > 0  # the values can tell
        assert torch.equal(got.signbit(), torch.from_numpy(np.signbit(want)) | got.isnan() & got.signbit())
        for function in (cast, rounded):
            value, tangent = torch.func.jvp(lambda x, f=function: f(x, dtype), (values,), (torch.full_like(values, 0.5),))
            assert torch.equal(value.double().nan_to_num(7), got.double().nan_to_num(7))
            assert torch.equal(value.signbit(), got.signbit())
            assert (tangent[: -len(edges)] == 0.5).all()
    fine = torch.tensor(1 + 2.0**-40, dtype=torch.float64)
    (through,) = torch.func.vjp(lambda x: rounded(x, "bfloat16"), torch.ones((), dtype=torch.float64))[1](fine)
    assert through == fine


def test_errors_name_the_tensor() -> None:
    x = torch.ones(4, 16)
    for arguments, error, words in (
        ((x.int(),), TypeError, "x has dtype int32, expected float16"),
        ((x.to(torch.complex64),), TypeError, "x has dtype complex64, expected float16"),
        ((x, torch.ones(16, dtype=torch.int64)), TypeError, "scale has dtype int64, expected float16"),
        ((x, torch.ones(8)), ValueError, r"scale has shape \(8,\), expected \(16,\) to match axis -1 of x f32\[4, 16\]"),
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
    with pytest.raises(TypeError, match="dy is .* expected a torch.Tensor"):
        rms_norm_vjp((x, x), x)


@pytest.fixture
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inside the compiler
def test_compile_the_function_itself() -> None:
    """Options that are arguments become symbols with dynamic=True; one graph serves every size of row and batch."""
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(rms_norm, fullgraph=True, dynamic=True, backend=counter)
    x = torch.randn((4, 8), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for a in (x, x[:3], torch.cat([x, x], 1)):
        assert torch.equal(compiled(a), rms_norm(a))
    assert counter.frame_count == 1
    assert torch.equal(compiled(x, axis=0), rms_norm(x, axis=0))
    assert torch.equal(compiled(x, variant="llama", eps=1e-3), rms_norm(x, variant="llama", eps=1e-3))
    with pytest.raises(Exception, match="axis is 2, expected between -2 and 1"):
        compiled(x, axis=2)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("variant", "dtype", "backend"),
    [("llama", "bfloat16", "inductor"), ("zhang_torch", "float64", "aot_eager"), ("torch", "float16", "aot_eager")],
)
def test_compile(variant: str, dtype: str, backend: str) -> None:
    """Compiled, the values are those of the golden, 16-bit ones too, and the gradients those of the composite."""

    def function(x: Any, scale: Any, mask: Any, residual: Any) -> Any:
        return rms_norm(x, scale, variant=variant, mask=mask, residual=residual, partial=0.6, return_inverse_rms=True)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    rng = np.random.default_rng(0)
    for rows in (64, 33):
        x, residual = (rng.standard_normal((rows, 48)).astype(dtype) for _ in range(2))
        scale, mask = rng.standard_normal(48).astype(dtype), rng.random((rows, 48)) > 0.3
        mask[1] = False
        want = golden.rms_norm(
            x, scale, variant=variant, mask=mask, residual=residual, partial=0.6, return_inverse_rms=True
        )
        leaves = [to_torch(value).requires_grad_() for value in (x, scale, residual)]
        got = compiled(*leaves[:2], to_torch(mask), leaves[2])
        for g, w in zip(got, want, strict=True):
            check_values(g, w)
        gradients = torch.autograd.grad(got[0].square().sum() + got[1].sum(), leaves)
        eager = function(*leaves[:2], to_torch(mask), leaves[2])
        expected = torch.autograd.grad(eager[0].square().sum() + eager[1].sum(), leaves)
        for g, w in zip(gradients, expected, strict=True):
            # both round once at the end, but dx is rounded before dh is added in one and may be after in the other
            bound = 4 * dtypes.unit_roundoff(dtype) if dtype != "float64" else 2.0**-46
            assert (g - w).abs().max() <= bound * w.abs().max()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any, mask: Any) -> Any:
            return rms_norm(x, variant="llama", mask=mask, partial=0.5)

    x = torch.randn((4, 8), generator=torch.Generator().manual_seed(0)).bfloat16()
    mask = torch.ones((4, 8), dtype=torch.bool)
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(Model(), (x, mask), dynamic_shapes=({0: batch}, {0: batch}), strict=strict)
    longer = torch.cat([x, 2 * x])
    mask = longer > -0.5
    assert torch.equal(program.module()(longer, mask), Model()(longer, mask))


def torch_rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """torch.nn.functional.rms_norm, by ours."""
    axes = tuple(range(-len(normalized_shape), 0))
    if weight is not None and tuple(weight.shape) != tuple(normalized_shape) or x.shape[axes[0] :] != normalized_shape:
        raise RuntimeError("the shapes are for the layer to compare")
    return rms_norm(x, weight, variant="torch", eps=eps, axis=axes)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_the_samples_of_pytorch(dtype: str) -> None:
    """PyTorch's own OpInfo samples of rms_norm against its own reference.

    Not applicable: eps < 0 (out of the domain here), complex dtypes (rejected here; there x^2 stands for |x|^2), and
    the reference's default eps for 16 bits, machine eps of the input dtype, where the operator takes that of f32.
    """
    pytest.importorskip("expecttest")
    from torch.testing._internal import common_methods_invocations as invocations

    torch.manual_seed(0)
    info = next(op for op in invocations.op_db if op.name == "nn.functional.rms_norm")
    run = 0
    for sample in info.sample_inputs("cpu", getattr(torch, dtype), requires_grad=True):
        eps = sample.kwargs.get("eps")
        if eps is not None and eps < 0:
            with pytest.raises(ValueError, match="eps is -0.5, expected a finite number >= 0"):
                torch_rms_norm(sample.input, *sample.args, **sample.kwargs)
            continue
        got = torch_rms_norm(sample.input, *sample.args, **sample.kwargs)
        if eps is None:
            eps = torch.finfo(torch.float64 if dtype == "float64" else torch.float32).eps
        x, *weight = (t.detach().double().numpy() for t in (sample.input, *sample.args[1:]))
        want = invocations.reference_rms_norm(x, sample.args[0], *weight, eps=eps)
        # the reference rounds a dozen times in float64, the result once
        u = 2 * dtypes.unit_roundoff(dtype) if dtype != "float64" else 12 * 2.0**-53
        np.testing.assert_allclose(got.detach().double().numpy(), want, rtol=u, atol=0)
        built_in = torch.nn.functional.rms_norm(sample.input, *sample.args, **sample.kwargs)
        assert (got.dtype, got.shape, got.stride()) == (built_in.dtype, built_in.shape, built_in.stride())
        if dtype == "float64" and sample.input.numel():
            leaves = [sample.input, *sample.args[1:]]
            x = [leaf.detach().clamp(-9, 9).requires_grad_() for leaf in leaves]  # differences of 1e-6 at 1000 say little
            assert torch.autograd.gradcheck(lambda x, *w, s=sample.args[0]: torch_rms_norm(x, s, *w, eps), x)
        run += 1
    assert run == 5
