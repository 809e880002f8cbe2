"""Graphs of TensorFlow: what XLA compiles of them and where it does not, and the bits of what they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rmsnorm import numpy_impl as golden
from rmsnorm.accuracy.bounds import bound
from rmsnorm.accuracy.terms import term_sizes
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import PRESETS

tf = pytest.importorskip("tensorflow")

from tf_arrays import converted, to_tf  # noqa: E402
from tf_gradients import forward_mode, with_gradients  # noqa: E402

from rmsnorm.tf_impl import rms_norm  # noqa: E402

RNG = np.random.default_rng(0)
X, DY, SCALE = (
    RNG.standard_normal(shape).astype(np.float32) for shape in ((6, 5, 41), (6, 5, 41), (41,))
)  # a row of eight slabs and a rest
WANT, WANT_DX = golden.rms_norm(X, SCALE), golden.rms_norm_vjp(DY, X, SCALE)[0]


def forward(x: Any, _: Any, scale: Any) -> Any:
    return rms_norm(x, scale)


def contents(function: Any, dtype: str = "float32", **options: Any) -> tuple[Counter[str], set[str], int]:
    """Of a function of (x, dy, scale): the operations of its graph, those that it calls, and what XLA compiles."""
    sizes = ([None, None, 41], [None, None, 41], [41])
    signature = [tf.TensorSpec(shape, dtype) for shape in sizes]
    graph = tf.function(function, input_signature=signature, **options).get_concrete_function().graph
    functions = {f.signature.name: f for f in graph.as_graph_def().library.function}
    called = [op.get_attr("f").name for op in graph.get_operations() if op.type.endswith("PartitionedCall")]
    operations = {node.op for name in called for node in functions[name].node_def}
    kinds = Counter(op.type for op in graph.get_operations())
    return kinds, operations, sum(f.attr["_XlaMustCompile"].b for f in functions.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize(("function", "count"), [(forward, 1), (with_gradients, 2)])
def test_a_graph_calls_plain_operations_and_holds_what_xla_compiles(function: Any, count: int, dtype: str) -> None:
    """Twenty layers are compiled once. Exporters see no operation that is not in their lists."""
    kinds, operations, compiled = contents(function, dtype)
    assert kinds["PartitionedCall"] == compiled == count
    assert not kinds.keys() & {"StatelessCase", "DeviceIndex", "StatefulPartitionedCall", "Mean", "Rsqrt", "Mul"}
    assert {"Abs", "Max", "Rsqrt", "Mul", "Mean"} <= operations
    assert not operations & {"PartitionedCall", "StatefulPartitionedCall", "Bitcast", "BitwiseAnd", "Round"}

    def twice(*tensors: Any) -> Any:
        return function(*tensors), function(*tensors)

    kinds, _, compiled = contents(twice, dtype)
    assert (kinds["PartitionedCall"], compiled) == (2 * count, count)


@pytest.mark.slow
def test_operations_that_are_checked() -> None:
    """tf.debugging.enable_check_numerics looks at every number, for which XLA has no kernel."""
    tensors = [*map(to_tf, (X, DY, SCALE))]
    tf.debugging.enable_check_numerics()
    try:
        y, dx, _ = tf.function(with_gradients)(*tensors)
    finally:
        tf.debugging.disable_check_numerics()
    np.testing.assert_array_equal(y, WANT)
    np.testing.assert_array_equal(dx, WANT_DX)
    for got, want in zip(tf.function(with_gradients)(*tensors)[:2], (WANT, WANT_DX), strict=True):
        np.testing.assert_array_equal(got, want)


def test_where_a_graph_holds_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where XLA compiles all of it, under forward mode, in a graph of TensorFlow 1, and if the user wants it."""
    found = [
        contents(with_gradients, jit_compile=True),
        contents(lambda x, dy, scale: forward_mode(lambda x: rms_norm(x, scale), [x], [dy])),
    ]
    with tf.Graph().as_default() as graph:
        rms_norm(tf.ones((2, 40)), tf.ones(40))
    found.append((Counter(op.type for op in graph.get_operations()), set(), 0))
    monkeypatch.setenv("RMSNORM_XLA", "0")
    found.append(contents(with_gradients))
    for kinds, _, compiled in found:
        assert kinds["Mean"]
        assert not compiled


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_bits_are_those_of_xla(dtype: str) -> None:
    """For sizes that are known and sizes that are not; y has the golden's."""
    x, dy, scale = (array.astype(dtype) for array in (X, DY, SCALE))
    signature = [tf.TensorSpec([None] * array.ndim, dtype) for array in (x, dy, scale)]
    options = {"variant": "llama", "mask": RNG.random((5, 1)) > 0.2} if dtype == "float32" else {}

    def function(x: Any, dy: Any, scale: Any) -> Any:
        return with_gradients(x, dy, scale, **converted(options))

    tensors = [*map(to_tf, (x, dy, scale))]
    want = tf.function(function, jit_compile=True)(*tensors)
    np.testing.assert_array_equal(want[0], golden.rms_norm(x, scale, **options))
    for traced in (tf.function(function), tf.function(function, input_signature=signature)):
        for got, expected in zip(traced(*tensors), want, strict=True):
            assert got.shape == expected.shape
            np.testing.assert_array_equal(got, expected)


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
        np.testing.assert_array_equal(got, WANT)
    np.testing.assert_array_equal(dx, WANT_DX)
    np.testing.assert_array_equal(vectorized_dx, WANT_DX)


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
        np.testing.assert_array_equal(run(to_tf(X)), golden.rms_norm_vjp(dy, X, SCALE)[0])


def test_a_traced_function_in_one_that_xla_compiles() -> None:
    """XLA then takes the float32 form, and its result is within the bounds of the parity kit."""
    traced = tf.function(with_gradients)
    want = traced(*map(to_tf, (X, DY, SCALE)))
    got = tf.function(lambda *tensors: traced(*tensors), jit_compile=True)(*map(to_tf, (X, DY, SCALE)))
    terms = term_sizes(X, SCALE, dy=DY, tangents=(DY, None, None), variant="standard")
    call = resolve("test", Spec(X.shape, "float32"), Spec(SCALE.shape, "float32"), variant=PRESETS["standard"])
    for g, w, quantity in zip(got, want, ("y", "dx", "dscale"), strict=True):
        error = np.abs(g.numpy().astype(np.float64) - w.numpy()) / (2.0**-24 * terms[quantity])
        assert 0 < error.max() <= bound(quantity, call, "float32").ratio


@pytest.fixture
def nothing_chooses() -> Iterator[None]:
    """As in a program that another library runs: the operations of the graph compute."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


@pytest.mark.usefixtures("nothing_chooses")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_formula_at_a_clamp(dtype: str) -> None:
    """In a row whose norm is eps, up to rounding, rho has the slope of the root."""
    unit = RNG.standard_normal((8, 7))
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    exact = [[1, 0, 0, 0, 0, 0, 0], [0.5, -0.5, 0.5, 0.5, 0, 0, 0], [0] * 7]
    # a row of float32 that was normalised before is off by more than the golden takes for equal
    rows = [exact, 1.25 * unit, 0.75 * unit, *([unit] if dtype == "float64" else [])]
    x = np.concatenate(rows).astype(dtype)
    dy, scale = RNG.standard_normal(x.shape).astype(dtype), RNG.standard_normal(7).astype(dtype)
    options = {"variant": PRESETS["x_transformers"].replace(eps=1.0)}
    want = [golden.rms_norm(x, scale, **options), *golden.rms_norm_vjp(dy, x, scale, **options)[:2]]
    got = tf.function(lambda *tensors: with_gradients(*tensors, **options))(*map(to_tf, (x, dy, scale)))
    error = 16 * np.finfo(dtype).epsneg  # of about ten roundings
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=error, atol=error * np.abs(w).max())
    assert (got[0].numpy() != want[0]).any()  # it is the formula


@pytest.mark.usefixtures("nothing_chooses")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("variant", ["keras", "zhang_torch", "x_transformers"])
def test_the_formula_of_an_infinity(variant: str, dtype: str) -> None:
    """As the golden: rho is infinite, and every finite number over it is 0."""
    x = np.stack([X[0, 0], X[0, 1], X[0, 2]]).astype(dtype)
    x[0, 3], x[1, 5] = np.inf, np.nan
    got = tf.function(lambda x: rms_norm(x, variant=variant))(to_tf(x)).numpy().astype(float)
    with np.errstate(invalid="ignore"):
        want = golden.rms_norm(x, variant=variant).astype(float)
    np.testing.assert_allclose(got, want, rtol=2.0**-7 if dtype == "bfloat16" else 2.0**-19)
