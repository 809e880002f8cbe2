"""Nematus's layers on rms_norm: in a model as TensorFlow 1 has it, a graph and a session; and in eager code.

Run as a program, it is the process of the first test: TensorFlow 1's mode cannot be left.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow")

from rmsnorm.nematus.tf.layers import LayerNormLayer, RMSNormLayer  # noqa: E402
from rmsnorm.numpy_impl import rms_norm, rms_norm_vjp  # noqa: E402

v1 = tf.compat.v1
SIZE, STATE, TIME, BATCH = 5, 6, 4, 8
SCOPE = "encoder/forward-stack/level0/gru0"


def graph(style: str, layer: Any) -> tuple[Any, dict[Any, Any]]:
    """The loss of a model that tells whether the sum of a sequence is positive, and what it is fed with."""
    scope = tf.name_scope if style == "name" else v1.variable_scope  # v0.3 has name scopes, later ones variable scopes
    x, y = v1.placeholder(tf.float32, [None, None, SIZE]), v1.placeholder(tf.float32, [None])
    rng, weights, norms = np.random.default_rng(0), {}, {}
    with scope(SCOPE):
        for name, rows in (("input_to_gates", SIZE), ("state_to_gates", 2 * STATE)):
            weights[name] = v1.Variable(rng.standard_normal((rows, 2 * STATE)).astype("f4") * 0.3, name=name)
        for name in ("gates_x_norm", "gates_state_norm"):
            with scope(name):
                norms[name] = layer(2 * STATE)
    product = tf.reshape(x, [-1, SIZE]) @ weights["input_to_gates"]
    product = tf.reshape(product, tf.concat([tf.shape(x)[:-1], [2 * STATE]], 0))  # loses its shape
    gates = norms["gates_x_norm"].forward(product, input_is_3d=True)
    top = norms["gates_state_norm"].forward(tf.reduce_sum(tf.tanh(gates), 0) @ weights["state_to_gates"])
    loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=tf.reduce_sum(top, -1)))
    values = np.random.default_rng(1).standard_normal((TIME, BATCH, SIZE)).astype("f4")
    return loss, {x: values, y: (values.sum(axis=(0, 2)) > 0).astype("f4")}


def train(style: str, layer: Any) -> None:
    gain = "scale" if layer is RMSNormLayer else "new_std"
    norms = {f"{SCOPE}/gates_{part}_norm/{gain}" for part in ("state", "x")}
    with tf.Graph().as_default(), v1.Session() as session:
        loss, feed = graph(style, layer)
        variables = {variable.op.name: variable for variable in v1.trainable_variables()}
        assert set(variables) == norms | {f"{SCOPE}/{side}_to_gates" for side in ("state", "input")}
        step = v1.train.AdamOptimizer(0.05).minimize(loss)
        session.run(v1.global_variables_initializer())
        first = session.run(loss, feed)
        for _ in range(40):
            session.run(step, feed)
        last, values = session.run([loss, variables], feed)
        assert last < 0.2 < 0.4 < first, (first, last)
        assert all((values[name] != 1).all() for name in norms), "all gains are trained"


def shared() -> None:
    """Scopes entered again, as models on several devices are built, and scopes of both kinds in each other."""
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


@pytest.mark.slow
def test_in_a_graph_of_tensorflow_1() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("layer", [LayerNormLayer, RMSNormLayer])
def test_eager(layer: Any, tmp_path: Path) -> None:
    """Names, gradients, a function that knows no shape, one of XLA, and a checkpoint."""
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 3, 4)).astype("f4"), rng.standard_normal((2, 3, 4)).astype("f4")
    with tf.name_scope("gates_x_norm"):
        made = layer(4, eps=0.1)
    (gain,) = made.trainable_variables
    leaf, name = ("new_std", "layer_norm_layer") if layer is LayerNormLayer else ("scale", "rms_norm_layer")
    assert gain is getattr(made, leaf)
    assert (made.name, gain.name) == (name, f"gates_x_norm/{leaf}:0"), "tf.Module gives the first one"
    np.testing.assert_array_equal(gain, np.ones(4, "f4"))
    gain.assign(rng.standard_normal(4).astype("f4"))
    assert layer(4).eps == 1e-5, "as in Nematus"
    options = {"variant": "nematus", "eps": 0.1}
    wanted = rms_norm(x, gain.numpy(), **options)
    for compiled in (None, False, True):
        function = partial(made.forward, input_is_3d=True)
        with tf.GradientTape() as tape:
            y = (function if compiled is None else tf.function(function, jit_compile=compiled))(tf.constant(x))
        np.testing.assert_allclose(y, wanted, rtol=1e-6)
        dgain = rms_norm_vjp(dy, x, gain.numpy(), **options)[1]
        np.testing.assert_allclose(tape.gradient(y, gain, dy), dgain, rtol=1e-5)
    signature = [tf.TensorSpec(None, tf.float32)]
    for given, is_3d in ((x, True), (x[0], False)):
        unknown = tf.function(partial(made.forward, input_is_3d=is_3d), input_signature=signature)
        np.testing.assert_allclose(unknown(tf.constant(given)), wanted if is_3d else wanted[0], rtol=1e-6)

    prefix = tf.train.Checkpoint(layer=made).save(str(tmp_path / "layer"))
    other = layer(4, eps=0.1)
    tf.train.Checkpoint(layer=other).restore(prefix).assert_consumed()
    np.testing.assert_array_equal(other.forward(x), made.forward(x))


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
    v1.disable_v2_behavior()
    train("name", LayerNormLayer)  # v0.3
    train("variable", LayerNormLayer)  # v0.4
    train("variable", RMSNormLayer)  # master
    shared()
