"""Training in Keras on TensorFlow, in one compiled graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from experiments.experiment import State
from experiments.norms import used
from experiments.timing import of_programs
from experiments.translation import TranslationOptions
from rmsnorm.nematus.backends import model_class
from rmsnorm.nematus.config import Config


class Learner:
    """See experiments.translation.task.Learner."""

    def __init__(self, config: Config, parameters: Mapping[str, Any], options: TranslationOptions) -> None:
        self.model = model_class("tf", config)(config, parameters)
        adam = keras.optimizers.Adam
        self.optimizer = adam(options.rate, epsilon=1e-8, global_clipnorm=options.clip)  # of PyTorch and Optax
        self.optimizer.build(self.model.trainable_variables)
        self.norms = used("tf", options.operations)
        programs = self._loss, self._both, self._step
        self.programs = [tf.function(program, reduce_retracing=True) for program in programs]

    def minimise(self, batch: Any) -> float:
        with self.norms:
            return float(self.programs[-1](*map(tf.constant, batch)))

    def seconds_of(self, batch: Any) -> dict[str, float]:
        arrays = list(map(tf.constant, batch))
        with self.norms:
            return of_programs(*(lambda own=own: own(*arrays) for own in self.programs))

    def _loss(self, *batch: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(self.model.loss(*batch))

    def _both(self, *batch: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = self._loss(*batch)
        return loss, tape.gradient(loss, [weight.value for weight in self.model.trainable_variables])

    def _step(self, *batch: tf.Tensor) -> tf.Tensor:
        loss, gradients = self._both(*batch)
        self.optimizer.apply(gradients, self.model.trainable_variables)
        return loss

    def state(self) -> State:
        return {str(index): variable.value.numpy().copy() for index, variable in enumerate(self._variables())}

    def restore(self, state: State) -> None:
        for index, variable in enumerate(self._variables()):
            variable.assign(state[str(index)])

    def _variables(self) -> list[Any]:
        return [*self.model.variables, *self.optimizer.variables]
