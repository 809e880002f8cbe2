"""A gate, y * f(z) or the norm of x * f(z), where numbers are not ordinary; and its tangents."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rmsnorm import numpy_impl
from rmsnorm.numpy_impl import fast
from rmsnorm.specification.variants import Variant

FUNCTIONS, POSITIONS = ("silu", "sigmoid"), ("after", "before")
GATES = list(itertools.product(FUNCTIONS, POSITIONS))


def gated(variant, function, position):
    return Variant.get(variant).replace(gate_function=function, gate_position=position)


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


def test_the_square_of_x_times_a_gate_is_in_range(framework, engine):
    """6e20 in float32, from x in float16."""
    x, z = np.full((2, 8), 6e4, "float16"), np.full((2, 8), 1e16, "float32")
    assert framework.rms_norm(x, gate=z, variant=gated("standard", "silu", "before")).tolist() == [[1.0] * 8] * 2


@pytest.mark.parametrize("place", [numpy_impl, fast])
@pytest.mark.parametrize(("position", "partial"), [("before", 0.5), ("after", None)])
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


@pytest.mark.parametrize(("function", "position"), GATES)
def test_the_tangents_of_residual_and_gate_are_the_transpose_of_their_gradients(function, position):
    """<dy, J t> = <J^T dy, t> in float64, for each argument alone and for all together, with a mask."""
    random = np.random.default_rng(0)
    variant = gated("gemma", function, position).replace(residual_rounding="after")
    x, residual, z, dy, *along = random.normal(size=(7, 5, 12))
    gain, bias, dgain, dbias = random.normal(size=(4, 12))
    arrays = {"variant": variant, "residual": residual, "gate": z, "mask": random.random((5, 12)) < 0.7}
    dx, dscale, dshift, dresidual, dgate = numpy_impl.rms_norm_vjp(dy, x, gain, bias, **arrays)
    tangents = [along[0], dgain, dbias, along[1], along[2]]
    parts = []
    for i, (tangent, gradient) in enumerate(zip(tangents, (dx, dscale, dshift, dresidual, dgate), strict=True)):
        alone = [tangent if i == j else None for j in range(5)]
        forward = np.sum(dy * numpy_impl.rms_norm_jvp((x, gain, bias), alone, **arrays))
        assert np.isclose(forward, np.sum(gradient * tangent), rtol=1e-12, atol=1e-12), i
        parts.append(forward)
    whole = np.sum(dy * numpy_impl.rms_norm_jvp((x, gain, bias), tangents, **arrays))
    assert np.isclose(whole, np.sum(parts), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="dgate is given without gate"):
        numpy_impl.rms_norm_jvp((x,), (None, None, None, None, z))
