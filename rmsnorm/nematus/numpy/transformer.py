"""Nematus's Transformer in NumPy, the golden: scores, losses, translations and all gradients.

Logits and the output of the encoder are batch-major, as in Nematus. The arithmetic is float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rmsnorm.nematus import beam, sentences
from rmsnorm.nematus.beam import Translations
from rmsnorm.nematus.numpy.output import cross_entropy, embed, log_softmax
from rmsnorm.nematus.numpy.parameters import Array, Parameters, Pullback, identity, normalise, project, rows, sigmoid
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

_GO: Final = 1  # the id that precedes the first word
_NOTHING: Final = -1  # precedes it in zero, as a vector of zeros


class Transformer:
    """Nematus's Transformer: see rmsnorm.nematus.protocol.Transformer.

    Example:
        >>> from rmsnorm.nematus.config import Config
        >>> from rmsnorm.nematus.names import variables
        >>> sizes = {"embedding_size": 4, "state_size": 4, "source_vocab_sizes": (4,), "target_vocab_size": 3}
        >>> config = Config(**sizes, model_type="transformer", norm="rms", transformer_num_heads=2)
        >>> model = Transformer(config, {row.name: np.zeros(row.shape) for row in variables(config)})
        >>> x, y = np.array([[[3], [2], [0]]]), np.array([[1], [0]])
        >>> model.loss(x, np.ones((3, 1)), y, np.ones((2, 1))).round(4)  # 2 log 3
        array([2.1972])
    """

    def __init__(self, config: Config, parameters: Mapping[str, Any]) -> None:
        self.config = config
        self.parameters = {name: np.asarray(value, np.float64) for name, value in parameters.items()}

    def encode(self, x: Any, x_mask: Any) -> Array:
        """See protocol.Transformer.encode."""
        p, config = self._parameters(), self.config
        ids, mask = sentences.source("encode", x, x_mask, config)
        return _encode(p, config, ids, mask)

    def logits(self, x: Any, x_mask: Any, y: Any) -> Array:
        """See protocol.Transformer.logits."""
        p, config = self._parameters(), self.config
        ids, mask, words, _ = self._sentences("logits", x, x_mask, y)
        return _score(p, config, ids, mask, words)[0]

    def loss(self, x: Any, x_mask: Any, y: Any, y_mask: Any, *, training: bool = False) -> Array:
        """See protocol.Transformer.loss. training: with label smoothing."""
        p, config = self._parameters(), self.config
        smoothing = config.label_smoothing if training else 0.0
        return _loss(p, config, *self._sentences("loss", x, x_mask, y, y_mask), smoothing)[0]

    def gradients(self, x: Any, x_mask: Any, y: Any, y_mask: Any, *, training: bool = False) -> dict[str, Array]:
        """Gradient of the mean loss over the sentences with respect to every parameter, by name; as loss."""
        p, config = self._parameters(), self.config
        smoothing = config.label_smoothing if training else 0.0
        loss, pullback = _loss(p, config, *self._sentences("gradients", x, x_mask, y, y_mask), smoothing)
        pullback(np.full_like(loss, 1 / len(loss)))
        return {name: p.gradients[name] for name in self.parameters}

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
        ids, mask = sentences.source("translate", x, x_mask, config)
        plan = beam.plan(config, (mask != 0).sum(axis=0), beam_size, max_length, normalization_alpha)
        memory, bias, past = _begin(p, config, ids, mask, plan.beam_size)

        def step(states: list[Array], previous: Any) -> tuple[Array, list[Array]]:
            words = _before_first(config, bias) if beam.is_first(config, previous) else previous[:, None]
            return _step(p, config, words, memory, bias, states)

        return beam.search(plan, step, past)

    def _parameters(self) -> Parameters:
        return Parameters(self.parameters, self.config.norm, eps=self.config.eps)

    def _sentences(self, op: str, x: Any, x_mask: Any, y: Any, y_mask: Any = None) -> tuple[Array, Array, Array, Array]:
        """Ids and masks of the source and of the target."""
        config = self.config
        ids, mask = sentences.source(op, x, x_mask, config)
        return ids, mask, *sentences.target(op, y, ids.shape[2], config, y_mask)


def _encode(p: Parameters, config: Config, x: Array, mask: Array) -> Array:
    return _encoder_stack(p, config, x, _padding(config, mask))[0]


def _score(p: Parameters, config: Config, x: Array, mask: Array, y: Array) -> tuple[Array, Callable[[Array], None]]:
    """Logits of the target words."""
    bias = _padding(config, mask)
    memory, encoder_pullback = _encoder_stack(p, config, x, bias)
    before = np.concatenate((_before_first(config, y.T), y.T[:, :-1]), axis=1)
    h, embed_pullback = _embed(p, config, "decoder", before)
    future = np.triu(np.full((len(y), len(y)), config.masked_score), k=1)
    pullbacks = []
    for number in range(1, config.transformer_dec_depth + 1):
        q = p / transformer_layer(config, "decoder", number)
        h, self_pullback = _attention_block(q, config, "self_attn", h, None, future)
        h, cross_pullback = _attention_block(q, config, "cross_attn", h, memory, bias)
        h, ffn_pullback = _ffn_block(q, config, h, last=number == config.transformer_dec_depth)
        pullbacks.append((self_pullback, cross_pullback, ffn_pullback))
    table = transformer_table(config, "softmax")

    def pullback(dlogits: Array) -> None:
        p.add(table, rows(dlogits).T @ rows(h))
        dh, dmemory = dlogits @ p[table], np.zeros_like(memory)
        for self_pullback, cross_pullback, ffn_pullback in reversed(pullbacks):
            dh, from_layer = cross_pullback(ffn_pullback(dh))
            dmemory += from_layer
            dh, _ = self_pullback(dh)
        embed_pullback(dh)
        encoder_pullback(dmemory)

    return h @ p[table].T, pullback


def _loss(
    p: Parameters, config: Config, x: Array, mask: Array, y: Array, y_mask: Array, smoothing: float
) -> tuple[Array, Callable[[Array], None]]:
    logits, logits_pullback = _score(p, config, x, mask, y)
    right, wrong, smallest = smoothed(smoothing, config.target_vocab_size)
    losses, losses_pullback = cross_entropy(logits, y.T, y_mask.T, right, wrong)
    words = y_mask.sum(axis=0)
    size = words if config.dialect == "zero" else np.ones_like(words)
    loss = (losses.sum(axis=1) - smallest * words) / size
    return loss, lambda dloss: logits_pullback(losses_pullback((dloss / size)[:, None]))


def _begin(p: Parameters, config: Config, x: Array, mask: Array, beam_size: int) -> tuple[Array, Array, list[Array]]:
    """What a search needs before the first word, with beam_size rows for every sentence: memory, bias and states."""
    bias = _padding(config, mask)
    memory = _encoder_stack(p, config, x, bias)[0]
    memory, bias = (np.repeat(array, beam_size, axis=0) for array in (memory, bias))
    return memory, bias, _no_words(config, bias)


def _step(
    p: Parameters, config: Config, words: Array, memory: Array, bias: Array, past: list[Array]
) -> tuple[Array, list[Array]]:
    """Log-probabilities of the word after the given ones, and the keys and values so far."""
    x = _embed(p, config, "decoder", words, past[0].shape[1])[0]
    new = []
    for number in range(1, config.transformer_dec_depth + 1):
        q = p / transformer_layer(config, "decoder", number)
        normed, _ = _before(q, config, "self_attn", x)
        queries, keys, values, _ = _projections(q, config, "self_attn", normed, None)
        keys, values = (
            np.concatenate(both, axis=1) for both in zip(past[2 * number - 2 : 2 * number], (keys, values), strict=True)
        )
        new += [keys, values]
        mixed, _ = _mix(q, config, "self_attn", queries, keys, values, np.zeros(()))
        x, _ = _after(q, config, "self_attn", x, _map(q, config, "self_attn", "context", mixed)[0])
        x = _attention_block(q, config, "cross_attn", x, memory, bias)[0]
        x = _ffn_block(q, config, x, last=number == config.transformer_dec_depth)[0]
    return log_softmax(x[:, 0] @ p[transformer_table(config, "softmax")].T), new


def _padding(config: Config, mask: Array) -> Array:
    """What is added to the scores of attention to the source, (batch, heads, queries, keys)."""
    return np.where(mask == 0, config.masked_score, 0.0).T[:, None, None]


def _no_words(config: Config, bias: Array) -> list[Array]:
    """Keys and values of every layer of the decoder before the first word: none."""
    return [np.zeros((len(bias), 0, config.state_size))] * (2 * config.transformer_dec_depth)


def _before_first(config: Config, like: Array) -> Array:
    """What precedes the first word, one id for each row of ``like``."""
    return np.full((len(like), 1), _NOTHING if config.dialect == "zero" else _GO)


def _positions(start: int, length: int, size: int) -> Array:
    """sin(t w_i), then cos(t w_i), t from ``start`` on: w from 1 to 1/10000, in equal ratios; zeros if size is odd."""
    frequencies = np.exp(-np.arange(size // 2) * np.log(10000) / (size // 2 - 1))
    angles = np.arange(start, start + length)[:, None] * frequencies
    return np.concatenate((np.sin(angles), np.cos(angles), np.zeros((length, size % 2))), axis=1)


def _embed(
    p: Parameters, config: Config, use: Use, ids: Array, start: int = 0
) -> tuple[Array, Callable[[Array], None]]:
    """Embeddings of words and positions, of which the first is ``start``."""
    factor = np.sqrt(config.state_size)
    is_word = (ids != _NOTHING)[..., None]
    words, embed_pullback = embed(p, transformer_table(config, use), np.maximum(ids, 0))
    words = words * factor
    if config.dialect == "zero":
        words = words + p[ZERO_BIAS]

    def pullback(dx: Array) -> None:
        dwords = dx * is_word
        embed_pullback(dwords * factor)
        if config.dialect == "zero":
            p.add(ZERO_BIAS, rows(dwords).sum(axis=0))

    return words * is_word + _positions(start, ids.shape[1], config.state_size), pullback


def _encoder_stack(p: Parameters, config: Config, x: Array, bias: Array) -> tuple[Array, Callable[[Array], None]]:
    h, embed_pullback = _embed(p, config, "encoder", x[0].T)
    pullbacks = []
    for number in range(1, config.transformer_enc_depth + 1):
        q = p / transformer_layer(config, "encoder", number)
        h, attention_pullback = _attention_block(q, config, "self_attn", h, None, bias)
        h, ffn_pullback = _ffn_block(q, config, h, last=number == config.transformer_enc_depth)
        pullbacks.append((attention_pullback, ffn_pullback))

    def pullback(dh: Array) -> None:
        for attention_pullback, ffn_pullback in reversed(pullbacks):
            dh, _ = attention_pullback(ffn_pullback(dh))
        embed_pullback(dh)

    return h, pullback


def _normed(p: Parameters, config: Config, block: Block, x: Array) -> tuple[Array, Pullback]:
    return normalise(p, x, *transformer_norm(config, block))


def _before(p: Parameters, config: Config, block: Block, x: Array) -> tuple[Array, Pullback]:
    """What a block reads: norm(x), in zero x."""
    return (x, identity) if config.dialect == "zero" else _normed(p, config, block, x)


def _after(p: Parameters, config: Config, block: Block, x: Array, y: Array) -> tuple[Array, Pullback]:
    """x + y, in zero norm(x + y); the pullback returns the gradient of the sum."""
    return _normed(p, config, block, x + y) if config.dialect == "zero" else (x + y, identity)


def _map(p: Parameters, config: Config, block: Block, part: str, x: Array) -> tuple[Array, Pullback]:
    weight, bias = transformer_map(config, block, part)
    return project(p, x, weight, bias, None)


def _projections(
    p: Parameters, config: Config, block: Block, x: Array, memory: Array | None
) -> tuple[Array, Array, Array, Callable[[Array, Array, Array], tuple[Array, Array]]]:
    """Queries of x, keys and values of the memory or of x; the pullback returns the gradients of x and of these."""
    if memory is None and config.dialect == "zero":
        joint, joint_pullback = _map(p, config, block, "qkv", x)
        queries, keys, values = np.split(joint, 3, axis=-1)
        return queries, keys, values, lambda *d: (joint_pullback(np.concatenate(d, axis=-1)), np.zeros_like(x))
    attended = x if memory is None else memory
    queries, queries_pullback = _map(p, config, block, "queries", x)
    keys, keys_pullback = _map(p, config, block, "keys", attended)
    values, values_pullback = _map(p, config, block, "values", attended)

    def pullback(dqueries: Array, dkeys: Array, dvalues: Array) -> tuple[Array, Array]:
        return queries_pullback(dqueries), keys_pullback(dkeys) + values_pullback(dvalues)

    return queries, keys, values, pullback


def _attention_block(
    p: Parameters, config: Config, block: Block, x: Array, memory: Array | None, bias: Array
) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    """x + attention(norm(x)) to itself or to a memory; the pullback returns the gradients of x and of the memory."""
    normed, before_pullback = _before(p, config, block, x)
    queries, keys, values, projections_pullback = _projections(p, config, block, normed, memory)
    mixed, mix_pullback = _mix(p, config, block, queries, keys, values, bias)
    y, context_pullback = _map(p, config, block, "context", mixed)
    out, after_pullback = _after(p, config, block, x, y)

    def pullback(dout: Array) -> tuple[Array, Array]:
        dsum = after_pullback(dout)
        dnormed, dattended = projections_pullback(*mix_pullback(context_pullback(dsum)))
        if memory is None:
            dnormed = dnormed + dattended
        return dsum + before_pullback(dnormed), dattended

    return out, pullback


def _mix(
    p: Parameters, config: Config, block: Block, queries: Array, keys: Array, values: Array, bias: Array
) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
    """softmax(q k^T / sqrt(d) + bias) v in every head; in ReLA relu(q k^T / sqrt(d)) v where bias is 0, normalised."""
    heads = config.transformer_num_heads

    def split(array: Array) -> Array:
        return array.reshape(*array.shape[:2], heads, -1).swapaxes(1, 2)

    def merge(array: Array) -> Array:
        return array.swapaxes(1, 2).reshape(len(array), array.shape[2], -1)

    q, k, v = split(queries), split(keys), split(values)
    scale = 1 / np.sqrt(q.shape[-1])
    scores = q @ k.swapaxes(2, 3) * scale
    if config.relu_attention:
        weights = np.maximum(scores * (bias == 0), 0)
        mixed, gate_pullback = _gated(p, block, merge(weights @ v))
    else:
        weights = np.exp(scores + bias - (scores + bias).max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed, gate_pullback = merge(weights @ v), identity

    def pullback(dy: Array) -> tuple[Array, Array, Array]:
        dmixed = split(gate_pullback(dy))
        dweights = dmixed @ v.swapaxes(2, 3)
        if config.relu_attention:
            dscores = dweights * (weights > 0) * scale
        else:
            dscores = weights * (dweights - (weights * dweights).sum(axis=-1, keepdims=True)) * scale
        return merge(dscores @ k), merge(dscores.swapaxes(2, 3) @ q), merge(weights.swapaxes(2, 3) @ dmixed)

    return mixed, pullback


def _gated(p: Parameters, block: Block, x: Array) -> tuple[Array, Pullback]:
    """zero's gated RMSNorm: rms_norm(x) sigmoid(gate x)."""
    gain, gate = transformer_gate(block)
    normed, norm_pullback = normalise(p, x, gain, None, "rms")
    opened = sigmoid(p[gate] * x)

    def pullback(dy: Array) -> Array:
        dopened = dy * normed * opened * (1 - opened)
        p.add(gate, rows(dopened * x).sum(axis=0))
        return norm_pullback(dy * opened) + dopened * p[gate]

    return normed * opened, pullback


def _ffn_block(p: Parameters, config: Config, x: Array, *, last: bool) -> tuple[Array, Pullback]:
    """x + relu(norm(x) W1 + b1) W2 + b2; in Nematus normalised once more at the end of the stack."""
    normed, before_pullback = _before(p, config, "ffn", x)
    hidden, in_pullback = _map(p, config, "ffn", "in", normed)
    out, out_pullback = _map(p, config, "ffn", "out", np.maximum(hidden, 0))
    y, after_pullback = _after(p, config, "ffn", x, out)
    final_pullback: Pullback = identity
    if last and config.dialect != "zero":
        y, final_pullback = _normed(p, config, "final", y)

    def pullback(dy: Array) -> Array:
        dsum = after_pullback(final_pullback(dy))
        return dsum + before_pullback(in_pullback(out_pullback(dsum) * (hidden > 0)))

    return y, pullback
