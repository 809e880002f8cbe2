"""LayerNorm into RMSNorm: what Keras and Flax have beside the table of models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layer_norm_models import SAMPLES, Flax, Keras, X, randomised
from test_layer_norm import ROUNDING, SEEN, SINGLE, distance, left

from rmsnorm.conversion import to_rms_norm

ROW = SAMPLES[X]


def keras_models(keras: Any) -> dict[str, tuple[Any, Any, set[str]]]:
    """Models with models inside, casts and layers that have layers; a sample, and the norms that stay."""
    make = keras.layers

    class Block(make.Layer):  # type: ignore[name-defined,misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.norm = make.LayerNormalization(name="norm")

        def call(self, x: Any) -> Any:
            return self.norm(x)

    class Net(keras.Model):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.norm = make.Dense(4), make.LayerNormalization(name="norm")

        def call(self, x: Any) -> Any:
            return self.norm(self.dense(x))

    def norm(name: str) -> Any:
        return make.LayerNormalization(name=name)

    x, dense = keras.Input((3,)), make.Dense(3, name="dense")
    innermost = keras.Sequential([keras.Input((3,)), dense, norm("n")], name="innermost")
    deep = norm("last")(dense(keras.Sequential([keras.Input((3,)), innermost, norm("m")], name="inner")(x)))
    half = keras.ops.cast(make.Dense(4)(x), "float16")
    return {
        "deep": (keras.Model(x, deep), ROW, {"inner/m"}),
        "casts": (keras.Model(x, norm("n")(keras.ops.cast(half, "float32"))), ROW, set()),
        "within a layer": (keras.Model(x, Block(name="deep")(make.Dense(4)(x))), ROW, set()),
        "not built": (keras.Sequential([make.Dense(4), norm("n"), make.Dense(2)]), ROW, set()),
        "a call of its own": (Net(), ROW, set()),
    }


@pytest.mark.parametrize("name", ["deep", "casts", "within a layer", "not built", "a call of its own"])
def test_keras(name):
    framework = Keras()
    model, x, stays = keras_models(framework.keras)[name]
    model(x)
    result = to_rms_norm(randomised(framework, model), x)
    assert left(result).keys() == stays
    assert result.exact <= ROUNDING
    bound = 2.0**-9 if name == "casts" else SINGLE  # two float16 numbers that are neighbours differ by 2^-10
    assert distance(framework.outputs(model, x)[0], framework.outputs(result.model, x)[0]) <= bound


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
def test_a_keras_model_is_saved_and_trained(tmp_path):
    """What comes out is an ordinary model, and has RMSNorm when it is loaded."""
    keras = Keras().keras
    layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.LayerNormalization(name="n")]
    result = to_rms_norm(keras.Sequential(layers), ROW).model
    result.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.get_layer("n")).__name__ == "RMSNormalization"
    assert np.array_equal(result(ROW).numpy(), loaded(ROW).numpy())
    loaded.compile("sgd", "mse")
    assert np.isfinite(loaded.train_on_batch(ROW, np.ones((2, 4), "float32")))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Keras, that rms_scaling is deprecated
def test_what_keras_does_not_make_again_or_is_none():
    keras = Keras().keras

    class Bare(keras.Model):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm = keras.layers.LayerNormalization()

        def call(self, x: Any) -> Any:
            return self.norm(x)

        def get_config(self) -> Any:
            raise NotImplementedError("no config")

    with pytest.raises(ValueError, match=r"the class of the model is 'Bare \(no config\)'.*give its class get_config"):
        to_rms_norm(Bare(), ROW)
    norm = keras.layers.LayerNormalization(rms_scaling=True, name="n")
    result = to_rms_norm(keras.Sequential([keras.layers.Dense(4), norm]), ROW)
    assert left(result) == {"n": "it does not compute LayerNorm over the last axis"}


@pytest.mark.parametrize("name", ["tied", "a mask", "bfloat16"])
def test_flax(name):
    """One array that embeds and makes logits stays; a norm with a mask is RMSNorm with that mask."""
    framework = Flax()
    jax, nnx = framework.jax, framework.nnx
    rngs, norm = nnx.Rngs(0), nnx.LayerNorm(4, rngs=nnx.Rngs(0))
    mask, half = framework.array(np.array([[True, True, False, True]] * 2)), {"dtype": jax.numpy.bfloat16}
    parts, forward, x, stays = {
        "tied": ({"e": nnx.Embed(11, 4, rngs=rngs), "n": norm}, lambda m, _, x: m.e.attend(m.n(m.e(x))), "ids", {"n"}),
        "a mask": ({"a": nnx.Linear(3, 4, rngs=rngs), "n": norm}, lambda m, ops, x: m.n(m.a(x), mask=mask), X, {"n"}),
        "bfloat16": ({"a": nnx.Linear(3, 4, rngs=rngs, **half), "n": nnx.LayerNorm(4, rngs=rngs, **half)},
                     lambda m, ops, x: m.n(m.a(x)), X, set()),
    }[name]  # fmt: skip
    framework.layer = lambda part: part
    model = framework.model(forward, {key: (part,) for key, part in parts.items()}, None)
    x = framework.array(SAMPLES[x])
    with jax.numpy_dtype_promotion("standard" if name == "bfloat16" else "strict"):  # flax.nnx.LayerNorm needs it
        result = to_rms_norm(randomised(framework, model), x)
    assert left(result).keys() == stays
    assert all(why.startswith(SEEN) for why in left(result).values())
    assert (result.exact or 0.0) <= ROUNDING
    assert (result.error is None) == bool(stays)
