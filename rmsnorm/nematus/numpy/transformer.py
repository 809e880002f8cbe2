"""Nematus's Transformer in NumPy, the golden: scores, losses, translations and all gradients.

Logits and the output of the encoder are batch-major, as in Nematus. The arithmetic is float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rmsnorm.nematus import beam, sentences
from rmsnorm.nematus.beam import Translations
from rmsnorm.nematus.names import Use, transformer_table
from rmsnorm.nematus.numpy.output import cross_entropy, embed, log_softmax
from rmsnorm.nematus.numpy.parameters import Array, Parameters, Pullback, identity, normalise, project, rows

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

__all__ = ["Transformer"]

_GO: Final = 1  # the id that precedes the first word
_MASKED: Final = -1e9


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
        ids, mask = sentences.source("encode", x, x_mask, config.source_vocab_sizes)
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
        beam_size: int = 12,
        max_length: int | None = None,
        *,
        normalization_alpha: float = 0.0,
    ) -> Translations:
        """See protocol.Transformer.translate."""
        p, config = self._parameters(), self.config
        max_length = config.translation_maxlen if max_length is None else max_length
        beam.check(beam_size, max_length)
        ids, mask = sentences.source("translate", x, x_mask, config.source_vocab_sizes)
        memory, bias, past = _begin(p, config, ids, mask, beam_size)

        def step(states: list[Array], previous: Any) -> tuple[Array, list[Array]]:
            words = np.full((len(bias), 1), _GO) if previous is None else previous[:, None]
            return _step(p, config, words, memory, bias, states)

        return beam.search(config.search, step, past, beam_size, max_length, normalization_alpha)

    def _parameters(self) -> Parameters:
        return Parameters(self.parameters, self.config.norm)

    def _sentences(self, op: str, x: Any, x_mask: Any, y: Any, y_mask: Any = None) -> tuple[Array, Array, Array, Array]:
        """Ids and masks of the source and of the target."""
        config = self.config
        ids, mask = sentences.source(op, x, x_mask, config.source_vocab_sizes)
        return ids, mask, *sentences.target(op, y, ids.shape[2], config.target_vocab_size, y_mask)


def _encode(p: Parameters, config: Config, x: Array, mask: Array) -> Array:
    return _encoder_stack(p, config, x, _padding(mask))[0]


def _score(p: Parameters, config: Config, x: Array, mask: Array, y: Array) -> tuple[Array, Callable[[Array], None]]:
    """Logits of the target words."""
    bias = _padding(mask)
    memory, encoder_pullback = _encoder_stack(p, config, x, bias)
    before = np.concatenate((np.full((y.shape[1], 1), _GO), y.T[:, :-1]), axis=1)
    h, embed_pullback = _embed(p, config, "decoder", before)
    future = np.triu(np.full((len(y), len(y)), _MASKED), k=1)
    pullbacks = []
    for layer in range(1, config.transformer_dec_depth + 1):
        q = p / f"transformer_model/decoder/layer_{layer}"
        h, self_pullback = _attention_block(q, config, "self_attn", h, None, future)
        h, cross_pullback = _attention_block(q, config, "cross_attn", h, memory, bias)
        h, ffn_pullback = _ffn_block(q, h, final=layer == config.transformer_dec_depth)
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
    right, wrong = 1 - smoothing, smoothing / (config.target_vocab_size - 1)
    smallest = -right * np.log(right) - smoothing * np.log(wrong + 1e-20) if smoothing else 0.0
    losses, losses_pullback = cross_entropy(logits, y.T, y_mask.T, right, wrong)
    loss = losses.sum(axis=1) - smallest * y_mask.sum(axis=0)
    return loss, lambda dloss: logits_pullback(losses_pullback(dloss[:, None]))


def _begin(p: Parameters, config: Config, x: Array, mask: Array, beam_size: int) -> tuple[Array, Array, list[Array]]:
    """What a search needs before the first word, with beam_size rows for every sentence: memory, bias and states."""
    bias = _padding(mask)
    memory = _encoder_stack(p, config, x, bias)[0]
    memory, bias = (np.repeat(array, beam_size, axis=0) for array in (memory, bias))
    return memory, bias, _no_words(config, bias)


def _step(
    p: Parameters, config: Config, words: Array, memory: Array, bias: Array, past: list[Array]
) -> tuple[Array, list[Array]]:
    """Log-probabilities of the word after the given ones, and the keys and values so far."""
    x = _embed(p, config, "decoder", words, past[0].shape[1])[0]
    new = []
    for layer in range(1, config.transformer_dec_depth + 1):
        q = p / f"transformer_model/decoder/layer_{layer}"
        attention = q / "self_attn_sublayer"
        normed, _ = _normed(q, "pre_self_attn_sublayer", x)
        before = past[2 * layer - 2 : 2 * layer]
        keys = np.concatenate((before[0], _dense(attention, "keys", normed)[0]), axis=1)
        values = np.concatenate((before[1], _dense(attention, "values", normed)[0]), axis=1)
        new += [keys, values]
        mixed, _ = _mix(config, _dense(attention, "queries", normed)[0], keys, values, np.zeros(()))
        x = x + _dense(attention, "context", mixed)[0]
        x = _attention_block(q, config, "cross_attn", x, memory, bias)[0]
        x = _ffn_block(q, x, final=layer == config.transformer_dec_depth)[0]
    return log_softmax(x[:, 0] @ p[transformer_table(config, "softmax")].T), new


def _padding(mask: Array) -> Array:
    """What is added to the scores of attention to the source, (batch, heads, queries, keys)."""
    return np.where(mask == 0, _MASKED, 0.0).T[:, None, None]


def _no_words(config: Config, bias: Array) -> list[Array]:
    """Keys and values of every layer of the decoder before the first word: none."""
    return [np.zeros((len(bias), 0, config.state_size))] * (2 * config.transformer_dec_depth)


def _positions(start: int, length: int, size: int) -> Array:
    """sin(t w_i), then cos(t w_i), t from ``start`` on: w from 1 to 1/10000, in equal ratios."""
    frequencies = np.exp(-np.arange(size // 2) * np.log(10000) / (size // 2 - 1))
    angles = np.arange(start, start + length)[:, None] * frequencies
    return np.concatenate((np.sin(angles), np.cos(angles)), axis=1)


def _embed(
    p: Parameters, config: Config, use: Use, ids: Array, start: int = 0
) -> tuple[Array, Callable[[Array], None]]:
    """Embeddings of words and positions, of which the first is ``start``."""
    factor = np.sqrt(config.state_size)
    words, pullback = embed(p, transformer_table(config, use), ids)
    return words * factor + _positions(start, ids.shape[1], config.state_size), lambda dx: pullback(dx * factor)


def _encoder_stack(p: Parameters, config: Config, x: Array, bias: Array) -> tuple[Array, Callable[[Array], None]]:
    h, embed_pullback = _embed(p, config, "encoder", x[0].T)
    pullbacks = []
    for layer in range(1, config.transformer_enc_depth + 1):
        q = p / f"transformer_model/encoder/layer_{layer}"
        h, attention_pullback = _attention_block(q, config, "self_attn", h, None, bias)
        h, ffn_pullback = _ffn_block(q, h, final=layer == config.transformer_enc_depth)
        pullbacks.append((attention_pullback, ffn_pullback))

    def pullback(dh: Array) -> None:
        for attention_pullback, ffn_pullback in reversed(pullbacks):
            dh, _ = attention_pullback(ffn_pullback(dh))
        embed_pullback(dh)

    return h, pullback


def _normed(p: Parameters, name: str, x: Array) -> tuple[Array, Pullback]:
    scope = f"{name}/{'layer_norm' if p.norm == 'layer' else 'rms_norm'}"
    return normalise(p, x, f"{scope}/scale", f"{scope}/offset")


def _dense(p: Parameters, name: str, x: Array) -> tuple[Array, Pullback]:
    return project(p, x, f"{name}_projection/dense_layer_weights", None, None)


def _attention_block(
    p: Parameters, config: Config, name: str, x: Array, memory: Array | None, bias: Array
) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    """x + attention(norm(x)) to itself or to a memory; the pullback returns the gradients of x and of the memory."""
    normed, norm_pullback = _normed(p, f"pre_{name}_sublayer", x)
    attention = p / f"{name}_sublayer"
    attended = normed if memory is None else memory
    queries, queries_pullback = _dense(attention, "queries", normed)
    keys, keys_pullback = _dense(attention, "keys", attended)
    values, values_pullback = _dense(attention, "values", attended)
    mixed, mix_pullback = _mix(config, queries, keys, values, bias)
    y, context_pullback = _dense(attention, "context", mixed)

    def pullback(dy: Array) -> tuple[Array, Array]:
        dqueries, dkeys, dvalues = mix_pullback(context_pullback(dy))
        dnormed, dattended = queries_pullback(dqueries), keys_pullback(dkeys) + values_pullback(dvalues)
        if memory is None:
            dnormed = dnormed + dattended
        return dy + norm_pullback(dnormed), dattended

    return x + y, pullback


def _mix(
    config: Config, queries: Array, keys: Array, values: Array, bias: Array
) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
    """softmax(q k^T / sqrt(d) + bias) v in every head."""
    heads = config.transformer_num_heads

    def split(array: Array) -> Array:
        return array.reshape(*array.shape[:2], heads, -1).swapaxes(1, 2)

    def merge(array: Array) -> Array:
        return array.swapaxes(1, 2).reshape(len(array), array.shape[2], -1)

    q, k, v = split(queries), split(keys), split(values)
    scale = 1 / np.sqrt(q.shape[-1])
    scores = q @ k.swapaxes(2, 3) * scale + bias
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)

    def pullback(dy: Array) -> tuple[Array, Array, Array]:
        dmixed = split(dy)
        dweights = dmixed @ v.swapaxes(2, 3)
        dscores = weights * (dweights - (weights * dweights).sum(axis=-1, keepdims=True)) * scale
        return merge(dscores @ k), merge(dscores.swapaxes(2, 3) @ q), merge(weights.swapaxes(2, 3) @ dmixed)

    return merge(weights @ v), pullback


def _ffn_block(p: Parameters, x: Array, *, final: bool) -> tuple[Array, Pullback]:
    """x + relu(norm(x) W1 + b1) W2 + b2; normalised once more at the end of the stack."""
    normed, norm_pullback = _normed(p, "pre_ffn_sublayer", x)
    hidden, first_pullback = project(p / "ff_layer_1", normed, "dense_layer_weights", "dense_layer_biases", None)
    out, second_pullback = project(
        p / "ff_layer_2", np.maximum(hidden, 0), "dense_layer_weights", "dense_layer_biases", None
    )
    y, final_pullback = _normed(p, "final_transform", x + out) if final else (x + out, identity)

    def pullback(dy: Array) -> Array:
        dy = final_pullback(dy)
        return dy + norm_pullback(first_pullback(second_pullback(dy) * (hidden > 0)))

    return y, pullback
