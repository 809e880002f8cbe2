"""Nematus's models and cells in Flax, for tests that hold for all frameworks.

XLA takes seconds to compile a model, so most tests run operation by operation, with ``quick``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import nematus_framework
import numpy as np
import pytest
from flax import nnx
from jax import numpy as jnp

from rmsnorm.nematus import flax as nematus
from rmsnorm.nematus.backends import model_class
from rmsnorm.nematus.flax import operations
from rmsnorm.variants import Variant


@contextmanager
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@contextmanager
def quick() -> Iterator[None]:
    """In float64, with the formula in place of rms_norm, which is some hundred operations there.

    So is a random number: what draws is compiled.
    """
    with wide(), jax.disable_jit(), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(operations, "rms_norm", formula)
        for name in ("bernoulli", "split", "fold_in"):
            monkeypatch.setattr(jax.random, name, compiled(getattr(jax.random, name)))
        yield


def compiled(function: Any) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        with jax.disable_jit(False):
            return function(*arguments, **options)

    return call


def formula(x: Any, gain: Any, offset: Any, eps: float, partial: float | None) -> Any:
    counted = x[..., : Variant.get("nematus").replace(partial=partial).counted(x.shape[-1])]
    y = x / jnp.sqrt((counted * counted).mean(-1, keepdims=True) + eps) * gain
    return y if offset is None else y + offset


class Model(nematus_framework.Model):
    def __init__(self, config: Any, parameters: Any, *, training: bool = False, seed: int = 0) -> None:
        self.own: Any = model_class("flax", config)(config, parameters, rngs=nnx.Rngs(seed))
        (self.own.train if training else self.own.eval)()

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        return numpy(getattr(self.own, name)(*arguments, **options))

    def gradients(self, *sentences: Any) -> tuple[Any, dict[str, Any]]:
        gradients, loss = nnx.grad(mean_loss, has_aux=True)(self.own, *sentences)
        return numpy(loss), by_name(gradients)

    def gradient_errors(self, sentences: Any, wanted: dict[str, Any]) -> tuple[Any, dict[str, tuple[float, float]]]:
        """Along one random direction, forward, in a quarter of the time: both derivatives are JAX's own."""
        graph, state, rest = nnx.split(self.own, nnx.Param, ...)
        rng = np.random.default_rng(1)
        direction = jax.tree.map(lambda value: jnp.asarray(rng.standard_normal(value.shape)), state)
        loss, slopes = jax.jvp(lambda state: nnx.merge(graph, state, rest).loss(*sentences), (state,), (direction,))
        steps = by_name(direction)
        assert steps.keys() == wanted.keys()
        products = [(steps[name] * gradient).sum() for name, gradient in wanted.items()]
        error = abs(float(slopes.mean()) - sum(products))
        return numpy(loss), {"along a direction": (error, np.linalg.norm(products))}

    def scores(self, x: Any, x_mask: Any, y: Any, y_mask: Any) -> tuple[Any, Any]:
        both = nnx.jit(lambda model: (model.logits(x, x_mask, y), model.loss(x, x_mask, y, y_mask)))
        return jax.tree.map(numpy, both(self.own))


def mean_loss(model: Any, *sentences: Any) -> tuple[Any, Any]:
    loss = model.loss(*sentences)
    return loss.mean(), loss


def by_name(state: Any) -> dict[str, Any]:
    return {"/".join(path): np.asarray(value[...]) for path, value in nnx.to_flat_state(state)}


def array(value: Any, dtype: str | None = None) -> Any:
    return jnp.array(value, dtype)


def numpy(value: Any) -> Any:
    return np.asarray(value)


def overwrite(model: Any) -> None:
    """Deletes the memory of the parameters, as an optimizer does that the model is donated to."""
    for value in model.by_name().values():
        value.delete()


def masks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return nematus_framework.masks(monkeypatch, numpy)


def scale_dropout(monkeypatch: pytest.MonkeyPatch, *, keep: bool) -> float:
    """Dropout that keeps everything, and so doubles where its rate is a half; or nothing. Returns the factor."""
    monkeypatch.setattr(jax.random, "bernoulli", lambda key, p, shape, **_: jnp.full(shape, keep))
    return 2.0


def pull_back(cell: str, inputs: Any, cotangents: Any, **options: Any) -> tuple[Any, Any]:
    """Compiled."""
    inputs, cotangents = jax.tree.map(jnp.asarray, (tuple(inputs), tuple(cotangents)))

    @jax.jit
    def both(inputs: Any, cotangents: Any) -> Any:
        outputs, pullback = jax.vjp(lambda *arguments: getattr(nematus, cell)(*arguments, **options), *inputs)
        return outputs, pullback(cotangents if isinstance(outputs, tuple) else cotangents[0])

    return jax.tree.map(numpy, both(inputs, cotangents))


def new_cell(cell: str, size: int, state: int, **options: Any) -> Any:
    return getattr(nematus, cell)(size, state, **options, rngs=nnx.Rngs(0))


def load(layer: Any, weights: dict[str, Any]) -> None:
    """By their names, where a slash is a module."""
    assert layer.by_name().keys() == weights.keys()
    flat = [(tuple(name.split("/")), nnx.Param(jnp.asarray(value))) for name, value in weights.items()]
    nnx.update(layer, nnx.from_flat_state(flat))
