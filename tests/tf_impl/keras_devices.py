"""The layer on several devices of one machine, with the backend that KERAS_BACKEND names: on TensorFlow
tf.distribute.MirroredStrategy on two, on JAX keras.distribution on eight. test_keras runs it.

Gradients are the golden's of all rows together, which are the single device's: the bound is that of the parity kit.
"""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
from keras_values import check, judged_step, normal, to_numpy

from rmsnorm.tf_impl import RMSNormalization


def to_backend(x: Any) -> Any:
    """Exactly; a backend may not know how from bfloat16."""
    return keras.ops.cast(keras.ops.convert_to_tensor(x.astype(np.float32)), x.dtype.name)


def check_mirrored_strategy() -> None:
    """The gain is mirrored; compiled as a graph and eagerly, one step of a fit is that of one device.

    (jit_compile=True TensorFlow itself refuses: XLA does not reach the variables of another device.)
    """
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    for policy, way in (("float32", {"run_eagerly": True}), ("mixed_bfloat16", {"jit_compile": False})):
        with strategy.scope():
            layer = RMSNormalization(variant="equinox", dtype=policy)
            judged_step(layer, normal(16, 32), **way)
        for weight in layer.weights:
            parts = strategy.experimental_local_results(weight.value)
            assert [part.device[-5:] for part in parts] == ["CPU:0", "CPU:1"]
            np.testing.assert_array_equal(*(part.numpy() for part in parts))


def check_model_parallel() -> None:
    """Two times the data, four parts of every row: the gain lies in parts, and so does the statistic, summed across."""
    import jax

    mesh = keras.distribution.DeviceMesh((2, 4), ("batch", "model"), keras.distribution.list_devices())
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*norm/.*"] = ("model",)
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch"))
    for policy, variant, partial in (("float32", "equinox", None), ("mixed_bfloat16", "llama", 0.3)):
        layer, x = RMSNormalization(variant=variant, partial=partial, dtype=policy, name="norm"), normal(16, 32)
        model = judged_step(layer, x)
        for weight in layer.weights:
            assert tuple(weight.value.sharding.spec) == ("model",), weight.path
            assert weight.value.addressable_shards[0].data.shape == (8,)
        x = x.astype(layer.compute_dtype)
        check(model.predict(x, verbose=0), layer, x)

        both = keras.distribution.TensorLayout(("batch", "model"), mesh)
        rows = keras.distribution.distribute_tensor(to_backend(x), both)
        weights = [weight.value for weight in layer.weights]
        function = lambda rows, weights, layer=layer: layer.stateless_call(weights, [], rows)[0]  # noqa: E731

        def gradients(rows: Any, weights: Any, function: Any = function) -> Any:
            y, pull = jax.vjp(function, rows, weights)
            return pull(y)

        for program in (function, gradients):
            text = jax.jit(program).lower(rows, weights).compile().as_text()
            moved = re.findall(r"= \(?\w+\[([\d,]*)\]\S* (all-\w+|collective-\w+)\(", text)
            # x is neither gathered nor moved, in a partial norm either: a number, one a row, or a part of the gain
            assert {kind for _, kind in moved} == {"all-reduce"}, moved
            assert {shape for shape, _ in moved} <= {"", "8", "8,1"}, moved
        y = jax.jit(function)(rows, weights)
        assert tuple(y.sharding.spec) == ("batch", "model")
        check(to_numpy(y), layer, x)


if __name__ == "__main__":
    if keras.backend.backend() == "tensorflow":
        check_mirrored_strategy()
    else:
        check_model_parallel()
    print(f"{keras.backend.backend()}: done")
