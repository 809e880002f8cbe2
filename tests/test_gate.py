"""A gate, y * f(z) or the norm of x * f(z): kernels and frameworks against the golden, which test_golden.py proves."""

from __future__ import annotations

import itertools

import mpmath
import numpy as np
import pytest

from rmsnorm import numpy_impl
from rmsnorm.numpy_impl import fast
from rmsnorm.numpy_impl.gate import factor, slope
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Variant
from rmsnorm.targets.bridges import bridge

FUNCTIONS, POSITIONS = ("silu", "sigmoid"), ("after", "before")
GATES = list(itertools.product(FUNCTIONS, POSITIONS))


def gated(variant, function, position):
    return Variant.get(variant).replace(gate_function=function, gate_position=position)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_factor_and_its_slope_have_90_bits(function):
    """2^-94 + 2^-104 |z| of the exponential, five operations of 2^-104; 1 + z s(-z) is at least 0.2 of its terms."""
    z = np.concatenate([np.linspace(-600, 600, 41), [0.0, 1e-300, -1e-20, 1.5, -1.25, -720, -1e3, 3e4, -65504]])
    call = resolve("test", Spec(z.shape, "float64"), variant=gated("standard", function, "after"),
                   gate=Spec(z.shape, "float64"))  # fmt: skip
    with mpmath.workprec(400):
        silu = function == "silu"
        for (got, exponent), equation in (
            (factor(call, z), lambda t, s, _: t * s if silu else s),
            (slope(call, z), lambda t, s, rest: s * (1 + t * rest) if silu else s * rest),
        ):
            for number, hi, lo, e in zip(z, got.hi, got.lo, exponent, strict=True):
                t = mpmath.mpf(float(number))
                want = equation(t, 1 / (1 + mpmath.exp(-t)), 1 / (1 + mpmath.exp(t)))
                error = mpmath.ldexp(mpmath.mpf(float(hi)) + mpmath.mpf(float(lo)), int(e)) - want
                assert abs(error) <= abs(want) * (mpmath.mpf(2) ** -90 + abs(t) * mpmath.mpf(2) ** -102)


@pytest.mark.parametrize(("function", "position"), GATES)
def test_what_is_not_finite_propagates_as_in_the_equation(function, position):
    x, z = np.ones((5, 8)), np.random.default_rng(0).normal(size=(5, 8))
    x[0, 1], x[1, 2], x[2, 3], x[3, 1] = np.inf, -np.inf, np.nan, 1e308
    z[3], z[4, :3] = 700, (np.inf, -np.inf, np.nan)
    with np.errstate(all="ignore"):
        s = 1 / (1 + np.exp(-z))
        f = z * s if function == "silu" else s
        h, after = (x * f, 1.0) if position == "before" else (x, f)
        h[3] = 1  # x f(z) is beyond the range of float64, which does no harm to the golden
        want = h / np.sqrt((h * h).mean(-1, keepdims=True) + 1e-6) * after
    variant = gated("standard", function, position)
    y = numpy_impl.rms_norm(x, variant=variant, gate=z)
    assert np.array_equal(np.isnan(y), np.isnan(want))
    for derivative in (
        numpy_impl.rms_norm_vjp(x, x, variant=variant, gate=z)[0],
        numpy_impl.rms_norm_jvp((x,), (x,), variant=variant, gate=z),
    ):
        assert np.isnan(derivative[:3]).any(axis=1).all()


KERNELS = [  # the kernels of the parity kit; and a gate of another dtype, and eps beside the root; and no gate
    *itertools.product(("standard", "llama"), ("float32", "bfloat16", "float16"), ("silu",), ("after", "before")),
    ("zhang_torch", "bfloat16", "sigmoid", "after"), ("standard", "float32", "sigmoid", "before"),
    *itertools.product(("standard", "llama", "gemma"), ("float32", "bfloat16", "float16"), (None,), ("after",)),
]  # fmt: skip


@pytest.mark.parametrize("framework", ["numpy", "torch", "tf", "flax"])
@pytest.mark.parametrize(("name", "dtype", "function", "position"), KERNELS)
def test_kernels_have_the_bits_of_the_golden(framework, name, dtype, function, position, monkeypatch):
    """Both kernels, in groups along one axis or two or not, on rows with gaps; with large gates, which no other
    elements of the row have.
    """
    pytest.importorskip("rmsnorm.cpu._native")
    variant, random = gated(name, function or "silu", position), np.random.default_rng(6)
    x, z = random.normal(size=(2, 6, 5, 4, 24)) * 10.0 ** random.uniform(-3, 1, (2, 6, 5, 4, 1))
    z[0, 0, 0, :8] = (0.0, -0.0, 90, -90, -700, 1e3, -1e4, 30)
    x, z = x.astype(dtype)[1:4], z.astype("float32" if name == "zhang_torch" else dtype)[::2, ::2]
    x, gains = x[:, 1:4], random.normal(0.3, 1.0, (3, 4, 24)).astype(dtype)
    if framework == "torch":
        pytest.importorskip("torch")
        from rmsnorm.torch_impl import operations

        monkeypatch.setattr(operations, "statistic", None)  # of plain operations
        compute = _kernels_of_torch
    elif framework == "flax":
        if pytest.importorskip("jax").default_backend() != "cpu":
            pytest.skip("the kernels are for CPUs")
        compute = _kernels_of_flax
    elif framework == "tf":
        pytest.importorskip("tensorflow")
        from rmsnorm.tf_impl import operations as operations_of_tf

        monkeypatch.setattr(operations_of_tf, "statistic", None)
        compute = _kernels_of_tf
    else:
        monkeypatch.setattr(fast, "golden", None)
        compute = _kernels_of_numpy
    for axes, gain in (
        ({"axis": -1, "feature_axis": (-2, -1)}, gains[0]),
        ({"axis": -1, "feature_axis": (-3, -2, -1)}, gains),
        ({"axis": (-2, -1)}, gains[0]),
    ):
        options = {**axes, "variant": variant, "gate": None if function is None else z}
        y, inverse_rms = numpy_impl.rms_norm(x, gain, return_inverse_rms=True, **options)
        dy = random.normal(size=y.shape).astype(y.dtype)
        want = [y, inverse_rms, *numpy_impl.rms_norm_vjp(dy, x, gain, **options)]
        got = compute(dy, x, gain, **options)
        for quantity, ours, golden in zip(("y", "1 / rho", "dx", "dscale", "dbias", "dgate"), got, want, strict=False):
            assert (ours is golden is None) or (ours.dtype, ours.shape) == (golden.dtype, golden.shape)
            assert golden is None or np.array_equal(ours, golden), quantity
        assert len(got) == len(want) == 5 + (function is not None)


@pytest.mark.parametrize(
    ("eps", "place"), [(0.0, "inside"), (1e-290, "inside"), (1e-150, "outside"), (1e-170, "clamp"), (1e-6, "inside")]
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_kernels_have_the_bits_of_the_golden_where_f_is_next_to_nothing(function, eps, place, monkeypatch):
    """The squares of x f(z) underflow, then x f(z) itself: rows of z around each number. A zero of y has its sign."""
    pytest.importorskip("rmsnorm.cpu._native")
    monkeypatch.setattr(fast, "golden", None)
    variant = gated("standard", function, "before").replace(eps=eps, eps_position=place)
    random = np.random.default_rng(8)
    for dtype in ("float32", "bfloat16"):
        z = random.normal(size=(12, 9))
        z -= np.array([330, 345, 375, 380, 500, 707, 708, 709, 744, 800, 5e3, 6e4])[:, None]
        x, dy = random.normal(size=(2, 12, 9)) * 10.0 ** random.uniform(-8, 8, (2, 12, 1))
        z[:, 0], x[:, 0], z[:, 1] = 3.0, 0.0, z[:, 1] - 900
        x, dy, z, gain = (a.astype(dtype) for a in (x, dy, z, random.normal(size=9)))
        options = {"variant": variant, "gate": z}
        want = [*numpy_impl.rms_norm(x, gain, return_inverse_rms=True, **options)]
        want += numpy_impl.rms_norm_vjp(dy, x, gain, **options)
        results = _kernels_of_numpy(dy, x, gain, **options)
        assert all(golden is None or np.array_equal(got, golden) for got, golden in zip(results, want, strict=True))
        assert np.array_equal(np.signbit(results[0].astype(float)), np.signbit(want[0].astype(float)))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_kernels_have_the_bits_of_the_golden_with_all_options(dtype, position, function, monkeypatch):
    """In groups, with gates so large that s(z) is 1 in float64, and rows of which nothing enters the statistic."""
    pytest.importorskip("rmsnorm.cpu._native")
    random = np.random.default_rng(sum(map(ord, dtype + position + function)))
    variant = gated("llama", function, position)
    variant = variant.replace(partial=0.5, eps=1.3e-5)  # with a root of few digits, x over it would often be a tie
    shape = (400, 3, 8)
    x, gate, dy = (random.standard_normal(shape).astype(dtype) for _ in range(3))
    gate = (gate.astype(np.float32) * random.choice([1.0, 40.0, 300.0], (400, 1, 1))).astype(dtype)
    mask = random.random(shape) < 0.5
    mask[:10, :, :4] = False  # the first half enters the statistic
    scale, bias = (random.standard_normal((3, 8)).astype(dtype) for _ in range(2))
    options = {"variant": variant, "axis": -1, "feature_axis": (-2, -1), "gate": gate, "mask": mask, "residual": dy}
    want = [*numpy_impl.rms_norm(x, scale, bias, **options)]
    want += numpy_impl.rms_norm_vjp((dy, x), x, scale, bias, **options)
    monkeypatch.setattr(fast, "golden", None)
    got = [*fast.rms_norm(x, scale, bias, **options), *fast.rms_norm_vjp((dy, x), x, scale, bias, **options)]
    for ours, golden in zip(got, want, strict=True):
        assert (ours.dtype, ours.shape) == (golden.dtype, golden.shape)
        assert np.array_equal(ours, golden)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, where a NaN is cast
def test_kernels_have_the_bits_of_the_golden_for_every_gate_of_16_bits(dtype, position, function, monkeypatch):
    """The kernels read f(z) of these from tables.

    h / rho is not rounded before the gate: its product with an f(z) next to a number of few bits is next to a tie.
    """
    pytest.importorskip("rmsnorm.cpu._native")
    monkeypatch.setattr(fast, "golden", None)
    random = np.random.default_rng(3)
    numbers = np.arange(0x10000, dtype=np.uint16).view(dtype)
    z = numbers[np.argsort(numbers.astype(np.float64), kind="stable")].reshape(-1, 64)
    for width in ("float32", dtype):
        x, dy = (random.normal(size=z.shape).astype(width) for _ in range(2))
        x[::7, ::3] = 0
        options = {"variant": gated("standard", function, position), "gate": z}
        gain = random.normal(size=64).astype(width)
        want = [*numpy_impl.rms_norm(x, gain, return_inverse_rms=True, **options)]
        want += numpy_impl.rms_norm_vjp(dy, x, gain, **options)
        for ours, golden in zip(_kernels_of_numpy(dy, x, gain, **options), want, strict=True):
            assert golden is None or np.array_equal(ours, golden, equal_nan=True)


@pytest.mark.parametrize("result", ["x", "promote", "scale", "half_scale", "promote_first"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_gradient_of_the_gate_has_the_gain_that_y_rounds(function, result, monkeypatch):
    """No preset has an offset and rounds before the gain; dx and dscale have the gain before it is rounded."""
    pytest.importorskip("rmsnorm.cpu._native")
    monkeypatch.setattr(fast, "golden", None)
    variant = gated("llama", function, "after").replace(scale_offset=1.0, result_dtype=result)
    random = np.random.default_rng(0)
    for dtype, width in [
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
    ]:
        x, dy, z = (random.normal(size=(6, 64)).astype(dtype) for _ in range(3))
        scale, bias = (random.normal(size=64).astype(width) for _ in range(2))
        for options in ({}, {"mask": random.random((6, 64)) < 0.7}, {"bias": bias}):
            options |= {"variant": variant, "gate": z}
            want = numpy_impl.rms_norm_vjp(dy, x, scale, **options)
            got = fast.rms_norm_vjp(dy, x, scale, **options)
            assert all(golden is None or np.array_equal(ours, golden) for ours, golden in zip(got, want, strict=True))


def _kernels_of_numpy(dy, x, gain, **options):
    return [
        *fast.rms_norm(x, gain, return_inverse_rms=True, **options),
        *fast.rms_norm_vjp(dy, x, gain, **options),
    ]


def _kernels_of_tf(dy, *inputs, gate, **options):
    import tensorflow as tf

    from rmsnorm.tf_impl import rms_norm, rms_norm_vjp

    between = bridge("tf")
    dy, *tensors = (None if array is None else between.send(array) for array in (dy, *inputs, gate))
    with tf.GradientTape() as tape:
        tape.watch([t for t in tensors if t is not None])
        x, scale, z = tensors
        y, inverse_rms = rms_norm(x, scale, gate=z, return_inverse_rms=True, **options)
    by_tape = tape.gradient(y, [t for t in tensors if t is not None], dy)
    gradients = rms_norm_vjp(dy, x, scale, gate=z, **options)
    by_formula = [g for g in gradients if g is not None]
    for one, other in zip(by_tape, by_formula, strict=True):
        assert bool(tf.reduce_all(one == other))
    return [None if array is None else between.fetch(array) for array in (y, inverse_rms, *gradients)]


def _kernels_of_flax(dy, x, gain, *, gate, **options):
    """Likewise."""
    import jax

    from rmsnorm.flax_impl import rms_norm, rms_norm_vjp

    between = bridge("flax")
    dy, *inputs = (between.send(array) for array in (dy, x, gain, gate) if array is not None)

    def norm(x, gain, gate=None, **more):
        return rms_norm(x, gain, gate=gate, **more, **options)

    outputs = norm(*inputs, return_inverse_rms=True)
    gradients = rms_norm_vjp(dy, *inputs[:2], gate=dict(enumerate(inputs)).get(2), **options)
    y, pull = jax.vjp(norm, *inputs)
    pairs = zip(pull(dy), (gradient for gradient in gradients if gradient is not None), strict=True)
    assert np.array_equal(y, outputs[0])
    assert all(np.array_equal(one, other) for one, other in pairs)
    return [None if array is None else between.fetch(array) for array in (*outputs, *gradients)]


def _kernels_of_torch(dy, x, gain, *, gate, **options):
    """By formula and by the tape; the outputs with and without a tape are the same."""
    import torch

    from rmsnorm.torch_impl import rms_norm, rms_norm_vjp

    between = bridge("torch")
    dy, *inputs = (between.send(array) for array in (dy, x, gain, gate) if array is not None)

    def norm(x, gain, gate=None, **more):
        return rms_norm(x, gain, gate=gate, **more, **options)

    outputs = norm(*inputs, return_inverse_rms=True)
    gradients = rms_norm_vjp(dy, *inputs[:2], gate=dict(enumerate(inputs)).get(2), **options)
    leaves = [array.clone().requires_grad_() for array in inputs]
    by_tape = torch.autograd.grad(norm(*leaves), leaves, dy)
    assert all(map(torch.equal, by_tape, (gradient for gradient in gradients if gradient is not None)))
    y = norm(inputs[0].clone().requires_grad_(), *inputs[1:], return_inverse_rms=True)
    assert all(map(torch.equal, y, outputs))
    return [None if array is None else between.fetch(array) for array in (*outputs, *gradients)]


@pytest.mark.parametrize("place", [numpy_impl, fast])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("partial", [None, 0.5])
def test_a_row_without_counted_elements_gives_0_also_where_all_is_nan(place, position, partial):
    """Of the partial statistic the mask shows elements, but none of those that count."""
    x, z, dy = (np.ones((2, 4), "float32") for _ in range(3))
    mask = np.array([[True] * 4, [False, False, partial is not None, partial is not None]])
    for array in (x, z, dy):
        array[1] = np.nan
    options = {"variant": gated("standard", "silu", position), "mask": mask, "gate": z, "partial": partial}
    gain = np.ones(4, "float32")
    dx, dscale, dbias, dgate = place.rms_norm_vjp(dy, x, gain, gain, **options)
    for rows in (place.rms_norm(x, gain, gain, **options), dx, dgate):
        assert np.isfinite(rows[0]).all()
        assert not rows[1].any()
    assert np.isfinite([dscale, dbias]).all()


def test_what_is_no_gate_is_refused():
    x, z = np.ones((2, 2, 5, 24), np.float32)
    for wrong, sentence in (
        ({"gate": z[:1]}, r"gate has shape \(1, 5, 24\), expected \(2, 5, 24\)"),
        ({"gate": z > 0}, "gate has dtype bool"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"rms_norm: {sentence}"):
            numpy_impl.rms_norm(x, **wrong)
