"""Nematus's Transformer as a Keras model: scores, losses and translations.

Logits and the output of the encoder are batch-major, as in Nematus.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial as bind
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from rmsnorm.nematus import beam
from rmsnorm.nematus.beam import Translations
from rmsnorm.nematus.tf import sentences
from rmsnorm.nematus.tf.model import NematusModel
from rmsnorm.nematus.tf.output import cross_entropy, log_softmax, softmax
from rmsnorm.nematus.tf.parameters import Parameters, multiply, normalise, project
from rmsnorm.nematus.transformer_names import (
    ZERO_BIAS,
    Block,
    Use,
    transformer_gate,
    transformer_layer,
    transformer_map,
    transformer_norm,
    transformer_table,
)
from rmsnorm.nematus.zero import smoothed

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

__all__ = ["Transformer"]

Drop: TypeAlias = Callable[..., tf.Tensor]
Memory: TypeAlias = list[tuple[tf.Tensor, tf.Tensor]]

_GO: Final = 1  # the id that precedes the first word
_NOTHING: Final = -1  # precedes it in zero, as a vector of zeros


@keras.saving.register_keras_serializable(package="rmsnorm")
class Transformer(NematusModel):
    """Nematus's Transformer: see rmsnorm.nematus.protocol.Transformer.

    ``training=True`` turns dropout and label smoothing on. The weights have Nematus's names with dots for slashes.

    Example:
        >>> from rmsnorm.nematus.config import Config
        >>> from rmsnorm.nematus.names import variables
        >>> sizes = {"embedding_size": 4, "state_size": 4, "source_vocab_sizes": (4,), "target_vocab_size": 3}
        >>> config = Config(**sizes, model_type="transformer", norm="rms", transformer_num_heads=2)
        >>> model = Transformer(config, {row.name: tf.zeros(row.shape) for row in variables(config)})
        >>> x, y = tf.constant([[[3], [2], [0]]]), tf.constant([[1], [0]])
        >>> model.loss(x, tf.ones((3, 1)), y, tf.ones((2, 1))).numpy()  # 2 log 3
        array([2.1972246], dtype=float32)
    """

    def encode(self, x: Any, x_mask: Any, *, training: bool = False) -> tf.Tensor:
        """See protocol.Transformer.encode."""
        ids, mask = self.source("encode", x, x_mask)
        return self.run(_encode, ids, mask, drop=self._drop(training))

    def logits(self, x: Any, x_mask: Any, y: Any, *, training: bool = False) -> tf.Tensor:
        """See protocol.Transformer.logits."""
        ids, mask, words, _ = self.sentences("logits", x, x_mask, y)
        return self.run(_score, ids, mask, words, drop=self._drop(training))

    def loss(self, x: Any, x_mask: Any, y: Any, y_mask: Any, *, training: bool = False) -> tf.Tensor:
        """See protocol.Transformer.loss."""
        smoothing = self.config.label_smoothing if training else 0.0
        tensors = self.sentences("loss", x, x_mask, y, y_mask)
        return self.run(_loss, *tensors, smoothing=smoothing, drop=self._drop(training))

    def translate(
        self,
        x: Any,
        x_mask: Any,
        beam_size: int | None = None,
        max_length: int | None = None,
        *,
        normalization_alpha: float | None = None,
    ) -> Translations:
        """See protocol.Transformer.translate."""
        config = self.config
        ids, mask = self.source("translate", x, x_mask)
        plan = beam.plan(config, tf.math.count_nonzero(mask, 0), beam_size, max_length, normalization_alpha)
        memory, bias, past = self.run(_begin, ids, mask, beam_size=plan.beam_size)

        def step(states: list[sentences.Rows], previous: Any) -> tuple[Any, list[sentences.Rows]]:
            words = _before_first(config, bias)
            if not beam.is_first(config, previous):
                words = tf.cast(previous[:, None], tf.int64)
            log_p, new = self.run(_step, words, memory, bias, [state.tensor for state in states])
            return log_p.numpy(), [sentences.Rows(state) for state in new]

        rows = [sentences.Rows(state) for state in past]
        return beam.search(plan, step, rows)

    def parameters_in(self, batch: tf.Tensor, training: bool) -> Parameters:
        return Parameters(self.tensors(), self.config.norm, eps=self.config.eps)

    def _drop(self, training: bool) -> Drop:
        return self._drop_features if training else _keep

    def _drop_features(self, x: tf.Tensor, rate: float) -> tf.Tensor:
        return keras.random.dropout(x, rate, seed=self.seed) if rate else x


def _keep(x: tf.Tensor, rate: float) -> tf.Tensor:
    return x


def _encode(p: Parameters, config: Config, x: tf.Tensor, mask: tf.Tensor, *, drop: Drop) -> tf.Tensor:
    return _encoder_stack(p, config, drop, x, _padding(config, mask))


def _score(p: Parameters, config: Config, x: tf.Tensor, mask: tf.Tensor, y: tf.Tensor, *, drop: Drop) -> tf.Tensor:
    """Logits of the target words."""
    bias = _padding(config, mask)
    memory = _memory(p, config, _encoder_stack(p, config, drop, x, bias))
    words = tf.transpose(y)
    before = tf.concat((_before_first(config, words), words[:, :-1]), 1)
    return _decode(p, config, drop, before, memory, bias, _no_words(config, bias))[0]


def _loss(
    p: Parameters,
    config: Config,
    x: tf.Tensor,
    mask: tf.Tensor,
    y: tf.Tensor,
    y_mask: tf.Tensor,
    *,
    smoothing: float,
    drop: Drop,
) -> tf.Tensor:
    right, wrong, smallest = smoothed(smoothing, config.target_vocab_size)
    logits = _score(p, config, x, mask, y, drop=drop)
    losses = cross_entropy(logits, tf.transpose(y), tf.transpose(y_mask), right, wrong)
    words = tf.cast(tf.transpose(y_mask), losses.dtype)
    loss = tf.reduce_sum(losses - smallest * words, 1)
    return loss / tf.reduce_sum(words, 1) if config.dialect == "zero" else loss


def _begin(
    p: Parameters, config: Config, x: tf.Tensor, mask: tf.Tensor, *, beam_size: int
) -> tuple[Memory, tf.Tensor, list[tf.Tensor]]:
    """What a search needs before the first word, with beam_size rows for every sentence: memory, bias and states."""
    bias = _padding(config, mask)
    memory = _memory(p, config, _encoder_stack(p, config, _keep, x, bias))
    memory, bias = tf.nest.map_structure(bind(tf.repeat, repeats=beam_size, axis=0), (memory, bias))
    return memory, bias, _no_words(config, bias)


def _step(
    p: Parameters, config: Config, words: tf.Tensor, memory: Memory, bias: tf.Tensor, past: list[tf.Tensor]
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Log-probabilities of the word after the given ones, and the keys and values so far."""
    logits, past = _decode(p, config, _keep, words, memory, bias, past)
    return log_softmax(logits[:, 0]), past


def _padding(config: Config, mask: tf.Tensor) -> tf.Tensor:
    """What is added to the scores of attention to the source, (batch, heads, queries, keys)."""
    return config.masked_score * tf.transpose(tf.cast(tf.equal(mask, 0), mask.dtype))[:, None, None]


def _no_words(config: Config, bias: tf.Tensor) -> list[tf.Tensor]:
    """Keys and values of every layer of the decoder before the first word: none."""
    return [tf.zeros((tf.shape(bias)[0], 0, config.state_size), bias.dtype)] * (2 * config.transformer_dec_depth)


def _before_first(config: Config, like: tf.Tensor) -> tf.Tensor:
    """What precedes the first word, one id for each row of ``like``."""
    return tf.fill((tf.shape(like)[0], 1), tf.constant(_NOTHING if config.dialect == "zero" else _GO, tf.int64))


def _positions(start: Any, length: Any, size: int) -> tf.Tensor:
    """sin(t w_i), then cos(t w_i), t from ``start`` on: w from 1 to 1/10000, in equal ratios; zeros if size is odd."""
    half = size // 2
    frequencies = np.exp(-np.arange(half) * (math.log(10000) / (half - 1)))
    angles = tf.cast(tf.range(start, start + length), tf.float64)[:, None] * frequencies
    return tf.concat((tf.sin(angles), tf.cos(angles), tf.zeros((length, size % 2), tf.float64)), 1)


def _embed(p: Parameters, config: Config, drop: Drop, use: Use, ids: tf.Tensor, start: Any = 0) -> tf.Tensor:
    """Embeddings of words and positions, of which the first is ``start``."""
    words = tf.gather(p[transformer_table(config, use)], tf.maximum(ids, 0)) * math.sqrt(config.state_size)
    if config.dialect == "zero":
        words = (words + p[ZERO_BIAS]) * tf.cast(ids != _NOTHING, words.dtype)[..., None]
    positions = tf.cast(_positions(start, tf.shape(ids)[1], config.state_size), words.dtype)
    return drop(words + positions, config.transformer_dropout_embeddings)


def _encoder_stack(p: Parameters, config: Config, drop: Drop, x: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    h = _embed(p, config, drop, "encoder", tf.transpose(x[0]))
    for number in range(1, config.transformer_enc_depth + 1):
        q = p / transformer_layer(config, "encoder", number)
        h, _ = _self_attention(q, config, drop, h, bias)
        h = _ffn_block(q, config, drop, h, last=number == config.transformer_enc_depth)
    return h


def _memory(p: Parameters, config: Config, encoded: tf.Tensor) -> Memory:
    """Keys and values of the source for every layer of the decoder."""
    layers = [p / transformer_layer(config, "decoder", i) for i in range(1, config.transformer_dec_depth + 1)]
    maps = [[_map(q, config, "cross_attn", part, encoded) for part in ("keys", "values")] for q in layers]
    return [(keys, values) for keys, values in maps]


def _decode(
    p: Parameters,
    config: Config,
    drop: Drop,
    words: tf.Tensor,
    memory: Memory,
    bias: tf.Tensor,
    past: list[tf.Tensor],
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Logits after any number of words, and the keys and values up to them.

    past: keys and values of every layer for the words before these.
    """
    start, count = tf.shape(past[0])[1], tf.shape(words)[1]
    h = _embed(p, config, drop, "decoder", words, start)
    is_future = tf.range(start + count) > tf.range(start, start + count)[:, None]
    future = config.masked_score * tf.cast(is_future, h.dtype)
    new: list[tf.Tensor] = []
    for number, of_source in enumerate(memory, start=1):
        q = p / transformer_layer(config, "decoder", number)
        h, own = _self_attention(q, config, drop, h, future, past[2 * number - 2 : 2 * number])
        new += own
        queries = _map(q, config, "cross_attn", "queries", _before(q, config, "cross_attn", h))
        h = _attention_block(q, config, drop, "cross_attn", h, queries, of_source, bias)
        h = _ffn_block(q, config, drop, h, last=number == config.transformer_dec_depth)
    return multiply(h, tf.transpose(p[transformer_table(config, "softmax")])), new


def _normed(p: Parameters, config: Config, block: Block, x: tf.Tensor) -> tf.Tensor:
    return normalise(p, x, *transformer_norm(config, block))


def _before(p: Parameters, config: Config, block: Block, x: tf.Tensor) -> tf.Tensor:
    """What a block reads: norm(x), in zero x."""
    return x if config.dialect == "zero" else _normed(p, config, block, x)


def _after(p: Parameters, config: Config, drop: Drop, block: Block, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """x + y, in zero norm(x + y)."""
    y = x + drop(y, config.transformer_dropout_residual)
    return _normed(p, config, block, y) if config.dialect == "zero" else y


def _map(p: Parameters, config: Config, block: Block, part: str, x: tf.Tensor) -> tf.Tensor:
    weight, bias = transformer_map(config, block, part)
    return project(p, x, weight, bias, None)


def _projections(p: Parameters, config: Config, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Queries, keys and values of attention to itself."""
    if config.dialect == "zero":
        queries, keys, values = tf.split(_map(p, config, "self_attn", "qkv", x), 3, -1)
    else:
        queries, keys, values = (_map(p, config, "self_attn", part, x) for part in ("queries", "keys", "values"))
    return queries, keys, values


def _self_attention(
    p: Parameters, config: Config, drop: Drop, x: tf.Tensor, bias: tf.Tensor, past: list[tf.Tensor] | None = None
) -> tuple[tf.Tensor, tuple[tf.Tensor, tf.Tensor]]:
    """x + attention(norm(x)) to itself and to the past keys and values; and all keys and values."""
    queries, keys, values = _projections(p, config, _before(p, config, "self_attn", x))
    if past is not None:
        keys, values = tf.concat((past[0], keys), 1), tf.concat((past[1], values), 1)
    return _attention_block(p, config, drop, "self_attn", x, queries, (keys, values), bias), (keys, values)


def _attention_block(
    p: Parameters,
    config: Config,
    drop: Drop,
    block: Block,
    x: tf.Tensor,
    queries: tf.Tensor,
    attended: tuple[tf.Tensor, tf.Tensor],
    bias: tf.Tensor,
) -> tf.Tensor:
    """x + softmax(q k^T / sqrt(d) + bias) v W in every head; in ReLA relu(q k^T / sqrt(d)) where bias is 0."""
    size = config.state_size // config.transformer_num_heads

    def heads(tensor: tf.Tensor) -> tf.Tensor:
        batch, length, _ = tf.unstack(tf.shape(tensor))
        return tf.transpose(tf.reshape(tensor, (batch, length, config.transformer_num_heads, size)), (0, 2, 1, 3))

    q, k, v = heads(queries), heads(attended[0]), heads(attended[1])
    scores = tf.matmul(q / math.sqrt(size), k, transpose_b=True)
    if config.relu_attention:
        weights = tf.nn.relu(scores * tf.cast(tf.equal(bias, 0), scores.dtype))
    else:
        weights = softmax(scores + bias)
    mixed = drop(weights, config.transformer_dropout_attn) @ v
    mixed = mixed * drop(tf.ones_like(mixed[..., :1, :1]), config.transformer_drophead)
    joined = tf.reshape(tf.transpose(mixed, (0, 2, 1, 3)), tf.shape(x))
    if config.relu_attention:
        joined = _gated(p, block, joined)
    return _after(p, config, drop, block, x, _map(p, config, block, "context", joined))


def _gated(p: Parameters, block: Block, x: tf.Tensor) -> tf.Tensor:
    """zero's gated RMSNorm: rms_norm(x) sigmoid(gate x)."""
    gain, gate = transformer_gate(block)
    return normalise(p, x, gain, None, "rms") * tf.sigmoid(p[gate] * x)


def _ffn_block(p: Parameters, config: Config, drop: Drop, x: tf.Tensor, *, last: bool) -> tf.Tensor:
    """x + relu(norm(x) W1 + b1) W2 + b2; in Nematus normalised once more at the end of the stack."""
    is_zero = config.dialect == "zero"
    x_in = _before(p, config, "ffn", x)
    if not is_zero:  # Nematus applies this dropout to the input of the first layer, in spite of its name.
        x_in = drop(x_in, config.transformer_dropout_relu)
    hidden = tf.nn.relu(_map(p, config, "ffn", "in", x_in))
    if is_zero:
        hidden = drop(hidden, config.transformer_dropout_relu)
    y = _after(p, config, drop, "ffn", x, _map(p, config, "ffn", "out", hidden))
    return _normed(p, config, "final", y) if last and not is_zero else y
