"""LayerNorm into RMSNorm: what is converted is equal, what stays has a reason; one table of models and frameworks."""

from __future__ import annotations

import adapters
import numpy as np
import pytest
from adapters import CASES, FRAMEWORKS

from rmsnorm.conversion import to_rms_norm
from rmsnorm.conversion.layer_norm.search import difference

ROUNDING = 1e-12  # in float64: some 1e4 roundings of 1.1e-16
SINGLE = 2e-6  # of the greatest output in float32: some 30 roundings of 6e-8
SEEN = "what it reads keeps a mean"
X, ROW = "rows of 3", "rows of 4"
SAMPLES = {
    X: np.random.default_rng(1).normal(size=(2, 3)).astype("float32"),
    ROW: np.random.default_rng(2).normal(size=(2, 4)).astype("float32"),
    "image": np.random.default_rng(4).normal(size=(2, 6, 6, 3)).astype("float32"),
    "ids": np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]),
}


def distance(before, after):
    before, after = (np.where(np.abs(y) < 1e20, y, 0.0).astype(np.float64) for y in map(np.asarray, (before, after)))
    return float(np.abs(before - after).max() / np.abs(before).max())


def left(result):
    return {layer.name: layer.why for layer in result.layers if layer.variant is None}


def randomised(framework, model):
    """With gains, offsets and means of weights that show."""
    random = np.random.default_rng(5)
    values = framework.parameters(model).items()
    framework.assign(model, {k: (v + 0.2 + 0.3 * random.normal(size=v.shape)).astype(v.dtype) for k, v in values})
    return model


@pytest.fixture(params=CASES)
def framework(request):
    return FRAMEWORKS[request.param]()


def attention(m, ops, h):
    scores = ops.matmul(m.q(h), ops.swapaxes(m.k(h), 1, 2))
    return m.o(ops.matmul(ops.softmax(scores, -1), m.v(h)))


def pre_norm(m, ops, ids):
    h = m.drop(m.words(ids) * 2.0)
    h = h + attention(m, ops, m.n1(h))
    h = h + m.down(ops.relu(m.up(m.n2(h))))
    return m.head(m.n3(h))


def post_norm(m, ops, ids):
    h = m.n1(m.words(ids))
    h = m.n2(h + attention(m, ops, h))
    return m.head(m.n3(h + m.down(ops.relu(m.up(h)))))


def masked(ops, x, y):
    """With a number beside y that is as good as minus infinity."""
    return ops.concatenate([y, x[..., :1] * 0.0 - 1e30], -1)


N = {"n": ("norm", 4)}
A = {**N, "a": ("linear", 3, 4)}
AB = {**A, "b": ("linear", 4, 4)}
BLOCK = {
    "words": ("embedding", 11, 8), "up": ("linear", 8, 16), "down": ("linear", 16, 8), "head": ("linear", 8, 11),
    **dict.fromkeys("qkvo", ("linear", 8, 8)), **{f"n{i}": ("norm", 8) for i in (1, 2, 3)},
}  # fmt: skip
# the layers, what is computed, the sample, and the norms that stay
MODELS = {
    "mlp": ({**AB, "n2": ("norm", 4)}, lambda m, ops, x: m.n2(m.b(ops.relu(m.n(m.a(x))))), X, ""),
    "pre-norm": ({**BLOCK, "drop": ("dropout", 0.1)}, pre_norm, "ids", ""),
    "post-norm": (BLOCK, post_norm, "ids", "n2 n3"),
    "no parameters": ({**A, "n": ("plain norm", 4)}, lambda m, ops, x: m.n(m.a(x)), X, ""),
    "conv": ({**A, "a": ("conv", 3, 4)}, lambda m, ops, x: m.n(m.a(x)), "image", ""),
    "features shuffled": (A, lambda m, ops, x: m.n(ops.flip(m.a(x), (-1,))), X, ""),
    "masked by a factor": (A, lambda m, ops, x: m.n(m.a(x) * x[..., :1]), X, ""),
    "norm after norm": ({**A, "n1": ("plain norm", 4)}, lambda m, ops, x: m.n(m.n1(m.a(x))), X, ""),
    "logits with a mask": (AB, lambda m, ops, x: masked(ops, x, m.b(m.n(m.a(x)))), X, ""),
    "only one of two": ({**AB, "n2": ("norm", 4)}, lambda m, ops, x: m.n2(ops.relu(m.n(m.a(x)))), X, "n2"),
    "relu and a mask": (AB, lambda m, ops, x: masked(ops, x, m.b(m.n(ops.relu(m.a(x))))), X, "n"),
    "the input": (N, lambda m, ops, x: m.n(x), ROW, "n"),
    "residual of the input": (AB, lambda m, ops, x: m.n(x + m.b(x)), ROW, "n"),
    "another reader": (AB, lambda m, ops, x: m.n(m.a(x)) + m.b(m.a(x)), X, "n"),
    "a decision": (A, lambda m, ops, x: ops.where(m.a(x) > 0, m.n(m.a(x)), 0.0), X, "n"),
    "an output": (A, lambda m, ops, x: (m.n(m.a(x)), m.a(x)), X, "n"),
    "a constant": (A, lambda m, ops, x: m.n(m.a(x) + 3.0), X, "n"),
    "heads": ({**A, "a": ("linear", 3, 8)}, lambda m, ops, x: m.n(ops.reshape(m.a(x), (2, 2, 4))), X, "n"),
    "grouped conv": ({"a": ("conv", 3, 6, 3), "n": ("norm", 6)}, lambda m, ops, x: m.n(m.a(x)), "image", "n"),
    "one feature": ({"a": ("linear", 3, 1), "n": ("norm", 1)}, lambda m, ops, x: m.n(m.a(x)), X, "n"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(framework, name):
    """With the outputs, and bit for bit where nothing is converted; the model before stays as it is."""
    parts, forward, sample, stays = MODELS[name]
    x = SAMPLES[sample]
    model = randomised(framework, framework.net(forward, parts, x))
    values = framework.parameters(model)
    result = to_rms_norm(model, framework.array(x))
    assert left(result).keys() == {*stays.split()}
    assert all(why.startswith(SEEN) for why in left(result).values())
    norms = [name for name, part in parts.items() if "norm" in part[0]]
    assert sorted(layer.name for layer in result.layers) == sorted(norms)
    for norm in norms:
        kind = type(framework.part(result.model, norm)).__name__.replace("alization", "")
        assert kind == ("LayerNorm" if norm in left(result) else "RMSNorm")
    after = framework.parameters(model)
    assert all(np.array_equal(value, after[key]) for key, value in values.items())
    pairs = list(zip(framework.outputs(model, x), framework.outputs(result.model, x), strict=True))
    if len(left(result)) == len(norms):
        assert all(np.array_equal(*pair) for pair in pairs)
        assert (result.exact, result.error, result.centred) == (None, None, ())
        assert str(result).endswith("nothing was replaced, and so no outputs were compared")
    else:
        assert all(distance(*pair) <= SINGLE for pair in pairs)
        assert 0 <= result.exact <= ROUNDING < result.error < 1e-4
        assert result.centred or name == "norm after norm"
    assert any("dropout in drop:" in note for note in result.notes) == ("drop" in parts)


def converted(framework, forward, parts, change=lambda values: values):
    """The conversion of a model of rows of 3, which computes the same."""
    x = SAMPLES[X]
    model = randomised(framework, framework.net(forward, parts, x))
    framework.assign(model, change(framework.parameters(model)))
    result = to_rms_norm(model, framework.array(x))
    assert (result.exact or 0.0) <= ROUNDING
    assert distance(framework.outputs(model, x)[0], framework.outputs(result.model, x)[0]) <= SINGLE
    return model, result


def test_equal_gains_write_no_mean(framework):
    """The bias alone has one, and is centred for the next norm; not where others read it."""

    def equal(values):
        gain = next(key for key in values if key.endswith(("n/gamma", "n/scale", "n.weight")))
        return {**values, gain: np.full(4, 1.5, "float32")}

    for forward, stays in (
        (lambda m, ops, x: m.n2(m.n(m.a(x))), set()),
        (lambda m, ops, x: m.n2(m.n(m.a(x))) + m.n(m.a(x)), {"n2"}),
    ):
        _, result = converted(framework, forward, {**A, "n2": ("norm", 4)}, equal)
        assert left(result).keys() == stays
        assert any(name.replace(".", "/") in ("n/beta", "n/bias") for name in result.centred) == (not stays)


def test_a_norm_that_is_not_reached_stays(framework):
    if framework.key == "keras":
        pytest.skip("a graph of Keras reaches all of its layers")
    parts = {**A, "b": ("linear", 3, 4), "m": ("norm", 4)}
    model, result = converted(framework, lambda m, ops, x: m.n(m.a(x)), parts)
    assert left(result) == {"m": "the sample inputs do not reach it, or it is called with more than x"}
    assert {name.replace("/", ".").rpartition(".")[0] for name in result.unreached} >= {"b"}
    assert "not reached by the sample, so not changed" in str(result)
    before, after = framework.parameters(model), framework.parameters(result.model)
    assert all(np.array_equal(before[name], after[name]) for name in result.unreached)


def test_a_class_of_its_own_is_known_by_what_it_computes(framework):
    """One is called with more than x, and so it stays."""
    parts = {**AB, "n": (adapters.layer_norm, 4), "m": (adapters.layer_norm, 4)}
    _, result = converted(framework, lambda m, ops, x: m.m(m.b(m.n(hidden=m.a(x))), factor=2.0), parts)
    first, second = sorted(result.layers, key=lambda layer: layer.variant is None)
    assert (first.kind, first.variant.eps) == (framework.kind(adapters.layer_norm).__name__, 0.1)
    assert (first.variant.scale_offset, second.variant) == (1.0, None)
    assert "called with more than x" in second.why


def test_differences():
    """Relative to the element or the median; NaN and infinities where they were, integers the same."""
    one = np.array([1.0, 1.0, -4.0, 1e9, np.inf, np.nan])
    assert difference([one], [one + np.array([0, 0, 1, 0, 0, 0])]) == 0.25
    assert difference([one[:4]], [one[:4] + np.array([0.5, 0, 0, 0])]) == 0.2
    for before, after in ((one, np.nan_to_num(one)), (one, one.astype(np.float32)), (np.arange(2), np.arange(1, 3))):
        assert difference([before], [after]) == np.inf


def test_what_is_no_model():
    with pytest.raises(TypeError, match=r"to_rms_norm: model is 3 \(int\), expected torch.nn.Module, keras.Model or"):
        to_rms_norm(3)


# What Keras and Flax have beside the table of models.


@pytest.mark.tf
@pytest.mark.parametrize("name", ["nested", "casts", "not built", "a call of its own"])
def test_keras(name):
    """Models with models inside, casts, and a class of models."""
    framework = FRAMEWORKS["keras"]()
    keras, make, norm = framework.keras, framework.keras.layers, framework.keras.layers.LayerNormalization
    x = keras.Input((3,))

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.norm = make.Dense(4), norm()

        def call(self, x):
            return self.norm(self.dense(x))

    def nested():
        dense = make.Dense(3)
        innermost = keras.Sequential([keras.Input((3,)), dense, norm(name="n")], name="innermost")
        inner = keras.Sequential([keras.Input((3,)), innermost, norm(name="m")], name="inner")
        return keras.Model(x, norm(name="last")(dense(inner(x))))

    def casts():
        return keras.Model(x, norm()(keras.ops.cast(keras.ops.cast(make.Dense(4)(x), "float16"), "float32")))

    def not_built():
        return keras.Sequential([make.Dense(4), norm(), make.Dense(2)])

    model = {"nested": nested, "casts": casts, "not built": not_built, "a call of its own": Net}[name]()
    model(SAMPLES[X])
    result = to_rms_norm(randomised(framework, model), SAMPLES[X])
    assert left(result).keys() == ({"inner/m"} if name == "nested" else set())
    assert result.exact <= ROUNDING
    bound = 2.0**-9 if name == "casts" else SINGLE  # two float16 numbers that are neighbours differ by 2^-10
    assert distance(framework.outputs(model, SAMPLES[X])[0], framework.outputs(result.model, SAMPLES[X])[0]) <= bound


@pytest.mark.tf
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
def test_a_keras_model_is_saved_and_trained(tmp_path):
    """What comes out is an ordinary model, and has RMSNorm when it is loaded."""
    keras = FRAMEWORKS["keras"]().keras
    layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.LayerNormalization(name="n")]
    result = to_rms_norm(keras.Sequential(layers), SAMPLES[X]).model
    result.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.get_layer("n")).__name__ == "RMSNormalization"
    assert np.array_equal(result(SAMPLES[X]).numpy(), loaded(SAMPLES[X]).numpy())
    loaded.compile("sgd", "mse")
    assert np.isfinite(loaded.train_on_batch(SAMPLES[X], np.ones((2, 4), "float32")))


@pytest.mark.tf
def test_what_keras_does_not_make_again():
    keras = FRAMEWORKS["keras"]().keras

    class Bare(keras.Model):
        def call(self, x):
            return x

        def get_config(self):
            raise NotImplementedError("no config")

    with pytest.raises(ValueError, match=r"the class of the model is 'Bare \(no config\)'.*give its class get_config"):
        to_rms_norm(Bare(), SAMPLES[X])


@pytest.mark.flax
@pytest.mark.parametrize("name", ["tied", "bfloat16"])
def test_flax(name):
    """One array that embeds and makes logits stays."""
    framework = FRAMEWORKS["flax"]()
    if name == "tied":
        x, parts = SAMPLES["ids"], {**N, "a": ("embedding", 11, 4)}
        model = framework.net(lambda m, _, x: m.a.attend(m.n(m.a(x))), parts)
    else:
        x, model = SAMPLES[X], framework.net(lambda m, ops, x: m.n(m.a(x)), A)
        model.a.dtype = model.n.dtype = framework.jax.numpy.bfloat16
    with framework.jax.numpy_dtype_promotion("standard"):  # flax.nnx.LayerNorm needs it
        result = to_rms_norm(randomised(framework, model), framework.array(x))
    assert left(result).keys() == ({"n"} if name == "tied" else set())
    assert (result.exact or 0.0) <= ROUNDING
    assert (result.error is None) == (name == "tied")
