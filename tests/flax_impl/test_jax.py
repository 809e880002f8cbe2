"""The JAX functions in XLA's operations: the golden's numbers, and what differentiation keeps.

In the kernels, which serve one CPU, they are in test_flax_rows.py and all other tests.

In 32 bits y is the golden's, bit for bit: float64 is wrong about 1 of 2^29 float32 roundings. In 16 bits it may be the
neighbour where the golden is next to a tie. In float64 it is within four units of the terms.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
from checks import check_near
from kit import FEW, failures, named

from rmsnorm.accuracy.ulps import ulps

jax = pytest.importorskip("jax")

from jax import numpy as jnp  # noqa: E402
from jax._src.ad_checkpoint import saved_residuals  # noqa: E402

from rmsnorm import PRESETS, cpu, numpy_impl  # noqa: E402
from rmsnorm.accuracy.terms import term_sizes  # noqa: E402
from rmsnorm.flax_impl import private, rounding  # noqa: E402
from rmsnorm.flax_impl.functional import rms_norm, rms_norm_vjp  # noqa: E402
from rmsnorm.flax_impl.private import enable_x64  # noqa: E402
from rmsnorm.numpy_impl.double_double import DoubleDouble  # noqa: E402
from rmsnorm.parity.backends import open_backend  # noqa: E402

FLOATS = ["float16", "bfloat16", "float32", "float64"]
MAGNITUDES = {"float16": [1, 100, 1e-3], "float64": [1, 1e20, 1e-30, 1e300, 1e-300]}


@pytest.fixture(autouse=True, scope="module")
def _in_operations() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "missing", lambda *_: "there are none")
        jax.clear_caches()
        yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with enable_x64(True), jax.numpy_dtype_promotion("strict"):
        yield


def normal(seed: int, *shape: int, dtype: str = "float64") -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def assert_golden(got: Any, want: np.ndarray, terms: Any = None) -> None:
    """``terms``: of the product and the bias, where y is float64."""
    distance = ulps(np.asarray(got), want)
    if want.dtype == np.float64:
        assert got.dtype == np.float64
        assert np.all(abs(got - want) <= 4 * np.spacing(terms))
    elif want.dtype == np.float32:
        assert np.max(distance, initial=0) == 0
    else:
        assert np.max(distance, initial=0) <= 1
        assert np.sum(distance > 0) <= 1 + 1e-3 * distance.size


def terms_of_y(x: np.ndarray, scale: np.ndarray, bias: np.ndarray, variant: Any) -> np.ndarray:
    return term_sizes(x, scale, bias, variant=variant, dy=x, tangents=(x, None, None))["y"]


def rows(dtype: str, width: int, seed: int = 0) -> np.ndarray:
    scales = np.repeat(MAGNITUDES.get(dtype, [1, 1e20, 1e-30]), 12)[:, None]
    return (normal(seed, scales.size, width) * scales).astype(dtype)


# presets that differ in more than eps
DISTINCT = {
    replace(preset, name="", eps=0, scale_name="", source="", bias=False): name for name, preset in PRESETS.items()
}


@pytest.mark.parametrize("variant", [*DISTINCT.values(), "torch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])  # float16 goes the way of bfloat16
def test_forward_is_the_goldens(variant: str, dtype: str) -> None:
    parameters = FLOATS[1 + (list(PRESETS).index(variant) + FLOATS.index(dtype)) % 3]
    width = 11 if dtype == "float64" else 41
    x, scale, bias = rows(dtype, width), normal(1, width, dtype=parameters), normal(2, width, dtype=parameters)
    want = numpy_impl.rms_norm(x, scale, bias, variant=variant)
    assert_golden(rms_norm(x, scale, bias, variant=variant), want, terms_of_y(x, scale, bias, variant))


@pytest.mark.parametrize("run", FEW, ids=named)
def test_in_operations_it_is_the_goldens(run: Any) -> None:
    """With the derivatives by JAX and by the formulas, within the bounds of the kit: float32 is between 16 bits."""
    _, implementation = open_backend("flax", "cpu")
    failed, _ = failures(implementation, [run])
    assert not failed, "\n".join(failed)


def test_without_jit_and_within_another() -> None:
    x, scale, bias = rows("float64", 7), normal(1, 7), normal(2, 7)
    variant = PRESETS["llama"]
    want, terms = numpy_impl.rms_norm(x, scale, bias, variant=variant), terms_of_y(x, scale, bias, variant)
    with jax.disable_jit():
        assert_golden(rms_norm(x, scale, bias, variant=variant), want, terms)
    assert_golden(jax.jit(functools.partial(rms_norm, variant=variant))(x, scale, bias), want, terms)


@pytest.mark.parametrize(
    ("dtype", "partial", "width", "axis"),
    [
        ("bfloat16", 0.9, 96, -1), ("bfloat16", 0.5, 41, -1), ("bfloat16", 0.3, 96, 0), ("bfloat16", 0.0625, 41, -1),
        ("float32", 0.9, 41, -1), ("float32", 0.5, 96, 0), ("float32", 0.3, 96, -1), ("float32", 0.0625, 96, 0),
        ("float16", 0.3, 41, -1),
    ],
)  # fmt: skip
def test_of_a_part_only_what_counts_enters(dtype: str, partial: float, width: int, axis: int) -> None:
    x, options = rows(dtype, width), {"partial": partial, "axis": axis, "eps": 0.0}
    x[:3, -1] = np.nan, np.inf, -np.inf
    x = np.ascontiguousarray(np.moveaxis(x, -1, axis))
    assert_golden(jax.jit(functools.partial(rms_norm, **options))(x), numpy_impl.rms_norm(x, **options))
    ordinary = x.take(range(3, 12), 1 + axis)  # rows whose squares float32 holds
    assert_golden(rms_norm(ordinary, **options), numpy_impl.rms_norm(ordinary, **options))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("magnitude", [1e38, 1e-36])
def test_at_the_ends_of_the_range(dtype: str, magnitude: float) -> None:
    """1 / rho of the one is subnormal in float32, its inverse next to the largest of the other."""
    width = 21
    x, da = (np.random.default_rng(0).uniform(0.5, 3.0, (2, 9, width)) * magnitude).astype(dtype)
    scale, dy = normal(1, width, dtype="float32"), normal(2, 9, width, dtype=dtype)
    tangents = da, normal(4, width, dtype="float32"), None
    options: dict[str, Any] = {"variant": "paper"}
    assert_golden(rms_norm(x, scale, **options), numpy_impl.rms_norm(x, scale, **options))
    units = term_sizes(x, scale, None, dy=dy, tangents=tangents, **options)
    error = 2.0**-24 * (2 * np.sqrt(width) + 3 + 22)  # of the terms
    _, pull = jax.vjp(lambda x, scale: rms_norm(x, scale, **options), jnp.asarray(x), jnp.asarray(scale))
    dx, dscale = pull(jnp.asarray(dy))
    want = numpy_impl.rms_norm_vjp(dy, x, scale, **options)
    if magnitude < 1:  # of 1e38 it is subnormal
        check_near(np.asarray(dx), want[0], error * units["dx"])
    check_near(np.asarray(dscale), want[1], error * units["dscale"])
    _, got = jax.jvp(lambda x, scale: rms_norm(x, scale, **options), (x, scale), tangents[:2])
    want = numpy_impl.rms_norm_jvp((x, scale, None), tangents, **options)
    check_near(np.asarray(got), want, error * units["jvp"])


def arguments(*shape: int, dtype: str = "float64") -> tuple[Any, ...]:
    sizes = [shape, shape[-1:], shape[-1:]]
    return tuple(jnp.asarray(normal(seed, *size, dtype=dtype)) for seed, size in enumerate(sizes))


def test_inverse_rms_is_constant() -> None:
    x = arguments(2, 5)[0]
    y, tangent = jax.jvp(lambda x: rms_norm(x, return_inverse_rms=True)[1], (x,), (x,))
    assert bool(jnp.all(y > 0))
    assert not bool(jnp.any(tangent))


def test_next_to_underflow() -> None:
    """Two ulps: the division, rho and the product round, and what they round off would be subnormal."""
    x, scale = normal(0, 48, 9) * 1e-300, normal(1, 9)
    for variant in ("standard", "zhang_torch"):
        want = numpy_impl.rms_norm(x, scale, variant=variant)
        assert np.max(ulps(np.asarray(rms_norm(x, scale, variant=variant)), want)) <= 2


@pytest.mark.parametrize("axis", [0, -1])
def test_dy_times_the_gain_may_leave_the_range(axis: int) -> None:
    """Where dx does not. By the formula; within eight units of the largest, as every operation is in float64."""
    x, scale, dy = normal(0, 6, 7) * 1e300, normal(1, 6 if axis == 0 else 7) * 1e200, normal(2, 6, 7) * 1e300
    results = rms_norm_vjp(dy, x, scale, axis=axis)[:2], numpy_impl.rms_norm_vjp(dy, x, scale, axis=axis)[:2]
    for got, want in zip(*results, strict=True):
        assert np.all(np.isfinite(want))
        np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-50 * abs(want).max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("masked", [False, True])
def test_what_is_kept(dtype: str, masked: bool) -> None:
    x, scale, bias = arguments(8, 64, dtype=dtype)
    mask = jnp.asarray(np.random.default_rng(3).uniform(size=x.shape) < 0.6) if masked else None
    want = [("float64", (8, 1)), (dtype, scale.shape), (dtype, x.shape)] + [("bool", x.shape)] * masked
    kept = [aval for aval, _ in saved_residuals(functools.partial(rms_norm, mask=mask), x, scale, bias)]
    _, pull = jax.vjp(functools.partial(rms_norm, mask=mask), x, scale, bias)
    for found in (kept, jax.tree.leaves(pull)):
        assert sorted((leaf.dtype.name, leaf.shape) for leaf in found) == sorted(want)


def test_without_x64() -> None:
    args = arguments(3, 8, dtype="bfloat16")

    def everything() -> Any:
        value = lambda *args: jnp.sum(jnp.sin(rms_norm(*args, variant="llama").astype(jnp.float32)))  # noqa: E731
        y, inverse = rms_norm(*args, return_inverse_rms=True)
        gradients = jax.grad(value, (0, 1, 2))(*args), jax.grad(jax.jit(value))(*args)
        mapped = jax.vmap(jax.jvp, (None, 0, 0))(lambda x: rms_norm(x), (args[0],), (args[0],))
        second = jax.jit(jax.jacrev(jax.grad(jax.jit(value), 1), 0))(*args)
        return y, inverse, gradients, mapped, second, rms_norm_vjp(y, *args)

    wide = everything()
    with enable_x64(False):
        narrow = everything()
        assert rms_norm(np.ones(3)).dtype == jnp.float32
        with pytest.raises(ValueError, match=r"out_dtype is 'float64', expected at most 32 bits while x64 is off"):
            rms_norm(args[0], out_dtype="float64")
    for one, other in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_conversions_round_once(dtype: str) -> None:
    """All numbers of 16 bits (of 32 some), what lies half-way between two, and the neighbours of that."""
    integer = {2: np.int16, 4: np.int32}[jnp.dtype(dtype).itemsize]
    rng = np.random.default_rng(0)
    bits = np.arange(-(2**15), 2**15) if integer is np.int16 else rng.integers(-(2**31), 2**31, 2**16)
    narrow = np.concatenate([bits, rng.integers(0, 2**24, 2**10)]).astype(integer).view(dtype)
    with np.errstate(invalid="ignore"):
        known, exact = ~np.isnan(narrow), narrow.astype(np.float64)
    widened = np.asarray(rounding.double(jnp.asarray(narrow)))
    np.testing.assert_array_equal(widened[known].view(np.int64), exact[known].view(np.int64))
    assert np.isnan(widened[~known]).all()

    finite = np.sort(exact[np.isfinite(exact)])
    middle = (finite[1:] + finite[:-1]) / 2
    wide = [middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf), finite, [np.inf, -np.inf, 1e300, -0.0]]
    wide = np.concatenate(wide)
    with np.errstate(all="ignore"):
        want = DoubleDouble(wide).round(dtype)
    cast = functools.partial(rounding.cast, dtype=dtype)
    transposed = jax.linear_transpose(rounding.double, jax.ShapeDtypeStruct(wide.shape, dtype))
    for got in (jax.jit(cast)(wide), jax.jit(transposed)(wide)[0], jax.jvp(cast, (wide,), (wide,))[1]):
        np.testing.assert_array_equal(np.asarray(got).view(integer), want.view(integer))
    rounded = jax.jit(functools.partial(rounding.rounded, dtype=dtype))
    np.testing.assert_array_equal(rounded(wide), want.astype(np.float64))
    if dtype != "float32":
        with np.errstate(all="ignore"):
            single = wide.astype(np.float32)
            want = DoubleDouble(single.astype(np.float64)).round(dtype)
        kept = abs(want.astype(np.float64)) >= 2.0**-126
        np.testing.assert_array_equal(np.asarray(rounded(single))[kept], want.astype(np.float32)[kept])
        want = DoubleDouble(wide).round(dtype)
    there_and_back = jax.jit(lambda x: rounding.double(cast(x)) + 0.0)(wide)
    np.testing.assert_array_equal(there_and_back, want.astype(np.float64))


@pytest.mark.parametrize("function", [rms_norm, functools.partial(rms_norm_vjp, jnp.ones((3, 8)))])
def test_an_eager_call_with_a_residual_runs_two_compiled_functions(function: Any) -> None:
    """One for the sum and one for the rest: each operation by itself would pass over memory once more."""
    x = jnp.ones((3, 8))
    equations = jax.make_jaxpr(lambda x: function(x, residual=x))(x).eqns
    assert [equation.primitive.name for equation in equations] == ["jit", "jit"]


def test_no_number_is_an_argument_of_what_jax_compiles_by_itself() -> None:
    """JAX 0.7 makes it 32 bits if the lowering is not inside of enable_x64: see rounding.where."""
    number = re.compile(r"-?[0-9.e*-]+")
    calls = [
        (path.name, ast.unparse(node), [ast.unparse(value) for value in node.args])
        for path in Path(private.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("jnp.where", "jnp.clip", "jnp.select")
    ]
    assert calls
    assert not [call for *call, values in calls if any(map(number.fullmatch, values))]
