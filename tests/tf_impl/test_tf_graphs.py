"""Graphs of TensorFlow: which operations they hold, their derivatives, what a tape keeps, loops, maps and errors."""

from __future__ import annotations

import gc
import itertools
from functools import partial
from typing import Any

import calls
import numpy as np
import pytest

from rmsnorm import cpu
from rmsnorm import numpy_impl as golden
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.parity.judge import compare
from rmsnorm.specification import dtypes

tf = pytest.importorskip("tensorflow")

from frameworks import way as way_of  # noqa: E402
from tf_arrays import GRAPHS, check_bounds, forward_mode, to_tf, with_gradients  # noqa: E402

from rmsnorm.tf_impl import kernels, rms_norm, rms_norm_vjp  # noqa: E402

tf.get_logger().setLevel("ERROR")  # each case traces its own function, which TensorFlow warns of
RNG = np.random.default_rng(0)
X, DY, SCALE = (RNG.standard_normal(shape).astype(np.float32) for shape in ((6, 5, 41), (6, 5, 41), (41,)))


def check(y: Any = None, dx: Any = None, dy: Any = DY) -> None:
    """Results for X and SCALE."""
    got = {name: value for name, value in (("y", y), ("dx", dx)) if value is not None}
    check_bounds(got, X, SCALE, dy=dy)


def test_a_graph_holds_plain_operations() -> None:
    """Exporters and converters see no operation that is not in their lists, and nothing of the size of x in float64."""
    signature = [tf.TensorSpec([None, None, 41]), tf.TensorSpec([None, None, 41]), tf.TensorSpec([41])]
    graph = tf.function(with_gradients, input_signature=signature).get_concrete_function().graph
    kinds = {op.type for op in graph.get_operations()}
    assert {"Mean", "Rsqrt", "Mul", "Sum"} <= kinds
    assert not kinds & {"PartitionedCall", "StatefulPartitionedCall", "StatelessCase", "PyFunc", "EagerPyFunc"}
    assert not any(t.dtype == tf.float64 for op in graph.get_operations() for t in op.outputs)


@pytest.mark.parametrize("variant", ["zhang_torch", "x_transformers"])
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


@pytest.mark.parametrize(("variant", "dtype"), [("keras", "bfloat16"), ("zhang_torch", "float32"),
                                                ("x_transformers", "float64")])  # fmt: skip
def test_a_row_with_an_infinity(variant: str, dtype: str) -> None:
    """As the golden: rho is infinite, and every finite number over it is 0."""
    x = np.stack([X[0, 0], X[0, 1], X[0, 2]]).astype(dtype)
    x[0, 3], x[1, 5] = np.inf, np.nan
    with np.errstate(invalid="ignore"):
        check_bounds({"y": tf.function(lambda x: rms_norm(x, variant=variant))(to_tf(x))}, x, variant=variant)


@pytest.mark.parametrize("way", GRAPHS)
def test_gradients_by_every_way_through_a_graph(way: Any) -> None:
    """A tape within and around the function, and tf.gradients: what crosses between graphs is what it says."""
    data = calls.arguments_of({"variant": "zhang_torch", "x": "float64", "layout": "two axes", "mask": "mask",
                               "bias": "bias"})  # fmt: skip
    options = {**data.options, "mask": to_tf(data.mask)}
    arrays = [*map(to_tf, (data.x, data.scale, data.bias))]
    got = way(lambda *arrays: rms_norm(*arrays, **options), arrays, to_tf(data.dy))
    more = {"variant": data.variant, "axis": data.axis, "mask": data.mask, "dy": data.dy}
    check_bounds(dict(zip(("dx", "dscale", "dbias"), got, strict=True)), data.x, data.scale, data.bias, **more)


@pytest.mark.parametrize("variant", ["llama", "t5"])
def test_in_graphs_too_a_rounding_is_the_identity_to_a_tangent(variant: str) -> None:
    """There TensorFlow derives the forward pass itself: with its roundings in the products 1 in 4 elements differs."""
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(shape).astype("bfloat16") for shape in ((64, 33), (33,), (33,))]
    tangents = [np.zeros_like(values[0]), *(rng.standard_normal(33).astype("bfloat16") for _ in range(2))]
    want = golden.rms_norm_jvp(values, tangents, variant=variant)
    arrays, directions = [*map(to_tf, values)], [*map(to_tf, tangents)]
    function = partial(rms_norm, variant=variant)
    got = tf.function(lambda arrays, directions: forward_mode(function, arrays, directions))(arrays, directions)
    apart = ulps(got.numpy(), want)
    assert apart.max() <= 1
    assert (apart == 0).mean() >= 0.999


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_magnitude_compiled(dtype: str) -> None:
    """Also if 1 / rho is below the normal numbers of float32, which XLA takes as 0; without an eps."""
    rng = np.random.default_rng(0)
    for magnitude in (1e20, 2e38, 1e-30, 1e-37):
        x = (rng.uniform(0.5, 1.5, (16, 64)) * magnitude).astype(dtype)
        dy = (rng.standard_normal(x.shape) * max(1, magnitude) ** 0.9).astype(dtype)
        scale = rng.standard_normal(64).astype(dtype)
        y, dx, dscale = tf.function(with_gradients, jit_compile=True)(*map(to_tf, (x, dy, scale)), eps=0.0)
        check_bounds({"y": y, "dx": dx, "dscale": dscale}, x, scale, dy=dy, variant="paper")


@pytest.mark.parametrize("readable", [True, False])
def test_kernels_and_recipe(readable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tape and without one; also on a device whose memory no kernel reads."""
    used: list[int] = []
    kernel = kernels.forward
    monkeypatch.setattr(kernels, "forward", lambda *arguments: used.append(1) or kernel(*arguments))
    if not readable:
        monkeypatch.setattr(kernels, "are_readable", lambda *_: False)
    for levels, has_kernel in (
        ({}, True), ({"gate": "silu after"}, True), ({"residual": "before"}, True), ({"mask": "mask"}, False),
        ({"layout": "middle axis"}, False), ({"layout": "channels"}, True),
    ):  # fmt: skip
        used.clear()
        data, expected = calls.asked({"variant": "llama", "x": "float32", **levels})
        assert all(found.passed for found in compare(way_of("tf").outcome(data), expected)), levels
        assert bool(used) == (has_kernel and readable and cpu.is_available()), levels


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
