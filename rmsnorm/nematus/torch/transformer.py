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
from rmsnorm.nematus.torch import sentences
from rmsnorm.nematus.torch.output import cross_entropy, log_softmax
from rmsnorm.nematus.torch.parameters import Named, Parameters, normalise, project
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

Memory: TypeAlias = list[tuple[Tensor, Tensor]]

_GO: Final = 1  # the id that precedes the first word
_NOTHING: Final = -1  # precedes it in zero, as a vector of zeros


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
        ids, mask = sentences.source("encode", x, x_mask, config, table)
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
        beam_size: int | None = None,
        max_length: int | None = None,
        *,
        normalization_alpha: float | None = None,
    ) -> Translations:
        """See protocol.Transformer.translate."""
        p, config = self._tensors(), self._without_dropout
        table = p[transformer_table(config, "encoder")]
        ids, mask = sentences.source("translate", x, x_mask, config, table)
        plan = beam.plan(config, (mask != 0).sum(0).tolist(), beam_size, max_length, normalization_alpha)
        memory, bias, past = _begin(p, config, ids, mask, plan.beam_size)

        def step(states: list[Tensor], previous: Any) -> tuple[Any, list[Tensor]]:
            words = _before_first(config, bias)
            if not beam.is_first(config, previous):
                words = torch.as_tensor(previous, device=bias.device)[:, None]
            log_p, states = _step(p, config, words, memory, bias, states)
            return log_p.cpu().numpy(), states

        return beam.search(plan, step, past)

    def _tensors(self) -> Parameters:
        """The parameters. (torch.nn.Module has an attribute ``_parameters``.)"""
        return Parameters(self.by_name(), self.config.norm, eps=self.config.eps)

    def _config(self) -> Config:
        """The config; outside of training with dropout rates of 0."""
        return self.config if self.training else self._without_dropout

    def _sentences(
        self, op: str, p: Parameters, x: Any, x_mask: Any, y: Any, y_mask: Any = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ids and masks of the source and of the target."""
        config = self.config
        table = p[transformer_table(config, "encoder")]
        ids, mask = sentences.source(op, x, x_mask, config, table)
        return ids, mask, *sentences.target(op, y, ids.shape[2], config, table, y_mask)


def _encode(p: Parameters, config: Config, x: Tensor, mask: Tensor) -> Tensor:
    return _encoder_stack(p, config, x, _padding(config, mask))


def _score(p: Parameters, config: Config, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """Logits of the target words."""
    bias = _padding(config, mask)
    memory = _memory(p, config, _encoder_stack(p, config, x, bias))
    before = torch.cat((_before_first(config, y.T), y[:-1].T), dim=1)
    return _decode(p, config, before, memory, bias, _no_words(config, bias))[0]


def _loss(
    p: Parameters, config: Config, x: Tensor, mask: Tensor, y: Tensor, y_mask: Tensor, smoothing: float
) -> Tensor:
    right, wrong, smallest = smoothed(smoothing, config.target_vocab_size)
    losses = cross_entropy(_score(p, config, x, mask, y), y.T, y_mask.T, right, wrong)
    loss = (losses - smallest * y_mask.T).sum(1)
    return loss / y_mask.sum(0) if config.dialect == "zero" else loss


def _begin(
    p: Parameters, config: Config, x: Tensor, mask: Tensor, beam_size: int
) -> tuple[Memory, Tensor, list[Tensor]]:
    """What a search needs before the first word, with beam_size rows for every sentence: memory, bias and states."""
    bias = _padding(config, mask)
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


def _padding(config: Config, mask: Tensor) -> Tensor:
    """What is added to the scores of attention to the source, (batch, heads, queries, keys)."""
    return (config.masked_score * (mask == 0).to(mask)).T[:, None, None]


def _no_words(config: Config, bias: Tensor) -> list[Tensor]:
    """Keys and values of every layer of the decoder before the first word: none."""
    return [bias.new_zeros(len(bias), 0, config.state_size)] * (2 * config.transformer_dec_depth)


def _before_first(config: Config, like: Tensor) -> Tensor:
    """What precedes the first word, one id for each row of ``like``."""
    return torch.full((len(like), 1), _NOTHING if config.dialect == "zero" else _GO, device=like.device)


def _positions(start: int, length: int, size: int) -> Tensor:
    """sin(t w_i), then cos(t w_i), t from ``start`` on: w from 1 to 1/10000, in equal ratios; zeros if size is odd."""
    half = size // 2
    frequencies = torch.exp(-torch.arange(half, dtype=torch.float64) * (math.log(10000) / (half - 1)))
    angles = torch.arange(start, start + length)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos(), angles.new_zeros(length, size % 2)), dim=1)


def _embed(p: Parameters, config: Config, use: Use, ids: Tensor, start: int = 0) -> Tensor:
    """Embeddings of words and positions, of which the first is ``start``."""
    words = functional.embedding(ids.clamp(min=0), p[transformer_table(config, use)]) * math.sqrt(config.state_size)
    if config.dialect == "zero":
        words = (words + p[ZERO_BIAS]) * (ids != _NOTHING)[..., None]
    positions = _positions(start, ids.shape[1], config.state_size).to(words)
    return functional.dropout(words + positions, config.transformer_dropout_embeddings)


def _encoder_stack(p: Parameters, config: Config, x: Tensor, bias: Tensor) -> Tensor:
    h = _embed(p, config, "encoder", x[0].T)
    for number in range(1, config.transformer_enc_depth + 1):
        q = p / transformer_layer(config, "encoder", number)
        h, _ = _self_attention(q, config, h, bias)
        h = _ffn_block(q, config, h, last=number == config.transformer_enc_depth)
    return h


def _memory(p: Parameters, config: Config, encoded: Tensor) -> Memory:
    """Keys and values of the source for every layer of the decoder."""
    layers = [p / transformer_layer(config, "decoder", i) for i in range(1, config.transformer_dec_depth + 1)]
    maps = [[_map(q, config, "cross_attn", part, encoded) for part in ("keys", "values")] for q in layers]
    return [(keys, values) for keys, values in maps]


def _decode(
    p: Parameters, config: Config, words: Tensor, memory: Memory, bias: Tensor, past: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Logits after any number of words, and the keys and values up to them.

    past: keys and values of every layer for the words before these.
    """
    start, count = past[0].shape[1], words.shape[1]
    h = _embed(p, config, "decoder", words, start)
    future = h.new_full((count, start + count), config.masked_score).triu(start + 1)
    new: list[Tensor] = []
    for number, of_source in enumerate(memory, start=1):
        q = p / transformer_layer(config, "decoder", number)
        h, own = _self_attention(q, config, h, future, past[2 * number - 2 : 2 * number])
        new += own
        queries = _map(q, config, "cross_attn", "queries", _before(q, config, "cross_attn", h))
        h = _attention_block(q, config, "cross_attn", h, queries, of_source, bias)
        h = _ffn_block(q, config, h, last=number == config.transformer_dec_depth)
    return functional.linear(h, p[transformer_table(config, "softmax")]), new


def _normed(p: Parameters, config: Config, block: Block, x: Tensor) -> Tensor:
    return normalise(p, x, *transformer_norm(config, block))


def _before(p: Parameters, config: Config, block: Block, x: Tensor) -> Tensor:
    """What a block reads: norm(x), in zero x."""
    return x if config.dialect == "zero" else _normed(p, config, block, x)


def _after(p: Parameters, config: Config, block: Block, x: Tensor, y: Tensor) -> Tensor:
    """x + y, in zero norm(x + y)."""
    y = x + functional.dropout(y, config.transformer_dropout_residual)
    return _normed(p, config, block, y) if config.dialect == "zero" else y


def _map(p: Parameters, config: Config, block: Block, part: str, x: Tensor) -> Tensor:
    weight, bias = transformer_map(config, block, part)
    return project(p, x, weight, bias, None)


def _projections(p: Parameters, config: Config, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of attention to itself."""
    if config.dialect == "zero":
        queries, keys, values = _map(p, config, "self_attn", "qkv", x).chunk(3, -1)
    else:
        queries, keys, values = (_map(p, config, "self_attn", part, x) for part in ("queries", "keys", "values"))
    return queries, keys, values


def _self_attention(
    p: Parameters, config: Config, x: Tensor, bias: Tensor, past: list[Tensor] | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """x + attention(norm(x)) to itself and to the past keys and values; and all keys and values."""
    queries, keys, values = _projections(p, config, _before(p, config, "self_attn", x))
    if past is not None:
        keys, values = torch.cat((past[0], keys), dim=1), torch.cat((past[1], values), dim=1)
    return _attention_block(p, config, "self_attn", x, queries, (keys, values), bias), (keys, values)


def _attention_block(
    p: Parameters,
    config: Config,
    block: Block,
    x: Tensor,
    queries: Tensor,
    attended: tuple[Tensor, Tensor],
    bias: Tensor,
) -> Tensor:
    """x + softmax(q k^T / sqrt(d) + bias) v W in every head; in ReLA relu(q k^T / sqrt(d)) where bias is 0."""

    def heads(tensor: Tensor) -> Tensor:
        return tensor.unflatten(-1, (config.transformer_num_heads, -1)).transpose(1, 2)

    q, k, v = heads(queries), heads(attended[0]), heads(attended[1])
    if config.relu_attention:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) * (bias == 0)
        mixed = functional.dropout(scores.relu(), config.transformer_dropout_attn) @ v
    else:
        k = k - k.mean(-2, keepdim=True)  # softmax does not see it; in gradients it would have to cancel exactly
        mixed = functional.scaled_dot_product_attention(q, k, v, bias, config.transformer_dropout_attn)
    mixed = mixed * functional.dropout(torch.ones_like(mixed[..., :1, :1]), config.transformer_drophead)
    joined = mixed.transpose(1, 2).flatten(-2)
    if config.relu_attention:
        joined = _gated(p, block, joined)
    return _after(p, config, block, x, _map(p, config, block, "context", joined))


def _gated(p: Parameters, block: Block, x: Tensor) -> Tensor:
    """zero's gated RMSNorm: rms_norm(x) sigmoid(gate x)."""
    gain, gate = transformer_gate(block)
    return normalise(p, x, gain, None, "rms") * (p[gate] * x).sigmoid()


def _ffn_block(p: Parameters, config: Config, x: Tensor, *, last: bool) -> Tensor:
    """x + relu(norm(x) W1 + b1) W2 + b2; in Nematus normalised once more at the end of the stack."""
    is_zero = config.dialect == "zero"
    x_in = _before(p, config, "ffn", x)
    if not is_zero:  # Nematus applies this dropout to the input of the first layer, in spite of its name.
        x_in = functional.dropout(x_in, config.transformer_dropout_relu)
    hidden = _map(p, config, "ffn", "in", x_in).relu()
    if is_zero:
        hidden = functional.dropout(hidden, config.transformer_dropout_relu)
    y = _after(p, config, "ffn", x, _map(p, config, "ffn", "out", hidden))
    return _normed(p, config, "final", y) if last and not is_zero else y
