"""What is special to Nematus's models in PyTorch: it compiles them. docs/porting.md trains one."""

from __future__ import annotations

import pytest
from nematus_models import WITHOUT_DROPOUT, batch, config_of, random_parameters

torch = pytest.importorskip("torch")
from torch_nematus import Model  # noqa: E402


def model_of(kind: str, dtype: str = "float32", **changes):
    """A model in training mode, without dropout."""
    config = config_of(kind).replace(**{**WITHOUT_DROPOUT, **changes})
    return Model(config, random_parameters(config, dtype), training=True).own


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
