"""The golden of Nematus's models against itself: what a part, a search or a dialect must and must not change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nematus_models import KINDS, batch, config_of, random_parameters

from rmsnorm.nematus import beam
from rmsnorm.nematus.backends import model_class
from rmsnorm.nematus.numpy import RNNSearch, Transformer
from rmsnorm.nematus.numpy.parameters import log_softmax

EXACT = 1e-12  # two float64 computations of one thing in another order; logits are below 10


def model_of(kind: str, **changes: Any) -> Any:
    config = config_of(kind).replace(**changes)
    return model_class("numpy", config)(config, random_parameters(config))


def of_words(model: Any, x: Any, x_mask: Any, y: Any) -> Any:
    """Log-probabilities of the words of y by the rules of decoding: (length, batch)."""
    if isinstance(model, Transformer):
        log_p = log_softmax(model.logits(x, x_mask, y)).swapaxes(0, 1)
    else:
        log_p = log_softmax(model.logits(x, x_mask, y, stepwise=True))
    return np.take_along_axis(log_p, y[..., None], axis=-1)[..., 0]


@pytest.mark.parametrize("kind", [*KINDS, "transformer rms"])
def test_padding_and_neighbours_change_nothing(kind: str) -> None:
    model = model_of(kind)
    x, x_mask, y, y_mask = batch(model.config)
    losses = model.loss(x, x_mask, y, y_mask)
    for i, loss in enumerate(losses):
        source, target = int(x_mask[:, i].sum()), int(y_mask[:, i].sum())
        alone = model.loss(
            x[:, :source, i : i + 1], x_mask[:source, i : i + 1], y[:target, i : i + 1], y_mask[:target, i : i + 1]
        )
        np.testing.assert_allclose(alone, [loss], rtol=EXACT)


@pytest.mark.parametrize("kind", [*KINDS, "transformer layer"])
@pytest.mark.parametrize("beam_size", [1, 3])
def test_scores_of_translations_are_those_of_their_words(kind: str, beam_size: int) -> None:
    """The score that a beam search keeps for a hypothesis is that of its words, scored from the start."""
    model = model_of(kind)
    x, x_mask, _, _ = batch(model.config)
    translations = model.translate(x, x_mask, beam_size, 6, normalization_alpha=0.5)
    assert (np.diff(translations.scores, axis=1) <= 0).all()
    compared = 0
    for hypothesis in range(beam_size):
        words = translations.sequences[:, hypothesis].T
        log_p = of_words(model, x, x_mask, words)
        for i, score in enumerate(translations.scores[:, hypothesis]):
            ends = np.flatnonzero(words[:, i] == 0)
            length = ends[0] + 1 if len(ends) else len(words) + 1
            if score < -1e6:  # of an empty place in the beam
                continue
            # v0.3 ends a hypothesis that it cuts off, without scoring that
            scored = min(length, 6) if model.config.search == "costs" else length
            np.testing.assert_allclose(log_p[:scored, i].sum() / length**0.5, score, rtol=EXACT)
            compared += 1
    assert compared >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_only_deep_models_of_v03_decode_in_another_way_than_they_score(kind: str) -> None:
    model = model_of(kind)
    x, x_mask, y, _ = batch(model.config)
    error = abs(model.logits(x, x_mask, y) - model.logits(x, x_mask, y, stepwise=True)).max()
    assert error > 0.1 if kind == "deep v0.3" else error == 0


def test_dialects_differ_where_nematus_does() -> None:
    """In padding of the source, and in the biases of transitions and of high levels."""
    config = config_of("rms").replace(rnn_enc_depth=2)
    deep = config_of("deep").replace(rnn_enc_transition_depth=1, rnn_enc_depth=1)
    x, x_mask, y, _ = batch(config)
    (ours, theanos), deeps = (
        [RNNSearch(own.replace(dialect=dialect), random_parameters(own)) for dialect in ("tensorflow", "theano")]
        for own in (config, deep.replace(dialect="theano"))
    )
    np.testing.assert_allclose(ours.logits(x, x_mask, y), theanos.logits(x, x_mask, y), rtol=0, atol=EXACT)
    difference = abs(ours.encode(x, x_mask) - theanos.encode(x, x_mask))
    assert difference[x_mask > 0].max() <= EXACT
    assert difference[x_mask == 0].min(axis=0).max() > 0.01
    assert abs(deeps[0].logits(x, x_mask, y) - deeps[1].logits(x, x_mask, y)).max() > 0.05


def test_parts_that_are_others_in_disguise() -> None:
    """A slope of 1 is linear and one of 0 is relu; tied embeddings are a transposed output matrix; a mixture of one
    component is what that component gives; a lexical model that adds nothing adds nothing."""
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
    tied, mixture, lexical = map(model_of, ("tied decoder", "mixture", "lexical"))
    matrix = {f"{predictor}/hidden_to_logits/W": tied.parameters["decoder/embedding/embeddings"].T}
    same(tied, tied, matrix, tie_decoder_embeddings=False)

    np.testing.assert_allclose(np.exp(mixture.logits(x, x_mask, y)).sum(axis=-1), 1, rtol=EXACT)
    certain = {**mixture.parameters, f"{predictor}/hidden_to_pi_logits/b": np.array([0.0, 800.0, 0.0])}
    only = {name: certain[name.replace("hidden_0", "hidden_1").replace("hidden_2", "hidden_1")] for name in certain}
    same(RNNSearch(mixture.config, certain), mixture, only)

    leaves = [f"{predictor}/lexical_to_logits/{leaf}" for leaf in ("W", "b")]
    silent = RNNSearch(
        lexical.config, {**lexical.parameters, **{name: 0 * lexical.parameters[name] for name in leaves}}
    )
    same(silent, silent, {}, rnn_lexical_model=False)
    assert abs(lexical.logits(x, x_mask, y) - silent.logits(x, x_mask, y)).max() > 0.1


def test_smoothed_labels() -> None:
    """RNNSearch: (1 - s) -log p(y) + s mean(-log p), always. Transformer: only in training, s shared by the others."""
    models = model_of("smoothed labels"), model_of("transformer smoothed labels")
    x, x_mask, y, y_mask = batch(models[0].config)
    logits = models[0].logits(x, x_mask, y), models[1].logits(x, x_mask, y).swapaxes(0, 1)
    rnn, transformer = map(log_softmax, logits)
    rights = [np.take_along_axis(log_p, y[..., None], axis=-1)[..., 0] for log_p in (rnn, transformer)]
    least = -0.9 * np.log(0.9) - 0.1 * np.log(0.1 / 7)
    smooth = 0.9 * rights[1] + 0.1 / 7 * (transformer.sum(axis=-1) - rights[1]) + least
    for model, options, score in (
        (models[0], {}, 0.9 * rights[0] + 0.1 * rnn.mean(axis=-1)),
        (models[1], {}, rights[1]),
        (models[1], {"training": True}, smooth),
    ):
        np.testing.assert_allclose(model.loss(x, x_mask, y, y_mask, **options), -(score * y_mask).sum(0), rtol=EXACT)


def test_the_search_of_v03_never_gives_up_what_is_finished() -> None:
    """However bad it is, nor its score: among models that often end, some would lose it to what is better."""
    config = config_of("plain").replace(search="costs")
    endings = 0
    for seed in range(10):
        parameters = random_parameters(config, seed=seed)
        parameters["decoder/next_word_predictor/hidden_to_logits/b"][0] += 1.5
        x, x_mask, _, _ = batch(config, seed)
        before: list[set[Any]] = [set(), set(), set()]
        for length in range(1, 6):
            translations = RNNSearch(config, parameters).translate(x, x_mask, 3, length)
            after = []
            for beam_of, scores in zip(*translations, strict=True):
                found = [
                    (*map(int, np.trim_zeros(words)), float(score))
                    for words, score in zip(beam_of, scores, strict=True)
                ]
                after.append({words for words in found if len(words) <= length})
            assert all(kept <= now for kept, now in zip(before, after, strict=True))
            before = after
            endings += sum(map(len, after))
    assert endings > 100


def test_when_the_sampler_stops() -> None:
    """When no living hypothesis can overtake the worst finished one, even if some of the beam is still empty."""
    log_p = np.log([0.6, 0.3, 0.1])

    def step(states: list[Any], previous: Any) -> tuple[Any, list[Any]]:
        return np.tile(log_p, (len(states[0]), 1)), states

    plan = beam.plan(config_of("plain"), [3], 2, 10, 0.0)
    translations = beam.search(plan, step, [np.zeros((2, 1))])
    np.testing.assert_array_equal(translations.sequences, [[[0], [0]]])
    np.testing.assert_allclose(translations.scores, [[log_p[0], -1e7]])
    log_p = np.log([0.3, 0.6, 0.1])
    translations = beam.search(plan, step, [np.zeros((2, 1))])
    np.testing.assert_array_equal(translations.sequences, [[[0, 0, 0, 0], [1, 0, 0, 0]]])  # log .3 + log .6 > 4 log .6
    np.testing.assert_allclose(translations.scores, [[log_p[0], log_p[1] + log_p[0]]])
