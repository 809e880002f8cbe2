"""LayerNorm into RMSNorm in models of Keras: what is converted is equal, what is left has a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conversions import IDS, ROUNDING, SINGLE, distance, shown

from rmsnorm.conversion.layer_norm import to_rms_norm


def keras_of() -> Any:
    pytest.importorskip("tensorflow")
    return pytest.importorskip("keras")


def keras_models() -> dict[str, Any]:
    """Models, what they take, and the layers that are left with why; all others are converted."""
    keras = keras_of()
    make = keras.layers
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    row, image = rng.standard_normal((2, 3)).astype("float32"), rng.standard_normal((2, 8, 8, 3)).astype("float32")
    position_ids = np.tile(np.arange(5), (2, 1))

    def functional(shape: tuple[int, ...], forward: Callable[[Any], Any], dtype: str = "float32") -> Any:
        inputs = keras.Input(shape, dtype=dtype)
        return keras.Model(inputs, forward(inputs))

    def norm(name: str, **options: Any) -> Any:
        return make.LayerNormalization(name=name, **options)

    def gpt() -> Any:
        ids, positions = keras.Input((5,), dtype="int32"), keras.Input((5,), dtype="int32")
        h = make.Dropout(0.1, name="drop")(make.Embedding(11, 8)(ids) + make.Embedding(5, 8)(positions))
        for i in range(2):
            a = norm(f"a{i}")(h)
            h = h + make.MultiHeadAttention(2, 4)(a, a, use_causal_mask=True)
            h = make.Add()([h, make.Dense(8)(make.Dense(16, activation="gelu")(norm(f"b{i}")(h)))])
        return keras.Model([ids, positions], make.Dense(11)(norm("last")(h)))

    def another_reader(x: Any) -> Any:
        h = make.Dense(4, name="a")(x)
        return norm("n")(h) + make.Dense(4, name="b")(h)

    def deep(x: Any) -> Any:
        dense = make.Dense(3, name="dense")
        innermost = keras.Sequential([keras.Input((3,)), dense, norm("n")], name="innermost")
        return norm("last")(dense(keras.Sequential([keras.Input((3,)), innermost, norm("m")], name="inner")(x)))

    def nested(x: Any) -> Any:
        h = make.Reshape((36, 4))(make.Conv2D(4, 3)(x))
        h = keras.Sequential([norm("n"), make.Dense(6), norm("m", axis=-1)], name="inner")(h)
        return norm("last")(make.EinsumDense("...c,cd->...d", 5, bias_axes="d")(h))

    @keras.saving.register_keras_serializable("test_layer_norm")
    class Block(make.Layer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.norm = norm("norm")

        def call(self, x: Any) -> Any:
            return self.norm(x)

    shared = make.Dense(4, name="a")
    return {
        "sequential": (keras.Sequential([keras.Input((3,)), make.Dense(4), norm("n"), make.Dense(2)]), row, {}),
        "not built": (keras.Sequential([make.Dense(4), norm("n"), make.Dense(2)]), row, {}),
        "relu": (keras.Sequential([keras.Input((3,)), make.Dense(4, activation="relu", name="a"), norm("n")]), row,
                 {"n": "keeps a mean of"}),
        "gpt": (gpt(), [IDS, position_ids], {}),
        "nested": (functional((8, 8, 3), nested), image, {}),
        "deep": (functional((3,), deep), row,
                 {"inner/m": "keeps a mean of"}),
        "channels first": (functional((8, 8, 3), lambda x: norm("n")(make.Permute((2, 3, 1))(make.Permute((3, 1, 2))(
            make.Conv2DTranspose(4, 3)(x))))), image, {}),
        "pooled": (functional((8, 8, 3), lambda x: norm("n")(make.GlobalAveragePooling2D()(make.Conv2D(4, 3)(x)))),
                   image, {}),
        "another reader": (functional((3,), another_reader), row,
                           {"n": "keeps a mean of"}),
        "a layer used twice": (functional((3,), lambda x: norm("n")(shared(x)) + keras.ops.exp(shared(x))), row,
                               {"n": "keeps a mean of"}),
        "the input": (functional((3,), lambda x: norm("n")(x + make.Dense(3)(x))), row, {"n": "keeps a mean of"}),
        "within a layer": (functional((3,), lambda x: Block(name="deep")(make.Dense(3)(x))), row,
                           {}),
        "depthwise": (functional((8, 8, 3), lambda x: norm("n")(make.Conv2D(6, 3, groups=3, name="c")(x))), image,
                      {"n": "keeps a mean of"}),
    }  # fmt: skip


KERAS_MODELS = (
    "sequential", "not built", "relu", "gpt", "nested", "deep", "channels first", "pooled", "another reader",
    "a layer used twice", "the input", "within a layer", "depthwise",
)  # fmt: skip


def keras_randomised(model: Any, x: Any) -> Any:
    rng = np.random.default_rng(1)
    model(x)
    for weight in model.weights:
        weight.assign(weight.numpy() + (0.2 + 0.3 * rng.standard_normal(weight.shape)).astype("float32"))
    return model


@pytest.mark.parametrize("name", KERAS_MODELS)
def test_keras(name):
    model, x, left = keras_models()[name]
    keras_randomised(model, x)
    weights = model.get_weights()
    result = to_rms_norm(model, x)
    reasons = {layer: why for layer, why in shown(result).items() if why}
    assert set(reasons) == set(left)
    assert all(why in reasons[layer] for layer, why in left.items())
    assert all(np.array_equal(*pair) for pair in zip(weights, model.get_weights(), strict=True))
    before, after = (one(x, training=False).numpy() for one in (model, result.model))
    if len(left) == len(result.layers):
        assert np.array_equal(before, after)
    else:
        assert distance(before, after) <= SINGLE
        assert result.exact <= ROUNDING
        assert len(result.model.trainable_variables) == len(model.trainable_variables)
        kinds = {type(layer).__name__ for layer in result.model._flatten_layers()}
        assert ("RMSNormalization" in kinds, "LayerNormalization" in kinds) == (True, bool(left))
    assert [note for note in result.notes if note.startswith("dropout in drop:")] or name != "gpt"


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Keras, that it is deprecated
def test_rms_scaling_of_keras():
    keras = keras_of()
    norm = keras.layers.LayerNormalization(rms_scaling=True, name="n")
    result = to_rms_norm(keras.Sequential([keras.layers.Dense(4), norm]), np.ones((2, 3), "float32"))
    assert "divides by the root of the variance" in shown(result)["n"]


def test_keras_casts():
    """Wide arithmetic is also wide where the model itself rounds."""
    keras = keras_of()
    inputs = keras.Input((3,))
    half = keras.ops.cast(keras.layers.Dense(4)(inputs), "float16")
    model = keras.Model(inputs, keras.layers.LayerNormalization(name="n")(keras.ops.cast(half, "float32")))
    x = np.random.default_rng(0).standard_normal((2, 3)).astype("float32")
    result = to_rms_norm(keras_randomised(model, x), x)
    assert shown(result) == {"n": ""}
    assert result.exact <= ROUNDING


def test_keras_names_are_all():
    assert set(KERAS_MODELS) == set(keras_models())


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
def test_a_keras_model_is_saved_and_trained(tmp_path):
    """What comes out is an ordinary model."""
    keras = keras_of()
    model, x, _ = keras_models()["gpt"]
    result = to_rms_norm(keras_randomised(model, x), x).model
    result.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert np.array_equal(result(x).numpy(), loaded(x).numpy())
    loaded.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert np.isfinite(loaded.train_on_batch(x, IDS))


def test_a_keras_model_with_a_call_of_its_own():
    """It is built again from its config; one that has none is refused."""
    keras = keras_of()

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.norm = keras.layers.Dense(4), keras.layers.LayerNormalization()

        def call(self, x: Any) -> Any:
            return self.norm(self.dense(x))

    x = np.random.default_rng(0).standard_normal((2, 3)).astype("float32")
    model = keras_randomised(Net(), x)
    result = to_rms_norm(model, x)
    assert [layer.converted for layer in result.layers] == [True]
    assert result.exact <= ROUNDING
    assert distance(model(x), result.model(x)) <= SINGLE

    class Bare(Net):
        def get_config(self) -> Any:
            raise NotImplementedError("no config")

    with pytest.raises(ValueError, match=r"the class of the model is 'Bare \(no config\)'.*give its class get_config"):
        to_rms_norm(Bare(), x)


def test_a_class_that_is_no_layer_norm_of_the_framework_is_known_by_what_it_computes():
    keras = keras_of()

    class Own(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.g = self.add_weight(shape=(shape[-1],), initializer="ones", name="g")
            self.b = self.add_weight(shape=(shape[-1],), initializer="ones", name="b")

        def call(self, h: Any) -> Any:
            c = h - keras.ops.mean(h, -1, keepdims=True)
            return c * keras.ops.rsqrt(keras.ops.mean(c * c, -1, keepdims=True) + 0.1) * self.g + self.b

    x = keras.Input((3,))
    hidden = Own(name="norm")(h=keras.layers.Dense(4, name="linear")(x))
    model = keras.Model(x, Own(name="other")(keras.layers.Activation("exponential", name="bend")(hidden)))
    row = np.random.default_rng(0).standard_normal((2, 3)).astype("float32")
    result = to_rms_norm(keras_randomised(model, row), row)
    assert {layer.name: (layer.kind, layer.converted, layer.why) for layer in result.layers} == {
        "norm": ("Own", True, "eps 0.1"),
        "other": ("Own", False, result.layers[-1].why),
    }
    assert result.exact <= ROUNDING
    shifted = np.arange(4, dtype="float32")[None]
    norms = [one.get_layer("norm") for one in (model, result.model)]
    assert not np.allclose(*(norm(shifted) for norm in norms))
