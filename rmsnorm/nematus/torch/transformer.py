"""Nematus's Transformer as a PyTorch module: scores, losses and translations.

Pre-norm, sinusoids, one norm more at the end of each stack. The interface is that of RNNSearch, with logits and the
output of the encoder batch-major, as Nematus has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from rmsnorm.nematus import beam
from rmsnorm.nematus.beam import Translations
from rmsnorm.nematus.names import Use, transformer_table
from rmsnorm.nematus.torch import sentences
from rmsnorm.nematus.torch.output import cross_entropy, log_softmax
from rmsnorm.nematus.torch.parameters import Named, Parameters, normalize, project

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

__all__ = ["Transformer"]

_GO: Final = 1  # stands before the first word
_MASKED: Final = -1e9


class Transformer(Named):
    """Nematus's Transformer.

    It starts in evaluation mode; in training mode it drops out what Nematus does, at the rates of the config, and
    smooths labels.

    Args:
        config: of the model.
        parameters: arrays or tensors by the names of Nematus, as ``rmsnorm.nematus.load`` gives them, whose
            dtype and device the model has. The state dict has these names with dots for slashes.

    Example:
        >>> from rmsnorm.nematus.config import Config
        >>> from rmsnorm.nematus.names import variables
        >>> sizes = {"embedding_size": 4, "state_size": 4, "source_vocab_sizes": (4,), "target_vocab_size": 3}
        >>> config = Config(**sizes, model_type="transformer", norm="rms", transformer_num_heads=2)
        >>> model = Transformer(config, {row.name: torch.zeros(row.shape) for row in variables(config)})
        >>> x, y = torch.tensor([[[3], [2], [0]]]), torch.tensor([[1], [0]])
        >>> model.loss(x, torch.ones(3, 1), y, torch.ones(2, 1)).detach()  # 2 log 3
        tensor([2.1972])
    """

    def __init__(self, config: Config, parameters: Mapping[str, Any]) -> None:
        super().__init__(parameters)
        self.config = config
        self._without_dropout = config.replace(**{name: 0.0 for name in vars(config) if "_drop" in name})
        self.eval()

    def encode(self, x: Any, x_mask: Any) -> Tensor:
        """What the decoder attends to: (batch, source length, state_size).

        Args:
            x: ids, (1, source length, batch).
            x_mask: 1 on words and on the end of sentence, 0 after it, (source length, batch).

        Raises:
            TypeError, ValueError: an array has another shape or dtype, or an id is not in the vocabulary; ids and masks
                are looked at where no compiler or tracer is at work.
        """
        return self._encode("encode", x, x_mask)[2]

    def logits(self, x: Any, x_mask: Any, y: Any) -> Tensor:
        """Logits of every target word given those before it: (batch, target length, vocabulary).

        Args:
            x, x_mask: as for encode.
            y: ids, (target length, batch).

        Raises:
            TypeError, ValueError: as encode.
        """
        return self._score("logits", x, x_mask, y, None)[0]

    def loss(self, x: Any, x_mask: Any, y: Any, y_mask: Any) -> Tensor:
        """Cross-entropy of each sentence, summed over its words: (batch,).

        In training mode with the label smoothing of the config, less the least loss that is then possible.

        Args:
            x, x_mask, y: as for logits.
            y_mask: as x_mask, (target length, batch).

        Raises:
            TypeError, ValueError: as encode.
        """
        logits, words, mask = self._score("loss", x, x_mask, y, y_mask)
        smoothing = self.config.label_smoothing if self.training else 0.0
        right, wrong = 1 - smoothing, smoothing / (self.config.target_vocab_size - 1)
        least = -right * math.log(right) - smoothing * math.log(wrong + 1e-20) if smoothing else 0.0
        return (cross_entropy(logits, words, mask, right, wrong) - least * mask).sum(1)

    def forward(self, x: Any, x_mask: Any, y: Any, y_mask: Any) -> Tensor:
        """The loss, for what wraps a module to train it."""
        return self.loss(x, x_mask, y, y_mask)

    @torch.no_grad()
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
        config = self._without_dropout
        max_length = config.translation_maxlen if max_length is None else max_length
        beam.check(beam_size, max_length)
        p, bias, encoded = self._encode("translate", x, x_mask, config)
        memory = _memory(p, config, encoded.repeat_interleave(beam_size, dim=0))
        bias = bias.repeat_interleave(beam_size, dim=0)

        def step(states: list[Tensor], previous: Any) -> tuple[Any, list[Tensor]]:
            words = torch.full((len(bias), 1), _GO, device=bias.device)
            if previous is not None:
                words = torch.as_tensor(previous, device=bias.device)[:, None]
            logits, states = _decode(p, config, words, memory, bias, states)
            return log_softmax(logits[:, 0]).cpu().numpy(), states

        return beam.search(config.search, step, _no_words(config, bias), beam_size, max_length, normalization_alpha)

    def _encode(self, op: str, x: Any, x_mask: Any, config: Config | None = None) -> tuple[Parameters, Tensor, Tensor]:
        """The parameters, what is added to the scores of attention to the source, and what the encoder makes of it."""
        config = config or self._config()
        p = Parameters(self.by_name(), config.norm)
        ids, mask = sentences.source(op, x, x_mask, config.source_vocab_sizes, p[transformer_table(config, "encoder")])
        bias = (_MASKED * (mask == 0).to(mask)).T[:, None, None]
        h = _embed(p, config, "encoder", ids[0].T)
        for layer in range(1, config.transformer_enc_depth + 1):
            q = p / f"transformer_model/encoder/layer_{layer}"
            h, _ = _self_attention(q, config, h, bias)
            h = _ffn_block(q, config, h, final=layer == config.transformer_enc_depth)
        return p, bias, h

    def _config(self) -> Config:
        return self.config if self.training else self._without_dropout

    def _score(self, op: str, x: Any, x_mask: Any, y: Any, y_mask: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the given words, these words and their mask, batch-major."""
        config = self._config()
        p, bias, encoded = self._encode(op, x, x_mask)
        y, y_mask = sentences.target(op, y, len(encoded), config.target_vocab_size, bias, y_mask)
        before = functional.pad(y[:-1], (0, 0, 1, 0), value=_GO).T
        logits, _ = _decode(p, config, before, _memory(p, config, encoded), bias, _no_words(config, bias))
        return logits, y.T, y_mask.T


def _no_words(config: Config, bias: Tensor) -> list[Tensor]:
    """Keys and values of every layer of the decoder, before the first word."""
    return [bias.new_zeros(len(bias), 0, config.state_size)] * (2 * config.transformer_dec_depth)


def _embed(p: Parameters, config: Config, use: Use, ids: Tensor, start: int = 0) -> Tensor:
    """Words and their places, from ``start`` on: sin(t w_i), then cos(t w_i); w from 1 to 1/10000, in equal ratios."""
    words = functional.embedding(ids, p[transformer_table(config, use)])
    half = config.state_size // 2
    frequencies = torch.exp(-torch.arange(half, dtype=torch.float64) * (math.log(10000) / (half - 1)))
    angles = torch.arange(start, start + ids.shape[1])[:, None] * frequencies
    positions = torch.cat((angles.sin(), angles.cos()), dim=1).to(words)
    return functional.dropout(words * math.sqrt(config.state_size) + positions, config.transformer_dropout_embeddings)


def _memory(p: Parameters, config: Config, encoded: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of the source for every layer of the decoder."""
    layers = (p / f"transformer_model/decoder/layer_{i}" for i in range(1, config.transformer_dec_depth + 1))
    return [_keys_and_values(q, "cross_attn", encoded) for q in layers]


def _decode(
    p: Parameters, config: Config, words: Tensor, memory: list[tuple[Tensor, Tensor]], bias: Tensor, past: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Logits after any number of words, and keys and values up to them.

    past: keys and values of every layer for the words before these.
    """
    start, count = past[0].shape[1], words.shape[1]
    h = _embed(p, config, "decoder", words, start)
    future = h.new_full((count, start + count), _MASKED).triu(start + 1)
    new: list[Tensor] = []
    for layer, of_source in enumerate(memory, start=1):
        q = p / f"transformer_model/decoder/layer_{layer}"
        h, own = _self_attention(q, config, h, future, past[2 * layer - 2 : 2 * layer])
        new += own
        h = _attention_block(q, config, "cross_attn", h, _normed(q, "pre_cross_attn_sublayer", h), of_source, bias)
        h = _ffn_block(q, config, h, final=layer == config.transformer_dec_depth)
    return functional.linear(h, p[transformer_table(config, "softmax")]), new


def _normed(p: Parameters, name: str, x: Tensor) -> Tensor:
    scope = f"{name}/{'layer_norm' if p.norm == 'layer' else 'rms_norm'}"
    return normalize(p, x, f"{scope}/scale", f"{scope}/offset")


def _dense(p: Parameters, name: str, x: Tensor) -> Tensor:
    return project(p, x, f"{name}_projection/dense_layer_weights", None, None)


def _keys_and_values(p: Parameters, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    q = p / f"{name}_sublayer"
    return _dense(q, "keys", x), _dense(q, "values", x)


def _self_attention(
    p: Parameters, config: Config, x: Tensor, bias: Tensor, past: list[Tensor] | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """x + attention(norm(x)) to itself, and to keys and values of what stands before; all keys and values."""
    normed = _normed(p, "pre_self_attn_sublayer", x)
    keys, values = _keys_and_values(p, "self_attn", normed)
    if past is not None:
        keys, values = torch.cat((past[0], keys), dim=1), torch.cat((past[1], values), dim=1)
    return _attention_block(p, config, "self_attn", x, normed, (keys, values), bias), (keys, values)


def _attention_block(
    p: Parameters, config: Config, name: str, x: Tensor, normed: Tensor, attended: tuple[Tensor, Tensor], bias: Tensor
) -> Tensor:
    """x + softmax(q k^T / sqrt(d) + bias) v W, in every head, of keys and values."""
    q = p / f"{name}_sublayer"
    queries, keys, values = (
        each.unflatten(-1, (config.transformer_num_heads, -1)).transpose(1, 2)
        for each in (_dense(q, "queries", normed), *attended)
    )
    mixed = functional.scaled_dot_product_attention(queries, keys, values, bias, config.transformer_dropout_attn)
    mixed = mixed * functional.dropout(torch.ones_like(mixed[..., :1, :1]), config.transformer_drophead)
    y = _dense(q, "context", mixed.transpose(1, 2).flatten(-2))
    return x + functional.dropout(y, config.transformer_dropout_residual)


def _ffn_block(p: Parameters, config: Config, x: Tensor, *, final: bool) -> Tensor:
    """x + relu(norm(x) W1 + b1) W2 + b2; normalized once more where the stack ends."""
    # Nematus drops what comes into the first layer, whatever the name of the rate says.
    normed = functional.dropout(_normed(p, "pre_ffn_sublayer", x), config.transformer_dropout_relu)
    hidden = project(p / "ff_layer_1", normed, "dense_layer_weights", "dense_layer_biases", None).relu()
    out = project(p / "ff_layer_2", hidden, "dense_layer_weights", "dense_layer_biases", None)
    y = x + functional.dropout(out, config.transformer_dropout_residual)
    return _normed(p, "final_transform", y) if final else y
