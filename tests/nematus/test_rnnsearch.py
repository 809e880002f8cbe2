"""The golden of Nematus's models against itself: what a part, a search or a dialect must and must not change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nematus_models import KINDS, batch, config_of, random_parameters, search

from rmsnorm.nematus.backends import model_class
from rmsnorm.nematus.numpy import RNNSearch
from rmsnorm.nematus.numpy.parameters import log_softmax

EXACT = 1e-12  # two float64 computations of one thing in another order; logits are below 10


def model_of(kind: str, **changes: Any) -> Any:
    config = config_of(kind).replace(**changes)
    return model_class("numpy", config)(config, random_parameters(config))


@pytest.mark.parametrize("kind", [*KINDS, "transformer rms"])
def test_padding_and_neighbours_change_nothing(kind: str) -> None:
    """Nor whether words are scored or decoded, but in deep models of v0.3."""
    model = model_of(kind)
    x, x_mask, y, y_mask = batch(model.config)
    for i, loss in enumerate(model.loss(x, x_mask, y, y_mask)):
        source, target = (int(mask[:, i].sum()) for mask in (x_mask, y_mask))
        alone = x[:, :source, [i]], x_mask[:source, [i]], y[:target, [i]], y_mask[:target, [i]]
        np.testing.assert_allclose(model.loss(*alone), [loss], rtol=EXACT)
    if kind in KINDS:
        error = abs(model.logits(x, x_mask, y) - model.logits(x, x_mask, y, stepwise=True)).max()
        assert error > 0.1 if kind == "deep v0.3" else error == 0


def test_dialects_differ_where_nematus_does() -> None:
    """In padding of the source; in biases: test_porting.py."""
    x, x_mask, y, _ = batch(config_of("rms"))
    ours, theanos = (model_of("rms", rnn_enc_depth=2, dialect=dialect) for dialect in ("tensorflow", "theano"))
    np.testing.assert_allclose(ours.logits(x, x_mask, y), theanos.logits(x, x_mask, y), rtol=0, atol=EXACT)
    difference = abs(ours.encode(x, x_mask) - theanos.encode(x, x_mask))
    assert difference[x_mask > 0].max() <= EXACT
    assert difference[x_mask == 0].min(axis=0).max() > 0.01


def test_parts_that_are_others_in_disguise() -> None:
    """A slope of 1 is linear and one of 0 relu; a mixture of one component, and a lexical model that adds nothing."""
    x, x_mask, y, _ = batch(config_of("plain"))
    predictor = "decoder/next_word_predictor"

    def same(model: Any, other: Any, changes: dict[str, Any], **options: Any) -> None:
        """The logits of a model, and of another one with changes."""
        changed = RNNSearch(other.config.replace(**options), {**other.parameters, **changes})
        result, wanted = (one.logits(x, x_mask, y) for one in (changed, model))
        np.testing.assert_allclose(result, wanted, rtol=0, atol=EXACT)

    slope = f"{predictor}/hidden_prelu/slope"
    for size, kind in ((1.0, "linear"), (0.0, "relu")):
        plain = model_of(kind)
        same(plain, plain, {slope: np.full(6, size)}, output_hidden_activation="prelu")

    mixture, lexical = map(model_of, ("mixture", "lexical"))
    np.testing.assert_allclose(np.exp(mixture.logits(x, x_mask, y)).sum(axis=-1), 1, rtol=EXACT)
    certain = {**mixture.parameters, f"{predictor}/hidden_to_pi_logits/b": np.array([0.0, 800.0, 0.0])}
    only = {name: certain[name.replace("hidden_0", "hidden_1").replace("hidden_2", "hidden_1")] for name in certain}
    same(RNNSearch(mixture.config, certain), mixture, only)

    nothing = {name: 0 * value if "lexical_to" in name else value for name, value in lexical.parameters.items()}
    silent = RNNSearch(lexical.config, nothing)
    same(silent, silent, {}, rnn_lexical_model=False)
    assert abs(lexical.logits(x, x_mask, y) - silent.logits(x, x_mask, y)).max() > 0.1


def test_smoothed_labels() -> None:
    """(1 - s) -log p(y) + s mean(-log p), in training or not. Those of a Transformer are zero's: test_zero.py."""
    model = model_of("smoothed labels")
    x, x_mask, y, y_mask = batch(model.config)
    log_p = log_softmax(model.logits(x, x_mask, y))
    score = 0.9 * np.take_along_axis(log_p, y[..., None], axis=-1)[..., 0] + 0.1 * log_p.mean(axis=-1)
    np.testing.assert_allclose(model.loss(x, x_mask, y, y_mask), -(score * y_mask).sum(axis=0), rtol=EXACT)


def test_the_search_of_v03_never_gives_up_what_is_finished() -> None:
    """However bad it is, nor its score."""
    how = {"translation_maxlen": 3, "normalization_alpha": 1.0}
    result = search("deep v0.3", [[0.3, 0.69, 0.01]], [3], 2, later=[[0.001, 0.5, 0.499]], **how)
    np.testing.assert_array_equal(result.sequences, [[[1, 1, 1, 0], [0, 0, 0, 0]]])
    np.testing.assert_allclose(result.scores, [[np.log(0.69 * 0.5**2) / 4, np.log(0.3)]])


def test_when_the_sampler_stops() -> None:
    """When no living hypothesis can overtake the worst finished one, even if some of the beam is still empty."""
    result = search("plain", [[0.6, 0.3, 0.1]], [3], 2, translation_maxlen=10)
    np.testing.assert_array_equal(result.sequences, [[[0], [0]]])
    np.testing.assert_allclose(result.scores, [[np.log(0.6), -1e7]])
    result = search("plain", [[0.3, 0.6, 0.1]], [3], 2, translation_maxlen=10)
    np.testing.assert_array_equal(result.sequences, [[[0, 0, 0, 0], [1, 0, 0, 0]]])  # log .3 + log .6 > 4 log .6
    np.testing.assert_allclose(result.scores, np.log([[0.3, 0.3 * 0.6]]))
