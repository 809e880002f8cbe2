"""replace in Flax NNX: models compiled and copied, and layers stacked for scan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rmsnorm.conversion import replace

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
from norms import FRAMEWORKS, own  # noqa: E402

pytestmark = pytest.mark.flax
jnp = jax.numpy
in_list = getattr(nnx, "List", list)  # Flax 0.11 takes lists themselves
FLAX = FRAMEWORKS["flax"]()
X = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    """That of JAX by default, which nnx.RMSNorm with a dtype needs."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.norms = in_list([FLAX.layer(own), nnx.RMSNorm(8, dtype=jnp.bfloat16, rngs=rngs)])

    def __call__(self, x: Any) -> Any:
        x = self.norms[0](self.dense(x))
        return x + self.norms[1](x).astype(x.dtype)


def measured(model: Any) -> list[Any]:
    """y and the gradients, compiled."""

    def loss(model: Any) -> Any:
        return jnp.square(model(X)).sum()

    results = nnx.jit(lambda model: (model(X), nnx.grad(loss)(model)))(model)
    results = jax.tree.leaves(results)
    return [np.asarray(result, np.float64) for result in results]


def test_a_model_says_and_learns_the_same() -> None:
    """The norms keep their place, their class and their state; test_replace.py has copies and what is left."""
    model, mine = Net(), Net()
    norms, kinds, want = list(mine.norms), [type(norm) for norm in mine.norms], measured(model)
    state = nnx.state(mine)
    assert {entry.name: entry.variant.eps for entry in replace(mine)} == {"norms/0": 1e-5, "norms/1": 1e-6}
    assert all(norm is own for norm, own in zip(mine.norms, norms, strict=True))
    assert all(isinstance(norm, kind) and type(norm) is not kind for norm, kind in zip(norms, kinds, strict=True))
    assert jax.tree.structure(nnx.state(mine)) == jax.tree.structure(state)
    nnx.update(mine, nnx.state(model))
    for got, expected in zip(measured(mine), want, strict=True):
        assert np.abs(got - expected).max() <= 2.0**-7 * np.abs(expected).max()  # two roundings to bfloat16
    assert "computed_by='rmsnorm'" in repr(mine)


@pytest.mark.parametrize("make", [lambda rngs: FLAX.layer(own), lambda rngs: nnx.RMSNorm(8, rngs=rngs)])
def test_layers_that_are_stacked_for_scan(make: Any) -> None:
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(rngs: Any) -> Any:
        return make(rngs)

    def through(norms: Any, x: Any) -> Any:
        return nnx.scan(lambda x, norm: norm(x) + x, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, norms)

    layer, mine, other = (stacked(nnx.Rngs(0)) for _ in range(3))
    (entry,) = replace(mine)
    assert entry.variant is not None, entry
    want = through(layer, X)
    np.testing.assert_allclose(through(mine, X), want, rtol=1e-5)
    replace(other, entry.variant.replace(eps=0.1))
    assert np.abs(through(other, X) - want).max() > 1e-3, "it is its own code"
