"""replace in Keras: models that are saved and loaded, layers without options, masks, losses and distributions."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from programs import printed

from rmsnorm import Variant
from rmsnorm.conversion import replace

pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from rmsnorm.tf_impl import RMSNormalization  # noqa: E402

pytestmark = [
    pytest.mark.tf,
    # what Keras is warned of by NumPy when it saves
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    pytest.mark.needs("keras>=3.9", "its models have keras.layers.RMSNormalization, which is of 3.9"),
]
X = np.random.default_rng(0).normal(size=(4, 5, 8)).astype("float32")


@keras.saving.register_keras_serializable("tests")
class OwnNorm(keras.layers.Layer):
    """A norm with its own name of the gain."""

    def __init__(self, eps=1e-5, **options):
        super().__init__(**options)
        self.eps = eps

    def build(self, shape):
        self.gain = self.add_weight(shape=(shape[-1],), initializer="ones", name="g")

    def call(self, hidden):
        q = keras.ops.mean(keras.ops.square(hidden), -1, keepdims=True)
        return hidden * keras.ops.rsqrt(q + self.eps) * self.gain

    def get_config(self):
        return {**super().get_config(), "eps": self.eps}


@keras.saving.register_keras_serializable("tests")
class Block(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.norm, self.dense = keras.layers.RMSNormalization(epsilon=1e-5), keras.layers.Dense(8)

    def build(self, shape):
        self.norm.build(shape)
        self.dense.build(shape)

    def call(self, x):
        return x + self.dense(self.norm(x))


class WithoutOptions(OwnNorm):
    """Takes no name and no dtype, so that Keras itself makes none from its config."""

    def __init__(self, eps=1e-5):
        super().__init__(eps)


class WithoutConfig(OwnNorm):
    def __init__(self, inner):
        super().__init__(inner.eps)


class AddingALoss(OwnNorm):
    def call(self, hidden):
        self.add_loss(0.1 * keras.ops.mean(hidden))
        return super().call(hidden)


class Measuring(OwnNorm):
    def __init__(self, **options):
        super().__init__(**options)
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, hidden):
        self.mean.update_state(hidden)
        return super().call(hidden)


def model_of(*layers):
    """A graph of layers."""
    keras.utils.set_random_seed(0)
    x = keras.Input((5, 8))
    return keras.Model(x, functools.reduce(lambda h, layer: layer(h), layers, x))


def test_a_model_is_traced_anew_saved_and_trained(tmp_path):
    """One with a Sequential and a layer of layers in it; the file has Keras's own norms."""
    inner = keras.Sequential([Block(), keras.layers.RMSNormalization(axis=(1, 2))], name="inner")
    model = model_of(keras.layers.Dense(8), OwnNorm(), inner)
    model.compile("sgd", "mse")
    model.save(tmp_path / "theirs.keras")
    want = model.predict(X, verbose=0)  # which is traced
    kinds = [type(layer) for layer in model.layers]
    report = replace(model)
    assert {(entry.kind, entry.name.count("/"), entry.variant and entry.variant.eps) for entry in report} == {
        ("OwnNorm", 0, 1e-5), ("RMSNormalization", 2, 1e-5), ("RMSNormalization", 1, 1e-6),
    }  # fmt: skip
    assert [type(layer) for layer in model.layers] == kinds
    model.save(tmp_path / "ours.keras")
    theirs, ours = (keras.models.load_model(tmp_path / f"{name}.keras") for name in ("theirs", "ours"))
    learned = []
    for each in (theirs, model, ours):
        np.testing.assert_allclose(each.predict(X, verbose=0), want, rtol=1e-4, atol=1e-5)
        each.fit(X, np.ones_like(X), epochs=2, verbose=0)
        learned.append(each.predict(X, verbose=0))
    for each in learned[1:]:
        np.testing.assert_allclose(each, learned[0], rtol=1e-4, atol=1e-5)
    assert len(replace(ours, dry_run=True)) == 3
    replace(theirs, Variant.get("keras").replace(eps=1.0))
    assert np.abs(theirs.predict(X, verbose=0) - learned[0]).max() > 1e-3, "it is not traced anew"


def test_what_is_left_alone_and_why():
    changed, unbuilt = OwnNorm(), OwnNorm()
    layers = [changed, AddingALoss(), Measuring()]
    model = model_of(*layers)
    changed.eps = 0.1
    changed.get_config = lambda: {"eps": 1e-5}  # is not what it computes
    model.extra = unbuilt
    model(X)
    (loss,) = model.losses
    before = [dict(vars(layer)) for layer in layers]
    assert [entry.why for entry in replace(model)] == [
        "it computes another y than a layer from its config with the same weights",
        "a call adds a loss to the model's",
        "a call changes its mean/count, mean/total",
        "it is not built; call the model first",
    ]
    assert [dict(vars(layer)) for layer in layers] == before
    assert [*model.losses] == [loss], "the calls of the proof add none"
    layer = WithoutConfig(OwnNorm())
    layer.build((None, 8))
    (entry,) = replace(keras.Sequential([layer]))
    assert entry.why.startswith("its class makes no layer from its config (")


@pytest.mark.filterwarnings("ignore:Layer .* does not support masking and will therefore destroy:UserWarning")
def test_a_mask_ends_at_the_built_in_layer_replaced_or_not_and_goes_through_ours():
    tokens = np.array([[1, 2, 0, 0], [3, 0, 0, 0]])

    def model(layer):
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.layers.Embedding(4, 8, mask_zero=True), layer, keras.layers.LSTM(4)])

    built_in, ours = map(model, (keras.layers.RMSNormalization(), RMSNormalization()))
    want = built_in(tokens).numpy()
    ours(tokens)
    ours.set_weights(built_in.get_weights())
    assert np.abs(ours(tokens).numpy() - want).max() > 0.01
    (entry,) = replace(built_in)
    assert entry.variant is not None
    # Float32: four steps, in each sums of 12 terms and 8 roundings more, in numbers below 1.
    np.testing.assert_allclose(built_in(tokens).numpy(), want, rtol=0, atol=4 * 20 * 2.0**-24)


def test_a_class_that_takes_no_options_of_every_layer():
    """What is made of its config has the dtypes of the layer."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        layer = WithoutOptions(1e-3)
    finally:
        keras.config.set_dtype_policy(before)
    layer.build((None, 8))
    want = np.asarray(keras.ops.cast(layer(X), "float32"))
    (entry,) = replace(layer)
    assert (entry.variant.eps, layer.compute_dtype, keras.config.dtype_policy()) == (1e-3, "bfloat16", before)
    np.testing.assert_allclose(np.asarray(keras.ops.cast(layer(X), "float32")), want, rtol=2.0**-7)  # 1 ulp of bfloat16


def test_within_a_distribution_that_shards_the_scale():
    pytest.importorskip("jax")
    script = Path(__file__).with_name("keras_distribution.py")
    devices = "--xla_force_host_platform_device_count=2"
    assert printed(script, KERAS_BACKEND="jax", XLA_FLAGS=devices).splitlines()[-1] == "done"
