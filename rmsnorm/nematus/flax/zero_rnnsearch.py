"""What zero's RNNSearch does in its own way, in JAX: another cell, attention and loss.

Sequences are time-major: words (length, batch, features), masks (length, batch).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from jax import lax
from jax import numpy as jnp

from rmsnorm.nematus.flax.output import softmax
from rmsnorm.nematus.flax.parameters import Parameters, multiply, project
from rmsnorm.nematus.transformer_names import ZERO_BIAS, Use, transformer_table

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

Memory = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def score(p: Parameters, config: Config, x: jax.Array, mask: jax.Array, y: jax.Array) -> jax.Array:
    """Logits of the target words. After the end of a sentence the states stay."""
    memory, initial = attend_to(p, config, x, mask)
    words = jnp.pad(_embed(p, config, "decoder", y[:-1]), ((1, 0), (0, 0), (0, 0)))  # zeros precede the first word
    return decode(p, config, memory, [initial], p.drop("target words", words), (y != 0).astype(words.dtype))[0]


def attend_to(p: Parameters, config: Config, x: jax.Array, mask: jax.Array) -> tuple[Memory, jax.Array]:
    """What the decoder reads of the source, as the fields of _Memory, and the initial state of the decoder."""
    embeddings = _embed(p, config, "encoder", x[0])
    words = p.drop("source words", embeddings)
    forward = _level(p / "encoder/forward", config, words, mask)
    backward = _level(p / "encoder/backward", config, words, mask, reverse=True)
    context = jnp.concatenate((forward, backward), axis=-1)
    initial = jnp.tanh(
        _linear(p / "decoder_initializer/gru_init", [jnp.concatenate((forward[-1], backward[0]), axis=-1)])
    )
    return (context, _linear(p / "decoder/context_att", [context]), embeddings, mask), initial


def decode(
    p: Parameters,
    config: Config,
    memory: Memory,
    states: list[jax.Array],
    words: jax.Array,
    mask: jax.Array | None = None,
) -> tuple[jax.Array, list[jax.Array]]:
    """Logits of any number of steps, given the embeddings of the words before them, and the last state."""
    decoder = p / "decoder"
    masks = jnp.ones_like(words[..., :1]) if mask is None else mask[..., None]

    def step(h: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
        result = _step(decoder, config, memory, h, inputs[:2], inputs[2])
        return result[0], result

    from_words = _fetch(decoder / "fetch_state_gru_lower", words)
    h, (top, contexts) = lax.scan(step, states[0], (*from_words, masks))
    feature = p.drop("features", jnp.tanh(_linear(p / "pre_logits", [top, contexts, words])))
    return multiply(feature, p[transformer_table(config, "softmax")].T), [h]


def _step(
    p: Parameters, config: Config, memory: Memory, h: jax.Array, from_word: tuple[jax.Array, jax.Array], m: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One step of the decoder: the new state and the attended context."""
    s = _cell(p / "cell_gru_lower", h, from_word, m)
    attended = _attend(p / "attention", config, s, memory)
    return _cell(p / "cell_gru_higher", s, _fetch(p / "fetch_state_gru_higher", attended), m), attended


def _attend(p: Parameters, config: Config, s: jax.Array, memory: Memory) -> jax.Array:
    """sum_t w_t context_t, w = softmax over the words of v tanh(hidden_t + norm(s W) + b), padding masked."""
    context, of_context, _, mask = memory
    hidden = jnp.tanh(of_context + _linear(p / "feed_query", [s]))
    feed = p / "feed_logits"
    scores = multiply(hidden, feed["W_0_0"])[..., 0] + feed["b_0"] + (1 - mask) * config.masked_score
    return (context * softmax(scores, axis=0)[..., None]).sum(0)


def _level(p: Parameters, config: Config, x: jax.Array, mask: jax.Array, *, reverse: bool = False) -> jax.Array:
    """A GRU over a sequence, from zeros; the states of masked words are those before them."""

    def step(h: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
        h = _cell(p / "cell_gru", h, inputs[:2], inputs[2])
        return h, h

    h0 = jnp.zeros((x.shape[1], config.state_size), x.dtype)
    return lax.scan(step, h0, (*_fetch(p / "fetch_state_gru", x), mask[..., None]), reverse=reverse)[1]


def _fetch(p: Parameters, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the input of a GRU adds to its gates and to its proposal, for any number of steps at once."""
    return _linear(p / "gate_x", [x]), _linear(p / "hide_x", [x])


def _cell(p: Parameters, h: jax.Array, from_input: tuple[jax.Array, jax.Array], m: jax.Array) -> jax.Array:
    """One step of a GRU.

    z, r = sigmoid(norm(h U) + b + gates);   h' = z h + (1 - z) tanh(norm((r h) Ux) + bx + proposal);   m h' + (1 - m) h
    """
    z, r = jnp.split(jax.nn.sigmoid(from_input[0] + _linear(p / "gate_h", [h])), 2, axis=-1)
    n = jnp.tanh(from_input[1] + _linear(p / "hide_h", [r * h]))
    return m * (z * h + (1 - z) * n) + (1 - m) * h


def _linear(p: Parameters, xs: list[jax.Array]) -> jax.Array:
    """sum_i norm(x_i W_i), plus a bias where there is one."""
    norms = [(f"ln_0_{i}/scale", f"ln_0_{i}/offset") for i in range(len(xs))]
    terms = [project(p, x, f"W_0_{i}", None, norms[i]) for i, x in enumerate(xs)]
    bias = p.get("b_0")
    return sum(terms[1:], terms[0]) if bias is None else sum(terms[1:], terms[0]) + bias


def _embed(p: Parameters, config: Config, use: Use, ids: jax.Array) -> jax.Array:
    """Embeddings of words, plus the bias."""
    return jnp.take(p[transformer_table(config, use)], ids, axis=0) + p[ZERO_BIAS]
