"""The golden of Nematus's Transformer: scores, losses, translations, and the gradient of every parameter.

Pre-norm, sinusoids, one norm more at the end of each stack. The interface is that of RNNSearch, with logits and the
output of the encoder batch-major, as Nematus has them. The arithmetic is float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rmsnorm.nematus import beam, sentences
from rmsnorm.nematus.beam import Translations
from rmsnorm.nematus.names import Use, transformer_table
from rmsnorm.nematus.numpy.output import cross_entropy, embed, log_softmax
from rmsnorm.nematus.numpy.parameters import Array, Parameters, Pullback, identity, normalize, project, rows

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

__all__ = ["Transformer"]

_GO = 1  # stands before the first word
_MASKED = -1e9


class Transformer:
    """Nematus's Transformer.

    Args:
        config: of the model.
        parameters: arrays by the names of Nematus, as ``rmsnorm.nematus.load`` gives them.

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

    def __init__(self, config: Config, parameters: Mapping[str, npt.ArrayLike]) -> None:
        self.config = config
        self.parameters = {name: np.asarray(value, np.float64) for name, value in parameters.items()}

    def encode(self, x: npt.ArrayLike, x_mask: npt.ArrayLike) -> Array:
        """What the decoder attends to: (batch, source length, state_size).

        Args:
            x: ids, (1, source length, batch).
            x_mask: 1 on words and on the end of sentence, 0 after it, (source length, batch).

        Raises:
            TypeError, ValueError: an array has another shape or dtype, or an id is not in the vocabulary.
        """
        ids, mask = sentences.source("encode", x, x_mask, self.config.source_vocab_sizes)
        return _encode(self._parameters(), self.config, ids[0].T, _bias(mask))[0]

    def logits(self, x: npt.ArrayLike, x_mask: npt.ArrayLike, y: npt.ArrayLike) -> Array:
        """Logits of every target word given those before it: (batch, target length, vocabulary).

        Args:
            x, x_mask: as for encode.
            y: ids, (target length, batch).

        Raises:
            TypeError, ValueError: as encode.
        """
        ids, mask = sentences.source("logits", x, x_mask, self.config.source_vocab_sizes)
        words, _ = sentences.target("logits", y, ids.shape[2], self.config.target_vocab_size)
        return _score(self._parameters(), self.config, ids[0].T, _bias(mask), words.T)[0]

    def loss(
        self,
        x: npt.ArrayLike,
        x_mask: npt.ArrayLike,
        y: npt.ArrayLike,
        y_mask: npt.ArrayLike,
        *,
        training: bool = False,
    ) -> Array:
        """Cross-entropy of each sentence, summed over its words: (batch,).

        Args:
            x, x_mask, y: as for logits.
            y_mask: as x_mask, (target length, batch).
            training: with the label smoothing of the config, less the least loss that is then possible.

        Raises:
            TypeError, ValueError: as encode.
        """
        return self._loss("loss", self._parameters(), x, x_mask, y, y_mask, training)[0]

    def gradients(
        self,
        x: npt.ArrayLike,
        x_mask: npt.ArrayLike,
        y: npt.ArrayLike,
        y_mask: npt.ArrayLike,
        *,
        training: bool = False,
    ) -> dict[str, Array]:
        """Gradient of the mean loss over the sentences with respect to every parameter, by name.

        Args, Raises: as for loss.
        """
        p = self._parameters()
        loss, pullback = self._loss("gradients", p, x, x_mask, y, y_mask, training)
        pullback(np.full_like(loss, 1 / len(loss)))
        return {name: p.gradients[name] for name in self.parameters}

    def translate(
        self,
        x: npt.ArrayLike,
        x_mask: npt.ArrayLike,
        beam_size: int = 12,
        max_length: int | None = None,
        *,
        normalization_alpha: float = 0.0,
    ) -> Translations:
        """The best translations that a beam search finds, with Nematus's rules and orders.

        Args:
            x, x_mask: as for encode.
            beam_size: 1 is greedy.
            max_length: Nematus's translation_maxlen, by default that of the config; it stops one word short.
            normalization_alpha: scores are divided by length^alpha.

        Returns:
            (sequences, scores), best first.

        Raises:
            TypeError, ValueError: as encode; also when beam_size or max_length is out of its domain.
        """
        p, config = self._parameters(), self.config
        max_length = config.translation_maxlen if max_length is None else max_length
        beam.check(beam_size, max_length)
        ids, mask = sentences.source("translate", x, x_mask, config.source_vocab_sizes)
        bias = _bias(mask)
        memory = _encode(p, config, ids[0].T, bias)[0]
        memory, bias = (np.repeat(each, beam_size, axis=0) for each in (memory, bias))
        size = config.state_size

        def step(states: list[Array], previous: Array | None) -> tuple[Array, list[Array]]:
            count, time, _ = states[0].shape
            previous = np.full(count, _GO) if previous is None else previous
            table, x = transformer_table(config, "decoder"), _positions(time + 1, size)[-1:]
            x = p[table][previous][:, None] * np.sqrt(size) + x
            new = []
            for layer in range(1, config.transformer_dec_depth + 1):
                q = p / f"transformer_model/decoder/layer_{layer}"
                attended, _ = _normed(q, "pre_self_attn_sublayer", x)
                kept = zip(states[2 * layer - 2 : 2 * layer], ("keys", "values"), strict=True)
                self_attention = q / "self_attn_sublayer"
                keys, values = (
                    np.concatenate((old, _dense(self_attention, name, attended)[0]), axis=1) for old, name in kept
                )
                new += [keys, values]
                mixed, _ = _mix(config, _dense(self_attention, "queries", attended)[0], keys, values, np.zeros(()))
                x = x + _dense(self_attention, "context", mixed)[0]
                x = _attention_block(q, config, "cross_attn", x, memory, bias)[0]
                x = _ffn_block(q, x, final=layer == config.transformer_dec_depth)[0]
            return log_softmax(x[:, 0] @ p[transformer_table(config, "softmax")].T), new

        states = [np.zeros((len(memory), 0, size))] * (2 * config.transformer_dec_depth)
        return beam.search(config.search, step, states, beam_size, max_length, normalization_alpha)

    def _parameters(self) -> Parameters:
        return Parameters(self.parameters, self.config.norm)

    def _loss(self, op: str, p: Parameters, x: Any, x_mask: Any, y: Any, y_mask: Any, training: bool) -> Any:
        config = self.config
        ids, mask = sentences.source(op, x, x_mask, config.source_vocab_sizes)
        words, words_mask = sentences.target(op, y, ids.shape[2], config.target_vocab_size, y_mask)
        logits, logits_pullback = _score(p, config, ids[0].T, _bias(mask), words.T)
        smoothing = config.label_smoothing if training else 0.0
        right, wrong = 1 - smoothing, smoothing / (config.target_vocab_size - 1)
        losses, loss_pullback = cross_entropy(logits, words.T, words_mask.T, right, wrong)
        least = -right * np.log(right) - smoothing * np.log(wrong + 1e-20) if smoothing else 0.0
        loss = losses.sum(axis=1) - least * words_mask.sum(axis=0)
        return loss, lambda dloss: logits_pullback(loss_pullback(dloss[:, None]))


def _bias(mask: Array) -> Array:
    """Added to the scores of attention, (batch, heads, queries, keys)."""
    return np.where(mask == 0, _MASKED, 0.0).T[:, None, None]


def _positions(length: int, size: int) -> Array:
    """sin(t w_i), then cos(t w_i): w from 1 to 1/10000, in equal ratios."""
    frequencies = np.exp(-np.arange(size // 2) * np.log(10000) / (size // 2 - 1))
    angles = np.arange(length)[:, None] * frequencies
    return np.concatenate((np.sin(angles), np.cos(angles)), axis=1)


def _embed(p: Parameters, config: Config, use: Use, ids: Array) -> tuple[Array, Callable[[Array], None]]:
    factor = np.sqrt(config.state_size)
    words, pullback = embed(p, transformer_table(config, use), ids)
    return words * factor + _positions(ids.shape[1], config.state_size), lambda dx: pullback(dx * factor)


def _encode(p: Parameters, config: Config, x: Array, bias: Array) -> tuple[Array, Callable[[Array], None]]:
    h, embed_pullback = _embed(p, config, "encoder", x)
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


def _score(p: Parameters, config: Config, x: Array, bias: Array, y: Array) -> tuple[Array, Callable[[Array], None]]:
    memory, encode_pullback = _encode(p, config, x, bias)
    before = np.concatenate((np.full((len(y), 1), _GO), y[:, :-1]), axis=1)
    h, embed_pullback = _embed(p, config, "decoder", before)
    future = np.triu(np.full((y.shape[1], y.shape[1]), _MASKED), k=1)
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
            dh, more = cross_pullback(ffn_pullback(dh))
            dmemory += more
            dh, _ = self_pullback(dh)
        embed_pullback(dh)
        encode_pullback(dmemory)

    return h @ p[table].T, pullback


def _normed(p: Parameters, name: str, x: Array) -> tuple[Array, Pullback]:
    scope = f"{name}/{'layer_norm' if p.norm == 'layer' else 'rms_norm'}"
    return normalize(p, x, f"{scope}/scale", f"{scope}/offset")


def _dense(p: Parameters, name: str, x: Array) -> tuple[Array, Pullback]:
    return project(p, x, f"{name}_projection/dense_layer_weights", None, None)


def _attention_block(
    p: Parameters, config: Config, name: str, x: Array, memory: Array | None, bias: Array
) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    """x + attention(norm(x)), to itself or to a memory; the pullback gives the gradients of x and of the memory."""
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

    def split(a: Array) -> Array:
        return a.reshape(*a.shape[:2], heads, -1).swapaxes(1, 2)

    def merge(a: Array) -> Array:
        return a.swapaxes(1, 2).reshape(len(a), a.shape[2], -1)

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
    """x + relu(norm(x) W1 + b1) W2 + b2; normalized once more where the stack ends."""
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
