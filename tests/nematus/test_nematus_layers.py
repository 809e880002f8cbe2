"""Nematus's layers on rms_norm, in a recurrent model as TensorFlow 1 has it: a graph, a session, a saver.

Run as a program, with a folder, it is the process of these tests: TensorFlow 1's mode cannot be left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow")

from rmsnorm.nematus.tf.layers import LayerNormLayer, RMSNormLayer  # noqa: E402
from rmsnorm.numpy_impl import rms_norm, rms_norm_vjp  # noqa: E402

SIZE, STATE, TIME, BATCH = 5, 6, 4, 8
SCOPE = "encoder/forward-stack/level0/gru0"


class Seed:
    """The paper's LayerNormLayer for Nematus, as its README prints it."""

    def __init__(self, layer_size: int, eps: float = 1e-5) -> None:
        self.new_std = tf.compat.v1.get_variable(
            "new_std", [layer_size], initializer=tf.compat.v1.constant_initializer(1)
        )
        self.eps, self.layer_size = eps, layer_size

    def forward(self, x: Any, input_is_3d: bool = False) -> Any:
        ms = tf.reduce_sum(tf.square(x), axis=-1, keepdims=True) * 1.0 / self.layer_size
        return x * tf.math.rsqrt(ms + self.eps) * self.new_std


class GRU:
    """Nematus's GRU step and encoder: v0.3 makes variables below name scopes, v0.4 and master below variable scopes."""

    def __init__(self, style: str, layer: Any) -> None:
        self.style, self.variables = style, {}
        rng = np.random.default_rng(0)
        for name, shape in (
            ("state_to_gates", (STATE, 2 * STATE)), ("input_to_gates", (SIZE, 2 * STATE)), ("gates_bias", (2 * STATE,)),
            ("state_to_proposal", (STATE, STATE)), ("input_to_proposal", (SIZE, STATE)), ("proposal_bias", (STATE,)),
        ):  # fmt: skip
            value = rng.standard_normal(shape).astype("f4") * 0.3
            if style == "name":
                self.variables[name] = tf.compat.v1.Variable(value, name=name)
            else:
                self.variables[name] = tf.compat.v1.get_variable(name, initializer=value)
        self.norms = {}
        for name in ("gates_state_norm", "gates_x_norm", "proposal_state_norm", "proposal_x_norm"):
            with self.scope(name):
                self.norms[name] = layer((2 if "gates" in name else 1) * STATE)

    def scope(self, name: str) -> Any:
        return (tf.name_scope if self.style == "name" else tf.compat.v1.variable_scope)(name)

    def states(self, x: Any) -> Any:
        p, norm = self.variables, self.norms
        flat = tf.reshape(x, [-1, SIZE])

        def projected(name: str, width: int) -> Any:
            y = tf.reshape(flat @ p[f"input_to_{name}"], tf.concat([tf.shape(x)[:-1], [width]], 0))  # loses its shape
            return norm[f"{name}_x_norm"].forward(y + p[f"{name}_bias"], input_is_3d=True)

        def step(h: Any, parts: Any) -> Any:
            gates_x, proposal_x = parts
            gates = tf.sigmoid(norm["gates_state_norm"].forward(h @ p["state_to_gates"]) + gates_x)
            reset, update = tf.split(gates, 2, axis=-1)
            proposal = tf.tanh(norm["proposal_state_norm"].forward(h @ p["state_to_proposal"]) * reset + proposal_x)
            return update * h + (1 - update) * proposal

        parts = projected("gates", 2 * STATE), projected("proposal", STATE)
        return tf.scan(step, parts, initializer=tf.zeros([tf.shape(x)[1], STATE]))


def graph(style: str, layer: Any, *, training: bool = True) -> dict[str, Any]:
    """A model that tells whether the sum of a sequence is positive, and its training."""
    x = tf.compat.v1.placeholder(tf.float32, [None, None, SIZE])
    y = tf.compat.v1.placeholder(tf.float32, [None])
    with (tf.name_scope if style == "name" else tf.compat.v1.variable_scope)(SCOPE):
        gru = GRU(style, layer)
    states = gru.states(x)
    output = tf.compat.v1.get_variable("output", [STATE], initializer=tf.compat.v1.ones_initializer())
    loss = tf.reduce_mean(
        tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=tf.linalg.matvec(states[-1], output))
    )
    variables = tf.compat.v1.trainable_variables()
    model = {
        "x": x,
        "y": y,
        "states": states,
        "loss": loss,
        "variables": {variable.op.name: variable for variable in variables},
    }
    if training:
        model["gradients"] = tf.gradients(loss, variables)
        optimizer = tf.compat.v1.train.AdamOptimizer(0.05)
        model["train"] = optimizer.apply_gradients(zip(model["gradients"], variables, strict=True))
    return model


def data() -> tuple[Any, Any]:
    x = np.random.default_rng(1).standard_normal((TIME, BATCH, SIZE)).astype("f4")
    return x, (x.sum(axis=(0, 2)) > 0).astype("f4")


def train(style: str, layer: Any, folder: Path) -> None:
    """Train, save, restore in a graph of its own; and the gradients against those of the paper's snippet."""
    gain = "scale" if layer is RMSNormLayer else "new_std"
    x, y = data()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        model = graph(style, layer)
        norms = [f"{SCOPE}/{part}_norm/{gain}" for part in ("gates_state", "gates_x", "proposal_state", "proposal_x")]
        matrices = [f"{SCOPE}/{side}_to_{part}" for side in ("state", "input") for part in ("gates", "proposal")]
        wanted = {*norms, *matrices, f"{SCOPE}/gates_bias", f"{SCOPE}/proposal_bias", "output"}
        assert set(model["variables"]) == wanted, set(model["variables"]) ^ wanted
        session.run(tf.compat.v1.global_variables_initializer())
        feed = {model["x"]: x, model["y"]: y}
        first, gradients = session.run([model["loss"], model["gradients"]], feed)
        for _ in range(40):
            session.run(model["train"], feed)
        loss, states, values = session.run([model["loss"], model["states"], model["variables"]], feed)
        assert loss < 0.2 < 0.4 < first, (first, loss)
        for name in norms:
            assert (values[name] != 1).all(), f"{name} was not trained"
        tf.compat.v1.train.Saver().save(session, str(folder / "trained.npz"))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        model = graph(style, layer, training=False)
        tf.compat.v1.train.Saver(model["variables"]).restore(session, str(folder / "trained.npz"))
        restored = session.run(model["states"], {model["x"]: x, model["y"]: y})
        np.testing.assert_array_equal(restored, states)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        model = graph("variable", Seed)
        session.run(tf.compat.v1.global_variables_initializer())
        feed = {model["x"]: x, model["y"]: y}
        others = dict(zip(model["variables"], session.run(model["gradients"], feed), strict=True))
        for name, gradient in zip(values, gradients, strict=True):
            # float32 throughout: of TIME steps of sums of less than 20 numbers, 1e-5 of the greatest is far above
            other = others[name.replace("/scale", "/new_std")]
            np.testing.assert_allclose(gradient, other, rtol=0, atol=1e-5 * abs(other).max())


def seed(folder: Path) -> None:
    """Below name scopes the README's layer, which calls get_variable, has one name for all its variables."""
    with tf.Graph().as_default(), pytest.raises(ValueError, match="Variable new_std already exists"):
        graph("name", Seed)


def shared(folder: Path) -> None:
    """Scopes entered again, as models on several devices are built, and scopes of both kinds in each other."""
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        layers = []
        for device in range(2):
            with v1.variable_scope(v1.get_variable_scope(), reuse=device > 0), tf.name_scope(f"model_{device}"):
                with v1.variable_scope("decoder"), v1.variable_scope("gates_x_norm"):
                    layers.append(RMSNormLayer(4))
                with v1.variable_scope("decoder", reuse=v1.AUTO_REUSE) as scope:
                    pass
                with v1.variable_scope(scope, reuse=device > 0):
                    layers.append(RMSNormLayer(4))
        assert layers[0].scale is layers[2].scale
        assert layers[1].scale is layers[3].scale
        assert [layer.scale.op.name for layer in layers[:2]] == ["decoder/gates_x_norm/scale", "decoder/scale"]
        with v1.variable_scope("encoder"):
            for name in ("gates_x_norm", "gates_state_norm"):
                with tf.name_scope(name):
                    assert LayerNormLayer(4).new_std.op.name == f"encoder/{name}/new_std"
        names = [variable.op.name for variable in v1.trainable_variables()]
        assert len(set(names)) == len(names) == 4


def checkpoint(folder: Path) -> None:
    """The encoder of a checkpoint of Nematus v0.3, by its names in that version."""
    with np.load(folder / "states.npz") as archive, tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.constant(archive["x"])
        with tf.name_scope(SCOPE):
            gru = GRU("name", LayerNormLayer)
        states = gru.states(x)
        tf.compat.v1.train.Saver().restore(session, str(folder / "v0.3" / "model.npz"))
        np.testing.assert_allclose(session.run(states), archive["states"], rtol=0, atol=1e-6)


PARTS = {
    "v0.3 trains": partial(train, "name", LayerNormLayer),
    "v0.4 trains": partial(train, "variable", LayerNormLayer),
    "master trains": partial(train, "variable", RMSNormLayer),
    "the seed": seed,
    "scopes entered again": shared,
    "a checkpoint": checkpoint,
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong with the parts, in a process of their own."""
    folder = tmp_path_factory.mktemp("graphs")
    write_checkpoint(folder)
    done = subprocess.run(
        [sys.executable, __file__, str(folder)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.sample(2)
@pytest.mark.slow
def test_in_a_graph_of_tensorflow_1(part: str, failures: dict[str, str]) -> None:
    assert not failures[part], failures[part]


def write_checkpoint(folder: Path) -> None:
    """A checkpoint of v0.3, and what its forward encoder makes of a batch."""
    from rmsnorm import nematus
    from rmsnorm.nematus.config import Config
    from rmsnorm.nematus.names import variables
    from rmsnorm.nematus.numpy import RNNSearch

    config = Config(
        embedding_size=SIZE, state_size=STATE, source_vocab_sizes=(9,), target_vocab_size=8, norm="rms",
        dialect="tensorflow-v0.3", search="costs",
    )  # fmt: skip
    rng = np.random.default_rng(2)
    parameters = {row.name: rng.standard_normal(row.shape).astype("f4") for row in variables(config)}
    (folder / "v0.3").mkdir()
    nematus.save_tensorflow(folder / "v0.3" / "model.npz", config, parameters)
    ids = rng.integers(9, size=(1, TIME, BATCH))
    states = RNNSearch(config, parameters).encode(ids, np.ones((TIME, BATCH)))[..., :STATE]
    x = parameters["encoder/embedding/embeddings"][ids[0]]
    np.savez(folder / "states.npz", x=x, states=states)


@pytest.mark.parametrize("layer", [LayerNormLayer, RMSNormLayer])
def test_eager(layer: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 3, 4)).astype("f4"), rng.standard_normal((2, 3, 4)).astype("f4")
    with tf.name_scope("gates_x_norm"):
        made = layer(4, eps=0.1)
    (gain,) = made.trainable_variables
    leaf, name = ("new_std", "layer_norm_layer") if layer is LayerNormLayer else ("scale", "rms_norm_layer")
    assert gain is getattr(made, leaf)
    assert made.name == name, "tf.Module gives it"
    assert gain.name == f"gates_x_norm/{leaf}:0"
    np.testing.assert_array_equal(gain, np.ones(4, "f4"))
    gain.assign(rng.standard_normal(4).astype("f4"))
    with tf.GradientTape() as tape:
        y = made.forward(tf.constant(x), input_is_3d=True)
    dgain = tape.gradient(y, gain, dy)
    options = {"variant": "nematus", "eps": 0.1}
    np.testing.assert_allclose(y, rms_norm(x, gain.numpy(), **options), rtol=1e-6)
    np.testing.assert_allclose(dgain, rms_norm_vjp(dy, x, gain.numpy(), **options)[1], rtol=1e-5)
    compiled = tf.function(lambda t: made.forward(t), input_signature=[tf.TensorSpec(None, tf.float32)])
    np.testing.assert_allclose(compiled(tf.constant(x[0])), y[0], rtol=1e-6)
    with tf.GradientTape() as tape:
        y_xla = tf.function(lambda t: made.forward(t), jit_compile=True)(tf.constant(x))
    np.testing.assert_allclose(y_xla, y, rtol=1e-6)
    np.testing.assert_allclose(tape.gradient(y_xla, gain, dy), dgain, rtol=1e-5)

    prefix = tf.train.Checkpoint(layer=made).save(str(tmp_path / "layer"))
    other = layer(4, eps=0.1)
    tf.train.Checkpoint(layer=other).restore(prefix).assert_consumed()
    np.testing.assert_array_equal(other.forward(x), y)


def test_the_default_eps_is_that_of_nematus() -> None:
    x = np.full((1, 3), 1e-3, "f4")
    np.testing.assert_allclose(LayerNormLayer(3).forward(x), 1e-3 / np.sqrt(1e-6 + 1e-5) * np.ones((1, 3)), rtol=1e-6)


def test_errors() -> None:
    for size in (0, -1, 2.0, "4"):
        with pytest.raises(ValueError, match=r"RMSNormLayer: layer_size is .*, expected an integer >= 1; pass that of"):
            RMSNormLayer(size)
    with pytest.raises(ValueError, match=r"LayerNormLayer: eps is -1.0, expected a finite number >= 0"):
        LayerNormLayer(4, eps=-1.0)
    layer = LayerNormLayer(4)
    with pytest.raises(ValueError, match=r"scale has shape \(4,\), expected \(3,\) to match axis -1 of x f32\[2, 3\]"):
        layer.forward(tf.ones((2, 3)))
    with pytest.raises(TypeError, match=r"x has dtype int32, expected"):
        layer.forward(tf.ones((2, 4), tf.int32))


if __name__ == "__main__":
    tf.compat.v1.disable_v2_behavior()
    failures = {}
    for name, part in PARTS.items():
        try:
            part(Path(sys.argv[1]))
            failures[name] = ""
        except Exception:
            failures[name] = traceback.format_exc()
    print(json.dumps(failures))
