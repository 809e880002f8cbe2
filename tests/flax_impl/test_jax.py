"""The recipe in JAX, as XLA compiles it: the golden's numbers within bounds, and what differentiation keeps.

In the kernels, which serve one CPU, the functions are in test_flax_rows.py and all other tests.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
from kit import FEW, failures, named

jax = pytest.importorskip("jax")

from jax import numpy as jnp  # noqa: E402
from jax._src.ad_checkpoint import saved_residuals  # noqa: E402

from rmsnorm import Variant, cpu, numpy_impl  # noqa: E402
from rmsnorm.flax_impl.functional import forward, rms_norm, rms_norm_vjp  # noqa: E402
from rmsnorm.flax_impl.private import enable_x64  # noqa: E402
from rmsnorm.flax_impl.space import Space, rounded  # noqa: E402
from rmsnorm.parity.backends import open_backend  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _without_kernels() -> Iterator[None]:
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


@pytest.mark.parametrize("run", FEW, ids=named)
def test_it_is_the_goldens(run: Any) -> None:
    """With the derivatives by JAX and by the formulas, within the bounds of the kit."""
    _, implementation = open_backend("flax", "cpu")
    failed, _ = failures(implementation, [run])
    assert not failed, "\n".join(failed)


def test_without_jit_and_within_another() -> None:
    x, scale, bias = normal(0, 6, 7), normal(1, 7), normal(2, 7)
    want = numpy_impl.rms_norm(x, scale, bias, variant="llama")
    with jax.disable_jit():
        results = [rms_norm(x, scale, bias, variant="llama")]
    results.append(jax.jit(functools.partial(rms_norm, variant="llama"))(x, scale, bias))
    for got in results:
        np.testing.assert_allclose(got, want, rtol=2.0**-48, atol=2.0**-48)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("partial", "axis"), [(0.9, -1), (0.3, 0), (0.0625, -1)])
def test_of_a_part_only_what_counts_enters(dtype: str, partial: float, axis: int) -> None:
    x, options = normal(0, 12, 41).astype(dtype), {"partial": partial, "axis": axis, "eps": 0.0}
    x[:3, -1] = np.nan, np.inf, -np.inf
    x = np.ascontiguousarray(np.moveaxis(x, -1, axis))
    got, want = jax.jit(functools.partial(rms_norm, **options))(x), numpy_impl.rms_norm(x, **options)
    few = 2.0**-20 if dtype == "float32" else 2.0**-7
    np.testing.assert_allclose(np.float64(got), np.float64(want), rtol=few, atol=few)


DERIVATIVES = {
    "reverse": jax.jacrev,
    "forward": jax.jacfwd,
    "reverse of reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "forward of forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
    "forward of reverse": jax.hessian,
    "of a vmap": lambda f: jax.jacrev(lambda x: jax.vmap(f)(x[None])[0]),
    "of a named axis": lambda f: jax.jacrev(lambda x: jax.vmap(f, axis_name="one")(x[None])[0]),
}


@pytest.mark.parametrize("position", ["inside", "outside", "clamp"])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_at_every_magnitude_are_those_of_float64(name: str, position: str) -> None:
    """Of rows beside eps, whose powers alone leave the range of float32, and of rows far from it."""
    variant = Variant.get("standard").replace(eps_position=position, eps=1e-6)

    def norm(x: Any) -> Any:
        if name == "of a named axis":
            return forward((variant, None, None, -1, None, None), False, x, ops=Space("one"))
        return rms_norm(x, variant=variant)

    derive = jax.jit(DERIVATIVES[name](norm))
    for magnitude in (1e-10, 1e-5, 1e-3, 0.1, 1.0, 1e5, 1e12):
        x = normal(0, 5).astype("float32") * np.float32(magnitude)
        got, want = derive(x), derive(x.astype("float64"))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * abs(want).max() + 1e-37)


def arguments(*shape: int, dtype: str = "float64") -> tuple[Any, ...]:
    sizes = [shape, shape[-1:], shape[-1:]]
    return tuple(jnp.asarray(normal(seed, *size, dtype=dtype)) for seed, size in enumerate(sizes))


def test_inverse_rms_is_constant() -> None:
    x = arguments(2, 5)[0]
    y, tangent = jax.jvp(lambda x: rms_norm(x, return_inverse_rms=True)[1], (x,), (x,))
    assert bool(jnp.all(y > 0))
    assert not bool(jnp.any(tangent))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("masked", [False, True])
def test_what_is_kept(dtype: str, masked: bool) -> None:
    x, scale, bias = arguments(8, 64, dtype=dtype)
    mask = jnp.asarray(np.random.default_rng(3).uniform(size=x.shape) < 0.6) if masked else None
    want = [(dtype, array.shape) for array in (x, scale, bias)] + [("bool", x.shape)] * masked
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounded(dtype: str) -> None:
    """All numbers of 16 bits, what lies half-way between two, and the neighbours of that."""
    finite = np.arange(-(2**15), 2**15).astype(np.int16).view(dtype).astype(np.float32)
    finite = np.sort(finite[np.isfinite(finite)])
    middle = finite[1:] / 2 + finite[:-1] / 2
    wide = np.concatenate([middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf), finite, [np.inf, -0.0]])
    wide = wide[(abs(wide) >= 2.0**-126) | (wide == 0)].astype(np.float32)  # XLA takes others for 0
    with np.errstate(over="ignore"):
        want = wide.astype(dtype).astype(np.float32)
    got = np.asarray(jax.jit(functools.partial(rounded, name=dtype))(wide))
    np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))


@pytest.mark.parametrize("function", [rms_norm, functools.partial(rms_norm_vjp, jnp.ones((3, 8)))])
def test_an_eager_call_with_a_residual_runs_one_compiled_function(function: Any) -> None:
    """Each operation by itself would pass over memory once more."""
    x = jnp.ones((3, 8))
    equations = jax.make_jaxpr(lambda x: function(x, residual=x))(x).eqns
    assert [equation.primitive.name for equation in equations] == ["jit"]
