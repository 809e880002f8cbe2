"""Training in Flax, by JAX's compiler."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.experiment import State
from experiments.norms import used
from experiments.timing import compiled_apart, of_programs
from experiments.translation import TranslationOptions
from rmsnorm.nematus.backends import model_class
from rmsnorm.nematus.config import Config


class Learner:
    """See experiments.translation.task.Learner."""

    def __init__(self, config: Config, parameters: Mapping[str, Any], options: TranslationOptions) -> None:
        self.model = model_class("flax", config)(config, parameters)
        transformation = optax.chain(optax.clip_by_global_norm(options.clip), optax.adam(options.rate))
        self.optimizer = nnx.Optimizer(self.model, transformation, wrt=nnx.Param)
        self.norms, self.descend = used("flax", options.operations), _compiled(options.operations)
        self.programs: tuple[Any, ...] = ()

    def minimise(self, batch: Any) -> float:
        with self.norms:
            return float(self.descend(self.model, self.optimizer, *_arrays(batch)))

    def seconds_of(self, batch: Any) -> dict[str, float]:
        arrays = _arrays(batch)
        if not self.programs:
            graph, state = nnx.split((self.model, self.optimizer))

            def run(state: Any, step: Any, *batch: Any) -> Any:
                both = nnx.merge(graph, state)
                return step(*both, *batch), nnx.state(both)

            def forward(state: Any, *batch: Any) -> Any:
                return run(state, lambda model, _, *batch: _loss(model, *batch), *batch)[0]

            def backward(state: Any, *batch: Any) -> Any:
                return run(state, lambda model, _, *batch: nnx.value_and_grad(_loss)(model, *batch), *batch)[0]

            def step(state: Any, *batch: Any) -> Any:
                return run(state, _descend, *batch)

            with self.norms:
                programs = compiled_apart((forward, backward, step), state, *arrays)
            self.programs = state, programs
        state, programs = self.programs
        return of_programs(*(lambda own=own: jax.block_until_ready(own(state, *arrays)) for own in programs))

    def state(self) -> State:
        leaves = jax.tree.leaves(nnx.state((self.model, self.optimizer)))
        return {str(index): np.array(leaf) for index, leaf in enumerate(leaves)}

    def restore(self, state: State) -> None:
        before = nnx.state((self.model, self.optimizer))
        leaves, tree = jax.tree.flatten(before)
        new = [jnp.asarray(state[str(index)], leaf.dtype) for index, leaf in enumerate(leaves)]
        nnx.update((self.model, self.optimizer), jax.tree.unflatten(tree, new))


def _arrays(batch: Any) -> tuple[jax.Array, ...]:
    x, x_mask, y, y_mask = batch
    return jnp.asarray(x, jnp.int32), jnp.asarray(x_mask), jnp.asarray(y, jnp.int32), jnp.asarray(y_mask)


def _loss(model: Any, *batch: jax.Array) -> jax.Array:
    mean: jax.Array = model.loss(*batch).mean()
    return mean


def _descend(model: Any, optimizer: Any, *batch: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(_loss)(model, *batch)
    with jax.numpy_dtype_promotion("standard"):  # which Optax relies on
        optimizer.update(model, gradients)
    return loss


@lru_cache
def _compiled(operations: str) -> Any:
    """A step, compiled once for all seeds. Each kind of operations has its own programs."""
    return nnx.jit(lambda *arguments: _descend(*arguments))
