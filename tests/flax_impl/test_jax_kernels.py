"""The kernels in JAX: which programs call them, with the golden's bits; and the recipe, as XLA compiles it."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest

jax = pytest.importorskip("jax")

from flax_arrays import gradients  # noqa: E402
from jax import export  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from jax._src.ad_checkpoint import saved_residuals  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from rmsnorm import Variant, cpu, explain  # noqa: E402
from rmsnorm import numpy_impl as golden  # noqa: E402
from rmsnorm.flax_impl import kernels, rms_norm, rms_norm_vjp  # noqa: E402
from rmsnorm.flax_impl.private import enable_x64  # noqa: E402
from rmsnorm.flax_impl.space import rounded  # noqa: E402
from rmsnorm.specification.call import Spec  # noqa: E402
from rmsnorm.specification.resolve import resolve  # noqa: E402

if not cpu.is_available() or jax.default_backend() != "cpu":
    pytest.skip("no kernels for this device", allow_module_level=True)


def normal(seed: int, *shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def assert_bits(results: Any, wanted: Any) -> None:
    for one, other in zip(results, wanted, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.array_equal(one, other)  # a zero has any sign


def calls(function: Any, *arrays: Any) -> int:
    """How often the compiled program calls the kernels."""
    return jax.jit(function).lower(*arrays).as_text().count("custom_call @rmsnorm(")


def test_a_loss_of_some_arguments() -> None:
    """A loss of each argument alone; and a program that uses y alone, or 1 / rho alone."""
    x, dy, scale, bias = normal(0, 8, 16), normal(1, 8, 16), normal(2, 16), normal(3, 16)
    wanted = golden.rms_norm_vjp(dy, x, scale, bias)
    for which in range(3):
        loss = lambda *args: jnp.vdot(dy, rms_norm(*args))  # noqa: E731
        assert calls(jax.grad(loss, which), x, scale, bias) == 1  # as y is not needed
        assert_bits([jax.grad(loss, which)(x, scale, bias)], [wanted[which]])
    _, inverse_rms = jax.jit(functools.partial(rms_norm, return_inverse_rms=True))(x)
    np.testing.assert_allclose(inverse_rms, golden.rms_norm(x, return_inverse_rms=True)[1], rtol=2.0**-17)


def test_the_formula_of_the_gradients_is_a_kernel() -> None:
    """Also with a residual; not with a mask, and not if the gradients are rounded to several dtypes."""
    x, dy, residual, dh = (normal(seed, 8, 16) for seed in range(4))
    scale, bias, mask = normal(4, 16), normal(5, 16), normal(6, 8, 16) > -0.5
    for options in ({}, {"partial": 0.3}, {"residual": residual}):
        upstream = (dy, dh) if "residual" in options else dy
        formula = functools.partial(rms_norm_vjp, **options)
        assert calls(formula, upstream, x, scale, bias) == 1
        wanted = golden.rms_norm_vjp(upstream, x, scale, bias, **options)
        assert_bits(jax.jit(formula)(upstream, x, scale, bias), wanted)
    assert calls(functools.partial(rms_norm_vjp, mask=mask), dy, x, scale) == 0
    assert calls(lambda dy, x: rms_norm_vjp(dy, x, residual=residual), dy, x.astype("bfloat16")) == 0


def test_where_xla_compiles_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    x, scale = jnp.asarray(normal(0, 8, 16)), jnp.asarray(normal(1, 16))
    assert calls(rms_norm, x, scale) == 1
    assert calls(functools.partial(rms_norm, axis=0), x, scale[:8]) == 0
    assert "rmsnorm(" not in export.export(jax.jit(rms_norm))(x, scale).mlir_module()
    gradient = jax.jit(jax.grad(lambda x, scale: rms_norm(x, scale).sum()))
    for program in (jax.jit(rms_norm), gradient):  # on a GPU there are plain operations alone
        assert "custom_call" not in program.trace(x, scale).lower(lowering_platforms=("cuda",)).as_text()
        assert "custom_call @rmsnorm(" in program.trace(x, scale).lower(lowering_platforms=("cpu",)).as_text()
    mesh = Mesh(np.array(jax.devices()[:1]), ("rows",))
    spread = jax.shard_map(rms_norm, mesh=mesh, in_specs=(P("rows"), P()), out_specs=P("rows"))
    assert calls(spread, x, scale) == 0
    explicit = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Explicit,))
    assert "each device has a part of an array" in explain(jax.device_put(x, NamedSharding(explicit, P("rows"))))
    alone = jax.device_put(x, NamedSharding(mesh, P("rows")))
    assert_bits([jax.jit(rms_norm)(alone, scale)], [golden.rms_norm(np.asarray(x), np.asarray(scale))])
    monkeypatch.setattr(cpu, "missing", lambda *_: "there are none")
    assert calls(functools.partial(rms_norm), x, scale) == 0


def test_many_calls_at_once() -> None:
    """Within one program: more calls than XLA has threads."""
    x, scale = normal(0, 40, 1025), normal(2, 1025)
    many = jax.jit(lambda x, scale: [rms_norm(x + i, scale) for i in range(12)])(x, scale)
    assert_bits(many, [golden.rms_norm(x + np.float32(i), scale) for i in range(12)])


def test_errors_of_a_handler() -> None:
    """They are errors of XLA: without memory, and if another version wrote the program."""
    from rmsnorm.cpu import xla

    x = jnp.ones((2, 3))
    rms_norm(x)  # registers the handler
    call = resolve("rms_norm", Spec((2, 3), "float32"), variant=Variant.get("standard"))
    for at, value, message in ((4, 2**58, "RESOURCE_EXHAUSTED: rmsnorm: no memory"), (0, -1, "FAILED_PRECONDITION: ")):
        attribute = xla.forward(call, None, None).copy()  # the version, ..., rows and n; see xla.h and call.h
        attribute[at] = value
        program = jax.ffi.ffi_call("rmsnorm", [jax.ShapeDtypeStruct((2, 3), "float32")])
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(program(x, attribute=attribute))


def test_a_jaxlib_that_does_not_take_them(monkeypatch: pytest.MonkeyPatch, forget: Any) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: the handler's API version (0.3) is incompatible")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    forget(kernels.is_registered)
    with pytest.warns(UserWarning, match="this jaxlib does not accept the CPU kernels"):
        assert calls(lambda x: rms_norm(x), jnp.ones((2, 3))) == 0


@pytest.fixture
def _recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No kernels, and x64."""
    monkeypatch.setattr(cpu, "missing", lambda *_: "there are none")
    jax.clear_caches()
    with enable_x64(True):
        yield
    jax.clear_caches()


@pytest.mark.usefixtures("_recipe")
@pytest.mark.parametrize(("dtype", "masked"), [("bfloat16", False), ("float64", True)])
def test_what_is_kept(dtype: str, masked: bool) -> None:
    """x, the parameters and the mask."""
    x, scale, bias = (normal(seed, *size, dtype=dtype) for seed, size in enumerate([(8, 64), (64,), (64,)]))
    mask = normal(3, 8, 64) > -0.3 if masked else None
    kept = [
        aval for aval, _ in saved_residuals(functools.partial(rms_norm, mask=mask), *map(jnp.asarray, (x, scale, bias)))
    ]
    want = [(array.dtype.name, array.shape) for array in (x, scale, bias, mask) if array is not None]
    assert sorted((leaf.dtype.name, leaf.shape) for leaf in kept) == sorted(want)


@pytest.mark.usefixtures("_recipe")
def test_without_x64() -> None:
    """The numbers are those with it."""
    x, scale = jnp.asarray(normal(0, 3, 8, dtype="bfloat16")), jnp.asarray(normal(1, 8, dtype="bfloat16"))
    value = lambda *args: jnp.sum(jnp.sin(rms_norm(*args, variant="llama").astype(jnp.float32)))  # noqa: E731
    found = []
    for wide in (True, False):
        with enable_x64(wide):
            y, inverse = rms_norm(x, scale, return_inverse_rms=True)
            slopes = jax.jit(jax.grad(lambda *args: value(*args), (0, 1)))(x, scale)
            second = jax.jit(jax.jacrev(jax.grad(value, 1), 0))(x, scale)
            found.append([y, inverse, *slopes, second, *rms_norm_vjp(y, x, scale)[:2]])
    assert_bits(*found)
    sentence = "out_dtype is 'float64', expected at most 32 bits while x64 is off"
    with enable_x64(False), pytest.raises(ValueError, match=sentence):
        rms_norm(x, out_dtype="float64")


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


@pytest.mark.parametrize("options", [{"variant": "llama"}, {"partial": 0.9}], ids=str)
def test_beside_kernels_nothing(options: dict[str, Any]) -> None:
    """Compiled, not run. A row needs 8 bytes for its 1 / rho, which is 0.4 % of a row of 1024 in 16 bits."""
    x, scale = jax.ShapeDtypeStruct((8192, 1024), "bfloat16"), jax.ShapeDtypeStruct((1024,), "float32")
    norm = functools.partial(rms_norm, **options)
    dy = jax.eval_shape(norm, x, scale)
    for function, arrays in ((norm, (x, scale)), (functools.partial(gradients, norm), (x, scale, dy))):
        compiled = jax.jit(function).lower(*arrays).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < np.prod(x.shape) * x.dtype.itemsize / 100
