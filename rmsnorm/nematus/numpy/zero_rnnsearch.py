"""What zero's RNNSearch does in its own way, in NumPy, the golden: another cell and another attention.

Sequences are time-major: words (length, batch, features), masks (length, batch).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rmsnorm.nematus.dialects import table
from rmsnorm.nematus.numpy.parameters import Array, Parameters, embed, project, sigmoid, softmax

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

# What the decoder reads of the source: context, its part of the attention's hidden layer, embeddings, mask.
Memory = tuple[Array, Array, Array, Array]


def attend_to(p: Parameters, config: Config, x: Array, mask: Array) -> tuple[Memory, Array]:
    """What the decoder reads of the source, and the initial state of the decoder."""
    embeddings = embed(p, config, "encoder", x)
    forward = _level(p / "encoder/forward", config, embeddings, mask)
    backward = _level(p / "encoder/backward", config, embeddings[::-1], mask[::-1])[::-1]
    context = np.concatenate((forward, backward), axis=-1)
    ends = np.concatenate((forward[-1], backward[0]), axis=-1)
    initial = np.tanh(_linear(p / "decoder_initializer/gru_init", [ends]))
    return (context, _linear(p / "decoder/context_att", [context]), embeddings, mask), initial


def decode(
    p: Parameters, config: Config, memory: Memory, states: list[Array], words: Array, mask: Array | None = None
) -> tuple[Array, list[Array]]:
    """Logits of any number of steps, given the embeddings of the words before them, and the last state."""
    q, h = p / "decoder", states[0]
    masks = np.ones((*words.shape[:2], 1)) if mask is None else mask[..., None]
    steps = []
    for gates, proposal, m in zip(*_fetch(q / "fetch_state_gru_lower", words), masks, strict=True):
        s = _cell(q / "cell_gru_lower", h, gates, proposal, m)
        attended = _attend(q / "attention", config, s, memory)
        h = _cell(q / "cell_gru_higher", s, *_fetch(q / "fetch_state_gru_higher", attended), m)
        steps.append((h, attended))
    top, contexts = (np.stack(arrays) for arrays in zip(*steps, strict=True))
    feature = np.tanh(_linear(p / "pre_logits", [top, contexts, words]))
    return feature @ p[table(config, "softmax")].T, [h]


def _attend(p: Parameters, config: Config, s: Array, memory: Memory) -> Array:
    """sum_t w_t context_t, w = softmax over the words of v tanh(hidden_t + norm(s W) + b), padding masked."""
    context, of_context, _, mask = memory
    hidden, feed = np.tanh(of_context + _linear(p / "feed_query", [s])), p / "feed_logits"
    scores = (hidden @ feed["W_0_0"])[..., 0] + feed["b_0"] + (1 - mask) * config.masked_score
    return (context * softmax(scores, 0)[..., None]).sum(axis=0)


def _level(p: Parameters, config: Config, x: Array, mask: Array) -> Array:
    """A GRU over a sequence, from zeros; the states of masked words are those before them."""
    h, states = np.zeros((x.shape[1], config.state_size), x.dtype), []
    for gates, proposal, m in zip(*_fetch(p / "fetch_state_gru", x), mask[..., None], strict=True):
        h = _cell(p / "cell_gru", h, gates, proposal, m)
        states.append(h)
    return np.stack(states)


def _fetch(p: Parameters, x: Array) -> tuple[Array, Array]:
    """What the input of a GRU adds to its gates and to its proposal, for any number of steps at once."""
    return _linear(p / "gate_x", [x]), _linear(p / "hide_x", [x])


def _cell(p: Parameters, h: Array, gates: Array, proposal: Array, m: Array) -> Array:
    """One step of a GRU.

    z, r = sigmoid(norm(h U) + b + gates);   h' = z h + (1 - z) tanh(norm((r h) Ux) + bx + proposal);   m h' + (1 - m) h
    """
    z, r = np.split(sigmoid(gates + _linear(p / "gate_h", [h])), 2, axis=-1)
    n = np.tanh(proposal + _linear(p / "hide_h", [r * h]))
    return m * (z * h + (1 - z) * n) + (1 - m) * h


def _linear(p: Parameters, xs: list[Array]) -> Array:
    """sum_i norm(x_i W_i), plus a bias where there is one."""
    norms = [(f"ln_0_{i}/scale", f"ln_0_{i}/offset") for i in range(len(xs))]
    y: Array = np.sum([project(p, x, f"W_0_{i}", None, norms[i]) for i, x in enumerate(xs)], axis=0)
    return y + p["b_0"] if "b_0" in p else y
