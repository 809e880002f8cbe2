"""From the states of a Nematus decoder to logits, and from logits to losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from jax import lax
from jax import numpy as jnp

from rmsnorm import dtypes
from rmsnorm.nematus.flax.parameters import Parameters, feed_forward, multiply
from rmsnorm.nematus.names import target_table

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config


def predict(
    p: Parameters,
    config: Config,
    previous: jax.Array,
    state: jax.Array,
    attended: jax.Array,
    lexical: jax.Array | None,
) -> jax.Array:
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


def lexical_state(p: Parameters, weights: jax.Array, embeddings: jax.Array) -> jax.Array:
    """The lexical model of Nguyen & Chiang: tanh(norm(e W + b)) + e, e = tanh(attended source embeddings).

    weights: (steps, source length, batch); embeddings: (source length, batch, size).
    """
    embeddings = p.drop("decoder/lexical", embeddings)
    e = jnp.tanh(jnp.einsum("tsb,sbe->tbe", weights, embeddings, precision=lax.Precision.HIGHEST))
    return jnp.tanh(feed_forward(p / "decoder/lexical", e)) + e


def cross_entropy(
    logits: jax.Array, y: jax.Array, mask: jax.Array, right: float = 1.0, wrong: float = 0.0
) -> jax.Array:
    """-sum_v target_v log p_v of every word, times the mask; target is ``right`` at the word, ``wrong`` elsewhere."""
    log_p = log_softmax(logits)
    losses = (right - wrong) * jnp.take_along_axis(log_p, y[..., None], axis=-1)[..., 0]
    if wrong:
        losses = losses + wrong * log_p.sum(-1)
    return -losses * mask.astype(losses.dtype)


def log_softmax(logits: jax.Array) -> jax.Array:
    """log softmax(logits), in at least float32."""
    return jax.nn.log_softmax(logits.astype(dtypes.arithmetic(logits.dtype.name)))


def softmax(scores: jax.Array, axis: int = -1) -> jax.Array:
    """Weights, divided by their sum once more.

    That it is 1 up to a rounding is not enough for the gradient: it is a difference, in which what all values have in
    common must cancel.
    """
    weights = jax.nn.softmax(scores, axis)
    return weights / weights.sum(axis, keepdims=True)


def _activate(q: Parameters, config: Config, x: jax.Array) -> jax.Array:
    if config.output_hidden_activation == "tanh":
        return jnp.tanh(x)
    if config.output_hidden_activation == "relu":
        return jax.nn.relu(x)
    if config.output_hidden_activation == "linear":
        return x
    return jnp.where(x > 0, x, q["hidden_prelu/slope"] * x)


def _logits(p: Parameters, config: Config, hidden: jax.Array) -> jax.Array:
    """hidden W + b; if the embeddings are tied, W is their transpose."""
    q = p / "decoder/next_word_predictor/hidden_to_logits"
    if not config.tie_decoder_embeddings:
        return feed_forward(q, hidden, norm=False)
    return multiply(q.drop("W", hidden), p[target_table(config)].T) + q["b"]


def _mixture(p: Parameters, config: Config, hidden: jax.Array) -> jax.Array:
    """log sum_k pi_k softmax(logits of tanh(norm(hidden W_k + b_k))), pi = softmax(hidden W + b)."""
    q = p / "decoder/next_word_predictor"
    log_pi = log_softmax(feed_forward(q / "hidden_to_pi_logits", hidden, norm=False))
    components = []
    for k in range(config.softmax_mixture_size):
        deep = jnp.tanh(feed_forward(q / f"hidden_to_mos_hidden_{k}", hidden))
        components.append(log_pi[..., k, None] + log_softmax(_logits(p, config, deep)))
    return jax.nn.logsumexp(jnp.stack(components), axis=0)
