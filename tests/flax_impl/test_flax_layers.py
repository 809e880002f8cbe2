"""What Flax alone has around its layers: dtypes, programs, two module systems, mapped axes, transforms of a layer."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import calls
import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import flax.linen  # noqa: E402
from flax import nnx  # noqa: E402
from flax_arrays import gradients, normal  # noqa: E402
from jax import export  # noqa: E402
from jax import numpy as jnp  # noqa: E402

from rmsnorm.flax_impl import RMSNorm, linen, rms_norm  # noqa: E402
from rmsnorm.flax_impl.private import enable_x64  # noqa: E402

EPS = 0.1  # large enough to be seen
WIDTH = 8
FLOATS = ("float16", "bfloat16", "float32", "float64")


def nnx_layer(features: int, **options: Any) -> Any:
    layer = RMSNorm(features, rngs=nnx.Rngs(0), **{"epsilon": EPS, **options})
    for i, parameter in enumerate((layer.scale, layer.bias)):
        if parameter is not None:
            parameter[...] = normal(1 + i, features, dtype=parameter[...].dtype)
    return layer


def both(features: int, **options: Any) -> tuple[Any, Any]:
    """The same layer in NNX and Linen, as functions of x and a mask."""
    first, module = nnx_layer(features, **options), linen.RMSNorm(**{"epsilon": EPS, **options})
    return first, lambda x, mask=None: module.apply({"params": {"scale": first.scale[...]}}, x, mask=mask)


def test_initialisation() -> None:
    options = {"scale_init": jax.nn.initializers.normal(), "scale_metadata": {"note": "kept"}}
    ours = RMSNorm(8, rngs=nnx.Rngs(3), **options)
    built_in = nnx.RMSNorm(8, rngs=nnx.Rngs(3), scale_init=options["scale_init"])  # Flax 0.11 takes no metadata
    np.testing.assert_array_equal(ours.scale[...], built_in.scale[...])
    assert ours.scale.note == "kept"
    assert ours.epsilon == built_in.epsilon
    key, x = jax.random.key(0), normal(0, 2, 8)
    pair = [of(scale_init=options["scale_init"]).init(key, x) for of in (linen.RMSNorm, flax.linen.RMSNorm)]
    jax.tree.map(np.testing.assert_array_equal, *pair)
    sharded = flax.linen.with_partitioning(jax.nn.initializers.ones, ("model",))
    assert linen.RMSNorm(scale_init=sharded).init(key, x)["params"]["scale"].names == ("model",)


def dtypes_of(modules: Any, x: Any, **options: Any) -> list[Any]:
    of_nnx, of_linen = modules
    made = nnx.eval_shape(lambda: of_nnx(WIDTH, rngs=nnx.Rngs(0), **options)(x))
    return [made.dtype, jax.eval_shape(of_linen(**options).init_with_output, jax.random.key(0), x)[0].dtype]


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64:UserWarning")  # JAX's, of parameters
@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float64"])
def test_the_dtype_of_y_is_that_of_the_built_in_ones(dtype: Any, x64: bool) -> None:
    """Whatever x, the parameters and ``dtype`` are; float64 is float32 while x64 is off."""
    with enable_x64(x64):
        for x_dtype, param_dtype in itertools.product(FLOATS, FLOATS):
            x = jnp.ones((2, WIDTH), jax.dtypes.canonicalize_dtype(x_dtype))
            options = {"dtype": dtype, "param_dtype": param_dtype, "use_scale": param_dtype != "float16"}
            ours = dtypes_of((RMSNorm, linen.RMSNorm), x, **options)
            with jax.numpy_dtype_promotion("standard"):
                assert ours == dtypes_of((nnx.RMSNorm, flax.linen.RMSNorm), x, **options)


def test_the_statistic_is_not_in_dtype() -> None:
    """Nor is a gradient: 1e5 is infinite in float16, and so in the built-in layer of NNX."""
    x = jnp.full((2, WIDTH), 1e5)
    module = functools.partial(linen.RMSNorm(dtype="float16").apply, {"params": {"scale": jnp.ones(WIDTH)}})
    for function in (RMSNorm(WIDTH, dtype="float16", rngs=nnx.Rngs(0)), module):
        np.testing.assert_array_equal(np.asarray(function(x), np.float32), 1)
        # with one of eight elements changed by e: e (1 - 1/8) / 1e5 there, - e / 8e5 elsewhere
        slope = jax.jacrev(lambda x: function(x)[0].astype(jnp.float32))(x)[:, 0]  # noqa: B023
        np.testing.assert_allclose(slope, (np.eye(WIDTH) - 1 / WIDTH) / 1e5, rtol=2.0**-6)


def exported(function: Any, *shapes: Any) -> Any:
    return export.deserialize(export.export(jax.jit(function))(*shapes).serialize(vjp_order=1))


@pytest.mark.parametrize(("dtype", "variant"), [("bfloat16", "flax"), ("float64", "zhang_torch")])
def test_exported_with_sizes_to_come(dtype: str, variant: str) -> None:
    """How many rows there are, and how wide, is known when the program is called; its gradients are in it."""
    norm = functools.partial(rms_norm, variant=variant)
    with enable_x64(True):
        rows, width = export.symbolic_shape("rows, width")
        program = exported(norm, *(jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, width), (width,))))
        x, scale, dy = normal(0, 5, 9, dtype=dtype), normal(1, 9, dtype=dtype), normal(2, 5, 9, dtype=dtype)
        y, dx, dscale = jax.jit(functools.partial(gradients, program.call))(x, scale, dy)
        results = {name: np.asarray(value) for name, value in (("y", y), ("dx", dx), ("dscale", dscale))}
        calls.hold(results, np.asarray(x), np.asarray(scale), dy=np.asarray(dy), variant=variant)


def test_an_exported_layer() -> None:
    made, x = nnx_layer(WIDTH, use_bias=True), normal(0, 3, WIDTH)
    graph, state = nnx.split(made)
    program = exported(lambda params, x: nnx.merge(graph, nnx.State(params))(x), nnx.to_pure_dict(state), x)
    np.testing.assert_allclose(program.call(nnx.to_pure_dict(state), x), made(x), rtol=2.0**-20, atol=2.0**-20)
    platforms = ("cpu", "cuda", "rocm", "tpu")
    assert export.export(jax.jit(rms_norm), platforms=platforms)(x).platforms == platforms


def test_promote_dtype_settles_the_dtype_alone() -> None:
    def promote(arrays: Any, *, dtype: Any) -> Any:
        return tuple(array if array is None else array.astype(jnp.bfloat16) for array in arrays)

    x = normal(0, 3, 8)
    np.testing.assert_array_equal(nnx_layer(8, promote_dtype=promote)(x), nnx_layer(8, dtype=jnp.bfloat16)(x))


def test_arguments() -> None:
    x, ones = normal(0, 2, 8), jnp.ones((2, 8), jnp.int32)
    for layer in both(8, reduction_axes=(0, 2)):
        with pytest.raises(ValueError, match=r"axis is 2, expected between -2 and 1 for x f32\[2, 8\]"):
            layer(x)
    nnx_one, linen_one = both(8)
    with pytest.raises(TypeError, match=r"mask has dtype int32, expected bool"):
        nnx_one(x, ones)
    np.testing.assert_allclose(linen_one(x, ones), linen_one(x), rtol=2.0**-21)  # as the built-in one


def test_parts_of_a_row_of_very_different_size_over_a_mapped_axis() -> None:
    """Without an eps, so that a row is scaled before its squares are taken: by one number in all of its parts."""
    x = jnp.asarray([[2.0**60, -(2.0**60), 1.0, 3.0], [1.0, 2.0, 2.0**-70, 2.0**-75]], jnp.float32)
    norm, whole = (linen.RMSNorm(axis_name=name, epsilon=0.0, use_scale=False) for name in ("devices", None))
    parts = jax.vmap(lambda part: norm.apply({}, part), 1, 1, axis_name="devices")(x.reshape(2, 2, 2))
    np.testing.assert_allclose(parts.reshape(x.shape), whole.apply({}, x), rtol=2.0**-20)
