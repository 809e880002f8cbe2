"""replace in Flax NNX: layers that nnx.vmap has stacked, as for scan, and results of another dtype than x."""

from __future__ import annotations

import numpy as np
import pytest

from rmsnorm.conversion import replace

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
from adapters import FRAMEWORKS, own  # noqa: E402

pytestmark = pytest.mark.flax
FLAX = FRAMEWORKS["flax"]()
X = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")


@pytest.fixture(autouse=True)
def promotion():
    """That of JAX by default, which nnx.RMSNorm with a dtype needs."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_a_dtype_of_y_is_kept():
    layer = nnx.RMSNorm(8, dtype=jax.numpy.bfloat16, rngs=nnx.Rngs(0))
    want = layer(X)
    (entry,) = replace(layer)
    assert (entry.variant.eps, layer(X).dtype) == (1e-6, "bfloat16")
    assert np.abs(layer(X) - want).max() <= 2.0**-7 * np.abs(want).max()  # two roundings to bfloat16


@pytest.mark.parametrize("kind", [own, "rms"])
def test_layers_that_are_stacked_for_scan(kind):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(rngs):
        return nnx.RMSNorm(8, rngs=rngs) if kind == "rms" else FLAX.layer(own)

    def through(norms, x):
        return nnx.scan(lambda x, norm: norm(x) + x, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, norms)

    layer, mine, other = (stacked(nnx.Rngs(0)) for _ in range(3))
    (entry,) = replace(mine)
    assert entry.variant is not None, entry
    want = through(layer, X)
    np.testing.assert_allclose(through(mine, X), want, rtol=1e-5)
    replace(other, entry.variant.replace(eps=0.1))
    assert np.abs(through(other, X) - want).max() > 1e-3, "it is its own code"
