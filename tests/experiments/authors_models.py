"""The models of the authors' programs for the tests: golden and model behind one set of functions."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments.reader import config as reader
from experiments.reader import golden as reader_golden
from experiments.retrieval import config as retrieval
from experiments.retrieval import golden as retrieval_golden
from rmsnorm.targets.bridges import bridge

DATA = Path(__file__).parents[1] / "data" / "experiments"
READER_BATCH, RETRIEVAL_BATCH = ("desc", "desc_mask", "q", "q_mask", "ans"), ("x", "mask", "images")


class Reader:
    """Attentive readers."""

    name, config, batch, cost = "reader", reader, READER_BATCH, "cost"
    layer = "encoder_q"

    @staticmethod
    def golden(config: Any, parameters: Any, batch: Any) -> dict[str, Any]:
        model = reader_golden.AttentiveReader(config, parameters)
        return model(*batch[:4])._asdict() | {"cost": model.cost(*batch)}

    @staticmethod
    def own(config: Any, parameters: Any, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        pytest.importorskip("torch")
        from experiments.reader.model import AttentiveReader

        model = AttentiveReader(config, parameters)
        cost = model.cost(*batch)
        cost.backward()
        outputs = model(*batch[:4])._asdict() | {"cost": cost}
        gradients = {name: value.grad.numpy() for name, value in model.by_name().items()}
        return {name: value.detach().numpy() for name, value in outputs.items()}, gradients

    @staticmethod
    def wide() -> Any:
        return nullcontext()


class Retrieval:
    """Order embeddings."""

    name, config, batch, cost = "retrieval", retrieval, RETRIEVAL_BATCH, "contrastive_cost"
    layer = "encoder"

    @staticmethod
    def golden(config: Any, parameters: Any, batch: Any) -> dict[str, Any]:
        model = retrieval_golden.OrderEmbedding(config, parameters)
        return outputs_of(model, batch) | {"contrastive_cost": model.cost(*batch)}

    @staticmethod
    def own(config: Any, parameters: Any, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        nnx = pytest.importorskip("flax.nnx")
        from experiments.retrieval.model import OrderEmbedding

        @nnx.jit  # as a whole: operation by operation takes three times as long
        def both(model: Any) -> Any:
            cost, gradients = nnx.value_and_grad(lambda model: model.cost(*batch))(model)
            return outputs_of(model, batch) | {"contrastive_cost": cost}, gradients

        outputs, gradients = both(OrderEmbedding(config, parameters))
        by_name = {name: np.asarray(value[...]) for (name,), value in nnx.to_flat_state(gradients)}
        return {name: np.asarray(value) for name, value in outputs.items()}, by_name

    @staticmethod
    @contextmanager
    def wide() -> Any:
        pytest.importorskip("jax")
        with bridge("flax").precision(True):
            yield


def outputs_of(model: Any, batch: Any) -> dict[str, Any]:
    x, mask, features = batch
    sentences, images = model.sentences(x, mask), model.images(features)
    own = {"sentence_embeddings": sentences, "image_embeddings": images, "encoder_states": model.states(x, mask)}
    return own | {"errors": model.errors(sentences, images)}


def recorded(kind: Any, name: str = "") -> Any:
    """What the authors' program wrote: config, parameters, a batch, and what it computed for it in float64."""
    name = name or kind.name
    config, parameters = kind.config.load(DATA / f"{name}.npz")
    with np.load(DATA / f"{name}_results.npz", allow_pickle=False) as archive:
        results = dict(archive)
    batch = [results[name] for name in kind.batch]
    return SimpleNamespace(config=config, parameters=parameters, batch=batch, results=results)


def random_parameters(config: Any, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) * 0.5 for name, shape in config.shapes().items()}


def random_batch(config: Any) -> list[Any]:
    """A batch of three; words of the second are masked."""
    rng = np.random.default_rng(1)

    def words(*shape: int) -> tuple[Any, Any]:
        mask = np.ones(shape)
        mask[2:, ..., 1] = 0
        return rng.integers(0, 9, shape), mask

    if isinstance(config, reader.Config):
        desc, desc_mask = words(*((5, 4, 3) if config.use_sent_reps else (6, 3)))
        if config.use_sent_reps:
            desc_mask[:, 2:, 0] = 0
        return [desc, desc_mask, *words(4, 3), rng.integers(0, 7, 3)]
    return [*words(5, 3), rng.standard_normal((3, 5))]
