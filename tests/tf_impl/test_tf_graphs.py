"""Graphs of TensorFlow: which operations they hold, their derivatives, what a tape keeps, loops, maps and errors."""

from __future__ import annotations

import gc
from typing import Any

import calls
import numpy as np
import pytest

from rmsnorm import cpu
from rmsnorm import numpy_impl as golden
from rmsnorm.parity.judge import compare

tf = pytest.importorskip("tensorflow")

from frameworks import way as way_of  # noqa: E402
from tf_arrays import check_bounds, with_gradients  # noqa: E402

from rmsnorm.tf_impl import kernels, rms_norm  # noqa: E402

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


def test_a_row_without_elements_whose_size_is_not_known() -> None:
    """Gradients are 0."""
    traced = tf.function(with_gradients, input_signature=[tf.TensorSpec([None] * rank) for rank in (2, 2, 1)])
    y, dx, dscale = traced(tf.zeros((3, 0)), tf.zeros((3, 0)), tf.zeros(0))
    assert (*y.shape, *dx.shape, *dscale.shape) == (3, 0, 3, 0, 0)
    assert traced(tf.zeros((0, 4)), tf.zeros((0, 4)), tf.ones(4))[2].numpy().tolist() == [0] * 4


def test_in_loops_maps_and_pipelines() -> None:
    x, dy, scale = map(tf.constant, (X, DY, SCALE))

    def loop(x: Any) -> Any:
        rows = tf.TensorArray(tf.float32, 6)
        body = lambda i, rows: (i + 1, rows.write(i, rms_norm(x[i], scale)))  # noqa: E731
        return tf.while_loop(lambda i, _: i < 6, body, (0, rows))[1].stack()

    def vectorized(x: Any) -> Any:  # which drops custom gradients
        return tf.vectorized_map(lambda row: rms_norm(row, scale, return_inverse_rms=True), x)[0]

    def gathered(x: Any) -> Any:  # whose gradient is tf.IndexedSlices
        return tf.gather(rms_norm(x, scale), tf.range(6))

    for function in (tf.function(loop), vectorized, gathered):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        check(y, tape.gradient(y, x, dy))
    rows = tf.data.Dataset.from_tensor_slices(X).map(lambda row: rms_norm(row, scale), num_parallel_calls=2)
    check(np.stack([*rows]))


@pytest.mark.parametrize(("dtype", "masked"), [("bfloat16", False), ("float64", True)])
def test_backward_keeps_nothing_else_of_the_size_of_x(dtype: str, masked: bool) -> None:
    """What the operations of the backward pass read of those of the forward pass: x, and a few numbers for each row."""
    with tf.Graph().as_default() as graph:
        x, scale, bias = (tf.compat.v1.placeholder(dtype, shape) for shape in ((6, 16), (16,), (16,)))
        mask = tf.compat.v1.placeholder("bool", (6, 16)) if masked else None
        y = rms_norm(x, scale, bias, mask=mask, variant="llama")
        before = set(graph.get_operations())
        tf.gradients(y, [x, scale, bias])
        read = [t for op in graph.get_operations() if op not in before for t in op.inputs if t.op in before]
    # tf.custom_gradient passes results and arguments through an IdentityN, which copies nothing
    origins = [t.op.inputs[t.value_index] if t.op.type == "IdentityN" else t for t in read]
    shapes = {tensor.name: tuple(tensor.shape) for tensor in origins}
    expected = {tensor.name for tensor in (x, scale, mask) if tensor is not None}
    assert expected <= shapes.keys()
    assert {shape for name, shape in shapes.items() if name not in expected} <= {(6, 1), (16,)}


def test_a_tape_keeps_no_more_than_that() -> None:
    """Eagerly: tensors of the size of x that are alive while the tape is."""

    def saved(function: Any) -> int:
        x = tf.random.stateless_normal((7, 129), (0, 0))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        gc.collect()
        alive = sum(type(o) is type(x) and o is not x and o is not y and o.shape == x.shape for o in gc.get_objects())
        assert tape.gradient(y, x) is not None
        return alive

    for options in ({}, {"axis": 0}):  # by a kernel and by the recipe
        # y again: the object that tf.custom_gradient returns a copy of, in the same memory
        assert saved(lambda x, options=options: rms_norm(x, **options)) <= 1
    assert saved(lambda x: tf.cast(tf.cast(x, "float64") * tf.ones(129, "float64") * 2, "float32")) > 1  # it can tell


@pytest.mark.parametrize("magnitude", [2e38, 1e-37])
def test_every_magnitude_compiled(magnitude: float) -> None:
    """Also if 1 / rho is below the normal numbers of float32, which XLA takes as 0; without an eps."""
    rng = np.random.default_rng(0)
    x = (rng.uniform(0.5, 1.5, (16, 64)) * magnitude).astype("float32")
    dy = (rng.standard_normal(x.shape) * max(1, magnitude) ** 0.9).astype("float32")
    scale = rng.standard_normal(64).astype("float32")
    y, dx, dscale = tf.function(with_gradients, jit_compile=True)(*map(tf.constant, (x, dy, scale)), eps=0.0)
    check_bounds({"y": y, "dx": dx, "dscale": dscale}, x, scale, dy=dy, variant="paper")


def test_where_kernels_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tape and without one: the last axes without a mask, also beside a gate or a residual."""
    used: list[int] = []
    kernel = kernels.forward
    monkeypatch.setattr(kernels, "forward", lambda *arguments: used.append(1) or kernel(*arguments))
    cases: tuple[tuple[dict[str, str], bool], ...] = (
        ({}, True), ({"gate": "silu after"}, True), ({"residual": "before"}, True), ({"mask": "mask"}, False),
        ({"layout": "middle axis"}, False), ({"layout": "channels"}, True),
    )  # fmt: skip
    for levels, has_kernel in cases:
        used.clear()
        data, expected = calls.asked({"variant": "llama", "x": "float32", **levels})
        assert all(found.passed for found in compare(way_of("tf").outcome(data), expected)), levels
        assert bool(used) == (has_kernel and cpu.is_available()), levels


def test_the_number_of_counted_elements_is_exact_where_the_size_is_unknown() -> None:
    """As Variant.counted, by the squares of the first k ones: n 0.07 in floating point counts 8 of 100."""
    calls = [
        {"variant": variant, "eps": 0.0, "partial": partial, "return_inverse_rms": True}
        for variant, partial in (("paper", 0.07), ("zhang_tf", 0.29), ("paper", 0.999999999), ("zhang_tf", 1e-9))
    ]

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float64)])
    def counted(x: Any) -> Any:
        return [rms_norm(x, **options)[1] for options in calls]

    for n in (1, 100, 101, 1234):
        x = 2.0 ** -np.arange(n)  # the sum, 4/3 (1 - 4^-k) / k, shows k
        for y, options in zip(counted(tf.constant(x)), calls, strict=True):
            np.testing.assert_allclose(y.numpy(), golden.rms_norm(x, **options)[1], rtol=2.0**-48)


def test_errors_while_a_graph_is_traced() -> None:
    unknown = tf.TensorSpec([None, None])
    for function, specs, match in (
        (
            rms_norm,
            [tf.TensorSpec(None)],
            "x has an unknown rank, expected a known one; call set_shape on it",
        ),
        (
            rms_norm,
            [tf.TensorSpec([None, 16]), tf.TensorSpec([8])],
            r"expected \(16,\) to match axis -1 of x f32\[\?, 16\]",
        ),
        (
            lambda x: rms_norm(x, partial=1 / 3),
            [unknown],
            "x axis 1 has an unknown size, expected a known one",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            tf.function(function, input_signature=specs).get_concrete_function()
