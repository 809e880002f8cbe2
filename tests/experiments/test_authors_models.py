"""The attentive reader and the order embeddings against what the authors' programs computed: see tests/data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.reader import config as reader
from experiments.retrieval import config as retrieval
from rmsnorm.targets.bridges import bridge

DATA = Path(__file__).parents[1] / "data" / "experiments"


def check(results: dict[str, Any], wanted: dict[str, Any], dtype: str = "float64") -> None:
    """Two computations of one thing in another order, of numbers below 10, with some hundred roundings in a row."""
    for name, result in results.items():
        assert np.dtype(result.dtype) == dtype, name
        assert np.shape(result) == np.shape(wanted[name]), name
        atol = {"float64": 1e-12, "float32": 2e-5}[dtype] * max(1.0, abs(wanted[name]).max())
        np.testing.assert_allclose(result, wanted[name], rtol=0, atol=atol, err_msg=name)


def recorded(config: Any, name: str, inputs: tuple[str, ...]) -> tuple[Any, dict[str, Any], list[Any], dict[str, Any]]:
    """Configuration, parameters and a batch of a program of the authors, and what it computed for it in float64."""
    own, parameters = config.load(DATA / f"{name}.npz")
    with np.load(DATA / f"{name}_results.npz", allow_pickle=False) as archive:
        results = dict(archive)
    return own, {name: array.astype("f8") for name, array in parameters.items()}, [results[i] for i in inputs], results


@pytest.mark.torch
def test_the_attentive_reader() -> None:
    pytest.importorskip("torch")
    from experiments.reader import golden, model

    config, parameters, batch, results = recorded(reader, "reader", ("desc", "desc_mask", "q", "q_mask", "ans"))
    plain = golden.AttentiveReader(config, parameters)
    outputs = plain(*batch[:4])
    check({**outputs._asdict(), "cost": plain.cost(*batch)}, results)
    assert (outputs.probs.argmax(1) != results["ans"]).mean() == results["errors"]
    own = model.AttentiveReader(config, parameters)
    cost = own.cost(*batch)
    cost.backward()
    values = {**own(*batch[:4])._asdict(), "cost": cost}
    check({name: value.detach().numpy() for name, value in values.items()}, results)
    gradients = {name: value.grad.numpy() for name, value in own.by_name().items()}
    assert gradients.keys() == parameters.keys()
    check(gradients, {name.removeprefix("grad_"): value for name, value in results.items()})


@pytest.mark.flax
def test_the_order_embeddings() -> None:
    nnx = pytest.importorskip("flax.nnx")
    from experiments.retrieval import golden, model

    config, parameters, batch, results = recorded(retrieval, "retrieval", ("x", "mask", "images"))

    def outputs(model: Any) -> dict[str, Any]:
        x, mask, features = batch
        sentences, images = model.sentences(x, mask), model.images(features)
        own = {"sentence_embeddings": sentences, "image_embeddings": images, "encoder_states": model.states(x, mask)}
        return own | {"errors": model.errors(sentences, images), "contrastive_cost": model.cost(*batch)}

    @nnx.jit  # as a whole: operation by operation takes three times as long
    def both(model: Any) -> Any:
        return outputs(model), nnx.grad(lambda model: model.cost(*batch))(model)

    made = [outputs(golden.OrderEmbedding(config, parameters))]
    with bridge("flax").precision(True):
        own, moved = both(model.OrderEmbedding(config, parameters))
        made.append({name: np.asarray(value) for name, value in own.items()})
        gradients = {name: np.asarray(value[...]) for (name,), value in nnx.to_flat_state(moved)}
    for values in made:  # their program compares embeddings in float32, also where it runs in float64
        check({"errors": values.pop("errors").astype("f4")}, results, "float32")
        check(values, results)
    assert gradients.keys() == parameters.keys()
    check(gradients, {name.removeprefix("grad_"): value for name, value in results.items()})
