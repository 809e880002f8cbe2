"""LayerNorm, BatchNorm and WeightNorm: forward, gradients, running statistics, and what they have to do with RMSNorm.

Rounding. Outputs and gradients are sums of products of at most 5 factors, each reached by fewer than K = 4 size + 20
roundings, for x of that size. Such a sum errs by at most 5 K u kappa (``rounding``), u = 2^-53, times the same sum with
2 + |x^| for x^: 2 for the error of the mean, and kappa >= 1, the largest |x| + |mean| over sigma, for the cancellation
in x - mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from rmsnorm.numpy_impl import rms_norm, rms_norm_vjp
from rmsnorm.numpy_impl.paper.norms import (
    Running,
    batch_norm,
    batch_norm_vjp,
    layer_norm,
    layer_norm_vjp,
    weight_norm,
    weight_norm_vjp,
)

Array: TypeAlias = npt.NDArray[Any]
Function = Callable[..., Array]
U = 2.0**-53
EPS = [0.0, 1e-5, 0.5]
RUNNING = ([0.3, -1.0, 2.0, 0.0], [0.5, 2.0, 1.0, 4.0])


def rounding(size: int, kappa: float = 1.0) -> float:
    return 5 * (4 * size + 20) * U * kappa


def standardise(x: Array, g: Array, b: Array, eps: float, axis: int | tuple[int, ...]) -> Array:
    """Normalisation as written in the papers; free of absolute values and conjugates, so analytic in every argument."""
    centred = x - x.mean(axis=axis, keepdims=True)
    y: Array = centred / np.sqrt((centred * centred).mean(axis=axis, keepdims=True) + eps) * g + b
    return y


def stretched(v: Array, g: Array) -> Array:
    w: Array = v / np.sqrt((v * v).sum(axis=1, keepdims=True)) * g[:, None]
    return w


def complex_step(function: Function, dy: Array, arguments: list[Array]) -> list[Array]:
    """Gradients of <dy, f> from f(a + i h): no difference is taken, so for h = 2^-100 only rounding is left."""
    gradients = []
    for index, argument in enumerate(arguments):
        gradient = np.empty_like(argument)
        for place in np.ndindex(argument.shape):
            moved: list[Array] = [np.array(a, complex) for a in arguments]
            moved[index][place] += 2.0**-100 * 1j
            gradient[place] = np.sum(dy * function(*moved).imag) * 2.0**100
        gradients.append(gradient)
    return gradients


def close(got: Array | None, want: Array, error: float) -> None:
    assert got is not None
    assert got.dtype == np.float64
    assert got.shape == want.shape
    assert np.max(np.abs(got - want)) <= error, f"{np.max(np.abs(got - want)) / error:.3g} times {error:.3g}"


def forward_error(x: Array, g: Array, b: Array, mean: Array, sigma: Array) -> float:
    x_hat = 2 + np.abs(x - mean) / sigma
    return rounding(x.size, kappa(x, mean, sigma)) * float(np.max(x_hat * np.abs(g) + np.abs(b)))


def gradient_error(dy: Array, x: Array, g: Array, mean: Array, sigma: Array) -> float:
    """Of dx, dscale and dbias alike: the sum of all the terms that any of their elements can have."""
    x_hat = 2 + np.abs(x - mean) / sigma
    terms = np.abs(dy) * np.maximum(1, np.abs(g)) * x_hat * np.max(x_hat) * np.maximum(1, 1 / sigma)
    return rounding(x.size, kappa(x, mean, sigma)) * float(np.sum(terms))


def kappa(x: Array, mean: Array, sigma: Array) -> float:
    return max(1.0, float(np.max((np.abs(x) + np.abs(mean)) / sigma)))


def moments(x: Array, eps: float, axis: int | tuple[int, ...]) -> tuple[Array, Array]:
    return x.mean(axis=axis, keepdims=True), np.sqrt(x.var(axis=axis, keepdims=True) + eps)


def draw(seed: int = 0, shape: tuple[int, ...] = (5, 4), features: int = 4) -> tuple[Array, Array, Array, Array]:
    rng = np.random.default_rng(seed)
    return 1 + rng.normal(size=shape), *rng.normal(size=(2, features)), rng.normal(size=shape)


@pytest.mark.parametrize("eps", EPS)
def test_layer_norm(eps: float) -> None:
    x, g, b, dy = draw()
    mean, sigma = moments(x, eps, -1)
    close(layer_norm(x, g, b, eps=eps), standardise(x, g, b, eps, -1), forward_error(x, g, b, mean, sigma))
    gradients = layer_norm_vjp(dy, x, g, b, eps=eps)
    exact = complex_step(lambda x, g, b: standardise(x, g, b, eps, -1), dy, [x, g, b])
    for got, want in zip(gradients, exact, strict=True):
        close(got, want, gradient_error(dy, x, g, mean, sigma))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("eps", EPS)
def test_batch_norm(eps: float, training: bool) -> None:
    x, g, b, dy = draw()
    mean, var = (x.mean(axis=0), x.var(axis=0)) if training else map(np.array, RUNNING)

    def written(x: Array, g: Array, b: Array) -> Array:
        return standardise(x, g, b, eps, 0) if training else (x - mean) / np.sqrt(var + eps) * g + b

    sigma = np.sqrt(var + eps)
    y = batch_norm(x, g, b, RUNNING, training=training, eps=eps)[0]
    close(y, written(x, g, b), forward_error(x, g, b, mean, sigma))
    gradients = batch_norm_vjp(dy, x, g, b, RUNNING, training=training, eps=eps)
    for got, want in zip(gradients, complex_step(written, dy, [x, g, b]), strict=True):
        close(got, want, gradient_error(dy, x, g, mean, sigma))


def test_weight_norm() -> None:
    rng = np.random.default_rng(0)
    v, g, dw = rng.normal(size=(4, 5)), rng.normal(size=4), rng.normal(size=(4, 5))
    w = weight_norm(v, g)
    close(w, stretched(v, g), rounding(v.size) * float(np.max(np.abs(w))))
    # Rows have the length |g|: m squares, their sum and root, twice.
    assert np.linalg.norm(w, axis=1) == pytest.approx(np.abs(g), rel=(2 * 5 + 8) * U)
    length = np.linalg.norm(v, axis=1)
    gradients = weight_norm_vjp(dw, v, g)
    error = rounding(v.size) * float(np.sum(np.abs(dw)) * max(1, np.max(np.abs(g) / length)))
    for got, want in zip(gradients, complex_step(stretched, dw, [v, g]), strict=True):
        close(got, want, error)


@pytest.mark.parametrize("axis", [1, (0, 2), (-1, 0)])
def test_axes_are_those_that_are_named(axis: Any) -> None:
    """An array with the axes moved to the end gives the same numbers, each gradient in its place."""
    x, _, _, dy = draw(shape=(3, 4, 2))
    axes = tuple(sorted(np.atleast_1d(axis) % 3))
    sizes = tuple(x.shape[a] for a in axes)
    g, b = np.random.default_rng(1).normal(size=(2, *sizes))
    order = [*(a for a in range(3) if a not in axes), *axes]

    def last(array: Array) -> Array:
        return array.transpose(order).reshape(-1, g.size)

    error = gradient_error(last(dy), last(x), g.ravel(), *moments(last(x), 1e-5, -1))
    close(last(layer_norm(x, g, b, axis=axis)), layer_norm(last(x), g.ravel(), b.ravel()), error)
    dx, dg, db = layer_norm_vjp(dy, x, g, b, axis=axis)
    for got, want in zip((last(dx), dg, db), layer_norm_vjp(last(dy), last(x), g.ravel(), b.ravel()), strict=True):
        assert got is not None
        assert want is not None
        close(got, want.reshape(got.shape), error)
    error = gradient_error(last(dy), last(x), g.ravel(), *moments(last(x), 1e-5, 0))
    (y, running), (want_y, want_running) = batch_norm(x, g, b, axis=axis), batch_norm(last(x), g.ravel(), b.ravel())
    close(last(y), want_y, error)
    close(running.mean, want_running.mean.reshape(sizes), error)
    close(running.var, want_running.var.reshape(sizes), error)
    close(last(batch_norm_vjp(dy, x, g, b, axis=axis)[0]), batch_norm_vjp(last(dy), last(x), g.ravel())[0], error)


@pytest.mark.parametrize("momentum", [0.0, 0.9, 1.0])
def test_running_statistics_are_an_exponential_mean_of_the_batches(momentum: float) -> None:
    batches = np.random.default_rng(0).normal(2, 3, size=(6, 5, 4))
    running = None
    for batch in batches:
        _, running = batch_norm(batch, running=running, momentum=momentum)
    assert running is not None
    shares = (1 - momentum) * momentum ** np.arange(5, -1, -1)
    start = momentum**6
    for got, first, terms in ((running.mean, 0, batches.mean(axis=1)), (running.var, 1, batches.var(axis=1))):
        error = rounding(5) * 6 * float(np.max(batches**2))  # six updates of at most three roundings each, after a mean
        close(got, start * first + shares @ terms, error)


def test_running_statistics_are_used_without_training_and_kept() -> None:
    x, g, b, dy = draw()
    running = Running(*map(np.array, RUNNING))
    y, kept = batch_norm(x, g, b, running, training=False, momentum=0.1)  # 0.1 and 0.9 of 0.3 do not add up to 0.3
    assert all(np.array_equal(new, old) for new, old in zip(kept, running, strict=True))
    alone, _ = batch_norm(x[:1], g, b, running, training=False)
    assert np.array_equal(y[:1], alone)  # no case sees another
    dx = batch_norm_vjp(dy, x, g, None, running, training=False)[0]
    assert np.array_equal(dx[:1], batch_norm_vjp(dy[:1], x[:1], g, None, running, training=False)[0])


def test_training_does_not_depend_on_the_running_statistics() -> None:
    x, g, b, dy = draw()
    assert np.array_equal(batch_norm(x, g, b)[0], batch_norm(x, g, b, RUNNING)[0])
    assert np.array_equal(batch_norm_vjp(dy, x, g)[0], batch_norm_vjp(dy, x, g, None, RUNNING)[0])


def test_inputs_are_not_written_and_parameters_may_be_absent() -> None:
    x, g, b, dy = draw()
    mean, var = map(np.array, RUNNING)
    for array in (x, g, b, dy, mean, var):
        array.flags.writeable = False
    for training in (True, False):
        _, running = batch_norm(x, g, b, (mean, var), training=training)
        assert not any(np.shares_memory(new, old) for new, old in zip(running, (mean, var), strict=True))
        assert batch_norm_vjp(dy, x, g, b, (mean, var), training=training)[0].flags.writeable
    assert layer_norm(x, g, b).flags.writeable
    assert layer_norm_vjp(dy, x)[1:] == batch_norm_vjp(dy, x)[1:] == (None, None)
    assert np.array_equal(layer_norm(x), layer_norm(x, np.ones(4), np.zeros(4)))
    weight_norm_vjp(dy, x, np.ones(5))
    assert weight_norm(x, np.ones(5)).flags.writeable


def test_zero_rows_constant_rows_and_constant_cases() -> None:
    assert layer_norm(np.empty((0, 4))).shape == (0, 4)
    assert layer_norm(np.empty((4, 0))).shape == (4, 0)
    dx, dg, _ = layer_norm_vjp(np.empty((0, 4)), np.empty((0, 4)), np.ones(4))
    assert dx.shape == (0, 4)
    assert np.array_equal(np.asarray(dg), np.zeros(4))
    constant = np.full((2, 4), 3.0)
    assert np.array_equal(layer_norm(constant), np.zeros((2, 4)))
    assert np.isnan(layer_norm(constant, eps=0.0)).all()
    assert np.isnan(layer_norm_vjp(constant, constant, eps=0.0)[0]).all()
    assert np.isnan(weight_norm(np.zeros((1, 2)), np.ones(1))).all()


def test_layer_norm_is_rms_norm_on_rows_of_mean_zero() -> None:
    """Values and gradients: dx differs by what the mean would have passed, and agrees on the rows' own plane."""
    x, g, b, dy = draw()
    x = x - x.mean(axis=-1, keepdims=True)
    error = gradient_error(dy, x, g, *moments(x, 1e-5, -1)) + forward_error(x, g, b, *moments(x, 1e-5, -1))
    close(layer_norm(x, g, b), rms_norm(x, g, b, eps=1e-5), error)
    of_layer, of_rms = layer_norm_vjp(dy, x, g, b), rms_norm_vjp(dy, x, g, b, eps=1e-5)
    close(of_layer[0], of_rms[0] - of_rms[0].mean(axis=-1, keepdims=True), error)
    close(of_layer[1], of_rms[1], error)
    close(of_layer[2], of_rms[2], error)


@pytest.mark.parametrize("eps", EPS)
def test_layer_norm_after_a_linear_map_is_rms_norm_after_the_centred_map(eps: float) -> None:
    """W' = (I - 1 1^T / n) W and c' likewise: LayerNorm(W x + c; g, b) = RMSNorm(W' x + c'; g, b), for every eps."""
    rng = np.random.default_rng(0)
    x, w, c, (g, b) = (
        rng.normal(size=(6, 3)),
        rng.normal(1, 1, size=(8, 3)),
        rng.normal(size=8),
        rng.normal(size=(2, 8)),
    )
    a = x @ w.T + c
    centred = x @ (w - w.mean(axis=0)).T + (c - c.mean())
    y = layer_norm(a, g, b, eps=eps)
    # a errs by its 3 + 1 terms' absolute values, and so does its centred form, with the mean of n of them on top; the
    # norm magnifies by kappa = that sum over sigma, as in the module's docstring.
    terms = np.abs(x) @ np.abs(w).T + np.abs(c)
    kappa = 2 * float(np.max(terms.max(axis=-1) / a.std(axis=-1)))
    error = rounding(8, kappa) * float(np.max((2 + np.abs((y - b) / g)) * np.abs(g) + np.abs(b)))
    close(y, rms_norm(centred, g, b, eps=eps), error)
    assert np.max(np.abs(rms_norm(a, g, b, eps=eps) - y)) > 1e6 * error  # without the centring they are far apart


WRONG_TYPES: list[tuple[Callable[[], Any], str]] = [
    (lambda: layer_norm([1, 2]), r"layer_norm: x has dtype int64, expected float16, .*; cast it first"),
    (lambda: batch_norm([[1.0]], training=False),
     r"batch_norm: running is None .*, expected \(mean, var\) for training=False; pass those of training"),
    (lambda: batch_norm_vjp([[1.0]], [[1.0]], running=([0], [1.0])),
     r"batch_norm_vjp: running mean has dtype int64, expected float16, .*; cast it first"),
    (lambda: weight_norm([[1]], [1.0]), r"weight_norm: v has dtype int64, expected float16, .*; cast it"),
]  # fmt: skip
WRONG_VALUES: list[tuple[Callable[[], Any], str]] = [
    (lambda: layer_norm([1.0, 2.0], [1.0]),
     r"layer_norm: scale has shape \(1,\), expected \(2,\) to match axis -1 of x f64\[2\]"),
    (lambda: layer_norm_vjp([1.0], [1.0, 2.0]),
     r"layer_norm_vjp: dy has shape \(1,\), expected \(2,\) to match x f64\[2\]"),
    (lambda: layer_norm([1.0], eps=-1.0), r"layer_norm: eps is -1\.0, expected a finite number >= 0"),
    (lambda: layer_norm([1.0], axis=1), r"layer_norm: axis is 1, expected between -1 and 0 for x"),
    (lambda: batch_norm([1.0]),
     r"batch_norm: x\.shape is \(1,\), expected at least one case; pass a batch, or training=False"),
    (lambda: batch_norm(np.empty((0, 2))), r"batch_norm: x\.shape is \(0, 2\), expected at least one"),
    (lambda: batch_norm([[1.0]], momentum=1.5),
     r"batch_norm: momentum is 1\.5, expected a number in \[0, 1\]; pass one such as 0\.99"),
    (lambda: batch_norm([[1.0]], running=([0.0], [1.0, 1.0])),
     r"batch_norm: running var has shape \(2,\), expected \(1,\) to match the features of x"),
    (lambda: weight_norm([1.0], [1.0]), r"weight_norm: shape of v is \(1,\), expected \[n, m\]; pass a"),
    (lambda: weight_norm([[1.0]], [1.0, 2.0]),
     r"weight_norm: g has shape \(2,\), expected \(1,\) to match v f64\[1, 1\]"),
    (lambda: weight_norm_vjp([[1.0, 2.0]], [[1.0]], [1.0]),
     r"weight_norm_vjp: dw has shape \(1, 2\), expected \(1, 1\) to match v f64\[1, 1\]"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), WRONG_TYPES + WRONG_VALUES)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(TypeError if (call, message) in WRONG_TYPES else ValueError, match=message):
        call()
