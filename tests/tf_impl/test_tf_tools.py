"""The TensorFlow functions at the edges: variables, empty tensors, masks, graphs, saved models, errors."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from checks import check_values
from options import hard_to_round

from rmsnorm import numpy_impl as golden
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.numpy_impl.double_double import DoubleDouble
from rmsnorm.specification import dtypes

tf = pytest.importorskip("tensorflow")

from tf_arrays import MODES, to_tf  # noqa: E402

from rmsnorm.tf_impl import rms_norm  # noqa: E402
from rmsnorm.tf_impl.rounding import cast  # noqa: E402


def test_the_number_of_counted_elements_is_exact_where_the_size_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Variant.counted, by the squares of the first k ones: n 0.07 in floating point counts 8 of 100."""
    monkeypatch.setenv("RMSNORM_XLA", "0")  # the same operations, not compiled for each size
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
            assert ulps(y.numpy(), golden.rms_norm(x, **options)[1]).max() <= 1


def test_one_rounding_to_16_bits() -> None:
    for dtype in dtypes.HALF:
        values = hard_to_round(dtype, least=-30)
        with np.errstate(all="ignore"):
            want = DoubleDouble(values).round(dtype)
        for mode in MODES:
            got = MODES[mode](lambda tensors, dtype=dtype: cast(tensors[0], dtype))([tf.constant(values)]).numpy()
            assert ulps(got, want).max() == 0
            assert (np.signbit(got) == np.signbit(want))[(want != 0) | (np.abs(values) == 0)].all()
        assert ulps(tf.cast(values, dtype).numpy(), want).max() > 0  # the values can tell
        x = tf.constant(values)
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator, tf.GradientTape() as tape:
            tape.watch(x)
            y = cast(x, dtype)
        assert (accumulator.jvp(y).numpy() == 1).all()
        assert (tape.gradient(y, x).numpy() == 1).all()


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
    check_values(y.numpy(), golden.rms_norm(x, scale, variant="llama", partial=0.5))
    want = golden.rms_norm_vjp(np.ones_like(x), x, scale, variant="llama", partial=0.5)
    for g, w in zip(tape.gradient(y, tensors), want, strict=False):
        assert ulps(g.numpy(), w).max() <= 1


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
