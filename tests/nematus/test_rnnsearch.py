"""The golden of Nematus's models: against runs of Nematus, against differences, and against themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nematus_models import (
    KINDS,
    TRANSFORMERS,
    batch,
    check_beams,
    check_directions,
    check_gradients,
    config_of,
    random_parameters,
    reference,
    transformer_of,
)

from rmsnorm.nematus import beam
from rmsnorm.nematus.names import variables
from rmsnorm.nematus.numpy import rnnsearch
from rmsnorm.nematus.numpy.output import log_softmax
from rmsnorm.nematus.numpy.rnnsearch import RNNSearch
from rmsnorm.nematus.numpy.transformer import Transformer

U = 2.0**-53
EXACT = 1e-12  # two float64 computations of one thing in another order; logits are below 10

RATES = {f"rnn_dropout_{part}": 0.3 for part in ("embedding", "hidden", "source", "target")}


def model_of(kind: str, **changes: Any) -> RNNSearch:
    config = config_of(kind).replace(**changes)
    return RNNSearch(config, random_parameters(config))


def of_words(model: Any, x: Any, x_mask: Any, y: Any) -> Any:
    """Log-probabilities of the words of y by the rules of decoding: (length, batch)."""
    if isinstance(model, Transformer):
        log_p = log_softmax(model.logits(x, x_mask, y)).swapaxes(0, 1)
    else:
        log_p = log_softmax(model.logits(x, x_mask, y, stepwise=True))
    return np.take_along_axis(log_p, y[..., None], axis=-1)[..., 0]


@pytest.mark.parametrize(("name", "norm"), [("A2s", "layer"), ("A4", "rms"), ("B", "rms")])
def test_what_nematus_computed(name: str, norm: str) -> None:
    """float32 of TensorFlow: logits to 2e-5, gradients to 1e-4 of their norm, translations token for token."""
    run = reference(name)
    config, parameters, own = run.model(norm)
    model = RNNSearch(config, parameters)
    x, x_mask, y, y_mask = run.sentences
    words = y_mask > 0
    error = abs(model.logits(x, x_mask, y) - run.arrays["logits"])[words].max()
    assert error <= 2e-5
    np.testing.assert_allclose(model.loss(x, x_mask, y, y_mask), run.arrays["loss_per_sentence"], rtol=1e-5)
    check_gradients(model.gradients(x, x_mask, y, y_mask), own, run.probes)
    assert check_beams(run, model, 2e-5) == (2 if name == "B" else 4)


def test_what_theano_nematus_computed() -> None:
    """float64 of Theano, with the weights of a v0.3 checkpoint."""
    run = reference("B")
    config, parameters, _ = run.model("rms")
    x, x_mask, y, y_mask = run.sentences
    for dialect in ("theano", "tensorflow-v0.3"):
        model = RNNSearch(config.replace(dialect=dialect), parameters)
        error = abs(model.logits(x, x_mask, y) - run.arrays["theano_logits"])[y_mask > 0].max()
        assert error <= 1e-12
        np.testing.assert_allclose(model.loss(x, x_mask, y, y_mask), run.arrays["theano_loss"], rtol=1e-12)


def test_what_nematus_transformer_computed() -> None:
    run = reference("A7b")
    config, parameters, own = run.model("rms")
    model = Transformer(config, parameters)
    x, x_mask, y, y_mask = run.sentences
    error = abs(model.logits(x, x_mask, y) - run.arrays["logits"])[y_mask.T > 0].max()
    assert error <= 2e-5
    np.testing.assert_allclose(model.loss(x, x_mask, y, y_mask), run.arrays["loss_per_sentence"], rtol=1e-5)
    check_gradients(model.gradients(x, x_mask, y, y_mask), own, run.probes)
    assert check_beams(run, model, 2e-5) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_differences(kind: str) -> None:
    model = model_of(kind)
    sentences = batch(model.config)
    check_directions(
        lambda given: RNNSearch(model.config, given).loss(*sentences).mean(),
        model.parameters,
        model.gradients(*sentences),
    )


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_gradients_of_the_transformer_are_those_of_differences(kind: str) -> None:
    config = transformer_of(kind)
    parameters, sentences = random_parameters(config), batch(config)
    check_directions(
        lambda given: Transformer(config, given).loss(*sentences, training=True).mean(),
        parameters,
        Transformer(config, parameters).gradients(*sentences, training=True),
    )


@pytest.mark.parametrize("kind", [*KINDS, "transformer"])
def test_padding_and_neighbours_change_nothing(kind: str) -> None:
    if kind == "transformer":
        config = transformer_of("rms")
        model: Any = Transformer(config, random_parameters(config))
    else:
        model = model_of(kind)
    x, x_mask, y, y_mask = batch(model.config)
    losses = model.loss(x, x_mask, y, y_mask)
    for i, loss in enumerate(losses):
        source, target = int(x_mask[:, i].sum()), int(y_mask[:, i].sum())
        alone = model.loss(
            x[:, :source, i : i + 1], x_mask[:source, i : i + 1], y[:target, i : i + 1], y_mask[:target, i : i + 1]
        )
        np.testing.assert_allclose(alone, [loss], rtol=EXACT)


@pytest.mark.parametrize("kind", [*KINDS, "transformer"])
@pytest.mark.parametrize("beam_size", [1, 3])
def test_scores_of_translations_are_those_of_their_words(kind: str, beam_size: int) -> None:
    """What a beam search carries along for each hypothesis is what scoring its words from the start gives."""
    if kind == "transformer":
        config = transformer_of("layer")
        model: Any = Transformer(config, random_parameters(config))
    else:
        model = model_of(kind)
    x, x_mask, _, _ = batch(model.config)
    found = model.translate(x, x_mask, beam_size, 6, normalization_alpha=0.5)
    assert (np.diff(found.scores, axis=1) <= 0).all()
    compared = 0
    for hypothesis in range(beam_size):
        words = found.sequences[:, hypothesis].T
        log_p = of_words(model, x, x_mask, words)
        for i, score in enumerate(found.scores[:, hypothesis]):
            ends = np.flatnonzero(words[:, i] == 0)
            length = ends[0] + 1 if len(ends) else len(words) + 1
            if score < -1e6:  # of a hypothesis that is not there
                continue
            # v0.3 ends a hypothesis that it cuts off, without scoring that
            scored = min(length, 6) if model.config.search == "costs" else length
            np.testing.assert_allclose(log_p[:scored, i].sum() / length**0.5, score, rtol=EXACT)
            compared += 1
    assert compared >= 3


def test_a_beam_as_wide_as_everything_finds_the_best() -> None:
    model = model_of("plain", search="costs")
    x, x_mask, _, _ = batch(model.config)
    found = model.translate(x, x_mask, 8, 2)
    words = np.array(np.meshgrid(*[range(8)] * 2, indexing="ij")).reshape(2, -1)
    for i in range(3):
        repeated = [np.repeat(each[..., i : i + 1], words.shape[1], axis=-1) for each in (x, x_mask)]
        log_p = of_words(model, *repeated, words)
        ended = np.cumsum(words == 0, axis=0) - (words == 0) > 0
        scores = np.where(ended, 0, log_p).sum(axis=0)
        best = np.where(ended, 0, words)[:, scores.argmax()]
        np.testing.assert_array_equal(found.sequences[i, 0, :2], best)
        np.testing.assert_allclose(found.scores[i, 0], scores.max(), rtol=EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_only_deep_models_of_v03_decode_in_another_way_than_they_score(kind: str) -> None:
    model = model_of(kind)
    x, x_mask, y, _ = batch(model.config)
    error = abs(model.logits(x, x_mask, y) - model.logits(x, x_mask, y, stepwise=True)).max()
    assert error > 0.1 if kind == "deep v0.3" else error == 0


def test_dialects_differ_where_nematus_does() -> None:
    """In padding of the source, and in the biases of transitions and of high levels."""
    config = config_of("rms").replace(rnn_enc_depth=2)
    parameters = random_parameters(config)
    x, x_mask, y, _ = batch(config)
    ours, theanos = (RNNSearch(config.replace(dialect=dialect), parameters) for dialect in ("tensorflow", "theano"))
    np.testing.assert_allclose(ours.logits(x, x_mask, y), theanos.logits(x, x_mask, y), rtol=0, atol=EXACT)
    contexts = ours.encode(x, x_mask), theanos.encode(x, x_mask)
    words = x_mask > 0
    np.testing.assert_allclose(contexts[0][words], contexts[1][words], rtol=0, atol=EXACT)
    assert abs(contexts[0] - contexts[1])[~words].min(axis=0).max() > 0.01

    deep = config_of("deep").replace(dialect="theano", rnn_enc_transition_depth=1, rnn_enc_depth=1)
    parameters = random_parameters(deep)
    found = [
        RNNSearch(deep.replace(dialect=each), parameters).logits(x, x_mask, y) for each in ("theano", "tensorflow")
    ]
    assert abs(found[0] - found[1]).max() > 0.05


def test_parts_that_are_others_in_disguise() -> None:
    """A slope of 1 is linear and one of 0 is relu; tied embeddings are a transposed output matrix; a mixture of one
    component is what that component gives; a lexical model that adds nothing adds nothing."""
    x, x_mask, y, _ = batch(config_of("plain"))
    logits = {kind: model_of(kind).logits(x, x_mask, y) for kind in ("linear", "relu")}
    for slope, kind in ((1.0, "linear"), (0.0, "relu")):
        config = config_of("prelu").replace(norm="none")
        slopes = {"decoder/next_word_predictor/hidden_prelu/slope": np.full(6, slope)}
        found = RNNSearch(config, {**model_of(kind).parameters, **slopes}).logits(x, x_mask, y)
        np.testing.assert_allclose(found, logits[kind], rtol=0, atol=EXACT)

    tied = model_of("tied decoder")
    matrix = {"decoder/next_word_predictor/hidden_to_logits/W": tied.parameters["decoder/embedding/embeddings"].T}
    untied = RNNSearch(config_of("plain"), {**tied.parameters, **matrix})
    np.testing.assert_allclose(tied.logits(x, x_mask, y), untied.logits(x, x_mask, y), rtol=0, atol=EXACT)

    mixture = model_of("mixture")
    found = mixture.logits(x, x_mask, y)
    np.testing.assert_allclose(np.exp(found).sum(axis=-1), 1, rtol=EXACT)
    certain = dict(mixture.parameters)
    certain["decoder/next_word_predictor/hidden_to_pi_logits/b"] = np.array([0.0, 800.0, 0.0])
    same = {name: certain[name.replace("hidden_0", "hidden_1").replace("hidden_2", "hidden_1")] for name in certain}
    np.testing.assert_allclose(
        RNNSearch(mixture.config, certain).logits(x, x_mask, y),
        RNNSearch(mixture.config, same).logits(x, x_mask, y),
        rtol=0,
        atol=EXACT,
    )

    lexical = model_of("lexical")
    silent = dict(lexical.parameters)
    for leaf in ("W", "b"):
        name = f"decoder/next_word_predictor/lexical_to_logits/{leaf}"
        silent[name] = 0 * silent[name]
    without = RNNSearch(lexical.config.replace(rnn_lexical_model=False), silent)
    np.testing.assert_array_equal(RNNSearch(lexical.config, silent).logits(x, x_mask, y), without.logits(x, x_mask, y))
    assert abs(lexical.logits(x, x_mask, y) - without.logits(x, x_mask, y)).max() > 0.1


def test_smoothed_labels() -> None:
    """RNNSearch: (1 - s) -log p(y) + s mean(-log p), always. Transformer: only in training, s shared by the others."""
    model = model_of("smoothed labels")
    x, x_mask, y, y_mask = batch(model.config)
    log_p = log_softmax(model.logits(x, x_mask, y))
    right = np.take_along_axis(log_p, y[..., None], axis=-1)[..., 0]
    wanted = -((0.9 * right + 0.1 * log_p.mean(axis=-1)) * y_mask).sum(axis=0)
    np.testing.assert_allclose(model.loss(x, x_mask, y, y_mask), wanted, rtol=EXACT)

    config = transformer_of("smoothed labels")
    transformer = Transformer(config, random_parameters(config))
    log_p = log_softmax(transformer.logits(x, x_mask, y)).swapaxes(0, 1)
    right = np.take_along_axis(log_p, y[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(transformer.loss(x, x_mask, y, y_mask), -(right * y_mask).sum(axis=0), rtol=EXACT)
    smooth = 0.9 * right + 0.1 / 7 * (log_p.sum(axis=-1) - right)
    least = -0.9 * np.log(0.9) - 0.1 * np.log(0.1 / 7)
    np.testing.assert_allclose(
        transformer.loss(x, x_mask, y, y_mask, training=True), -((smooth + least) * y_mask).sum(axis=0), rtol=EXACT
    )


@pytest.mark.parametrize("kind", ["rnn", "transformer"])
def test_errors(kind: str) -> None:
    config = config_of("factors") if kind == "rnn" else transformer_of("rms")
    model: Any = (RNNSearch if kind == "rnn" else Transformer)(config, random_parameters(config))
    x, x_mask, y, y_mask = batch(config)
    with pytest.raises(ValueError, match=r"encode: x is \(4, 3\), expected the shape \((1|2), length, batch\)"):
        model.encode(x[0], x_mask)
    with pytest.raises(TypeError, match=r"logits: x is dtype\('float64'\).*expected an array of integers"):
        model.logits(x * 1.0, x_mask, y)
    with pytest.raises(ValueError, match=r"loss: an id of x is 9, expected 0 to (7|8), the vocabulary"):
        model.loss(np.where(x == x.max(), 9, x), x_mask, y, y_mask)
    with pytest.raises(ValueError, match=r"loss: an id of y is -1, expected 0 to 7, the vocabulary"):
        model.loss(x, x_mask, y - 1, y_mask)
    with pytest.raises(ValueError, match=r"translate: x_mask has shape \(3, 3\), expected \(4, 3\)"):
        model.translate(x, x_mask[1:])
    with pytest.raises(ValueError, match=r"encode: x_mask is 0, expected at least one word in every sentence"):
        model.encode(x, x_mask * 0)
    with pytest.raises(ValueError, match=r"gradients: y_mask has shape \(2, 3\), expected \(4, 3\) to match y"):
        model.gradients(x, x_mask, y, y_mask[:2])
    with pytest.raises(ValueError, match=r"logits: y is \(4, 2\), expected the shape \(length, 3\)"):
        model.logits(x, x_mask, y[:, :2])
    with pytest.raises(ValueError, match=r"logits: y is \(0, 3\), expected the shape \(length, 3\)"):
        model.logits(x, x_mask, y[:0])
    with pytest.raises(ValueError, match=r"translate: beam_size is 0, expected an integer >= 1"):
        model.translate(x, x_mask, 0)
    with pytest.raises(ValueError, match=r"translate: max_length is -1, expected an integer >= 1"):
        model.translate(x, x_mask, 2, -1)
    with pytest.raises(ValueError, match=r"translate: beam_size is 9, expected at most 8, the target vocabulary"):
        model.translate(x, x_mask, 9)


def test_the_search_of_v03_never_gives_up_what_is_finished() -> None:
    """However bad it is: among models that often end, some would lose it to what is better."""
    config = config_of("plain").replace(search="costs")
    endings = 0
    for seed in range(10):
        parameters = random_parameters(config, seed=seed)
        parameters["decoder/next_word_predictor/hidden_to_logits/b"][0] += 1.5
        x, x_mask, _, _ = batch(config, seed)
        before: list[set[tuple[int, ...]]] = [set(), set(), set()]
        for length in range(1, 6):
            found = RNNSearch(config, parameters).translate(x, x_mask, 3, length)
            after = [
                {tuple(each) for each in map(np.trim_zeros, beam) if len(each) < length} for beam in found.sequences
            ]
            assert all(kept <= now for kept, now in zip(before, after, strict=True))
            before = after
            endings += sum(map(len, after))
    assert endings > 100


def test_when_the_sampler_stops() -> None:
    """When no living hypothesis can overtake the worst finished one, even if some of the beam is still empty."""
    log_p = np.log([0.6, 0.3, 0.1])

    def step(states: list[Any], previous: Any) -> tuple[Any, list[Any]]:
        return np.tile(log_p, (len(states[0]), 1)), states

    found = beam.search("sampler", step, [np.zeros((2, 1))], 2, 10, 0.0)
    np.testing.assert_array_equal(found.sequences, [[[0], [0]]])
    np.testing.assert_allclose(found.scores, [[log_p[0], -1e7]])
    log_p = np.log([0.3, 0.6, 0.1])
    found = beam.search("sampler", step, [np.zeros((2, 1))], 2, 10, 0.0)
    np.testing.assert_array_equal(found.sequences, [[[0, 0, 0, 0], [1, 0, 0, 0]]])  # log .3 + log .6 > 4 log .6
    np.testing.assert_allclose(found.scores, [[log_p[0], log_p[1] + log_p[0]]])


def dropped(kind: str) -> tuple[RNNSearch, Any, dict[str, Any]]:
    """A model with dropout, one sentence that lost words on both sides, and the masks of that."""
    model, words = model_of(kind, **RATES), np.array([1, 2, 3, 0])
    x, y = np.stack([words] * len(model.config.source_vocab_sizes))[..., None], words[:, None]
    sentences = (x, np.ones((4, 1)), y, np.ones((4, 1)))
    for seed in range(100):
        p = model._parameters(np.random.default_rng(seed))
        rnnsearch._loss(p, model.config, *model._sentences("test", *sentences))
        masks = p.dropout.masks
        if all(0 < np.count_nonzero(masks[f"{side} words"]) < 3 for side in ("source", "target")):
            return model, (sentences, seed), masks
    raise AssertionError("no seed drops words on both sides")


@pytest.mark.parametrize("kind", ["deep", "mixture", "factors", "lexical", "tied decoder"])
def test_gradients_with_dropout_are_those_of_differences(kind: str) -> None:
    model, (sentences, seed), masks = dropped(kind)
    check_directions(
        lambda given: RNNSearch(model.config, given).loss(*sentences, rng=np.random.default_rng(seed)).mean(),
        model.parameters,
        model.gradients(*sentences, rng=np.random.default_rng(seed)),
    )
    matrices = {row.name for row in variables(model.config) if len(row.shape) == 2}
    matrices -= {name for name in matrices if "/embedding/" in name or name.endswith("hidden_to_score")}
    extra = {"source words", "target words"}
    extra |= {"decoder/lexical"} if kind == "lexical" else set()
    extra |= {"decoder/next_word_predictor/hidden_to_logits/W"} if kind == "tied decoder" else set()
    assert set(masks) == matrices | extra
    assert all(set(mask.ravel()) <= {0.0, 1 / 0.7} for mask in masks.values())


@pytest.mark.parametrize("kind", ["deep", "mixture", "factors"])
def test_a_dropped_input_is_a_dropped_row_of_the_matrix(kind: str) -> None:
    """Which holds for one sentence, and only if all steps have the same mask; words are dropped as their embeddings."""
    model, ((x, x_mask, y, y_mask), seed), masks = dropped(kind)
    same = {name: value.copy() for name, value in model.parameters.items()}
    for name, mask in masks.items():
        if name in same:
            same[name] *= mask.T
    tables = [f"encoder/embedding/embeddings{f'_{i}' if i else ''}" for i in range(len(x))]
    sides = [(table, each, "source words") for table, each in zip(tables, x, strict=True)]
    for table, ids, side in (*sides, ("decoder/embedding/embeddings", y[:-1], "target words")):
        for word, factor in zip(ids[:, 0], masks[side][:, 0, 0], strict=True):
            same[table][word] *= factor
    wanted = RNNSearch(model.config, same).loss(x, x_mask, y, y_mask)
    found = model.loss(x, x_mask, y, y_mask, rng=np.random.default_rng(seed))
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert abs(found - model.loss(x, x_mask, y, y_mask)) > 1e-3
