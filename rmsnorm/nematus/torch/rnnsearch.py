"""RNNSearch as Nematus computes it, as a PyTorch module: scores, losses and translations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rmsnorm.nematus import beam
from rmsnorm.nematus.beam import Translations
from rmsnorm.nematus.cells import rates, rnn_smoothed
from rmsnorm.nematus.names import source_tables, target_table
from rmsnorm.nematus.torch import sentences, zero_rnnsearch
from rmsnorm.nematus.torch.output import cross_entropy, lexical_state, log_softmax, predict
from rmsnorm.nematus.torch.parameters import Dropout, Named, Parameters, feed_forward, leaves, project
from rmsnorm.nematus.torch.recurrent import nematus_deep_step, nematus_input, nematus_level, nematus_step
from rmsnorm.nematus.transformer_names import ZERO_BIAS

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Bias, Config

__all__ = ["RNNSearch"]


class RNNSearch(Named):
    """Nematus's attentional encoder-decoder: see rmsnorm.nematus.protocol.RNNSearch.

    A new model is in evaluation mode. Its state dict has Nematus's names with dots for slashes.

    Example:
        >>> from rmsnorm.nematus.config import Config
        >>> from rmsnorm.nematus.names import variables
        >>> config = Config(embedding_size=2, state_size=2, source_vocab_sizes=(4,), target_vocab_size=3)
        >>> model = RNNSearch(config, {row.name: torch.zeros(row.shape) for row in variables(config)})
        >>> x, y = torch.tensor([[[3], [2], [0]]]), torch.tensor([[1], [0]])
        >>> model.loss(x, torch.ones(3, 1), y, torch.ones(2, 1)).detach()  # 2 log 3
        tensor([2.1972])
    """

    def __init__(self, config: Config, parameters: Mapping[str, Any]) -> None:
        super().__init__(parameters)
        self.config = config
        self.rates = rates(config, parameters)
        self.eval()

    def encode(self, x: Any, x_mask: Any) -> Tensor:
        """See protocol.RNNSearch.encode."""
        p, config = self._tensors(), self.config
        ids, mask = sentences.source("encode", x, x_mask, config, p[target_table(config)])
        return _attend_to(p, config, ids, mask)[0].context

    def logits(self, x: Any, x_mask: Any, y: Any, *, stepwise: bool = False) -> Tensor:
        """See protocol.RNNSearch.logits."""
        p, config = self._tensors(), self.config
        ids, mask, words, _ = self._sentences("logits", p, x, x_mask, y)
        return _score(p, config, ids, mask, words, stepwise=stepwise)

    def loss(self, x: Any, x_mask: Any, y: Any, y_mask: Any) -> Tensor:
        """See protocol.RNNSearch.loss."""
        p, config = self._tensors(), self.config
        return _loss(p, config, *self._sentences("loss", p, x, x_mask, y, y_mask))

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
        """See protocol.RNNSearch.translate."""
        p, config = Parameters(self.by_name(), self.config.norm, eps=self.config.eps), self.config
        table = p[target_table(config)]
        ids, mask = sentences.source("translate", x, x_mask, config, table)
        plan = beam.plan(config, (mask != 0).sum(0).tolist(), beam_size, max_length, normalization_alpha)
        memory, states = _begin(p, config, ids, mask, plan.beam_size)

        def step(states: list[Tensor], previous: Any) -> tuple[Any, list[Tensor]]:
            words = table.new_zeros(len(states[0]), table.shape[1])
            if not beam.is_first(config, previous):
                words = table[torch.as_tensor(previous, device=table.device)]
                words = words + p[ZERO_BIAS] if config.dialect == "zero" else words
            log_p, states = _step(p, config, memory, states, words)
            return log_p.cpu().numpy(), states

        return beam.search(plan, step, states)

    def _tensors(self) -> Parameters:
        """The parameters, with dropout in training. (torch.nn.Module has an attribute ``_parameters``.)"""
        dropout = Dropout(self.rates) if self.training else None
        return Parameters(self.by_name(), self.config.norm, eps=self.config.eps, dropout=dropout)

    def _sentences(
        self, op: str, p: Parameters, x: Any, x_mask: Any, y: Any, y_mask: Any = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ids and masks of the source and of the target."""
        config = self.config
        table = p[target_table(config)]
        ids, mask = sentences.source(op, x, x_mask, config, table)
        return ids, mask, *sentences.target(op, y, ids.shape[2], config, table, y_mask)


class _Memory(NamedTuple):
    """What the decoder reads of the source: context, its part of the attention's hidden layer, embeddings, mask."""

    context: Tensor
    hidden: Tensor
    embeddings: Tensor
    mask: Tensor


def _score(p: Parameters, config: Config, x: Tensor, mask: Tensor, y: Tensor, *, stepwise: bool = False) -> Tensor:
    """Logits of the target words."""
    if config.dialect == "zero":
        return zero_rnnsearch.score(p, config, x, mask, y)
    memory, initial = _attend_to(p, config, x, mask)
    words = p.drop("target words", functional.embedding(y[:-1], p[target_table(config)]), whole=True)
    words = functional.pad(words, (0, 0, 0, 0, 1, 0))  # a zero vector precedes the first word
    old = config.dialect == "tensorflow-v0.3" and not stepwise
    high = torch.zeros_like(initial) if old else initial
    states = [initial, *[high] * (config.rnn_dec_depth - 1)]
    return _decode(p, config, memory, states, words, old=old)[0]


def _loss(p: Parameters, config: Config, x: Tensor, mask: Tensor, y: Tensor, y_mask: Tensor) -> Tensor:
    right, wrong, smallest = rnn_smoothed(config)
    losses = cross_entropy(_score(p, config, x, mask, y), y, y_mask, right, wrong)
    loss = (losses - smallest * y_mask).sum(0)
    return loss / y_mask.sum(0) if config.dialect == "zero" else loss


def _begin(p: Parameters, config: Config, x: Tensor, mask: Tensor, beam_size: int) -> tuple[_Memory, list[Tensor]]:
    """Memory and states before the first word, beam_size rows for every sentence."""
    memory, initial = _attend_to(p, config, x, mask)
    memory = _Memory(*(tensor.repeat_interleave(beam_size, dim=1) for tensor in memory))
    return memory, [initial.repeat_interleave(beam_size, dim=0)] * config.rnn_dec_depth


def _step(
    p: Parameters, config: Config, memory: _Memory, states: list[Tensor], words: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities of the word after the given embeddings, and the new states."""
    decode = zero_rnnsearch.decode if config.dialect == "zero" else _decode
    logits, states = decode(p, config, memory, states, words[None])
    return log_softmax(logits[0]), states


def _encode(p: Parameters, config: Config, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Context and embeddings of the source."""
    tables = source_tables(config)
    embeddings = torch.cat([functional.embedding(ids, p[table]) for table, ids in zip(tables, x, strict=True)], dim=-1)
    embeddings = p.drop("source words", embeddings, whole=True)
    # The stack whose last level reads from left to right comes first.
    stacks = ("forward", "backward") if config.rnn_enc_depth % 2 else ("backward", "forward")
    return torch.cat([_encoder_stack(p, config, stack, embeddings, mask) for stack in stacks], dim=-1), embeddings


def _encoder_stack(p: Parameters, config: Config, stack: str, x: Tensor, mask: Tensor) -> Tensor:
    """Levels that read in alternating directions, with residual connections from the second level on."""
    biases = [config.gru_bias("encoder", index) for index in range(config.rnn_enc_transition_depth)]
    h0 = x.new_zeros(x.shape[1], config.state_size)
    for level in range(config.rnn_enc_depth):
        reverse = (level % 2 == 1) != (stack == "backward")
        carries = config.dialect == "theano"
        states = nematus_level(
            p / f"encoder/{stack}-stack/level{level}",
            x,
            h0,
            biases,
            mask=mask if reverse or carries else None,  # in TensorFlow the states after the end have no effect
            masking="carry" if carries else "zero",
            reverse=reverse,
        )
        x = states + x if level else states
    return x


def _attend_to(p: Parameters, config: Config, x: Tensor, mask: Tensor) -> tuple[_Memory, Tensor]:
    """The encoder, and what the decoder needs before its first step: memory and initial state."""
    if config.dialect == "zero":
        memory, initial = zero_rnnsearch.attend_to(p, config, x, mask)
        return _Memory(*memory), initial
    context, embeddings = _encode(p, config, x, mask)
    hidden = project(
        p / "decoder/base/attention", context, "context_to_hidden", "hidden_bias", leaves(p, "hidden_context_norm/")
    )
    share = (mask / mask.sum(0))[..., None]
    initial = feed_forward(p / "decoder/initial_state_constructor", (context * share).sum(0)).tanh()
    return _Memory(context, hidden, embeddings, mask), initial


def _decode(
    p: Parameters, config: Config, memory: _Memory, states: list[Tensor], words: Tensor, *, old: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Logits of any number of steps, given the embeddings of the words before them, and the last states.

    old: the rules by which v0.3 scores: no residual connection around the first high level.
    """
    base, *highs = states
    from_words = nematus_input(p / "decoder/base/gru0", words, config.gru_bias("base", 0))
    biases = [config.gru_bias("base", index) for index in range(config.rnn_dec_base_transition_depth)]
    top, attended, weights = _base_steps(p / "decoder/base", memory, base, from_words, biases)

    new = [top[-1]]
    biases = [config.gru_bias("high", index) for index in range(config.rnn_dec_high_transition_depth)]
    for level, high in enumerate(highs):
        below = torch.cat((top, attended), dim=-1) if config.rnn_dec_deep_context else top
        high = nematus_level(p / f"decoder/high/level{level}", below, high, biases)
        new.append(high[-1])
        top = high if old and level == 0 else top + high

    lexical = lexical_state(p, weights, memory.embeddings) if config.rnn_lexical_model else None
    return predict(p, config, words, top, attended, lexical), new


def _base_steps(
    p: Parameters, memory: _Memory, state: Tensor, from_words: tuple[Tensor, Tensor], biases: Sequence[Bias]
) -> tuple[Tensor, Tensor, Tensor]:
    steps = []
    for from_word in zip(*from_words, strict=True):
        state, attended, weights = _base_step(p, memory, state, from_word, biases)
        steps.append((state, attended, weights))
    top, attended, weights = (torch.stack(tensors) for tensors in zip(*steps, strict=True))
    return top, attended, weights


def _base_step(
    p: Parameters, memory: _Memory, state: Tensor, from_word: tuple[Tensor, Tensor], biases: Sequence[Bias]
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of the conditional GRU with attention: state, attended context, attention weights."""
    state = nematus_step(p / "gru0", state, from_word, biases[0])
    attended, weights = _attend(p / "attention", state, memory)
    from_context = nematus_input(p / "gru1", attended, biases[1])
    return nematus_deep_step(p, state, from_context, biases[1:], first=1), attended, weights


def _attend(p: Parameters, state: Tensor, memory: _Memory) -> tuple[Tensor, Tensor]:
    """sum_t w_t context_t, w = softmax over the words of tanh(hidden_t + norm(state W)) v; and w."""
    from_state = project(p, state, "state_to_hidden", None, leaves(p, "hidden_state_norm/"))
    scores = ((memory.hidden + from_state).tanh() @ p["hidden_to_score"])[..., 0]
    largest = scores.detach().amax(0)  # of all scores, padding too, as in Nematus
    weights = (scores - largest).exp() * memory.mask
    weights = weights / weights.sum(0)
    return (memory.context * weights[..., None]).sum(0), weights
