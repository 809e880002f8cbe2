"""RNNSearch as Nematus computes it, in NumPy, the golden: scores, losses and translations. All of it is float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rmsnorm.nematus import protocol
from rmsnorm.nematus.cells import rates
from rmsnorm.nematus.dialects import NOTHING, ZERO_BIAS, rules
from rmsnorm.nematus.names import source_tables, target_table
from rmsnorm.nematus.numpy import zero_rnnsearch
from rmsnorm.nematus.numpy.model import Model
from rmsnorm.nematus.numpy.output import lexical_state, log_softmax, predict
from rmsnorm.nematus.numpy.parameters import Array, Dropout, Parameters, feed_forward, leaves, project
from rmsnorm.nematus.numpy.recurrent import nematus_deep_step, nematus_input, nematus_level, nematus_step

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

__all__ = ["RNNSearch"]


class _Memory(NamedTuple):
    """What the decoder reads of the source: context, its part of the attention's hidden layer, embeddings, mask."""

    context: Array
    hidden: Array
    embeddings: Array
    mask: Array


def encode(p: Parameters, config: Config, x: Array, mask: Array) -> Array:
    """What the decoder attends to."""
    return _attend_to(p, config, x, mask)[0].context


def score(p: Parameters, config: Config, x: Array, mask: Array, y: Array, *, stepwise: bool = False) -> Array:
    """Logits of the target words."""
    if rules(config).own_recurrent:
        return zero_rnnsearch.score(p, config, x, mask, y)
    memory, initial = _attend_to(p, config, x, mask)
    words = p.drop("target words", p[target_table(config)][y[:-1]], whole=True)
    words = np.concatenate((np.zeros((1, *words.shape[1:])), words))  # a zero vector precedes the first word
    old = rules(config).scores_otherwise and not stepwise
    high = np.zeros_like(initial) if old else initial
    return _decode(p, config, memory, [initial, *[high] * (config.rnn_dec_depth - 1)], words, old=old)[0]


def begin(p: Parameters, config: Config, x: Array, mask: Array, beam_size: int) -> tuple[_Memory, list[Array]]:
    """Memory and states before the first word, beam_size rows for every sentence."""
    memory, initial = _attend_to(p, config, x, mask)
    memory = _Memory(*(np.repeat(array, beam_size, axis=1) for array in memory))
    return memory, [np.repeat(initial, beam_size, axis=0)] * config.rnn_dec_depth


def decode_step(
    p: Parameters, config: Config, memory: _Memory, states: list[Array], words: Array
) -> tuple[Array, list[Array]]:
    """Log-probabilities of the words after these ids, and the new states; the vector of no word is zero."""
    embeddings = p[target_table(config)][words] + (p[ZERO_BIAS] if rules(config).embedding_bias else 0)
    decode = zero_rnnsearch.decode if rules(config).own_recurrent else _decode
    logits, states = decode(p, config, memory, states, embeddings[None] * (words != NOTHING)[:, None])
    return log_softmax(logits[0]), states


def _encoder_stack(p: Parameters, config: Config, stack: str, x: Array, mask: Array) -> Array:
    """Levels that read in alternating directions, with residual connections from the second level on."""
    biases = [config.gru_bias("encoder", index) for index in range(config.rnn_enc_transition_depth)]
    h0, masking = np.zeros((x.shape[1], config.state_size)), rules(config).masking
    for level in range(config.rnn_enc_depth):
        reverse = (level % 2 == 1) != (stack == "backward")
        # in TensorFlow the states after the end have no effect
        own = mask if reverse or masking == "carry" else None
        q = p / f"encoder/{stack}-stack/level{level}"
        states = nematus_level(q, x, h0, own, biases=biases, masking=masking, reverse=reverse)
        x = states + x if level else states
    return x


def _attend_to(p: Parameters, config: Config, x: Array, mask: Array) -> tuple[_Memory, Array]:
    """The encoder, and what the decoder needs before its first step: memory and initial state."""
    if rules(config).own_recurrent:
        memory, initial = zero_rnnsearch.attend_to(p, config, x, mask)
        return _Memory(*memory), initial
    factors = [p[table][ids] for table, ids in zip(source_tables(config), x, strict=True)]
    embeddings = p.drop("source words", np.concatenate(factors, axis=-1), whole=True)
    # The stack whose last level reads from left to right comes first.
    stacks = ("forward", "backward") if config.rnn_enc_depth % 2 else ("backward", "forward")
    context = np.concatenate([_encoder_stack(p, config, stack, embeddings, mask) for stack in stacks], axis=-1)
    attention = p / "decoder/base/attention"
    hidden = project(attention, context, "context_to_hidden", "hidden_bias", leaves(p, "hidden_context_norm/"))
    mean = (context * (mask / mask.sum(axis=0))[..., None]).sum(axis=0)
    initial = np.tanh(feed_forward(p / "decoder/initial_state_constructor", mean))
    return _Memory(context, hidden, embeddings, mask), initial


def _decode(
    p: Parameters, config: Config, memory: _Memory, states: list[Array], words: Array, *, old: bool = False
) -> tuple[Array, list[Array]]:
    """Logits of any number of steps, given the embeddings of the words before them, and the last states.

    old: the rules by which v0.3 scores: no residual connection around the first high level.
    """
    steps, q = [], p / "decoder/base"
    biases = [config.gru_bias("base", index) for index in range(config.rnn_dec_base_transition_depth)]
    of_highs = [config.gru_bias("high", index) for index in range(config.rnn_dec_high_transition_depth)]
    for from_word in zip(*nematus_input(q / "gru0", words, biases[0]), strict=True):
        base, *highs = states
        base = nematus_step(q / "gru0", base, *from_word, biases[0])
        attended, weights = _attend(q / "attention", base, memory)
        top = nematus_deep_step(q, base, nematus_input(q / "gru1", attended, biases[1]), biases[1:], first=1)
        states = [top]
        for level, high in enumerate(highs):
            below = np.concatenate((top, attended), axis=-1) if config.rnn_dec_deep_context else top
            r = p / f"decoder/high/level{level}"
            high = nematus_deep_step(r, high, nematus_input(r / "gru0", below, of_highs[0]), of_highs)
            states.append(high)
            top = high if old and level == 0 else top + high
        steps.append((top, attended, weights))
    tops, contexts, all_weights = (np.stack(arrays) for arrays in zip(*steps, strict=True))
    lexical = lexical_state(p, all_weights, memory.embeddings) if config.rnn_lexical_model else None
    return predict(p, config, words, tops, contexts, lexical), states


def _attend(p: Parameters, state: Array, memory: _Memory) -> tuple[Array, Array]:
    """sum_t w_t context_t, w = softmax over the words of tanh(hidden_t + norm(state W)) v; and w."""
    hidden = np.tanh(memory.hidden + project(p, state, "state_to_hidden", None, leaves(p, "hidden_state_norm/")))
    scores = (hidden @ p["hidden_to_score"])[..., 0]
    weights = np.exp(scores - scores.max(axis=0)) * memory.mask  # of all scores, padding too, as in Nematus
    weights /= weights.sum(axis=0)
    return (memory.context * weights[..., None]).sum(axis=0), weights


class RNNSearch(Model, protocol.RNNSearch):
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

    _encode, _score = staticmethod(encode), staticmethod(score)
    _begin, _decode_step = staticmethod(begin), staticmethod(decode_step)

    def loss(self, x: Any, x_mask: Any, y: Any, y_mask: Any, *, rng: np.random.Generator | None = None) -> Array:
        """See protocol.RNNSearch.loss. rng: for training; the dropout masks are drawn from it."""
        dropout = None if rng is None else Dropout(rates(self.config, self.parameters), rng)
        return self.compute("loss", x, x_mask, y, y_mask, dropout=dropout)
