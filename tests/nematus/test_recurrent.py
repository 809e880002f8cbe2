"""The golden of the recurrent cells: against their equations, and against each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nematus_cells import BATCH, NORMS, sequence, weights_of

from rmsnorm.nematus.numpy.parameters import EPS, Parameters, normalise
from rmsnorm.nematus.numpy.recurrent import lstm, nematus_gru
from rmsnorm.numpy_impl import rms_norm
from rmsnorm.numpy_impl.paper import norms

U = 2.0**-53


@pytest.mark.parametrize("norm", ["layer", "rms", "prms"])
def test_the_norm_is_the_goldens(norm: str) -> None:
    """Sums of 12 squares and some ten operations more: 64 roundings cover it, of terms that do not cancel."""
    rng = np.random.default_rng(6)
    for magnitude in (1.0, 1e-3):  # at the second eps shows
        a, gain = magnitude * rng.standard_normal((7, 12)), rng.uniform(0.5, 2.0, 12)
        y = normalise(Parameters({"g": gain}, norm, partial=0.3), a, "g", "b")  # type: ignore[arg-type]
        wanted = norms.layer_norm(a, gain, np.zeros(12), eps=EPS)
        if norm != "layer":
            wanted = rms_norm(a, gain, variant="theano", partial=0.3 if norm == "prms" else None)
        np.testing.assert_allclose(y, wanted, rtol=64 * U, atol=64 * U)


def test_what_a_mask_does() -> None:
    x, h0, _ = sequence()
    weights = weights_of("nematus_gru", "rms", ("input",))
    mask = np.array([1.0, 1, 0, 1, 0])[:, None] * np.ones(BATCH)
    carried = nematus_gru(x, h0, weights, mask=mask, masking="carry", norm="rms")
    np.testing.assert_array_equal(carried[2], carried[1])
    np.testing.assert_array_equal(carried[[0, 1, 3]], nematus_gru(x[[0, 1, 3]], h0, weights, norm="rms"))
    zeroed = nematus_gru(x, h0, weights, mask=mask, masking="zero", norm="rms")
    assert not zeroed[[2, 4]].any()
    np.testing.assert_array_equal(zeroed[3], nematus_gru(x[3:4], 0 * h0, weights, norm="rms")[0])
    turned = nematus_gru(x[::-1], h0, weights, norm="rms", reverse=True)[::-1]
    np.testing.assert_array_equal(turned, nematus_gru(x, h0, weights, norm="rms"))


@pytest.mark.parametrize("norm", NORMS)
def test_float32_stays_float32_and_inputs_stay_as_they_are(norm: Any) -> None:
    x, h0, mask = (array.astype(np.float32) for array in sequence())
    weights = {name: value.astype(np.float32) for name, value in weights_of("lstm", norm).items()}
    before = [array.tobytes() for array in (x, h0, mask, *weights.values())]
    h, c = lstm(x, h0, h0, weights, mask=mask.astype(np.float64), norm=norm)
    assert h.dtype == c.dtype == np.float32
    assert [array.tobytes() for array in (x, h0, mask, *weights.values())] == before


@pytest.mark.parametrize("bias", ["input", "state", "outside", "none"])
def test_a_step_is_its_equation(bias: Any) -> None:
    """r, u = sigmoid(norm(h U) + norm(x W)), h' = u h + (1 - u) tanh(r norm(h Ux) + norm(x Wx)), b where it is said."""
    x, h0, _ = sequence()
    weights = weights_of("nematus_gru", "rms", (bias,))

    def part(side: str, name: str, value: Any) -> Any:
        a = value @ weights[f"gru0/{side}_to_{name}"] + (weights[f"gru0/{name}_bias"] if bias == side else 0)
        gain = weights[f"gru0/{name}_{'x' if side == 'input' else 'state'}_norm/scale"]
        return rms_norm(a, gain, variant="nematus")

    gates, proposal = (part("input", name, x[0]) for name in ("gates", "proposal"))
    if bias == "outside":
        gates, proposal = gates + weights["gru0/gates_bias"], proposal + weights["gru0/proposal_bias"]
    r, u = np.split(1 / (1 + np.exp(-gates - part("state", "gates", h0))), 2, axis=-1)
    wanted = u * h0 + (1 - u) * np.tanh(r * part("state", "proposal", h0) + proposal)
    h = nematus_gru(x[:1], h0, weights, biases=(bias,), norm="rms")[0]
    np.testing.assert_allclose(h, wanted, rtol=0, atol=1e-13)  # some 100 roundings of numbers below 10
