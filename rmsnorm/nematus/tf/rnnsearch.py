"""RNNSearch as Nematus computes it, as a Keras model: scores, losses and translations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import tensorflow as tf

from rmsnorm.nematus import beam
from rmsnorm.nematus.beam import Translations
from rmsnorm.nematus.cells import TIED, rates, rnn_smoothed
from rmsnorm.nematus.names import source_tables, target_table
from rmsnorm.nematus.tf import sentences, zero_rnnsearch
from rmsnorm.nematus.tf.model import NematusModel
from rmsnorm.nematus.tf.output import cross_entropy, lexical_state, log_softmax, predict
from rmsnorm.nematus.tf.parameters import Dropout, Parameters, feed_forward, leaves, multiply, project
from rmsnorm.nematus.tf.recurrent import nematus_deep_step, nematus_input, nematus_level, nematus_step
from rmsnorm.nematus.transformer_names import ZERO_BIAS

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

__all__ = ["RNNSearch"]


@keras.saving.register_keras_serializable(package="rmsnorm")
class RNNSearch(NematusModel):
    """Nematus's attentional encoder-decoder: see rmsnorm.nematus.protocol.RNNSearch.

    ``training=True`` turns dropout on. The weights have Nematus's names with dots for slashes.

    Example:
        >>> from rmsnorm.nematus.config import Config
        >>> from rmsnorm.nematus.names import variables
        >>> config = Config(embedding_size=2, state_size=2, source_vocab_sizes=(4,), target_vocab_size=3)
        >>> model = RNNSearch(config, {row.name: tf.zeros(row.shape) for row in variables(config)})
        >>> x, y = tf.constant([[[3], [2], [0]]]), tf.constant([[1], [0]])
        >>> model.loss(x, tf.ones((3, 1)), y, tf.ones((2, 1))).numpy()  # 2 log 3
        array([2.1972246], dtype=float32)
    """

    def encode(self, x: Any, x_mask: Any, *, training: bool = False) -> tf.Tensor:
        """See protocol.RNNSearch.encode."""
        return self.run(_context, *self.source("encode", x, x_mask), training=training)

    def logits(self, x: Any, x_mask: Any, y: Any, *, stepwise: bool = False, training: bool = False) -> tf.Tensor:
        """See protocol.RNNSearch.logits."""
        ids, mask, words, _ = self.sentences("logits", x, x_mask, y)
        return self.run(_score, ids, mask, words, stepwise=stepwise, training=training)

    def loss(self, x: Any, x_mask: Any, y: Any, y_mask: Any, *, training: bool = False) -> tf.Tensor:
        """See protocol.RNNSearch.loss."""
        return self.run(_loss, *self.sentences("loss", x, x_mask, y, y_mask), training=training)

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
        config = self.config
        table = self.by_name()[target_table(config)]
        ids, mask = self.source("translate", x, x_mask)
        plan = beam.plan(config, tf.math.count_nonzero(mask, 0), beam_size, max_length, normalization_alpha)
        memory, states = self.run(_begin, ids, mask, beam_size=plan.beam_size)

        def step(states: list[sentences.Rows], previous: Any) -> tuple[Any, list[sentences.Rows]]:
            words = tf.zeros((len(states[0]), table.shape[1]), table.dtype)
            if not beam.is_first(config, previous):
                words = tf.gather(table.value, previous)
                words = words + self.by_name()[ZERO_BIAS].value if config.dialect == "zero" else words
            log_p, new = self.run(_step, memory, [state.tensor for state in states], words)
            return log_p.numpy(), [sentences.Rows(state) for state in new]

        rows = [sentences.Rows(state) for state in states]
        return beam.search(plan, step, rows)

    def parameters_in(self, batch: tf.Tensor, training: bool) -> Parameters:
        values, config = self.tensors(), self.config
        if not training:
            return Parameters(values, config.norm, eps=config.eps)
        sizes = {name: value.shape[0] for name, value in values.items() if value.shape.rank == 2}
        sizes |= {TIED: config.target_embedding_size, "decoder/lexical": config.embedding_size}
        dropout = Dropout(rates(config, sizes), sizes, batch, self.variable_dtype, self.seed)
        return Parameters(values, config.norm, eps=config.eps, dropout=dropout)


class _Memory(NamedTuple):
    """What the decoder reads of the source: context, its part of the attention's hidden layer, embeddings, mask."""

    context: tf.Tensor
    hidden: tf.Tensor
    embeddings: tf.Tensor
    mask: tf.Tensor


def _context(p: Parameters, config: Config, x: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    return _attend_to(p, config, x, mask)[0].context


def _score(
    p: Parameters, config: Config, x: tf.Tensor, mask: tf.Tensor, y: tf.Tensor, *, stepwise: bool = False
) -> tf.Tensor:
    """Logits of the target words."""
    if config.dialect == "zero":
        return zero_rnnsearch.score(p, config, x, mask, y)
    memory, initial = _attend_to(p, config, x, mask)
    words = p.drop("target words", tf.gather(p[target_table(config)], y[:-1]), whole=True)
    words = tf.pad(words, ((1, 0), (0, 0), (0, 0)))  # a zero vector precedes the first word
    old = config.dialect == "tensorflow-v0.3" and not stepwise
    high = tf.zeros_like(initial) if old else initial
    states = [initial, *[high] * (config.rnn_dec_depth - 1)]
    return _decode(p, config, memory, states, words, old=old)[0]


def _loss(p: Parameters, config: Config, x: tf.Tensor, mask: tf.Tensor, y: tf.Tensor, y_mask: tf.Tensor) -> tf.Tensor:
    right, wrong, smallest = rnn_smoothed(config)
    losses = cross_entropy(_score(p, config, x, mask, y), y, y_mask, right, wrong)
    loss = tf.reduce_sum(losses - smallest * tf.cast(y_mask, losses.dtype), 0)
    return loss / tf.reduce_sum(tf.cast(y_mask, losses.dtype), 0) if config.dialect == "zero" else loss


def _begin(
    p: Parameters, config: Config, x: tf.Tensor, mask: tf.Tensor, beam_size: int
) -> tuple[_Memory, list[tf.Tensor]]:
    """Memory and states before the first word, beam_size rows for every sentence."""
    memory, initial = _attend_to(p, config, x, mask)
    memory = _Memory(*(tf.repeat(tensor, beam_size, axis=1) for tensor in memory))
    return memory, [tf.repeat(initial, beam_size, axis=0)] * config.rnn_dec_depth


def _step(
    p: Parameters, config: Config, memory: _Memory, states: list[tf.Tensor], words: tf.Tensor
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Log-probabilities of the word after the given embeddings, and the new states."""
    decode = zero_rnnsearch.decode if config.dialect == "zero" else _decode
    logits, states = decode(p, config, memory, states, words[None])
    return log_softmax(logits[0]), states


def _encode(p: Parameters, config: Config, x: tf.Tensor, mask: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Context and embeddings of the source."""
    tables, factors = source_tables(config), tf.unstack(x, len(config.source_vocab_sizes))
    embeddings = tf.concat([tf.gather(p[table], ids) for table, ids in zip(tables, factors, strict=True)], -1)
    embeddings = p.drop("source words", embeddings, whole=True)
    # The stack whose last level reads from left to right comes first.
    stacks = ("forward", "backward") if config.rnn_enc_depth % 2 else ("backward", "forward")
    return tf.concat([_encoder_stack(p, config, stack, embeddings, mask) for stack in stacks], -1), embeddings


def _encoder_stack(p: Parameters, config: Config, stack: str, x: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Levels that read in alternating directions, with residual connections from the second level on."""
    biases = [config.gru_bias("encoder", index) for index in range(config.rnn_enc_transition_depth)]
    h0 = tf.zeros((tf.shape(x)[1], config.state_size), x.dtype)
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


def _attend_to(p: Parameters, config: Config, x: tf.Tensor, mask: tf.Tensor) -> tuple[_Memory, tf.Tensor]:
    """The encoder, and what the decoder needs before its first step: memory and initial state."""
    if config.dialect == "zero":
        memory, initial = zero_rnnsearch.attend_to(p, config, x, mask)
        return _Memory(*memory), initial
    context, embeddings = _encode(p, config, x, mask)
    attention = p / "decoder/base/attention"
    hidden = project(attention, context, "context_to_hidden", "hidden_bias", leaves(p, "hidden_context_norm/"))
    share = (mask / tf.reduce_sum(mask, 0))[..., None]
    initial = tf.tanh(feed_forward(p / "decoder/initial_state_constructor", tf.reduce_sum(context * share, 0)))
    return _Memory(context, hidden, embeddings, mask), initial


def _decode(
    p: Parameters, config: Config, memory: _Memory, states: list[tf.Tensor], words: tf.Tensor, *, old: bool = False
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Logits of any number of steps, given the embeddings of the words before them, and the last states.

    old: the rules by which v0.3 scores: no residual connection around the first high level.
    """
    base, *highs = states
    top, attended, weights = tf.scan(
        lambda last, from_word: _base_step(p, config, memory, last[0], from_word),
        nematus_input(p / "decoder/base/gru0", words, config.gru_bias("base", 0)),
        (base, tf.zeros_like(memory.context[0]), tf.zeros_like(memory.mask)),
    )

    new = [top[-1]]
    biases = [config.gru_bias("high", index) for index in range(config.rnn_dec_high_transition_depth)]
    for level, high in enumerate(highs):
        below = tf.concat((top, attended), -1) if config.rnn_dec_deep_context else top
        high = nematus_level(p / f"decoder/high/level{level}", below, high, biases)
        new.append(high[-1])
        top = high if old and level == 0 else top + high

    lexical = lexical_state(p, weights, memory.embeddings) if config.rnn_lexical_model else None
    return predict(p, config, words, top, attended, lexical), new


def _base_step(
    p: Parameters, config: Config, memory: _Memory, state: tf.Tensor, from_word: tuple[tf.Tensor, tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """One step of the conditional GRU with attention: state, attended context, attention weights."""
    state = nematus_step(p / "decoder/base/gru0", state, from_word, config.gru_bias("base", 0))
    attended, weights = _attend(p / "decoder/base/attention", state, memory)
    biases = [config.gru_bias("base", index) for index in range(1, config.rnn_dec_base_transition_depth)]
    from_context = nematus_input(p / "decoder/base/gru1", attended, biases[0])
    return nematus_deep_step(p / "decoder/base", state, from_context, biases, first=1), attended, weights


def _attend(p: Parameters, state: tf.Tensor, memory: _Memory) -> tuple[tf.Tensor, tf.Tensor]:
    """sum_t w_t context_t, w = softmax over the words of tanh(hidden_t + norm(state W)) v; and w."""
    from_state = project(p, state, "state_to_hidden", None, leaves(p, "hidden_state_norm/"))
    scores = multiply(tf.tanh(memory.hidden + from_state), p["hidden_to_score"])[..., 0]
    largest = tf.stop_gradient(tf.reduce_max(scores, 0))  # of all scores, padding too, as in Nematus
    weights = tf.exp(scores - largest) * memory.mask
    weights = weights / tf.reduce_sum(weights, 0)
    return tf.reduce_sum(memory.context * weights[..., None], 0), weights
