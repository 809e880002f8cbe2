"""Nematus's Transformer, and zero's: what encode, logits, loss and translate of a model compute.

Logits and the output of the encoder are batch-major, as in Nematus.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rmsnorm.nematus import names
from rmsnorm.nematus.models.operations import Array
from rmsnorm.nematus.models.parameters import Parameters, embed, losses, masked_scores, normalise, project, softmax

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config


# Keys and values of the source for every layer of the decoder, and what is added to the scores of attention.
Memory = tuple[list[list[Array]], Array]


def encode(p: Parameters, config: Config, x: Array, mask: Array) -> Array:
    """What the decoder attends to."""
    return _encode(p, config, x, mask)[0]


def score(p: Parameters, config: Config, x: Array, mask: Array, y: Array) -> Array:
    """Logits of the target words."""
    ops, (length, batch) = p.ops, p.ops.shape(y)
    memory = attend_to(p, config, x, mask)
    before = ops.concatenated((ops.filled((1, batch), config.rules.go, y), y[:-1]), 0)
    future = ops.future(0, length, length, config.masked_score, memory[1])
    return _decode(p, config, ops.transposed(before), memory, future, 0, length)[0]


def loss(p: Parameters, config: Config, x: Array, mask: Array, y: Array, y_mask: Array, *, training: bool) -> Array:
    """The loss of each sentence; labels are smoothed in training."""
    words, words_mask = p.ops.transposed(y), p.ops.transposed(y_mask)
    return losses(p, config, score(p, config, x, mask, y), words, words_mask, 1, training=training)


def begin(
    p: Parameters, config: Config, x: Array, mask: Array, *, beam_size: int, length: int
) -> tuple[Memory, list[Array]]:
    """What a search needs before the first word, beam_size rows for every sentence: memory, and caches.

    length: of the caches, 0 where they grow.
    """
    ops, (layers, bias) = p.ops, attend_to(p, config, x, mask)
    layers = [[ops.repeated(array, beam_size, 0) for array in layer] for layer in layers]
    bias = ops.repeated(bias, beam_size, 0)
    cache = ops.filled((ops.shape(bias)[0], length, config.state_size), 0.0, bias)
    return (layers, bias), [cache] * (2 * config.transformer_dec_depth)


def step(
    p: Parameters, config: Config, memory: Memory, caches: list[Array], previous: Array, start: Any
) -> tuple[Array, list[Array]]:
    """Log-probabilities of the word after ``start`` words, of which these are the last ones, and the new caches."""
    length = p.ops.shape(caches[0])[1] + (0 if p.ops.cached else 1)
    future = p.ops.future(start, 1, length, config.masked_score, memory[1])
    logits, caches = _decode(p, config, previous[:, None], memory, future, start, length, caches)
    return p.ops.log_softmax(logits[:, 0]), caches


def attend_to(p: Parameters, config: Config, x: Array, mask: Array) -> Memory:
    """The encoder, and what the decoder reads of it."""
    encoded, bias = _encode(p, config, x, mask)
    layers = [p / names.layer(config, "decoder", i) for i in range(1, config.transformer_dec_depth + 1)]
    return [[_map(q, config, "cross_attn", part, encoded) for part in ("keys", "values")] for q in layers], bias


def _embed(p: Parameters, config: Config, use: names.Use, ids: Array, start: Any, length: Any) -> Array:
    """Embeddings of words and positions, of which the first is ``start``, in sentences of ``length`` words."""
    words = embed(p, config, use, ids, math.sqrt(config.state_size))
    positions = p.ops.positions(start, p.ops.shape(ids)[2], length, config.state_size, words)
    return p.dropout(words + positions, config.transformer_dropout_embeddings)


def _encode(p: Parameters, config: Config, x: Array, mask: Array) -> tuple[Array, Array]:
    """What the encoder returns, and what is added to the scores of attention to it: (batch, heads, queries, keys)."""
    bias = p.ops.transposed(masked_scores(p, config, mask))[:, None, None]
    h = _embed(p, config, "encoder", p.ops.transposed(x), 0, p.ops.shape(x)[1])
    for number in range(1, config.transformer_enc_depth + 1):
        q = p / names.layer(config, "encoder", number)
        h = _attention_block(q, config, "self_attn", h, None, bias)[0]
        h = _ffn_block(q, config, h, last=number == config.transformer_enc_depth)
    return h, bias


def _decode(
    p: Parameters, config: Config, words: Array, memory: Memory, future: Array, start: Any, length: Any,
    caches: Sequence[Array] = (),
) -> tuple[Array, list[Array]]:  # fmt: skip
    """Logits after any number of words, and the caches with them.

    Args:
        words: ids; the first one is number ``start`` of ``length``.
        future: what is added to the scores of attention among the target words.
        caches: keys and values of every layer for the words before these.
    """
    h = _embed(p, config, "decoder", words[None], start, length)
    new: list[Array] = []
    for number, of_source in enumerate(memory[0], start=1):
        q, past = p / names.layer(config, "decoder", number), caches[2 * number - 2 : 2 * number]
        h, own = _attention_block(q, config, "self_attn", h, None, future, past, start)
        new += own
        h = _attention_block(q, config, "cross_attn", h, of_source, memory[1])[0]
        h = _ffn_block(q, config, h, last=number == config.transformer_dec_depth)
    return p.ops.matmul(h, p.ops.transposed(p[names.table(config, "softmax")])), new


def _before(p: Parameters, config: Config, block: names.Block, x: Array) -> Array:
    """norm(x), or x where norms follow the sums."""
    return x if config.rules.is_zero else normalise(p, x, *names.norm_of_block(config, block))


def _after(p: Parameters, config: Config, block: names.Block, x: Array, y: Array) -> Array:
    """x + y, or norm(x + y)."""
    y = x + p.dropout(y, config.transformer_dropout_residual)
    return normalise(p, y, *names.norm_of_block(config, block)) if config.rules.is_zero else y


def _map(p: Parameters, config: Config, block: names.Block, part: str, x: Array) -> Array:
    return project(p, x, *names.linear(config, block, part))


def _attention_block(
    p: Parameters, config: Config, block: names.Block, x: Array, attended: Sequence[Array] | None, bias: Array,
    past: Sequence[Array] = (), start: Any = 0,
) -> tuple[Array, Sequence[Array]]:  # fmt: skip
    """x + softmax(q k^T / sqrt(d) + bias) v W in every head; in ReLA relu(q k^T / sqrt(d)) where bias is 0.

    Attention is to these keys and values, or to those of x and of the ``start`` words before; it also returns them.
    """
    ops, rate, heads = p.ops, config.transformer_dropout_attn, config.transformer_num_heads
    before = _before(p, config, block, x)
    if attended is None and config.rules.is_zero:
        queries, *attended = ops.split(_map(p, config, block, "qkv", before), 3)
    else:
        queries = _map(p, config, block, "queries", before)
        attended = attended or [_map(p, config, block, part, before) for part in ("keys", "values")]
    if past:
        both = zip(past, attended, strict=True)
        attended = [ops.cached(*pair, start) if ops.cached else ops.concatenated(pair, 1) for pair in both]
    (batch, length, _), size = ops.shape(queries), config.state_size // heads
    q, k, v = (
        ops.swapped(ops.reshape(array, (batch, ops.shape(array)[1], heads, size))) for array in (queries, *attended)
    )
    if ops.attention is not None and not config.relu_attention:
        mixed = ops.attention(q, k, v, bias, rate, p.random)
    else:
        scores = ops.matmul(q, ops.transposed(k)) / math.sqrt(size)
        relu = config.relu_attention
        weights = ops.relu(ops.where(bias == 0, scores, 0.0)) if relu else softmax(p, scores + bias, -1)
        mixed = ops.matmul(p.dropout(weights, rate), v)
    if config.transformer_drophead:  # drops whole heads of a sentence
        mixed = mixed * p.dropout(ops.filled((batch, heads, 1, 1), 1.0, mixed), config.transformer_drophead)
    joined = ops.reshape(ops.swapped(mixed), (batch, length, config.state_size))
    if config.relu_attention:  # zero's gated RMSNorm: rms_norm(x) sigmoid(gate x)
        gain, gate = names.gate(block)
        joined = normalise(p, joined, gain, None, "rms") * ops.sigmoid(p[gate] * joined)
    return _after(p, config, block, x, _map(p, config, block, "context", joined)), attended


def _ffn_block(p: Parameters, config: Config, x: Array, *, last: bool) -> Array:
    """x + relu(norm(x) W1 + b1) W2 + b2; in Nematus normalised once more at the end of the stack."""
    own, rate = config.rules, config.transformer_dropout_relu
    before = _before(p, config, "ffn", x)
    if not own.is_zero:  # Nematus applies this dropout to the input of the first layer, in spite of its name
        before = p.dropout(before, rate)
    hidden = p.ops.relu(_map(p, config, "ffn", "in", before))
    if own.is_zero:
        hidden = p.dropout(hidden, rate)
    y = _after(p, config, "ffn", x, _map(p, config, "ffn", "out", hidden))
    return _before(p, config, "final", y) if last else y
