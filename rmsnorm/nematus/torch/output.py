"""From the states of a Nematus decoder to logits, and from logits to losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from rmsnorm.nematus.names import target_table
from rmsnorm.nematus.torch.parameters import Parameters, feed_forward

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config


def predict(
    p: Parameters, config: Config, previous: Tensor, state: Tensor, attended: Tensor, lexical: Tensor | None
) -> Tensor:
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


def lexical_state(p: Parameters, weights: Tensor, embeddings: Tensor) -> Tensor:
    """The lexical model of Nguyen & Chiang: tanh(norm(e W + b)) + e, e = tanh(attended source embeddings).

    weights: (steps, source length, batch); embeddings: (source length, batch, size).
    """
    e = torch.einsum("tsb,sbe->tbe", weights, p.drop("decoder/lexical", embeddings)).tanh()
    return feed_forward(p / "decoder/lexical", e).tanh() + e


def cross_entropy(logits: Tensor, y: Tensor, mask: Tensor, right: float = 1.0, wrong: float = 0.0) -> Tensor:
    """-sum_v target_v log p_v of every word, times the mask; target is ``right`` at the word, ``wrong`` elsewhere."""
    log_p = log_softmax(logits)
    losses = (right - wrong) * log_p.gather(-1, y[..., None])[..., 0]
    if wrong:
        losses = losses + wrong * log_p.sum(-1)
    return -losses * mask


def log_softmax(logits: Tensor) -> Tensor:
    """log softmax(logits), in at least float32."""
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def softmax(scores: Tensor, axis: int = -1) -> Tensor:
    """Weights, divided by their sum once more.

    That it is 1 up to a rounding is not enough for the gradient: it is a difference, in which what all values have in
    common must cancel.
    """
    weights = scores.softmax(axis)
    return weights / weights.sum(axis, keepdim=True)


def _activate(q: Parameters, config: Config, x: Tensor) -> Tensor:
    if config.output_hidden_activation == "tanh":
        return x.tanh()
    if config.output_hidden_activation == "relu":
        return x.relu()
    if config.output_hidden_activation == "linear":
        return x
    return torch.where(x > 0, x, q["hidden_prelu/slope"] * x)


def _logits(p: Parameters, config: Config, hidden: Tensor) -> Tensor:
    """hidden W + b; if the embeddings are tied, W is their transpose."""
    q = p / "decoder/next_word_predictor/hidden_to_logits"
    if not config.tie_decoder_embeddings:
        return feed_forward(q, hidden, norm=False)
    return functional.linear(q.drop("W", hidden), p[target_table(config)], q["b"])


def _mixture(p: Parameters, config: Config, hidden: Tensor) -> Tensor:
    """log sum_k pi_k softmax(logits of tanh(norm(hidden W_k + b_k))), pi = softmax(hidden W + b)."""
    q = p / "decoder/next_word_predictor"
    log_pi = log_softmax(feed_forward(q / "hidden_to_pi_logits", hidden, norm=False))
    components = []
    for k in range(config.softmax_mixture_size):
        deep = feed_forward(q / f"hidden_to_mos_hidden_{k}", hidden).tanh()
        components.append(log_pi[..., k, None] + log_softmax(_logits(p, config, deep)))
    return torch.stack(components).logsumexp(0)
