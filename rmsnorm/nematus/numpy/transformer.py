"""Nematus's Transformer, and zero's, in NumPy: what the methods of a model compute.

Logits and the output of the encoder are batch-major, as in Nematus.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rmsnorm.nematus import dialects
from rmsnorm.nematus.numpy.parameters import (
    Array,
    Parameters,
    embed,
    log_softmax,
    losses,
    normalise,
    project,
    sigmoid,
    softmax,
)

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config


def encode(p: Parameters, config: Config, x: Array, mask: Array) -> Array:
    """What the decoder attends to."""
    return _encoder_stack(p, config, x, _padding(config, mask))


def score(p: Parameters, config: Config, x: Array, mask: Array, y: Array) -> Array:
    """Logits of the target words."""
    bias = _padding(config, mask)
    memory = _encoder_stack(p, config, x, bias)
    before = np.insert(y.T[:, :-1], 0, dialects.rules(config).go, axis=1)
    future = np.triu(np.full((len(y), len(y)), config.masked_score), k=1)
    return _decode(p, config, _embed(p, config, "decoder", before[None]), memory, bias, future, None)[0]


def loss(p: Parameters, config: Config, x: Array, mask: Array, y: Array, y_mask: Array, *, training: bool) -> Array:
    """The loss of each sentence; labels are smoothed in training."""
    return losses(config, score(p, config, x, mask, y).swapaxes(0, 1), y, y_mask, training=training)


def begin(
    p: Parameters, config: Config, x: Array, mask: Array, *, beam_size: int, length: int
) -> tuple[tuple[Array, Array], list[Array]]:
    """What a search needs before the first word, with beam_size rows for every sentence: memory, bias, and states."""
    bias = _padding(config, mask)
    memory, bias = (np.repeat(array, beam_size, axis=0) for array in (_encoder_stack(p, config, x, bias), bias))
    return (memory, bias), [np.zeros((len(bias), 0, config.state_size))] * (2 * config.transformer_dec_depth)


def step(
    p: Parameters, config: Config, memory: tuple[Array, Array], past: list[Array], words: Array, start: int
) -> tuple[Array, list[Array]]:
    """Log-probabilities of the words after these ids, and the keys and values so far."""
    h = _embed(p, config, "decoder", words[None, :, None], start)
    logits, past = _decode(p, config, h, *memory, np.zeros(()), past)
    return log_softmax(logits[:, 0]), past


def _decode(
    p: Parameters, config: Config, h: Array, memory: Array, bias: Array, future: Array, past: list[Array] | None
) -> tuple[Array, list[Array]]:
    """Logits after embedded words, and the keys and values so far; past: those of the words before these."""
    new: list[Array] = []
    for number in range(1, config.transformer_dec_depth + 1):
        q = p / dialects.layer(config, "decoder", number)
        queries, *attended = _projections(q, config, _before(q, config, "self_attn", h))
        if past is not None:
            before = past[2 * number - 2 : 2 * number]
            attended = [np.concatenate(both, axis=1) for both in zip(before, attended, strict=True)]
            new += attended
        h = _attention_block(q, config, "self_attn", h, queries, attended, future)
        queries = _map(q, config, "cross_attn", "queries", _before(q, config, "cross_attn", h))
        attended = [_map(q, config, "cross_attn", part, memory) for part in ("keys", "values")]
        h = _attention_block(q, config, "cross_attn", h, queries, attended, bias)
        h = _ffn_block(q, config, h, last=number == config.transformer_dec_depth)
    return h @ p[dialects.table(config, "softmax")].T, new


def _padding(config: Config, mask: Array) -> Array:
    """What is added to the scores of attention to the source, (batch, heads, queries, keys)."""
    return np.where(mask == 0, config.masked_score, 0.0).T[:, None, None]


def _positions(start: int, length: int, size: int) -> Array:
    """sin(t w_i), then cos(t w_i), t from ``start`` on: w from 1 to 1/10000, in equal ratios; zeros if size is odd."""
    frequencies = np.exp(-np.arange(size // 2) * np.log(10000) / (size // 2 - 1))
    angles = np.arange(start, start + length)[:, None] * frequencies
    return np.concatenate((np.sin(angles), np.cos(angles), np.zeros((length, size % 2))), axis=1)


def _embed(p: Parameters, config: Config, use: dialects.Use, ids: Array, start: int = 0) -> Array:
    """Embeddings of words and positions, of which the first is ``start``."""
    words = embed(p, config, use, ids, np.sqrt(config.state_size))
    return words + _positions(start, ids.shape[2], config.state_size)


def _encoder_stack(p: Parameters, config: Config, x: Array, bias: Array) -> Array:
    h = _embed(p, config, "encoder", x.swapaxes(1, 2))
    for number in range(1, config.transformer_enc_depth + 1):
        q = p / dialects.layer(config, "encoder", number)
        queries, *attended = _projections(q, config, _before(q, config, "self_attn", h))
        h = _attention_block(q, config, "self_attn", h, queries, attended, bias)
        h = _ffn_block(q, config, h, last=number == config.transformer_enc_depth)
    return h


def _normed(p: Parameters, config: Config, block: dialects.Block, x: Array) -> Array:
    return normalise(p, x, *dialects.norm(config, block))


def _before(p: Parameters, config: Config, block: dialects.Block, x: Array) -> Array:
    """What a block reads: norm(x), in zero x."""
    return x if dialects.rules(config).post_norm else _normed(p, config, block, x)


def _after(p: Parameters, config: Config, block: dialects.Block, x: Array, y: Array) -> Array:
    """x + y, in zero norm(x + y)."""
    return _normed(p, config, block, x + y) if dialects.rules(config).post_norm else x + y


def _map(p: Parameters, config: Config, block: dialects.Block, part: str, x: Array) -> Array:
    weight, bias = dialects.linear(config, block, part)
    return project(p, x, weight, bias, None)


def _projections(p: Parameters, config: Config, x: Array) -> list[Array]:
    """Queries, keys and values of attention to itself."""
    if dialects.rules(config).joint_maps:
        return np.split(_map(p, config, "self_attn", "qkv", x), 3, axis=-1)
    return [_map(p, config, "self_attn", part, x) for part in ("queries", "keys", "values")]


def _attention_block(
    p: Parameters, config: Config, block: dialects.Block, x: Array, queries: Array, attended: list[Array], bias: Array
) -> Array:
    """x + softmax(q k^T / sqrt(d) + bias) v W in every head; in ReLA relu(q k^T / sqrt(d)) v where bias is 0."""

    def split(array: Array) -> Array:
        return array.reshape(*array.shape[:2], config.transformer_num_heads, -1).swapaxes(1, 2)

    q, k, v = split(queries), split(attended[0]), split(attended[1])
    scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])
    weights = np.maximum(scores * (bias == 0), 0) if config.relu_attention else softmax(scores + bias, -1)
    joined = (weights @ v).swapaxes(1, 2).reshape(x.shape)
    if config.relu_attention:  # zero's gated RMSNorm: rms_norm(x) sigmoid(gate x)
        gain, gate = dialects.gate(block)
        joined = normalise(p, joined, gain, None, "rms") * sigmoid(p[gate] * joined)
    return _after(p, config, block, x, _map(p, config, block, "context", joined))


def _ffn_block(p: Parameters, config: Config, x: Array, *, last: bool) -> Array:
    """x + relu(norm(x) W1 + b1) W2 + b2; in Nematus normalised once more at the end of the stack."""
    hidden = np.maximum(_map(p, config, "ffn", "in", _before(p, config, "ffn", x)), 0)
    y = _after(p, config, "ffn", x, _map(p, config, "ffn", "out", hidden))
    return _normed(p, config, "final", y) if last and not dialects.rules(config).post_norm else y
