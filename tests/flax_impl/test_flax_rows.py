"""The kernels in JAX: which programs call them, with the golden's bits, and that others compute the same."""

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
from jax.sharding import AxisType, Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from rmsnorm import cpu  # noqa: E402
from rmsnorm import numpy_impl as golden  # noqa: E402
from rmsnorm.engines import prepare  # noqa: E402
from rmsnorm.flax_impl import kernels, rms_norm, rms_norm_vjp  # noqa: E402
from rmsnorm.flax_impl.functional import why_not  # noqa: E402
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


def assert_near(results: Any, wanted: Any) -> None:
    """Within 2^7 roundings of float32, or one of 16 bits, of numbers of the order of 1 and sums of few of them."""
    for one, other in zip(results, wanted, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        unit = 2.0**-17 if one.dtype == np.float32 else 2.0**-7
        np.testing.assert_allclose(np.float64(one), np.float64(other), rtol=unit, atol=unit)


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
    assert_near([inverse_rms], [golden.rms_norm(x, return_inverse_rms=True)[1]])


def test_the_formula_of_the_gradients_is_a_kernel() -> None:
    """Also with a residual. JAX transforms it as it transforms the gradients that it derives itself."""
    x, dy, residual, dh = (normal(seed, 8, 16) for seed in range(4))
    scale, bias, mask = normal(4, 16), normal(5, 16), normal(6, 8, 16) > -0.5
    for options in ({}, {"mask": mask}, {"partial": 0.3}, {"variant": "llama"}, {"residual": residual}):
        upstream = (dy, dh) if "residual" in options else dy
        formula = functools.partial(rms_norm_vjp, **options)
        has_kernel = "mask" not in options
        assert calls(formula, upstream, x, scale, bias) == has_kernel
        wanted = golden.rms_norm_vjp(upstream, x, scale, bias, **options)
        (assert_bits if has_kernel else assert_near)(jax.jit(formula)(upstream, x, scale, bias), wanted)
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
@pytest.mark.parametrize("masked", [False, True])
def test_a_gate_is_around_the_kernels(position: str, masked: bool) -> None:
    """By the formula and by automatic differentiation. What is under a mask, where there are no kernels, may be NaN."""
    x, dy, gate = (normal(seed, 4, 5, 16) for seed in range(3))
    scale, bias, mask = normal(3, 16), normal(4, 16), normal(5, 4, 5, 16) > -0.5
    options: Any = {"variant": Variant.get("llama").replace(gate_position=position)}
    if masked:
        x[1:2][~mask[1:2]], gate[2:3][~mask[2:3]] = np.nan, np.nan
        options["mask"] = mask
    wanted = golden.rms_norm_vjp(dy, x, scale, bias, gate=gate, **options)

    def norm(x: Any, scale: Any, bias: Any, gate: Any) -> Any:
        return rms_norm(x, scale, bias, gate=gate, **options)

    derived = lambda dy, *primals: jax.vjp(norm, *primals)[1](dy)  # noqa: E731
    formula = lambda dy, x, scale, bias, gate: rms_norm_vjp(dy, x, scale, bias, gate=gate, **options)  # noqa: E731
    assert calls(norm, x, scale, bias, gate) == (not masked)
    assert calls(derived, dy, x, scale, bias, gate) == (0 if masked else 2 if position == "after" else 1)
    assert calls(formula, dy, x, scale, bias, gate) == 0
    for function in (formula, derived):
        assert_near(jax.jit(function)(dy, x, scale, bias, gate), wanted)


@pytest.mark.parametrize("variant", ["standard", "llama"])
def test_vmap(variant: str) -> None:
    """XLA compiles it, as the parameters may be mapped, too."""
    x, dy, scale, mask = normal(0, 4, 5, 16), normal(1, 4, 5, 16), normal(2, 16), normal(3, 5, 16) < 0.6
    norm = functools.partial(rms_norm, variant=variant)
    gold, gold_vjp = (functools.partial(f, variant=variant) for f in (golden.rms_norm, golden.rms_norm_vjp))
    for axis in (0, 1):
        mapped = jax.vmap(lambda x: norm(x, scale), axis, axis)
        assert calls(mapped, x) == 0
        assert_near([mapped(x)], [gold(x, scale)])
    assert_near(gradients(jax.vmap(norm, (0, None)), x, scale, dy)[1:], gold_vjp(dy, x, scale)[:2])
    assert_near([jax.vmap(lambda x: norm(x, scale, mask=mask))(x)], [gold(x, scale, mask=mask)])
    scales = normal(2, 4, 16)
    assert_near([jax.vmap(norm)(x, scales)], [np.stack(list(map(gold, x, scales)))])
    parts = jax.vmap(lambda x, dy: gradients(norm, x, scale, dy)[2])(x, dy)  # a gradient for each part
    assert_near([parts], [np.stack([gold_vjp(one, other, scale)[1] for one, other in zip(dy, x, strict=True)])])
    shared = normal(5, 5, 16)
    for mapped, array in (
        (lambda x: norm(x, gate=shared), {"gate": shared}),
        (lambda x: norm(x, residual=shared)[0], {"residual": shared}),
    ):
        whole = {name: np.broadcast_to(value, x.shape) for name, value in array.items()}
        want = gold(x, **whole)
        assert_near([jax.vmap(mapped)(x)], [want[0] if "residual" in whole else want])


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
def test_other_derivatives_are_those_of_the_recipe(name: str, gate: str | None) -> None:
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
        patch.setattr(cpu, "missing", lambda *_: "there are none")
        wanted = derive()
    jax.clear_caches()
    for one, other in zip(jax.tree.leaves(results), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


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
    alone = jax.device_put(x, NamedSharding(mesh, P("rows")))
    assert_bits([jax.jit(rms_norm)(alone, scale)], [golden.rms_norm(np.asarray(x), np.asarray(scale))])
    monkeypatch.setattr(cpu, "missing", lambda *_: "there are none")
    assert calls(functools.partial(rms_norm), x, scale) == 0


def test_the_reason_why_there_is_no_kernel() -> None:
    def reason(x: Any, scale: Any = None, options: Any = ("standard", None, None, -1, None, None)) -> str | None:
        return why_not(prepare("rms_norm", options, x, scale), (x, scale))

    x = jnp.asarray(normal(0, 8, 16))
    assert reason(x) is None
    assert reason(x, options=("standard", None, None, 0, None, None)) == "the normalised axes are not the last ones"
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Explicit,))
    assert reason(jax.device_put(x, NamedSharding(mesh, P("rows")))) == "each device has a part of an array"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "missing", lambda *_: "there are none")
        assert reason(x) == "there are none"


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
    types = [jax.ShapeDtypeStruct((2, 3), "float32")]
    huge, unknown = (xla.forward(call, None, None).copy() for _ in range(2))
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
    forget(kernels.is_registered)
    with pytest.warns(UserWarning, match="this jaxlib does not accept the CPU kernels"):
        assert calls(lambda x: rms_norm(x), jnp.ones((2, 3))) == 0


@pytest.mark.parametrize("function", [rms_norm, jax.grad(lambda x: rms_norm(x).sum())])
def test_checkify_finds_a_nan_that_a_kernel_returns(function: Any) -> None:
    from jax.experimental import checkify

    checked = jax.jit(checkify.checkify(function, errors=checkify.nan_checks))
    x = jnp.asarray(normal(0, 2, 8))
    assert checked(x)[0].get() is None
    assert "nan generated by primitive: rms_norm" in checked(x.at[0, 1].set(jnp.nan))[0].get()
