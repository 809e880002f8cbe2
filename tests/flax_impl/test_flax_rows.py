"""The kernels in JAX: which programs call them, and the golden's bits through each way to them."""

from __future__ import annotations

import functools
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from flax_arrays import gradients  # noqa: E402
from jax import export  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from rmsnorm import cpu  # noqa: E402
from rmsnorm import numpy_impl as golden  # noqa: E402
from rmsnorm.cpu.prepared import prepare  # noqa: E402
from rmsnorm.flax_impl import engines, kernels, rms_norm, rms_norm_vjp  # noqa: E402
from rmsnorm.flax_impl.engines import Engine  # noqa: E402
from rmsnorm.flax_impl.private import enable_x64  # noqa: E402
from rmsnorm.specification.call import Spec  # noqa: E402
from rmsnorm.specification.resolve import resolve  # noqa: E402
from rmsnorm.specification.variants import Variant  # noqa: E402

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
        assert calls(jax.grad(loss, which), x, scale, bias) == 2
        assert_bits([jax.grad(loss, which)(x, scale, bias)], [wanted[which]])
    _, inverse_rms = jax.jit(functools.partial(rms_norm, return_inverse_rms=True))(x)
    assert_bits([inverse_rms], [golden.rms_norm(x, return_inverse_rms=True)[1]])


def test_the_formula_of_the_gradients_is_a_kernel() -> None:
    """Also with a residual. JAX transforms it as it transforms the gradients that it derives itself."""
    x, dy, residual, dh = (normal(seed, 8, 16) for seed in range(4))
    scale, bias, mask = normal(4, 16), normal(5, 16), normal(6, 8, 16) > -0.5
    for options in ({}, {"mask": mask}, {"partial": 0.3}, {"variant": "llama"}, {"residual": residual}):
        upstream = (dy, dh) if "residual" in options else dy
        formula = functools.partial(rms_norm_vjp, **options)
        assert calls(formula, upstream, x, scale, bias) == 1
        wanted = golden.rms_norm_vjp(upstream, x, scale, bias, **options)
        assert_bits(jax.jit(formula)(upstream, x, scale, bias), wanted)
    assert calls(lambda dy, x: rms_norm_vjp(dy, x, residual=residual), dy, x.astype("bfloat16")) == 0
    with enable_x64(True):
        arrays = [normal(seed, *shape, dtype="float64") for seed, shape in enumerate([(3, 8), (3, 8), (8,)])]
        formula = lambda *arrays: rms_norm_vjp(*arrays)[:2]  # noqa: E731
        derived = lambda dy, *primals: jax.vjp(rms_norm, *primals)[1](dy)  # noqa: E731
        for transform in (
            lambda f: lambda *x: jax.jvp(f, x, x),
            lambda f: lambda *x: jax.vjp(f, *x)[1](f(*x)),
            lambda f: jax.vmap(f, (0, 0, None)),
            lambda f: jax.jit(jax.jacobian(f, (0, 1, 2))),
        ):
            results, wanted = (jax.tree.leaves(transform(f)(*arrays)) for f in (formula, derived))
            for one, other in zip(results, wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("position", ["after", "before"])
def test_a_gate_is_in_the_kernels(position: str) -> None:
    """By the formula, by automatic differentiation and under vmap; what is under a mask may be NaN."""
    x, dy, gate, scale, bias = (
        normal(0, 4, 5, 16),
        normal(1, 4, 5, 16),
        normal(2, 4, 5, 16),
        normal(3, 16),
        normal(4, 16),
    )
    mask = normal(5, 4, 5, 16) > -0.5
    x[1:2][~mask[1:2]], gate[2:3][~mask[2:3]] = np.nan, np.nan
    options: Any = {"variant": Variant.get("llama").replace(gate_position=position), "mask": mask}
    wanted = golden.rms_norm_vjp(dy, x, scale, bias, gate=gate, **options)

    def norm(x: Any, scale: Any, bias: Any, gate: Any) -> Any:
        return rms_norm(x, scale, bias, gate=gate, **options)

    derived = lambda dy, *primals: jax.vjp(norm, *primals)[1](dy)  # noqa: E731
    formula = lambda dy, x, scale, bias, gate: rms_norm_vjp(dy, x, scale, bias, gate=gate, **options)  # noqa: E731
    for function, count in ((formula, 1), (derived, 2)):
        assert calls(function, dy, x, scale, bias, gate) == count
        assert_bits(jax.jit(function)(dy, x, scale, bias, gate), wanted)
    for which in range(4):
        loss = lambda *args: jnp.sum(jnp.where(mask, norm(*args), 0) * dy)  # noqa: E731
        assert calls(jax.grad(loss, which), x, scale, bias, gate) == 2
    x, gate = np.nan_to_num(x), np.nan_to_num(gate)
    del options["mask"]
    mapped = jax.vmap(norm, (0, None, None, 0))
    assert calls(mapped, x, scale, bias, gate) == 1
    assert_bits([mapped(x, scale, bias, gate)], [golden.rms_norm(x, scale, bias, gate=gate, **options)])


def test_vmap_is_more_rows() -> None:
    x, dy, scale, mask = normal(0, 4, 5, 16), normal(1, 4, 5, 16), normal(2, 16), normal(3, 5, 16) < 0.6
    for axis in (0, 1):
        mapped = jax.vmap(lambda x: rms_norm(x, scale), axis, axis)
        assert calls(mapped, x) == 1
        assert_bits([mapped(x)], [golden.rms_norm(x, scale)])
    assert_bits(gradients(jax.vmap(rms_norm, (0, None)), x, scale, dy)[1:], golden.rms_norm_vjp(dy, x, scale)[:2])
    masked = jax.vmap(lambda x: rms_norm(x, scale, mask=mask))
    assert calls(masked, x) == 1
    assert_bits([masked(x)], [golden.rms_norm(x, scale, mask=mask)])


def test_vmap_of_parameters_is_not() -> None:
    x, dy, scale = normal(0, 4, 5, 16), normal(1, 4, 5, 16), normal(2, 4, 16)
    assert calls(jax.vmap(rms_norm), x, scale) == 0
    assert_bits([jax.vmap(rms_norm)(x, scale)], [np.stack(list(map(golden.rms_norm, x, scale)))])
    parts = jax.vmap(lambda x, dy: gradients(rms_norm, x, scale[0], dy)[2])(x, dy)  # a gradient for each part
    wanted = np.stack([golden.rms_norm_vjp(one, other, scale[0])[1] for one, other in zip(dy, x, strict=True)])
    np.testing.assert_allclose(parts, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("position", ["after", "before"])
@pytest.mark.parametrize("which", ["x", "gate"])
def test_vmap_of_one_array_takes_the_other_in_every_part(which: str, position: str) -> None:
    """In the kernels, as long as the parameters are shared; a gradient of what is shared is a sum over the parts."""
    parts, shared, scale, mask = normal(0, 4, 5, 16), normal(1, 5, 16), normal(2, 16), normal(3, 5, 16) > -0.5
    dy, options = normal(4, 4, 5, 16), {"variant": Variant.get("llama").replace(gate_position=position), "mask": mask}

    def norm(one: Any, other: Any, scale: Any) -> Any:
        x, gate = (one, other) if which == "x" else (other, one)
        return rms_norm(x, scale, gate=gate, **options)

    mapped = jax.vmap(norm, (0, None, None))
    whole = np.broadcast_to(shared, parts.shape)
    x, gate = (parts, whole) if which == "x" else (whole, parts)
    assert calls(mapped, parts, shared, scale) == 1
    assert_bits([mapped(parts, shared, scale)], [golden.rms_norm(x, scale, gate=gate, **options)])
    dx, dscale, _, dgate = golden.rms_norm_vjp(dy, x, scale, gate=gate, **options)
    of_parts, of_shared = (dx, dgate) if which == "x" else (dgate, dx)
    pull = lambda which: jax.grad(lambda *args: jnp.vdot(mapped(*args), dy), which)  # noqa: E731
    for argument, wanted in ((0, of_parts), (2, dscale)):
        assert calls(pull(argument), parts, shared, scale) == 2
        assert_bits([pull(argument)(parts, shared, scale)], [wanted])
    got = pull(1)(parts, shared, scale)
    wanted = of_shared.astype(np.float64).sum(0)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2.0**-16 * abs(of_shared).sum(0).max())  # 2^8 roundings
    formula = jax.vmap(lambda dy, one: rms_norm_vjp(dy, one, gate=shared, **options)[0])  # dy is mapped, too
    assert calls(formula, dy, parts) == 1
    assert_bits(
        [formula(dy, parts)], [golden.rms_norm_vjp(dy, parts, gate=np.broadcast_to(shared, dy.shape), **options)[0]]
    )


DERIVATIVES = {
    "hessian": jax.hessian,
    "forward over reverse": lambda f: lambda *x: jax.jvp(jax.grad(f), x, x),
    "reverse over forward": lambda f: jax.grad(lambda *x: jax.jvp(f, x, x)[1]),
    "reverse over reverse": lambda f: jax.grad(lambda *x: jnp.sum(jax.grad(f)(*x) ** 2)),
    "forward": lambda f: lambda *x: jax.jvp(f, x, x),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "jacobian forward": lambda f: jax.jit(jax.jacfwd(f, (0, 1))),
    "transposed": lambda f: lambda *x: jax.linear_transpose(jax.linearize(f, *x)[1], *x)(jnp.ones(())),
    "of each row": lambda f: jax.jit(jax.vmap(jax.grad(f, (0, 1)), (0, None))),
    "scan": lambda f: jax.grad(lambda *x: jax.lax.scan(lambda s, row: (s + f(row, x[1]), None), 0.0, x[0])[0], (0, 1)),
}


@pytest.mark.parametrize("gate", [None, "after", "before"])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_other_derivatives_are_those_of_the_operations(name: str, gate: str | None) -> None:
    """With a gate also that of the gate, which is a function of both arguments, and with a bias, which is one, too."""
    x, scale = jnp.asarray(normal(0, 3, 8)), jnp.asarray(normal(1, 8))

    def loss(x: Any, scale: Any) -> Any:
        options: dict[str, Any] = {}
        if gate is not None:
            options = {"gate": x[..., ::-1] * scale, "variant": Variant.get("standard").replace(gate_position=gate)}
        return jnp.sum(jnp.sin(rms_norm(x, scale, scale**2, **options)))

    derive = lambda: DERIVATIVES[name](loss)(x, scale)  # noqa: E731
    results = derive()
    with pytest.MonkeyPatch.context() as patch:
        jax.clear_caches()
        patch.setattr(kernels, "engine_of", lambda *_: (Engine.OPERATIONS, None))
        wanted = derive()
    jax.clear_caches()
    for one, other in zip(jax.tree.leaves(results), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_where_xla_compiles_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
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
    alone = jax.device_put(x, NamedSharding(mesh, P("rows")))
    assert_bits([jax.jit(rms_norm)(alone, scale)], [golden.rms_norm(np.asarray(x), np.asarray(scale))])
    monkeypatch.setattr(cpu, "missing", lambda *_: "there are none")
    assert calls(functools.partial(rms_norm), x, scale) == 0


def test_the_reason_is_that_of_the_engine() -> None:
    call = resolve("rms_norm", Spec((8, 16), "float32"), variant=Variant.get("standard"))
    here = engines.Context(platform="cpu")
    assert engines.engine_of(call, here) == engines.engine_of(call, engines.Context()) == (Engine.KERNELS, None)
    for context, reason in (
        (here._replace(is_spread=True), "a row is spread over several devices"),
        (here._replace(is_divided=True), "each device has a part of an array"),
        (here._replace(is_mixed=True), "the gradient of x and that of the residual have different dtypes"),
        (here._replace(platform=""), "an array is not on one device"),
        (here._replace(platform="gpu"), "there are no kernels for its device"),
    ):
        assert engines.engine_of(call, context) == (Engine.OPERATIONS, reason)
    x = jnp.asarray(normal(0, 8, 16))
    assert engines.why_not(prepare("rms_norm", ("standard", None, None, -1, None, None), x), (x, None)) is None


@pytest.mark.parametrize("threads", ["1", "2", "16"])
def test_threads_change_no_bit(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMSNORM_NUM_THREADS", threads)  # read when a program is compiled
    jax.clear_caches()
    x, dy, scale = normal(0, 2100, 130), normal(1, 2100, 130), normal(2, 130)
    results = jax.jit(functools.partial(gradients, rms_norm))(x, scale, dy)
    assert_bits(results[1:], golden.rms_norm_vjp(dy, x, scale)[:2])


def test_many_calls_at_once() -> None:
    """From Python threads, and within one program: more calls than XLA has threads."""
    x, dy, scale = normal(0, 260, 1025), normal(1, 260, 1025), normal(2, 1025)
    wanted = golden.rms_norm(x, scale), *golden.rms_norm_vjp(dy, x, scale)[:2]
    compiled = jax.jit(functools.partial(gradients, rms_norm))
    with ThreadPoolExecutor(16) as pool:
        for results in pool.map(lambda _: compiled(x, scale, dy), range(64)):
            assert_bits(results, wanted)
    many = jax.jit(lambda x, scale: [rms_norm(x + i, scale) for i in range(12)])(x, scale)
    assert_bits(many, [golden.rms_norm(x + np.float32(i), scale) for i in range(12)])


def test_errors_of_a_handler() -> None:
    """They are errors of XLA: without memory, and if another version wrote the program."""
    from rmsnorm.cpu import xla

    x = jnp.ones((2, 3))
    rms_norm(x)  # registers the handler
    call = resolve("rms_norm", Spec((2, 3), "float32"), variant=Variant.get("standard"))
    types = [jax.ShapeDtypeStruct((2, 3), "float32"), jax.ShapeDtypeStruct((2, 1), "float32")]
    huge, unknown = (xla.forward(call, None, None, None, None).copy() for _ in range(2))
    assert huge[3:5].tolist() == [2, 3]  # rows and n; see xla.h and call.h
    huge[4] = 2**58
    unknown[0] += 1  # the version
    for attribute, message in (
        (huge, "RESOURCE_EXHAUSTED: rmsnorm: no memory"),
        (unknown, "FAILED_PRECONDITION: rmsnorm: "),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(jax.ffi.ffi_call("rmsnorm", types)(x, attribute=attribute))


def test_the_functions_of_xla_are_where_the_handler_calls_them() -> None:
    """The places in the table of xla.h, in jaxlib's own header. The handler runs with every version from 0.7.2 on."""
    header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text(encoding="utf-8")
    table = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\(XLA_FFI_(\w+)\);", header)
    wanted = {"Error_Create": 0, "Error_Destroy": 2, "ThreadPool_Schedule": 11, "ThreadPool_NumThreads": 12}
    assert {name: table.index(name) for name in wanted} == wanted


def test_a_jaxlib_that_does_not_take_them(monkeypatch: pytest.MonkeyPatch, forget: Any) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: the handler's API version (0.3) is incompatible")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    forget(engines.is_registered)
    with pytest.warns(UserWarning, match="this jaxlib does not accept the CPU kernels"):
        assert calls(lambda x: rms_norm(x), jnp.ones((2, 3))) == 0


@pytest.mark.parametrize("function", [rms_norm, jax.grad(lambda x: rms_norm(x).sum())])
def test_checkify_finds_a_nan_that_a_kernel_returns(function: Any) -> None:
    from jax.experimental import checkify

    checked = jax.jit(checkify.checkify(function, errors=checkify.nan_checks))
    x = jnp.asarray(normal(0, 2, 8))
    assert checked(x)[0].get() is None
    assert "nan generated by primitive: rms_norm" in checked(x.at[0, 1].set(jnp.nan))[0].get()
