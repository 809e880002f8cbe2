"""replace in Keras: layers keep their class and what is saved of them, and models say and learn the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import printed

from rmsnorm import Variant
from rmsnorm.conversion import replace

pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from rmsnorm.tf_impl import RMSNormalization  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
# what Keras is warned of by NumPy when it saves


@keras.saving.register_keras_serializable("tests")
class OwnNorm(keras.layers.Layer):
    """A norm with its own name of the gain, which drops some of y in training if it is asked to."""

    def __init__(self, eps: float = 1e-5, rate: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.eps, self.rate = eps, rate

    def build(self, shape: Any) -> None:
        self.gain = self.add_weight(shape=(shape[-1],), initializer="ones", name="g")

    def call(self, hidden: Any, training: bool = False) -> Any:
        q = keras.ops.mean(keras.ops.square(hidden), -1, keepdims=True)
        y = hidden * keras.ops.rsqrt(q + self.eps) * self.gain
        return y * (1 - self.rate) if training else y

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "eps": self.eps, "rate": self.rate}


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


class WithoutOptions(keras.layers.Layer):
    """Takes no name and no dtype, so that Keras itself makes none from its config."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def build(self, shape: Any) -> None:
        self.gain = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    call = OwnNorm.call
    rate = 0.0


class WithWidth(WithoutOptions):
    """Makes its gain at once, and says its config."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__(eps)
        self.width = width
        super().build((width,))

    def build(self, shape: Any) -> None:
        self.built = True

    def get_config(self) -> dict[str, Any]:
        return {"width": self.width, "eps": self.eps}


class WithoutConfig(WithoutOptions):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner.eps)


class Counting(OwnNorm):
    def call(self, hidden: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return super().call(hidden)


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


class WithoutNaN(OwnNorm):
    def call(self, hidden: Any) -> Any:
        return keras.ops.nan_to_num(super().call(hidden))


class Gated(keras.layers.Layer):
    """Mamba-2's in groups of 4, or with a sigmoid after the norm; the gate may be left out."""

    def __init__(self, group: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.group = group

    def build(self, hidden_shape: Any, gate_shape: Any) -> None:
        self.gain = self.add_weight(shape=(hidden_shape[-1],), initializer="ones", name="weight")

    def call(self, hidden: Any, gate: Any = None) -> Any:
        ops = keras.ops
        f = 1.0 if gate is None else ops.silu(gate) if self.group else ops.sigmoid(gate)
        h = hidden * f if self.group else hidden
        wide = ops.reshape(h, (*ops.shape(h)[:-1], -1, self.group or h.shape[-1]))
        y = wide * ops.rsqrt(ops.mean(ops.square(wide), -1, keepdims=True) + 1e-5)
        return ops.reshape(y, ops.shape(h)) * self.gain * (1.0 if self.group else f)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "group": self.group}


class GroupsAlone(Gated):
    def build(self, hidden_shape: Any) -> None:
        super().build(hidden_shape, hidden_shape)

    def call(self, hidden: Any) -> Any:
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


@pytest.mark.needs("keras>=3.9", "its model has keras.layers.RMSNormalization, which is of 3.9")
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


@pytest.mark.needs("keras>=3.9", "its model has keras.layers.RMSNormalization, which is of 3.9")
def test_what_is_computed_is_ours() -> None:
    """An own call with another variant: eps shows that the layer's code no longer runs, but where it is asked more."""
    mine = model_of(OwnNorm(), Block())
    want = mine(X)
    (first, second) = replace(mine, Variant.get("keras").replace(eps=0.1))
    assert first.why.startswith("eps is 1e-05")
    assert second.variant.eps == 0.1
    assert float(keras.ops.max(keras.ops.abs(mine(X) - want))) > 1e-3
    own = mine.layers[2]
    assert np.array_equal(own(X[None, None, None]), OwnNorm.call(own, X[None, None, None]))  # six axes


@pytest.mark.slow
def test_what_is_left_alone_and_why() -> None:
    changed, unbuilt = OwnNorm(), OwnNorm()
    own = [changed, OwnNorm(rate=0.1), Counting(), AddingALoss(), Measuring(), WithoutNaN()]
    layers = [*own, keras.layers.LayerNormalization(), keras.layers.BatchNormalization(),
              keras.layers.UnitNormalization()]  # fmt: skip
    model = model_of(*layers)
    changed.eps = 0.1
    changed.get_config = lambda: {"eps": 1e-5}  # is not what it computes
    model.extra = unbuilt
    model(X)
    (loss,) = model.losses
    before = [dict(vars(layer)) for layer in layers]
    assert [entry.why for entry in replace(model)] == [
        "it computes another y than a layer from its config with the same weights",
        "in training, y is another one than in evaluation",
        "a call changes its calls",
        "a call adds a loss to the model's",
        "a call changes its mean/count, mean/total",
        "it agrees on the rows that identify tries, and not in 1 of 4 circumstances: 'few rows of 64, "
        "5 axes; NaN in a row': 'few rows of 64, 5 axes; NaN in a row' f32 y: "
        "at (1, 0, 1, 0, 0) got 0, want nan, inf ulp",
        "it computes LayerNorm",
        "it holds gamma, beta, moving_mean, moving_variance, expected a gain and perhaps a bias",
        "it computes the L2 norm, eps below the norm: x / max(|x|, 1e-12), which is RMSNorm with the same eps and "
        "1 / sqrt(n) times the gain",
        "it is not built; call the model first",
    ]
    assert [dict(vars(layer)) for layer in layers] == before
    assert [*model.losses] == [loss], "the calls of the proof add none"


@pytest.mark.slow
def test_a_norm_with_a_gate() -> None:
    def build() -> Any:
        keras.utils.set_random_seed(0)
        x = keras.Input((None, 8))
        z = keras.layers.Dense(8)(x)
        h = Gated(4)(keras.layers.Dense(8)(GroupsAlone(4)(x)), z)
        return keras.Model(x, Gated()(hidden=h, gate=z))

    model, mine = build(), build()
    assert [entry.why for entry in replace(mine)] == [
        "recognised, in groups of 4",
        "recognised, with a silu gate before the norm, in groups of 4",
        "recognised, with a sigmoid gate after the norm",
    ]
    np.testing.assert_allclose(learned(mine), learned(model), rtol=1e-4, atol=1e-5)
    layer = mine.layers[-1]
    assert np.array_equal(layer(X), Gated.call(layer, X)), "without a gate it runs its own code"
    other = build()
    replace(other, Variant.get("keras").replace(eps=0.1))
    assert float(keras.ops.max(keras.ops.abs(other(X) - build()(X)))) > 1e-3, "with one it does not"


@pytest.mark.filterwarnings("ignore:Layer .* does not support masking and will therefore destroy:UserWarning")
@pytest.mark.needs("keras>=3.9", "its model has keras.layers.RMSNormalization, which is of 3.9")
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


def test_an_eps_that_is_set_later_counts_in_our_layer() -> None:
    layer, other = RMSNormalization(epsilon=1e-6), RMSNormalization(epsilon=1.0)
    for each in (layer, other):
        each.build((None, 8))
    layer(X)
    layer.epsilon = 1.0
    want = np.asarray(other(X))
    again = type(layer).from_config(layer.get_config())
    for each in (layer, again):
        np.testing.assert_allclose(np.asarray(each(X)), want, rtol=1e-6)
    assert layer.get_config()["epsilon"] == 1.0


def test_an_eps_that_is_set_later_is_refused(tmp_path: Path) -> None:
    """A new layer of its config is Keras's own again, and takes another one."""
    model = keras.Sequential([keras.Input((5, 8)), OwnNorm(1e-6)])
    replace(model)
    layer, want = model.layers[0], np.asarray(model(X))
    for value in (1.0, None):
        with pytest.raises(
            ValueError, match=f"replace: eps is {value}, expected 1e-06, with which replace has replaced"
        ):
            layer.eps = value
    layer.eps, layer.note, layer.trainable = 1e-6, "kept", False
    layer.set_weights([2 * weight for weight in layer.get_weights()])
    np.testing.assert_allclose(np.asarray(model(X)), 2 * want, rtol=1e-6)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(np.asarray(loaded(X)), 2 * want, rtol=1e-5)
    loaded.layers[0].eps = 1.0


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("make", [lambda: WithoutOptions(1e-3), lambda: WithWidth(8, 1e-3)])
def test_a_class_that_takes_no_options_of_every_layer(make: Any, dtype: str) -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        layer, other = make(), make()
    finally:
        keras.config.set_dtype_policy(before)
    layer.build((None, 8))
    other.build((None, 8))
    (entry,) = replace(layer)
    assert entry.variant is not None, entry
    assert entry.variant.eps == 1e-3
    assert (layer.compute_dtype, keras.config.dtype_policy()) == (other.compute_dtype, before)
    want = np.asarray(keras.ops.cast(other(X), "float32"))
    limit = 1e-6 if dtype == "float32" else 2.0**-7  # a unit in the last place of bfloat16
    np.testing.assert_allclose(np.asarray(keras.ops.cast(layer(X), "float32")), want, rtol=limit)


def test_a_class_that_makes_no_layer_from_its_config() -> None:
    layer = WithoutConfig(WithoutOptions())
    layer.build((None, 8))
    (entry,) = replace(keras.Sequential([layer]))
    assert entry.why.startswith("its class makes no layer from its config (")


def test_an_l2_norm_is_left_with_its_formula() -> None:
    layer = keras.layers.UnitNormalization()
    layer.build((None, 8))
    (entry,) = replace(layer, dry_run=True)
    assert entry.variant is None
    assert entry.why.startswith("it computes the L2 norm, eps "), entry.why


@pytest.mark.needs("keras>=3.9", "its model has keras.layers.RMSNormalization, which is of 3.9")
def test_within_a_distribution_that_shards_the_scale() -> None:
    pytest.importorskip("jax")
    script = Path(__file__).with_name("keras_distribution.py")
    devices = "--xla_force_host_platform_device_count=2"
    assert printed(script, KERAS_BACKEND="jax", XLA_FLAGS=devices).splitlines()[-1] == "done"
