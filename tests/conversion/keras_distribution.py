"""replace within a distribution of Keras that shards the scale over two devices. test_replace_keras runs it."""

from __future__ import annotations

import keras
import numpy as np

from rmsnorm.conversion import replace

mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"], keras.distribution.list_devices())
layouts = keras.distribution.LayoutMap(mesh)
layouts[".*scale"] = ("model",)
distribution = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
with distribution.scope():
    model = keras.Sequential([keras.Input((5, 8)), keras.layers.RMSNormalization(), keras.layers.Dense(8)])
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")
    want = np.asarray(model(x))
    (entry,) = replace(model)
    assert entry.why == "recognised", entry
    assert keras.distribution.distribution() is distribution
    np.testing.assert_allclose(np.asarray(model(x)), want, rtol=1e-5, atol=1e-6)
    scale = model.layers[0].scale.value
    assert not scale.sharding.is_fully_replicated
print("done")
