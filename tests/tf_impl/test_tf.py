"""The TensorFlow functions against the golden, and everything TensorFlow may do with them."""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import pytest
from options import MAGNITUDES, OPTIONS

import rmsnorm
from rmsnorm import dtypes
from rmsnorm import numpy_impl as golden
from rmsnorm.accuracy.terms import term_sizes
from rmsnorm.accuracy.ulps import ulps

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow")

from tf_arrays import MODES, converted, make, split, to_tf  # noqa: E402
from tf_checks import check_near, check_values  # noqa: E402
from tf_gradients import GRAPHS, by_compiled_graph, by_tape, by_vjp, forward_mode  # noqa: E402

from rmsnorm.tf_impl import rms_norm, rms_norm_jvp, rms_norm_vjp  # noqa: E402

tf.get_logger().setLevel("ERROR")  # each case traces its own function, which TensorFlow warns of


def three_of(variants: tuple[str, ...], name: str) -> list[tuple[int, str]]:
    """The cases of the options share the variants out: three for each, with the seeds of their data."""
    return [((len(name) + i) % len(variants), variants[(len(name) + i) % len(variants)]) for i in range(3)]


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
        ("eager", "bfloat16"),
        ("eager", "float64"),
        ("graph", "bfloat16"),
        ("unknown sizes", "float64"),
        ("compiled, unknown sizes", "bfloat16"),
    ],
)
@pytest.mark.sample(3)
def test_every_variant_is_the_golden(mode: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    few = ["llama", "gemma", "zhang_torch", "keras_rms_scaling"]
    variants = list(rmsnorm.PRESETS) if mode == "eager" else few

    def function(tensors: Any) -> Any:
        x, scale, bias = tensors
        return [(rms_norm(x, scale, bias, variant=v), rms_norm(x, scale, variant=v), rms_norm(x)) for v in variants]

    for index, magnitude in enumerate(MAGNITUDES[dtype][: None if mode == "eager" else 1]):
        parameters = ("float32", dtype)[index % 2] if mode == "eager" else dtype
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])  # of the others test_interface has cases
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_the_golden(name: str, dtype: str) -> None:
    for seed, variant in three_of(("standard", "llama", "gemma", "zhang_torch", "t5"), name):
        parameters = (dtype, "float32")[(seed + len(name)) % 2]  # all pairs of formats are test_interface's
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])  # of the others test_interface has cases
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])  # of the others test_interface has cases
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
