"""The attentive reader and the order embeddings against what the authors' programs computed: see tests/data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rmsnorm.targets.bridges import bridge

DATA = Path(__file__).parents[1] / "data" / "experiments"
SIZES = {"reader": (33, 8, 8, 10), "retrieval": (30, 16, 12, 10)}  # as in the JSON files beside the archives


def check(results, wanted, unit=1e-12):
    """Two computations of one thing in another order, of numbers below 10, with some hundred roundings in a row."""
    for name, result in results.items():
        assert (np.shape(result), result.dtype) == (np.shape(wanted[name]), "float64"), name
        atol = unit * max(1.0, abs(wanted[name]).max())
        np.testing.assert_allclose(result, wanted[name], rtol=0, atol=atol, err_msg=name)


def recorded(module, name):
    """Configuration and parameters of a program of the authors, and what it computed for a batch in float64."""
    with np.load(DATA / f"{name}.npz") as archive, np.load(DATA / f"{name}_results.npz") as computed:
        parameters, results = {key: archive[key].astype("f8") for key in archive}, dict(computed)
    config = module.Config(*SIZES[name], norm="rms")
    assert config.shapes() == {key: value.shape for key, value in parameters.items()}
    assert {f"grad_{key}" for key in parameters} <= results.keys()
    return config, parameters, results


@pytest.mark.torch
def test_the_attentive_reader():
    pytest.importorskip("torch")
    from experiments.reader import model

    config, parameters, results = recorded(model, "reader")
    own, batch = model.AttentiveReader(config, parameters), [results[k] for k in ("desc", "desc_mask", "q", "q_mask")]
    cost = own.cost(*batch, results["ans"])
    cost.backward()
    values = {**own(*batch)._asdict(), "cost": cost}
    check({name: value.detach().numpy() for name, value in values.items()}, results)
    check({f"grad_{name}": value.grad.numpy() for name, value in own.by_name().items()}, results)


@pytest.mark.flax
def test_the_order_embeddings():
    nnx = pytest.importorskip("flax.nnx")
    from experiments.retrieval import model

    config, parameters, results = recorded(model, "retrieval")
    x, mask, features = (results[key] for key in ("x", "mask", "images"))

    @nnx.jit  # as a whole: operation by operation takes three times as long
    def both(model):
        sentences, images = model.sentences(x, mask), model.images(features)
        own = {"sentence_embeddings": sentences, "image_embeddings": images, "encoder_states": model.states(x, mask)}
        own |= {"errors": model.errors(sentences, images), "contrastive_cost": model.cost(x, mask, features)}
        return own, nnx.grad(lambda model: model.cost(x, mask, features))(model)

    with bridge("flax").precision(True):
        own, moved = both(model.OrderEmbedding(config, parameters))
        values = {name: np.asarray(value) for name, value in own.items()}
        values |= {f"grad_{name}": np.asarray(value[...]) for (name,), value in nnx.to_flat_state(moved)}
    # Their program compares embeddings in float32, also where it runs in float64.
    check({"errors": values.pop("errors")}, results, 2e-5)
    check(values, results)
