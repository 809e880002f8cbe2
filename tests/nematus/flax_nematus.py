"""Nematus's models and cells in Flax, for tests that hold for all frameworks.

XLA takes seconds to compile a model, so most tests run operation by operation, with ``quick``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import nematus_framework
import numpy as np
import pytest
from flax import nnx
from jax import numpy as jnp

from rmsnorm.flax_impl.private import enable_x64
from rmsnorm.nematus import flax_models as nematus
from rmsnorm.nematus import flax_operations as operations
from rmsnorm.nematus.backends import model_class
from rmsnorm.specification.variants import Variant

KEY = "flax"
wide = partial(enable_x64, True)
array, numpy = jnp.array, np.asarray


@contextmanager
def quick() -> Iterator[None]:
    """In float64, with the formula in place of rms_norm, which is some hundred operations there.

    So is a random number: what draws is compiled.
    """
    with wide(), jax.disable_jit(), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(operations, "rms_norm", formula)
        for name in ("bernoulli", "split", "fold_in"):
            monkeypatch.setattr(jax.random, name, jax.disable_jit(False)(getattr(jax.random, name)))
        yield


def formula(x: Any, gain: Any, offset: Any, eps: float, partial: float | None) -> Any:
    counted = x[..., : Variant.get("nematus").replace(partial=partial).counted(x.shape[-1])]
    y = x / jnp.sqrt((counted * counted).mean(-1, keepdims=True) + eps) * gain
    return y if offset is None else y + offset


class Model(nematus_framework.Model):
    numpy = staticmethod(np.asarray)

    def __init__(self, config: Any, parameters: Any, *, training: bool = False, seed: int = 0) -> None:
        self.own = model_class("flax", config)(config, parameters, rngs=nnx.Rngs(seed))
        (self.own.train if training else self.own.eval)()

    def gradient_errors(self, sentences: Any, wanted: dict[str, Any]) -> dict[str, tuple[float, float]]:
        """Along one random direction, forward, in a quarter of the time: both derivatives are JAX's own."""
        graph, state, rest = nnx.split(self.own, nnx.Param, ...)
        rng = np.random.default_rng(1)
        direction = jax.tree.map(lambda value: jnp.asarray(rng.standard_normal(value.shape)), state)
        slopes = jax.jvp(lambda state: nnx.merge(graph, state, rest).loss(*sentences), (state,), (direction,))[1]
        steps = {"/".join(path): np.asarray(value[...]) for path, value in nnx.to_flat_state(direction)}
        assert steps.keys() == wanted.keys()
        products = [(steps[name] * gradient).sum() for name, gradient in wanted.items()]
        return {"along a direction": (abs(float(slopes.mean()) - sum(products)), np.linalg.norm(products))}


def new_cell(cell: str, size: int, state: int, **options: Any) -> Any:
    return nematus.Recurrent(cell, size, state, **options, rngs=nnx.Rngs(0))


def load(layer: Any, weights: dict[str, Any]) -> None:
    assert layer.by_name().keys() == weights.keys()
    flat = [(tuple(name.split("/")), nnx.Param(jnp.asarray(value))) for name, value in weights.items()]
    nnx.update(layer, nnx.from_flat_state(flat))
