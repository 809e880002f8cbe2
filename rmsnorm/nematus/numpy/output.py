"""From the states of a Nematus decoder to logits, and from logits to losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from rmsnorm.nematus.names import target_table
from rmsnorm.nematus.numpy.parameters import Array, Parameters, Pullback, drop, feed_forward, identity, rows

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

_Gradients = tuple[Array, Array, Array, Array | None]


def embed(p: Parameters, table: str, ids: Array) -> tuple[Array, Callable[[Array], None]]:
    """Rows of a table; the pullback only adds to the gradient of the table."""

    def pullback(dy: Array) -> None:
        gradient = np.zeros_like(p[table])
        np.add.at(gradient, ids, dy)
        p.add(table, gradient)

    return p[table][ids], pullback


def predict(
    p: Parameters, config: Config, previous: Array, state: Array, attended: Array, lexical: Array | None
) -> tuple[Array, Callable[[Array], _Gradients]]:
    """Logits: activation(sum of the normalised projections of the three) W + b, plus those of the lexical model."""
    q = p / "decoder/next_word_predictor"
    parts = {"prev_emb": previous, "state": state, "attended_context": attended}
    projected, pullbacks = zip(*(feed_forward(q / f"{name}_to_hidden", x) for name, x in parts.items()), strict=True)
    hidden, activation_pullback = _activate(q, config, sum(projected))
    head = _mixture if config.softmax_mixture_size > 1 else _logits
    logits, head_pullback = head(p, config, hidden)
    lexical_pullback: Callable[[Array], Array | None] = lambda dlogits: None  # noqa: E731
    if lexical is not None:
        more, lexical_pullback = feed_forward(q / "lexical_to_logits", lexical, norm=False)
        logits = logits + more

    def pullback(dlogits: Array) -> _Gradients:
        dsum = activation_pullback(head_pullback(dlogits))
        return *(projection_pullback(dsum) for projection_pullback in pullbacks), lexical_pullback(dlogits)

    return logits, pullback


def lexical_state(
    p: Parameters, weights: Array, embeddings: Array
) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    """The lexical model of Nguyen & Chiang: tanh(norm(e W + b)) + e, e = tanh(attended source embeddings).

    weights: (steps, source length, batch); embeddings: (source length, batch, size), of which the pullback returns
    the gradients.
    """
    embeddings, drop_pullback = drop(p, "decoder/lexical", embeddings)
    e = np.tanh(np.einsum("tsb,sbe->tbe", weights, embeddings))
    layer, layer_pullback = feed_forward(p / "decoder/lexical", e)
    deep = np.tanh(layer)

    def pullback(dy: Array) -> tuple[Array, Array]:
        de = (dy + layer_pullback(dy * (1 - deep**2))) * (1 - e**2)
        return np.einsum("tbe,sbe->tsb", de, embeddings), drop_pullback(np.einsum("tsb,tbe->sbe", weights, de))

    return deep + e, pullback


def cross_entropy(
    logits: Array, y: Array, mask: Array, right: float = 1.0, wrong: float = 0.0
) -> tuple[Array, Pullback]:
    """-sum_v target_v log p_v of every word, times the mask; target is ``right`` at the word, ``wrong`` elsewhere."""
    log_p = log_softmax(logits)
    target = np.full(logits.shape, wrong, logits.dtype)
    np.put_along_axis(target, y[..., None], right, axis=-1)

    def pullback(dloss: Array) -> Array:
        total = right + (logits.shape[-1] - 1) * wrong
        return (total * np.exp(log_p) - target) * (mask * dloss)[..., None]

    return -(target * log_p).sum(axis=-1) * mask, pullback


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _activate(q: Parameters, config: Config, x: Array) -> tuple[Array, Pullback]:
    if config.output_hidden_activation == "tanh":
        y = np.tanh(x)
        return y, lambda dy: dy * (1 - y**2)
    if config.output_hidden_activation == "relu":
        return np.maximum(x, 0), lambda dy: dy * (x > 0)
    if config.output_hidden_activation == "linear":
        return x, identity
    slope, negative = q["hidden_prelu/slope"], np.minimum(x, 0)

    def pullback(dy: Array) -> Array:
        q.add("hidden_prelu/slope", rows(dy * negative).sum(axis=0))
        return dy * np.where(x > 0, 1, slope)

    return np.maximum(x, 0) + slope * negative, pullback


def _logits(p: Parameters, config: Config, hidden: Array) -> tuple[Array, Pullback]:
    """hidden W + b; if the embeddings are tied, W is their transpose."""
    q = p / "decoder/next_word_predictor/hidden_to_logits"
    if not config.tie_decoder_embeddings:
        return feed_forward(q, hidden, norm=False)
    table = target_table(config)
    hidden, drop_pullback = drop(q, "W", hidden)

    def pullback(dlogits: Array) -> Array:
        q.add("b", rows(dlogits).sum(axis=0))
        p.add(table, rows(dlogits).T @ rows(hidden))
        return drop_pullback(dlogits @ p[table])

    return hidden @ p[table].T + q["b"], pullback


def _mixture(p: Parameters, config: Config, hidden: Array) -> tuple[Array, Pullback]:
    """log sum_k pi_k softmax(logits of tanh(norm(hidden W_k + b_k))), pi = softmax(hidden W + b)."""
    q = p / "decoder/next_word_predictor"
    pi_logits, pi_pullback = feed_forward(q / "hidden_to_pi_logits", hidden, norm=False)
    log_pi = log_softmax(pi_logits)
    components = []
    for k in range(config.softmax_mixture_size):
        layer, layer_pullback = feed_forward(q / f"hidden_to_mos_hidden_{k}", hidden)
        deep = np.tanh(layer)
        logits, logits_pullback = _logits(p, config, deep)
        components.append((log_softmax(logits), logits_pullback, deep, layer_pullback))
    joint = np.stack([log_pi[..., k, None] + log_p for k, (log_p, *_) in enumerate(components)])
    top = joint.max(axis=0)
    log_mixture = top + np.log(np.exp(joint - top).sum(axis=0))

    def pullback(dy: Array) -> Array:
        dhidden = np.zeros_like(hidden)
        dlog_pi = np.empty_like(log_pi)
        for k, (log_p, logits_pullback, deep, layer_pullback) in enumerate(components):
            share = np.exp(joint[k] - log_mixture) * dy  # gradient of log pi_k + log p_k
            dlog_pi[..., k] = share.sum(axis=-1)
            dlogits = share - np.exp(log_p) * share.sum(axis=-1, keepdims=True)
            dhidden += layer_pullback(logits_pullback(dlogits) * (1 - deep**2))
        dpi_logits = dlog_pi - np.exp(log_pi) * dlog_pi.sum(axis=-1, keepdims=True)
        return dhidden + pi_pullback(dpi_logits)

    return log_mixture, pullback
