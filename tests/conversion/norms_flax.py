"""Norms of Flax NNX that `replace` is asked about: made, called, differentiated and copied."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import numpy as np
from flax import nnx

jnp = jax.numpy
ROUNDING = 1e-4


class OwnNorm(nnx.Module):
    def __init__(self, eps: float = 1e-5) -> None:
        self.g, self.eps = nnx.Param(jnp.linspace(0.5, 2, 8)), eps

    def __call__(self, hidden: Any) -> Any:
        return hidden * jax.lax.rsqrt(jnp.square(hidden).mean(-1, keepdims=True) + self.eps) * self.g[...]


class WithExtra(OwnNorm):
    def __call__(self, hidden: Any, extra: float = 1.0) -> Any:
        return super().__call__(hidden) * extra


class Counting(OwnNorm):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __call__(self, hidden: Any) -> Any:
        self.calls += 1
        return super().__call__(hidden)


class WithoutNaN(OwnNorm):
    def __call__(self, hidden: Any) -> Any:
        return jnp.nan_to_num(super().__call__(hidden))


class Gated(OwnNorm):
    """Mamba-2's in groups, or with a sigmoid after the norm; the gate may be left out."""

    def __init__(self, group: int = 0) -> None:
        super().__init__()
        self.group = group

    def __call__(self, hidden: Any, gate: Any = None) -> Any:
        f = 1.0 if gate is None else jax.nn.silu(gate) if self.group else jax.nn.sigmoid(gate)
        h = hidden * f if self.group else hidden
        wide = h.reshape(*h.shape[:-1], -1, self.group or h.shape[-1])
        y = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
        return y.reshape(h.shape) * self.g[...] * (1.0 if self.group else f)


class GroupsAlone(Gated):
    def __call__(self, hidden: Any) -> Any:
        return super().__call__(hidden)


class UnitNorm(nnx.Module):
    def __call__(self, x: Any) -> Any:
        return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


RIGHT = {
    "own": OwnNorm, "with an argument": WithExtra, "groups": lambda: GroupsAlone(4), "silu gate": lambda: Gated(4),
    "sigmoid gate": Gated,
}  # fmt: skip
LEFT = {
    "LayerNorm": lambda: nnx.LayerNorm(8, rngs=nnx.Rngs(0)), "BatchNorm": lambda: nnx.BatchNorm(8, rngs=nnx.Rngs(0)),
    "counting": Counting, "NaN": WithoutNaN, "L2": UnitNorm,
}  # fmt: skip
EPS = {"own": (OwnNorm, "eps", "1e-05")}


def call(layer: Any, *inputs: Any, **options: Any) -> Any:
    return np.asarray(nnx.jit(lambda layer: layer(*inputs, **options))(layer))


def own_code(kind: Any, layer: Any, *inputs: Any, **options: Any) -> Any:
    return np.asarray(nnx.jit(lambda layer: kind.__call__(layer, *inputs, **options))(layer))


def results(layer: Any, *inputs: Any) -> list[Any]:
    """y, and the gradients for the parameters and the inputs, compiled."""
    leaves = [jnp.asarray(array) for array in inputs]

    def loss(layer: Any, *leaves: Any) -> Any:
        y = layer(*leaves)
        return (y * jax.lax.stop_gradient(jnp.cos(y))).sum()

    gradients = nnx.grad(loss, argnums=tuple(range(len(inputs) + 1)))
    found = nnx.jit(lambda layer, *leaves: (layer(*leaves), gradients(layer, *leaves)))(layer, *leaves)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


def copies(layer: Any) -> list[Any]:
    return [layer, nnx.clone(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]


def double(layer: Any) -> None:
    """The gain is set to twice its value."""
    layer.g = nnx.Param(2 * layer.g[...])
