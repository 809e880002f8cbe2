"""Keras on TensorFlow: eagerly, in the graph of tf.function, and compiled by XLA (``jit_compile=True``)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from rmsnorm.specification.variants import Variant
from rmsnorm.targets.bridges import bridge
from timing.backends import keras
from timing.candidates import COPY, Call, Candidate, Workbench, copy_into
from timing.machine import processor
from timing.problem import Problem


def load(device: str) -> Workbench:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    keras_version = keras.start("tensorflow")
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    between = bridge("tf", device)
    device_name = "/GPU:0" if device == "cuda" else "/CPU:0"

    def placed(function: Callable[..., Any], *arguments: Any) -> Call:
        def call() -> Any:
            with tf.device(device_name):
                return function(*arguments)

        return call

    def candidates(problem: Problem, op: str, variant: Variant) -> list[Candidate]:
        with tf.device(device_name):
            x, dy = tf.constant(problem.x), tf.constant(problem.dy)
            layers = keras.layers(problem, variant)

        def modes(kind: str, layer: Any, expected: Variant | None) -> list[Candidate]:
            parameters = [variable.value for variable in layer.trainable_variables]

            def both(x: Any, dy: Any) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = layer(x)
                return (y, *tape.gradient(y, [x, *parameters], dy))

            def forward(x: Any, dy: Any) -> Any:
                return (layer(x),)

            function = forward if op == "fwd" else both
            runs = {
                "": function,
                "graph": tf.function(function, autograph=False),
                "jit": tf.function(function, jit_compile=True, autograph=False),
            }
            calls = {mode: placed(run, x, dy) for mode, run in runs.items()}
            return [Candidate(kind, call, mode, expected) for mode, call in calls.items()]

        def deep_copy() -> Any:
            return tf.raw_ops.DeepCopy(x=x) if op == "fwd" else (tf.raw_ops.DeepCopy(x=x), x + dy)

        return [
            *(candidate for kind, (layer, expected) in layers.items() for candidate in modes(kind, layer, expected)),
            Candidate(COPY, placed(deep_copy)),
            *([copy_into(problem, op)] if device == "cpu" else []),
        ]

    name = tf.config.experimental.get_device_details(gpus[0])["device_name"] if device == "cuda" else processor()
    synchronise = tf.test.experimental.sync_devices if device == "cuda" else lambda: None
    version = f"{tf.__version__}, {keras_version}"
    return Workbench(version, name, candidates, between.fetch, synchronise)
