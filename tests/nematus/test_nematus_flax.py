"""What is special to Nematus's models and cells in Flax: programs of XLA, nnx's states and random streams, files."""

from __future__ import annotations

import numpy as np
import pytest
from nematus_models import WITH_DROPOUT, WITHOUT_DROPOUT, batch, config_of, random_parameters

jax = pytest.importorskip("jax")
pytest.importorskip("flax")
from flax import nnx  # noqa: E402
from flax_nematus import Model  # noqa: E402

from rmsnorm.nematus import flax_models as nematus  # noqa: E402


def model_of(kind, *, dtype="float32", seed=0, **changes):
    """A model; a Transformer in training mode, without dropout."""
    config = config_of(kind).replace(**{**WITHOUT_DROPOUT, **changes})
    return Model(config, random_parameters(config, dtype, seed), training=config.model_type == "transformer").own


def test_a_program_is_as_long_for_long_sentences_and_of_full_precision():
    """One step for all words; accelerators multiply matrices in fewer bits where nothing is said."""
    model, other = model_of("deep", rnn_lexical_model=True), model_of("transformer tied all")
    graph, state, rest = nnx.split(model, nnx.Param, ...)
    gradient = jax.grad(lambda state, *sentences: nnx.merge(graph, state, rest).loss(*sentences).mean())
    programs = []
    for repeated in (1, 3):
        x, x_mask, y, y_mask = (np.concatenate([part] * repeated, axis=part.ndim - 2) for part in batch(model.config))
        sentences = (x, x_mask.astype("f4"), y, y_mask.astype("f4"))
        programs.append(str(jax.make_jaxpr(gradient)(state, *sentences)))
    assert programs[0].count(" = ") == programs[1].count(" = ")
    programs.append(str(jax.make_jaxpr(other.loss)(*batch(other.config))))
    for program in programs:
        highest = program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
        assert program.count("dot_general[") == highest > 0


def test_dropout_is_drawn_from_the_stream_of_the_model():
    """Named dropout, anew at every call, also within nnx.jit; a model that was made without one is not trained."""
    config = config_of("layer").replace(**WITH_DROPOUT)
    parameters, sentences = random_parameters(config, "float32"), batch(config)
    streams = nnx.Rngs(0, dropout=1), nnx.Rngs(2, dropout=1), None
    first, other, without = (nematus.RNNSearch(config, parameters, rngs=rngs) for rngs in streams)
    for model in (first, other, without):
        model.train()
    loss = first.loss(*sentences)
    np.testing.assert_array_equal(loss, other.loss(*sentences))
    assert abs(first.loss(*sentences) - loss).min() > 1e-3
    compiled = nnx.jit(lambda model: model(*sentences))
    assert abs(compiled(first) - compiled(first)).min() > 1e-3
    assert int(first.rngs.count[...]) == 4
    with pytest.raises(ValueError, match=r"dropout: rngs is None, expected an nnx.Rngs in training"):
        without.loss(*sentences)
