"""What zero's RNNSearch does in its own way, in PyTorch: another cell, attention and loss.

Sequences are time-major: words (length, batch, features), masks (length, batch).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from rmsnorm.nematus.torch.output import softmax
from rmsnorm.nematus.torch.parameters import Parameters, project
from rmsnorm.nematus.transformer_names import ZERO_BIAS, Use, transformer_table

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

Memory = tuple[Tensor, Tensor, Tensor, Tensor]


def score(p: Parameters, config: Config, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """Logits of the target words. After the end of a sentence the states stay."""
    memory, initial = attend_to(p, config, x, mask)
    words = functional.pad(_embed(p, config, "decoder", y[:-1]), (0, 0, 0, 0, 1, 0))  # zeros precede the first word
    return decode(p, config, memory, [initial], _drop(p, config, words), (y != 0).to(words))[0]


def attend_to(p: Parameters, config: Config, x: Tensor, mask: Tensor) -> tuple[Memory, Tensor]:
    """What the decoder reads of the source, as the fields of _Memory, and the initial state of the decoder."""
    embeddings = _embed(p, config, "encoder", x[0])
    words = _drop(p, config, embeddings)
    forward = _level(p / "encoder/forward", config, words, mask)
    backward = _level(p / "encoder/backward", config, words.flip(0), mask.flip(0)).flip(0)
    context = torch.cat((forward, backward), dim=-1)
    initial = _linear(p / "decoder_initializer/gru_init", [torch.cat((forward[-1], backward[0]), dim=-1)]).tanh()
    return (context, _linear(p / "decoder/context_att", [context]), embeddings, mask), initial


def decode(
    p: Parameters, config: Config, memory: Memory, states: list[Tensor], words: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Logits of any number of steps, given the embeddings of the words before them, and the last state."""
    decoder, h = p / "decoder", states[0]
    masks = words.new_ones(*words.shape[:2], 1) if mask is None else mask[..., None]
    gates, proposals = _fetch(decoder / "fetch_state_gru_lower", words)
    steps = []
    for *from_word, m in zip(gates.unbind(), proposals.unbind(), masks.unbind(), strict=True):
        h, attended = _step(decoder, config, memory, h, (from_word[0], from_word[1]), m)
        steps.append((h, attended))
    top, contexts = (torch.stack(tensors) for tensors in zip(*steps, strict=True))
    feature = _drop(p, config, _linear(p / "pre_logits", [top, contexts, words]).tanh())
    return functional.linear(feature, p[transformer_table(config, "softmax")]), [h]


def _step(
    p: Parameters, config: Config, memory: Memory, h: Tensor, from_word: tuple[Tensor, Tensor], m: Tensor
) -> tuple[Tensor, Tensor]:
    """One step of the decoder: the new state and the attended context."""
    s = _cell(p / "cell_gru_lower", h, from_word, m)
    attended = _attend(p / "attention", config, s, memory)
    return _cell(p / "cell_gru_higher", s, _fetch(p / "fetch_state_gru_higher", attended), m), attended


def _attend(p: Parameters, config: Config, s: Tensor, memory: Memory) -> Tensor:
    """sum_t w_t context_t, w = softmax over the words of v tanh(hidden_t + norm(s W) + b), padding masked."""
    context, of_context, _, mask = memory
    hidden = (of_context + _linear(p / "feed_query", [s])).tanh()
    feed = p / "feed_logits"
    scores = (hidden @ feed["W_0_0"])[..., 0] + feed["b_0"] + (1 - mask) * config.masked_score
    return (context * softmax(scores, axis=0)[..., None]).sum(0)


def _level(p: Parameters, config: Config, x: Tensor, mask: Tensor) -> Tensor:
    """A GRU over a sequence, from zeros; the states of masked words are those before them."""
    gates, proposals = _fetch(p / "fetch_state_gru", x)
    h, states = x.new_zeros(x.shape[1], config.state_size), []
    for *from_word, m in zip(gates.unbind(), proposals.unbind(), mask[..., None].unbind(), strict=True):
        h = _cell(p / "cell_gru", h, (from_word[0], from_word[1]), m)
        states.append(h)
    return torch.stack(states)


def _fetch(p: Parameters, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the input of a GRU adds to its gates and to its proposal, for any number of steps at once."""
    return _linear(p / "gate_x", [x]), _linear(p / "hide_x", [x])


def _cell(p: Parameters, h: Tensor, from_input: tuple[Tensor, Tensor], m: Tensor) -> Tensor:
    """One step of a GRU.

    z, r = sigmoid(norm(h U) + b + gates);   h' = z h + (1 - z) tanh(norm((r h) Ux) + bx + proposal);   m h' + (1 - m) h
    """
    z, r = (from_input[0] + _linear(p / "gate_h", [h])).sigmoid().chunk(2, -1)
    n = (from_input[1] + _linear(p / "hide_h", [r * h])).tanh()
    return m * (z * h + (1 - z) * n) + (1 - m) * h


def _linear(p: Parameters, xs: list[Tensor]) -> Tensor:
    """sum_i norm(x_i W_i), plus a bias where there is one."""
    norms = [(f"ln_0_{i}/scale", f"ln_0_{i}/offset") for i in range(len(xs))]
    terms = [project(p, x, f"W_0_{i}", None, norms[i]) for i, x in enumerate(xs)]
    bias = p.get("b_0")
    return sum(terms[1:], terms[0]) if bias is None else sum(terms[1:], terms[0]) + bias


def _embed(p: Parameters, config: Config, use: Use, ids: Tensor) -> Tensor:
    """Embeddings of words, plus the bias."""
    return functional.embedding(ids, p[transformer_table(config, use)]) + p[ZERO_BIAS]


def _drop(p: Parameters, config: Config, x: Tensor) -> Tensor:
    """In training, drop each feature of each word on its own."""
    return functional.dropout(x, config.rnn_dropout_embedding, p.dropout is not None)
