"""LayerNorm into RMSNorm: what is converted is equal, what stays has a reason; one table of models and frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layer_norm_models import FRAMEWORKS, MODELS, SAMPLES, A, Flax, Keras, X, randomised

from rmsnorm.conversion import to_rms_norm
from rmsnorm.conversion.layer_norm.search import difference

ROUNDING = 1e-12  # in float64: some 1e4 roundings of 1.1e-16
SINGLE = 2e-6  # of the greatest output in float32: some 30 roundings of 6e-8
SEEN = "what it reads keeps a mean"


def distance(before: Any, after: Any) -> float:
    before, after = (np.where(np.abs(y) < 1e20, y, 0.0).astype(np.float64) for y in map(np.asarray, (before, after)))
    return float(np.abs(before - after).max() / np.abs(before).max())


def left(result: Any) -> dict[str, str]:
    return {layer.name: layer.why for layer in result.layers if layer.variant is None}


@pytest.fixture(params=FRAMEWORKS)
def framework(request: Any) -> Any:
    return FRAMEWORKS[request.param]()


@pytest.mark.parametrize("name", MODELS)
def test_models(framework, name):
    """With the outputs, and bit for bit where nothing is converted; the model before stays as it is."""
    parts, forward, sample, stays = MODELS[name]
    x = framework.array(SAMPLES[sample])
    model = randomised(framework, framework.model(forward, parts, x))
    values = framework.parameters(model)
    result = to_rms_norm(model, x)
    assert left(result).keys() == stays
    assert all(why.startswith(SEEN) for why in left(result).values())
    norms = [name for name, part in parts.items() if "norm" in part[0]]
    assert sorted(layer.name for layer in result.layers) == sorted(norms)
    for norm in norms:
        assert framework.kind(result.model, norm) == ("LayerNorm" if norm in stays else "RMSNorm")
    after = framework.parameters(model)
    assert all(np.array_equal(value, after[key]) for key, value in values.items())
    pairs = list(zip(framework.outputs(model, x), framework.outputs(result.model, x), strict=True))
    if len(stays) == len(norms):
        assert all(np.array_equal(*pair) for pair in pairs)
        assert (result.exact, result.error, result.centred) == (None, None, ())
        assert str(result).endswith("nothing was replaced, and so no outputs were compared")
    else:
        assert all(distance(*pair) <= SINGLE for pair in pairs)
        assert 0 <= result.exact <= ROUNDING < result.error < 1e-4
        assert result.centred or name == "norm after norm"
    assert any("dropout in drop:" in note for note in result.notes) == ("drop" in parts)


def test_equal_gains_write_no_mean(framework):
    """The bias alone has one, and is centred for the next norm; not where others read it."""
    parts = {**A, "n2": ("norm", 4)}
    for forward, stays in (
        (lambda m, ops, x: m.n2(m.n(m.a(x))), set()),
        (lambda m, ops, x: m.n2(m.n(m.a(x))) + m.n(m.a(x)), {"n2"}),
    ):
        x = framework.array(SAMPLES[X])
        model = randomised(framework, framework.model(forward, parts, x))
        values = framework.parameters(model)
        gain = next(key for key in values if key.endswith(("n/gamma", "n/scale", "n.weight")))
        framework.assign(model, {**values, gain: np.full(4, 1.5, "float32")})
        result = to_rms_norm(model, x)
        assert left(result).keys() == stays
        assert any(name.replace(".", "/") in ("n/beta", "n/bias") for name in result.centred) == (not stays)
        assert distance(framework.outputs(model, x)[0], framework.outputs(result.model, x)[0]) <= SINGLE


def test_a_norm_that_is_not_reached_stays(framework):
    if framework.key == "keras":
        pytest.skip("a graph of Keras reaches all of its layers")
    for kind in ("norm", "plain norm"):
        parts = {**A, "b": ("linear", 3, 4), "m": (kind, 4)}
        model = randomised(framework, framework.model(lambda m, ops, x: m.n(m.a(x)), parts, None))
        x = framework.array(SAMPLES[X])
        result = to_rms_norm(model, x)
        assert left(result) == {"m": "the sample inputs do not reach it, or it is called with more than x"}
        assert {name.replace("/", ".").rpartition(".")[0] for name in result.unreached} >= {"b"}
        assert "not reached by the sample, so not changed" in str(result)
        before, after = framework.parameters(model), framework.parameters(result.model)
        assert all(np.array_equal(before[name], after[name]) for name in result.unreached)


def own_norm(framework: Any) -> Any:
    """A LayerNorm of its own class, with a gain less 1, which may be called with a factor, too."""
    ops, gain = framework.operations, np.linspace(-0.5, 0.5, 4).astype("float32")

    def normed(self: Any, h: Any, factor: float | None = None) -> Any:
        c = h - ops.mean(h, -1, keepdims=True)
        y = c / ops.sqrt(ops.mean(c * c, -1, keepdims=True) + 0.1) * (self.g + 1)
        return y if factor is None else factor * y

    def build(self: Any, shape: Any) -> None:
        self.g = self.add_weight(shape=(shape[-1],), name="g")

    base, call, parameter = framework.of_layers
    layer = type(base)("OwnNorm", (base,), {call: normed, "build": build})()
    if framework.key != "keras":
        layer.g = parameter(framework.array(gain))
    return layer


def test_a_class_of_its_own_is_known_by_what_it_computes(framework):
    """One is called with more than x, and so it stays."""
    make = framework.layer
    framework.layer = lambda *part: own_norm(framework) if "own" in part else make(*part)
    parts = {**A, "n": ("own",), "b": ("linear", 4, 4), "m": ("own",)}
    x = framework.array(SAMPLES[X])
    model = framework.model(lambda m, ops, x: m.m(m.b(m.n(h=m.a(x))), factor=2.0), parts, x)
    result = to_rms_norm(randomised(framework, model), x)
    first, second = sorted(result.layers, key=lambda layer: layer.variant is None)
    assert (first.kind, first.variant.eps, first.variant.scale_offset) == ("OwnNorm", 0.1, 1.0)
    assert second.variant is None
    assert "called with more than x" in second.why
    assert result.exact <= ROUNDING
    assert distance(framework.outputs(model, x)[0], framework.outputs(result.model, x)[0]) <= SINGLE


def test_differences():
    """Relative to the element or the median; NaN and infinities where they were, integers the same."""
    one = np.array([1.0, -4.0, np.inf, np.nan])
    assert difference([one], [one + np.array([0, 1, 0, 0])]) == 0.25
    assert difference([one], [np.array([1.0, -4.0, 2.0, np.nan])]) == np.inf
    assert difference([one], [one.astype(np.float32)]) == np.inf
    assert difference([np.array([1, 2])], [np.array([1, 3])]) == np.inf
    assert difference([np.zeros(2)], [np.array([0, 1e-3])]) == 1e-3
    assert difference([np.array([1.0, 1.0, 1e9])], [np.array([1.0, 1.5, 1e9])]) == 0.5


def test_what_is_no_model():
    with pytest.raises(TypeError, match=r"to_rms_norm: model is 3 \(int\), expected torch.nn.Module, keras.Model or"):
        to_rms_norm(3)


# What Keras and Flax have beside the table of models.


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
    image = keras.Input(SAMPLES["image"].shape[1:])
    inner = keras.Sequential([norm("n"), make.Dense(6), norm("m")], name="inner")
    nested = make.EinsumDense("...c,cd->...d", 5)(inner(make.Reshape((16, 4))(make.Conv2D(4, 3)(image))))
    return {
        "deep": (keras.Model(x, deep), SAMPLES[X], {"inner/m"}),
        "nested": (keras.Model(image, norm("last")(nested)), SAMPLES["image"], set()),
        "casts": (keras.Model(x, norm("n")(keras.ops.cast(half, "float32"))), SAMPLES[X], set()),
        "within a layer": (keras.Model(x, Block(name="deep")(make.Dense(4)(x))), SAMPLES[X], set()),
        "not built": (keras.Sequential([make.Dense(4), norm("n"), make.Dense(2)]), SAMPLES[X], set()),
        "a call of its own": (Net(), SAMPLES[X], set()),
    }


@pytest.mark.parametrize("name", ["deep", "nested", "casts", "within a layer", "not built", "a call of its own"])
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
    result = to_rms_norm(keras.Sequential(layers), SAMPLES[X]).model
    result.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.get_layer("n")).__name__ == "RMSNormalization"
    assert np.array_equal(result(SAMPLES[X]).numpy(), loaded(SAMPLES[X]).numpy())
    loaded.compile("sgd", "mse")
    assert np.isfinite(loaded.train_on_batch(SAMPLES[X], np.ones((2, 4), "float32")))


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
        to_rms_norm(Bare(), SAMPLES[X])
    norm = keras.layers.LayerNormalization(rms_scaling=True, name="n")
    result = to_rms_norm(keras.Sequential([keras.layers.Dense(4), norm]), SAMPLES[X])
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
