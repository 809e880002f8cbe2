"""What zero's RNNSearch does in its own way: another cell, other maps and another attention.

Sequences are time-major: words (length, batch, features), masks (length, batch).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmsnorm.nematus.models.operations import Array, Arrays
from rmsnorm.nematus.models.parameters import Parameters, embed, masked_scores, project, softmax
from rmsnorm.nematus.names import table

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

# What the decoder reads: context, its part of the attention's hidden layer, embeddings, what is added to the scores.
Memory = tuple[Array, Array, Array, Array]


def attend_to(p: Parameters, config: Config, x: Array, mask: Array) -> tuple[Memory, Array]:
    """What the decoder reads of the source, and the initial state of the decoder."""
    ops = p.ops
    embeddings = embed(p, config, "encoder", x)
    words = p.dropout(embeddings, config.rnn_dropout_embedding)  # each feature of each word on its own
    forward = _level(p / "encoder/forward", config, words, mask)
    backward = _level(p / "encoder/backward", config, words, mask, reverse=True)
    context = ops.concatenated((forward, backward), -1)
    ends = ops.concatenated((forward[-1], backward[0]), -1)
    initial = ops.tanh(_linear(p / "decoder_initializer/gru_init", [ends]))
    hidden = _linear(p / "decoder/context_att", [context])
    return (context, hidden, embeddings, masked_scores(p, config, mask)), initial


def decode(
    p: Parameters, config: Config, memory: Memory, states: list[Array], words: Array, mask: Array | None = None
) -> tuple[Array, list[Array]]:
    """Logits of any number of steps, given the embeddings of the words before them, and the last state.

    mask: at masked words the states stay.
    """
    q, ops, rate = p / "decoder", p.ops, config.rnn_dropout_embedding
    words = p.dropout(words, rate)

    def step(state: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        """One step of the decoder: the new state and the attended context."""
        gates, proposal, *m = inputs
        s = _cell(q / "cell_gru_lower", state[0], (gates, proposal), *m)
        attended = _attend(q / "attention", s, memory)
        return (_cell(q / "cell_gru_higher", s, _fetch(q / "fetch_state_gru_higher", attended), *m),), (attended,)

    masks = [] if mask is None else [mask[..., None]]
    from_words = _fetch(q / "fetch_state_gru_lower", words)
    (top,), (contexts,) = ops.scan(step, (states[0],), (*from_words, *masks), (memory[0][0],))
    feature = p.dropout(ops.tanh(_linear(p / "pre_logits", [top, contexts, words])), rate)
    return ops.matmul(feature, ops.transposed(p[table(config, "softmax")])), [top[-1]]


def _attend(p: Parameters, s: Array, memory: Memory) -> Array:
    """sum_t w_t context_t, w = softmax over the words of v tanh(hidden_t + norm(s W) + b), padding masked."""
    ops, (context, of_context, _, masked) = p.ops, memory
    hidden = ops.tanh(of_context + _linear(p / "feed_query", [s]))
    scores = _linear(p / "feed_logits", [hidden], norm=False)[..., 0] + masked
    return ops.sum(context * softmax(p, scores, 0)[..., None], 0)


def _level(p: Parameters, config: Config, x: Array, mask: Array, *, reverse: bool = False) -> Array:
    """A GRU over a sequence, from zeros; the states of masked words are those before them."""

    def step(state: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        gates, proposal, m = inputs
        return (_cell(p / "cell_gru", state[0], (gates, proposal), m),), ()

    h0 = p.ops.filled((p.ops.shape(x)[1], config.state_size), 0.0, x)
    inputs = (*_fetch(p / "fetch_state_gru", x), mask[..., None])
    return p.ops.scan(step, (h0,), inputs, reverse=reverse)[0][0]


def _fetch(p: Parameters, x: Array) -> tuple[Array, Array]:
    """What the input of a GRU adds to its gates and to its proposal, for any number of steps at once."""
    return _linear(p / "gate_x", [x]), _linear(p / "hide_x", [x])


def _cell(p: Parameters, h: Array, from_input: tuple[Array, Array], m: Array | None = None) -> Array:
    """One step of a GRU.

    z, r = sigmoid(norm(h U) + b + gates);   h' = z h + (1 - z) tanh(norm((r h) Ux) + bx + proposal);   m h' + (1 - m) h
    """
    z, r = p.ops.split(p.ops.sigmoid(from_input[0] + _linear(p / "gate_h", [h])), 2)
    new = z * h + (1 - z) * p.ops.tanh(from_input[1] + _linear(p / "hide_h", [r * h]))
    return new if m is None else m * new + (1 - m) * h


def _linear(p: Parameters, xs: list[Array], *, norm: bool = True) -> Array:
    """sum_i norm(x_i W_i), plus a bias where there is one."""
    norms = [(f"ln_0_{i}/scale", f"ln_0_{i}/offset") if norm else None for i in range(len(xs))]
    terms = [project(p, x, f"W_0_{i}", None, norms[i]) for i, x in enumerate(xs)]
    bias = p.get("b_0")
    return sum(terms[1:], terms[0]) if bias is None else sum(terms[1:], terms[0]) + bias
