"""The TensorFlow functions against the golden, and everything TensorFlow may do with them."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rmsnorm
from rmsnorm import dtypes
from rmsnorm import numpy_impl as golden
from rmsnorm.numpy_impl.double_double import DoubleDouble
from rmsnorm.numpy_impl.yardstick import yardstick

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow")

from rmsnorm.tf_impl import functional, rms_norm, rms_norm_jvp, rms_norm_vjp  # noqa: E402
from rmsnorm.tf_impl.rounding import cast, product_error, sum_of_squares  # noqa: E402

tf.get_logger().setLevel("ERROR")  # each case traces its own function, which TensorFlow warns of
MAGNITUDES = {
    "float16": (1.0, 1e4, 1e-6),
    "bfloat16": (1.0, 1e20, 1e-30),
    "float32": (1.0, 1e20, 1e-30),
    "float64": (1.0, 1e20, 1e-30, 1e300, 1e-300),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rows": {"axis": 0},
    "image": {"axis": (2, 3), "feature_axis": 1},
    "pair": {"axis": (-1, 1)},
    "all": {"axis": (0, 1, 2, 3), "feature_axis": 3},
    "partial": {"partial": 0.3},
    "mask": {"mask": (2, 3, 4, 5)},
    "broadcast mask": {"mask": (3, 1, 5)},
    "partial mask": {"mask": (2, 3, 4, 5), "partial": 0.7, "axis": (1, 3)},
    "residual": {"residual": "float32"},
    "residual mask": {"residual": "bfloat16", "mask": (2, 3, 4, 5)},
    "half out": {"out_dtype": "bfloat16"},
    "double out": {"out_dtype": "float64"},
}
MODES: dict[str, Callable[[Any], Any]] = {
    "eager": lambda function: function,
    "graph": tf.function,
    "unknown sizes": lambda function: _unknown(function, False),
    "compiled": lambda function: tf.function(function, jit_compile=True),
    "compiled, unknown sizes": lambda function: _unknown(function, True),
}


def _unknown(function: Any, jit_compile: bool) -> Any:
    """The function of one list of tensors, traced for sizes that are not known."""

    def run(tensors: Any) -> Any:
        signature = [[tf.TensorSpec([None] * t.shape.rank, t.dtype) for t in tensors]]
        return tf.function(function, input_signature=signature, jit_compile=jit_compile)(tensors)

    return run


def to_tf(value: Any) -> Any:
    return tf.constant(value) if isinstance(value, np.ndarray) else value


def ulps(got: Any, want: Any) -> Any:
    """How many numbers of the format lie between; a NaN is next to a NaN only."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    integer, double = f"i{got.dtype.itemsize}", want.dtype.itemsize == 8
    ordered = []
    for value in (got, want):
        bits = np.where(np.isnan(value), 0, value).astype(value.dtype).view(integer).astype(object if double else "i8")
        ordered.append(np.where(bits < 0, -(bits - int(np.iinfo(integer).min)), bits))
    return np.where(np.isnan(got) == np.isnan(want), abs(ordered[0] - ordered[1]), 2**62).astype(np.int64)


def check_values(got: Any, want: Any, most: int = 1) -> None:
    """y is rounded once, from at least 53 bits: it is not the golden's only next to a tie, 1 time in 2^28 in f32."""
    apart = ulps(got.numpy(), want)
    assert apart.max(initial=0) <= most
    assert (apart == 0).sum() >= 0.999 * apart.size - (most > 1)


def check_near(got: Any, want: Any, terms: Any, count: int) -> None:
    """One rounding each of the two, and what float64 rounds: 2^-53 of the terms' absolute sum for an operation.

    TensorFlow's kernels take subnormal numbers as 0, which costs up to the smallest normal one; in f16 it does not.
    """
    got, dtype = got.numpy(), want.dtype.name
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    tiny = dtypes.smallest_subnormal(dtype) if dtype == "float16" else float(ml_dtypes.finfo(dtype).smallest_normal)
    got, want = got.astype(np.float64), want.astype(np.float64)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(all="ignore"):
        near = np.abs(got - want) <= 2 * dtypes.unit_roundoff(dtype) * np.abs(want) + tiny + count * 2.0**-53 * terms
    assert (same | near).all()


def make(options: dict[str, Any], dtype: str, parameters: str, seed: int, magnitude: float = 1.0) -> Any:
    """Arguments of the golden: x, scale, bias, options; every mask has an empty row and NaN under it."""
    rng = np.random.default_rng(seed)
    shape, options = (2, 3, 4, 5), dict(options)
    axis = options.get("feature_axis", options.get("axis", -1))
    axes = sorted(a % 4 for a in (axis if isinstance(axis, tuple) else (axis,)))
    sizes = [shape[a] for a in axes]
    size = np.exp(np.clip(rng.standard_normal((*shape[:-1], 1)), -1, 1))  # 1e4 stays in float16
    x = (np.clip(rng.standard_normal(shape), -2, 2) * size * magnitude).astype(dtype)
    scale, bias = (rng.standard_normal(sizes).astype(parameters) for _ in range(2))
    if "residual" in options:
        options["residual"] = (rng.standard_normal(shape) * magnitude).astype(options["residual"])
    if "mask" in options:
        mask = rng.random(options["mask"]) > 0.3
        mask[-1] = False
        options["mask"] = mask
        x = np.where(np.broadcast_to(mask, shape), x, np.asarray(np.nan, dtype)).astype(dtype)
    return x, scale, bias, options


def three_of(variants: tuple[str, ...], name: str) -> list[tuple[int, str]]:
    """The cases of the options share the variants out: three for each, with the seeds of their data."""
    return [((len(name) + i) % len(variants), variants[(len(name) + i) % len(variants)]) for i in range(3)]


def split(options: dict[str, Any]) -> tuple[list[str], list[Any], dict[str, Any]]:
    """Names and values of the arrays among the options, and the rest."""
    names = [name for name, value in options.items() if isinstance(value, np.ndarray)]
    rest = {name: value for name, value in options.items() if name not in names}
    if "out_dtype" in rest:
        rest["out_dtype"] = getattr(tf, rest["out_dtype"])
    return names, [to_tf(options[name]) for name in names], rest


def check_variant(variant: str, y: Any, want: Any, x: Any, scale: Any, bias: Any, magnitude: float) -> None:
    """To the bit, but for what a variant rounds more than once, or does not carry beyond float64."""
    exact = "float64" in (x.dtype.name, want.dtype.name)
    chosen = rmsnorm.PRESETS[variant]
    terms = np.abs(golden.rms_norm(x, scale, variant=variant).astype(np.float64))
    terms = terms + (0 if bias is None else np.abs(bias.astype(np.float64)))
    if chosen.statistic == "variance" and exact:
        check_near(y, want, 2 * terms, x.shape[-1] + 8)  # the mean, n + 8 operations, is taken from as large an a
    elif chosen.eps_position == "clamp" and exact:
        check_near(y, want, terms, 4)  # eps / sqrt(k)
    elif x.dtype == np.float64 and magnitude == 1e-300:
        check_near(y, want, terms, 4)  # errors of y below 2^-900 would be subnormal: division, rho, gain and bias
    elif chosen.rounding == "before_scale" and x.dtype == np.float32:
        # a / rho is rounded next to a tie 1 time in 200 (below), and an ulp of float32 is carried to the end
        check_near(y, want, terms, 2**30)
    elif want.dtype == np.float32 and magnitude == 1e-30:
        # rho is sqrt(1e-6), 1e-3 but for 2^-53: a (8 or 24 bits) times 1000 (7 bits) times a gain is often a tie in
        # 24 bits, and half of the time float64 does not tell on which side
        assert ulps(y.numpy(), want).max() <= 1
    else:
        check_values(y, want)


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        *(("eager", dtype) for dtype in MAGNITUDES),
        ("graph", "bfloat16"),
        ("unknown sizes", "float64"),
        ("compiled", "float64"),
        ("compiled, unknown sizes", "bfloat16"),
    ],
)
def test_every_variant_is_the_golden(mode: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    few = ["llama", "gemma", "zhang_torch", "keras_rms_scaling"]
    variants = list(rmsnorm.PRESETS) if mode == "eager" else few

    def function(tensors: Any) -> Any:
        x, scale, bias = tensors
        return [(rms_norm(x, scale, bias, variant=v), rms_norm(x, scale, variant=v), rms_norm(x)) for v in variants]

    for index, magnitude in enumerate(MAGNITUDES[dtype][: None if mode == "eager" else 1]):
        for parameters in list(MAGNITUDES)[index % 2 :: 2] if mode == "eager" else (dtype,):
            x = (rng.standard_normal((32, 33)) * magnitude).astype(dtype)
            x[3] = 0
            # bias in the dtype of x: halfway between two of its numbers, only 106 bits tell on which side a tiny x lies
            scale, bias = (rng.standard_normal(33).astype(d).astype(parameters) for d in (parameters, dtype))
            got = MODES[mode](function)([*map(to_tf, (x, scale, bias))])
            for variant, (full, scaled, _) in zip(variants, got, strict=True):
                want = golden.rms_norm(x, scale, bias, variant=variant)
                check_variant(variant, full, want, x, scale, bias, magnitude)
                check_variant(variant, scaled, golden.rms_norm(x, scale, variant=variant), x, scale, None, magnitude)
            check_variant("standard", got[0][2], golden.rms_norm(x), x, None, None, magnitude)


@pytest.mark.parametrize("dtype", MAGNITUDES)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_the_golden(name: str, dtype: str) -> None:
    for seed, variant in three_of(("standard", "llama", "gemma", "zhang_torch", "t5"), name):
        parameters = list(MAGNITUDES)[(seed + len(name)) % 4]
        x, scale, bias, options = make(OPTIONS[name], dtype, parameters, seed)
        want = golden.rms_norm(x, scale, bias, variant=variant, return_inverse_rms=True, **options)
        names, arrays, rest = split(options)

        def function(tensors: Any, names: Any = names, rest: Any = rest, variant: str = variant) -> Any:
            x, scale, bias, *arrays = tensors
            options = {**rest, **dict(zip(names, arrays, strict=True)), "variant": variant}
            return rms_norm(x, scale, bias, return_inverse_rms=True, **options)

        modes = ["eager"]
        if dtype in ("bfloat16", "float64") and seed == len(name) % 5:  # the first of the three
            modes.append("unknown sizes" if dtype == "float64" else "compiled, unknown sizes")
        for mode in modes:
            *got, inverse_rms = MODES[mode](function)([*map(to_tf, (x, scale, bias)), *arrays])
            for g, w in zip(got, want[:-1], strict=True):
                check_values(g, w)
            assert ulps(inverse_rms.numpy(), want[-1]).max() <= 1  # in float64 of a rho that is itself rounded


def by_vjp(dy: Any, arrays: list[Any], options: dict[str, Any]) -> Any:
    return rms_norm_vjp(dy, *arrays, **options)[: len(arrays)]


def by_tape(dy: Any, arrays: list[Any], options: dict[str, Any]) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        y = rms_norm(*arrays, **options)
        y = y[0] if isinstance(y, tuple) else y
    return tape.gradient(y, arrays, tf.cast(dy, y.dtype))


def by_graph(dy: Any, arrays: list[Any], options: dict[str, Any]) -> Any:
    return tf.function(lambda dy, arrays: by_tape(dy, arrays, options))(dy, arrays)


def by_compiled_graph(dy: Any, arrays: list[Any], options: dict[str, Any]) -> Any:
    return tf.function(lambda dy, arrays: by_tape(dy, arrays, options), jit_compile=True)(dy, arrays)


def by_tape_outside(dy: Any, arrays: list[Any], options: dict[str, Any]) -> Any:
    """What crosses from the forward to the backward graph is what the function says."""

    def first(*arrays: Any) -> Any:
        y = rms_norm(*arrays, **options)
        return y[0] if isinstance(y, tuple) else y

    function = tf.function(first, input_signature=[tf.TensorSpec([None] * a.shape.rank, a.dtype) for a in arrays])
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        y = function(*arrays)
    return tape.gradient(y, arrays, tf.cast(dy, y.dtype))


def by_gradients(dy: Any, arrays: list[Any], options: dict[str, Any]) -> Any:
    """tf.gradients, which needs a graph."""

    def derived(dy: Any, arrays: Any) -> Any:
        y = rms_norm(*arrays, **options)
        y = y[0] if isinstance(y, tuple) else y
        return tf.gradients(y, arrays, tf.cast(dy, y.dtype))

    return tf.function(derived)(dy, arrays)


GRAPHS = (by_graph, by_compiled_graph, by_tape_outside, by_gradients)


def converted(options: dict[str, Any]) -> dict[str, Any]:
    names, arrays, rest = split(options)
    return {**rest, **dict(zip(names, arrays, strict=True))}


@pytest.mark.parametrize("dtype", MAGNITUDES)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_gradient_is_the_golden(name: str, dtype: str) -> None:
    variants = ("standard", "llama", "gemma", "zhang_torch", "x_transformers", "keras_rms_scaling", "paper")
    for seed, variant in three_of(variants, name):
        x, scale, bias, options = make(OPTIONS[name], dtype, dtype, seed)
        dy = np.random.default_rng(seed).standard_normal(x.shape)
        dy = dy.astype("bfloat16").astype(np.float32).astype("float16").astype(dtype)  # exact in every format
        want = golden.rms_norm_vjp(dy, x, scale, bias, variant=variant, **options)[:3]
        derived, terms = terms_of(x, scale, bias, dy, variant, options)
        graph = dtype == ("bfloat16" if len(name) % 2 else "float64") and seed == len(name) % 7
        for gradients in (by_vjp, by_tape, *([GRAPHS[(len(name) + len(dtype)) % 4]] if graph else [])):
            got = gradients(to_tf(dy), [*map(to_tf, (x, scale, bias))], {**converted(options), "variant": derived})
            for g, w, quantity in zip(got, want, ("dx", "dscale", "dbias"), strict=True):
                check_near(g, w, terms[quantity], 2 * x.size + 32)


def terms_of(x: Any, scale: Any, bias: Any, dy: Any, variant: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """The variant with the partial of the call in it, and the sums of the absolute values of the terms."""
    options = dict(options)
    partial = options.pop("partial", None)
    derived = rmsnorm.Variant.get(variant).replace(partial=partial)
    return derived, yardstick(x, scale, bias, dy=dy, tangents=(dy, None, None), variant=derived, **options)


@pytest.mark.parametrize("dtype", MAGNITUDES)
def test_gradients_at_every_magnitude(dtype: str) -> None:
    for variant, (seed, magnitude) in itertools.product(rmsnorm.PRESETS, enumerate(MAGNITUDES[dtype])):
        x, scale, bias, _ = make({}, dtype, dtype, seed, magnitude)
        dy = np.random.default_rng(seed).standard_normal(x.shape).astype(dtype)
        want = golden.rms_norm_vjp(dy, x, scale, bias, variant=variant)
        _, terms = terms_of(x, scale, bias, dy, variant, {})
        for gradients in (by_vjp, by_tape):
            got = gradients(to_tf(dy), [*map(to_tf, (x, scale, bias))], {"variant": variant})
            for g, w, quantity in zip(got, want, ("dx", "dscale", "dbias"), strict=True):
                check_near(g, w, terms[quantity], 2 * x.size + 32)


@pytest.mark.parametrize("dtype", dtypes.HALF)
def test_half_gradients_are_rounded_once(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((64, 512)).astype(dtype) for _ in range(2))
    scale, bias = (rng.standard_normal(512).astype(dtype) for _ in range(2))
    want = golden.rms_norm_vjp(dy, x, scale, bias, variant="llama")
    for gradients in (by_vjp, by_tape, by_compiled_graph):
        got = gradients(to_tf(dy), [*map(to_tf, (x, scale, bias))], {"variant": "llama"})
        assert all((ulps(g.numpy(), w) == 0).all() for g, w in zip(got, want, strict=True))


def forward_mode(arrays: list[Any], directions: list[Any], options: dict[str, Any]) -> Any:
    with tf.autodiff.ForwardAccumulator(arrays, directions) as accumulator:
        y = rms_norm(*arrays, **options)
        y = y[0] if isinstance(y, tuple) else y
    return accumulator.jvp(y)


@pytest.mark.parametrize("dtype", MAGNITUDES)
@pytest.mark.parametrize("name", OPTIONS)
def test_tangents_are_the_golden(name: str, dtype: str) -> None:
    for seed, variant in three_of(("standard", "llama", "gemma", "zhang_torch", "keras_rms_scaling"), name):
        x, scale, bias, options = make(OPTIONS[name], dtype, dtype, seed)
        rng = np.random.default_rng(seed)
        tangents = [rng.standard_normal(value.shape).astype(dtype) for value in (x, scale, bias)]
        want = golden.rms_norm_jvp((x, scale, bias), tangents, variant=variant, **options)
        plain = {key: value for key, value in options.items() if key != "partial"}
        derived = rmsnorm.Variant.get(variant).replace(partial=options.get("partial"))
        terms = yardstick(x, scale, bias, dy=x, tangents=tangents, variant=derived, **plain)["jvp"]
        arrays, directions = ([*map(to_tf, values)] for values in ((x, scale, bias), tangents))
        given = {**converted(options), "variant": variant}
        check_near(rms_norm_jvp(arrays, directions, **given), want, terms, 2 * x.size + 32)
        # before a product in float32 (out_dtype, bf16 with a residual) tangents are rounded to the dtype of each array
        roundings = 0 if dtype == "float64" else 4 * dtypes.unit_roundoff(dtype) * 2.0**53
        narrow = dtypes.unit_roundoff(want.dtype.name) * 2.0**53
        modes = [forward_mode]
        if dtype == ("bfloat16" if len(name) % 2 else "float64") and seed == len(name) % 5:
            modes.append(lambda a, d, given: tf.function(lambda a, d: forward_mode(a, d, given))(a, d))
        for mode in modes:
            got = mode(arrays, directions, given)
            check_near(got, want, terms, 2 * x.size + 32 + int(max(roundings, 4 * narrow)))


@pytest.mark.parametrize("variant", ["llama", "apex", "t5", "onnx"])
def test_in_graphs_too_a_rounding_is_the_identity_to_a_tangent(variant: str) -> None:
    """There TensorFlow derives the forward pass itself: with its roundings in the products 1 in 4 elements differs."""
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(shape).astype("bfloat16") for shape in ((64, 33), (33,), (33,))]
    tangents = [np.zeros_like(values[0]), *(rng.standard_normal(33).astype("bfloat16") for _ in range(2))]
    want = golden.rms_norm_jvp(values, tangents, variant=variant)
    arrays, directions = [*map(to_tf, values)], [*map(to_tf, tangents)]
    got = tf.function(lambda a, d: forward_mode(a, d, {"variant": variant}))(arrays, directions)
    check_values(got, want)


def test_residual_takes_both_gradients() -> None:
    x, scale, bias, options = make({"residual": "float32"}, "bfloat16", "float32", 0)
    dy, dh = (np.random.default_rng(s).standard_normal(x.shape).astype(np.float32) for s in (1, 2))
    want = golden.rms_norm_vjp((dy, dh), x, scale, bias, variant="llama", **options)
    leaves = [to_tf(value) for value in (x, scale, bias, options["residual"])]
    with tf.GradientTape() as tape:
        tape.watch(leaves)
        y, h = rms_norm(*leaves[:3], residual=leaves[3], variant="llama")
    got = tape.gradient((y, h), leaves, (to_tf(dy), to_tf(dh)))
    direct = rms_norm_vjp((to_tf(dy), to_tf(dh)), *leaves[:3], residual=leaves[3], variant="llama")
    terms = yardstick(x, scale, bias, dy=dy, dh=dh, tangents=(dy, None, None), variant="llama", **options)
    for values, roundings in ((got, 2.0**29), (direct, 0)):  # a tape rounds dx to float32 before it adds dh
        for g, w, quantity in zip(values, want, ("dx", "dscale", "dbias", "dresidual"), strict=True):
            check_near(g, w, terms[quantity], 2 * x.size + 32 + roundings)
    assert h.dtype == tf.float32
    with tf.GradientTape() as tape:
        tape.watch(leaves[3])
        h = rms_norm(*leaves[:3], residual=leaves[3])[1]
    assert (tape.gradient(h, leaves[3]).numpy() == 1).all()


DIFFERENTIABLE: dict[str, dict[str, Any]] = {
    "plain": {},
    "image": {"axis": (1, 2), "feature_axis": 0},
    "partial": {"partial": 0.5},
    "mask": {"mask": True},
    "mask and eps 0": {"mask": True, "eps": 0.0},
    "outside": {"variant": "zhang_torch", "eps": 0.3},
    "clamp": {"variant": "x_transformers", "eps": 3.0},
    "variance": {"variant": "keras_rms_scaling"},
    "offset": {"variant": "gemma", "eps": 0.5},
    "before scale": {"variant": "llama", "mask": True, "partial": 0.5},
}


def small(name: str) -> tuple[Any, list[Any], dict[str, Any]]:
    """A function of (x, scale, bias), its arguments in float64, NaN under the mask, and the golden's options."""
    rng, options = np.random.default_rng(0), dict(DIFFERENTIABLE[name])
    features = (2,) if "feature_axis" in options else (4,)
    arrays = [rng.standard_normal(shape) for shape in ((2, 3, 4), features, features)]
    if "mask" in options:
        options["mask"] = rng.random((2, 3, 4)) > 0.3
        options["mask"][0, 1] = False
        arrays[0] = np.where(options["mask"], arrays[0], np.nan)
    given = converted(options)
    return lambda *args: rms_norm(*args, **given), arrays, options


def directions_of(arrays: list[Any]) -> list[Any]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal(array.shape) for array in arrays]


def gradients_of(function: Any, arrays: Any, v: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        y = function(*arrays)
    return tape.gradient(y, arrays, v)


def backward_over_backward(function: Any, arrays: Any, v: Any, directions: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        first = gradients_of(function, arrays, v)
    return tape.gradient(first, arrays, directions, unconnected_gradients="zero")


def forward_over_backward(function: Any, arrays: Any, v: Any, directions: Any) -> Any:
    with tf.autodiff.ForwardAccumulator(arrays, directions) as accumulator:
        first = gradients_of(function, arrays, v)
    return accumulator.jvp(first, unconnected_gradients="zero")


def backward_over_forward(function: Any, arrays: Any, v: Any, directions: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        with tf.autodiff.ForwardAccumulator(arrays, directions) as accumulator:
            y = function(*arrays)
        tangent = accumulator.jvp(y)
    return tape.gradient(tangent, arrays, v, unconnected_gradients="zero")


NESTINGS = (backward_over_backward, forward_over_backward, backward_over_forward)


def product_with_hessian(arrays: Any, v: Any, directions: Any, options: dict[str, Any]) -> Any:
    """Of <v, y>, by central differences of the golden's gradients, 2^-17 on each side.

    They err by h^2 / 6 of the third derivative and by 2^-53 / h of the gradients: with rows of norm 1 or more and
    directions of size 3 both are below 1e-7 of the largest gradient.
    """
    h = 2.0**-17
    ahead, behind = (
        golden.rms_norm_vjp(v, *(a + s * d for a, d in zip(arrays, directions, strict=True)), **options)
        for s in (h, -h)
    )
    return [(one - other) / (2 * h) for one, other in zip(ahead, behind, strict=True)]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_second_derivatives(name: str) -> None:
    """Three nestings, eagerly and for some in a graph, against differences, and to the last bits against each other."""
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


def test_a_second_derivative_needs_the_recalled_statistic(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the saved 1 / rho held constant the result is another: the test above can tell."""
    function, arrays, options = small("plain")
    directions, v = directions_of(arrays), np.random.default_rng(1).standard_normal((2, 3, 4))
    want = product_with_hessian(arrays, v, directions, options)
    monkeypatch.setattr(functional, "recalled", lambda call, a, mask, inverse_rms: inverse_rms)
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
    for dtype in MAGNITUDES:
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

    def kept(function: Any) -> int:
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

    assert kept(rms_norm) <= 1  # y again: the object that tf.custom_gradient returns a copy of, in the same memory
    assert kept(lambda x: tf.cast(tf.cast(x, tf.float64) * tf.ones(129, tf.float64) * 2, tf.float32)) > 1  # it can tell


def test_only_what_is_asked_for() -> None:
    rng = np.random.default_rng(0)
    values = [tf.constant(rng.standard_normal(shape)) for shape in ((3, 8), (8,), (8,))]
    full = by_tape(tf.ones((3, 8), tf.float64), values, {})
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


def test_variables() -> None:
    rng = np.random.default_rng(0)
    x, scale = (tf.Variable(rng.standard_normal(shape)) for shape in ((3, 8), (8,)))
    for wrap in (lambda f: f, tf.function):
        with tf.GradientTape() as tape:
            y = wrap(lambda: rms_norm(x, scale, variant="gemma"))()
        got = tape.gradient(y, [x, scale], tf.ones_like(y))
        want = golden.rms_norm_vjp(np.ones((3, 8)), x.numpy(), scale.numpy(), variant="gemma")
        for g, w in zip(got, want, strict=False):
            np.testing.assert_allclose(g, w, rtol=2.0**-44, atol=2.0**-44)


@pytest.mark.parametrize("dtype", MAGNITUDES)
def test_nan_inf_and_zero_rows(dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal((6, 5))
    x[0, 1], x[1, 2], x[2, 3], x[3] = np.nan, np.inf, -np.inf, 0
    x = x.astype(dtype)
    scale = np.ones(5, dtype)
    for variant, eps in itertools.product(("standard", "llama", "zhang_torch", "x_transformers"), (None, 0.0)):
        want = golden.rms_norm(x, scale, variant=variant, eps=eps, return_inverse_rms=True)
        got = rms_norm(to_tf(x), to_tf(scale), variant=variant, eps=eps, return_inverse_rms=True)
        for g, w in zip(got, want, strict=True):
            assert ulps(g.numpy(), w).max() <= 1
        assert np.isnan(want[0][3]).all() == (eps == 0)
        dx = by_tape(tf.ones((6, 5), dtype), [to_tf(x)], {"variant": variant, "eps": eps})[0].numpy()
        assert np.isfinite(dx[4:].astype(np.float64)).all()
        if eps is None:  # at q = 0 the direction of a counts as 0
            assert ulps(dx[3], golden.rms_norm_vjp(np.ones_like(x[3]), x[3], variant=variant)[0]).max() <= 1


def test_nothing_under_the_mask_reaches_a_derivative() -> None:
    rng = np.random.default_rng(0)
    x, mask = rng.standard_normal((3, 4, 6)).astype(np.float32), rng.random((3, 4, 6)) > 0.4
    mask[1] = False
    x[2, 0] = np.where(mask[2, 0], 0, x[2, 0])  # 1 / rho is infinite there for eps = 0
    one = tf.ones(6)
    distinct = ("standard", "llama", "zhang_torch", "x_transformers", "keras_rms_scaling", "t5", "gemma")
    for variant, eps, filler in itertools.product(distinct, (None, 0.0), (np.nan, np.inf, 1e38)):
        values = [tf.constant(v) for v in (x, np.where(mask, x, np.float32(filler)))]
        options = {"variant": variant, "eps": eps, "mask": tf.constant(mask)}
        ways: list[Any] = [by_vjp, by_tape]
        if variant in ("llama", "keras_rms_scaling") and np.isnan(filler) and eps == 0:
            ways += [
                by_graph,
                lambda dy, a, o: [tf.function(lambda a: forward_mode(a, a, o))([tf.zeros_like(a[0]), *a[1:]])],
            ]
        for way in ways:
            clean, dirty = (way(tf.ones((3, 4, 6)), [value, one, one], options) for value in values)
            for c, d in zip(clean, dirty, strict=True):
                assert ((c.numpy() == d.numpy()) | (np.isnan(c) & np.isnan(d))).all()
            assert (dirty[0].numpy()[~mask] == 0).all()


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0), (0,), (1,), (3, 1)])
def test_empty_and_single(shape: tuple[int, ...]) -> None:
    for dtype, masked in itertools.product(MAGNITUDES, (False, True)):
        x, scale = np.full(shape, 2.0, dtype), np.full(shape[-1:], 3.0, dtype)
        options = {"mask": np.ones(shape, bool)} if masked else {}
        want = golden.rms_norm(x, scale, return_inverse_rms=True, **options)
        modes = ["eager"] if dtype != "float64" or masked else ["eager", "unknown sizes", "compiled, unknown sizes"]
        for mode in modes:

            def function(tensors: Any) -> Any:
                x, scale, *mask = tensors
                return rms_norm(x, scale, return_inverse_rms=True, mask=mask[0] if mask else None)

            y, inverse_rms = MODES[mode](function)([*map(to_tf, (x, scale, *options.values()))])
            check_values(y, want[0])
            assert ulps(inverse_rms.numpy(), want[1]).max(initial=0) <= 1
        want = golden.rms_norm_vjp(x, x, scale, **options)
        for gradients in (by_vjp, by_tape, *([by_tape_outside] if dtype == "float64" and not masked else [])):
            for g, w in zip(gradients(to_tf(x), [to_tf(x), to_tf(scale)], converted(options)), want, strict=False):
                assert g.shape == w.shape
                # eps = 1e-6 of 4 is left of x x / rho^2 - 1: what float64 rounds there is 2^-53 / 1e-6 of it
                np.testing.assert_allclose(g.numpy().astype("f8"), w.astype("f8"), rtol=2.0**-7, atol=1e-15)


def test_the_number_of_counted_elements_is_exact_where_the_size_is_unknown() -> None:
    """As Variant.counted, by the squares of the first k ones: n 0.07 in floating point counts 8 of 100."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float64)])
    def counted(x: Any) -> Any:
        return [
            rms_norm(x, variant=variant, eps=0.0, partial=partial, return_inverse_rms=True)[1]
            for variant, partial in itertools.product(("paper", "zhang_tf"), (0.07, 0.29, 0.999999999, 1e-9, 1.0))
        ]

    for n in (1, 99, 100, 101, 300, 1234):
        x = 2.0 ** -np.arange(n)  # k is told by the sum, 4/3 (1 - 4^-k) / k
        got = counted(tf.constant(x))
        for y, (variant, partial) in zip(
            got, itertools.product(("paper", "zhang_tf"), (0.07, 0.29, 0.999999999, 1e-9, 1.0)), strict=True
        ):
            want = golden.rms_norm(x, variant=variant, eps=0.0, partial=partial, return_inverse_rms=True)[1]
            assert ulps(y.numpy(), want).max() <= 1


def test_one_rounding_to_16_bits() -> None:
    rng = np.random.default_rng(0)
    wide = rng.standard_normal(50_000) * np.logspace(-30, 40, 50_000)
    exact = [rng.standard_normal(50_000).astype(dtype).astype(np.float64) for dtype in dtypes.HALF]
    ties = [v + 2.0 ** np.frexp(v)[1] * dtypes.epsilon(d) / 4 for v, d in zip(exact, dtypes.HALF, strict=True)]
    tie = np.concatenate(ties) * (1 + 1e-14 * rng.standard_normal(100_000))
    edges = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-60,
        1e300,
        65519.999999999,
        65520.0,
        3.3961775292304957e38,
        3e-8,
        6e-8,
    ]
    values = np.concatenate([wide, tie, edges])
    for dtype in dtypes.HALF:
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


@pytest.mark.parametrize("mode", MODES)
def test_what_float64_rounds_off(mode: str) -> None:
    """In exact fractions, whatever a compiler contracts.

    The halves have 26 and 27 bits, the lower at most 2^-25 of the whole: of a b - fl(a b) at most three roundings are
    lost, each 2^-53 of 2^-24 |a b|; of a^2 two, each 2^-53 of 2^-24 a^2, and of the sum 16 n^2 2^-106 of it.
    """
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 200))
    product, error = MODES[mode](lambda t: (t[0] * t[1], product_error(t[0], t[1], t[0] * t[1])))([*map(to_tf, (a, b))])
    for x, y, p, e in zip(a, b, product.numpy(), error.numpy(), strict=True):
        assert abs(Fraction(x) * Fraction(y) - Fraction(float(p)) - Fraction(float(e))) <= abs(x * y) * 2.0**-75
    rows = rng.standard_normal((5, 300)) * 10.0 ** rng.integers(-6, 0, (5, 300))
    total, error = MODES[mode](lambda t: sum_of_squares(t[0], (1,)))([to_tf(rows)])
    for row, t, e in zip(rows, total.numpy()[:, 0], error.numpy()[:, 0], strict=True):
        want = sum(Fraction(x) ** 2 for x in row)
        assert abs(want - Fraction(float(t)) - Fraction(float(e))) <= want * 2.0**-75
        assert abs(want - Fraction(float(t))) <= want * 2.0**-52


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
    check_values(y, golden.rms_norm(x, scale, variant="llama", partial=0.5))
    want = golden.rms_norm_vjp(np.ones_like(x), x, scale, variant="llama", partial=0.5)
    for g, w in zip(tape.gradient(y, tensors), want, strict=False):
        assert ulps(g.numpy(), w).max() <= 1


def test_errors_name_the_tensor() -> None:
    x, words = tf.ones((4, 16)), "convert it with tf.convert_to_tensor"
    cases: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        (
            (np.ones((4, 16), np.float32),),
            {},
            TypeError,
            rf"(?s)rms_norm: x is array\(.*\(ndarray\), expected a tf.Tensor; {words}",
        ),
        (([1.0],), {}, TypeError, rf"rms_norm: x is \[1.0\] \(list\), expected a tf.Tensor; {words}"),
        ((None,), {}, TypeError, rf"rms_norm: x is None \(NoneType\), expected a tf.Tensor; {words}"),
        ((x, 1.0), {}, TypeError, rf"rms_norm: scale is 1.0 \(float\), expected a tf.Tensor; {words}"),
        ((x,), {"mask": True}, TypeError, r"rms_norm: mask is True \(bool\), expected a tf.Tensor"),
        ((tf.ragged.constant([[1.0], [1.0, 2.0]]),), {}, TypeError, r"rms_norm: x is <tf.RaggedTensor"),
        (
            (tf.ones((4, 16), tf.int32),),
            {},
            TypeError,
            "rms_norm: x has dtype int32, expected float16, bfloat16, float32",
        ),
        ((tf.ones((4, 16), tf.complex64),), {}, TypeError, "rms_norm: x has dtype complex64, expected float16"),
        (
            (x, tf.ones(8)),
            {},
            ValueError,
            r"scale has shape \(8,\), expected \(16,\) to match axis -1 of x f32\[4, 16\]",
        ),
        ((x,), {"out_dtype": tf.int32}, ValueError, "rms_norm: out_dtype is 'int32', expected 'float16'"),
        ((x,), {"mask": tf.ones((4, 16))}, TypeError, "rms_norm: mask has dtype float32, expected bool"),
        ((tf.constant(1.0),), {}, ValueError, "rms_norm: x is 0-d, expected at least one axis"),
    ]
    for arguments, options, error, match in cases:
        with pytest.raises(error, match=match):
            rms_norm(*arguments, **options)
    assert rms_norm(x, out_dtype=tf.float64).dtype == rms_norm(x, out_dtype="float64").dtype == tf.float64


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


def test_the_functions_load_no_layer() -> None:
    """rmsnorm.tf_impl alone imports neither framework; the functions import no layer of Keras."""
    code = (
        "import sys, rmsnorm.tf_impl as wing; assert not {'tensorflow', 'keras'} & set(sys.modules); "
        "wing.rms_norm; assert 'tensorflow' in sys.modules and 'rmsnorm.tf_impl.layers' not in sys.modules; "
        "wing.RMSNormalization; assert 'rmsnorm.tf_impl.layers' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
