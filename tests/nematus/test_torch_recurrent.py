"""The recurrent cells of PyTorch: against the authors' own, and against the golden."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nematus_models import DATA
from test_recurrent import BATCH, LENGTH, NORMS, SIZE, STATE, nematus_weights, sequence, theano_weights

torch = pytest.importorskip("torch")

from rmsnorm.nematus.numpy import recurrent as golden  # noqa: E402
from rmsnorm.nematus.torch import recurrent, recurrent_layers  # noqa: E402

EXACT = 1e-12  # two float64 computations of one thing in another order, of numbers below 10
SINGLE = 2e-5  # float32: some hundred roundings of such numbers
BIASES: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("input",), {}),
    (("state", "state"), {"masking": "carry"}),
    (("input", "none"), {"masking": "zero", "reverse": True}),
    (("input", "outside", "outside"), {"masking": "carry", "reverse": True}),
]


def tensors(values: Any, dtype: str = "float64") -> Any:
    """Leaves that gradients are asked of."""
    if isinstance(values, dict):
        return {name: tensors(value, dtype) for name, value in values.items()}
    return torch.tensor(values, dtype=getattr(torch, dtype), requires_grad=True)


def close(found: Any, wanted: Any, dtype: str, name: str = "") -> None:
    assert found.dtype == getattr(torch, dtype)
    bound = EXACT if dtype == "float64" else SINGLE
    scale = max(1.0, abs(wanted).max())
    np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=0, atol=bound * scale, err_msg=name)


@pytest.mark.parametrize(("name", "norm"), [("gru", "none"), ("rlngru", "rms"), ("rlnlstm", "rms")])
def test_the_authors_cells(name: str, norm: str) -> None:
    """Theano in float64, with a mask of fractions: outputs and gradients."""
    with np.load(DATA / "C1.npz", allow_pickle=False) as archive:
        held = {key.split("/")[1]: value for key, value in archive.items() if key.startswith(f"{name}/")}
    weights = tensors({key.removeprefix("param_"): held[key] for key in held if key.startswith("param_")})
    x, h0 = tensors(held["x"]), tensors(held["h0"])
    mask, dh = torch.tensor(held["mask_fractional"]), torch.tensor(held["cotangent_h"])
    if name == "rlnlstm":
        c0 = tensors(held["c0"])
        h, c = recurrent.lstm(x, h0, c0, weights, mask=mask, norm=norm)
        ((dh * h).sum() + (torch.tensor(held["cotangent_c"]) * c).sum()).backward()
        found = {"h_fractional": h, "c_fractional": c, "grad_fractional_c0": c0.grad}
        bare = recurrent.lstm(x, 0 * h0, 0 * c0, weights, norm=norm)[0]
    else:
        h = recurrent.gru(x, h0, weights, mask=mask, norm=norm)
        (dh * h).sum().backward()
        found = {"h_fractional": h}
        bare = recurrent.gru(x, 0 * h0, weights, norm=norm)
    found |= {"grad_fractional_x": x.grad, "grad_fractional_h0": h0.grad, "h_nomask_zeroinit": bare}
    found |= {f"grad_fractional_param_{key}": value.grad for key, value in weights.items()}
    for key, value in found.items():
        np.testing.assert_allclose(value.detach().numpy(), held[key], rtol=EXACT, atol=EXACT, err_msg=key)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("norm", NORMS)
def test_the_theano_cells_are_the_goldens(norm: Any, dtype: str) -> None:
    x, h0, mask = sequence()
    rng = np.random.default_rng(5)
    c0, dh, dc = rng.standard_normal((BATCH, STATE)), *rng.standard_normal((2, LENGTH, BATCH, STATE))
    options: dict[str, Any] = {"norm": norm, "partial": 0.4}

    weights = theano_weights("gru", norm)
    given, inputs = tensors(weights, dtype), tensors({"x": x, "h0": h0}, dtype)
    h = recurrent.gru(*inputs.values(), given, mask=torch.tensor(mask), **options)
    close(h, golden.gru(x, h0, weights, mask=mask, **options), dtype)
    (torch.tensor(dh, dtype=h.dtype) * h).sum().backward()
    dx, dh0, gradients = golden.gru_vjp(dh, x, h0, weights, mask=mask, **options)
    for name, gradient in {**gradients, "x": dx, "h0": dh0}.items():
        close({**given, **inputs}[name].grad, gradient, dtype, name)

    weights = theano_weights("lstm", norm)
    given, inputs = tensors(weights, dtype), tensors({"x": x, "h0": h0, "c0": c0}, dtype)
    h, c = recurrent.lstm(*inputs.values(), given, mask=torch.tensor(mask), **options)
    for found, wanted in zip((h, c), golden.lstm(x, h0, c0, weights, mask=mask, **options), strict=True):
        close(found, wanted, dtype)
    ((torch.tensor(dh, dtype=h.dtype) * h).sum() + (torch.tensor(dc, dtype=h.dtype) * c).sum()).backward()
    dx, dh0, dc0, gradients = golden.lstm_vjp(dh, dc, x, h0, c0, weights, mask=mask, **options)
    for name, gradient in {**gradients, "x": dx, "h0": dh0, "c0": dc0}.items():
        close({**given, **inputs}[name].grad, gradient, dtype, name)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("biases", "masking"), BIASES)
def test_nematus_gru_is_the_goldens(norm: Any, biases: Any, masking: dict[str, Any], dtype: str) -> None:
    x, h0, mask = sequence()
    dh = np.random.default_rng(5).standard_normal((LENGTH, BATCH, STATE))
    weights = nematus_weights(norm, biases)
    options: dict[str, Any] = {"biases": biases, "norm": norm, "partial": 0.4, **masking}
    masks = (mask, torch.tensor(mask)) if masking else (None, None)
    given, inputs = tensors(weights, dtype), tensors({"x": x, "h0": h0}, dtype)
    h = recurrent.nematus_gru(*inputs.values(), given, mask=masks[1], **options)
    close(h, golden.nematus_gru(x, h0, weights, mask=masks[0], **options), dtype)
    (torch.tensor(dh, dtype=h.dtype) * h).sum().backward()
    dx, dh0, gradients = golden.nematus_gru_vjp(dh, x, h0, weights, mask=masks[0], **options)
    for name, gradient in {**gradients, "x": dx, "h0": dh0}.items():
        close({**given, **inputs}[name].grad, gradient, dtype, name)


@pytest.mark.parametrize("norm", NORMS)
def test_the_modules_are_the_functions_of_their_parameters(norm: Any) -> None:
    """Loaded with weights by their names, where a slash is a dot; a state that is not given is zero."""
    x, h0, mask = (torch.tensor(each) for each in sequence())
    options: dict[str, Any] = {"norm": norm, "partial": 0.4}
    own: dict[str, Any] = {"dtype": torch.float64, **options}
    biases: Any = ("input", "outside")
    extra: dict[str, Any] = {"biases": biases, "masking": "carry", "reverse": True}
    cells = {
        "gru": (recurrent_layers.GRU(SIZE, STATE, **own), theano_weights("gru", norm)),
        "lstm": (recurrent_layers.LSTM(SIZE, STATE, **own), theano_weights("lstm", norm)),
        "nematus": (recurrent_layers.NematusGRU(SIZE, STATE, **own, **extra), nematus_weights(norm, biases)),
    }
    for cell, weights in cells.values():
        cell.load_state_dict({name.replace("/", "."): torch.tensor(value) for name, value in weights.items()})
    layer, weights = cells["gru"]
    given = {name: torch.tensor(value) for name, value in weights.items()}
    torch.testing.assert_close(layer(x, h0, mask), recurrent.gru(x, h0, given, mask=mask, **options), rtol=0, atol=0)
    torch.testing.assert_close(layer(x), recurrent.gru(x, 0 * h0, given, **options), rtol=0, atol=0)
    layer, weights = cells["lstm"]
    given = {name: torch.tensor(value) for name, value in weights.items()}
    wanted = recurrent.lstm(x, h0, 2 * h0, given, mask=mask, **options)
    torch.testing.assert_close(layer(x, (h0, 2 * h0), mask), wanted, rtol=0, atol=0)
    torch.testing.assert_close(layer(x), recurrent.lstm(x, 0 * h0, 0 * h0, given, **options), rtol=0, atol=0)
    layer, weights = cells["nematus"]
    given = {name: torch.tensor(value) for name, value in weights.items()}
    wanted = recurrent.nematus_gru(x, h0, given, mask=mask, **options, **extra)
    torch.testing.assert_close(layer(x, h0, mask), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cell", ["GRU", "LSTM", "NematusGRU"])
def test_what_a_new_module_holds(cell: str, norm: Any) -> None:
    """As Nematus begins: orthogonal squares for the state, small numbers for the input, gains 1, all else 0."""
    torch.manual_seed(0)
    layer = getattr(recurrent_layers, cell)(SIZE, STATE, norm=norm)
    for name, value in layer.by_name().items():
        leaf = name.rpartition("/")[2]
        if value.ndim == 1:
            assert (value == float(leaf in ("scale", "new_std") or leaf[0] == "s")).all(), name
        elif value.shape[0] == STATE:
            for square in value.detach().split(STATE, dim=1):
                torch.testing.assert_close(square.T @ square, torch.eye(STATE))
        else:
            assert 0 < value.abs().max() < 0.06, name
    gains = [name for name in layer.state_dict() if name.endswith(("scale", "new_std")) or name[0] == "s"]
    assert len(gains) == (0 if norm == "none" else 3 if cell == "LSTM" else 4)
    assert f"norm={norm!r}" in repr(layer)
    assert f"={(SIZE, STATE * (4 if cell == 'LSTM' else 2))}" in repr(layer)


def test_a_module_learns() -> None:
    """To carry the first input to the end."""
    torch.manual_seed(0)
    layer = recurrent_layers.NematusGRU(1, 8, biases=("input", "state"), norm="rms")
    x = torch.randn(4, 32, 1)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (layer(x)[-1, :, 0] - x[0, :, 0].tanh()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_a_module_compiles() -> None:
    torch.manual_seed(0)
    layer = recurrent_layers.GRU(SIZE, STATE, norm="rms")
    x, mask = torch.randn(2, BATCH, SIZE), torch.tensor([[1.0, 1, 1], [1, 0, 1]])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, mask=mask), layer(x, mask=mask))


def test_an_unknown_norm() -> None:
    x, h0, _ = (torch.tensor(each) for each in sequence())
    with pytest.raises(ValueError, match=r"norm is 'batch', expected 'none', 'layer', 'rms' or 'prms'"):
        recurrent.gru(x, h0, {}, norm="batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"norm is 'batch', expected 'none', 'layer', 'rms' or 'prms'"):
        recurrent_layers.GRU(SIZE, STATE, norm="batch")  # type: ignore[arg-type]
