"""What is special to Nematus's models and cells in PyTorch: they are modules, compiled, trained, and saved by it."""

from __future__ import annotations

import io

import numpy as np
import pytest
from nematus_cells import BATCH, NORMS, SIZE, STATE
from nematus_models import WITHOUT_DROPOUT, batch, config_of, random_parameters, same

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
    rows = variables(model.config)
    assert sorted(model.state_dict()) == sorted(row.name.replace("/", ".") for row in rows)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = type(model)(model.config, {row.name: np.zeros(row.shape, np.float32) for row in rows})
    fresh.load_state_dict(torch.load(file))
    parameters = {name: value.detach().numpy() for name, value in fresh.by_name().items()}
    same(parameters, random_parameters(model.config, "float32"))


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
def test_the_loss_compiles_in_one_piece(kind):
    """In training too, and its gradients are those of torch.func. Short sentences, as the graph is as long as they."""
    model = model_of(kind)
    x, x_mask, y, y_mask = map(torch.as_tensor, batch(model.config))
    sentences, parameters = (x[:, :1], x_mask[:1], y[:2], y_mask[:2]), dict(model.named_parameters())
    loss = torch.compile(model.loss, fullgraph=True, backend="aot_eager")(*sentences)
    torch.testing.assert_close(loss, model.loss(*sentences))
    gradients = torch.autograd.grad(loss.mean(), list(parameters.values()))
    for wanted in (
        torch.autograd.grad(model.loss(*sentences).mean(), list(parameters.values())),
        torch.func.grad(lambda p: torch.func.functional_call(model, p, sentences).mean())(parameters).values(),
    ):
        torch.testing.assert_close(list(gradients), list(wanted))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cell", ["GRU", "LSTM", "NematusGRU"])
def test_a_cell_compiles_and_shows_its_norm_and_its_shapes(cell, norm):
    torch.manual_seed(0)
    layer = getattr(nematus, cell)(SIZE, STATE, norm=norm)
    assert f"norm={norm!r}" in repr(layer)
    assert f"={(SIZE, STATE * (4 if cell == 'LSTM' else 2))}" in repr(layer)
    x, mask = torch.randn(2, BATCH, SIZE), torch.tensor([[1.0, 1, 1], [1, 0, 1]])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, mask=mask), layer(x, mask=mask))
