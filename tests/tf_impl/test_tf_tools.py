"""The TensorFlow functions at the edges: variables, empty tensors, masks, graphs, saved models, errors."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from rmsnorm import numpy_impl as golden

tf = pytest.importorskip("tensorflow")

from tf_arrays import to_tf  # noqa: E402
from tf_bounds import check_bounds  # noqa: E402

from rmsnorm.tf_impl import rms_norm  # noqa: E402


def test_the_number_of_counted_elements_is_exact_where_the_size_is_unknown() -> None:
    """As Variant.counted, by the squares of the first k ones: n 0.07 in floating point counts 8 of 100."""
    calls = [
        {"variant": variant, "eps": 0.0, "partial": partial, "return_inverse_rms": True}
        for variant, partial in itertools.product(("paper", "zhang_tf"), (0.07, 0.29, 0.999999999, 1e-9, 1.0))
    ]

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float64)])
    def counted(x: Any) -> Any:
        return [rms_norm(x, **options)[1] for options in calls]

    for n in (1, 99, 100, 101, 300, 1234):
        x = 2.0 ** -np.arange(n)  # the sum, 4/3 (1 - 4^-k) / k, shows k
        for y, options in zip(counted(tf.constant(x)), calls, strict=True):
            np.testing.assert_allclose(y.numpy(), golden.rms_norm(x, **options)[1], rtol=2.0**-48)


def test_a_saved_model_has_the_gradient(tmp_path: Any) -> None:
    class Module(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, None], tf.float32), tf.TensorSpec([None], tf.float32)])
        def __call__(self, x: Any, scale: Any) -> Any:
            return rms_norm(x, scale, variant="llama", partial=0.5)

    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((3, 8)).astype(np.float32), rng.standard_normal(8).astype(np.float32)
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    tf.saved_model.save(Module(), str(tmp_path), options=options)
    loaded, tensors = tf.saved_model.load(str(tmp_path)), [to_tf(x), to_tf(scale)]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        y = loaded(*tensors)
    dx, dscale = tape.gradient(y, tensors)
    got = {"y": y, "dx": dx, "dscale": dscale}
    check_bounds(got, x, scale, dy=np.ones_like(x), variant="llama", partial=0.5)


def test_errors_while_a_graph_is_traced() -> None:
    def trace(function: Any, *specs: Any) -> Any:
        return tf.function(function, input_signature=specs).get_concrete_function()

    with pytest.raises(ValueError, match="rms_norm: x has an unknown rank, expected a known one; call set_shape on it"):
        trace(rms_norm, tf.TensorSpec(None, tf.float32))
    with pytest.raises(
        ValueError, match=r"scale has shape \(8,\), expected \(16,\) to match axis -1 of x f32\[\?, 16\]"
    ):
        trace(rms_norm, tf.TensorSpec([None, 16], tf.float32), tf.TensorSpec([8], tf.float32))
    with pytest.raises(ValueError, match="rms_norm: x axis 1 has an unknown size, expected a known one"):
        trace(lambda x: rms_norm(x, partial=1 / 3), tf.TensorSpec([None, None], tf.float32))
    assert trace(lambda x: rms_norm(x, partial=1 / 3), tf.TensorSpec([None, 16], tf.float32)).output_shapes == (
        None,
        16,
    )
    assert trace(rms_norm, tf.TensorSpec([None, 4], tf.float16)).structured_outputs.shape.as_list() == [None, 4]
