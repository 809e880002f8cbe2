"""RNNSearch as Nematus computes it, as a Flax NNX module: scores, losses and translations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial as bind
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax import numpy as jnp

from rmsnorm.nematus import beam
from rmsnorm.nematus.beam import Translations
from rmsnorm.nematus.cells import TIED, rates, rnn_smoothed
from rmsnorm.nematus.flax import sentences, zero_rnnsearch
from rmsnorm.nematus.flax.output import cross_entropy, lexical_state, log_softmax, predict
from rmsnorm.nematus.flax.parameters import (
    Named,
    Parameters,
    compiled,
    dropout_key,
    dropout_masks,
    feed_forward,
    leaves,
    multiply,
    project,
)
from rmsnorm.nematus.flax.recurrent import nematus_deep_step, nematus_input, nematus_level, nematus_step
from rmsnorm.nematus.names import source_tables, target_table
from rmsnorm.nematus.transformer_names import ZERO_BIAS

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

__all__ = ["RNNSearch"]


class RNNSearch(Named):
    """Nematus's attentional encoder-decoder: see rmsnorm.nematus.protocol.RNNSearch.

    A new model is in evaluation mode. In its state, Nematus's names are paths. The stream ``dropout`` of ``rngs``,
    which training with dropout needs, is forked.

    Example:
        >>> from rmsnorm.nematus.config import Config
        >>> from rmsnorm.nematus.names import variables
        >>> config = Config(embedding_size=2, state_size=2, source_vocab_sizes=(4,), target_vocab_size=3)
        >>> model = RNNSearch(config, {row.name: jnp.zeros(row.shape) for row in variables(config)})
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
        """See protocol.RNNSearch.encode."""
        p, config = self._parameters(), self.config
        ids, mask = sentences.source("encode", x, x_mask, config, p[target_table(config)])
        return _context(p, config, ids, mask, self._key())

    def logits(self, x: Any, x_mask: Any, y: Any, *, stepwise: bool = False) -> jax.Array:
        """See protocol.RNNSearch.logits."""
        p, config = self._parameters(), self.config
        ids, mask, words, _ = self._sentences("logits", p, x, x_mask, y)
        return _score(p, config, ids, mask, words, self._key(), stepwise=stepwise)

    def loss(self, x: Any, x_mask: Any, y: Any, y_mask: Any) -> jax.Array:
        """See protocol.RNNSearch.loss."""
        p, config = self._parameters(), self.config
        return _loss(p, config, *self._sentences("loss", p, x, x_mask, y, y_mask), self._key())

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
        """See protocol.RNNSearch.translate."""
        p, config = self._parameters(), self.config
        table = p[target_table(config)]
        ids, mask = sentences.source("translate", x, x_mask, config, table)
        plan = beam.plan(config, (mask != 0).sum(0), beam_size, max_length, normalization_alpha)
        memory, states = _begin(p, config, ids, mask, plan.beam_size)

        def step(states: list[jax.Array], previous: Any) -> tuple[Any, list[jax.Array]]:
            first = beam.is_first(config, previous)
            ids = np.zeros(len(states[0]), np.int32) if first else previous
            log_p, states = _step(p, config, memory, states, ids, first)
            return np.asarray(log_p), states

        return beam.search(plan, step, states)

    def _parameters(self) -> Parameters:
        return Parameters(self.by_name(), self.config.norm, eps=self.config.eps)

    def _sentences(
        self, op: str, p: Parameters, x: Any, x_mask: Any, y: Any, y_mask: Any = None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Ids and masks of the source and of the target."""
        config = self.config
        table = p[target_table(config)]
        ids, mask = sentences.source(op, x, x_mask, config, table)
        return ids, mask, *sentences.target(op, y, ids.shape[2], config, table, y_mask)

    def _key(self) -> jax.Array | None:
        """The key of the dropout masks in training; None if nothing is dropped."""
        config = self.config
        drops = any(value for name, value in vars(config).items() if name.startswith("rnn_dropout"))
        return dropout_key(self.rngs) if drops and not self.deterministic else None


class _Memory(NamedTuple):
    """What the decoder reads of the source: context, its part of the attention's hidden layer, embeddings, mask."""

    context: jax.Array
    hidden: jax.Array
    embeddings: jax.Array
    mask: jax.Array


@bind(compiled, static_argnames="config")
def _context(p: Parameters, config: Config, x: jax.Array, mask: jax.Array, key: jax.Array | None) -> jax.Array:
    return _attend_to(_with_dropout(p, config, key, x), config, x, mask)[0].context


@bind(compiled, static_argnames=("config", "stepwise"))
def _score(
    p: Parameters,
    config: Config,
    x: jax.Array,
    mask: jax.Array,
    y: jax.Array,
    key: jax.Array | None,
    *,
    stepwise: bool = False,
) -> jax.Array:
    """Logits of the target words."""
    p = _with_dropout(p, config, key, x, len(y))
    if config.dialect == "zero":
        return zero_rnnsearch.score(p, config, x, mask, y)
    memory, initial = _attend_to(p, config, x, mask)
    words = p.drop("target words", jnp.take(p[target_table(config)], y[:-1], axis=0))
    words = jnp.pad(words, ((1, 0), (0, 0), (0, 0)))  # a zero vector precedes the first word
    old = config.dialect == "tensorflow-v0.3" and not stepwise
    high = jnp.zeros_like(initial) if old else initial
    states = [initial, *[high] * (config.rnn_dec_depth - 1)]
    return _decode(p, config, memory, states, words, old=old)[0]


@bind(compiled, static_argnames="config")
def _loss(
    p: Parameters,
    config: Config,
    x: jax.Array,
    mask: jax.Array,
    y: jax.Array,
    y_mask: jax.Array,
    key: jax.Array | None,
) -> jax.Array:
    right, wrong, smallest = rnn_smoothed(config)
    losses = cross_entropy(_score(p, config, x, mask, y, key), y, y_mask, right, wrong)
    loss = (losses - smallest * y_mask.astype(losses.dtype)).sum(0)
    return loss / y_mask.sum(0).astype(losses.dtype) if config.dialect == "zero" else loss


@bind(compiled, static_argnames=("config", "beam_size"))
def _begin(
    p: Parameters, config: Config, x: jax.Array, mask: jax.Array, beam_size: int
) -> tuple[_Memory, list[jax.Array]]:
    """Memory and states before the first word, beam_size rows for every sentence."""
    memory, initial = _attend_to(p, config, x, mask)
    memory = _Memory(*(jnp.repeat(array, beam_size, axis=1) for array in memory))
    return memory, [jnp.repeat(initial, beam_size, axis=0)] * config.rnn_dec_depth


@bind(compiled, static_argnames="config")
def _step(
    p: Parameters, config: Config, memory: _Memory, states: list[jax.Array], previous: jax.Array, first: jax.Array
) -> tuple[jax.Array, list[jax.Array]]:
    """Log-probabilities of the word after the previous one, and the new states."""
    words = jnp.take(p[target_table(config)], previous, axis=0)
    words = jnp.where(first, 0.0, words + p[ZERO_BIAS] if config.dialect == "zero" else words)
    decode = zero_rnnsearch.decode if config.dialect == "zero" else _decode
    logits, states = decode(p, config, memory, states, words[None])
    return log_softmax(logits[0]), states


def _with_dropout(
    p: Parameters, config: Config, key: jax.Array | None, x: jax.Array, target_length: int = 1
) -> Parameters:
    """The parameters with dropout masks of the shapes that they are used for."""
    if key is None:
        return p
    length, batch = x.shape[1:]
    if config.dialect == "zero":
        size, names = config.embedding_size, ("source words", "target words", "features")
        lengths = (length, target_length, target_length)
        of_zero = {name: (words, batch, size) for name, words in zip(names, lengths, strict=True)}
        masks = dropout_masks(key, dict.fromkeys(names, config.rnn_dropout_embedding), of_zero, p[ZERO_BIAS].dtype)
        return replace(p, masks=masks)
    values = {name: value for name, value in p.values.items() if value.ndim == 2}
    shapes: dict[str, tuple[int, ...]] = {name: (batch, len(value)) for name, value in values.items()}
    shapes |= {TIED: (batch, config.target_embedding_size), "decoder/lexical": (batch, config.embedding_size)}
    shapes |= {"source words": (length, batch, 1), "target words": (target_length - 1, batch, 1)}
    return replace(p, masks=dropout_masks(key, rates(config, values), shapes, p[target_table(config)].dtype))


def _encode(p: Parameters, config: Config, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Context and embeddings of the source."""
    tables = source_tables(config)
    embeddings = jnp.concatenate([jnp.take(p[t], ids, axis=0) for t, ids in zip(tables, x, strict=True)], axis=-1)
    embeddings = p.drop("source words", embeddings)
    # The stack whose last level reads from left to right comes first.
    stacks = ("forward", "backward") if config.rnn_enc_depth % 2 else ("backward", "forward")
    return jnp.concatenate(
        [_encoder_stack(p, config, stack, embeddings, mask) for stack in stacks], axis=-1
    ), embeddings


def _encoder_stack(p: Parameters, config: Config, stack: str, x: jax.Array, mask: jax.Array) -> jax.Array:
    """Levels that read in alternating directions, with residual connections from the second level on."""
    biases = tuple(config.gru_bias("encoder", index) for index in range(config.rnn_enc_transition_depth))
    h0 = jnp.zeros((x.shape[1], config.state_size), x.dtype)
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


def _attend_to(p: Parameters, config: Config, x: jax.Array, mask: jax.Array) -> tuple[_Memory, jax.Array]:
    """The encoder, and what the decoder needs before its first step: memory and initial state."""
    if config.dialect == "zero":
        memory, initial = zero_rnnsearch.attend_to(p, config, x, mask)
        return _Memory(*memory), initial
    context, embeddings = _encode(p, config, x, mask)
    attention = p / "decoder/base/attention"
    hidden = project(attention, context, "context_to_hidden", "hidden_bias", leaves(p, "hidden_context_norm/"))
    share = (mask / mask.sum(0))[..., None]
    initial = jnp.tanh(feed_forward(p / "decoder/initial_state_constructor", (context * share).sum(0)))
    return _Memory(context, hidden, embeddings, mask), initial


def _decode(
    p: Parameters, config: Config, memory: _Memory, states: list[jax.Array], words: jax.Array, *, old: bool = False
) -> tuple[jax.Array, list[jax.Array]]:
    """Logits of any number of steps, given the embeddings of the words before them, and the last states.

    old: the rules by which v0.3 scores: no residual connection around the first high level.
    """
    base, *highs = states

    def step(base: jax.Array, from_word: Any) -> tuple[jax.Array, Any]:
        result = _base_step(p, config, memory, base, from_word)
        return result[0], result

    from_words = nematus_input(p / "decoder/base/gru0", words, config.gru_bias("base", 0))
    base, (top, attended, weights) = lax.scan(step, base, from_words)

    new = [base]
    biases = tuple(config.gru_bias("high", index) for index in range(config.rnn_dec_high_transition_depth))
    for level, high in enumerate(highs):
        below = jnp.concatenate((top, attended), axis=-1) if config.rnn_dec_deep_context else top
        high = nematus_level(p / f"decoder/high/level{level}", below, high, biases)
        new.append(high[-1])
        top = high if old and level == 0 else top + high

    lexical = lexical_state(p, weights, memory.embeddings) if config.rnn_lexical_model else None
    return predict(p, config, words, top, attended, lexical), new


def _base_step(
    p: Parameters, config: Config, memory: _Memory, state: jax.Array, from_word: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One step of the conditional GRU with attention: state, attended context, attention weights."""
    state = nematus_step(p / "decoder/base/gru0", state, from_word, config.gru_bias("base", 0))
    attended, weights = _attend(p / "decoder/base/attention", state, memory)
    biases = [config.gru_bias("base", index) for index in range(1, config.rnn_dec_base_transition_depth)]
    from_context = nematus_input(p / "decoder/base/gru1", attended, biases[0])
    return nematus_deep_step(p / "decoder/base", state, from_context, biases, first=1), attended, weights


def _attend(p: Parameters, state: jax.Array, memory: _Memory) -> tuple[jax.Array, jax.Array]:
    """sum_t w_t context_t, w = softmax over the words of tanh(hidden_t + norm(state W)) v; and w."""
    from_state = project(p, state, "state_to_hidden", None, leaves(p, "hidden_state_norm/"))
    scores = multiply(jnp.tanh(memory.hidden + from_state), p["hidden_to_score"])[..., 0]
    largest = lax.stop_gradient(scores.max(0))  # of all scores, padding too, as in Nematus
    weights = jnp.exp(scores - largest) * memory.mask
    weights = weights / weights.sum(0)
    return (memory.context * weights[..., None]).sum(0), weights
