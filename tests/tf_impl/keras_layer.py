"""What Keras does with a layer, on the backend that KERAS_BACKEND names, ours beside the built-in one.

test_keras runs CHECKS on TensorFlow, and this program in a process for each other backend, where there is no
TensorFlow. The values are the golden's, within the bounds of the judge: Keras computes some in operations.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.modules["tensorflow"] = None  # type: ignore[assignment]  # it must not be needed

import keras
import numpy as np
import pytest
from keras import ops
from keras.src.testing import TestCase
from keras_values import CONFIGURATIONS, check, filled, judged_step, normal, to_numpy, weights_of

import rmsnorm
from rmsnorm.tf_impl import RMSNormalization

BACKEND = keras.backend.backend()
BuiltIn = getattr(keras.layers, "RMSNormalization", None)
beside_the_built_in = pytest.mark.needs("keras>=3.9", "it compares with keras.layers.RMSNormalization, which is of 3.9")


def applied(layer: Any, x: Any) -> Any:
    """Its output; on JAX in one compilation, not one for each operation."""
    if BACKEND == "jax":
        import jax

        return to_numpy(jax.jit(layer)(x))
    return to_numpy(layer(x))


def check_harness(folder: Path) -> None:
    """Keras's own: configuration, serialisation, building, symbolic calls, training under jit_compile, policies."""
    for name, (arguments, shape) in CONFIGURATIONS.items() if BACKEND == "tensorflow" else ():
        weights = {"no weights": 0, "image": 2, "outside": 2}.get(name, 1)
        TestCase().run_layer_test(
            RMSNormalization, init_kwargs=arguments, input_shape=shape, expected_output_shape=shape,
            supports_masking=True, expected_num_trainable_weights=weights, expected_num_non_trainable_weights=0,
            expected_num_seed_generators=0, expected_num_losses=0,
        )  # fmt: skip


@beside_the_built_in
def check_dtypes(folder: Path) -> None:
    """Of y, of the symbolic y and of the weight: those of the built-in, under every policy and for every input."""
    doubles = ["float64"] if has_double() else []
    for policy in ["float32", "bfloat16", "mixed_bfloat16", "mixed_float16", *doubles]:
        for dtype in ("float16", "bfloat16", "float32", *doubles):
            found = []
            for kind in (RMSNormalization, BuiltIn):
                layer = kind(dtype=policy, autocast=policy != "bfloat16")
                results = layer(ops.cast(normal(3, 8), dtype)), layer(keras.KerasTensor((3, 8), dtype=dtype))
                found.append([*(y.dtype for y in results), layer.scale.dtype, layer.variable_dtype])
            assert found[0] == found[1], (policy, dtype)


@beside_the_built_in
def check_drop_in_calls(folder: Path) -> None:
    """What code for the built-in writes: the name of the argument, a configuration, call() for the layer itself."""
    x = normal(4, 8)
    for kind in (RMSNormalization, BuiltIn):
        layer = filled(kind(), (None, 8))
        for array in (layer(x=x), layer.call(x), layer.stateless_call([w.value for w in layer.variables], [], x)[0]):
            np.testing.assert_array_equal(to_numpy(array), to_numpy(layer(x)))
    for options in ({}, {"axis": [1, 2], "epsilon": 1e-3, "dtype": "mixed_bfloat16", "name": "norm"}):
        configurations = [kind(**options).get_config() for kind in (RMSNormalization, BuiltIn)]
        again = BuiltIn.from_config(configurations[0])
        assert {**again.get_config(), "name": ""} == {**configurations[1], "name": ""}
    assert not RMSNormalization.from_config(RMSNormalization(variant="equinox", bias=False).get_config()).use_bias
    for options in ({"variant": "nematus"}, {"bias": True}, {"partial": 0.5}):
        with pytest.raises((TypeError, ValueError), match=next(iter(options))):
            BuiltIn.from_config(RMSNormalization(**options).get_config())


def check_masks(folder: Path) -> None:
    """Passed on to the layer that pools, which the built-in does not."""
    inputs = keras.Input((None,), dtype="int32")
    h = RMSNormalization()(keras.layers.Embedding(4, 8, mask_zero=True)(inputs))
    model = keras.Model(inputs, [h, keras.layers.GlobalAveragePooling1D()(h)])
    steps, pooled = (to_numpy(y) for y in model(np.array([[1, 2, 0], [3, 0, 0]])))
    np.testing.assert_allclose(pooled[0], steps[0, :2].mean(0), rtol=2.0**-22, atol=2.0**-22)


def check_initializers_regularizers_constraints(folder: Path) -> None:
    """One step of a fit: the loss has the penalties in it, the gradient theirs, and what falls below 0 is cut."""
    layer = RMSNormalization(
        bias=True, scale_initializer=lambda shape, dtype: ops.cast([1.0, 2.0, -3.0, 4.0], dtype),
        bias_initializer="ones", scale_regularizer=keras.regularizers.L2(0.25),
        bias_regularizer=keras.regularizers.L1(0.5), scale_constraint="non_neg",
        bias_constraint=keras.constraints.MaxNorm(0.75),
    )  # fmt: skip
    model, x = keras.Sequential([keras.Input((4,)), layer]), normal(16, 4)
    model.compile(keras.optimizers.SGD(0.5), lambda target, y: 0 * ops.sum(y, -1))
    assert model.fit(x, x, batch_size=16, verbose=0).history["loss"] == [0.25 * 30 + 0.5 * 4]
    scale, bias = weights_of(layer)
    assert scale.tolist() == [0.75, 1.5, 0.0, 3.0]  # w - 0.5 * 0.5 w, not below 0
    # 1 - 0.5 * 0.5 each, a norm of 1.5, which MaxNorm divides by 1e-7 too much
    np.testing.assert_allclose(bias, [0.375] * 4, rtol=2.0**-22)


def check_training(folder: Path) -> None:
    """In float32 with a row of zeros, a huge and a tiny one; compiled by the backend and not, and eagerly."""
    x, rare = normal(16, 8), normal(16, 8)
    rare[1], rare[2], rare[3] = 0, rare[2] * 1e20, rare[3] * 1e-30
    compiled = {"jit_compile": BACKEND != "torch"}  # which takes 20 seconds there, for Keras's own code
    for policy, rows, way in (
        ("float32", rare, compiled), ("mixed_bfloat16", x, {"run_eagerly": True}),
        ("mixed_float16", x, {"jit_compile": False}),
    ):  # fmt: skip
        judged_step(RMSNormalization(variant="equinox", dtype=policy), rows, **way)
    if BACKEND != "tensorflow":  # where it fails for every layer, of a keyword argument in a graph
        with keras.RematScope(mode="full"):
            judged_step(RMSNormalization(variant="equinox"), x)


def has_double() -> bool:
    """JAX computes in float64 only if that is switched on."""
    return BACKEND != "jax" or bool(sys.modules["jax"].config.jax_enable_x64)


def check_outputs(folder: Path) -> None:
    """Of variants under policies on axes, in rows of other magnitudes; a file that TensorFlow wrote; no elements."""
    random = np.random.default_rng(0)
    policies = ("float32", "mixed_bfloat16", "mixed_float16", *(["float64"] if has_double() else []))
    for i, variant in enumerate([*rmsnorm.PRESETS][:: 1 if BACKEND in ("tensorflow", "numpy") else 3]):
        options, shape = list(CONFIGURATIONS.values())[i % 6]
        layer = filled(RMSNormalization(**{**options, "variant": variant}, dtype=policies[i % len(policies)]), shape)
        sizes = (1, 0, 1e20, 1e-30)[: 2 if layer.compute_dtype == "float16" else 4]
        x = random.standard_normal(shape) * np.resize(sizes, (shape[0], *[1] * (len(shape) - 1)))
        x = x.astype(layer.compute_dtype)
        check(applied(layer, x), layer, x)
    for shape in ((0, 8), (4, 0)):
        assert tuple(RMSNormalization(scale=False)(np.zeros(shape, np.float32)).shape) == shape
    if BACKEND != "tensorflow":
        model = keras.saving.load_model(folder / "tensorflow.keras")
        x = normal(4, 6, 5).astype("bfloat16")
        assert [w.std() > 0.3 for w in weights_of(model.layers[-1])] == [True, True]
        check(to_numpy(model(x)), model.layers[-1], x)


CHECKS: dict[str, Callable[[Path], None]] = {
    name.removeprefix("check_"): function for name, function in list(globals().items()) if re.match("check_", name)
}


def check_promises(folder: Path) -> None:
    """Those of all layers."""
    sys.path.append(str(Path(__file__).parents[1] / "table"))
    import test_layers_alike as promises
    from layer_keras import Layer

    promises.check_calls(Layer, 12 if BACKEND == "torch" else 40)
    promises.test_options(Layer)
    promises.test_copies(Layer)
    if Layer.CLASSES[1] is not None:
        promises.test_it_stands_for_the_built_in(Layer, "bfloat16")
        promises.test_state_goes_both_ways(Layer, folder)


def main(folder: Path) -> None:
    if BACKEND == "numpy":  # which neither differentiates nor trains, and warns of 0 / 0 with every layer
        np.seterr(all="ignore")
        check_outputs(folder)
        return
    check_promises(folder)
    for run in CHECKS.values():
        if BuiltIn is not None or not hasattr(run, "pytestmark"):  # that of beside_the_built_in
            run(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    seen = {name for name in ("tf_impl.functional", "torch_impl", "flax_impl") if f"rmsnorm.{name}" in sys.modules}
    assert seen == {"torch": {"torch_impl"}, "jax": {"flax_impl"}, "numpy": set()}[BACKEND]
    print(f"{BACKEND}: done")
