"""Graphs of TensorFlow: which operations they hold, in loops, maps and pipelines, and what is checked or exported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from tf_arrays import converted, to_tf  # noqa: E402
from tf_bounds import check_bounds  # noqa: E402
from tf_gradients import with_gradients  # noqa: E402

from rmsnorm.specification.variants import PRESETS  # noqa: E402
from rmsnorm.tf_impl import rms_norm  # noqa: E402

RNG = np.random.default_rng(0)
X, DY, SCALE = (RNG.standard_normal(shape).astype(np.float32) for shape in ((6, 5, 41), (6, 5, 41), (41,)))


def check(y: Any = None, dx: Any = None, dy: Any = DY) -> None:
    """Results for X and SCALE."""
    got = {name: value for name, value in (("y", y), ("dx", dx)) if value is not None}
    check_bounds(got, X, SCALE, dy=dy, variant="standard")


def test_a_graph_holds_plain_operations() -> None:
    """Exporters and converters see no operation that is not in their lists, and nothing of the size of x in float64."""
    signature = [tf.TensorSpec([None, None, 41]), tf.TensorSpec([None, None, 41]), tf.TensorSpec([41])]
    graph = tf.function(with_gradients, input_signature=signature).get_concrete_function().graph
    kinds = {op.type for op in graph.get_operations()}
    assert {"Mean", "Rsqrt", "Mul", "Sum"} <= kinds
    assert not kinds & {"PartitionedCall", "StatefulPartitionedCall", "StatelessCase", "PyFunc", "EagerPyFunc"}
    assert not any(t.dtype == tf.float64 for op in graph.get_operations() for t in op.outputs)


@pytest.mark.slow
def test_operations_that_are_checked() -> None:
    """tf.debugging.enable_check_numerics looks at every number."""
    tensors = [*map(to_tf, (X, DY, SCALE))]
    tf.debugging.enable_check_numerics()
    try:
        y, dx, _ = tf.function(with_gradients)(*tensors)
    finally:
        tf.debugging.disable_check_numerics()
    check(y, dx)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_sizes_that_are_not_known(dtype: str) -> None:
    x, dy, scale = (array.astype(dtype) for array in (X, DY, SCALE))
    signature = [tf.TensorSpec([None] * array.ndim, dtype) for array in (x, dy, scale)]
    options = {"variant": "llama", "mask": RNG.random((5, 1)) > 0.2} if dtype == "float32" else {"variant": "gemma"}

    def function(x: Any, dy: Any, scale: Any) -> Any:
        return with_gradients(x, dy, scale, **converted(options))

    for jit_compile in (False, True):
        traced = tf.function(function, input_signature=signature, jit_compile=jit_compile)
        results = dict(zip(("y", "dx", "dscale"), traced(*map(to_tf, (x, dy, scale))), strict=True))
        check_bounds(results, x, scale, dy=dy, **options)


@pytest.mark.parametrize("variant", ["standard", "zhang_torch", "x_transformers"])
def test_a_row_without_elements_whose_size_is_not_known(variant: str) -> None:
    """1 / rho is 0, and gradients of the parameters are, too."""
    traced = tf.function(
        lambda x, dy, scale: [
            *with_gradients(x, dy, scale, variant=variant),
            rms_norm(x, variant=variant, return_inverse_rms=True)[1],
        ],
        input_signature=[tf.TensorSpec([None, None]), tf.TensorSpec([None, None]), tf.TensorSpec([None])],
    )
    y, dx, dscale, inverse_rms = traced(tf.zeros((3, 0)), tf.zeros((3, 0)), tf.zeros(0))
    assert y.shape == dx.shape == (3, 0)
    assert dscale.shape == (0,)
    assert (inverse_rms.numpy() == 0).all()
    assert traced(tf.zeros((0, 4)), tf.zeros((0, 4)), tf.ones(4))[2].numpy().tolist() == [0] * 4


def test_in_loops_maps_and_pipelines() -> None:
    x, dy, scale = map(to_tf, (X, DY, SCALE))

    def loop(x: Any) -> Any:
        rows = tf.TensorArray(tf.float32, 6)

        def body(i: Any, rows: Any) -> Any:
            return i + 1, rows.write(i, rms_norm(x[i], scale))

        return tf.while_loop(lambda i, _: i < 6, body, (0, rows))[1].stack()

    @tf.function
    def both(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = loop(x)
        return y, tape.gradient(y, x, dy)

    def mapped(row: Any) -> Any:
        return rms_norm(row, scale, return_inverse_rms=True)

    with tf.GradientTape() as tape:  # of all rows, outside tf.vectorized_map, which drops custom gradients
        tape.watch(x)
        stacked = tf.vectorized_map(mapped, x)[0]
    vectorized_dx = tape.gradient(stacked, x, dy)
    y, dx = both(x)
    rows = tf.data.Dataset.from_tensor_slices(X).map(lambda row: mapped(row)[0], num_parallel_calls=2)
    results = [y, stacked, tf.map_fn(lambda row: mapped(row)[0], x), np.stack([*rows])]
    for got in results:
        check(got)
    check(dx=dx)
    check(dx=vectorized_dx)


def test_gradients_of_chosen_rows() -> None:
    """The gradient of tf.gather is tf.IndexedSlices."""
    dy = np.zeros_like(X)
    dy[0], dy[2] = 1, 2

    def function(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.gather(rms_norm(x, to_tf(SCALE)), [0, 2, 2])
        return tape.gradient(y, x)

    for run in (function, tf.function(function)):
        check(dx=run(to_tf(X)), dy=dy)


def test_a_traced_function_in_one_that_xla_compiles() -> None:
    traced = tf.function(with_gradients)
    traced(*map(to_tf, (X, DY, SCALE)))
    y, dx, _ = tf.function(lambda *tensors: traced(*tensors), jit_compile=True)(*map(to_tf, (X, DY, SCALE)))
    check(y, dx)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_row_at_the_clamp(dtype: str) -> None:
    """In a row whose norm is eps, up to rounding, rho has the slope of the root."""
    unit = RNG.standard_normal((8, 7))
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    exact = [[1, 0, 0, 0, 0, 0, 0], [0.5, -0.5, 0.5, 0.5, 0, 0, 0], [0] * 7]
    # a row of float32 that was normalised before is off by more than the golden takes for equal
    rows = [exact, 1.25 * unit, 0.75 * unit, *([unit] if dtype == "float64" else [])]
    x = np.concatenate(rows).astype(dtype)
    dy, scale = RNG.standard_normal(x.shape).astype(dtype), RNG.standard_normal(7).astype(dtype)
    options = {"variant": PRESETS["x_transformers"].replace(eps=1.0)}
    for run in (with_gradients, tf.function(with_gradients)):
        got = dict(zip(("y", "dx", "dscale"), run(*map(to_tf, (x, dy, scale)), **options), strict=True))
        check_bounds(got, x, scale, dy=dy, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("variant", ["keras", "zhang_torch", "x_transformers"])
def test_a_row_with_an_infinity(variant: str, dtype: str) -> None:
    """As the golden: rho is infinite, and every finite number over it is 0."""
    x = np.stack([X[0, 0], X[0, 1], X[0, 2]]).astype(dtype)
    x[0, 3], x[1, 5] = np.inf, np.nan
    with np.errstate(invalid="ignore"):
        check_bounds({"y": tf.function(lambda x: rms_norm(x, variant=variant))(to_tf(x))}, x, variant=variant)
