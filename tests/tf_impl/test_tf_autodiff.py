"""What TensorFlow differentiates: second and third derivatives, Jacobians, and what a tape keeps."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import numpy as np
import pytest
from options import DIFFERENTIABLE, directions_of, product_with_hessian
from options import small as shared

from rmsnorm import numpy_impl as golden
from rmsnorm.specification import dtypes

tf = pytest.importorskip("tensorflow")

from tf_arrays import converted, to_tf  # noqa: E402
from tf_gradients import NESTINGS, backward_over_backward, forward_over_forward, gradients_of  # noqa: E402

from rmsnorm.tf_impl import operations, rms_norm, rms_norm_vjp  # noqa: E402


def small(name: str) -> tuple[Any, list[Any], dict[str, Any]]:
    """A function of (x, scale, bias), its arguments in float64, and the golden's options."""
    arrays, options = shared(name, (2, 3, 4))
    given = converted(options)
    return lambda *args: rms_norm(*args, **given), arrays, options


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.sample(1)
def test_second_derivatives(name: str) -> None:
    """Four nestings, eagerly and for some in a graph, against differences, and to the last bits against each other."""
    function, arrays, options = small(name)
    directions, v = directions_of(arrays), np.random.default_rng(1).standard_normal((2, 3, 4))
    want = product_with_hessian(arrays, v, directions, options)
    largest = max(np.abs(w).max() for w in want)
    assert largest > 0.1
    tensors, vector, along = [*map(to_tf, arrays)], to_tf(v), [*map(to_tf, directions)]
    reference = None
    for nesting in NESTINGS:
        traced = tf.function(lambda a, v, d, nesting=nesting: nesting(function, a, v, d))
        modes = [nesting(function, tensors, vector, along)]
        if name in ("plain", "before scale"):
            modes.append(traced(tensors, vector, along))
        for got in modes:
            for g, w in zip(got, want, strict=True):
                np.testing.assert_allclose(g, w, rtol=0, atol=1e-7 * 3**3 * max(1.0, largest))
            reference = reference or got
            for g, r in zip(got, reference, strict=True):
                np.testing.assert_allclose(g, r, rtol=0, atol=2.0**-40 * max(1.0, largest))
    twice, size = forward_over_forward(function, tensors, vector, along), sum(np.abs(d).sum() for d in directions)
    along_both = sum((w * d).sum() for w, d in zip(want, directions, strict=True))
    np.testing.assert_allclose(twice, along_both, rtol=0, atol=1e-7 * 3**3 * max(1.0, largest) * size)


def test_a_second_derivative_needs_the_recalled_statistic(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the saved 1 / rho held constant the result is another: the test above can tell."""
    function, arrays, options = small("plain")
    directions, v = directions_of(arrays), np.random.default_rng(1).standard_normal((2, 3, 4))
    want = product_with_hessian(arrays, v, directions, options)
    monkeypatch.setattr(operations, "recalled", lambda call, h, mask, inverse_rms: inverse_rms)
    got = backward_over_backward(function, [*map(to_tf, arrays)], to_tf(v), [*map(to_tf, directions)])
    assert np.abs(got[0] - want[0]).max() > 0.1


@pytest.mark.parametrize("name", ["plain", "outside", "variance", "mask"])
def test_third_derivatives(name: str) -> None:
    """By differences of the second, which test_second_derivatives proves; the error is derived there."""
    function, arrays, _ = small(name)
    directions, v = (
        [*map(to_tf, directions_of(arrays))],
        tf.constant(np.random.default_rng(1).standard_normal((2, 3, 4))),
    )

    def second(x: Any) -> Any:
        return backward_over_backward(function, [x, *tensors[1:]], v, directions)[0]

    tensors, h = [*map(to_tf, arrays)], 2.0**-17
    with tf.GradientTape() as tape:
        tape.watch(tensors[0])
        y = second(tensors[0])
    got = tape.gradient(y, tensors[0], directions[0])
    # symmetric: the product of the third derivative with the direction, twice
    want = (second(tensors[0] + h * directions[0]) - second(tensors[0] - h * directions[0])) / (2 * h)
    live = ~np.isnan(arrays[0])
    assert np.abs(want).max() > 0.1
    np.testing.assert_allclose(got[live], want[live], rtol=0, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.sample(2)
def test_jacobians(name: str) -> None:
    """tape.jacobian and batch_jacobian, which vectorise the backward pass, give the golden's."""
    function, arrays, options = small(name)
    tensors = [*map(to_tf, arrays)]
    basis = np.eye(24).reshape(24, 2, 3, 4)
    rows = [golden.rms_norm_vjp(v, *arrays, **options) for v in basis]
    near = {"rtol": 2.0**-44, "atol": 2.0**-44}  # 2 n + 32 operations of 2^-53 on terms of at most 1 / rho < 10
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(tensors)
        y = function(*tensors)
    for index, jacobian in enumerate(tape.jacobian(y, tensors)):
        want = np.stack([row[index] for row in rows])
        np.testing.assert_allclose(jacobian.numpy().reshape(want.shape), want, **near)
    if "axis" not in options:
        whole = np.stack([row[0] for row in rows]).reshape(2, 12, 2, 12)
        batch = tape.batch_jacobian(y, tensors[0]).numpy().reshape(2, 12, 12)
        np.testing.assert_allclose(batch, np.stack([whole[i, :, i] for i in range(2)]), **near)


def test_vectorized_map() -> None:
    rng = np.random.default_rng(0)
    x, scale, mask = rng.standard_normal((3, 4, 8)), rng.standard_normal((3, 8)), rng.random((3, 4, 8)) > 0.3
    for dtype in dtypes.FLOATS[:3]:  # in float64 sums of another order
        a, g = (to_tf(value.astype(dtype)) for value in (x, scale))

        def one(row: Any) -> Any:
            return rms_norm(row[0], row[1], variant="llama", mask=row[2], partial=0.6)

        want = tf.stack([one((a[i], g[i], mask_i)) for i, mask_i in enumerate(tf.constant(mask))])
        assert (tf.vectorized_map(one, (a, g, tf.constant(mask))).numpy() == want.numpy()).all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_backward_keeps_only_x_the_parameters_the_mask_and_the_statistic(dtype: str, masked: bool) -> None:
    """What the operations of the backward pass read of those of the forward pass."""
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
    expected = {tensor.name for tensor in (x, scale, bias, mask) if tensor is not None}
    assert expected <= set(kept)
    assert [(*t.shape, t.dtype) for name, t in kept.items() if name not in expected] == [(6, 1, tf.float64)]


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


def test_only_what_is_asked_for() -> None:
    rng = np.random.default_rng(0)
    values = [tf.constant(rng.standard_normal(shape)) for shape in ((3, 8), (8,), (8,))]
    full = gradients_of(rms_norm, values, tf.ones((3, 8), tf.float64))
    for chosen in itertools.product((False, True), repeat=3):
        with tf.GradientTape() as tape:
            tape.watch([value for value, c in zip(values, chosen, strict=True) if c])
            y, inverse_rms = rms_norm(*values, return_inverse_rms=True)
            loss = tf.reduce_sum(y) + tf.reduce_sum(inverse_rms)  # the second is a constant
        for got, want, c in zip(tape.gradient(loss, values), full, chosen, strict=True):
            assert (got.numpy() == want.numpy()).all() if c else got is None
    with tf.GradientTape() as tape:
        tape.watch(values)
        inverse_rms = rms_norm(*values, return_inverse_rms=True)[1]
    assert tape.gradient(inverse_rms, values) == [None, None, None]
    with tf.GradientTape() as tape:
        tape.watch(values[0])
        h = rms_norm(2 * values[0], residual=values[0])[1]
    assert (tape.gradient(h, values[0]).numpy() == 3).all()
