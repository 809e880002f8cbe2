"""RNNSearch as Nematus computes it, in NumPy, the golden: scores, losses, translations and all gradients.

The arithmetic is float64. The backward pass is written by hand: every operation returns its pullback, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rmsnorm.nematus import beam, sentences
from rmsnorm.nematus.beam import Translations
from rmsnorm.nematus.cells import rates, rnn_smoothed
from rmsnorm.nematus.names import source_tables, target_table
from rmsnorm.nematus.numpy import zero_rnnsearch
from rmsnorm.nematus.numpy.output import cross_entropy, embed, lexical_state, log_softmax, predict
from rmsnorm.nematus.numpy.parameters import Array, Dropout, Parameters, drop, feed_forward, leaves, project
from rmsnorm.nematus.numpy.recurrent import nematus_deep_step, nematus_input, nematus_level, nematus_step
from rmsnorm.nematus.transformer_names import ZERO_BIAS

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

__all__ = ["RNNSearch"]


class RNNSearch:
    """Nematus's attentional encoder-decoder: see rmsnorm.nematus.protocol.RNNSearch.

    Example:
        >>> from rmsnorm.nematus.config import Config
        >>> from rmsnorm.nematus.names import variables
        >>> config = Config(embedding_size=2, state_size=2, source_vocab_sizes=(4,), target_vocab_size=3)
        >>> model = RNNSearch(config, {row.name: np.zeros(row.shape) for row in variables(config)})
        >>> x, y = np.array([[[3], [2], [0]]]), np.array([[1], [0]])
        >>> model.loss(x, np.ones((3, 1)), y, np.ones((2, 1))).round(4)  # 2 log 3
        array([2.1972])
    """

    def __init__(self, config: Config, parameters: Mapping[str, Any]) -> None:
        self.config = config
        self.parameters = {name: np.asarray(value, np.float64) for name, value in parameters.items()}

    def encode(self, x: Any, x_mask: Any) -> Array:
        """See protocol.RNNSearch.encode."""
        p, config = self._parameters(), self.config
        ids, mask = sentences.source("encode", x, x_mask, config)
        return _attend_to(p, config, ids, mask)[0].context

    def logits(self, x: Any, x_mask: Any, y: Any, *, stepwise: bool = False) -> Array:
        """See protocol.RNNSearch.logits."""
        p, config = self._parameters(), self.config
        ids, mask, words, _ = self._sentences("logits", x, x_mask, y)
        return _score(p, config, ids, mask, words, stepwise=stepwise)[0]

    def loss(self, x: Any, x_mask: Any, y: Any, y_mask: Any, *, rng: np.random.Generator | None = None) -> Array:
        """See protocol.RNNSearch.loss. rng: for training; the dropout masks are drawn from it."""
        p, config = self._parameters(rng), self.config
        return _loss(p, config, *self._sentences("loss", x, x_mask, y, y_mask))[0]

    def gradients(
        self, x: Any, x_mask: Any, y: Any, y_mask: Any, *, rng: np.random.Generator | None = None
    ) -> dict[str, Array]:
        """Gradient of the mean loss over the sentences with respect to every parameter, by name; as loss."""
        p, config = self._parameters(rng), self.config
        loss, pullback = _loss(p, config, *self._sentences("gradients", x, x_mask, y, y_mask))
        pullback(np.full_like(loss, 1 / len(loss)))
        return {name: p.gradients[name] for name in self.parameters}

    def translate(
        self,
        x: Any,
        x_mask: Any,
        beam_size: int | None = None,
        max_length: int | None = None,
        *,
        normalization_alpha: float | None = None,
    ) -> Translations:
        """See protocol.RNNSearch.translate."""
        p, config = self._parameters(), self.config
        table = p[target_table(config)]
        ids, mask = sentences.source("translate", x, x_mask, config)
        plan = beam.plan(config, (mask != 0).sum(axis=0), beam_size, max_length, normalization_alpha)
        memory, states = _begin(p, config, ids, mask, plan.beam_size)

        def step(states: list[Array], previous: Any) -> tuple[Array, list[Array]]:
            words = np.zeros((len(states[0]), table.shape[1]))
            if not beam.is_first(config, previous):
                words = table[previous] + (p[ZERO_BIAS] if config.dialect == "zero" else 0)
            return _step(p, config, memory, states, words)

        return beam.search(plan, step, states)

    def _parameters(self, rng: np.random.Generator | None = None) -> Parameters:
        dropout = None if rng is None else Dropout(rates(self.config, self.parameters), rng)
        return Parameters(self.parameters, self.config.norm, eps=self.config.eps, dropout=dropout)

    def _sentences(self, op: str, x: Any, x_mask: Any, y: Any, y_mask: Any = None) -> tuple[Array, Array, Array, Array]:
        """Ids and masks of the source and of the target."""
        config = self.config
        ids, mask = sentences.source(op, x, x_mask, config)
        return ids, mask, *sentences.target(op, y, ids.shape[2], config, y_mask)


class _Memory(NamedTuple):
    """What the decoder reads of the source: context, its part of the attention's hidden layer, embeddings, mask."""

    context: Array
    hidden: Array
    embeddings: Array
    mask: Array


class _SourceGradients(NamedTuple):
    """Gradients of a _Memory and of the decoder's initial state."""

    context: Array
    hidden: Array
    embeddings: Array
    initial: Array


def _score(
    p: Parameters, config: Config, x: Array, mask: Array, y: Array, *, stepwise: bool = False
) -> tuple[Array, Callable[[Array], None]]:
    """Logits of the target words."""
    if config.dialect == "zero":
        return zero_rnnsearch.score(p, config, x, mask, y)
    memory, initial, source_pullback = _attend_to(p, config, x, mask)
    words, words_pullback = embed(p, target_table(config), y[:-1])
    words, drop_pullback = drop(p, "target words", words, whole=True)
    words = np.concatenate((np.zeros((1, *words.shape[1:])), words))  # a zero vector precedes the first word
    old = config.dialect == "tensorflow-v0.3" and not stepwise
    high = np.zeros_like(initial) if old else initial
    states = [initial, *[high] * (config.rnn_dec_depth - 1)]
    logits, _, decode_pullback = _decode(p, config, memory, states, words, old=old)

    def pullback(dlogits: Array) -> None:
        dwords, dstates, dcontext, dhidden, dembeddings = decode_pullback(dlogits)
        words_pullback(drop_pullback(dwords[1:]))
        dinitial = dstates[0] if old else sum(dstates[1:], start=dstates[0])
        source_pullback(_SourceGradients(dcontext, dhidden, dembeddings, dinitial))

    return logits, pullback


def _loss(
    p: Parameters, config: Config, x: Array, mask: Array, y: Array, y_mask: Array
) -> tuple[Array, Callable[[Array], None]]:
    logits, logits_pullback = _score(p, config, x, mask, y)
    losses, losses_pullback = cross_entropy(logits, y, y_mask, *rnn_smoothed(config)[:2])
    words = y_mask.sum(axis=0)
    size = words if config.dialect == "zero" else np.ones_like(words)
    loss = (losses.sum(axis=0) - rnn_smoothed(config)[2] * words) / size
    return loss, lambda dloss: logits_pullback(losses_pullback(dloss / size))


def _begin(p: Parameters, config: Config, x: Array, mask: Array, beam_size: int) -> tuple[_Memory, list[Array]]:
    """Memory and states before the first word, beam_size rows for every sentence."""
    memory, initial, _ = _attend_to(p, config, x, mask)
    memory = _Memory(*(np.repeat(array, beam_size, axis=1) for array in memory))
    return memory, [np.repeat(initial, beam_size, axis=0)] * config.rnn_dec_depth


def _step(
    p: Parameters, config: Config, memory: _Memory, states: list[Array], words: Array
) -> tuple[Array, list[Array]]:
    """Log-probabilities of the word after the given embeddings, and the new states."""
    decode = zero_rnnsearch.decode if config.dialect == "zero" else _decode
    logits, states, _ = decode(p, config, memory, states, words[None])
    return log_softmax(logits[0]), states


def _encode(
    p: Parameters, config: Config, x: Array, mask: Array
) -> tuple[Array, Array, Callable[[Array, Array], None]]:
    """Context and embeddings of the source."""
    tables = source_tables(config)
    factors, embed_pullbacks = zip(*(embed(p, table, ids) for table, ids in zip(tables, x, strict=True)), strict=True)
    embeddings, drop_pullback = drop(p, "source words", np.concatenate(factors, axis=-1), whole=True)
    # The stack whose last level reads from left to right comes first.
    stacks = ("forward", "backward") if config.rnn_enc_depth % 2 else ("backward", "forward")
    tops, pullbacks = zip(*(_encoder_stack(p, config, stack, embeddings, mask) for stack in stacks), strict=True)

    def pullback(dcontext: Array, dembeddings: Array) -> None:
        for stack_pullback, dtop in zip(pullbacks, np.split(dcontext, 2, axis=-1), strict=True):
            dembeddings = dembeddings + stack_pullback(dtop)
        dfactors = np.split(drop_pullback(dembeddings), np.cumsum(config.dim_per_factor)[:-1], axis=-1)
        for embed_pullback, dfactor in zip(embed_pullbacks, dfactors, strict=True):
            embed_pullback(dfactor)

    return np.concatenate(tops, axis=-1), embeddings, pullback


def _encoder_stack(
    p: Parameters, config: Config, stack: str, x: Array, mask: Array
) -> tuple[Array, Callable[[Array], Array]]:
    """Levels that read in alternating directions, with residual connections from the second level on."""
    biases = [config.gru_bias("encoder", index) for index in range(config.rnn_enc_transition_depth)]
    h0 = np.zeros((x.shape[1], config.state_size))
    pullbacks = []
    for level in range(config.rnn_enc_depth):
        reverse = (level % 2 == 1) != (stack == "backward")
        carries = config.dialect == "theano"
        states, level_pullback = nematus_level(
            p / f"encoder/{stack}-stack/level{level}",
            x,
            h0,
            biases,
            mask=mask if reverse or carries else None,  # in TensorFlow the states after the end have no effect
            masking="carry" if carries else "zero",
            reverse=reverse,
        )
        x = states + x if level else states
        pullbacks.append(level_pullback)

    def pullback(dx: Array) -> Array:
        for level, level_pullback in reversed(list(enumerate(pullbacks))):
            dbelow, _ = level_pullback(dx)
            dx = dbelow + dx if level else dbelow
        return dx

    return x, pullback


def _attend_to(
    p: Parameters, config: Config, x: Array, mask: Array
) -> tuple[_Memory, Array, Callable[[_SourceGradients], None]]:
    """The encoder, and what the decoder needs before its first step: memory and initial state."""
    if config.dialect == "zero":
        memory, initial, _ = zero_rnnsearch.attend_to(p, config, x, mask)
        return _Memory(*memory), initial, lambda d: None
    context, embeddings, encode_pullback = _encode(p, config, x, mask)
    attention = p / "decoder/base/attention"
    hidden, hidden_pullback = project(
        attention, context, "context_to_hidden", "hidden_bias", leaves(p, "hidden_context_norm/")
    )
    share = (mask / mask.sum(axis=0))[..., None]
    layer, layer_pullback = feed_forward(p / "decoder/initial_state_constructor", (context * share).sum(axis=0))
    initial = np.tanh(layer)

    def pullback(d: _SourceGradients) -> None:
        dmean = layer_pullback(d.initial * (1 - initial**2))
        encode_pullback(d.context + hidden_pullback(d.hidden) + dmean * share, d.embeddings)

    return _Memory(context, hidden, embeddings, mask), initial, pullback


def _decode(
    p: Parameters, config: Config, memory: _Memory, states: list[Array], words: Array, *, old: bool = False
) -> tuple[Array, list[Array], Callable[[Array], tuple[Array, list[Array], Array, Array, Array]]]:
    """Logits of any number of steps, given the embeddings of the words before them, and the last states.

    The pullback returns the gradients of the words, of the first states, and of the memory's context, hidden layer and
    embeddings. old: the rules by which v0.3 scores: no residual connection around the first high level.
    """
    gates, proposal, input_pullback = nematus_input(p / "decoder/base/gru0", words, config.gru_bias("base", 0))
    steps, pullbacks = [], []
    for from_word in zip(gates, proposal, strict=True):
        result, pullback_step = _decoder_step(p, config, memory, states, from_word, old=old)
        states = result.states
        steps.append(result[:3])
        pullbacks.append(pullback_step)
    top, attended, weights = (np.stack(arrays) for arrays in zip(*steps, strict=True))

    lexical, lexical_pullback = None, None
    if config.rnn_lexical_model:
        lexical, lexical_pullback = lexical_state(p, weights, memory.embeddings)
    logits, predict_pullback = predict(p, config, words, top, attended, lexical)

    def pullback(dlogits: Array) -> tuple[Array, list[Array], Array, Array, Array]:
        dwords, dtop, dattended, dlexical = predict_pullback(dlogits)
        dweights, dembeddings = np.zeros_like(weights), np.zeros_like(memory.embeddings)
        if lexical_pullback is not None and dlexical is not None:
            dweights, dembeddings = lexical_pullback(dlexical)
        dgates, dproposal = np.empty_like(gates), np.empty_like(proposal)
        dcontext, dhidden = np.zeros_like(memory.context), np.zeros_like(memory.hidden)
        dstates = [np.zeros_like(state) for state in states]
        for t in reversed(range(len(words))):
            d = pullbacks[t](dtop[t], dattended[t], dweights[t], dstates)
            dstates, dgates[t], dproposal[t] = d.states, d.gates, d.proposal
            dcontext += d.context
            dhidden += d.hidden
        return dwords + input_pullback(dgates, dproposal), dstates, dcontext, dhidden, dembeddings

    return logits, states, pullback


class _Step(NamedTuple):
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


def _decoder_step(
    p: Parameters,
    config: Config,
    memory: _Memory,
    states: list[Array],
    from_word: tuple[Array, Array],
    *,
    old: bool = False,
) -> tuple[_Step, Callable[[Array, Array, Array, list[Array]], _StepGradients]]:
    """One step of the conditional GRU with attention, and of the high levels; old: as for _decode."""
    base, *highs = states
    state, first_pullback = nematus_step(p / "decoder/base/gru0", base, from_word, config.gru_bias("base", 0))
    attended, weights, attend_pullback = _attend(p / "decoder/base/attention", state, memory)
    biases = [config.gru_bias("base", index) for index in range(1, config.rnn_dec_base_transition_depth)]
    state, second_pullback = _step_with_input(p / "decoder/base", state, attended, biases, first=1)
    new_states, top = [state], state
    biases = [config.gru_bias("high", index) for index in range(config.rnn_dec_high_transition_depth)]
    high_pullbacks = []
    for level, high in enumerate(highs):
        below = np.concatenate((top, attended), axis=-1) if config.rnn_dec_deep_context else top
        high, high_pullback = _step_with_input(p / f"decoder/high/level{level}", high, below, biases)
        new_states.append(high)
        high_pullbacks.append(high_pullback)
        top = high if old and level == 0 else top + high

    def pullback(dtop: Array, dattended: Array, dweights: Array, dstates: list[Array]) -> _StepGradients:
        dhighs = []
        for level in reversed(range(len(highs))):
            dhigh, dbelow = high_pullbacks[level](dtop + dstates[1 + level])
            dhighs.append(dhigh)
            if config.rnn_dec_deep_context:
                dbelow, from_context = np.split(dbelow, [config.state_size], axis=-1)
                dattended = dattended + from_context
            dtop = dbelow if old and level == 0 else dtop + dbelow
        dstate, from_second = second_pullback(dtop + dstates[0])
        from_attention, dcontext, dhidden = attend_pullback(dattended + from_second, dweights)
        dbase, dgates, dproposal = first_pullback(dstate + from_attention)
        return _StepGradients([dbase, *reversed(dhighs)], dgates, dproposal, dcontext, dhidden)

    return _Step(top, attended, weights, new_states), pullback


def _step_with_input(
    p: Parameters, h: Array, x: Array, biases: list[Any], *, first: int = 0
) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    """A step of gru<first> with input x, and of the GRUs after it; the pullback returns the gradients of h and x."""
    gates, proposal, input_pullback = nematus_input(p / f"gru{first}", x, biases[0])
    new, step_pullback = nematus_deep_step(p, h, (gates, proposal), biases, first)

    def pullback(dnew: Array) -> tuple[Array, Array]:
        dh, dgates, dproposal = step_pullback(dnew)
        return dh, input_pullback(dgates, dproposal)

    return new, pullback


def _attend(
    p: Parameters, state: Array, memory: _Memory
) -> tuple[Array, Array, Callable[[Array, Array], tuple[Array, Array, Array]]]:
    """sum_t w_t context_t, w = softmax over the words of tanh(hidden_t + norm(state W)) v; and w."""
    from_state, state_pullback = project(p, state, "state_to_hidden", None, leaves(p, "hidden_state_norm/"))
    hidden = np.tanh(memory.hidden + from_state)
    scores = (hidden @ p["hidden_to_score"])[..., 0]
    largest = scores.max(axis=0)  # of all scores, padding too, as in Nematus
    weights = np.exp(scores - largest) * memory.mask
    weights /= weights.sum(axis=0)

    def pullback(dattended: Array, dweights: Array) -> tuple[Array, Array, Array]:
        dweights = dweights + (memory.context * dattended).sum(axis=-1)
        dscores = weights * (dweights - (weights * dweights).sum(axis=0))
        p.add("hidden_to_score", np.einsum("sbh,sb->h", hidden, dscores)[:, None])
        dhidden = dscores[..., None] * p["hidden_to_score"][:, 0] * (1 - hidden**2)
        return state_pullback(dhidden.sum(axis=0)), weights[..., None] * dattended, dhidden

    return (memory.context * weights[..., None]).sum(axis=0), weights, pullback
