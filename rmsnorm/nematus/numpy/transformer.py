"""Nematus's Transformer, and zero's, in NumPy: what the methods of a model compute.

Logits and the output of the encoder are batch-major, as in Nematus.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    return _encode(p, config, x, mask)[0]


def score(p: Parameters, config: Config, x: Array, mask: Array, y: Array) -> Array:
    """Logits of the target words."""
    before = np.insert(y.T[:, :-1], 0, dialects.rules(config).go, axis=1)
    future = np.triu(np.full((len(y), len(y)), config.masked_score), k=1)
    return _decode(p, config, before, _encode(p, config, x, mask), future)[0]


def loss(p: Parameters, config: Config, x: Array, mask: Array, y: Array, y_mask: Array, *, training: bool) -> Array:
    """The loss of each sentence; labels are smoothed in training."""
    return losses(config, score(p, config, x, mask, y).swapaxes(0, 1), y, y_mask, training=training)


def begin(
    p: Parameters, config: Config, x: Array, mask: Array, *, beam_size: int, length: int
) -> tuple[tuple[Array, Array], list[Array]]:
    """What a search needs before the first word, with beam_size rows for every sentence: memory, bias, and states."""
    memory, bias = (np.repeat(array, beam_size, axis=0) for array in _encode(p, config, x, mask))
    return (memory, bias), [np.zeros((len(bias), 0, config.state_size))] * (2 * config.transformer_dec_depth)


def step(
    p: Parameters, config: Config, source: tuple[Array, Array], past: list[Array], words: Array, start: int
) -> tuple[Array, list[Array]]:
    """Log-probabilities of the words after these ids, and the keys and values so far."""
    logits, past = _decode(p, config, words[:, None], source, np.zeros(()), start, past)
    return log_softmax(logits[:, 0]), past


def _encode(p: Parameters, config: Config, x: Array, mask: Array) -> tuple[Array, Array]:
    """What the decoder attends to, and what is added to the scores: (batch, heads, queries, keys)."""
    bias = np.where(mask == 0, config.masked_score, 0.0).T[:, None, None]
    h = _embed(p, config, "encoder", x.swapaxes(1, 2))
    for number in range(1, config.transformer_enc_depth + 1):
        q = p / dialects.layer(config, "encoder", number)
        h, _ = _attention_block(q, config, "self_attn", h, None, bias)
        h = _ffn_block(q, config, h, last=number == config.transformer_enc_depth)
    return h, bias


def _decode(
    p: Parameters, config: Config, words: Array, source: tuple[Array, Array], future: Array, start: int = 0,
    past: Sequence[Array] = (),
) -> tuple[Array, list[Array]]:  # fmt: skip
    """Logits after words, and the keys and values so far; past: those of the ``start`` words before these."""
    h = _embed(p, config, "decoder", words[None], start)
    new: list[Array] = []
    for number in range(1, config.transformer_dec_depth + 1):
        q = p / dialects.layer(config, "decoder", number)
        h, own = _attention_block(q, config, "self_attn", h, None, future, past[2 * number - 2 : 2 * number])
        new += own
        h, _ = _attention_block(q, config, "cross_attn", h, *source)
        h = _ffn_block(q, config, h, last=number == config.transformer_dec_depth)
    return h @ p[dialects.table(config, "softmax")].T, new


def _embed(p: Parameters, config: Config, use: dialects.Use, ids: Array, start: int = 0) -> Array:
    """Embeddings of words, plus those of their positions t, of which the first is ``start``.

    sin(t w_i), then cos(t w_i): w from 1 to 1/10000, in equal ratios; one zero more if the size is odd.
    """
    words, half = embed(p, config, use, ids, np.sqrt(config.state_size)), config.state_size // 2
    angles = np.outer(start + np.arange(ids.shape[2]), np.exp(-np.arange(half) * np.log(10000) / (half - 1)))
    odd = np.zeros((len(angles), config.state_size % 2))
    return words + np.concatenate((np.sin(angles), np.cos(angles), odd), axis=1)


def _before(p: Parameters, config: Config, block: dialects.Block, x: Array) -> Array:
    """norm(x), in zero x."""
    return x if dialects.rules(config).post_norm else normalise(p, x, *dialects.norm(config, block))


def _after(p: Parameters, config: Config, block: dialects.Block, x: Array, y: Array) -> Array:
    """x + y, in zero norm(x + y)."""
    return normalise(p, x + y, *dialects.norm(config, block)) if dialects.rules(config).post_norm else x + y


def _map(p: Parameters, config: Config, block: dialects.Block, part: str, x: Array) -> Array:
    return project(p, x, *dialects.linear(config, block, part))


def _attention_block(
    p: Parameters, config: Config, block: dialects.Block, x: Array, memory: Array | None, bias: Array,
    past: Sequence[Array] = (),
) -> tuple[Array, list[Array]]:  # fmt: skip
    """x + softmax(q k^T / sqrt(d) + bias) v W in every head; in ReLA relu(q k^T / sqrt(d)) v where bias is 0.

    Attention is to memory, or to x itself and to what precedes it. Also the keys and the values; past: those before.
    """

    def split(array: Array) -> Array:
        return array.reshape(*array.shape[:2], config.transformer_num_heads, -1).swapaxes(1, 2)

    before = _before(p, config, block, x)
    if memory is None and dialects.rules(config).joint_maps:
        queries, *attended = np.split(_map(p, config, block, "qkv", before), 3, axis=-1)
    else:
        queries = _map(p, config, block, "queries", before)
        attended = [_map(p, config, block, part, before if memory is None else memory) for part in ("keys", "values")]
    if past:
        attended = [np.concatenate(both, axis=1) for both in zip(past, attended, strict=True)]
    q, k, v = map(split, (queries, *attended))
    scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])
    weights = np.maximum(scores * (bias == 0), 0) if config.relu_attention else softmax(scores + bias, -1)
    joined = (weights @ v).swapaxes(1, 2).reshape(x.shape)
    if config.relu_attention:  # zero's gated RMSNorm: rms_norm(x) sigmoid(gate x)
        gain, gate = dialects.gate(block)
        joined = normalise(p, joined, gain, None, "rms") * sigmoid(p[gate] * joined)
    return _after(p, config, block, x, _map(p, config, block, "context", joined)), attended


def _ffn_block(p: Parameters, config: Config, x: Array, *, last: bool) -> Array:
    """x + relu(norm(x) W1 + b1) W2 + b2; in Nematus normalised once more at the end of the stack."""
    hidden = np.maximum(_map(p, config, "ffn", "in", _before(p, config, "ffn", x)), 0)
    y = _after(p, config, "ffn", x, _map(p, config, "ffn", "out", hidden))
    return _before(p, config, "final", y) if last else y
