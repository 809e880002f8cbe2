"""From the states of a Nematus decoder to logits, and from logits to losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rmsnorm.nematus.dialects import label_target, rules
from rmsnorm.nematus.names import target_table
from rmsnorm.nematus.numpy.parameters import Array, Parameters, feed_forward

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config


def predict(
    p: Parameters, config: Config, previous: Array, state: Array, attended: Array, lexical: Array | None
) -> Array:
    """Logits: activation(sum of the normalised projections of the three) W + b, plus those of the lexical model."""
    q = p / "decoder/next_word_predictor"
    parts = {"prev_emb": previous, "state": state, "attended_context": attended}
    hidden = _activate(q, config, np.sum([feed_forward(q / f"{name}_to_hidden", x) for name, x in parts.items()], 0))
    logits = (_mixture if config.softmax_mixture_size > 1 else _logits)(p, config, hidden)
    return logits if lexical is None else logits + feed_forward(q / "lexical_to_logits", lexical, norm=False)


def lexical_state(p: Parameters, weights: Array, embeddings: Array) -> Array:
    """The lexical model of Nguyen & Chiang: tanh(norm(e W + b)) + e, e = tanh(attended source embeddings).

    weights: (steps, source length, batch); embeddings: (source length, batch, size).
    """
    e: Array = np.tanh(np.einsum("tsb,sbe->tbe", weights, embeddings))
    return np.tanh(feed_forward(p / "decoder/lexical", e)) + e


def losses(config: Config, logits: Array, y: Array, mask: Array, *, training: bool) -> Array:
    """The losses of sentences: -sum_v target_v log p_v - smallest, summed over the words. All time-major."""
    right, wrong, smallest = label_target(config, training=training)
    wanted = np.full(logits.shape, wrong)
    np.put_along_axis(wanted, y[..., None], right, axis=-1)
    of_words = -(wanted * log_softmax(logits)).sum(axis=-1) - smallest
    loss: Array = (of_words * mask).sum(axis=0)
    return loss / mask.sum(axis=0) if rules(config).mean_loss else loss


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


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
    return hidden @ p[target_table(config)].T + q["b"]


def _mixture(p: Parameters, config: Config, hidden: Array) -> Array:
    """log sum_k pi_k softmax(logits of tanh(norm(hidden W_k + b_k))), pi = softmax(hidden W + b)."""
    q = p / "decoder/next_word_predictor"
    log_pi = log_softmax(feed_forward(q / "hidden_to_pi_logits", hidden, norm=False))
    components = []
    for k in range(config.softmax_mixture_size):
        deep = np.tanh(feed_forward(q / f"hidden_to_mos_hidden_{k}", hidden))
        components.append(log_pi[..., k, None] + log_softmax(_logits(p, config, deep)))
    top = np.max(components, axis=0)
    return top + np.log(np.exp(np.stack(components) - top).sum(axis=0))
