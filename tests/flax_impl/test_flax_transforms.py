"""The transforms of NNX and Linen on the layers: the golden's gradients whichever way they are asked for."""

from __future__ import annotations

import functools
from typing import Any

import calls
import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import flax.linen as nn  # noqa: E402
from flax import nnx  # noqa: E402
from flax_arrays import normal  # noqa: E402
from jax import checkpoint_policies as policies  # noqa: E402
from jax import numpy as jnp  # noqa: E402

from rmsnorm import numpy_impl  # noqa: E402
from rmsnorm.conversion import replace  # noqa: E402
from rmsnorm.flax_impl import RMSNorm, linen  # noqa: E402
from rmsnorm.flax_impl.private import enable_x64  # noqa: E402

BATCH, WIDTH, EPS = 4, 8, 0.1
# Float32 in what JAX derives: each of two sums of n terms within n roundings, six more on the way, and the result's.
ROUNDINGS = (2 * WIDTH + 2 * BATCH + 6) * 2.0**-24
X, DY, T = (normal(seed, BATCH, WIDTH) for seed in range(3))
PARAMS = {"scale": normal(3, WIDTH), "bias": normal(4, WIDTH)}
TANGENTS = {"scale": normal(5, WIDTH), "bias": normal(6, WIDTH)}
MODULE = linen.RMSNorm(epsilon=EPS, use_bias=True)
NUMPY = [np.asarray(each) for each in (X, PARAMS["scale"], PARAMS["bias"])]
ALONG = [np.asarray(each) for each in (T, TANGENTS["scale"], TANGENTS["bias"])]


def layer() -> Any:
    made = RMSNorm(WIDTH, epsilon=EPS, use_bias=True, rngs=nnx.Rngs(0))
    made.scale[...], made.bias[...] = PARAMS["scale"], PARAMS["bias"]
    return made


def check(found: Any, dx: Any) -> None:
    """Gradients of a loss along DY are the golden's."""
    results = {"dx": dx, "dscale": found["scale"], "dbias": found["bias"]}
    arrays = {name: np.asarray(value) for name, value in results.items()}
    calls.hold(arrays, *NUMPY, variant="flax", eps=EPS, dy=np.asarray(DY))


OF_NNX = {
    "nnx.grad": lambda m, x: m(x),
    "nnx.remat": nnx.remat(lambda m, x: m(x), policy=policies.nothing_saveable),
    "nnx.vmap": nnx.vmap(lambda m, x: m(x), in_axes=(None, 0)),
    "nnx.scan": lambda m, x: nnx.scan(lambda m, x: (m, m(x)), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(m, x)[1],
}


@pytest.mark.parametrize("name", OF_NNX)
def test_gradients_of_nnx(name: str) -> None:
    loss = lambda m, x: jnp.vdot(DY, OF_NNX[name](m, x))  # noqa: E731
    found, dx = nnx.grad(loss, argnums=(0, 1))(layer(), X)
    check(nnx.to_pure_dict(found), dx)


def test_vjp_and_jvp_of_linen() -> None:
    class Along(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            _, dy = nn.jvp(lambda m, x: m(x), self.of, (x,), (T,), {"params": TANGENTS})
            _, pull = nn.vjp(lambda m, x: m(x), self.of, x)
            return dy, pull(DY)

        of: Any = MODULE

    dy, (found, dx) = Along().apply({"params": {"of": PARAMS}}, X)
    want = numpy_impl.rms_norm_jvp(NUMPY, ALONG, eps=EPS)
    np.testing.assert_allclose(dy, want, rtol=ROUNDINGS, atol=ROUNDINGS * np.abs(want).max())
    check(found["params"], dx)


@pytest.mark.parametrize("policy", [None, policies.nothing_saveable])
def test_a_scan_over_layers_is_the_loop(policy: Any) -> None:
    """Of float64, where these values of the order of 1 and sums of at most 32 terms err by less than 2^13 roundings."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            return x + linen.RMSNorm(epsilon=EPS, use_bias=True, name="norm")(x), None

    def scanned(params: Any, x: Any) -> Any:
        lifted = nn.scan(nn.remat(Block, policy=policy), variable_axes={"params": 0}, length=3)()
        return lifted.apply({"params": {"norm": params}}, x, None)[0]

    def loop(params: Any, x: Any) -> Any:
        for i in range(3):
            x = x + MODULE.apply({"params": {name: value[i] for name, value in params.items()}}, x)
        return x

    results = []
    with enable_x64(True):
        params = {name: jnp.stack([each.astype(jnp.float64) * i for i in (1, 2, -1)]) for name, each in PARAMS.items()}
        for function in (scanned, loop):
            y, pull = jax.jit(functools.partial(jax.vjp, function))(params, X.astype(jnp.float64))
            results.append(jax.tree.map(np.asarray, jax.tree.leaves((y, pull(DY.astype(jnp.float64))))))
    for got, want in zip(*results, strict=True):
        assert np.max(np.abs(want)) > 0.1
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


MASK = X > -0.5
WAYS = {  # functions of a layer, the mask second wherever there is one
    "vmap": lambda m: nnx.vmap(m)(X),
    "vmap, mask by name": lambda m: nnx.vmap(m)(X, mask=MASK),
    "vmap, axes": lambda m: nnx.vmap(m, in_axes=(0, 0))(X, MASK),
    "vmap of the method": lambda m: nnx.vmap(type(m).__call__, in_axes=(None, 0, 0))(m, X, MASK),
    "remat": lambda m: nnx.remat(m)(x=X),
    "jit": lambda m: nnx.jit(m)(X, mask=MASK),
    "while_loop": lambda m: nnx.while_loop(lambda c: c[0] < 1, lambda c: (1, c[1], c[1](c[2])), (0, m, X))[2],
    "checkify": lambda m: nnx.checkify(m)(X)[1],
    "jax.vmap": lambda m: jax.vmap(m)(X, MASK),
}


@functools.cache
def three() -> tuple[Any, ...]:
    """The built-in layer, ours, and a built-in one that ``replace`` has made ours."""
    kinds = nnx.RMSNorm, RMSNorm, nnx.RMSNorm
    layers = tuple(kind(WIDTH, epsilon=EPS, rngs=nnx.Rngs(0)) for kind in kinds)
    replace(nnx.Sequential(layers[-1]))
    assert type(layers[-1]) is RMSNorm
    for made in layers:
        made.scale[...] = PARAMS["scale"]
    return layers


@pytest.mark.parametrize("name", WAYS)
def test_a_layer_itself_is_transformed_as_the_built_in_one(name: str) -> None:
    """NNX gives every argument a position and counts them: ours are as many as those of the built-in layer."""
    options = {"mask": np.asarray(MASK)} if WAYS[name].__code__.co_names.count("MASK") else {}
    for made in three():
        calls.hold({"y": np.asarray(WAYS[name](made))}, *NUMPY[:2], variant="flax", eps=EPS, **options)


def test_what_only_ours_takes_has_a_position_where_it_is_passed() -> None:
    made, residual = layer(), T
    want = made(X, residual=residual)
    for got in (nnx.vmap(made)(X, residual=residual), nnx.vmap(made, in_axes=(0, None, 0))(X, None, residual)):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=ROUNDINGS, atol=ROUNDINGS), got, want)
    np.testing.assert_array_equal(made(X, None, None, DY), made(X, gate=DY))
