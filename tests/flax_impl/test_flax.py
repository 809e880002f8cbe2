"""The Flax layers: drop-ins for the built-in ones, one beside the other, and over devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import flax.linen  # noqa: E402
from flax import nnx, serialization  # noqa: E402
from flax_arrays import normal  # noqa: E402
from jax import numpy as jnp  # noqa: E402

from rmsnorm import PRESETS  # noqa: E402
from rmsnorm.flax_impl import RMSNorm, linen, rms_norm  # noqa: E402

EPS = 0.1  # large enough to be seen


def nnx_layer(features: int, *, of: Any = RMSNorm, seed: int = 1, **options: Any) -> Any:
    layer = of(features, rngs=nnx.Rngs(0), **{"epsilon": EPS, **options})
    for i, parameter in enumerate((layer.scale, getattr(layer, "bias", None))):
        if parameter is not None:
            parameter[...] = normal(seed + i, features, dtype=parameter[...].dtype)
    return layer


def both(features: int, **options: Any) -> tuple[Any, Any]:
    """The same layer in NNX and Linen, as functions of x and a mask."""
    first = nnx_layer(features, **options)
    module = linen.RMSNorm(**{"epsilon": EPS, **options})
    named = {"scale": first.scale, "bias": first.bias}
    params = {"params": {name: value[...] for name, value in named.items() if value is not None}}
    return first, lambda x, mask=None, **more: module.apply(params, x, mask=mask, **more)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction_axes": [-2, -1]}, {"reduction_axes": 1, "feature_axes": -1}, {"use_scale": False},
     {"dtype": jnp.bfloat16}, {"param_dtype": jnp.bfloat16}, {"use_fast_variance": False}],
    ids=str,
)  # fmt: skip
def test_stands_where_the_built_in_one_stands(options: dict[str, Any], dtype: str) -> None:
    """The built-in one rounds in float32 at each of 3 operations and a sum of 40 squares, then to the dtype of y.

    With ``dtype`` it also rounds x to that first, which counts twice as it enters the statistic, too.
    """
    x = normal(0, 3, 5, 8, dtype=dtype)
    mask = jnp.asarray(np.random.default_rng(3).uniform(size=x.shape) < 0.7).at[:, 0].set(True).at[..., 0].set(True)
    ours, built_in = nnx_layer(8, **options), nnx_layer(8, of=nnx.RMSNorm, **options)
    assert isinstance(ours, nnx.RMSNorm)
    for given in (None, mask):
        got = ours(x, given)
        with jax.numpy_dtype_promotion("standard"):
            want = built_in(x, given)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        unit = float(jnp.finfo(got.dtype).eps) * (2 if "dtype" in options else 1) + 50 * 2.0**-24
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=unit, atol=1e-6)


@pytest.mark.parametrize("variant", PRESETS)
def test_variants(variant: str) -> None:
    x = normal(0, 3, 8, dtype=jnp.bfloat16)
    layer, other = both(8, variant=variant, epsilon=None)
    assert (layer.bias is not None) == PRESETS[variant].bias
    initial = RMSNorm(8, variant=variant, rngs=nnx.Rngs(0))
    assert float(initial.scale[...][0]) == 1 - PRESETS[variant].scale_offset
    bias = None if layer.bias is None else layer.bias[...]
    want = rms_norm(x, layer.scale[...], bias, variant=variant)
    for got in (layer(x), other(x)):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("options", [{"partial": 0.4}, {"use_bias": True, "variant": "llama"}], ids=str)
def test_options_of_our_own(options: dict[str, Any]) -> None:
    x, h = normal(0, 2, 3, 8), normal(5, 2, 3, 8)
    mask = jnp.asarray(np.random.default_rng(3).uniform(size=x.shape) < 0.7).at[0, 0].set(False)
    layer, other = both(8, **options)
    variant = {"variant": options.get("variant", "flax"), "partial": options.get("partial"), "eps": EPS}
    bias = None if layer.bias is None else layer.bias[...]
    want = rms_norm(x, layer.scale[...], bias, mask=mask, residual=h, **variant)
    for got in (layer(x, mask, residual=h), other(x, mask, residual=h)):
        for one, another in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, another)


def test_several_feature_axes() -> None:
    x = normal(0, 3, 4, 5)
    layer = nnx_layer(20, reduction_axes=(1, 2), feature_axes=(-1, 1), use_bias=True)
    module = linen.RMSNorm(epsilon=EPS, reduction_axes=(1, 2), feature_axes=(-1, 1), use_bias=True)
    params = module.init(jax.random.key(0), x)["params"]
    assert jax.tree.map(jnp.shape, params) == {"scale": (4, 5), "bias": (4, 5)}
    scale, bias = layer.scale[...].reshape(4, 5), layer.bias[...].reshape(4, 5)
    want = rms_norm(x, scale, bias, axis=(1, 2), eps=EPS)
    np.testing.assert_array_equal(layer(x), want)
    np.testing.assert_array_equal(module.apply({"params": {"scale": scale, "bias": bias}}, x), want)


def test_state_goes_both_ways() -> None:
    x = normal(0, 3, 8)
    ours, built_in = nnx_layer(8), nnx_layer(8, of=nnx.RMSNorm, seed=7)
    assert jax.tree.structure(nnx.state(ours)) == jax.tree.structure(nnx.state(built_in))
    before = ours(x)
    nnx.update(built_in, nnx.state(ours))
    nnx.update(ours, nnx.state(nnx_layer(8, of=nnx.RMSNorm, seed=9)))
    assert bool(jnp.any(ours(x) != before))
    nnx.update(ours, nnx.state(built_in))
    np.testing.assert_array_equal(ours(x), before)
    assert nnx.state(nnx_layer(8, use_scale=False)) == nnx.state(nnx_layer(8, of=nnx.RMSNorm, use_scale=False))

    mine, theirs = linen.RMSNorm(epsilon=EPS), flax.linen.RMSNorm(epsilon=EPS)
    assert isinstance(mine, flax.linen.RMSNorm)
    start, other = (module.init(jax.random.key(0), x) for module in (mine, theirs))
    assert jax.tree.map(jnp.shape, start) == jax.tree.map(jnp.shape, other)
    changed = {"params": {"scale": normal(4, 8)}}
    loaded = serialization.from_bytes(start, serialization.to_bytes(changed))
    np.testing.assert_array_equal(mine.apply(loaded, x), mine.apply(changed, x))
    np.testing.assert_allclose(mine.apply(loaded, x), theirs.apply(loaded, x), rtol=20 * 2.0**-24)


def test_the_gains_in_a_checkpoint_are_found(tmp_path: Path) -> None:
    """Of an nnx.State, and of the parameters of linen."""
    orbax = pytest.importorskip("orbax.checkpoint")
    from rmsnorm.identify import identify_checkpoint

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.norm, self.proj = RMSNorm(8, variant="gemma", rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    linen_state = linen.RMSNorm(variant="gemma").init(jax.random.key(0), jnp.ones((2, 8)))["params"]
    for name, state in (("nnx", nnx.state(Block(nnx.Rngs(0)))), ("linen", {"RMSNorm_0": linen_state})):
        with orbax.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / name, state)
        found = identify_checkpoint(tmp_path / name, "llama")
        assert [kind.fits for kind in found.kinds] == ["1 + w"], found.text
        assert not found.agrees


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


def test_promote_dtype_settles_the_dtype_alone() -> None:
    def promote(arrays: Any, *, dtype: Any) -> Any:
        assert dtype is None
        return tuple(None if array is None else array.astype(jnp.bfloat16) for array in arrays)

    x = normal(0, 3, 8)
    got = nnx_layer(8, promote_dtype=promote)(x)
    np.testing.assert_array_equal(got, nnx_layer(8, dtype=jnp.bfloat16)(x))


def test_arguments() -> None:
    x = normal(0, 2, 8)
    with pytest.raises(ValueError, match=r"scale has shape \(7,\), expected \(8,\) to match axis -1 of x f32\[2, 8\]"):
        nnx_layer(7)(x)
    for layer in both(8, reduction_axes=(0, 2)):
        with pytest.raises(ValueError, match=r"axis is 2, expected between -2 and 1 for x f32\[2, 8\]"):
            layer(x)
    for layer in both(8, feature_axes=3):
        with pytest.raises(ValueError, match=r"feature_axis is 3, expected between -2 and 1 for x f32\[2, 8\]"):
            layer(x)
    for layer in both(8):
        with pytest.raises(TypeError, match=r"x is \[1.0\] \(list\), expected a jax.Array"):
            layer([1.0])
    ones = jnp.ones((2, 8), jnp.int32)
    nnx_one, linen_one = both(8)
    with pytest.raises(TypeError, match=r"mask has dtype int32, expected bool"):
        nnx_one(x, ones)
    np.testing.assert_array_equal(linen_one(x, ones), linen_one(x))  # as the built-in one


def spread(x: Any, parts: int = 4) -> Any:
    return jnp.stack(jnp.split(x, parts, axis=-1))


OVER = {
    "flax": {},
    "outside, partial": {"variant": "zhang_torch", "partial": 1.0},
    "clamp": {"variant": "x_transformers", "epsilon": 4.0},
    "variance": {"variant": "keras_rms_scaling"},
}


@pytest.mark.parametrize("options", OVER.values(), ids=OVER)
@pytest.mark.parametrize("masked", [False, True])
def test_over_a_mapped_axis(options: dict[str, Any], masked: bool) -> None:
    """float64 sums in another order: the same float32 but near a tie; the gradients add up 4 float32 at most."""
    x, v, scale = normal(0, 5, 16), normal(1, 5, 16), normal(2, 16)
    share = np.repeat([0.9, 0.2, 0.5, 0.0], 4)
    mask = jnp.asarray(np.random.default_rng(3).uniform(size=x.shape) < share).at[1].set(False) if masked else None
    options = {"epsilon": EPS, **options}
    module = linen.RMSNorm(axis_name="devices", **options)
    whole = linen.RMSNorm(**options)
    assert module.init(jax.random.key(0), x)["params"]["scale"].shape == (16,)

    def one(x: Any, scale: Any, mask: Any) -> Any:
        return module.apply({"params": {"scale": scale}}, x, mask=mask)

    def sharded(x: Any, scale: Any) -> Any:
        masks = None if mask is None else spread(mask)
        parts = jax.vmap(one, (0, 0, None if masks is None else 0), axis_name="devices")(
            spread(x), spread(scale), masks
        )
        return jnp.concatenate(list(parts), -1)

    def together(x: Any, scale: Any) -> Any:
        return whole.apply({"params": {"scale": scale}}, x, mask=mask)

    got, want = (
        (jax.jit(f)(x, scale), jax.jit(jax.grad(lambda *args: jnp.sum(v * jnp.sin(f(*args))), (0, 1)))(x, scale))  # noqa: B023
        for f in (sharded, together)
    )
    for one_, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert bool(jnp.any(other))
        np.testing.assert_allclose(one_, other, rtol=2.0**-22, atol=2.0**-22)
    if masked:
        live = spread(mask).astype(jnp.float32)
        means = jnp.sum(spread(x) ** 2 * live, -1) / jnp.maximum(1.0, jnp.sum(live, -1))
        root = jnp.sqrt(jnp.mean(means, 0)[:, None] + EPS)  # of the unweighted mean of the devices' means
        assert float(jnp.max(jnp.abs(x / root * scale - want[0]))) > 0.1


def test_kept_over_a_mapped_axis() -> None:
    """Over devices, too, differentiation keeps nothing of x's size but x."""
    layer = nnx_layer(8, axis_name="devices")
    x = normal(0, 4, 3, 8)
    _, pull = jax.vjp(jax.vmap(layer, axis_name="devices"), x)
    assert sorted((leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(pull)) == [
        ("float32", (4, 3, 8)), ("float32", (8,)), ("float64", (3, 1))
    ]  # fmt: skip
