"""From the states of a Nematus decoder to logits, and from logits to losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from rmsnorm.nematus.names import target_table
from rmsnorm.nematus.tf.parameters import Parameters, feed_forward, multiply

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config


def predict(
    p: Parameters,
    config: Config,
    previous: tf.Tensor,
    state: tf.Tensor,
    attended: tf.Tensor,
    lexical: tf.Tensor | None,
) -> tf.Tensor:
    """Logits: activation(sum of the normalised projections of the three) W + b, plus those of the lexical model."""
    q = p / "decoder/next_word_predictor"
    hidden = _activate(
        q,
        config,
        feed_forward(q / "prev_emb_to_hidden", previous)
        + feed_forward(q / "state_to_hidden", state)
        + feed_forward(q / "attended_context_to_hidden", attended),
    )
    logits = (_mixture if config.softmax_mixture_size > 1 else _logits)(p, config, hidden)
    return logits if lexical is None else logits + feed_forward(q / "lexical_to_logits", lexical, norm=False)


def lexical_state(p: Parameters, weights: tf.Tensor, embeddings: tf.Tensor) -> tf.Tensor:
    """The lexical model of Nguyen & Chiang: tanh(norm(e W + b)) + e, e = tanh(attended source embeddings).

    weights: (steps, source length, batch); embeddings: (source length, batch, size).
    """
    e = tf.tanh(tf.einsum("tsb,sbe->tbe", weights, p.drop("decoder/lexical", embeddings)))
    return tf.tanh(feed_forward(p / "decoder/lexical", e)) + e


def cross_entropy(
    logits: tf.Tensor, y: tf.Tensor, mask: tf.Tensor, right: float = 1.0, wrong: float = 0.0
) -> tf.Tensor:
    """-sum_v target_v log p_v of every word, times the mask; target is ``right`` at the word, ``wrong`` elsewhere."""
    logits = _wide(logits)
    losses = (right - wrong) * tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
    if wrong:
        losses = losses - wrong * tf.reduce_sum(log_softmax(logits), -1)
    return losses * tf.cast(mask, losses.dtype)


def log_softmax(logits: tf.Tensor) -> tf.Tensor:
    """log softmax(logits), in at least float32."""
    return tf.nn.log_softmax(_wide(logits))


def softmax(scores: tf.Tensor, axis: int = -1) -> tf.Tensor:
    """Weights, divided by their sum once more.

    That it is 1 up to a rounding is not enough for the gradient: it is a difference, in which what all values have in
    common must cancel.
    """
    weights = tf.nn.softmax(scores, axis)
    return weights / tf.reduce_sum(weights, axis, keepdims=True)


def _wide(logits: tf.Tensor) -> tf.Tensor:
    return logits if logits.dtype == tf.float64 else tf.cast(logits, tf.float32)


def _activate(q: Parameters, config: Config, x: tf.Tensor) -> tf.Tensor:
    if config.output_hidden_activation == "tanh":
        return tf.tanh(x)
    if config.output_hidden_activation == "relu":
        return tf.nn.relu(x)
    if config.output_hidden_activation == "linear":
        return x
    return tf.where(x > 0, x, q["hidden_prelu/slope"] * x)


def _logits(p: Parameters, config: Config, hidden: tf.Tensor) -> tf.Tensor:
    """hidden W + b; if the embeddings are tied, W is their transpose."""
    q = p / "decoder/next_word_predictor/hidden_to_logits"
    if not config.tie_decoder_embeddings:
        return feed_forward(q, hidden, norm=False)
    return multiply(q.drop("W", hidden), tf.transpose(p[target_table(config)])) + q["b"]


def _mixture(p: Parameters, config: Config, hidden: tf.Tensor) -> tf.Tensor:
    """log sum_k pi_k softmax(logits of tanh(norm(hidden W_k + b_k))), pi = softmax(hidden W + b)."""
    q = p / "decoder/next_word_predictor"
    log_pi = log_softmax(feed_forward(q / "hidden_to_pi_logits", hidden, norm=False))
    components = []
    for k in range(config.softmax_mixture_size):
        deep = tf.tanh(feed_forward(q / f"hidden_to_mos_hidden_{k}", hidden))
        components.append(log_pi[..., k, None] + log_softmax(_logits(p, config, deep)))
    return tf.reduce_logsumexp(tf.stack(components), 0)
