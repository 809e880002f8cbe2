"""What the recurrent models and the Transformer are made of: parameters by name, the norm, and projections."""

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

# So that nobody has to compile a model; below another jit, grad or vmap its functions are a part of that.
compiled = bind(jax.jit, inline=True)


class Scope(nnx.Module):
    """Parameters below one name."""


class Named(Scope):
    """A module with parameters by names with slashes, as ``gru0/state_to_gates``; in its state as nested modules."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        for name, value in parameters.items():
            *scopes, leaf = name.split("/")
            module: nnx.Module = self
            for scope in scopes:
                if not hasattr(module, scope):
                    setattr(module, scope, Scope())
                module = getattr(module, scope)
            setattr(module, leaf, nnx.Param(jnp.array(value)))  # a copy, which an optimizer may give away

    def by_name(self) -> dict[str, jax.Array]:
        state = nnx.to_flat_state(nnx.state(self, nnx.Param))
        return {"/".join(map(str, path)): value[...] for path, value in state}


@bind(jax.tree_util.register_dataclass, data_fields=["values", "masks"], meta_fields=["norm", "partial", "scope"])
@dataclass(frozen=True)
class Parameters:
    """Arrays below a name, as one argument of a compiled function.

    ``parameters / "gru0"`` is what lies below that name, ``parameters["W"]`` an array. The norm of the model is carried
    along, and in training its dropout: ``drop("W", x)`` is what is left of the input x of W.
    """

    values: Mapping[str, jax.Array]
    norm: CellNorm = "none"
    partial: float = PARTIAL
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
    """Nematus's dropout after Gal & Ghahramani: one mask for each name, the same at every step of a sequence."""
    return {
        name: jax.random.bernoulli(each, 1 - rates[name], shape).astype(dtype) / (1 - rates[name])
        for each, (name, shape) in zip(jax.random.split(key, len(shapes)), shapes.items(), strict=True)
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


def normalize(p: Parameters, a: jax.Array, gain: str, offset: str) -> jax.Array:
    """The norm over the last axis: a / sqrt(mean(a^2) + eps) * gain + offset; of a - mean(a) for LayerNorm."""
    if p.norm == "none":
        return a
    if p.norm == "layer":
        return _layer_norm(a, p[gain], p.get(offset))
    return rms_norm(a, p[gain], p.get(offset), variant="nematus", partial=p.partial if p.norm == "prms" else None)


def _layer_norm(a: jax.Array, gain: jax.Array, offset: jax.Array | None) -> jax.Array:
    """In at least float32."""
    wide = dtypes.arithmetic(a.dtype.name)
    centred = a.astype(wide)
    centred = centred - centred.mean(-1, keepdims=True)
    y = centred * lax.rsqrt((centred * centred).mean(-1, keepdims=True) + EPS) * gain.astype(wide)
    return (y if offset is None else y + offset.astype(wide)).astype(a.dtype)


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x W in the precision of their dtype, which accelerators lower unless told so."""
    return jnp.matmul(x, weight, precision=lax.Precision.HIGHEST)


def project(p: Parameters, x: jax.Array, weight: str, bias: str | None, norm: tuple[str, str] | None) -> jax.Array:
    """norm(x W + b), with b inside the norm; without a bias or a norm where these are None."""
    a = matmul(p.drop(weight, x), p[weight])
    if bias is not None:
        a = a + p[bias]
    return a if norm is None else normalize(p, a, *norm)


def feed_forward(p: Parameters, x: jax.Array, *, norm: bool = True) -> jax.Array:
    """norm(x W + b), the norm's variables directly below the name of the layer."""
    return project(p, x, "W", "b", leaves(p) if norm else None)


def leaves(p: Parameters, scope: str = "") -> tuple[str, str]:
    """What Nematus calls gain and offset of the norm below that scope."""
    return cells.leaves(p.norm, scope)
