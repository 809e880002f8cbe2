"""The recurrent cells of Flax: against the authors' own, against the golden, and as modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from nematus_models import DATA
from test_recurrent import BATCH, LENGTH, NORMS, SIZE, STATE, nematus_weights, sequence, theano_weights

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

from flax import nnx  # noqa: E402
from jax import numpy as jnp  # noqa: E402

from rmsnorm.nematus.flax import recurrent, recurrent_layers  # noqa: E402
from rmsnorm.nematus.numpy import recurrent as golden  # noqa: E402

EXACT = 1e-12  # two float64 computations of one thing in another order, of numbers below 10
SINGLE = 2e-5  # float32: some hundred roundings of such numbers
CASES: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("prms", ("input",), {}),
    ("none", ("input", "none"), {"masking": "zero"}),
    ("rms", ("state", "state"), {"masking": "carry"}),
    ("rms", ("input", "none"), {"masking": "zero", "reverse": True}),
    ("layer", ("input", "outside", "outside"), {"masking": "carry", "reverse": True}),
]


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def _x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def close(found: Any, wanted: Any, name: str = "") -> None:
    bound = EXACT if found.dtype == np.float64 else SINGLE
    np.testing.assert_allclose(found, wanted, rtol=0, atol=bound * max(1.0, abs(wanted).max()), err_msg=name)


def pulled_back(function: Any, dys: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    """Outputs and gradients of a compiled function."""

    def both(dys: Any, arguments: Any) -> Any:
        outputs, pullback = jax.vjp(function, *arguments)
        return outputs, pullback(dys if isinstance(outputs, tuple) else dys[0])

    return jax.jit(both)(dys, arguments)


@pytest.mark.usefixtures("_x64")
@pytest.mark.parametrize(("name", "norm"), [("gru", "none"), ("rlngru", "rms"), ("rlnlstm", "rms")])
def test_the_authors_cells(name: str, norm: Any) -> None:
    """Theano in float64, with a mask of fractions: outputs and gradients."""
    with np.load(DATA / "C1.npz", allow_pickle=False) as archive:
        held = {key.split("/")[1]: value for key, value in archive.items() if key.startswith(f"{name}/")}
    weights = {key.removeprefix("param_"): held[key] for key in held if key.startswith("param_")}
    x, h0, mask = held["x"], held["h0"], held["mask_fractional"]
    if name == "rlnlstm":
        given = (x, h0, held["c0"], weights)
        dys = (held["cotangent_h"], held["cotangent_c"])
        (h, c), gradients = pulled_back(lambda *a: recurrent.lstm(*a, mask=mask, norm=norm), dys, *given)
        found = {"h_fractional": h, "c_fractional": c, "grad_fractional_c0": gradients[2]}
        bare = recurrent.lstm(x, 0 * h0, 0 * h0, weights, norm=norm)[0]
    else:
        dys = (held["cotangent_h"],)
        h, gradients = pulled_back(lambda *a: recurrent.gru(*a, mask=mask, norm=norm), dys, x, h0, weights)
        found = {"h_fractional": h}
        bare = recurrent.gru(x, 0 * h0, weights, norm=norm)
    found |= {"grad_fractional_x": gradients[0], "grad_fractional_h0": gradients[1], "h_nomask_zeroinit": bare}
    found |= {f"grad_fractional_param_{key}": value for key, value in gradients[-1].items()}
    for key, value in found.items():
        np.testing.assert_allclose(value, held[key], rtol=EXACT, atol=EXACT, err_msg=key)


@pytest.mark.parametrize("norm", NORMS)
def test_the_theano_cells_are_the_goldens(norm: Any) -> None:
    x, h0, mask = sequence()
    rng = np.random.default_rng(5)
    c0, dh, dc = rng.standard_normal((BATCH, STATE)), *rng.standard_normal((2, LENGTH, BATCH, STATE))
    options: dict[str, Any] = {"norm": norm, "partial": 0.4}
    with jax.enable_x64(norm != "prms"):
        weights = theano_weights("gru", norm)
        h, found = pulled_back(lambda *a: recurrent.gru(*a, mask=mask, **options), single(dh), *single(x, h0, weights))
        close(h, golden.gru(x, h0, weights, mask=mask, **options))
        compare(found, golden.gru_vjp(dh, x, h0, weights, mask=mask, **options))

        weights = theano_weights("lstm", norm)
        given = single(x, h0, c0, weights)
        states, found = pulled_back(lambda *a: recurrent.lstm(*a, mask=mask, **options), single(dh, dc), *given)
        for each, wanted in zip(states, golden.lstm(x, h0, c0, weights, mask=mask, **options), strict=True):
            close(each, wanted)
        compare(found, golden.lstm_vjp(dh, dc, x, h0, c0, weights, mask=mask, **options))


def single(*values: Any) -> Any:
    """As JAX takes them: float32 where x64 is off."""
    return jax.tree.map(jnp.asarray, values)


def compare(found: Any, wanted: Any) -> None:
    *inputs, parameters = found
    *others, gradients = wanted
    for each, other in zip(inputs, others, strict=True):
        close(each, other)
    assert parameters.keys() == gradients.keys()
    for name, gradient in gradients.items():
        close(parameters[name], gradient, name)


@pytest.mark.parametrize(("norm", "biases", "masking"), CASES)
def test_nematus_gru_is_the_goldens(norm: Any, biases: Any, masking: dict[str, Any]) -> None:
    """In float64; with RMSNorm in float32, which XLA compiles in a tenth of the time."""
    x, h0, mask = sequence()
    dh = np.random.default_rng(5).standard_normal((LENGTH, BATCH, STATE))
    weights = nematus_weights(norm, biases)
    options: dict[str, Any] = {"biases": biases, "norm": norm, "partial": 0.4, **masking}
    given = mask if masking else None
    with jax.enable_x64(norm in ("none", "layer")):
        h, found = pulled_back(
            lambda *a: recurrent.nematus_gru(*a, mask=given, **options), single(dh), *single(x, h0, weights)
        )
        close(h, golden.nematus_gru(x, h0, weights, mask=given, **options))
        compare(found, golden.nematus_gru_vjp(dh, x, h0, weights, mask=given, **options))


def test_the_modules_are_the_functions_of_their_parameters() -> None:
    """Loaded with weights by their names, where a slash is a module; a state that is not given is zero."""
    x, h0, mask = single(*sequence())
    norm = "prms"
    own: dict[str, Any] = {"norm": norm, "partial": 0.4}
    biases: Any = ("input", "outside")
    extra: dict[str, Any] = {"biases": biases, "masking": "carry", "reverse": True}
    rngs = nnx.Rngs(0)
    cells = {
        "gru": (recurrent_layers.GRU(SIZE, STATE, **own, rngs=rngs), theano_weights("gru", norm)),
        "lstm": (recurrent_layers.LSTM(SIZE, STATE, **own, rngs=rngs), theano_weights("lstm", norm)),
        "nematus": (recurrent_layers.NematusGRU(SIZE, STATE, **own, **extra, rngs=rngs), nematus_weights(norm, biases)),
    }
    for cell, weights in cells.values():
        assert cell.by_name().keys() == weights.keys()
        flat = [(tuple(name.split("/")), nnx.Param(jnp.asarray(value))) for name, value in weights.items()]
        nnx.update(cell, nnx.from_flat_state(flat))
    layer, weights = cells["gru"]
    wanted = recurrent.gru(x, h0, *single(weights), mask=mask, **own)
    np.testing.assert_array_equal(layer(x, h0, mask), wanted)
    np.testing.assert_array_equal(layer(x), recurrent.gru(x, 0 * h0, *single(weights), **own))
    layer, weights = cells["lstm"]
    wanted = recurrent.lstm(x, h0, 2 * h0, *single(weights), mask=mask, **own)
    np.testing.assert_array_equal(layer(x, (h0, 2 * h0), mask), wanted)
    np.testing.assert_array_equal(layer(x), recurrent.lstm(x, 0 * h0, 0 * h0, *single(weights), **own))
    layer, weights = cells["nematus"]
    wanted = recurrent.nematus_gru(x, h0, *single(weights), mask=mask, **own, **extra)
    np.testing.assert_array_equal(layer(x, h0, mask), wanted)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cell", ["GRU", "LSTM", "NematusGRU"])
def test_what_a_new_module_holds(cell: str, norm: Any) -> None:
    """As Nematus begins: orthogonal squares for the state, small numbers for the input, gains 1, all else 0."""
    layer = getattr(recurrent_layers, cell)(SIZE, STATE, norm=norm, rngs=nnx.Rngs(0))
    values = layer.by_name()
    for name, value in values.items():
        leaf = name.rpartition("/")[2]
        if value.ndim == 1:
            assert (value == float(leaf in ("scale", "new_std") or leaf[0] == "s")).all(), name
        elif value.shape[0] == STATE:
            squares = np.split(np.asarray(value), value.shape[1] // STATE, axis=1)
            for square in squares:
                np.testing.assert_allclose(square.T @ square, np.eye(STATE), rtol=0, atol=1e-5)
            assert len({square.tobytes() for square in squares}) == len(squares)
        else:
            assert 0 < abs(value).max() < 0.06, name
    gains = [name for name in values if name.endswith(("scale", "new_std")) or name[0] == "s"]
    assert len(gains) == (0 if norm == "none" else 3 if cell == "LSTM" else 4)
    half = getattr(recurrent_layers, cell)(SIZE, STATE, norm=norm, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert {value.dtype.name for value in half.by_name().values()} == {"bfloat16"}


def test_a_module_learns_within_jit() -> None:
    """To carry the first input to the end."""
    layer = recurrent_layers.NematusGRU(1, 8, biases=("input", "state"), norm="rms", rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 32, 1)), jnp.float32)

    def loss(layer: Any) -> Any:
        return jnp.square(layer(x)[-1, :, 0] - jnp.tanh(x[0, :, 0])).mean()

    @nnx.jit
    def step(layer: Any) -> Any:
        found, gradients = nnx.value_and_grad(loss)(layer)
        nnx.update(layer, jax.tree.map(lambda value, d: value - 0.3 * d, nnx.state(layer), gradients))
        return found

    losses = [float(step(layer)) for _ in range(80)]
    assert losses[-1] < 0.2 * losses[0]


def test_an_unknown_norm() -> None:
    x, h0, _ = single(*sequence())
    with pytest.raises(ValueError, match=r"norm is 'batch', expected 'none', 'layer', 'rms' or 'prms'"):
        recurrent.gru(x, h0, {}, norm="batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"norm is 'batch', expected 'none', 'layer', 'rms' or 'prms'"):
        recurrent_layers.GRU(SIZE, STATE, norm="batch", rngs=nnx.Rngs(0))  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="gru0/input_to_gates"):
        recurrent.gru(x, h0, {})
