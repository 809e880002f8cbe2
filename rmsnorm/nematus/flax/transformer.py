"""Nematus's Transformer as a Flax NNX module: scores, losses and translations.

Logits and the output of the encoder are batch-major, as in Nematus.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial as bind
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import jax
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax import lax
from jax import numpy as jnp

from rmsnorm.nematus import beam
from rmsnorm.nematus.beam import Translations
from rmsnorm.nematus.flax import sentences
from rmsnorm.nematus.flax.output import cross_entropy, log_softmax, softmax
from rmsnorm.nematus.flax.parameters import Named, Parameters, compiled, dropout_key, multiply, normalise, project
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

Drop: TypeAlias = Callable[..., jax.Array]
Memory: TypeAlias = list[tuple[jax.Array, jax.Array]]

_GO: Final = 1  # the id that precedes the first word
_NOTHING: Final = -1  # precedes it in zero, as a vector of zeros


class Transformer(Named):
    """Nematus's Transformer: see rmsnorm.nematus.protocol.Transformer.

    A new model is in evaluation mode. In its state, Nematus's names are paths. The stream ``dropout`` of ``rngs``,
    which training with dropout needs, is forked.

    Example:
        >>> from rmsnorm.nematus.config import Config
        >>> from rmsnorm.nematus.names import variables
        >>> sizes = {"embedding_size": 4, "state_size": 4, "source_vocab_sizes": (4,), "target_vocab_size": 3}
        >>> config = Config(**sizes, model_type="transformer", norm="rms", transformer_num_heads=2)
        >>> model = Transformer(config, {row.name: jnp.zeros(row.shape) for row in variables(config)})
        >>> x, y = jnp.array([[[3], [2], [0]]]), jnp.array([[1], [0]])
        >>> round(model.loss(x, jnp.ones((3, 1)), y, jnp.ones((2, 1))).item(), 4)  # 2 log 3
        2.1972
    """

    def __init__(self, config: Config, parameters: Mapping[str, Any], *, rngs: nnx.Rngs | None = None) -> None:
        super().__init__(parameters)
        self.config = config
        self.deterministic = True
        self.rngs = nnx.data(None) if rngs is None else rngs.dropout.fork()

    def encode(self, x: Any, x_mask: Any) -> jax.Array:
        """See protocol.Transformer.encode."""
        p, config = self._parameters(), self.config
        table = p[transformer_table(config, "encoder")]
        ids, mask = sentences.source("encode", x, x_mask, config, table)
        return _encode(p, config, ids, mask, self._key())

    def logits(self, x: Any, x_mask: Any, y: Any) -> jax.Array:
        """See protocol.Transformer.logits."""
        p, config = self._parameters(), self.config
        ids, mask, words, _ = self._sentences("logits", p, x, x_mask, y)
        return _score(p, config, ids, mask, words, self._key())

    def loss(self, x: Any, x_mask: Any, y: Any, y_mask: Any) -> jax.Array:
        """See protocol.Transformer.loss."""
        p, config = self._parameters(), self.config
        smoothing = 0.0 if self.deterministic else config.label_smoothing
        return _loss(p, config, *self._sentences("loss", p, x, x_mask, y, y_mask), smoothing, self._key())

    def __call__(self, x: Any, x_mask: Any, y: Any, y_mask: Any) -> jax.Array:
        """The loss, for wrappers that train a module."""
        return self.loss(x, x_mask, y, y_mask)

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
        p, config = self._parameters(), self.config
        table = p[transformer_table(config, "encoder")]
        ids, mask = sentences.source("translate", x, x_mask, config, table)
        plan = beam.plan(config, (mask != 0).sum(0), beam_size, max_length, normalization_alpha)
        memory, bias, past = _begin(p, config, ids, mask, plan.beam_size, plan.steps)
        times = count()

        def step(states: list[jax.Array], previous: Any) -> tuple[Any, list[jax.Array]]:
            words = _before_first(config, bias) if beam.is_first(config, previous) else previous[:, None]
            log_p, states = _step(p, config, words, memory, bias, states, next(times))
            return np.asarray(log_p), states

        return beam.search(plan, step, past)

    def _parameters(self) -> Parameters:
        return Parameters(self.by_name(), self.config.norm, eps=self.config.eps)

    def _sentences(
        self, op: str, p: Parameters, x: Any, x_mask: Any, y: Any, y_mask: Any = None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Ids and masks of the source and of the target."""
        config = self.config
        table = p[transformer_table(config, "encoder")]
        ids, mask = sentences.source(op, x, x_mask, config, table)
        return ids, mask, *sentences.target(op, y, ids.shape[2], config, table, y_mask)

    def _key(self) -> jax.Array | None:
        """The key of dropout in training; None if nothing is dropped."""
        drops = any(value for name, value in vars(self.config).items() if name.startswith("transformer_drop"))
        return dropout_key(self.rngs) if drops and not self.deterministic else None


@bind(compiled, static_argnames="config")
def _encode(p: Parameters, config: Config, x: jax.Array, mask: jax.Array, key: jax.Array | None) -> jax.Array:
    return _encoder_stack(p, config, _dropout(key), x, _padding(config, mask))


@bind(compiled, static_argnames="config")
def _score(
    p: Parameters, config: Config, x: jax.Array, mask: jax.Array, y: jax.Array, key: jax.Array | None
) -> jax.Array:
    """Logits of the target words."""
    drop, bias = _dropout(key), _padding(config, mask)
    memory = _memory(p, config, _encoder_stack(p, config, drop, x, bias))
    before = jnp.concatenate((_before_first(config, y.T), y[:-1].T), axis=1)
    return _decode(p, config, drop, before, memory, bias, _no_words(config, bias, len(y)))[0]


@bind(compiled, static_argnames=("config", "smoothing"))
def _loss(
    p: Parameters,
    config: Config,
    x: jax.Array,
    mask: jax.Array,
    y: jax.Array,
    y_mask: jax.Array,
    smoothing: float,
    key: jax.Array | None,
) -> jax.Array:
    right, wrong, smallest = smoothed(smoothing, config.target_vocab_size)
    losses = cross_entropy(_score(p, config, x, mask, y, key), y.T, y_mask.T, right, wrong)
    loss = (losses - smallest * y_mask.T.astype(losses.dtype)).sum(1)
    return loss / y_mask.sum(0).astype(losses.dtype) if config.dialect == "zero" else loss


@bind(compiled, static_argnames=("config", "beam_size", "length"))
def _begin(
    p: Parameters, config: Config, x: jax.Array, mask: jax.Array, beam_size: int, length: int
) -> tuple[Memory, jax.Array, list[jax.Array]]:
    """What a search needs before the first word, with beam_size rows for every sentence: memory, bias and states."""
    bias = _padding(config, mask)
    memory = _memory(p, config, _encoder_stack(p, config, _dropout(None), x, bias))
    memory, bias = jax.tree.map(bind(jnp.repeat, repeats=beam_size, axis=0), (memory, bias))
    return memory, bias, _no_words(config, bias, length)


@bind(compiled, static_argnames="config")
def _step(
    p: Parameters,
    config: Config,
    words: jax.Array,
    memory: Memory,
    bias: jax.Array,
    past: list[jax.Array],
    start: jax.Array,
) -> tuple[jax.Array, list[jax.Array]]:
    """Log-probabilities of the word after the given ones, and the keys and values so far."""
    logits, past = _decode(p, config, _dropout(None), words, memory, bias, past, start)
    return log_softmax(logits[:, 0]), past


def _dropout(key: jax.Array | None) -> Drop:
    """A function that drops features at a rate, other ones in every call; without a key it drops nothing."""
    if key is None:
        return lambda x, rate, shared=(): x
    rngs = nnx.Rngs(key)
    return lambda x, rate, shared=(): nnx.Dropout(rate, broadcast_dims=shared, rngs=rngs)(x)


def _padding(config: Config, mask: jax.Array) -> jax.Array:
    """What is added to the scores of attention to the source, (batch, heads, queries, keys)."""
    return (config.masked_score * (mask == 0).astype(mask.dtype)).T[:, None, None]


def _no_words(config: Config, bias: jax.Array, length: int) -> list[jax.Array]:
    """Keys and values of every layer of the decoder before the first word: zeros for ``length`` words."""
    return [jnp.zeros((len(bias), length, config.state_size), bias.dtype)] * (2 * config.transformer_dec_depth)


def _before_first(config: Config, like: jax.Array) -> jax.Array:
    """What precedes the first word, one id for each row of ``like``."""
    return jnp.full((len(like), 1), _NOTHING if config.dialect == "zero" else _GO)


def _positions(length: int, size: int) -> npt.NDArray[np.float64]:
    """sin(t w_i), then cos(t w_i), t from 0 on: w from 1 to 1/10000, in equal ratios; zeros if size is odd."""
    frequencies = np.exp(-np.arange(size // 2) * math.log(10000) / (size // 2 - 1))
    angles = np.arange(length)[:, None] * frequencies
    return np.concatenate((np.sin(angles), np.cos(angles), np.zeros((length, size % 2))), axis=1)


def _embed(
    p: Parameters, config: Config, drop: Drop, use: Use, ids: jax.Array, length: int, start: Any = 0
) -> jax.Array:
    """Embeddings of words and positions, of which the first is ``start``, in sentences of ``length`` words."""
    words = jnp.take(p[transformer_table(config, use)], jnp.maximum(ids, 0), axis=0) * math.sqrt(config.state_size)
    if config.dialect == "zero":
        words = jnp.where((ids != _NOTHING)[..., None], words + p[ZERO_BIAS], 0)
    positions = jnp.asarray(_positions(length, config.state_size), words.dtype)
    positions = lax.dynamic_slice_in_dim(positions, start, ids.shape[1])
    return drop(words + positions, config.transformer_dropout_embeddings)


def _encoder_stack(p: Parameters, config: Config, drop: Drop, x: jax.Array, bias: jax.Array) -> jax.Array:
    ids = x[0].T
    h = _embed(p, config, drop, "encoder", ids, ids.shape[1])
    for number in range(1, config.transformer_enc_depth + 1):
        q = p / transformer_layer(config, "encoder", number)
        h, _ = _self_attention(q, config, drop, h, bias)
        h = _ffn_block(q, config, drop, h, last=number == config.transformer_enc_depth)
    return h


def _memory(p: Parameters, config: Config, encoded: jax.Array) -> Memory:
    """Keys and values of the source for every layer of the decoder."""
    layers = [p / transformer_layer(config, "decoder", i) for i in range(1, config.transformer_dec_depth + 1)]
    maps = [[_map(q, config, "cross_attn", part, encoded) for part in ("keys", "values")] for q in layers]
    return [(keys, values) for keys, values in maps]


def _decode(
    p: Parameters,
    config: Config,
    drop: Drop,
    words: jax.Array,
    memory: Memory,
    bias: jax.Array,
    past: list[jax.Array],
    start: Any = 0,
) -> tuple[jax.Array, list[jax.Array]]:
    """Logits after any number of words, and the keys and values up to them.

    past: keys and values of every layer; those of the words before ``start`` are known.
    """
    length = past[0].shape[1]
    h = _embed(p, config, drop, "decoder", words, length, start)
    is_future = jnp.arange(length) > start + jnp.arange(words.shape[1])[:, None]
    future = jnp.where(is_future, config.masked_score, 0.0).astype(h.dtype)
    new: list[jax.Array] = []
    for number, of_source in enumerate(memory, start=1):
        q = p / transformer_layer(config, "decoder", number)
        h, own = _self_attention(q, config, drop, h, future, past[2 * number - 2 : 2 * number], start)
        new += own
        queries = _map(q, config, "cross_attn", "queries", _before(q, config, "cross_attn", h))
        h = _attention_block(q, config, drop, "cross_attn", h, queries, of_source, bias)
        h = _ffn_block(q, config, drop, h, last=number == config.transformer_dec_depth)
    return multiply(h, p[transformer_table(config, "softmax")].T), new


def _normed(p: Parameters, config: Config, block: Block, x: jax.Array) -> jax.Array:
    return normalise(p, x, *transformer_norm(config, block))


def _before(p: Parameters, config: Config, block: Block, x: jax.Array) -> jax.Array:
    """What a block reads: norm(x), in zero x."""
    return x if config.dialect == "zero" else _normed(p, config, block, x)


def _after(p: Parameters, config: Config, drop: Drop, block: Block, x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y, in zero norm(x + y)."""
    y = x + drop(y, config.transformer_dropout_residual)
    return _normed(p, config, block, y) if config.dialect == "zero" else y


def _map(p: Parameters, config: Config, block: Block, part: str, x: jax.Array) -> jax.Array:
    weight, bias = transformer_map(config, block, part)
    return project(p, x, weight, bias, None)


def _projections(p: Parameters, config: Config, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of attention to itself."""
    if config.dialect == "zero":
        queries, keys, values = jnp.split(_map(p, config, "self_attn", "qkv", x), 3, axis=-1)
    else:
        queries, keys, values = (_map(p, config, "self_attn", part, x) for part in ("queries", "keys", "values"))
    return queries, keys, values


def _self_attention(
    p: Parameters,
    config: Config,
    drop: Drop,
    x: jax.Array,
    bias: jax.Array,
    past: list[jax.Array] | None = None,
    start: Any = 0,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """x + attention(norm(x)) to itself and to the past keys and values; and all keys and values."""
    queries, keys, values = _projections(p, config, _before(p, config, "self_attn", x))
    if past is not None:
        keys = lax.dynamic_update_slice_in_dim(past[0], keys, start, 1)
        values = lax.dynamic_update_slice_in_dim(past[1], values, start, 1)
    return _attention_block(p, config, drop, "self_attn", x, queries, (keys, values), bias), (keys, values)


def _attention_block(
    p: Parameters,
    config: Config,
    drop: Drop,
    block: Block,
    x: jax.Array,
    queries: jax.Array,
    attended: tuple[jax.Array, jax.Array],
    bias: jax.Array,
) -> jax.Array:
    """x + softmax(q k^T / sqrt(d) + bias) v W in every head; in ReLA relu(q k^T / sqrt(d)) where bias is 0."""

    def heads(array: jax.Array) -> jax.Array:
        return array.reshape(*array.shape[:2], config.transformer_num_heads, -1)

    q, k, v = heads(queries), heads(attended[0]), heads(attended[1])
    scores = _einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    weights = jax.nn.relu(jnp.where(bias == 0, scores, 0)) if config.relu_attention else softmax(scores + bias)
    mixed = _einsum("bhqk,bkhd->bqhd", drop(weights, config.transformer_dropout_attn), v)
    joined = drop(mixed, config.transformer_drophead, shared=(1, 3)).reshape(x.shape)
    if config.relu_attention:
        joined = _gated(p, block, joined)
    return _after(p, config, drop, block, x, _map(p, config, block, "context", joined))


def _gated(p: Parameters, block: Block, x: jax.Array) -> jax.Array:
    """zero's gated RMSNorm: rms_norm(x) sigmoid(gate x)."""
    gain, gate = transformer_gate(block)
    return normalise(p, x, gain, None, "rms") * jax.nn.sigmoid(p[gate] * x)


def _ffn_block(p: Parameters, config: Config, drop: Drop, x: jax.Array, *, last: bool) -> jax.Array:
    """x + relu(norm(x) W1 + b1) W2 + b2; in Nematus normalised once more at the end of the stack."""
    is_zero = config.dialect == "zero"
    x_in = _before(p, config, "ffn", x)
    if not is_zero:  # Nematus applies this dropout to the input of the first layer, in spite of its name.
        x_in = drop(x_in, config.transformer_dropout_relu)
    hidden = jax.nn.relu(_map(p, config, "ffn", "in", x_in))
    if is_zero:
        hidden = drop(hidden, config.transformer_dropout_relu)
    y = _after(p, config, drop, "ffn", x, _map(p, config, "ffn", "out", hidden))
    return _normed(p, config, "final", y) if last and not is_zero else y


_einsum = bind(jnp.einsum, precision=lax.Precision.HIGHEST)
