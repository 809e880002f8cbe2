"""The Keras layer in TensorFlow's own hands: graphs, XLA, tapes and accumulators in each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from options import directions_of, product_with_hessian

from rmsnorm import numpy_impl as golden
from rmsnorm.accuracy.terms import term_sizes
from rmsnorm.accuracy.ulps import ulps

tf = pytest.importorskip("tensorflow")
pytest.importorskip("keras")

from keras_configurations import CONFIGURATIONS, filled, normal  # noqa: E402
from tf_arrays import to_tf  # noqa: E402
from tf_checks import check_near  # noqa: E402
from tf_gradients import NESTINGS  # noqa: E402

from rmsnorm.tf_impl import RMSNormalization  # noqa: E402


def weights_of(layer: Any) -> list[Any]:
    return [None if w is None else w.numpy() for w in (layer.scale, layer.bias)]


def options_of(layer: Any) -> dict[str, Any]:
    return {"variant": layer.variant, "axis": layer.axis, "feature_axis": layer.feature_axis}


@pytest.mark.parametrize(("jit_compile", "policy"), [(False, "mixed_bfloat16"), (True, "float32")])
@pytest.mark.sample(1)
@pytest.mark.slow
def test_in_graphs(jit_compile: bool, policy: str) -> None:
    """Every configuration in one function: y, the gradients, and the derivative along x itself, of the golden."""
    layers, given = [], []
    for arguments, shape in CONFIGURATIONS.values():
        layer = filled(RMSNormalization(**arguments, dtype=policy), shape)
        layers.append(layer)
        given.append([normal(*shape, seed=s).astype(layer.compute_dtype) for s in (8, 9)])

    def everything(given: Any) -> Any:
        results = []
        for layer, (x, dy) in zip(layers, given, strict=True):
            leaves = [x, *(w.value for w in layer.weights)]
            with tf.GradientTape() as tape:
                tape.watch(leaves)
                y = layer(x)
            with tf.autodiff.ForwardAccumulator(x, x) as accumulator:
                along = accumulator.jvp(layer(x))
            results.append([y, along, *tape.gradient(y, leaves, dy)])
        return results

    compiled = tf.function(everything, jit_compile=jit_compile)
    for layer, (x, dy), got in zip(layers, given, compiled(tf.nest.map_structure(to_tf, given)), strict=True):
        weights, options = weights_of(layer), options_of(layer)
        given_out, tangents = {**options, "out_dtype": layer.compute_dtype}, (x, None, None)
        assert ulps(got[0].numpy(), golden.rms_norm(x, *weights, **given_out)).max() <= 1
        terms = term_sizes(x, *weights, dy=dy, tangents=tangents, **options)
        check_near(got[1], golden.rms_norm_jvp((x, *weights), tangents, **given_out), terms["jvp"], 2 * x.size + 32)
        gradients = zip(("dx", "dscale", "dbias"), golden.rms_norm_vjp(dy, x, *weights, **options), strict=True)
        for g, (name, want) in zip(got[2:], [pair for pair in gradients if pair[1] is not None], strict=True):
            single = g.dtype == tf.float32 and policy == "mixed_bfloat16"  # what between 16 bits the arithmetic is
            check_near(g, want, terms[name], (2 * x.size + 32) * (2**29 if single else 1))


def forward_over_forward(function: Any, arrays: Any, v: Any, directions: Any) -> Any:
    with (
        tf.autodiff.ForwardAccumulator(arrays, directions) as outer,
        tf.autodiff.ForwardAccumulator(arrays, directions) as inner,
    ):
        tangent = tf.reduce_sum(v * inner.jvp(function(*arrays)))
    return outer.jvp(tangent)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "eager") for name in ("plain", "unsorted", "third", "outside", "clamp", "variance")),
        ("outside", "graph"),
        ("third", "compiled"),
        ("clamp", "compiled"),
    ],
)
@pytest.mark.sample(2)
def test_second_derivatives(name: str, mode: str) -> None:
    """In x and the weights, which are variables; test_tf_autodiff derives the bound."""
    arguments, shape = CONFIGURATIONS[name]
    layer = filled(RMSNormalization(**arguments, dtype="float64"), shape)
    x, weights = normal(*shape).astype(np.float64), [w.numpy() for w in layer.weights]
    directions, v = directions_of([x, *weights]), normal(*shape, seed=5).astype(np.float64)
    want = product_with_hessian([x, *weights], v, directions, options_of(layer))
    # eagerly an accumulator in another one takes no variable, whatever the layer
    chosen = slice(0, 1) if mode == "eager" else slice(None)
    halted = [d if i == 0 or mode != "eager" else 0 * d for i, d in enumerate(directions)]
    want_twice = product_with_hessian([x, *weights], v, halted, options_of(layer))
    largest, size = max(np.abs(w).max() for w in want), sum(np.abs(d).sum() for d in directions)
    assert largest > 0.1

    def everything(x: Any, v: Any, directions: Any) -> Any:
        arrays = [x, *(w.value for w in layer.weights)]
        found = [nesting(lambda x, *_: layer(x), arrays, v, directions) for nesting in NESTINGS]
        return found, forward_over_forward(lambda x, *_: layer(x), arrays[chosen], v, directions[chosen])

    run = everything if mode == "eager" else tf.function(everything, jit_compile=mode == "compiled")
    found, twice = run(to_tf(x), to_tf(v), [*map(to_tf, directions)])
    bound = 1e-7 * 3**3 * max(1.0, largest)
    for got in found:
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=0, atol=bound)
    both = sum((w * d).sum() for w, d in zip(want_twice, halted, strict=True))
    np.testing.assert_allclose(twice, both, rtol=0, atol=bound * size)
