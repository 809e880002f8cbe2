"""A module with parameters by names with slashes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax import numpy as jnp


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
