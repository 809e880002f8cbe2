"""What is special to Nematus's models and cells in PyTorch: they are modules, compiled, trained, and saved by it."""

from __future__ import annotations

import io

import numpy as np
import pytest
from nematus_cells import BATCH, NORMS, SIZE, STATE
from nematus_models import WITHOUT_DROPOUT, batch, config_of, random_parameters

torch = pytest.importorskip("torch")
from torch_nematus import Model  # noqa: E402

from rmsnorm.nematus import torch as nematus  # noqa: E402
from rmsnorm.nematus.names import variables  # noqa: E402


def model_of(kind: str, dtype: str = "float32", **changes):
    """A model in training mode, without dropout."""
    config = config_of(kind).replace(**{**WITHOUT_DROPOUT, **changes})
    return Model(config, random_parameters(config, dtype), training=True).own


@pytest.mark.parametrize("kind", ["deep", "tied all", "transformer tied all"])
def test_a_state_dict_has_the_names_of_nematus_and_comes_back(kind):
    model = model_of(kind)
    state = model.state_dict()
    rows = variables(model.config)
    assert sorted(state) == sorted(row.name.replace("/", ".") for row in rows)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    fresh = type(model)(model.config, {row.name: np.zeros(row.shape, np.float32) for row in rows})
    fresh.load_state_dict(torch.load(file))
    x, x_mask, y, _ = batch(model.config)
    torch.testing.assert_close(fresh.logits(x, x_mask, y), model.eval().logits(x, x_mask, y), rtol=0, atol=0)
    parameters = random_parameters(model.config, "float32")
    for name, value in fresh.by_name().items():
        np.testing.assert_array_equal(value.detach().numpy(), parameters[name], err_msg=name)


@pytest.mark.parametrize("kind", ["deep of odd depth", "transformer rms"])
def test_training_makes_the_loss_fall(kind):
    """To half in some steps, with the state of the optimizer where torch puts it; and by a graph without slack."""
    model = model_of(kind)
    sentences = tuple(map(torch.as_tensor, batch(model.config)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = model(*sentences).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("kind", ["rms", "transformer rms"])
@pytest.mark.sample(1)
def test_the_loss_compiles_in_one_piece(kind):
    """In training too. The graph is as long as the sentences are, so short ones here."""
    model = model_of(kind)
    x, x_mask, y, y_mask = map(torch.as_tensor, batch(model.config))
    sentences = (x[:, :1], x_mask[:1], y[:2], y_mask[:2])
    loss = torch.compile(model.loss, fullgraph=True, backend="aot_eager")(*sentences)
    loss.mean().backward()
    gradients = {name: value.grad for name, value in model.by_name().items()}
    model.zero_grad(set_to_none=True)
    wanted = model.loss(*sentences)
    torch.testing.assert_close(loss, wanted)
    wanted.mean().backward()
    for name, value in model.by_name().items():
        torch.testing.assert_close(gradients[name], value.grad)


def test_gradients_by_torch_func():
    model = model_of("rms", "float64")
    sentences = tuple(map(torch.as_tensor, batch(model.config)))
    parameters = dict(model.named_parameters())
    gradients = torch.func.grad(lambda p: torch.func.functional_call(model, p, sentences).mean())(parameters)
    model.loss(*sentences).mean().backward()
    for name, value in parameters.items():
        torch.testing.assert_close(gradients[name], value.grad)


def test_attention_drops_in_training_only(monkeypatch):
    """In every layer of encoder and decoder, at the rate of the config."""
    rates = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def record(q, k, v, bias, rate):
        rates.append(rate)
        return attention(q, k, v, bias)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    model = model_of("transformer rms", "float64", transformer_dropout_attn=0.25)
    x, x_mask, y, _ = batch(model.config)
    model.logits(x, x_mask, y)
    model.translate(x, x_mask, 1, 2)
    assert rates == [0.25] * 6 + [0.0] * 6


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cell", ["GRU", "LSTM", "NematusGRU"])
def test_a_cell_shows_its_norm_and_its_shapes(cell, norm):
    shown = repr(getattr(nematus, cell)(SIZE, STATE, norm=norm))
    assert f"norm={norm!r}" in shown
    assert f"={(SIZE, STATE * (4 if cell == 'LSTM' else 2))}" in shown


def test_a_cell_compiles():
    torch.manual_seed(0)
    layer = nematus.GRU(SIZE, STATE, norm="rms")
    x, mask = torch.randn(2, BATCH, SIZE), torch.tensor([[1.0, 1, 1], [1, 0, 1]])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, mask=mask), layer(x, mask=mask))
