"""What Keras does with a layer, on the backend that KERAS_BACKEND names, ours beside the built-in one.

test_keras runs CHECKS on TensorFlow, keras_backend in the processes of the others. The values are the golden's.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops
from keras.src.testing import TestCase
from keras_backend import check, has_double, to_numpy, weights_of
from keras_configurations import CONFIGURATIONS, filled, normal

from rmsnorm import numpy_impl as golden
from rmsnorm.accuracy.bounds import bound
from rmsnorm.accuracy.terms import term_sizes
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
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


def run_by_the_harness(name: str) -> None:
    """run_layer_test, with expectations of the built-in's own test and ours: a bias, a mask."""
    arguments, shape = CONFIGURATIONS[name]
    weights = 0 if name == "no weights" else 2 if name in ("image", "outside") else 1
    TestCase().run_layer_test(
        RMSNormalization, init_kwargs=arguments, input_shape=shape, expected_output_shape=shape, supports_masking=True,
        expected_num_trainable_weights=weights, expected_num_non_trainable_weights=0, expected_num_seed_generators=0,
        expected_num_losses=0,
    )  # fmt: skip


def check_the_harness_of_keras(folder: Path) -> None:
    """Four of the configurations that it has on TensorFlow."""
    for name in ("plain", "image", "partial", "before scale"):
        run_by_the_harness(name)


def check_the_tests_of_keras(folder: Path) -> None:
    """keras/src/layers/normalization/rms_normalization_test.py, held to the golden in place of its atol of 0.1."""
    layer = RMSNormalization()
    layer.build((2, 2, 2))
    x = (5 + 10 * np.random.default_rng(0).standard_normal((1000, 2, 2, 2))).astype(np.float32)
    check(applied(layer, x), layer, x)
    x = np.arange(10, dtype=np.float32)[None]
    layer = RMSNormalization()
    layer.build(x.shape)
    y = applied(layer, x)
    check(y, layer, x)
    printed = [0.0, 0.18731716, 0.37463433, 0.5619515, 0.74926865, 0.9365858, 1.123903, 1.3112202, 1.4985373, 1.6858544]
    np.testing.assert_allclose(y, [printed], rtol=1e-7)  # eight digits are printed
    x = normal(2, 3, 4)
    np.testing.assert_array_equal(to_numpy(RMSNormalization([-2, -1])(x)), to_numpy(RMSNormalization([-1, -2])(x)))
    for axis in (2, -3, (0, 2)):
        with pytest.raises(ValueError, match=r"RMSNormalization: axis is -?\d, expected between -2 and 1"):
            RMSNormalization(axis).compute_output_shape((4, 2))


@beside_the_built_in
def check_that_the_built_in_is_wrong(folder: Path) -> None:
    """Of a middle axis, on every backend: it takes another one for one of the two things that it does."""
    x = normal(3, 3, 3) * np.float32([[[1], [10], [100]]])
    builtin = filled(BuiltIn(1), x.shape)
    assert np.abs(applied(builtin, x) - golden.rms_norm(x, to_numpy(builtin.scale.value), axis=1)).max() > 0.1


@beside_the_built_in
def check_dtypes(folder: Path) -> None:
    """Of y, of the symbolic y and of the weight: those of the built-in, under every policy and for every input."""
    doubles = ["float64"] if has_double() else []
    single = ["float32", "bfloat16", "float16", "mixed_bfloat16", "mixed_float16"]
    for policy in [*single, *doubles, keras.dtype_policies.DTypePolicy("mixed_bfloat16")]:
        for dtype in ("float16", "bfloat16", "float32", *doubles):
            for options in ({}, {"autocast": False}):
                ours, theirs = (c(dtype=policy, **options) for c in (RMSNormalization, BuiltIn))
                x = ops.cast(normal(3, 8), dtype)
                assert ours(x).dtype == theirs(x).dtype, (policy, dtype, options)
                assert ours.scale.dtype == theirs.scale.dtype == ours.variable_dtype
                spec = keras.KerasTensor((3, 8), dtype=dtype)
                assert ours.compute_output_spec(spec).dtype == theirs.compute_output_spec(spec).dtype
    for policy in ("int8_from_float32", "int8_from_mixed_bfloat16", "float8_from_float32"):
        for layer in (RMSNormalization(dtype=policy), BuiltIn(dtype=policy)):
            with pytest.raises(NotImplementedError, match=r"Layer RMSNormalization does not have a `_.*_call` method"):
                layer(normal(3, 8))
    keras.config.set_dtype_policy("mixed_float16")
    try:
        assert RMSNormalization().compute_dtype == BuiltIn().compute_dtype == "float16"
    finally:
        keras.config.set_dtype_policy("float32")


@beside_the_built_in
def check_quantisation(folder: Path) -> None:
    """model.quantize passes both layers by, with the same words."""
    x, said = normal(4, 8), []
    for kind in (RMSNormalization, BuiltIn):
        layer = kind()
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), layer])
        filled(layer, (None, 8))
        before = to_numpy(layer(x))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model.quantize("int8")
        assert model.layers[0].dtype_policy.name == "int8_from_float32"
        assert layer.dtype_policy.name == "float32"
        np.testing.assert_array_equal(to_numpy(layer(x)), before)
        with pytest.raises(NotImplementedError, match="does not have a `quantize` method") as error:
            layer.quantize("int8")
        said.append([*(str(w.message) for w in found), str(error.value)])
    assert said[0] == said[1]


def check_copies(folder: Path) -> None:
    """What tests/layers does not ask of them: models in files, initial values, penalties, names of the weights."""
    x, normals = normal(2, 3, 5), keras.initializers.RandomNormal(seed=3)
    layer = RMSNormalization((2, 1), feature_axis=-1, bias=True, name="norm", scale_initializer=normals,
                             scale_regularizer="l2", dtype="mixed_bfloat16")  # fmt: skip
    model = keras.Sequential([keras.Input((3, 5)), layer])
    drawn, clone = layer.get_weights()[0], keras.models.clone_model(model)
    np.testing.assert_array_equal(clone.get_weights()[0], drawn)  # by the same initializer
    filled(layer, (None, 3, 5))
    model.save(folder / "copy.keras")
    model.save_weights(folder / "copy.weights.h5")
    clone.load_weights(folder / "copy.weights.h5")
    for one in (clone, keras.saving.load_model(folder / "copy.keras")):
        np.testing.assert_array_equal(to_numpy(one(x)), to_numpy(model(x)))
        assert len(one.losses) == 1
        assert [w.path.split("/")[-2:] for w in one.weights] == [["norm", "scale"], ["norm", "bias"]]


@beside_the_built_in
def check_in_the_place_of_the_built_in(folder: Path) -> None:
    """A model that has the built-in is cloned with ours in its place, and weights go both ways, in lists and files."""
    x = normal(4, 8)
    built = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), BuiltIn(epsilon=1e-3, dtype="mixed_bfloat16")])

    def ours(layer: Any) -> Any:
        kind = RMSNormalization if isinstance(layer, BuiltIn) else type(layer)
        return kind.from_config(layer.get_config())

    swapped = keras.models.clone_model(built, clone_function=ours)
    assert (type(swapped.layers[-1]), swapped.layers[-1].epsilon) == (RMSNormalization, 1e-3)
    assert [w.path.split("/")[-1] for w in swapped.weights] == [w.path.split("/")[-1] for w in built.weights]
    for seed, (source, target) in enumerate([(built, swapped), (swapped, built)]):
        source.set_weights([normal(*w.shape, seed=seed) for w in source.weights])
        target.set_weights(source.get_weights())
        for mine, given in zip(source.get_weights(), target.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, given)
        target.set_weights([w * 0 for w in target.get_weights()])
        source.save_weights(folder / "both.weights.h5")
        target.load_weights(folder / "both.weights.h5")
        for mine, given in zip(source.get_weights(), target.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, given)
    near = [to_numpy(model(x)).astype(np.float64) for model in (built, swapped)]
    # the built-in rounds its gain to bfloat16 first and y after, ours y alone: 3 units of 2^-8, and 13 of 2^-24
    np.testing.assert_allclose(*near, rtol=3 * 2.0**-8 + 13 * 2.0**-24)


@beside_the_built_in
def check_drop_in_calls(folder: Path) -> None:
    """What code for the built-in writes: the name of the argument, a configuration, call() for the layer itself,
    which nobody converts arrays for.
    """
    x = normal(4, 8)
    for kind in (RMSNormalization, BuiltIn):
        layer = filled(kind(), (None, 8))
        for array in (layer(x=x), layer.call(x), layer.stateless_call([w.value for w in layer.variables], [], x)[0]):
            np.testing.assert_array_equal(to_numpy(array), to_numpy(layer(x)))
    layer = filled(RMSNormalization(), (None, 8))
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layer.call(inputs))
    assert model.weights == layer.weights
    check(model.predict(x, verbose=0), layer, x)
    for options in ({}, {"axis": [1, 2], "epsilon": 1e-3, "dtype": "mixed_bfloat16", "name": "norm"}):
        ours, theirs = RMSNormalization(**options), BuiltIn(**options)
        for layer in (ours, theirs):
            layer.build((None, 4, 8))
        again = BuiltIn.from_config(ours.get_config())
        assert {**again.get_config(), "name": ""} == {**theirs.get_config(), "axis": again.axis, "name": ""}
        assert (again.name, again.axis) == (ours.name, ours.axis)
    plain = {"variant": "keras", "scale": True, "bias": False, "feature_axis": None, "partial": None}
    plain["scale_initializer"] = keras.initializers.serialize(keras.initializers.Constant(1))
    plain["bias_constraint"] = None
    written_out = {**RMSNormalization(name="norm").get_config(), **plain}  # as files of version 0.1 have it
    assert RMSNormalization.from_config(written_out).get_config() == RMSNormalization(name="norm").get_config()
    for options in ({"variant": "nematus"}, {"bias": True}, {"scale": False}, {"partial": 0.5}, {"feature_axis": 0}):
        with pytest.raises((TypeError, ValueError), match=next(iter(options))):
            BuiltIn.from_config(RMSNormalization(**options).get_config())


class Block(keras.Model):
    """A subclassed model: pre-norm with a residual."""

    def __init__(self, width: int = 8, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.width = width
        self.norm = RMSNormalization(variant="llama")
        self.dense = keras.layers.Dense(width, use_bias=False)

    def call(self, x: Any) -> Any:
        return x + self.dense(self.norm(x))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "width": self.width}


def check_models(folder: Path) -> None:
    """Sequential, functional, with a branch and a layer shared, subclassed; sizes that are not known, and files."""
    x = normal(2, 5, 8)
    inputs = keras.Input((None, 8))
    shared = RMSNormalization(variant="gemma")
    outputs = shared(inputs)
    functional = keras.Model(inputs, [outputs, shared(inputs + outputs)])
    filled(shared, (None, 8))
    assert outputs.shape == (None, None, 8)
    assert len(functional.weights) == 1
    wrapped = keras.layers.TimeDistributed(shared)
    for steps in (5, 2):
        y, again = (to_numpy(v) for v in functional(x[:, :steps]))
        check(y, shared, x[:, :steps])
        check(again, shared, x[:, :steps] + y)
        check(to_numpy(wrapped(x[:, :steps])), shared, x[:, :steps])
        check(functional.predict(x[:, :steps], verbose=0)[0], shared, x[:, :steps])
    bare = keras.Sequential([keras.Input((None, None)), RMSNormalization(scale=False, partial=0.5)])
    assert bare.output_shape == (None, None, None)
    for shape in ((2, 3, 8), (1, 4, 6)):
        check(bare.predict(normal(*shape), verbose=0), bare.layers[-1], normal(*shape))
    with pytest.raises(ValueError, match="RMSNormalization: x axis 2 has an unknown size, expected a known one"):
        RMSNormalization()(keras.Input((None, None)))
    block = Block()
    block(x)
    filled(block.norm, (None, 8))
    block.save(folder / "block.keras")
    loaded = keras.saving.load_model(folder / "block.keras", custom_objects={"Block": Block})
    np.testing.assert_array_equal(to_numpy(loaded(x)), to_numpy(block(x)))
    check(to_numpy(loaded.norm(x)), block.norm, x)


def check_masks(folder: Path) -> None:
    """Passed on to the layer that pools, which the built-in does not."""
    tokens = np.array([[1, 2, 0], [3, 0, 0]])
    inputs = keras.Input((None,), dtype="int32")
    h = RMSNormalization()(keras.layers.Embedding(4, 8, mask_zero=True)(inputs))
    model = keras.Model(inputs, [h, keras.layers.GlobalAveragePooling1D()(h)])
    steps, pooled = (to_numpy(y) for y in model(tokens))
    np.testing.assert_allclose(pooled[1], steps[1, 0], rtol=2.0**-22)
    np.testing.assert_allclose(pooled[0], steps[0, :2].mean(0), rtol=2.0**-22, atol=2.0**-22)
    embedded = keras.layers.Embedding(4, 8, mask_zero=True)(tokens)
    y = RMSNormalization()(embedded)
    np.testing.assert_array_equal(to_numpy(y._keras_mask), tokens != 0)
    np.testing.assert_array_equal(to_numpy(y), to_numpy(RMSNormalization()(to_numpy(embedded))))
    assert RMSNormalization().supports_masking
    assert BuiltIn is None or not BuiltIn().supports_masking


def check_initializers_regularizers_constraints(folder: Path) -> None:
    """One step of a fit: the loss has the penalties in it, the gradient theirs, and what falls below 0 is cut."""
    x = normal(16, 4)
    layer = RMSNormalization(
        bias=True, scale_initializer=keras.initializers.Constant(0.5), bias_initializer="ones",
        scale_regularizer=keras.regularizers.L2(0.25), bias_regularizer=keras.regularizers.L1(0.5),
        scale_constraint="non_neg", bias_constraint=keras.constraints.MaxNorm(0.75),
    )  # fmt: skip
    model = keras.Sequential([keras.Input((4,)), layer])
    assert [w.tolist() for w in weights_of(layer)] == [[0.5] * 4, [1.0] * 4]
    layer.scale.assign([1.0, 2.0, -3.0, 4.0])
    model.compile(keras.optimizers.SGD(0.5), lambda target, y: 0 * ops.sum(y, -1))
    loss = model.fit(x, x, batch_size=16, verbose=0).history["loss"][0]
    assert loss == 0.25 * 30 + 0.5 * 4
    scale, bias = weights_of(layer)
    assert scale.tolist() == [0.75, 1.5, 0.0, 3.0]  # w - 0.5 * 0.5 w, not below 0
    # 1 - 0.5 * 0.5 each, a norm of 1.5, which MaxNorm divides by 1e-7 too much
    np.testing.assert_allclose(bias, [0.375] * 4, rtol=2.0**-22)


def judged_step(model: Any, layer: Any, x: Any, **compiled: Any) -> None:
    """One step along -1 of sum(target * y) / 16, whose gradient in y is exact: the weights move by the golden's."""
    start = weights_of(layer)
    target = normal(*x.shape, seed=5).astype("bfloat16").astype("float16").astype(np.float32)
    optimizer = keras.optimizers.SGD(1.0)
    model.compile(optimizer, lambda t, y: ops.sum(t * ops.cast(y, t.dtype), -1), **compiled)
    model.fit(x, target, batch_size=16, epochs=1, verbose=0)
    compute = layer.compute_dtype
    x, upstream = x.astype(compute), (target / 16).astype(compute)
    options = {"variant": layer.variant, "axis": layer.axis, "feature_axis": layer.feature_axis}
    gradients = golden.rms_norm_vjp(upstream, x, *start, **options)[1:]
    terms = term_sizes(x, *start, dy=upstream, tangents=(x, None, None), **options)
    call = resolve("test", Spec(x.shape, compute), variant=layer.variant)
    for name, old, new, gradient in zip(("dscale", "dbias"), start, weights_of(layer), gradients, strict=True):
        if old is not None:
            error = bound(name, call, "float32") * terms[name] + np.abs(new)  # and the subtraction
            assert (np.abs(new - (old - gradient)) <= 2.0**-24 * error).all(), (name, compute, compiled)
            assert (np.abs(gradient) > 2.0**-10).any()


def check_training(folder: Path) -> None:
    """Under every policy, compiled by the backend and not, eagerly, and where activations are computed again.

    In float32 with a row of zeros, a huge and a tiny one.
    """
    ways: list[dict[str, Any]] = [{"jit_compile": False}, {"run_eagerly": True}]
    ways += [{"jit_compile": True}] if BACKEND != "torch" else []  # train_compiled
    for policy in ("float32", "mixed_bfloat16", "mixed_float16"):
        for way in ways if policy == "mixed_bfloat16" else ways[-1:]:
            layer = RMSNormalization(variant="equinox", dtype=policy)
            model = keras.Sequential([keras.Input((8,)), layer])
            x = normal(16, 8)
            if policy == "float32":
                x[1], x[2], x[3] = 0, x[2] * 1e20, x[3] * 1e-30
            judged_step(model, filled(layer, (None, 8)), x, **way)
    if BACKEND != "tensorflow":  # where it fails for every layer, of a keyword argument in a graph
        with keras.RematScope(mode="full"):
            layer = RMSNormalization(variant="equinox")
            model = keras.Sequential([keras.Input((8,)), layer])
        judged_step(model, filled(layer, (None, 8)), normal(16, 8))


def train_compiled() -> None:
    """On PyTorch by torch.compile, which takes 20 seconds for Keras's own code; the others' is in check_training."""
    layer = RMSNormalization(variant="equinox")
    model = keras.Sequential([keras.Input((8,)), layer])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its compiler asks objects what they warn of
        judged_step(model, filled(layer, (None, 8)), normal(16, 8), jit_compile=True)


def check_exported_programs(folder: Path) -> None:
    """On PyTorch: of any batch, and ONNX of one row. SavedModels of the others are in test_keras and keras_devices."""
    if BACKEND != "torch":
        return
    import torch

    layer = RMSNormalization(variant="llama", partial=0.5)
    model = keras.Sequential([keras.Input((8,)), layer])
    x = normal(4, 8)
    filled(layer, (None, 8))
    model.predict(x, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters warn of their own code
        batch = ({0: torch.export.Dim("batch", min=1)},)
        model.export(folder / "program.pt2", format="torch", verbose=False, dynamic_shapes=batch)
        check(
            to_numpy(torch.export.load(folder / "program.pt2").module()(torch.from_numpy(x))),
            layer,
            x,
            by_operations=True,
        )
        if find_spec("onnxruntime"):
            import onnxruntime

            model.export(folder / "program.onnx", format="onnx", verbose=False)
            session = onnxruntime.InferenceSession(folder / "program.onnx")
            check(session.run(None, {session.get_inputs()[0].name: x[:1]})[0], layer, x[:1], by_operations=True)


CHECKS: dict[str, Callable[[Path], None]] = {
    name.removeprefix("check_"): function for name, function in list(globals().items()) if re.match("check_", name)
}
