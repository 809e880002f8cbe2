"""Training in Keras on TensorFlow, in one compiled graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from experiments.experiment import State
from rmsnorm.nematus.backends import model_class
from rmsnorm.nematus.config import Config


class Learner:
    """See experiments.translation.task.Learner."""

    def __init__(self, config: Config, parameters: Mapping[str, Any], rate: float, clip: float) -> None:
        self.model = model_class("tf", config)(config, parameters)
        self.optimizer = keras.optimizers.Adam(rate, epsilon=1e-8, global_clipnorm=clip)  # of PyTorch and Optax
        self.optimizer.build(self.model.trainable_variables)
        self._step = tf.function(self._descend, reduce_retracing=True)

    def minimise(self, batch: Any) -> float:
        return float(self._step(*map(tf.constant, batch)))

    def _descend(self, *batch: tf.Tensor) -> tf.Tensor:
        weights = self.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.model.loss(*batch))
        self.optimizer.apply(tape.gradient(loss, [weight.value for weight in weights]), weights)
        return loss

    def state(self) -> State:
        return {str(index): variable.value.numpy().copy() for index, variable in enumerate(self._variables())}

    def restore(self, state: State) -> None:
        for index, variable in enumerate(self._variables()):
            variable.assign(state[str(index)])

    def _variables(self) -> list[Any]:
        return [*self.model.variables, *self.optimizer.variables]
