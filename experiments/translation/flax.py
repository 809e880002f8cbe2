"""Training in Flax, by JAX's compiler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.experiment import State
from rmsnorm.nematus.backends import model_class
from rmsnorm.nematus.config import Config


class Learner:
    """See experiments.translation.task.Learner."""

    def __init__(self, config: Config, parameters: Mapping[str, Any], rate: float, clip: float) -> None:
        self.model = model_class("flax", config)(config, parameters)
        transformation = optax.chain(optax.clip_by_global_norm(clip), optax.adam(rate))
        self.optimizer = nnx.Optimizer(self.model, transformation, wrt=nnx.Param)

    def minimise(self, batch: Any) -> float:
        x, x_mask, y, y_mask = batch
        ids = jnp.asarray(x, jnp.int32), jnp.asarray(x_mask), jnp.asarray(y, jnp.int32), jnp.asarray(y_mask)
        return float(_descend(self.model, self.optimizer, *ids))

    def state(self) -> State:
        leaves = jax.tree.leaves(nnx.state((self.model, self.optimizer)))
        return {str(index): np.array(leaf) for index, leaf in enumerate(leaves)}

    def restore(self, state: State) -> None:
        before = nnx.state((self.model, self.optimizer))
        leaves, tree = jax.tree.flatten(before)
        new = [jnp.asarray(state[str(index)], leaf.dtype) for index, leaf in enumerate(leaves)]
        nnx.update((self.model, self.optimizer), jax.tree.unflatten(tree, new))


@nnx.jit
def _descend(model: Any, optimizer: Any, *batch: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(lambda model: model.loss(*batch).mean())(model)
    with jax.numpy_dtype_promotion("standard"):  # which Optax relies on
        optimizer.update(model, gradients)
    return loss
