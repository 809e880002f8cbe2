"""From the states of a Nematus decoder to logits, and from logits to losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmsnorm.nematus.dialects import label_target, rules
from rmsnorm.nematus.models.operations import Array
from rmsnorm.nematus.models.parameters import Parameters, feed_forward
from rmsnorm.nematus.names import target_table

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config


def predict(
    p: Parameters, config: Config, previous: Array, state: Array, attended: Array, lexical: Array | None
) -> Array:
    """Logits: activation(sum of the normalised projections of the three) W + b, plus those of the lexical model."""
    q = p / "decoder/next_word_predictor"
    hidden = feed_forward(q / "prev_emb_to_hidden", previous) + feed_forward(q / "state_to_hidden", state)
    hidden = _activate(q, config, hidden + feed_forward(q / "attended_context_to_hidden", attended))
    logits = (_mixture if config.softmax_mixture_size > 1 else _logits)(p, config, hidden)
    return logits if lexical is None else logits + feed_forward(q / "lexical_to_logits", lexical, norm=False)


def lexical_state(p: Parameters, weights: Array, embeddings: Array) -> Array:
    """The lexical model of Nguyen & Chiang: tanh(norm(e W + b)) + e, e = tanh(attended source embeddings).

    weights: (steps, source length, batch); embeddings: (source length, batch, size).
    """
    e = p.ops.tanh(p.ops.weighted(weights, p.drop("decoder/lexical", embeddings)))
    return p.ops.tanh(feed_forward(p / "decoder/lexical", e)) + e


def losses(p: Parameters, config: Config, logits: Array, y: Array, mask: Array, axis: int, *, training: bool) -> Array:
    """The losses of sentences, whose words are along an axis."""
    right, wrong, smallest = label_target(config, training=training)
    of_words = p.ops.cross_entropy(logits, y, right, wrong)
    mask = p.ops.cast(mask, of_words)
    loss = p.ops.sum((of_words - smallest) * mask, axis)
    return loss / p.ops.sum(mask, axis) if rules(config).mean_loss else loss


def _activate(q: Parameters, config: Config, x: Array) -> Array:
    if config.output_hidden_activation == "linear":
        return x
    if config.output_hidden_activation == "prelu":
        return q.ops.relu(x) - q["hidden_prelu/slope"] * q.ops.relu(-x)
    return (q.ops.tanh if config.output_hidden_activation == "tanh" else q.ops.relu)(x)


def _logits(p: Parameters, config: Config, hidden: Array) -> Array:
    """hidden W + b; if the embeddings are tied, W is their transpose."""
    q = p / "decoder/next_word_predictor/hidden_to_logits"
    if not config.tie_decoder_embeddings:
        return feed_forward(q, hidden, norm=False)
    return p.ops.matmul(q.drop("W", hidden), p.ops.transposed(p[target_table(config)])) + q["b"]


def _mixture(p: Parameters, config: Config, hidden: Array) -> Array:
    """log sum_k pi_k softmax(logits of tanh(norm(hidden W_k + b_k))), pi = softmax(hidden W + b)."""
    q, ops = p / "decoder/next_word_predictor", p.ops
    log_pi = ops.log_softmax(feed_forward(q / "hidden_to_pi_logits", hidden, norm=False))
    components = []
    for k in range(config.softmax_mixture_size):
        deep = ops.tanh(feed_forward(q / f"hidden_to_mos_hidden_{k}", hidden))
        components.append(log_pi[..., k, None] + ops.log_softmax(_logits(p, config, deep)))
    return ops.logsumexp(components)
