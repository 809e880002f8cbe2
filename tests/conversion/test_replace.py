"""replace in each framework: what becomes ours and says and learns the same, what is left and why, all or nothing."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

import adapters
import numpy as np
import pytest
from adapters import CASES, FRAMEWORKS, own
from programs import printed

from rmsnorm import Variant
from rmsnorm.conversion import replace

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
# what Keras is warned of by NumPy
few = pytest.mark.usefixtures("few_circumstances")  # where the question is not what the proof asks
X = np.random.default_rng(0).normal(size=(4, 5, 8)).astype("float32")
RECOGNISED = {
    "own": (own, "recognised"),
    "built in": ("rms", "recognised"),
    "with an argument": (adapters.with_extra, "recognised; with extra it runs its own code"),
    "groups": (adapters.in_groups, "recognised, in groups of 4"),
    "silu gate": (adapters.silu_gate, "recognised, with a silu gate before the norm, in groups of 4"),
    "sigmoid gate": (adapters.sigmoid_gate, "recognised, with a sigmoid gate after the norm"),
}
LEFT = {
    "LayerNorm": ("norm", "it computes LayerNorm"),
    "BatchNorm": ("batch norm", "it holds "),
    "counting": (adapters.counting, "a call changes its "),
    "training": (adapters.of_training, "in training, y is another one than in evaluation"),
    "NaN": (adapters.without_nan, "NaN in a row"),
    "L2": ("l2", "it computes the L2 norm, eps below the norm: x / max(|x|, 1e-12), which is RMSNorm with the same eps "
           "and 1 / sqrt(n) times the gain"),
}  # fmt: skip


@pytest.fixture(params=CASES)
def framework(request):
    made = FRAMEWORKS[request.param]()
    if request.param == "flax":
        with made.jax.numpy_dtype_promotion("standard"):  # that of JAX by default, which its users have
            yield made
    else:
        yield made


def close(framework, got, want):
    for one, right in zip(got, want, strict=True):
        np.testing.assert_allclose(one, right, rtol=framework.rounding, atol=framework.rounding)


@few
@pytest.mark.parametrize("name", RECOGNISED)
def test_what_is_recognised_says_and_learns_the_same(framework, name):
    """It keeps its class, its state and its own code for the calls that were not proven."""
    body, why = RECOGNISED[name]
    layer = framework.alone(body, 8)
    kind, inputs = type(layer), [X, X[::-1].copy()] if "gate" in name else [X]
    want = framework.results(layer, *inputs)
    (entry,) = replace(layer)
    assert entry.why.removesuffix("; with mask it runs its own code") == why  # which nnx.RMSNorm takes
    assert entry.variant.eps == pytest.approx(1e-5, rel=1e-3)
    assert isinstance(layer, kind)
    in_place = framework.key == "keras"  # there the layer gets another call
    assert (type(layer) is kind) == in_place
    assert ("computed" in repr(layer)) == (not in_place and (name != "built in" or framework.key == "torch"))
    for each in framework.copies(layer):
        close(framework, framework.results(each, *inputs), want)

    def agree(*inputs, **options):
        theirs = framework.outputs(framework.own_code(kind, layer), *inputs, **options)
        return np.array_equal(framework.outputs(layer, *inputs, **options), theirs)

    if "gate" in name:
        assert agree(X), "its own code, without a gate"
        assert agree(X, inputs[1][:, :1]), "its own code, with a gate of another shape"
        named, placed = framework.outputs(layer, X, gate=inputs[1]), framework.outputs(layer, *inputs)
        assert np.array_equal(named, placed), "the gate has its name"
    if name == "with an argument":
        assert agree(X, extra=2.0)
    other = framework.alone(body, 8)
    replace(other, Variant.get("keras").replace(eps=0.1))
    assert np.abs(framework.outputs(other, *inputs)[0] - want[0]).max() > 1e-3, "it is not its own code that runs"


def model_of(framework):
    """One of its norms is in two places."""
    parts = {"a": ("linear", 8, 8), "n": (own,), "m": ("rms", 8)}
    return framework.net(lambda m, ops, x: m.m(m.n(m.a(x)) + m.n(x)), parts, X)


@few
def test_a_model_says_and_learns_the_same(framework):
    """Its norms stay the same objects, with the same parameters, and are replaced once."""
    model = model_of(framework)
    norms = [framework.part(model, name) for name in "nm"]
    kinds = [type(norm) for norm in norms]
    want, parameters = framework.results(model, X), framework.parameters(model)
    assert {entry.name: entry.variant.eps for entry in replace(model)} == {"n": pytest.approx(1e-5), "m": 1e-5}
    assert all(framework.part(model, name) is norm for name, norm in zip("nm", norms, strict=True))
    assert all(isinstance(norm, kind) for norm, kind in zip(norms, kinds, strict=True))
    assert all(np.array_equal(value, parameters[name]) for name, value in framework.parameters(model).items())
    close(framework, framework.results(model, X), want)
    (again,) = replace(model)
    assert str(again) == f"the model ({type(model).__name__}): left; its 2 RMSNorm are replaced already"


@few
def test_a_dry_run_says_the_same_and_changes_nothing(framework):
    layer = framework.alone(own)
    kind, state = type(layer), {**vars(layer)}
    (dry,) = replace(layer, dry_run=True)
    assert (type(layer), vars(layer)) == (kind, state)
    (entry,) = replace(layer)
    assert entry == dry
    assert ("would be RMSNorm" in str(dry), "now RMSNorm" in str(entry)) == (True, True)


@few
@pytest.mark.parametrize("step", ["become", "finish"])
def test_all_or_nothing(framework, step, monkeypatch):
    """Also of what changes in place: a norm of PyTorch in an encoder gets a hook there."""
    backend = importlib.import_module(f"rmsnorm.conversion.replacement.{framework.key}").BACKEND
    model = model_of(framework)
    norms = [framework.part(model, name) for name in "nm"]
    if framework.key == "torch":
        model.encoder = framework.layer("encoder", 8, 2, 16)
        norms += [model.encoder.norm1, model.encoder.norm2]

    def everything():
        return [(type(each), {n: dict(v) if isinstance(v, dict) else v for n, v in vars(each).items()})
                for each in norms]  # fmt: skip

    before, change = everything(), getattr(backend, step)

    def fails(changed, *norm):
        change(changed, *norm)
        if changed in (norms[-1], model):
            raise RuntimeError("out of luck")

    monkeypatch.setattr(backend, step, fails)
    with pytest.raises(RuntimeError, match="out of luck"):
        replace(model)
    assert everything() == before


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone_and_why(framework, name):
    if name == "training" and framework.key == "flax":
        pytest.skip("a module of Flax has no mode of training of its own")
    body, why = LEFT[name]
    layer = framework.alone(body, 8)
    kind, state = type(layer), {**vars(layer)}
    (entry,) = replace(layer)
    assert (entry.variant, type(layer)) == (None, kind)
    assert why in entry.why
    assert str(entry) == f"the model ({kind.__name__}): left; {entry.why}"
    assert name == "counting" or vars(layer) == state


@few
def test_an_eps_that_is_set_later_is_refused(framework):
    """What loads, copies, moves and trains a model sets what it likes, and so does its user but for the eps."""
    layer = framework.alone(own)
    replace(layer)
    (want,) = framework.outputs(layer, X)
    words = "replace: eps is 0.001, expected 1e-05, with which replace has replaced this norm; set it before"
    for each in framework.copies(layer):
        with pytest.raises(ValueError, match=words):
            each.eps = 1e-3
        each.eps, each.note = each.eps, "kept"
        np.testing.assert_allclose(framework.outputs(each, X)[0], want, rtol=1e-6)
        framework.assign(each, {name: 2 * value for name, value in framework.parameters(each).items()})
        np.testing.assert_allclose(framework.outputs(each, X)[0], 2 * want, rtol=1e-6)


def test_what_is_no_model():
    with pytest.raises(TypeError, match=r"model is None \(NoneType\), expected a torch.nn.Module, keras.Model or .*"):
        replace(None)
    nn = pytest.importorskip("torch").nn
    with pytest.raises(TypeError, match=r"flax.nnx.Module; make an object of it first"):
        replace(nn.Linear)
    (entry,) = replace(nn.Linear(8, 8))
    why = 'no class of its modules has "norm" in its name, and none with a gain or a bias alone is RMSNorm'
    assert str(entry) == f"the model (Linear): left; {why}"
    linen = pytest.importorskip("flax.linen")
    with pytest.raises(TypeError, match=r"a linen model makes its norms in each call; name rmsnorm.flax_impl.linen"):
        replace(linen.RMSNorm())


# What Keras and Flax have beside the tables.


@pytest.fixture
def keras():
    return FRAMEWORKS["keras"]()


def graph_of(keras, *layers):
    x = keras.keras.Input((5, 8))
    return keras.keras.Model(x, functools.reduce(lambda h, layer: layer(h), layers, x))


@pytest.mark.tf
def test_a_model_of_keras_is_traced_anew_saved_and_trained(keras, tmp_path):
    """One with two models in it; the file has Keras's own norms."""
    make, models = keras.keras.layers, keras.keras.models
    keras.keras.saving.register_keras_serializable("tests")(keras.kind(own))
    innermost = keras.keras.Sequential([keras.layer("rms", 8), make.Dense(8)])
    inner = keras.keras.Sequential([innermost, make.RMSNormalization(axis=(1, 2))])
    model = graph_of(keras, make.Dense(8), keras.layer(own), inner)
    model.compile("sgd", "mse")
    model.save(tmp_path / "theirs.keras")
    want = model.predict(X, verbose=0)  # which is traced
    eps = {entry.name.count("/"): entry.variant.eps for entry in replace(model)}
    assert eps == pytest.approx({0: 1e-5, 2: 1e-5, 1: 1e-6})
    model.save(tmp_path / "ours.keras")
    theirs, ours = (models.load_model(tmp_path / f"{name}.keras") for name in ("theirs", "ours"))
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


def adding_a_loss(self, hidden):
    self.add_loss(0.1 * self.ops.mean(hidden))
    return own(self, hidden)


@pytest.mark.tf
def test_what_keras_leaves_alone_and_why(keras):
    changed, unbuilt = keras.layer(own), keras.layer(own)
    layers = [changed, keras.layer(adding_a_loss)]
    model = graph_of(keras, *layers)
    changed.eps = 0.1
    model.extra = unbuilt
    model(X)
    (loss,) = model.losses
    before = [dict(vars(layer)) for layer in layers]
    assert [entry.why for entry in replace(model)] == [
        "it computes another y than a layer from its config with the same weights",
        "a call adds a loss to the model's",
        "it is not built; call the model first",
    ]
    assert [dict(vars(layer)) for layer in layers] == before
    assert [*model.losses] == [loss], "the calls of the proof add none"
    layer = keras.alone(own)
    layer.get_config = lambda: {"inner": None}
    (entry,) = replace(layer)
    assert entry.why.startswith("its class makes no layer from its config (")


@pytest.mark.tf
@pytest.mark.filterwarnings("ignore:Layer .* does not support masking and will therefore destroy:UserWarning")
def test_a_mask_of_keras_ends_at_the_built_in_layer_replaced_or_not(keras):
    tokens, make = np.array([[1, 2, 0, 0], [3, 0, 0, 0]]), keras.keras.layers
    model = keras.keras.Sequential([make.Embedding(4, 8, mask_zero=True), keras.layer("rms", 8), make.LSTM(4)])
    want = model(tokens).numpy()
    (entry,) = replace(model)
    assert entry.variant is not None
    # Float32: four steps, in each sums of 12 terms and 8 roundings more, in numbers below 1.
    np.testing.assert_allclose(model(tokens).numpy(), want, rtol=0, atol=4 * 20 * 2.0**-24)


@pytest.mark.tf
def test_within_a_distribution_of_keras_that_shards_the_scale(keras):
    pytest.importorskip("jax")
    script = Path(__file__).with_name("keras_distribution.py")
    devices = "--xla_force_host_platform_device_count=2"
    assert printed(script, KERAS_BACKEND="jax", XLA_FLAGS=devices).splitlines()[-1] == "done"


@pytest.mark.parametrize("framework", CASES[2:], indirect=True)
@pytest.mark.parametrize("kind", ["own", "rms"])
def test_layers_of_flax_that_are_stacked_for_scan(framework, kind):
    nnx, (x, *_) = framework.nnx, X

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(rngs):
        return nnx.RMSNorm(8, rngs=rngs) if kind == "rms" else framework.layer(own)

    def through(norms):
        return nnx.scan(lambda x, norm: norm(x) + x, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, norms)

    layer, mine, other = (stacked(nnx.Rngs(0)) for _ in range(3))
    (entry,) = replace(mine)
    assert entry.variant is not None, entry
    want = through(layer)
    np.testing.assert_allclose(through(mine), want, rtol=1e-5)
    replace(other, entry.variant.replace(eps=0.1))
    assert np.abs(through(other) - want).max() > 1e-3, "it is its own code"


@pytest.mark.parametrize("framework", CASES[2:], indirect=True)
def test_a_dtype_of_y_of_flax_is_kept(framework):
    layer = framework.nnx.RMSNorm(8, dtype=framework.jax.numpy.bfloat16, rngs=framework.nnx.Rngs(0))
    want = layer(X)
    (entry,) = replace(layer)
    assert (entry.variant.eps, layer(X).dtype) == (1e-6, "bfloat16")
    assert np.abs(layer(X) - want).max() <= 2.0**-7 * np.abs(want).max()  # two roundings to bfloat16
