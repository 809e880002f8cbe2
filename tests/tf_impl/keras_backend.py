"""The layer on the backend of Keras that KERAS_BACKEND names, against the golden; test_keras runs it where there is no
TensorFlow, in a process for each backend.

On PyTorch and JAX y of up to 32 bits has the golden's bits. On NumPy, in graphs of TensorFlow and in ONNX it is made of
float32 operations. The bound there, in units u = 2^-24 (float64: 2^-53) of the terms of y, k elements counted: The
mean square errs by the square, k - 1 additions in any order, the mean and two operations on eps: k + 3; the root halves
that, and adds 1; so do the division, the offset, the gain and the bias: (k + 3) / 2 + 5. Where a mean is taken out of
a first, it errs by k + 1 of the mean of |a|, which is at most the root mean square of a, and so the mean square errs by
2 (k + 2) kappa more, kappa being the root mean square of a over that of a - mean. A rounding to 16 bits errs by 1 in
its own unit; the golden makes it, too, and there are 4 at most.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.modules["tensorflow"] = None  # type: ignore[assignment]  # it must not be needed

import keras

import rmsnorm
from rmsnorm import numpy_impl as golden
from rmsnorm.accuracy.terms import term_sizes
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.engines import why_not
from rmsnorm.specification import dtypes
from rmsnorm.tf_impl import RMSNormalization

BACKEND = keras.backend.backend()
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16", "float64")
MAGNITUDES = (1, 0, 1e20, 1e-30)  # of one row after the other
SHAPES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "last": ({}, (6, 32)),
    "middle": ({"axis": 1}, (4, 8, 4)),
    "unsorted": ({"axis": (-1, 1)}, (4, 8, 2, 4)),
    "image": ({"axis": (2, 3), "feature_axis": 1}, (4, 3, 4, 4)),
    "partial": ({"partial": 0.3}, (6, 32)),
    "no scale": ({"scale": False, "bias": True}, (6, 32)),
    "no weights": ({"scale": False, "bias": False}, (4, 8)),
}


def to_numpy(x: Any) -> Any:
    """Exactly; a backend may not know how in bfloat16."""
    name = keras.backend.standardize_dtype(x.dtype)
    return keras.ops.convert_to_numpy(keras.ops.cast(x, "float64" if name == "float64" else "float32")).astype(name)


def weights_of(layer: Any) -> list[Any]:
    return [None if w is None else to_numpy(w.value) for w in (layer.scale, layer.bias)]


def check(got: Any, layer: Any, x: Any, by_operations: bool = BACKEND in ("numpy", "tensorflow")) -> None:
    """By the bound on the recipe in the dtype of x where that may compute y, else bit for bit."""
    options = {"variant": layer.variant, "axis": layer.axis, "feature_axis": layer.feature_axis}
    want = golden.rms_norm(x, *weights_of(layer), **options, out_dtype=layer.compute_dtype)
    if by_operations or why_not(layer._resolve(x.shape).in_rows) is not None:
        check_bound(got, want, layer, x)
        return
    distance = ulps(got, want)
    most = 1 if in_float32(layer, x) else 0
    if x.dtype == np.float64:  # each operation rounds, and a bias may cancel most of the rest
        np.testing.assert_allclose(got, want, rtol=2.0**-50, atol=2.0**-48)
        return
    assert distance.max(initial=0) <= most, (layer.variant.name, x.dtype, got[distance > most], want[distance > most])


def in_float32(layer: Any, x: Any) -> bool:
    """Whether y is 16 bits of JAX without a kernel: from one rounding of float32, which may be on the other side."""
    one = BACKEND == "jax" and len(keras.distribution.list_devices()) == 1
    return BACKEND == "jax" and x.dtype.name in dtypes.HALF and not (one and why_not(layer._resolve(x.shape)) is None)


def check_bound(got: Any, want: Any, layer: Any, x: Any) -> None:
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    assert got.shape == want.shape
    options = {"variant": layer.variant, "axis": layer.axis, "feature_axis": layer.feature_axis}
    terms = term_sizes(x, *weights_of(layer), dy=x, tangents=(x, None, None), **options)["y"]
    axes = tuple(axis % x.ndim for axis in np.atleast_1d(layer.axis))
    k = layer.variant.counted(int(np.prod([x.shape[axis] for axis in axes])))
    u = dtypes.unit_roundoff("float64" if x.dtype == np.float64 else "float32")
    half = 8 * dtypes.unit_roundoff(x.dtype.name) if x.dtype.name in dtypes.HALF else 0.0
    error = ((k + 3) / 2 + 5) * u + half
    tiny = 2.0**-24 if x.dtype == np.float16 else 2.0**-126  # where results are subnormal
    got, want = got.astype(np.float64), want.astype(np.float64)
    near = (np.abs(got - want) <= error * terms + tiny) | (np.isnan(got) & np.isnan(want))  # a row of zeros, eps = 0
    assert near.all(), (layer.variant.name, x.dtype, got[~near], want[~near], error * terms[~near])


def check_outputs() -> None:
    """Of every variant, under every policy, in every shape."""
    rng = np.random.default_rng(0)
    for policy, variant, (options, shape) in itertools.product(POLICIES, rmsnorm.PRESETS, SHAPES.values()):
        options = {"bias": variant == "llama" or None, **options}
        layer = RMSNormalization(**options, variant=variant, dtype=policy)
        layer.build(shape)
        layer.set_weights([rng.standard_normal(w.shape) for w in layer.weights])
        x = rng.standard_normal(shape)
        sizes = MAGNITUDES[:2] if policy == "mixed_float16" else MAGNITUDES
        x = (x * np.resize(sizes, (len(x), *[1] * (x.ndim - 1)))).astype(layer.compute_dtype)
        check(to_numpy(layer(x)), layer, x)
    for shape in ((0, 8), (4, 0)):
        assert tuple(RMSNormalization(scale=False)(np.zeros(shape, np.float32)).shape) == shape


def check_a_file_of_tensorflow(folder: Path) -> None:
    """What test_keras saved: the arguments, the weights, the values."""
    model = keras.saving.load_model(folder / "tensorflow.keras")
    x = np.random.default_rng(0).standard_normal((4, 6, 5)).astype("bfloat16")
    assert [w.std() > 0.3 for w in weights_of(model.layers[-1])] == [True, True]
    check(to_numpy(model(x)), model.layers[-1], x)


def check_promises(folder: Path) -> None:
    """Those of tests/layers, with a half of the cases of the kit, on JAX a sixth, as it compiles."""
    import test_promises as promises
    from layer_keras import Layer

    for part in range(promises.PARTS // 2 if BACKEND == "torch" else 1):
        promises.test_every_case_of_the_kit(Layer, part)
    promises.test_every_variant_starts_with_a_factor_of_one(Layer)
    promises.test_options(Layer)
    promises.test_copies(Layer)
    promises.test_a_transform_changes_only_what_float32_rounds(Layer)
    if Layer.CLASSES[1] is not None:
        for dtype in dtypes.FLOATS if BACKEND == "torch" else ("bfloat16", "float32"):
            promises.test_it_stands_for_the_built_in(Layer, None, dtype)
        promises.test_every_argument_of_the_built_in(Layer, None)
        promises.test_state_goes_both_ways(Layer, None, folder)


def has_double() -> bool:
    """JAX computes in float64 only if that is switched on."""
    return BACKEND != "jax" or bool(sys.modules["jax"].config.jax_enable_x64)


def main(folder: Path) -> None:
    import keras_layer

    check_a_file_of_tensorflow(folder)
    if BACKEND == "numpy":  # which neither differentiates nor trains, and warns of 0 / 0 with every layer
        np.seterr(all="ignore")
        check_outputs()
        return
    check_promises(folder)
    for check in keras_layer.CHECKS.values():
        if keras_layer.BuiltIn is not None or not hasattr(check, "pytestmark"):  # that of beside_the_built_in
            check(folder)


if __name__ == "__main__":
    if sys.argv[2:] == ["compiled"]:
        from keras_layer import train_compiled

        train_compiled()
    else:
        main(Path(sys.argv[1]))
    frameworks = {
        name for name in ("tf_impl.functional", "torch_impl", "flax_impl") if f"rmsnorm.{name}" in sys.modules
    }
    assert frameworks == {"torch": {"torch_impl"}, "jax": {"flax_impl"}, "numpy": set()}[BACKEND]
    print(f"{BACKEND}: done")
