"""The Keras layer: a drop-in for keras.layers.RMSNormalization that is right on every axis, on every backend."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from programs import printed

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

import keras_layer  # noqa: E402
from keras_values import check, filled, normal  # noqa: E402
from tf_arrays import check_bounds  # noqa: E402

from rmsnorm.tf_impl import RMSNormalization, rms_norm, rms_norm_vjp  # noqa: E402

NUMPY_2 = "__array__ implementation doesn't accept a copy keyword"  # what keras.ops.convert_to_numpy is warned of
pytestmark = [
    pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the other backends have a process each"),
    pytest.mark.filterwarnings(f"ignore:{NUMPY_2}:DeprecationWarning"),
]
tf.get_logger().setLevel("ERROR")
BuiltIn, beside_the_built_in = keras_layer.BuiltIn, keras_layer.beside_the_built_in


def test_unknown_sizes_and_other_shapes() -> None:
    layer = filled(RMSNormalization(), (2, 8))
    for shape in ((3, 8), (2, 3, 8), (8,), (0, 8)):
        check(layer(normal(*shape)).numpy(), layer, normal(*shape))
    pictures = filled(RMSNormalization((2, 3), feature_axis=1, variant="lasagne"), (None, 3, None, None))
    bare = RMSNormalization(-1, scale=False)
    bare.build((None, None))
    for layer, x in ((pictures, normal(2, 3, 4, 5)), (bare, normal(2, 3))):
        traced = tf.function(layer.__call__, input_signature=[tf.TensorSpec([None] * x.ndim, tf.float32)])
        check(traced(x).numpy(), layer, x)


def test_export(tmp_path: Path) -> None:
    """A SavedModel that TensorFlow alone can serve, for any batch, and train: it has the gradient, and that one's."""
    options = {"variant": "llama", "partial": 0.3}
    model = keras.Sequential([keras.Input((8,)), filled(RMSNormalization(**options), (None, 8))])
    model.export(str(tmp_path), verbose=False)
    x, dy, scale = normal(5, 8), normal(5, 8, seed=7), model.get_weights()[0]
    np.savez(tmp_path / "given.npz", x=x, dy=dy)
    code = (
        "import sys, numpy as np, tensorflow as tf\n"
        "model, given = tf.saved_model.load('.'), np.load('given.npz')\n"
        "leaves = [tf.constant(given['x']), *model.trainable_variables]\n"
        "with tf.GradientTape() as tape:\n"
        "    tape.watch(leaves); y = model.serve(leaves[0])\n"
        "assert 'rmsnorm' not in sys.modules\n"
        "np.savez('found.npz', y, *tape.gradient(y, leaves, given['dy']))"
    )
    printed("-c", code, cwd=tmp_path)
    results = dict(zip(("y", "dx", "dscale"), np.load(tmp_path / "found.npz").values(), strict=True))
    check_bounds(results, x, scale, dy=dy, **options)


def test_functions_take_keras_variables() -> None:
    x, scale = keras.Variable(normal(3, 8)), keras.Variable(normal(8, seed=1), dtype="bfloat16")
    for function in (rms_norm, lambda *arrays, **more: rms_norm_vjp(arrays[0], *arrays, **more)):
        got, want = (function(a, b, b) for a, b in ((x, scale), (x.value, scale.value)))
        assert all(map(np.array_equal, got, want))
    assert RMSNormalization()(x).shape == x.shape
    for other in (keras.KerasTensor((3, 8)), tf.sparse.from_dense(x), tf.ragged.constant([[1.0], [2.0, 3.0]])):
        with pytest.raises(TypeError, match=r"(?s)rms_norm: x is .*, expected a tf\.Tensor"):
            rms_norm(other)


def test_a_ragged_tensor() -> None:
    """Keras's own layers take one. The axes that are not ragged are normalised, by the flat values."""
    x = normal(5, 3, 8)
    ragged = tf.RaggedTensor.from_row_lengths(x, [2, 0, 3])
    for options, of_values in (
        ({}, {"axis": -1}),
        ({"axis": (-2, -1)}, {"axis": (1, 2)}),
        ({"axis": 3, "feature_axis": (2, 3)}, {"axis": 2, "feature_axis": (1, 2)}),
    ):
        layer = RMSNormalization(**options)
        for run in (layer, tf.function(layer)):
            y = run(ragged)
            assert (y.shape.as_list(), y.row_lengths().numpy().tolist()) == ([3, None, 3, 8], [2, 0, 3])
            check_bounds({"y": y.flat_values}, x, layer.scale.numpy(), variant="keras", **of_values)
    with pytest.raises(TypeError, match=r"x is .*, expected a tensor with no ragged axis from axis 1"):
        RMSNormalization(1, scale=False)(ragged)
    with pytest.raises(TypeError, match=r"RMSNormalization: gate is .*, expected None beside a ragged x"):
        RMSNormalization()(ragged, gate=ragged)


def test_what_the_layer_is_given_may_change() -> None:
    """epsilon, partial and variant: None brings back what the variant has, and an error changes nothing."""
    layer = RMSNormalization(variant="torch", epsilon=1e-3)
    layer.epsilon, layer.partial, layer.variant = 0.1, 0.5, "gemma"
    for name, wrong in (("epsilon", -1.0), ("partial", 2.0), ("variant", "gema")):
        with pytest.raises(ValueError, match=f"RMSNormalization: {name[:3]}"):
            setattr(layer, name, wrong)
    assert (layer.variant.name, layer.epsilon, layer.partial) == ("gemma", 0.1, 0.5)
    layer.epsilon = layer.partial = None
    assert layer.variant == RMSNormalization(variant="gemma").variant


def test_errors() -> None:
    for options, shape, match in (
        ({"axis": 3}, (2, 3, 4), r"axis is 3, expected between -3 and 2 for x f32\[2, 3, 4\]"),
        ({"axis": [1, -2]}, (2, 3, 4), r"axis \(1, -2\) names an axis of x f32\[2, 3, 4\] twice"),
        ({"feature_axis": -4}, (2, 3, 4), "feature_axis is -4, expected between -3 and 2"),
        ({"axis": 1}, (2, None, 4), "x axis 1 has an unknown size, expected a known one"),
    ):
        with pytest.raises(ValueError, match=f"RMSNormalization: {match}"):
            RMSNormalization(**options).build(shape)
        with pytest.raises(ValueError, match=f"RMSNormalization: {match}"):
            RMSNormalization(**options)(keras.Input(shape[1:], batch_size=shape[0]))
    with pytest.raises(ValueError, match=r"rms_norm: scale has shape \(4,\), expected \(5,\) to match axis -1"):
        filled(RMSNormalization(), (2, 4))(normal(2, 5))


@pytest.mark.parametrize("backend", ["jax", "torch", "numpy"])
def test_other_backends(backend: str, tmp_path: Path) -> None:
    """In a process of its own, where there is no TensorFlow."""
    pytest.importorskip("jax" if backend == "numpy" else backend)  # which the NumPy backend of Keras imports
    layer = RMSNormalization(1, variant="gemma", partial=0.3, bias=True, dtype="mixed_bfloat16")
    model = keras.Sequential([keras.Input((6, 5)), layer])
    filled(layer, (None, 6, 5))
    model.save(tmp_path / "tensorflow.keras")
    ignored = f"{NUMPY_2}:DeprecationWarning", "`torch.jit.script:DeprecationWarning", "`shuffle=True` was:UserWarning"
    options = [option for words in ignored for option in ("-W", f"ignore:{words}")]
    script = Path(__file__).with_name("keras_layer.py")
    assert printed("-W", "error", *options, script, tmp_path, KERAS_BACKEND=backend).endswith(f"{backend}: done\n")


@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning")
@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights:UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=getattr(check, "pytestmark", ())) for name, check in keras_layer.CHECKS.items()]
)
def test_on_tensorflow(name: str, tmp_path: Path) -> None:
    """The checks that keras_layer runs on the other backends, too."""
    keras_layer.CHECKS[name](tmp_path)


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_devices(backend: str) -> None:
    """tf.distribute and keras.distribution."""
    pytest.importorskip(backend)
    devices = "--xla_force_host_platform_device_count=8" if backend == "jax" else ""
    script = "-W", "error", "-W", "ignore::DeprecationWarning", Path(__file__).with_name("keras_devices.py")
    assert printed(*script, KERAS_BACKEND=backend, XLA_FLAGS=devices).endswith(f"{backend}: done\n")
