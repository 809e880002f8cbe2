"""replace in Keras: models that are saved and loaded, layers without options, masks, losses and distributions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import printed

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


@keras.saving.register_keras_serializable("tests")
class OwnNorm(keras.layers.Layer):
    """A norm with its own name of the gain."""

    def __init__(self, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(**options)
        self.eps = eps

    def build(self, shape: Any) -> None:
        self.gain = self.add_weight(shape=(shape[-1],), initializer="ones", name="g")

    def call(self, hidden: Any) -> Any:
        q = keras.ops.mean(keras.ops.square(hidden), -1, keepdims=True)
        return hidden * keras.ops.rsqrt(q + self.eps) * self.gain

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "eps": self.eps}


@keras.saving.register_keras_serializable("tests")
class Block(keras.layers.Layer):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norm, self.dense = keras.layers.RMSNormalization(epsilon=1e-5), keras.layers.Dense(8)

    def build(self, shape: Any) -> None:
        self.norm.build(shape)
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        return x + self.dense(self.norm(x))


class WithoutOptions(OwnNorm):
    """Takes no name and no dtype, so that Keras itself makes none from its config."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__(eps)


class WithoutConfig(OwnNorm):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner.eps)


class AddingALoss(OwnNorm):
    def call(self, hidden: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(hidden))
        return super().call(hidden)


class Measuring(OwnNorm):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, hidden: Any) -> Any:
        self.mean.update_state(hidden)
        return super().call(hidden)


def model_of(*layers: Any) -> Any:
    keras.utils.set_random_seed(0)
    x = keras.Input((5, 8))
    h = keras.layers.Dense(8)(x)
    for layer in layers:
        h = layer(h)
    model = keras.Model(x, h)
    for weight in model.trainable_weights:
        weight.assign(weight + 0.3 * keras.random.normal(weight.shape, seed=1))
    return model


X = np.random.default_rng(0).normal(size=(4, 5, 8)).astype("float32")


def learned(model: Any) -> Any:
    """Outputs before and after two steps."""
    model.compile("sgd", "mse")
    before = model.predict(X, verbose=0)
    model.fit(X, np.ones_like(X), epochs=2, verbose=0)
    return np.stack([before, model.predict(X, verbose=0)])


def test_a_model_says_and_learns_the_same(tmp_path: Path) -> None:
    """A functional model, with a Sequential and a layer of layers in it."""

    def build() -> Any:
        inner = keras.Sequential([Block(), keras.layers.RMSNormalization(axis=(1, 2))], name="inner")
        return model_of(OwnNorm(), inner)

    model, mine = build(), build()
    model.set_weights(mine.get_weights())
    mine.predict(X, verbose=0)  # traced before
    kinds = [type(layer) for layer in mine.layers]
    report = replace(mine)
    assert {(entry.kind, entry.name.count("/"), entry.variant and entry.variant.eps) for entry in report} == {
        ("OwnNorm", 0, 1e-5), ("RMSNormalization", 2, 1e-5), ("RMSNormalization", 1, 1e-6),
    }  # fmt: skip
    assert [type(layer) for layer in mine.layers] == kinds
    (again,) = replace(mine)
    assert again.why == "its 3 RMSNorm are replaced already"
    mine.save(tmp_path / "mine.keras")
    loaded = keras.models.load_model(tmp_path / "mine.keras")
    want = learned(model)
    for other in (mine, loaded):
        np.testing.assert_allclose(learned(other), want, rtol=1e-4, atol=1e-5)
    assert len(replace(loaded)) == 3


def test_what_is_left_alone_and_why() -> None:
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
def test_a_mask_ends_at_the_built_in_layer_replaced_or_not_and_goes_through_ours() -> None:
    tokens = np.array([[1, 2, 0, 0], [3, 0, 0, 0]])

    def model(layer: Any) -> Any:
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.layers.Embedding(4, 8, mask_zero=True), layer, keras.layers.LSTM(4)])

    dropping = RMSNormalization()
    dropping.supports_masking = False  # before its first call
    built_in, ours, alike = map(model, (keras.layers.RMSNormalization(), RMSNormalization(), dropping))
    want = built_in(tokens).numpy()
    for other in (ours, alike):
        other(tokens)
        other.set_weights(built_in.get_weights())
    assert np.abs(ours(tokens).numpy() - want).max() > 0.01
    (entry,) = replace(built_in)
    assert entry.variant is not None
    # Float32: four steps, in each sums of 12 terms and 8 roundings more, in numbers below 1.
    for other in (built_in, alike):
        np.testing.assert_allclose(other(tokens).numpy(), want, rtol=0, atol=4 * 20 * 2.0**-24)


def test_a_class_that_takes_no_options_of_every_layer() -> None:
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


def test_within_a_distribution_that_shards_the_scale() -> None:
    pytest.importorskip("jax")
    script = Path(__file__).with_name("keras_distribution.py")
    devices = "--xla_force_host_platform_device_count=2"
    assert printed(script, KERAS_BACKEND="jax", XLA_FLAGS=devices).splitlines()[-1] == "done"
