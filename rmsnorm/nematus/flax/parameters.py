"""The parts of the recurrent models and the Transformer: parameters by name, the norm, and projections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial as bind
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax import numpy as jnp

from rmsnorm import dtypes, errors
from rmsnorm.flax_impl.functional import rms_norm
from rmsnorm.nematus import cells
from rmsnorm.nematus.cells import EPS, PARTIAL, CellNorm, check_norm

# Users need not compile a model; in another jit, grad or vmap its functions become a part of that.
compiled = bind(jax.jit, inline=True)


class Scope(nnx.Module):
    """Parameters below one name."""


class Named(Scope):
    """A module whose parameters have names with slashes, as ``gru0/state_to_gates``; nested modules in its state."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        for name, value in parameters.items():
            *scopes, leaf = name.split("/")
            module: nnx.Module = self
            for scope in scopes:
                if not hasattr(module, scope):
                    setattr(module, scope, Scope())
                module = getattr(module, scope)
            setattr(module, leaf, nnx.Param(jnp.array(value)))  # a copy, because an optimizer may donate the array

    def by_name(self) -> dict[str, jax.Array]:
        state = nnx.to_flat_state(nnx.state(self, nnx.Param))
        return {"/".join(map(str, path)): value[...] for path, value in state}


@bind(
    jax.tree_util.register_dataclass, data_fields=["values", "masks"], meta_fields=["norm", "partial", "eps", "scope"]
)
@dataclass(frozen=True)
class Parameters:
    """Arrays below a name, as one argument of a compiled function.

    ``parameters / "gru0"`` are the arrays below that name, ``parameters["W"]`` is an array. The object also has the
    norm of the model and, in training, its dropout: ``drop("W", x)`` applies the mask of W to x, the input of W.
    """

    values: Mapping[str, jax.Array]
    norm: CellNorm = "none"
    partial: float = PARTIAL
    eps: float = EPS
    masks: Mapping[str, jax.Array] = field(default_factory=dict)
    scope: str = ""

    def __post_init__(self) -> None:
        check_norm(self.norm)

    def __truediv__(self, name: str) -> Parameters:
        return replace(self, scope=f"{self.scope}{name}/")

    def __getitem__(self, name: str) -> jax.Array:
        return self.values[self.scope + name]

    def get(self, name: str) -> jax.Array | None:
        return self.values.get(self.scope + name)

    def drop(self, name: str, x: jax.Array) -> jax.Array:
        mask = self.masks.get(self.scope + name)
        return x if mask is None else x * mask


def dropout_masks(
    key: jax.Array, rates: Mapping[str, float], shapes: Mapping[str, tuple[int, ...]], dtype: Any
) -> dict[str, jax.Array]:
    """Nematus's dropout after Gal & Ghahramani: one mask for each name, the same in all steps of a sequence."""
    return {
        name: jax.random.bernoulli(own_key, 1 - rates[name], shape).astype(dtype) / (1 - rates[name])
        for own_key, (name, shape) in zip(jax.random.split(key, len(shapes)), shapes.items(), strict=True)
        if rates[name]
    }


def dropout_key(rngs: nnx.RngStream | None) -> jax.Array:
    """The next key of a model in training.

    Raises:
        ValueError: the model was made without rngs.
    """
    if rngs is None:
        raise errors.out_of_domain("dropout", "rngs", None, "an nnx.Rngs in training", "make the model with one")
    return rngs()


def normalise(p: Parameters, x: jax.Array, gain: str, offset: str | None, norm: CellNorm | None = None) -> jax.Array:
    """The norm over the last axis: x / sqrt(mean(x^2) + eps) * gain + offset; LayerNorm takes x - mean(x) as x.

    norm: by default that of the model.
    """
    norm = norm or p.norm
    if norm == "none":
        return x
    bias = None if offset is None else p.get(offset)
    if norm == "layer":
        return _layer_norm(x, p[gain], bias, p.eps)
    partial = p.partial if norm == "prms" else None
    return rms_norm(x, p[gain], bias, variant="nematus", eps=p.eps, partial=partial)


def _layer_norm(x: jax.Array, gain: jax.Array, offset: jax.Array | None, eps: float) -> jax.Array:
    """LayerNorm, computed in at least float32."""
    wide = dtypes.arithmetic(x.dtype.name)
    centred = x.astype(wide)
    centred = centred - centred.mean(-1, keepdims=True)
    y = centred * lax.rsqrt((centred * centred).mean(-1, keepdims=True) + eps) * gain.astype(wide)
    return (y if offset is None else y + offset.astype(wide)).astype(x.dtype)


def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
    """x W in the full precision of their dtype; accelerators use a lower one by default."""
    return jnp.matmul(x, w, precision=lax.Precision.HIGHEST)


def project(p: Parameters, x: jax.Array, weight: str, bias: str | None, norm: tuple[str, str] | None) -> jax.Array:
    """norm(x W + b), with b inside the norm; a bias or a norm of None is left out."""
    y = multiply(p.drop(weight, x), p[weight])
    if bias is not None:
        y = y + p[bias]
    return y if norm is None else normalise(p, y, *norm)


def feed_forward(p: Parameters, x: jax.Array, *, norm: bool = True) -> jax.Array:
    """norm(x W + b); the variables of the norm are directly below the name of the layer."""
    return project(p, x, "W", "b", leaves(p) if norm else None)


def leaves(p: Parameters, scope: str = "") -> tuple[str, str]:
    """Nematus's names of the gain and the offset of the norm below a scope."""
    return cells.leaves(p.norm, scope)
