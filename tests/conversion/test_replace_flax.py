"""replace in Flax NNX: modules keep their class and state, compiled and copied, and learn the same."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rmsnorm.conversion import replace

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
linen = pytest.importorskip("flax.linen")
jnp = jax.numpy
in_list = getattr(nnx, "List", list)  # Flax 0.11 takes lists themselves


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    """That of JAX by default, which nnx.RMSNorm with a dtype needs."""
    with jax.numpy_dtype_promotion("standard"):
        yield


X = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")


class OwnNorm(nnx.Module):
    def __init__(self, width: int) -> None:
        self.g = nnx.Param(jnp.linspace(0.5, 2, width))

    def __call__(self, hidden: Any, extra: float = 1.0) -> Any:
        return hidden * jax.lax.rsqrt(jnp.square(hidden).mean(-1, keepdims=True) + 1e-5) * self.g[...] * extra


class Counting(OwnNorm):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.calls = 0

    def __call__(self, hidden: Any) -> Any:
        self.calls += 1
        return super().__call__(hidden)


class WithoutNaN(OwnNorm):
    def __call__(self, hidden: Any) -> Any:
        return jnp.nan_to_num(super().__call__(hidden))


class Gated(OwnNorm):
    """Mamba-2's, in groups of 4."""

    def __call__(self, hidden: Any, gate: Any = None) -> Any:
        h = hidden if gate is None else hidden * jax.nn.silu(gate)
        wide = h.reshape(*h.shape[:-1], -1, 4)
        y = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
        return y.reshape(h.shape) * self.g[...]


class Groups(Gated):
    """Without a gate."""

    def __call__(self, hidden: Any) -> Any:
        return super().__call__(hidden)


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.norms = in_list([OwnNorm(8), nnx.RMSNorm(8, dtype=jnp.bfloat16, rngs=rngs)])
        self.others = in_list([nnx.BatchNorm(8, rngs=rngs), Counting(8), WithoutNaN(8)])

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
    model, mine = Net(), Net()
    norms, kinds, want = list(mine.norms), [type(norm) for norm in mine.norms], measured(model)
    state = nnx.state(mine)
    report = {entry.name: entry for entry in replace(mine)}
    assert {name: entry.why for name, entry in report.items() if entry.variant is None} == {
        "others/0": "it holds bias, mean, scale, var, expected a gain and perhaps a bias",
        "others/1": "a call changes its state",
        "others/2": "it agrees on the rows that identify tries, and not in 1 of 4 circumstances: 'few rows of 8, "
        "5 axes; NaN in a row': 'few rows of 8, 5 axes; NaN in a row' f32 y: "
        "at (1, 0, 1, 0, 0) got 0, want nan, inf ulp",
    }
    assert [report[f"norms/{i}"].variant.eps for i in range(2)] == [1e-5, 1e-6]
    assert report["norms/0"].why == "recognised; with extra it runs its own code"
    assert all(norm is own for norm, own in zip(mine.norms, norms, strict=True))
    assert all(isinstance(norm, kind) and type(norm) is not kind for norm, kind in zip(norms, kinds, strict=True))
    assert jax.tree.structure(nnx.state(mine)) == jax.tree.structure(state)
    nnx.update(mine, nnx.state(model))
    # Flax 0.11 keeps the functions that made parameters, and pickle does not know those of nnx.Linear.
    dumped = [] if hasattr(mine.dense, "kernel_init") else [pickle.loads(pickle.dumps(mine))]
    for other in (mine, nnx.clone(mine), copy.deepcopy(mine), *dumped):
        assert [type(norm) for norm in other.norms] == [type(norm) for norm in norms]
        y = other(X)
        np.testing.assert_allclose(np.asarray(y, np.float64), want[0], rtol=0.01, atol=0.01)
    for got, expected in zip(measured(mine), want, strict=True):
        assert np.abs(got - expected).max() <= 2.0**-7 * np.abs(expected).max()  # two roundings to bfloat16
    own = mine.norms[0]
    assert "computed_by='rmsnorm'" in repr(mine)
    assert np.array_equal(own(X, 2.0), OwnNorm.__call__(own, X, 2.0))
    assert not np.array_equal(own(X), OwnNorm.__call__(own, X))  # ours is exact


def test_linen_makes_its_modules_in_each_call() -> None:
    with pytest.raises(TypeError, match=r"a linen model makes its norms in each call; name rmsnorm.flax_impl.linen"):
        replace(linen.RMSNorm())


def test_groups_without_a_gate() -> None:
    layer, mine = Groups(8), Groups(8)
    (entry,) = replace(mine)
    assert (entry.why, entry.variant.eps) == ("recognised, in groups of 4", 1e-5)
    got, want = (np.asarray(nnx.jit(norm)(X)) for norm in (mine, layer))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert not np.array_equal(got, want)  # ours is exact


def test_a_norm_with_a_gate() -> None:
    layer, mine = Gated(8), Gated(8)
    (entry,) = replace(mine)
    assert entry.why == "recognised, with a silu gate before the norm, in groups of 4"
    z = jnp.asarray(X[::-1])

    def grads(layer: Any) -> Any:
        loss = nnx.grad(lambda layer, x, z: jnp.sin(layer(x, gate=z)).sum(), argnums=(0, 1, 2))
        return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.jit(loss)(layer, jnp.asarray(X), z))]

    for got, want in zip(grads(mine), grads(layer), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    y = layer(X, z)
    np.testing.assert_allclose(mine(X, z), y, rtol=1e-5, atol=1e-6)
    assert not np.array_equal(mine(hidden=X, gate=z), y)  # ours is not its code
    assert np.array_equal(mine(X), layer(X)), "without a gate it runs its own"


class WithEps(OwnNorm):
    def __init__(self, eps: float) -> None:
        super().__init__(8)
        self.eps = eps

    def __call__(self, hidden: Any) -> Any:
        return hidden * jax.lax.rsqrt(jnp.square(hidden).mean(-1, keepdims=True) + self.eps) * self.g[...]


def test_an_eps_that_is_set_later_is_refused() -> None:
    mine, call = WithEps(1e-6), nnx.jit(lambda norm, x: norm(x))
    replace(mine)
    for each in (mine, nnx.clone(mine), copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        with pytest.raises(ValueError, match=r"replace: eps is 1\.0, expected 1e-06, with which replace has replaced"):
            each.eps = 1.0
        each.eps, each.note = 1e-6, "kept"
        np.testing.assert_allclose(each(X), WithEps(1e-6)(X), rtol=1e-5)
        np.testing.assert_allclose(call(each, X), WithEps(1e-6)(X), rtol=1e-5)
        each.g = nnx.Param(2 * each.g[...])
        np.testing.assert_allclose(call(each, X), 2 * WithEps(1e-6)(X), rtol=1e-5)


class UnitNorm(nnx.Module):
    def __call__(self, x: Any) -> Any:
        return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def test_an_l2_norm_is_left_with_its_formula() -> None:
    (entry,) = replace(UnitNorm(), dry_run=True)
    assert entry.variant is None
    assert entry.why.startswith("it computes the L2 norm, eps below the norm: x / max(|x|, 1e-12), which is RMSNorm")


@pytest.mark.parametrize("make", [lambda rngs: OwnNorm(8), lambda rngs: nnx.RMSNorm(8, rngs=rngs)])
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


def test_stacked_layers_that_are_no_norms_say_what_they_are() -> None:
    class Shift(nnx.Module):
        def __init__(self) -> None:
            self.g = nnx.Param(jnp.ones((3, 8)))

        def __call__(self, x: Any) -> Any:
            return x + self.g[...].reshape(8)

    Shift.__name__ = "ShiftNorm"
    (entry,) = replace(Shift())
    assert entry.why.startswith("it cannot be called with x alone: "), entry
