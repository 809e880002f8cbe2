"""LiteRT: programs have neither float64 arithmetic nor operations of TensorFlow, and keep the parity kit's bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rmsnorm import numpy_impl as golden
from rmsnorm.specification.variants import PRESETS

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from tf_arrays import check_bounds  # noqa: E402

from rmsnorm.tf_impl import RMSNormalization, rms_norm  # noqa: E402

pytestmark = pytest.mark.filterwarnings(r"ignore:\s*Warning. tf.lite.Interpreter is deprecated:UserWarning")

RNG = np.random.default_rng(0)
SCALE, BIAS = RNG.standard_normal((2, 40)).astype(np.float32)
# rows of every magnitude whose squares float32 has: others are infinite in programs for LiteRT, as in Keras's own layer
X = (RNG.standard_normal((12, 40)) * np.repeat([1, 1e8, 1e17, 1e-20], 3)[:, None]).astype(np.float32)


def interpreted(program: bytes, *arrays: np.ndarray) -> list[np.ndarray]:
    """The results of a program's only signature; arguments and results are in the order of their names."""
    interpreter = tf.lite.Interpreter(model_content=program)
    run = interpreter.get_signature_runner()
    results = run(**dict(zip(run.get_input_details(), arrays, strict=True)))
    assert not [op["op_name"] for op in interpreter._get_ops_details() if op["op_name"].startswith(("Flex", "CUSTOM"))]
    return [results[name] for name in sorted(results, key=lambda name: (len(name), name))]


def test_models_of_keras(tmp_path: Path) -> None:
    """By the converter and by Keras, which both export a SavedModel for it."""
    variants = ("keras", "zhang_torch", "x_transformers", "lasagne")
    layers = [RMSNormalization(variant=variant) for variant in variants]
    inputs = keras.Input((40,), name="x")
    model = keras.Model(inputs, [layer(inputs) for layer in layers])
    for layer in layers:
        layer.set_weights([SCALE, BIAS][: len(layer.weights)])
    model.export(str(tmp_path / "model.tflite"), format="litert", verbose=False)
    converted = tf.lite.TFLiteConverter.from_keras_model(model).convert()
    for program in (converted, (tmp_path / "model.tflite").read_bytes()):
        for y, layer in zip(interpreted(program, X), layers, strict=True):
            check_bounds({"y": y}, X, SCALE, BIAS if layer.use_bias else None, variant=layer.variant)


def test_functions_with_gradients(tmp_path: Path) -> None:
    """From a SavedModel: LiteRT can train, too."""
    x, dy, residual = RNG.standard_normal((3, 6, 40)).astype(np.float32)
    mask = RNG.random((6, 40)) > 0.2
    mask[1] = False
    options = {"variant": PRESETS["gemma"].replace(partial=0.3), "mask": mask, "residual": residual}

    @tf.function(input_signature=[tf.TensorSpec([6, 40], kind) for kind in ("float32", "bool", "float32", "float32")])
    def step(dy: Any, mask: Any, residual: Any, x: Any) -> Any:
        scale = tf.constant(SCALE)
        with tf.GradientTape() as tape:
            tape.watch([x, scale])
            given = {**options, "mask": mask, "residual": residual}
            y, h, inverse_rms = rms_norm(x, scale, **given, return_inverse_rms=True)
        return y, h, inverse_rms, *tape.gradient(y, [x, scale], dy)

    module = tf.Module()
    module.step = step
    tf.saved_model.save(module, str(tmp_path), signatures=step.get_concrete_function())
    program = tf.lite.TFLiteConverter.from_saved_model(str(tmp_path)).convert()
    y, h, *others = interpreted(program, dy, mask, residual, x)
    np.testing.assert_array_equal(h, golden.rms_norm(x, SCALE, **options)[1])
    named = dict(zip(("inverse_rms", "dx", "dscale"), others, strict=True))
    check_bounds({"y": y, **named}, x, SCALE, dy=dy, **options)


@pytest.mark.skipif(not hasattr(keras.layers, "RMSNormalization"), reason="this Keras has no RMSNormalization")
@pytest.mark.filterwarnings("ignore:Statistics for quantized inputs:UserWarning")
def test_activations_in_integers() -> None:
    """A norm between two dense layers in 8 bits, beside Keras's own, which rounds five tensors.

    Ours rounds at most as many again where eps is not under the root: twice as many errors are 1.4 times as large.
    """
    x, errors = np.random.default_rng(1).standard_normal((100, 16)).astype(np.float32), []
    plain = tf.lite.experimental.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    for norm in (RMSNormalization(variant="zhang_torch", epsilon=1e-6), keras.layers.RMSNormalization(epsilon=1e-6)):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(64), norm, keras.layers.Dense(8)])
        converter = tf.lite.TFLiteConverter.from_keras_model(model)
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        converter.representative_dataset = lambda: ([row[None]] for row in x)
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
        interpreter = tf.lite.Interpreter(model_content=converter.convert(), experimental_op_resolver_type=plain)
        run = interpreter.get_signature_runner()
        (name,) = run.get_input_details()
        rows = [next(iter(run(**{name: row[None]}).values()))[0] for row in x]
        errors.append(float(np.sqrt(np.mean((np.stack(rows) - np.asarray(model(x))) ** 2))))
    assert errors[0] <= 2**0.5 * errors[1]
