"""The golden of the recurrent cells: against the authors' own, against differences, and against each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nematus_models import DATA, check_directions

from rmsnorm.nematus.numpy.parameters import EPS, Parameters, normalise
from rmsnorm.nematus.numpy.recurrent import gru, gru_vjp, lstm, lstm_vjp, nematus_gru, nematus_gru_vjp
from rmsnorm.numpy_impl import norms, rms_norm

U = 2.0**-53
LENGTH, BATCH, SIZE, STATE = 5, 3, 4, 6
NORMS = ["none", "layer", "rms", "prms"]


def sequence(seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((LENGTH, BATCH, SIZE))
    return x, rng.standard_normal((BATCH, STATE)), rng.uniform(0.1, 0.9, (LENGTH, BATCH))


def theano_weights(cell: str, norm: str) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    wide = {"gru": 2 * STATE, "lstm": 4 * STATE}[cell]
    shapes: dict[str, tuple[int, ...]] = {"W": (SIZE, wide), "U": (STATE, wide), "b": (wide,)}
    widths = [wide, wide, STATE]
    if cell == "gru":
        shapes |= {"Wx": (SIZE, STATE), "Ux": (STATE, STATE), "bx": (STATE,)}
        widths = [wide, STATE, wide, STATE]
    for index, width in enumerate(widths, start=1):
        if norm != "none":
            shapes[f"s{index}"] = (width,)
        if norm == "layer":
            shapes[f"b{index}"] = (width,)
    return {name: rng.standard_normal(shape) * 0.7 + name.startswith("s") for name, shape in shapes.items()}


def nematus_weights(norm: str, biases: tuple[str, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(4)
    found: dict[str, Any] = {}
    for index, bias in enumerate(biases):
        for side, rows in (("state", STATE), ("input", SIZE))[: 1 if index else 2]:
            for part, width in (("gates", 2 * STATE), ("proposal", STATE)):
                found[f"gru{index}/{side}_to_{part}"] = rng.standard_normal((rows, width)) * 0.6
                scope = f"gru{index}/{part}_{'x' if side == 'input' else 'state'}_norm/"
                if norm != "none":
                    found[scope + ("new_std" if norm == "layer" else "scale")] = rng.uniform(0.5, 1.5, width)
                if norm == "layer":
                    found[scope + "new_mean"] = rng.standard_normal(width) * 0.3
        if bias != "none":
            found[f"gru{index}/gates_bias"] = rng.standard_normal(2 * STATE) * 0.5
            found[f"gru{index}/proposal_bias"] = rng.standard_normal(STATE) * 0.5
    return found


@pytest.mark.parametrize(("name", "norm"), [("gru", "none"), ("rlngru", "rms"), ("rlnlstm", "rms")])
def test_the_authors_cells(name: str, norm: str) -> None:
    """Theano in float64, with a mask of fractions: outputs and gradients."""
    with np.load(DATA / "C1.npz", allow_pickle=False) as archive:
        held = {key.split("/")[1]: value for key, value in archive.items() if key.startswith(f"{name}/")}
    weights = {key.removeprefix("param_"): value for key, value in held.items() if key.startswith("param_")}
    x, h0, mask = held["x"], held["h0"], held["mask_fractional"]
    if name == "rlnlstm":
        c0 = held["c0"]
        h, c = lstm(x, h0, c0, weights, mask=mask, norm=norm)
        dx, dh0, dc0, gradients = lstm_vjp(
            held["cotangent_h"], held["cotangent_c"], x, h0, c0, weights, mask=mask, norm=norm
        )
        found = {"h_fractional": h, "c_fractional": c, "grad_fractional_c0": dc0}
        bare = lstm(x, 0 * h0, 0 * c0, weights, norm=norm)[0]
    else:
        found = {"h_fractional": gru(x, h0, weights, mask=mask, norm=norm)}
        dx, dh0, gradients = gru_vjp(held["cotangent_h"], x, h0, weights, mask=mask, norm=norm)
        bare = gru(x, 0 * h0, weights, norm=norm)
    found |= {"grad_fractional_x": dx, "grad_fractional_h0": dh0, "h_nomask_zeroinit": bare}
    found |= {f"grad_fractional_param_{key}": value for key, value in gradients.items()}
    assert gradients.keys() == weights.keys()
    for key, value in found.items():
        np.testing.assert_allclose(value, held[key], rtol=1e-12, atol=1e-12, err_msg=key)


@pytest.mark.parametrize("norm", NORMS)
def test_theano_gradients_are_those_of_differences(norm: str) -> None:
    x, h0, mask = sequence()
    rng = np.random.default_rng(5)
    c0, dh, dc = rng.standard_normal((BATCH, STATE)), *rng.standard_normal((2, LENGTH, BATCH, STATE))
    inputs = {"x": x, "h0": h0}
    weights = theano_weights("gru", norm)

    def through_gru(given: dict[str, Any]) -> float:
        own = {name: given[name] for name in weights}
        return (dh * gru(given["x"], given["h0"], own, mask=mask, norm=norm, partial=0.4)).sum()

    dx, dh0, gradients = gru_vjp(dh, x, h0, weights, mask=mask, norm=norm, partial=0.4)
    check_directions(through_gru, weights | inputs, gradients | {"x": dx, "h0": dh0})

    cells = theano_weights("lstm", norm)

    def through_lstm(given: dict[str, Any]) -> float:
        own = {name: given[name] for name in cells}
        h, c = lstm(given["x"], given["h0"], given["c0"], own, mask=mask, norm=norm, partial=0.4)
        return (dh * h).sum() + (dc * c).sum()

    dx, dh0, dc0, gradients = lstm_vjp(dh, dc, x, h0, c0, cells, mask=mask, norm=norm, partial=0.4)
    check_directions(through_lstm, cells | inputs | {"c0": c0}, gradients | {"x": dx, "h0": dh0, "c0": dc0})


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("biases", "options"),
    [
        (("input",), {}),
        (("state", "state"), {"masking": "carry"}),
        (("input", "none"), {"masking": "zero", "reverse": True}),
        (("input", "outside", "outside"), {"masking": "carry", "reverse": True}),
    ],
)
def test_nematus_gradients_are_those_of_differences(norm: str, biases: Any, options: dict[str, Any]) -> None:
    x, h0, mask = sequence()
    dh = np.random.default_rng(5).standard_normal((LENGTH, BATCH, STATE))
    weights = nematus_weights(norm, biases)
    options = {"biases": biases, "norm": norm, "partial": 0.4, "mask": mask if options else None, **options}

    def through(given: dict[str, Any]) -> float:
        own = {name: given[name] for name in weights}
        return (dh * nematus_gru(given["x"], given["h0"], own, **options)).sum()

    dx, dh0, gradients = nematus_gru_vjp(dh, x, h0, weights, **options)
    check_directions(through, weights | {"x": x, "h0": h0}, gradients | {"x": dx, "h0": dh0})


@pytest.mark.parametrize("norm", ["layer", "rms", "prms"])
@pytest.mark.parametrize("magnitude", [1.0, 1e-3])  # at the second eps shows
def test_the_norm_is_the_goldens(norm: str, magnitude: float) -> None:
    """Sums of 12 squares and some ten operations more: 64 roundings cover it, of terms that do not cancel."""
    rng = np.random.default_rng(6)
    a, gain = magnitude * rng.standard_normal((7, 12)), rng.uniform(0.5, 2.0, 12)
    found, _ = normalise(Parameters({"g": gain}, norm, partial=0.3), a, "g", "b")
    if norm == "layer":
        wanted = norms.layer_norm(a, gain, np.zeros(12), eps=EPS)
    else:
        wanted = rms_norm(a, gain, variant="theano", partial=0.3 if norm == "prms" else None)
    np.testing.assert_allclose(found, wanted, rtol=64 * U, atol=64 * U)


def test_what_a_mask_does() -> None:
    x, h0, _ = sequence()
    weights = nematus_weights("rms", ("input",))
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
def test_float32_stays_float32_and_inputs_stay_as_they_are(norm: str) -> None:
    x, h0, mask = (each.astype(np.float32) for each in sequence())
    weights = {name: value.astype(np.float32) for name, value in theano_weights("lstm", norm).items()}
    before = [each.tobytes() for each in (x, h0, mask, *weights.values())]
    h, c = lstm(x, h0, h0, weights, mask=mask.astype(np.float64), norm=norm)
    gradients = lstm_vjp(h, c, x, h0, h0, weights, mask=mask, norm=norm)
    found = [h, c, *gradients[:3], *gradients[3].values()]
    assert {each.dtype for each in found} == {np.dtype(np.float32)}
    assert [each.tobytes() for each in (x, h0, mask, *weights.values())] == before


def test_an_unknown_norm() -> None:
    x, h0, _ = sequence()
    with pytest.raises(ValueError, match=r"norm is 'batch', expected 'none', 'layer', 'rms' or 'prms'"):
        gru(x, h0, theano_weights("gru", "none"), norm="batch")  # type: ignore[arg-type]


@pytest.mark.parametrize("bias", ["input", "state", "outside", "none"])
def test_a_step_is_its_equation(bias: str) -> None:
    """r, u = sigmoid(norm(h U) + norm(x W)), h' = u h + (1 - u) tanh(r norm(h Ux) + norm(x Wx)), b where it is said."""
    x, h0, _ = sequence()
    weights = nematus_weights("rms", (bias,))

    def part(side: str, name: str, value: Any) -> Any:
        a = value @ weights[f"gru0/{side}_to_{name}"]
        if bias == side:
            a = a + weights[f"gru0/{name}_bias"]
        scope = f"gru0/{name}_{'x' if side == 'input' else 'state'}_norm/scale"
        return rms_norm(a, weights[scope], variant="nematus")

    gates, proposal = (part("input", name, x[0]) for name in ("gates", "proposal"))
    if bias == "outside":
        gates, proposal = gates + weights["gru0/gates_bias"], proposal + weights["gru0/proposal_bias"]
    r, u = np.split(1 / (1 + np.exp(-gates - part("state", "gates", h0))), 2, axis=-1)
    wanted = u * h0 + (1 - u) * np.tanh(r * part("state", "proposal", h0) + proposal)
    found = nematus_gru(x[:1], h0, weights, biases=(bias,), norm="rms")[0]  # type: ignore[arg-type]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-13)  # some 100 roundings of numbers below 10
