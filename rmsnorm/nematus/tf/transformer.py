"""Nematus's Transformer as a Keras model: scores, losses and translations.

Pre-norm, sinusoids, one norm more at the end of each stack. The interface is that of RNNSearch, with logits and the
output of the encoder batch-major, as Nematus has them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from rmsnorm.nematus import beam
from rmsnorm.nematus.beam import Translations
from rmsnorm.nematus.names import Use, transformer_table
from rmsnorm.nematus.tf import sentences
from rmsnorm.nematus.tf.model import NematusModel
from rmsnorm.nematus.tf.output import cross_entropy, log_softmax
from rmsnorm.nematus.tf.parameters import Parameters, multiply, normalize, project

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

__all__ = ["Transformer"]

_GO: Final = 1  # stands before the first word
_MASKED: Final = -1e9


@keras.saving.register_keras_serializable(package="rmsnorm")
class Transformer(NematusModel):
    """Nematus's Transformer.

    With ``training`` it drops out what Nematus does, at the rates of the config, and smooths labels.

    Args:
        config: of the model.
        parameters: arrays or tensors by the names of Nematus, as ``rmsnorm.nematus.load`` gives them, whose
            dtype the model has. The weights have these names with dots for slashes.

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
        """What the decoder attends to: (batch, source length, state_size).

        Args:
            x: ids, (1, source length, batch).
            x_mask: 1 on words and on the end of sentence, 0 after it, (source length, batch).

        Raises:
            TypeError, ValueError: an array has another shape or dtype, or an id is not in the vocabulary; ids and masks
                are looked at where no graph is traced.
        """
        return self.run(self._encode, *self.source("encode", x, x_mask), training=training)

    def logits(self, x: Any, x_mask: Any, y: Any, *, training: bool = False) -> tf.Tensor:
        """Logits of every target word given those before it: (batch, target length, vocabulary).

        Args:
            x, x_mask: as for encode.
            y: ids, (target length, batch).

        Raises:
            TypeError, ValueError: as encode.
        """
        ids, mask = self.source("logits", x, x_mask)
        words, _ = self.target("logits", y, ids)
        return self.run(self._logits, ids, mask, words, training=training)

    def loss(self, x: Any, x_mask: Any, y: Any, y_mask: Any, *, training: bool = False) -> tf.Tensor:
        """Cross-entropy of each sentence, summed over its words: (batch,).

        With ``training`` with the label smoothing of the config, less the least loss that is then possible.

        Args:
            x, x_mask, y: as for logits.
            y_mask: as x_mask, (target length, batch).

        Raises:
            TypeError, ValueError: as encode.
        """
        ids, mask = self.source("loss", x, x_mask)
        return self.run(self._loss, ids, mask, *self.target("loss", y, ids, y_mask), training=training)

    def translate(
        self,
        x: Any,
        x_mask: Any,
        beam_size: int = 12,
        max_length: int | None = None,
        *,
        normalization_alpha: float = 0.0,
    ) -> Translations:
        """The best translations that a beam search finds, with Nematus's rules and orders; never with dropout.

        Args:
            x, x_mask: as for encode.
            beam_size: 1 is greedy.
            max_length: Nematus's translation_maxlen, by default that of the config; it stops one word short.
            normalization_alpha: scores are divided by length^alpha.

        Returns:
            (sequences, scores), best first, as NumPy arrays.

        Raises:
            TypeError, ValueError: as encode; also when beam_size or max_length is out of its domain.
        """
        config = self.config
        max_length = config.translation_maxlen if max_length is None else max_length
        beam.check(beam_size, max_length)
        memory = self.run(self._memory, *self.source("translate", x, x_mask))
        memory = [tf.repeat(each, beam_size, axis=0) for each in memory]
        count = len(memory[0])

        def step(states: list[sentences.Rows], previous: Any) -> tuple[Any, list[sentences.Rows]]:
            words = tf.fill((count, 1), tf.constant(_GO, tf.int64)) if previous is None else previous[:, None]
            log_p, *new = self.run(self._step, tf.cast(words, tf.int64), *memory, *(state.tensor for state in states))
            return log_p.numpy(), [sentences.Rows(state) for state in new]

        states = [sentences.Rows(each) for each in _no_words(config, memory[0])]
        return beam.search(config.search, step, states, beam_size, max_length, normalization_alpha)

    def _encode(self, ids: tf.Tensor, mask: tf.Tensor, *, training: bool = False) -> tf.Tensor:
        return _encode(self._model(training), ids, _bias(mask))

    def _logits(self, ids: tf.Tensor, mask: tf.Tensor, y: tf.Tensor, *, training: bool) -> tf.Tensor:
        model, bias = self._model(training), _bias(mask)
        memory = _memory(model, _encode(model, ids, bias))
        before = tf.pad(tf.transpose(y[:-1]), ((0, 0), (1, 0)), constant_values=_GO)
        return _decode(model, before, memory, bias, _no_words(model.config, bias))[0]

    def _loss(self, ids: tf.Tensor, mask: tf.Tensor, y: tf.Tensor, y_mask: tf.Tensor, *, training: bool) -> tf.Tensor:
        logits = self._logits(ids, mask, y, training=training)
        smoothing = self.config.label_smoothing if training else 0.0
        right, wrong = 1 - smoothing, smoothing / (self.config.target_vocab_size - 1)
        least = -right * math.log(right) - smoothing * math.log(wrong + 1e-20) if smoothing else 0.0
        found = cross_entropy(logits, tf.transpose(y), tf.transpose(y_mask), right, wrong)
        return tf.reduce_sum(found - least * tf.cast(tf.transpose(y_mask), found.dtype), 1)

    def _memory(self, ids: tf.Tensor, mask: tf.Tensor) -> list[tf.Tensor]:
        """What is added to the scores of attention to the source, and its keys and values."""
        model, bias = self._model(), _bias(mask)
        return [bias, *(each for pair in _memory(model, _encode(model, ids, bias)) for each in pair)]

    def _step(self, words: tf.Tensor, bias: tf.Tensor, *given: tf.Tensor) -> tuple[tf.Tensor, ...]:
        model, count = self._model(), 2 * self.config.transformer_dec_depth
        memory = list(zip(given[:count:2], given[1:count:2], strict=True))
        logits, new = _decode(model, words, memory, bias, list(given[count:]))
        return log_softmax(logits[:, 0]), *new

    def _model(self, training: bool = False) -> _Model:
        config = self.config
        if not training:
            config = config.replace(**{name: 0.0 for name in vars(config) if "_drop" in name})
        return _Model(Parameters(self.tensors(), config.norm), config, self.seed)


class _Model(NamedTuple):
    """Parameters, or what lies below a name of them; the config, with rates in training only; and what draws."""

    p: Parameters
    config: Config
    seed: keras.random.SeedGenerator

    def __truediv__(self, name: str) -> _Model:
        return self._replace(p=self.p / name)

    def drop(self, x: tf.Tensor, rate: float) -> tf.Tensor:
        return keras.random.dropout(x, rate, seed=self.seed) if rate else x


def _bias(mask: tf.Tensor) -> tf.Tensor:
    """Added to the scores of attention, (batch, heads, queries, keys)."""
    return _MASKED * tf.transpose(tf.cast(tf.equal(mask, 0), mask.dtype))[:, None, None]


def _no_words(config: Config, bias: tf.Tensor) -> list[tf.Tensor]:
    """Keys and values of every layer of the decoder, before the first word."""
    return [tf.zeros((tf.shape(bias)[0], 0, config.state_size), bias.dtype)] * (2 * config.transformer_dec_depth)


def _embed(model: _Model, use: Use, ids: tf.Tensor, start: Any = 0) -> tf.Tensor:
    """Words and their places, from ``start`` on: sin(t w_i), then cos(t w_i); w from 1 to 1/10000, in equal ratios."""
    config = model.config
    words = tf.gather(model.p[transformer_table(config, use)], ids)
    half = config.state_size // 2
    frequencies = np.exp(-np.arange(half) * (math.log(10000) / (half - 1)))
    angles = tf.cast(tf.range(start, start + tf.shape(ids)[1]), tf.float64)[:, None] * frequencies
    positions = tf.cast(tf.concat((tf.sin(angles), tf.cos(angles)), 1), words.dtype)
    return model.drop(words * math.sqrt(config.state_size) + positions, config.transformer_dropout_embeddings)


def _encode(model: _Model, ids: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    depth = model.config.transformer_enc_depth
    h = _embed(model, "encoder", tf.transpose(ids[0]))
    for layer in range(1, depth + 1):
        q = model / f"transformer_model/encoder/layer_{layer}"
        h, _ = _self_attention(q, h, bias)
        h = _ffn_block(q, h, final=layer == depth)
    return h


def _memory(model: _Model, encoded: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Keys and values of the source for every layer of the decoder."""
    layers = range(1, model.config.transformer_dec_depth + 1)
    return [_keys_and_values(model.p / f"transformer_model/decoder/layer_{i}", "cross_attn", encoded) for i in layers]


def _decode(
    model: _Model,
    words: tf.Tensor,
    memory: list[tuple[tf.Tensor, tf.Tensor]],
    bias: tf.Tensor,
    past: list[tf.Tensor],
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Logits after any number of words, and keys and values up to them.

    past: keys and values of every layer for the words before these.
    """
    start, count = tf.shape(past[0])[1], tf.shape(words)[1]
    h = _embed(model, "decoder", words, start)
    future = _MASKED * tf.cast(tf.range(start + count) > tf.range(start, start + count)[:, None], h.dtype)
    new: list[tf.Tensor] = []
    for layer, of_source in enumerate(memory, start=1):
        q = model / f"transformer_model/decoder/layer_{layer}"
        h, own = _self_attention(q, h, future, past[2 * layer - 2 : 2 * layer])
        new += own
        h = _attention_block(q, "cross_attn", h, _normed(q.p, "pre_cross_attn_sublayer", h), of_source, bias)
        h = _ffn_block(q, h, final=layer == model.config.transformer_dec_depth)
    return multiply(h, tf.transpose(model.p[transformer_table(model.config, "softmax")])), new


def _normed(p: Parameters, name: str, x: tf.Tensor) -> tf.Tensor:
    scope = f"{name}/{'layer_norm' if p.norm == 'layer' else 'rms_norm'}"
    return normalize(p, x, f"{scope}/scale", f"{scope}/offset")


def _dense(p: Parameters, name: str, x: tf.Tensor) -> tf.Tensor:
    return project(p, x, f"{name}_projection/dense_layer_weights", None, None)


def _keys_and_values(p: Parameters, name: str, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    q = p / f"{name}_sublayer"
    return _dense(q, "keys", x), _dense(q, "values", x)


def _self_attention(
    model: _Model, x: tf.Tensor, bias: tf.Tensor, past: list[tf.Tensor] | None = None
) -> tuple[tf.Tensor, tuple[tf.Tensor, tf.Tensor]]:
    """x + attention(norm(x)) to itself, and to keys and values of what stands before; all keys and values."""
    normed = _normed(model.p, "pre_self_attn_sublayer", x)
    keys, values = _keys_and_values(model.p, "self_attn", normed)
    if past is not None:
        keys, values = tf.concat((past[0], keys), 1), tf.concat((past[1], values), 1)
    return _attention_block(model, "self_attn", x, normed, (keys, values), bias), (keys, values)


def _attention_block(
    model: _Model, name: str, x: tf.Tensor, normed: tf.Tensor, attended: tuple[tf.Tensor, tf.Tensor], bias: tf.Tensor
) -> tf.Tensor:
    """x + softmax(q k^T / sqrt(d) + bias) v W, in every head, of keys and values."""
    p, config = model.p / f"{name}_sublayer", model.config
    size = config.state_size // config.transformer_num_heads

    def heads(a: tf.Tensor) -> tf.Tensor:
        batch, length, _ = tf.unstack(tf.shape(a))
        return tf.transpose(tf.reshape(a, (batch, length, config.transformer_num_heads, size)), (0, 2, 1, 3))

    queries, keys, values = heads(_dense(p, "queries", normed)), heads(attended[0]), heads(attended[1])
    weights = tf.nn.softmax(tf.matmul(queries / math.sqrt(size), keys, transpose_b=True) + bias)
    mixed = model.drop(weights, config.transformer_dropout_attn) @ values
    mixed = mixed * model.drop(tf.ones_like(mixed[..., :1, :1]), config.transformer_drophead)
    joined = tf.reshape(tf.transpose(mixed, (0, 2, 1, 3)), tf.shape(x))
    return x + model.drop(_dense(p, "context", joined), config.transformer_dropout_residual)


def _ffn_block(model: _Model, x: tf.Tensor, *, final: bool) -> tf.Tensor:
    """x + relu(norm(x) W1 + b1) W2 + b2; normalized once more where the stack ends."""
    p, config = model.p, model.config
    # Nematus drops what comes into the first layer, whatever the name of the rate says.
    normed = model.drop(_normed(p, "pre_ffn_sublayer", x), config.transformer_dropout_relu)
    hidden = tf.nn.relu(project(p / "ff_layer_1", normed, "dense_layer_weights", "dense_layer_biases", None))
    out = project(p / "ff_layer_2", hidden, "dense_layer_weights", "dense_layer_biases", None)
    y = x + model.drop(out, config.transformer_dropout_residual)
    return _normed(p, "final_transform", y) if final else y
