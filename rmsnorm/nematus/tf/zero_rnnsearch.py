"""What zero's RNNSearch does in its own way, in TensorFlow: another cell, attention and loss.

Sequences are time-major: words (length, batch, features), masks (length, batch).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from rmsnorm.nematus.tf.output import softmax
from rmsnorm.nematus.tf.parameters import Parameters, multiply, project
from rmsnorm.nematus.transformer_names import ZERO_BIAS, Use, transformer_table

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

Memory = tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]


def score(p: Parameters, config: Config, x: tf.Tensor, mask: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Logits of the target words. After the end of a sentence the states stay."""
    memory, initial = attend_to(p, config, x, mask)
    words = tf.pad(_embed(p, config, "decoder", y[:-1]), ((1, 0), (0, 0), (0, 0)))  # zeros precede the first word
    return decode(p, config, memory, [initial], _drop(p, config, words), tf.cast(y != 0, words.dtype))[0]


def attend_to(p: Parameters, config: Config, x: tf.Tensor, mask: tf.Tensor) -> tuple[Memory, tf.Tensor]:
    """What the decoder reads of the source, as the fields of _Memory, and the initial state of the decoder."""
    embeddings = _embed(p, config, "encoder", x[0])
    words = _drop(p, config, embeddings)
    forward = _level(p / "encoder/forward", config, words, mask)
    backward = _level(p / "encoder/backward", config, words, mask, reverse=True)
    context = tf.concat((forward, backward), -1)
    initial = tf.tanh(_linear(p / "decoder_initializer/gru_init", [tf.concat((forward[-1], backward[0]), -1)]))
    return (context, _linear(p / "decoder/context_att", [context]), embeddings, mask), initial


def decode(
    p: Parameters,
    config: Config,
    memory: Memory,
    states: list[tf.Tensor],
    words: tf.Tensor,
    mask: tf.Tensor | None = None,
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Logits of any number of steps, given the embeddings of the words before them, and the last state."""
    decoder = p / "decoder"
    masks = tf.ones_like(words[..., :1]) if mask is None else mask[..., None]
    top, contexts = tf.scan(
        lambda last, inputs: _step(decoder, config, memory, last[0], inputs[:2], inputs[2]),
        (*_fetch(decoder / "fetch_state_gru_lower", words), masks),
        (states[0], tf.zeros_like(memory[0][0])),
    )
    feature = _drop(p, config, tf.tanh(_linear(p / "pre_logits", [top, contexts, words])))
    return multiply(feature, tf.transpose(p[transformer_table(config, "softmax")])), [top[-1]]


def _step(
    p: Parameters, config: Config, memory: Memory, h: tf.Tensor, from_word: tuple[tf.Tensor, tf.Tensor], m: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """One step of the decoder: the new state and the attended context."""
    s = _cell(p / "cell_gru_lower", h, from_word, m)
    attended = _attend(p / "attention", config, s, memory)
    return _cell(p / "cell_gru_higher", s, _fetch(p / "fetch_state_gru_higher", attended), m), attended


def _attend(p: Parameters, config: Config, s: tf.Tensor, memory: Memory) -> tf.Tensor:
    """sum_t w_t context_t, w = softmax over the words of v tanh(hidden_t + norm(s W) + b), padding masked."""
    context, of_context, _, mask = memory
    hidden = tf.tanh(of_context + _linear(p / "feed_query", [s]))
    feed = p / "feed_logits"
    scores = multiply(hidden, feed["W_0_0"])[..., 0] + feed["b_0"] + (1 - mask) * config.masked_score
    return tf.reduce_sum(context * softmax(scores, axis=0)[..., None], 0)


def _level(p: Parameters, config: Config, x: tf.Tensor, mask: tf.Tensor, *, reverse: bool = False) -> tf.Tensor:
    """A GRU over a sequence, from zeros; the states of masked words are those before them."""

    def step(h: tf.Tensor, inputs: Any) -> tf.Tensor:
        return _cell(p / "cell_gru", h, inputs[:2], inputs[2])

    h0 = tf.zeros((tf.shape(x)[1], config.state_size), x.dtype)
    return tf.scan(step, (*_fetch(p / "fetch_state_gru", x), mask[..., None]), h0, reverse=reverse)


def _fetch(p: Parameters, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """What the input of a GRU adds to its gates and to its proposal, for any number of steps at once."""
    return _linear(p / "gate_x", [x]), _linear(p / "hide_x", [x])


def _cell(p: Parameters, h: tf.Tensor, from_input: tuple[tf.Tensor, tf.Tensor], m: tf.Tensor) -> tf.Tensor:
    """One step of a GRU.

    z, r = sigmoid(norm(h U) + b + gates);   h' = z h + (1 - z) tanh(norm((r h) Ux) + bx + proposal);   m h' + (1 - m) h
    """
    z, r = tf.split(tf.sigmoid(from_input[0] + _linear(p / "gate_h", [h])), 2, -1)
    n = tf.tanh(from_input[1] + _linear(p / "hide_h", [r * h]))
    return m * (z * h + (1 - z) * n) + (1 - m) * h


def _linear(p: Parameters, xs: list[tf.Tensor]) -> tf.Tensor:
    """sum_i norm(x_i W_i), plus a bias where there is one."""
    norms = [(f"ln_0_{i}/scale", f"ln_0_{i}/offset") for i in range(len(xs))]
    terms = [project(p, x, f"W_0_{i}", None, norms[i]) for i, x in enumerate(xs)]
    bias = p.get("b_0")
    return sum(terms[1:], terms[0]) if bias is None else sum(terms[1:], terms[0]) + bias


def _embed(p: Parameters, config: Config, use: Use, ids: tf.Tensor) -> tf.Tensor:
    """Embeddings of words, plus the bias."""
    return tf.gather(p[transformer_table(config, use)], ids) + p[ZERO_BIAS]


def _drop(p: Parameters, config: Config, x: tf.Tensor) -> tf.Tensor:
    """In training, drop each feature of each word on its own."""
    rate = config.rnn_dropout_embedding
    return x if p.dropout is None or not rate else keras.random.dropout(x, rate, seed=p.dropout.seed)
