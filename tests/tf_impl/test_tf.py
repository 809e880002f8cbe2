"""The TensorFlow functions against the golden, and everything TensorFlow may do with them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rmsnorm
from rmsnorm import dtypes
from rmsnorm import numpy_impl as golden
from rmsnorm.accuracy.terms import term_sizes

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow")

from rmsnorm.tf_impl import rms_norm, rms_norm_jvp, rms_norm_vjp  # noqa: E402

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
    """One rounding each of the two, and what the arithmetic rounds: its u of the terms' absolute sum for an operation.

    That is float64, but between 16 bits float32. TensorFlow's kernels take subnormal numbers as 0, which costs up to
    the smallest normal one; in f16 it does not.
    """
    got, dtype = got.numpy(), want.dtype.name
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    tiny = dtypes.smallest_subnormal(dtype) if dtype == "float16" else float(ml_dtypes.finfo(dtype).smallest_normal)
    got, want = got.astype(np.float64), want.astype(np.float64)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(all="ignore"):
        u = 2.0**-24 if dtype in dtypes.HALF else 2.0**-53
        near = np.abs(got - want) <= 2 * dtypes.unit_roundoff(dtype) * np.abs(want) + tiny + count * u * terms
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
    return derived, term_sizes(x, scale, bias, dy=dy, tangents=(dy, None, None), variant=derived, **options)


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
        for g, w in zip(got, want, strict=True):
            # float32 is 13 or 16 bits finer: some 10 of its roundings move 1 number in 800 to the next, or 2 of few
            apart = ulps(g.numpy(), w)
            assert (apart > 0).sum() <= max(2, apart.size * 10 * 2.0**-13)


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
        terms = term_sizes(x, scale, bias, dy=x, tangents=tangents, variant=derived, **plain)["jvp"]
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
    terms = term_sizes(x, scale, bias, dy=dy, dh=dh, tangents=(dy, None, None), variant="llama", **options)
    for values, roundings in ((got, 2.0**29), (direct, 0)):  # a tape rounds dx to float32 before it adds dh
        for g, w, quantity in zip(values, want, ("dx", "dscale", "dbias", "dresidual"), strict=True):
            check_near(g, w, terms[quantity], 2 * x.size + 32 + roundings)
    assert h.dtype == tf.float32
    with tf.GradientTape() as tape:
        tape.watch(leaves[3])
        h = rms_norm(*leaves[:3], residual=leaves[3])[1]
    assert (tape.gradient(h, leaves[3]).numpy() == 1).all()
