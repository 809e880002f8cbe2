"""Nematus's Transformer as a PyTorch module: scores, losses and translations.

Logits and the output of the encoder are batch-major, as in Nematus.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from rmsnorm.nematus import beam
from rmsnorm.nematus.beam import Translations
from rmsnorm.nematus.names import Use, transformer_table
from rmsnorm.nematus.torch import sentences
from rmsnorm.nematus.torch.output import cross_entropy, log_softmax
from rmsnorm.nematus.torch.parameters import Named, Parameters, normalise, project

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

__all__ = ["Transformer"]

Memory: TypeAlias = list[tuple[Tensor, Tensor]]

_GO: Final = 1  # the id that precedes the first word
_MASKED: Final = -1e9


class Transformer(Named):
    """Nematus's Transformer: see rmsnorm.nematus.protocol.Transformer.

    A new model is in evaluation mode. Its state dict has Nematus's names with dots for slashes.

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
        """See protocol.Transformer.encode."""
        p, config = self._tensors(), self._config()
        table = p[transformer_table(config, "encoder")]
        ids, mask = sentences.source("encode", x, x_mask, config.source_vocab_sizes, table)
        return _encode(p, config, ids, mask)

    def logits(self, x: Any, x_mask: Any, y: Any) -> Tensor:
        """See protocol.Transformer.logits."""
        p, config = self._tensors(), self._config()
        ids, mask, words, _ = self._sentences("logits", p, x, x_mask, y)
        return _score(p, config, ids, mask, words)

    def loss(self, x: Any, x_mask: Any, y: Any, y_mask: Any) -> Tensor:
        """See protocol.Transformer.loss."""
        p, config = self._tensors(), self._config()
        smoothing = config.label_smoothing if self.training else 0.0
        return _loss(p, config, *self._sentences("loss", p, x, x_mask, y, y_mask), smoothing)

    def forward(self, x: Any, x_mask: Any, y: Any, y_mask: Any) -> Tensor:
        """The loss, for wrappers that train a module."""
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
        """See protocol.Transformer.translate."""
        p, config = self._tensors(), self._without_dropout
        max_length = config.translation_maxlen if max_length is None else max_length
        beam.check(beam_size, max_length)
        table = p[transformer_table(config, "encoder")]
        ids, mask = sentences.source("translate", x, x_mask, config.source_vocab_sizes, table)
        memory, bias, past = _begin(p, config, ids, mask, beam_size)

        def step(states: list[Tensor], previous: Any) -> tuple[Any, list[Tensor]]:
            words = torch.full((len(bias), 1), _GO, device=bias.device)
            if previous is not None:
                words = torch.as_tensor(previous, device=bias.device)[:, None]
            log_p, states = _step(p, config, words, memory, bias, states)
            return log_p.cpu().numpy(), states

        return beam.search(config.search, step, past, beam_size, max_length, normalization_alpha)

    def _tensors(self) -> Parameters:
        """The parameters. (torch.nn.Module has an attribute ``_parameters``.)"""
        return Parameters(self.by_name(), self.config.norm)

    def _config(self) -> Config:
        """The config; outside of training with dropout rates of 0."""
        return self.config if self.training else self._without_dropout

    def _sentences(
        self, op: str, p: Parameters, x: Any, x_mask: Any, y: Any, y_mask: Any = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ids and masks of the source and of the target."""
        config = self.config
        table = p[transformer_table(config, "encoder")]
        ids, mask = sentences.source(op, x, x_mask, config.source_vocab_sizes, table)
        return ids, mask, *sentences.target(op, y, ids.shape[2], config.target_vocab_size, table, y_mask)


def _encode(p: Parameters, config: Config, x: Tensor, mask: Tensor) -> Tensor:
    return _encoder_stack(p, config, x, _padding(mask))


def _score(p: Parameters, config: Config, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """Logits of the target words."""
    bias = _padding(mask)
    memory = _memory(p, config, _encoder_stack(p, config, x, bias))
    before = functional.pad(y[:-1], (0, 0, 1, 0), value=_GO).T
    return _decode(p, config, before, memory, bias, _no_words(config, bias))[0]


def _loss(
    p: Parameters, config: Config, x: Tensor, mask: Tensor, y: Tensor, y_mask: Tensor, smoothing: float
) -> Tensor:
    right, wrong = 1 - smoothing, smoothing / (config.target_vocab_size - 1)
    smallest = -right * math.log(right) - smoothing * math.log(wrong + 1e-20) if smoothing else 0.0
    losses = cross_entropy(_score(p, config, x, mask, y), y.T, y_mask.T, right, wrong)
    return (losses - smallest * y_mask.T).sum(1)


def _begin(
    p: Parameters, config: Config, x: Tensor, mask: Tensor, beam_size: int
) -> tuple[Memory, Tensor, list[Tensor]]:
    """What a search needs before the first word, with beam_size rows for every sentence: memory, bias and states."""
    bias = _padding(mask)
    encoded = _encoder_stack(p, config, x, bias)
    memory = _memory(p, config, encoded.repeat_interleave(beam_size, dim=0))
    bias = bias.repeat_interleave(beam_size, dim=0)
    return memory, bias, _no_words(config, bias)


def _step(
    p: Parameters, config: Config, words: Tensor, memory: Memory, bias: Tensor, past: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities of the word after the given ones, and the keys and values so far."""
    logits, past = _decode(p, config, words, memory, bias, past)
    return log_softmax(logits[:, 0]), past


def _padding(mask: Tensor) -> Tensor:
    """What is added to the scores of attention to the source, (batch, heads, queries, keys)."""
    return (_MASKED * (mask == 0).to(mask)).T[:, None, None]


def _no_words(config: Config, bias: Tensor) -> list[Tensor]:
    """Keys and values of every layer of the decoder before the first word: none."""
    return [bias.new_zeros(len(bias), 0, config.state_size)] * (2 * config.transformer_dec_depth)


def _positions(start: int, length: int, size: int) -> Tensor:
    """sin(t w_i), then cos(t w_i), t from ``start`` on: w from 1 to 1/10000, in equal ratios."""
    half = size // 2
    frequencies = torch.exp(-torch.arange(half, dtype=torch.float64) * (math.log(10000) / (half - 1)))
    angles = torch.arange(start, start + length)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def _embed(p: Parameters, config: Config, use: Use, ids: Tensor, start: int = 0) -> Tensor:
    """Embeddings of words and positions, of which the first is ``start``."""
    words = functional.embedding(ids, p[transformer_table(config, use)])
    positions = _positions(start, ids.shape[1], config.state_size).to(words)
    return functional.dropout(words * math.sqrt(config.state_size) + positions, config.transformer_dropout_embeddings)


def _encoder_stack(p: Parameters, config: Config, x: Tensor, bias: Tensor) -> Tensor:
    h = _embed(p, config, "encoder", x[0].T)
    for layer in range(1, config.transformer_enc_depth + 1):
        q = p / f"transformer_model/encoder/layer_{layer}"
        h, _ = _self_attention(q, config, h, bias)
        h = _ffn_block(q, config, h, final=layer == config.transformer_enc_depth)
    return h


def _memory(p: Parameters, config: Config, encoded: Tensor) -> Memory:
    """Keys and values of the source for every layer of the decoder."""
    layers = (p / f"transformer_model/decoder/layer_{i}" for i in range(1, config.transformer_dec_depth + 1))
    return [_keys_and_values(q, "cross_attn", encoded) for q in layers]


def _decode(
    p: Parameters, config: Config, words: Tensor, memory: Memory, bias: Tensor, past: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Logits after any number of words, and the keys and values up to them.

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
        normed = _normed(q, "pre_cross_attn_sublayer", h)
        h = _attention_block(q, config, "cross_attn", h, normed, of_source, bias)
        h = _ffn_block(q, config, h, final=layer == config.transformer_dec_depth)
    return functional.linear(h, p[transformer_table(config, "softmax")]), new


def _normed(p: Parameters, name: str, x: Tensor) -> Tensor:
    scope = f"{name}/{'layer_norm' if p.norm == 'layer' else 'rms_norm'}"
    return normalise(p, x, f"{scope}/scale", f"{scope}/offset")


def _dense(p: Parameters, name: str, x: Tensor) -> Tensor:
    return project(p, x, f"{name}_projection/dense_layer_weights", None, None)


def _keys_and_values(p: Parameters, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    q = p / f"{name}_sublayer"
    return _dense(q, "keys", x), _dense(q, "values", x)


def _self_attention(
    p: Parameters, config: Config, x: Tensor, bias: Tensor, past: list[Tensor] | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """x + attention(norm(x)) to itself and to the past keys and values; and all keys and values."""
    normed = _normed(p, "pre_self_attn_sublayer", x)
    keys, values = _keys_and_values(p, "self_attn", normed)
    if past is not None:
        keys, values = torch.cat((past[0], keys), dim=1), torch.cat((past[1], values), dim=1)
    return _attention_block(p, config, "self_attn", x, normed, (keys, values), bias), (keys, values)


def _attention_block(
    p: Parameters, config: Config, name: str, x: Tensor, normed: Tensor, attended: tuple[Tensor, Tensor], bias: Tensor
) -> Tensor:
    """x + softmax(q k^T / sqrt(d) + bias) v W in every head; attended: keys and values."""
    q = p / f"{name}_sublayer"

    def heads(tensor: Tensor) -> Tensor:
        return tensor.unflatten(-1, (config.transformer_num_heads, -1)).transpose(1, 2)

    queries, keys, values = heads(_dense(q, "queries", normed)), heads(attended[0]), heads(attended[1])
    mixed = functional.scaled_dot_product_attention(queries, keys, values, bias, config.transformer_dropout_attn)
    mixed = mixed * functional.dropout(torch.ones_like(mixed[..., :1, :1]), config.transformer_drophead)
    y = _dense(q, "context", mixed.transpose(1, 2).flatten(-2))
    return x + functional.dropout(y, config.transformer_dropout_residual)


def _ffn_block(p: Parameters, config: Config, x: Tensor, *, final: bool) -> Tensor:
    """x + relu(norm(x) W1 + b1) W2 + b2; normalised once more at the end of the stack."""
    # Nematus applies this dropout to the input of the first layer, in spite of its name.
    normed = functional.dropout(_normed(p, "pre_ffn_sublayer", x), config.transformer_dropout_relu)
    hidden = project(p / "ff_layer_1", normed, "dense_layer_weights", "dense_layer_biases", None).relu()
    out = project(p / "ff_layer_2", hidden, "dense_layer_weights", "dense_layer_biases", None)
    y = x + functional.dropout(out, config.transformer_dropout_residual)
    return _normed(p, "final_transform", y) if final else y
