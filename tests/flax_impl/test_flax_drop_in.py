"""What surrounds the built-in layers surrounds ours: arguments, dtypes, saving, exporting, the two module systems."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import flax.linen  # noqa: E402
from flax import nnx  # noqa: E402
from flax_arrays import normal  # noqa: E402
from jax import export  # noqa: E402
from jax import numpy as jnp  # noqa: E402

from rmsnorm.flax_impl import RMSNorm, linen, rms_norm  # noqa: E402
from rmsnorm.flax_impl.private import enable_x64  # noqa: E402

WIDTH = 8
FLOATS = ("float16", "bfloat16", "float32", "float64")


def layer(seed: int = 1, **options: Any) -> Any:
    made = RMSNorm(WIDTH, use_bias=True, rngs=nnx.Rngs(0), **options)
    dtype = made.scale.dtype
    made.scale[...], made.bias[...] = normal(seed, WIDTH, dtype=dtype), normal(seed + 1, WIDTH, dtype=dtype)
    return made


def test_every_argument_of_the_built_in_ones() -> None:
    """The same names in the same order, ours behind them; the same defaults but for two that are the variant's."""
    for ours, built_in in ((RMSNorm, nnx.RMSNorm), (linen.RMSNorm, flax.linen.RMSNorm)):
        mine, theirs = (inspect.signature(each.__init__).parameters for each in (ours, built_in))
        assert [name for name in mine if name in theirs] == list(theirs)
        changed = {name for name in theirs if mine[name].default != theirs[name].default}
        assert changed == {"epsilon", "scale_init"}
        assert all(mine[name].kind == theirs[name].kind for name in theirs)
        mine, theirs = (list(inspect.signature(each.__call__).parameters.values()) for each in (ours, built_in))
        assert [(p.name, p.kind, p.default) for p in mine[: len(theirs)]] == [
            (p.name, p.kind, p.default) for p in theirs
        ]


def dtypes_of(modules: Any, x: Any, **options: Any) -> list[Any]:
    of_nnx, of_linen = modules
    made = nnx.eval_shape(lambda: of_nnx(WIDTH, rngs=nnx.Rngs(0), **options)(x))
    return [made.dtype, jax.eval_shape(of_linen(**options).init_with_output, jax.random.key(0), x)[0].dtype]


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64:UserWarning")  # JAX's, of parameters
@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize("dtype", [None, *FLOATS])
def test_the_dtype_of_y_is_that_of_the_built_in_ones(dtype: Any, x64: bool) -> None:
    """Whatever x, the parameters and ``dtype`` are; float64 is float32 while x64 is off."""
    with enable_x64(x64):
        for x_dtype, param_dtype, use_scale in itertools.product(FLOATS, FLOATS, (True, False)):
            x = jax.ShapeDtypeStruct((2, WIDTH), jax.dtypes.canonicalize_dtype(x_dtype))
            x, options = (
                jnp.ones(x.shape, x.dtype),
                {"dtype": dtype, "param_dtype": param_dtype, "use_scale": use_scale},
            )
            ours = dtypes_of((RMSNorm, linen.RMSNorm), x, **options)
            with jax.numpy_dtype_promotion("standard"):
                assert ours == dtypes_of((nnx.RMSNorm, flax.linen.RMSNorm), x, **options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_statistic_is_not_in_dtype(dtype: str) -> None:
    """Nor is a gradient: 1e5 is infinite in float16, and so in the built-in layer of NNX."""
    x = jnp.full((2, WIDTH), 1e5)
    module = functools.partial(linen.RMSNorm(dtype=dtype).apply, {"params": {"scale": jnp.ones(WIDTH)}})
    for function in (RMSNorm(WIDTH, dtype=dtype, rngs=nnx.Rngs(0)), module):
        np.testing.assert_array_equal(np.asarray(function(x), np.float32), 1)
        # with one of eight elements changed by e: e (1 - 1/8) / 1e5 there, - e / 8e5 elsewhere
        slope = jax.jacrev(lambda x: function(x)[0].astype(jnp.float32))(x)[:, 0]  # noqa: B023
        np.testing.assert_allclose(slope, (np.eye(WIDTH) - 1 / WIDTH) / 1e5, rtol=2.0**-6)


@pytest.mark.needs("flax>=0.12.8", "the statistic of an older built-in layer is in 32 bits")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_statistic_of_the_built_in_one_is_in_dtype(dtype: str) -> None:
    with jax.numpy_dtype_promotion("standard"):
        theirs = nnx.RMSNorm(WIDTH, dtype=dtype, rngs=nnx.Rngs(0))(jnp.full((2, WIDTH), 1e5))
    assert bool(jnp.all(jnp.isnan(theirs))) == (dtype == "float16")


def test_nnx_and_linen_give_the_same_bits() -> None:
    x = normal(0, 3, WIDTH)
    options = [{}, {"variant": "gemma"}, {"partial": 0.4, "dtype": "bfloat16"}, {"param_dtype": "bfloat16"}]
    for each in options:
        made = layer(**each)
        module = linen.RMSNorm(use_bias=True, **each)
        params = {"params": nnx.to_pure_dict(nnx.state(made))}
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, module.init(jax.random.key(0), x))
        for mask in (None, x > -0.5):
            got, want = made(x, mask), module.apply(params, x, mask=mask)
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)


def test_one_module_system_in_the_other() -> None:
    x = normal(0, 3, WIDTH)
    within_nnx = nnx.bridge.ToNNX(linen.RMSNorm(variant="gemma"), rngs=nnx.Rngs(0))
    nnx.bridge.lazy_init(within_nnx, x)
    within_linen = nnx.bridge.ToLinen(RMSNorm, args=(WIDTH,), kwargs={"variant": "gemma"})
    params = within_linen.init(jax.random.key(0), x)
    want = rms_norm(x, jnp.zeros(WIDTH), variant="gemma")
    np.testing.assert_array_equal(within_nnx(x), want)
    np.testing.assert_array_equal(within_linen.apply(params, x), want)


def test_copies() -> None:
    """Copied, pickled and cloned; and described by the tools of Flax."""
    x, made = normal(0, 3, WIDTH), layer(variant="gemma", partial=0.4)
    want = made(x)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), nnx.clone(made)):
        np.testing.assert_array_equal(other(x), want)
        other.scale[...] = jnp.zeros(WIDTH)
        np.testing.assert_array_equal(made(x), want)
    assert "RMSNorm" in nnx.tabulate(made, x)
    module = linen.RMSNorm(variant="gemma")
    assert pickle.loads(pickle.dumps(module)) == module
    assert hash(module) == hash(module.clone())
    assert "RMSNorm" in module.tabulate(jax.random.key(0), x)


def test_saved_by_orbax(tmp_path: Path) -> None:
    """State of NNX and parameters of Linen, restored into shapes alone."""
    checkpoint = pytest.importorskip("orbax.checkpoint")
    x, made = normal(0, 3, WIDTH), layer(5, param_dtype="bfloat16")
    graph, state = nnx.split(made)
    module = linen.RMSNorm(use_bias=True, param_dtype="bfloat16")
    params = module.init(jax.random.key(0), x)["params"]
    params = jax.tree.map(lambda leaf: normal(7, WIDTH, dtype=leaf.dtype), params)
    blank = nnx.state(nnx.eval_shape(lambda: layer(param_dtype="bfloat16")))
    with checkpoint.StandardCheckpointer() as saver:
        saver.save(tmp_path / "nnx", state)
        saver.save(tmp_path / "linen", params)
        saver.wait_until_finished()
        np.testing.assert_array_equal(nnx.merge(graph, saver.restore(tmp_path / "nnx", blank))(x), made(x))
        shapes = jax.eval_shape(functools.partial(module.init, jax.random.key(0)), x)["params"]
        restored = saver.restore(tmp_path / "linen", shapes)
    jax.tree.map(np.testing.assert_array_equal, restored, params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(restored)} == {"bfloat16"}


def exported(function: Any, *shapes: Any) -> Any:
    return export.deserialize(export.export(jax.jit(function))(*shapes).serialize(vjp_order=1))


@pytest.mark.parametrize("variant", ["flax", "zhang_torch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_exported_with_sizes_to_come(dtype: str, variant: str) -> None:
    """How many rows there are, and how wide, is known when the program is called; its gradients are in it."""
    norm = functools.partial(rms_norm, variant=variant)
    with enable_x64(True):
        rows, width = export.symbolic_shape("rows, width")
        program = exported(norm, *(jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, width), (width,))))
        x, scale = normal(0, 5, 9, dtype=dtype), normal(1, 9, dtype=dtype)
        few = 2.0**-51 if dtype == "float64" else 0.0  # each operation rounds
        np.testing.assert_allclose(program.call(x, scale).astype(float), norm(x, scale).astype(float), rtol=few, atol=0)
        dy = normal(2, 5, 9, dtype=dtype)
        found = [jax.jit(lambda x, scale: jax.vjp(f, x, scale)[1](dy))(x, scale) for f in (program.call, norm)]  # noqa: B023
        unit = 2.0**-7 if dtype == "bfloat16" else 2.0**-18 if dtype == "float32" else 2.0**-47  # 2^6 roundings, or one
        for got, want in zip(*found, strict=True):
            np.testing.assert_allclose(np.asarray(got, float), np.asarray(want, float), rtol=unit, atol=unit)


def test_an_exported_layer() -> None:
    made, x = layer(), normal(0, 3, WIDTH)
    graph, state = nnx.split(made)
    program = exported(lambda params, x: nnx.merge(graph, nnx.State(params))(x), nnx.to_pure_dict(state), x)
    np.testing.assert_array_equal(program.call(nnx.to_pure_dict(state), x), made(x))
    platforms = ("cpu", "cuda", "rocm", "tpu")
    assert export.export(jax.jit(rms_norm), platforms=platforms)(x).platforms == platforms


def test_shapes_alone() -> None:
    x = jax.ShapeDtypeStruct((2, WIDTH), jnp.bfloat16)
    blank = nnx.eval_shape(lambda: layer(dtype=jnp.bfloat16))
    assert {type(leaf) for leaf in jax.tree.leaves(nnx.state(blank))} == {jax.ShapeDtypeStruct}
    y = jax.eval_shape(lambda x: layer(dtype=jnp.float16)(x), x)
    assert (y.shape, y.dtype) == (x.shape, jnp.float16)
    assert jax.eval_shape(linen.RMSNorm().apply, {"params": {"scale": jnp.ones(WIDTH)}}, x).dtype == jnp.float32
