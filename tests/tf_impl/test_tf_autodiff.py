"""What TensorFlow differentiates beside the random calls of test_fuzz.py: what a tape keeps, graphs of version 1."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from rmsnorm.specification import dtypes

tf = pytest.importorskip("tensorflow")

from tf_arrays import to_tf  # noqa: E402
from tf_bounds import check_bounds  # noqa: E402

from rmsnorm.tf_impl import rms_norm, rms_norm_vjp  # noqa: E402


def test_vectorized_map() -> None:
    """With a mask, and the gradient: in tf.vectorized_map TensorFlow derives the operations itself."""
    rng = np.random.default_rng(0)
    x, dy, mask = rng.standard_normal((3, 4, 8)), rng.standard_normal((3, 4, 8)), rng.random((3, 4, 8)) > 0.3
    scale = rng.standard_normal(8)
    for dtype in dtypes.FLOATS:
        values = [value.astype(dtype) for value in (x, dy, scale)]
        a, upstream, g = map(to_tf, values)

        def one(row: Any) -> Any:
            return rms_norm(row[0], g, variant="llama", mask=row[1], partial=0.6)  # noqa: B023

        with tf.GradientTape() as tape:
            tape.watch(a)
            y = tf.vectorized_map(one, (a, tf.constant(mask)))
        got = {"y": y, "dx": tape.gradient(y, a, upstream)}
        options = {"variant": "llama", "mask": mask, "partial": 0.6}
        if dtype in dtypes.HALF:  # a gradient in the dtype of each product
            del got["dx"]
        check_bounds(got, values[0], values[2], dy=values[1], **options)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_backward_keeps_nothing_else_of_the_size_of_x(dtype: str, masked: bool) -> None:
    """What the operations of the backward pass read of those of the forward pass: x, and a few numbers for each row."""
    with tf.Graph().as_default() as graph:
        x, scale, bias = (tf.compat.v1.placeholder(dtype, shape) for shape in ((6, 16), (16,), (16,)))
        mask = tf.compat.v1.placeholder("bool", (6, 16)) if masked else None
        y = rms_norm(x, scale, bias, mask=mask, variant="llama")
        before = set(graph.get_operations())
        tf.gradients(y, [x, scale, bias])
        read = [
            tensor for op in graph.get_operations() if op not in before for tensor in op.inputs if tensor.op in before
        ]
    # tf.custom_gradient passes results and arguments through an IdentityN, which copies nothing
    origins = [t.op.inputs[t.value_index] if t.op.type == "IdentityN" else t for t in read]
    kept = {tensor.name: tensor for tensor in origins}
    expected = {tensor.name for tensor in (x, scale, mask) if tensor is not None}
    assert expected <= set(kept)
    assert {tuple(t.shape) for name, t in kept.items() if name not in expected} <= {(6, 1), (16,)}


def test_derivatives_of_the_vjp_in_a_graph_of_tensorflow_1() -> None:
    """With an empty row and one of zeros, where a comparison that is none would let NaN through."""
    x, mask = np.random.default_rng(0).standard_normal((3, 5)), np.arange(15).reshape(3, 5) % 7 < 4
    mask[1], x[2] = False, 0

    def second(x: Any) -> Any:
        dx = rms_norm_vjp(tf.ones((3, 5), tf.float64), x, variant="zhang_torch", mask=tf.constant(mask))[0]
        return tf.reduce_sum(dx * dx)

    with tf.GradientTape() as tape:
        leaf = tf.constant(x)
        tape.watch(leaf)
        y = second(leaf)
    want = tape.gradient(y, leaf).numpy()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        leaf = tf.constant(x)
        got = session.run(tf.gradients(second(leaf), leaf)[0])
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=2.0**-44, atol=2.0**-44)


def test_a_tape_keeps_no_more_than_that() -> None:
    """Eagerly: tensors of the size of x that are alive while the tape is."""

    def saved(function: Any) -> int:
        x = tf.random.stateless_normal((7, 129), (0, 0))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        gc.collect()
        others = (o for o in gc.get_objects() if o is not x and o is not y)
        # by type(): isinstance asks the object, and there are some that warn when asked
        alive = sum(issubclass(type(o), tf.Tensor) and o.shape == x.shape for o in others)
        assert tape.gradient(y, x) is not None
        return alive

    assert saved(rms_norm) <= 1  # y again: the object that tf.custom_gradient returns a copy of, in the same memory
    assert (
        saved(lambda x: tf.cast(tf.cast(x, tf.float64) * tf.ones(129, tf.float64) * 2, tf.float32)) > 1
    )  # it can tell


def test_the_inverse_rms_is_a_constant_and_the_sum_is_not() -> None:
    x = tf.constant(np.random.default_rng(0).standard_normal((3, 8)))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        inverse_rms, h = rms_norm(x, return_inverse_rms=True)[1], rms_norm(2 * x, residual=x)[1]
    assert tape.gradient(inverse_rms, x) is None
    assert (tape.gradient(h, x).numpy() == 3).all()
