"""The golden of RNNSearch as Nematus computes it: scores, losses, translations, and the gradient of every parameter.

The arithmetic is float64. The backward is written by hand, as pullbacks beside the operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rmsnorm.nematus import beam, sentences
from rmsnorm.nematus.beam import Translations
from rmsnorm.nematus.cells import rates
from rmsnorm.nematus.names import source_tables, target_table
from rmsnorm.nematus.numpy.output import cross_entropy, embed, lexical_state, log_softmax, predict
from rmsnorm.nematus.numpy.parameters import Array, Dropout, Parameters, drop, feed_forward, leaves, project
from rmsnorm.nematus.numpy.recurrent import nematus_deep_step, nematus_input, nematus_level, nematus_step

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

__all__ = ["RNNSearch"]


class RNNSearch:
    """Nematus's attentional encoder-decoder.

    Args:
        config: of the model; ``config.dialect`` says by whose rules it is computed.
        parameters: arrays by the names of Nematus master, as ``rmsnorm.nematus.load`` gives them.

    Example:
        >>> from rmsnorm.nematus.config import Config
        >>> from rmsnorm.nematus.names import variables
        >>> config = Config(embedding_size=2, state_size=2, source_vocab_sizes=(4,), target_vocab_size=3)
        >>> model = RNNSearch(config, {row.name: np.zeros(row.shape) for row in variables(config)})
        >>> x, y = np.array([[[3], [2], [0]]]), np.array([[1], [0]])
        >>> model.loss(x, np.ones((3, 1)), y, np.ones((2, 1))).round(4)  # 2 log 3
        array([2.1972])
    """

    def __init__(self, config: Config, parameters: Mapping[str, npt.ArrayLike]) -> None:
        self.config = config
        self.parameters = {name: np.asarray(value, np.float64) for name, value in parameters.items()}

    def encode(self, x: npt.ArrayLike, x_mask: npt.ArrayLike) -> Array:
        """What the decoder attends to: (source length, batch, 2 state_size).

        Args:
            x: ids, (factors, source length, batch).
            x_mask: 1 on words and on the end of sentence, 0 after it, (source length, batch).

        Raises:
            TypeError, ValueError: an array has another shape or dtype, or an id is not in the vocabulary.
        """
        ids, mask = sentences.source("encode", x, x_mask, self.config.source_vocab_sizes)
        return _encode(self._parameters(), self.config, ids, mask)[0]

    def logits(self, x: npt.ArrayLike, x_mask: npt.ArrayLike, y: npt.ArrayLike, *, stepwise: bool = False) -> Array:
        """Logits of every target word given those before it: (target length, batch, vocabulary).

        Args:
            x, x_mask: as for encode.
            y: ids, (target length, batch).
            stepwise: by the rules of decoding where those of scoring are others (dialect ``tensorflow-v0.3``).

        Raises:
            TypeError, ValueError: as encode.
        """
        ids, mask = sentences.source("logits", x, x_mask, self.config.source_vocab_sizes)
        words, _ = sentences.target("logits", y, ids.shape[2], self.config.target_vocab_size)
        return _score(self._parameters(), self.config, ids, mask, words, stepwise=stepwise)[0]

    def loss(
        self,
        x: npt.ArrayLike,
        x_mask: npt.ArrayLike,
        y: npt.ArrayLike,
        y_mask: npt.ArrayLike,
        *,
        rng: np.random.Generator | None = None,
    ) -> Array:
        """Cross-entropy of each sentence, summed over its words: (batch,), smoothed where the config says so.

        Args:
            x, x_mask, y: as for logits.
            y_mask: as x_mask, (target length, batch).
            rng: for training: what Nematus drops out is drawn from it, at the rates of the config.

        Raises:
            TypeError, ValueError: as encode.
        """
        return self._loss("loss", self._parameters(rng), x, x_mask, y, y_mask)[0]

    def gradients(
        self,
        x: npt.ArrayLike,
        x_mask: npt.ArrayLike,
        y: npt.ArrayLike,
        y_mask: npt.ArrayLike,
        *,
        rng: np.random.Generator | None = None,
    ) -> dict[str, Array]:
        """Gradient of the mean loss over the sentences with respect to every parameter, by name.

        Args, Raises: as for loss.
        """
        p = self._parameters(rng)
        loss, pullback = self._loss("gradients", p, x, x_mask, y, y_mask)
        pullback(np.full_like(loss, 1 / len(loss)))
        return {name: p.gradients[name] for name in self.parameters}

    def translate(
        self,
        x: npt.ArrayLike,
        x_mask: npt.ArrayLike,
        beam_size: int = 12,
        max_length: int | None = None,
        *,
        normalization_alpha: float = 0.0,
    ) -> Translations:
        """The best translations that a beam search finds, with Nematus's rules and orders.

        Args:
            x, x_mask: as for encode.
            beam_size: 1 is greedy.
            max_length: Nematus's translation_maxlen, by default that of the config; its master stops one word short.
            normalization_alpha: scores are divided by length^alpha.

        Returns:
            (sequences, scores), best first.

        Raises:
            TypeError, ValueError: as encode; also when beam_size or max_length is out of its domain.
        """
        p, config = self._parameters(), self.config
        max_length = config.translation_maxlen if max_length is None else max_length
        beam.check(beam_size, max_length)
        ids, mask = sentences.source("translate", x, x_mask, config.source_vocab_sizes)
        memory, initial, _ = _attend_to(p, config, ids, mask)
        memory = _Memory(*(np.repeat(each, beam_size, axis=1) for each in memory))

        def step(states: list[Array], previous: Array | None) -> tuple[Array, list[Array]]:
            word = np.zeros((len(states[0]), config.target_embedding_size))
            if previous is not None:
                word = p[target_table(config)][previous]
            gates, proposal, _ = nematus_input(p / "decoder/base/gru0", word, config.gru_bias("base", 0))
            (top, attended, weights, states), _ = _step(p, config, memory, states, (gates, proposal))
            lexical = None
            if config.rnn_lexical_model:
                lexical = lexical_state(p, weights[None], memory.embeddings)[0][0]
            return log_softmax(predict(p, config, word, top, attended, lexical)[0]), states

        states = [np.repeat(initial, beam_size, axis=0)] * config.rnn_dec_depth
        return beam.search(config.search, step, states, beam_size, max_length, normalization_alpha)

    def _parameters(self, rng: np.random.Generator | None = None) -> Parameters:
        dropout = None if rng is None else Dropout(rates(self.config, self.parameters), rng)
        return Parameters(self.parameters, self.config.norm, dropout=dropout)

    def _loss(self, op: str, p: Parameters, x: Any, x_mask: Any, y: Any, y_mask: Any) -> Any:
        config = self.config
        ids, mask = sentences.source(op, x, x_mask, config.source_vocab_sizes)
        words, words_mask = sentences.target(op, y, ids.shape[2], config.target_vocab_size, y_mask)
        logits, logits_pullback = _score(p, config, ids, mask, words)
        wrong = config.label_smoothing / config.target_vocab_size
        right = 1 - config.label_smoothing + wrong
        losses, loss_pullback = cross_entropy(logits, words, words_mask, right, wrong)
        return losses.sum(axis=0), lambda dloss: logits_pullback(loss_pullback(dloss))


class _Memory(NamedTuple):
    """What is known of the source: context, its part of the attention's hidden layer, embeddings, mask."""

    context: Array
    hidden: Array
    embeddings: Array
    mask: Array


class _Source(NamedTuple):
    """Gradients of a _Memory and of the decoder's initial state."""

    context: Array
    hidden: Array
    embeddings: Array
    initial: Array


def _encode(
    p: Parameters, config: Config, x: Array, mask: Array
) -> tuple[Array, Array, Callable[[Array, Array], None]]:
    """Context and embeddings of the source."""
    tables = source_tables(config)
    looked_up = [embed(p, table, ids) for table, ids in zip(tables, x, strict=True)]
    embeddings = np.concatenate([rows for rows, _ in looked_up], axis=-1)
    embeddings, drop_pullback = drop(p, "source words", embeddings, whole=True)
    # The stack that ends from left to right comes first.
    stacks = ("forward", "backward") if config.rnn_enc_depth % 2 else ("backward", "forward")
    tops, pullbacks = zip(*(_encoder_stack(p, config, stack, embeddings, mask) for stack in stacks), strict=True)

    def pullback(dcontext: Array, dembeddings: Array) -> None:
        for each, dtop in zip(pullbacks, np.split(dcontext, 2, axis=-1), strict=True):
            dembeddings = dembeddings + each(dtop)
        parts = np.split(drop_pullback(dembeddings), np.cumsum(config.dim_per_factor)[:-1], axis=-1)
        for (_, embed_pullback), part in zip(looked_up, parts, strict=True):
            embed_pullback(part)

    return np.concatenate(tops, axis=-1), embeddings, pullback


def _encoder_stack(
    p: Parameters, config: Config, stack: str, x: Array, mask: Array
) -> tuple[Array, Callable[[Array], Array]]:
    """Levels that read in alternating directions, with residual connections from the second on."""
    biases = [config.gru_bias("encoder", index) for index in range(config.rnn_enc_transition_depth)]
    h0 = np.zeros((x.shape[1], config.state_size))
    pullbacks = []
    for level in range(config.rnn_enc_depth):
        reverse = (level % 2 == 1) != (stack == "backward")
        carries = config.dialect == "theano"
        states, pullback_level = nematus_level(
            p / f"encoder/{stack}-stack/level{level}",
            x,
            h0,
            biases,
            mask=mask if reverse or carries else None,  # in TensorFlow what stands after the end does not matter
            masking="carry" if carries else "zero",
            reverse=reverse,
        )
        x = states + x if level else states
        pullbacks.append(pullback_level)

    def pullback(dx: Array) -> Array:
        for level, each in reversed(list(enumerate(pullbacks))):
            dbelow, _ = each(dx)
            dx = dbelow + dx if level else dbelow
        return dx

    return x, pullback


def _attend_to(
    p: Parameters, config: Config, x: Array, mask: Array
) -> tuple[_Memory, Array, Callable[[_Source], None]]:
    """The encoder, and what the decoder makes of it before its first step: memory and initial state."""
    context, embeddings, encode_pullback = _encode(p, config, x, mask)
    attention = p / "decoder/base/attention"
    hidden, hidden_pullback = project(
        attention, context, "context_to_hidden", "hidden_bias", leaves(p, "hidden_context_norm/")
    )
    share = (mask / mask.sum(axis=0))[..., None]
    layer, layer_pullback = feed_forward(p / "decoder/initial_state_constructor", (context * share).sum(axis=0))
    initial = np.tanh(layer)

    def pullback(d: _Source) -> None:
        dmean = layer_pullback(d.initial * (1 - initial**2))
        encode_pullback(d.context + hidden_pullback(d.hidden) + dmean * share, d.embeddings)

    return _Memory(context, hidden, embeddings, mask), initial, pullback


def _score(
    p: Parameters, config: Config, x: Array, mask: Array, y: Array, *, stepwise: bool = False
) -> tuple[Array, Callable[[Array], None]]:
    """Logits of the given words."""
    memory, initial, source_pullback = _attend_to(p, config, x, mask)
    words, words_pullback = embed(p, target_table(config), y[:-1])
    words, drop_pullback = drop(p, "target words", words, whole=True)
    words = np.concatenate((np.zeros((1, *words.shape[1:])), words))  # before the first word stands a zero vector
    gates, proposal, input_pullback = nematus_input(p / "decoder/base/gru0", words, config.gru_bias("base", 0))

    old = config.dialect == "tensorflow-v0.3" and not stepwise
    high = np.zeros_like(initial) if old else initial
    states = [initial, *[high] * (config.rnn_dec_depth - 1)]
    steps, pullbacks = [], []
    for t in range(len(y)):
        found, pullback_step = _step(p, config, memory, states, (gates[t], proposal[t]), old=old)
        states = found.states
        steps.append(found[:3])
        pullbacks.append(pullback_step)
    tops, attended, weights = (np.stack(each) for each in zip(*steps, strict=True))

    lexical, lexical_pullback = None, None
    if config.rnn_lexical_model:
        lexical, lexical_pullback = lexical_state(p, weights, memory.embeddings)
    logits, predict_pullback = predict(p, config, words, tops, attended, lexical)

    def pullback(dlogits: Array) -> None:
        dwords, dtops, dattended, dlexical = predict_pullback(dlogits)
        dweights, dembeddings = np.zeros_like(weights), np.zeros_like(memory.embeddings)
        if lexical_pullback is not None and dlexical is not None:
            dweights, dembeddings = lexical_pullback(dlexical)
        dgates, dproposal = np.empty_like(gates), np.empty_like(proposal)
        dcontext, dhidden = np.zeros_like(memory.context), np.zeros_like(memory.hidden)
        dstates = [np.zeros_like(initial)] * config.rnn_dec_depth
        for t in reversed(range(len(y))):
            d = pullbacks[t](dtops[t], dattended[t], dweights[t], dstates)
            dstates, dgates[t], dproposal[t] = d.states, d.gates, d.proposal
            dcontext += d.context
            dhidden += d.hidden
        dwords = dwords + input_pullback(dgates, dproposal)
        words_pullback(drop_pullback(dwords[1:]))
        dinitial = dstates[0] if old else sum(dstates[1:], start=dstates[0])
        source_pullback(_Source(dcontext, dhidden, dembeddings, dinitial))

    return logits, pullback


class _Found(NamedTuple):
    """A step of the decoder: top state, attended context, attention weights, and the states of all levels."""

    top: Array
    attended: Array
    weights: Array
    states: list[Array]


class _StepGradients(NamedTuple):
    states: list[Array]
    gates: Array
    proposal: Array
    context: Array
    hidden: Array


def _step(
    p: Parameters,
    config: Config,
    memory: _Memory,
    states: list[Array],
    from_word: tuple[Array, Array],
    *,
    old: bool = False,
) -> tuple[_Found, Callable[[Array, Array, Array, list[Array]], _StepGradients]]:
    """One word further: the conditional GRU with attention, then the high levels.

    old: as v0.3 scores, without a residual connection around the first high level.
    """
    base, *highs = states
    state, first_pullback = nematus_step(p / "decoder/base/gru0", base, from_word, config.gru_bias("base", 0))
    attended, weights, attend_pullback = _attend(p / "decoder/base/attention", state, memory)
    biases = [config.gru_bias("base", index) for index in range(1, config.rnn_dec_base_transition_depth)]
    state, second_pullback = _fed_step(p / "decoder/base", state, attended, biases, first=1)
    new_states, top = [state], state
    biases = [config.gru_bias("high", index) for index in range(config.rnn_dec_high_transition_depth)]
    high_pullbacks = []
    for level, high in enumerate(highs):
        below = np.concatenate((top, attended), axis=-1) if config.rnn_dec_deep_context else top
        high, high_pullback = _fed_step(p / f"decoder/high/level{level}", high, below, biases)
        new_states.append(high)
        high_pullbacks.append(high_pullback)
        top = high if old and level == 0 else top + high

    def pullback(dtop: Array, dattended: Array, dweights: Array, dstates: list[Array]) -> _StepGradients:
        dhighs = []
        for level in reversed(range(len(highs))):
            dhigh, dbelow = high_pullbacks[level](dtop + dstates[1 + level])
            dhighs.append(dhigh)
            if config.rnn_dec_deep_context:
                dbelow, more = np.split(dbelow, [config.state_size], axis=-1)
                dattended = dattended + more
            dtop = dbelow if old and level == 0 else dtop + dbelow
        dstate, more = second_pullback(dtop + dstates[0])
        more_state, dcontext, dhidden = attend_pullback(dattended + more, dweights)
        dbase, dgates, dproposal = first_pullback(dstate + more_state)
        return _StepGradients([dbase, *reversed(dhighs)], dgates, dproposal, dcontext, dhidden)

    return _Found(top, attended, weights, new_states), pullback


def _fed_step(
    p: Parameters, h: Array, x: Array, biases: list[Any], *, first: int = 0
) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    """A step of gru<first> and the ones after it on an input; the pullback gives the gradients of h and x."""
    gates, proposal, input_pullback = nematus_input(p / f"gru{first}", x, biases[0])
    new, step_pullback = nematus_deep_step(p, h, (gates, proposal), biases, first)

    def pullback(dnew: Array) -> tuple[Array, Array]:
        dh, dgates, dproposal = step_pullback(dnew)
        return dh, input_pullback(dgates, dproposal)

    return new, pullback


def _attend(
    p: Parameters, state: Array, memory: _Memory
) -> tuple[Array, Array, Callable[[Array, Array], tuple[Array, Array, Array]]]:
    """sum_t a_t context_t, a = softmax over the words of tanh(hidden_t + norm(state W)) v."""
    from_state, state_pullback = project(p, state, "state_to_hidden", None, leaves(p, "hidden_state_norm/"))
    hidden = np.tanh(memory.hidden + from_state)
    scores = (hidden @ p["hidden_to_score"])[..., 0]
    weights = np.exp(scores - scores.max(axis=0)) * memory.mask  # the greatest of all, padding too, as Nematus does
    weights /= weights.sum(axis=0)

    def pullback(dattended: Array, dweights: Array) -> tuple[Array, Array, Array]:
        dweights = dweights + (memory.context * dattended).sum(axis=-1)
        dscores = weights * (dweights - (weights * dweights).sum(axis=0))
        p.add("hidden_to_score", np.einsum("sbh,sb->h", hidden, dscores)[:, None])
        dhidden = dscores[..., None] * p["hidden_to_score"][:, 0] * (1 - hidden**2)
        return state_pullback(dhidden.sum(axis=0)), weights[..., None] * dattended, dhidden

    return (memory.context * weights[..., None]).sum(axis=0), weights, pullback
