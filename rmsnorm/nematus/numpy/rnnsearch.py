"""RNNSearch as Nematus computes it, in NumPy: what the methods of a model compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rmsnorm.nematus.dialects import rules, table
from rmsnorm.nematus.numpy import zero_rnnsearch
from rmsnorm.nematus.numpy.parameters import Array, Parameters, embed, feed_forward, log_softmax, losses, project
from rmsnorm.nematus.numpy.recurrent import nematus_deep_step, nematus_input, nematus_level, nematus_step
from rmsnorm.nematus.rules import NOTHING

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

Memory = zero_rnnsearch.Memory


def encode(p: Parameters, config: Config, x: Array, mask: Array) -> Array:
    """What the decoder attends to."""
    return _attend_to(p, config, x, mask)[0][0]


def score(p: Parameters, config: Config, x: Array, mask: Array, y: Array, *, stepwise: bool = False) -> Array:
    """Logits of the target words."""
    memory, initial = _attend_to(p, config, x, mask)
    words = embed(p, config, "decoder", np.insert(y[:-1], 0, NOTHING, axis=0)[None])
    if rules(config).own_recurrent:  # after the end of a sentence the states stay
        return zero_rnnsearch.decode(p, config, memory, [initial], words, (y != 0).astype(words.dtype))[0]
    old = rules(config).scores_otherwise and not stepwise
    high = np.zeros_like(initial) if old else initial
    return _decode(p, config, memory, [initial, *[high] * (config.rnn_dec_depth - 1)], words, old=old)[0]


def loss(p: Parameters, config: Config, x: Array, mask: Array, y: Array, y_mask: Array, *, training: bool) -> Array:
    """The loss of each sentence."""
    return losses(config, score(p, config, x, mask, y), y, y_mask, training=training)


def begin(
    p: Parameters, config: Config, x: Array, mask: Array, *, beam_size: int, length: int
) -> tuple[Memory, list[Array]]:
    """Memory and states before the first word, beam_size rows for every sentence."""
    memory, initial = _attend_to(p, config, x, mask)
    context, hidden, embeddings, mask = (np.repeat(array, beam_size, axis=1) for array in memory)
    return (context, hidden, embeddings, mask), [np.repeat(initial, beam_size, axis=0)] * config.rnn_dec_depth


def step(
    p: Parameters, config: Config, memory: Memory, states: list[Array], words: Array, start: int
) -> tuple[Array, list[Array]]:
    """Log-probabilities of the words after these ids, and the new states."""
    decode = zero_rnnsearch.decode if rules(config).own_recurrent else _decode
    logits, states = decode(p, config, memory, states, embed(p, config, "decoder", words[None])[None])
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


def _attend_to(p: Parameters, config: Config, x: Array, mask: Array) -> tuple[Memory, Array]:
    """The encoder, and what the decoder needs before its first step: memory and initial state."""
    if rules(config).own_recurrent:
        return zero_rnnsearch.attend_to(p, config, x, mask)
    embeddings = embed(p, config, "encoder", x)
    # The stack whose last level reads from left to right comes first.
    stacks = ("forward", "backward") if config.rnn_enc_depth % 2 else ("backward", "forward")
    context = np.concatenate([_encoder_stack(p, config, stack, embeddings, mask) for stack in stacks], axis=-1)
    attention = p / "decoder/base/attention"
    hidden = project(attention, context, "context_to_hidden", "hidden_bias", "hidden_context_norm/")
    mean = (context * (mask / mask.sum(axis=0))[..., None]).sum(axis=0)
    initial = np.tanh(feed_forward(p / "decoder/initial_state_constructor", mean))
    return (context, hidden, embeddings, mask), initial


def _decode(
    p: Parameters, config: Config, memory: Memory, states: list[Array], words: Array, *, old: bool = False
) -> tuple[Array, list[Array]]:
    """Logits of any number of steps, given the embeddings of the words before them, and the last states.

    old: the rules by which v0.3 scores: no residual connection around the first high level.
    """
    steps, q, (context, _, embeddings, _) = [], p / "decoder/base", memory
    sources = (context, embeddings)[: 1 + config.rnn_lexical_model]
    biases = [config.gru_bias("base", index) for index in range(config.rnn_dec_base_transition_depth)]
    of_highs = [config.gru_bias("high", index) for index in range(config.rnn_dec_high_transition_depth)]
    for from_word in zip(*nematus_input(q / "gru0", words, biases[0]), strict=True):
        base, *highs = states
        base = nematus_step(q / "gru0", base, biases[0], *from_word)
        attended, *lexical = _attend(q / "attention", base, memory, sources)
        top = nematus_deep_step(q, base, nematus_input(q / "gru1", attended, biases[1]), biases[1:], first=1)
        states = [top]
        for level, high in enumerate(highs):
            below = np.concatenate((top, attended), axis=-1) if config.rnn_dec_deep_context else top
            r = p / f"decoder/high/level{level}"
            high = nematus_deep_step(r, high, nematus_input(r / "gru0", below, of_highs[0]), of_highs)
            states.append(high)
            top = high if old and level == 0 else top + high
        steps.append((top, attended, *lexical))
    return _predict(p, config, words, *map(np.stack, zip(*steps, strict=True))), states


def _attend(p: Parameters, state: Array, memory: Memory, sources: tuple[Array, ...]) -> list[Array]:
    """sum_t w_t source_t, w = softmax over the words of tanh(hidden_t + norm(state W)) v."""
    (_, hidden, _, mask), from_state = memory, project(p, state, "state_to_hidden", None, "hidden_state_norm/")
    scores = (np.tanh(hidden + from_state) @ p["hidden_to_score"])[..., 0]
    weights = np.exp(scores - scores.max(axis=0)) * mask  # of all scores, padding too, as in Nematus
    weights /= weights.sum(axis=0)
    return [(source * weights[..., None]).sum(axis=0) for source in sources]


def _predict(
    p: Parameters, config: Config, previous: Array, state: Array, attended: Array, lexical: Array | None = None
) -> Array:
    """Logits: activation(sum of the normalised projections of the three) W + b, plus those of the lexical model.

    lexical: attended embeddings, of which Nguyen & Chiang make tanh(norm(e W + b)) + e, e = tanh(lexical).
    """
    q = p / "decoder/next_word_predictor"
    parts = {"prev_emb": previous, "state": state, "attended_context": attended}
    hidden = _activate(q, config, np.sum([feed_forward(q / f"{name}_to_hidden", x) for name, x in parts.items()], 0))
    logits = (_mixture if config.softmax_mixture_size > 1 else _logits)(p, config, hidden)
    if lexical is None:
        return logits
    e = np.tanh(lexical)
    deep = np.tanh(feed_forward(p / "decoder/lexical", e)) + e
    return logits + feed_forward(q / "lexical_to_logits", deep, norm=False)


def _activate(q: Parameters, config: Config, x: Array) -> Array:
    if config.output_hidden_activation == "tanh":
        return np.tanh(x)
    if config.output_hidden_activation == "relu":
        return np.maximum(x, 0)
    if config.output_hidden_activation == "linear":
        return x
    return np.maximum(x, 0) + q["hidden_prelu/slope"] * np.minimum(x, 0)


def _logits(p: Parameters, config: Config, hidden: Array) -> Array:
    """hidden W + b; if the embeddings are tied, W is their transpose."""
    q = p / "decoder/next_word_predictor/hidden_to_logits"
    if not config.tie_decoder_embeddings:
        return feed_forward(q, hidden, norm=False)
    return hidden @ p[table(config, "softmax")].T + q["b"]


def _mixture(p: Parameters, config: Config, hidden: Array) -> Array:
    """log sum_k pi_k softmax(logits of tanh(norm(hidden W_k + b_k))), pi = softmax(hidden W + b)."""
    q = p / "decoder/next_word_predictor"
    log_pi = log_softmax(feed_forward(q / "hidden_to_pi_logits", hidden, norm=False))
    components = []
    for k in range(config.softmax_mixture_size):
        deep = np.tanh(feed_forward(q / f"hidden_to_mos_hidden_{k}", hidden))
        components.append(log_pi[..., k, None] + log_softmax(_logits(p, config, deep)))
    return np.logaddexp.reduce(components)
