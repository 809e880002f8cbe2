"""RNNSearch as Nematus computes it, as a Keras model: scores, losses and translations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import tensorflow as tf

from rmsnorm.nematus import beam
from rmsnorm.nematus.beam import Translations
from rmsnorm.nematus.cells import TIED, rates
from rmsnorm.nematus.names import source_tables, target_table
from rmsnorm.nematus.tf import sentences
from rmsnorm.nematus.tf.model import NematusModel
from rmsnorm.nematus.tf.output import cross_entropy, lexical_state, log_softmax, predict
from rmsnorm.nematus.tf.parameters import Dropout, Parameters, feed_forward, leaves, multiply, project
from rmsnorm.nematus.tf.recurrent import nematus_deep_step, nematus_input, nematus_level, nematus_step

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

__all__ = ["RNNSearch"]


@keras.saving.register_keras_serializable(package="rmsnorm")
class RNNSearch(NematusModel):
    """Nematus's attentional encoder-decoder.

    With ``training`` it drops out what Nematus does, at the rates of the config.

    Args:
        config: of the model; ``config.dialect`` says by whose rules it is computed.
        parameters: arrays or tensors by the names of Nematus master, as ``rmsnorm.nematus.load`` gives them,
            whose dtype the model has. The weights have these names with dots for slashes.

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
        """What the decoder attends to: (source length, batch, 2 state_size).

        Args:
            x: ids, (factors, source length, batch).
            x_mask: 1 on words and on the end of sentence, 0 after it, (source length, batch).

        Raises:
            TypeError, ValueError: an array has another shape or dtype, or an id is not in the vocabulary; ids and masks
                are looked at where no graph is traced.
        """
        return self.run(self._encode, *self.source("encode", x, x_mask), training=training)

    def logits(self, x: Any, x_mask: Any, y: Any, *, stepwise: bool = False, training: bool = False) -> tf.Tensor:
        """Logits of every target word given those before it: (target length, batch, vocabulary).

        Args:
            x, x_mask: as for encode.
            y: ids, (target length, batch).
            stepwise: by the rules of decoding where those of scoring are others (dialect ``tensorflow-v0.3``).

        Raises:
            TypeError, ValueError: as encode.
        """
        ids, mask = self.source("logits", x, x_mask)
        words, _ = self.target("logits", y, ids)
        return self.run(self._logits, ids, mask, words, stepwise=stepwise, training=training)

    def loss(self, x: Any, x_mask: Any, y: Any, y_mask: Any, *, training: bool = False) -> tf.Tensor:
        """Cross-entropy of each sentence, summed over its words: (batch,), smoothed where the config says so.

        Args:
            x, x_mask, y: as for logits.
            y_mask: as x_mask, (target length, batch).

        Raises:
            TypeError, ValueError: as encode.
        """
        ids, mask = self.source("loss", x, x_mask)
        return self.run(self._loss, ids, mask, *self.target("loss", y, ids, y_mask), training=training)

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
            max_length: Nematus's translation_maxlen, by default that of the config; its master stops one word short.
            normalization_alpha: scores are divided by length^alpha.

        Returns:
            (sequences, scores), best first, as NumPy arrays.

        Raises:
            TypeError, ValueError: as encode; also when beam_size or max_length is out of its domain.
        """
        config = self.config
        max_length = config.translation_maxlen if max_length is None else max_length
        beam.check(beam_size, max_length)
        memory, initial = self.run(self._attend_to, *self.source("translate", x, x_mask))
        memory = [tf.repeat(each, beam_size, axis=1) for each in memory]
        table = self.by_name()[target_table(config)]

        def step(states: list[sentences.Rows], previous: Any) -> tuple[Any, list[sentences.Rows]]:
            if previous is None:
                words = tf.zeros((len(states[0]), table.shape[1]), table.dtype)
            else:
                words = tf.gather(table.value, previous)
            log_p, *new = self.run(self._step, words, *memory, *(state.tensor for state in states))
            return log_p.numpy(), [sentences.Rows(state) for state in new]

        states = [sentences.Rows(tf.repeat(initial, beam_size, axis=0))] * config.rnn_dec_depth
        return beam.search(config.search, step, states, beam_size, max_length, normalization_alpha)

    def _encode(self, ids: tf.Tensor, mask: tf.Tensor, *, training: bool) -> tf.Tensor:
        return _encode(self._parameters(ids, training), self.config, ids, mask)[0]

    def _logits(
        self, ids: tf.Tensor, mask: tf.Tensor, y: tf.Tensor, *, training: bool, stepwise: bool = False
    ) -> tf.Tensor:
        p, config = self._parameters(ids, training), self.config
        memory, initial = _attend_to(p, config, ids, mask)
        words = p.drop("target words", tf.gather(p[target_table(config)], y[:-1]), whole=True)
        words = tf.pad(words, ((1, 0), (0, 0), (0, 0)))  # before the first word stands a zero vector
        old = config.dialect == "tensorflow-v0.3" and not stepwise
        high = tf.zeros_like(initial) if old else initial
        states = [initial, *[high] * (config.rnn_dec_depth - 1)]
        return _decode(p, config, memory, states, words, old=old)[0]

    def _loss(self, ids: tf.Tensor, mask: tf.Tensor, y: tf.Tensor, y_mask: tf.Tensor, *, training: bool) -> tf.Tensor:
        wrong = self.config.label_smoothing / self.config.target_vocab_size
        right = 1 - self.config.label_smoothing + wrong
        return tf.reduce_sum(cross_entropy(self._logits(ids, mask, y, training=training), y, y_mask, right, wrong), 0)

    def _attend_to(self, ids: tf.Tensor, mask: tf.Tensor) -> tuple[_Memory, tf.Tensor]:
        return _attend_to(self._parameters(ids), self.config, ids, mask)

    def _step(self, words: tf.Tensor, *given: tf.Tensor) -> tuple[tf.Tensor, ...]:
        memory, states = _Memory(*given[:4]), list(given[4:])
        logits, new = _decode(self._parameters(words), self.config, memory, states, words[None])
        return log_softmax(logits[0]), *new

    def _parameters(self, ids: tf.Tensor, training: bool = False) -> Parameters:
        values, config = self.tensors(), self.config
        if not training:
            return Parameters(values, config.norm)
        sizes = {name: value.shape[0] for name, value in values.items() if value.shape.rank == 2}
        sizes |= {TIED: config.target_embedding_size, "decoder/lexical": config.embedding_size}
        dropout = Dropout(rates(config, sizes), sizes, tf.shape(ids)[-1], self.variable_dtype, self.seed)
        return Parameters(values, config.norm, dropout=dropout)


class _Memory(NamedTuple):
    """What is known of the source: context, its part of the attention's hidden layer, embeddings, mask."""

    context: tf.Tensor
    hidden: tf.Tensor
    embeddings: tf.Tensor
    mask: tf.Tensor


def _encode(p: Parameters, config: Config, x: tf.Tensor, mask: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Context and embeddings of the source."""
    factors = tf.unstack(x, len(config.source_vocab_sizes))
    tables = source_tables(config)
    embeddings = tf.concat([tf.gather(p[table], ids) for table, ids in zip(tables, factors, strict=True)], -1)
    embeddings = p.drop("source words", embeddings, whole=True)
    # The stack that ends from left to right comes first.
    stacks = ("forward", "backward") if config.rnn_enc_depth % 2 else ("backward", "forward")
    return tf.concat([_encoder_stack(p, config, stack, embeddings, mask) for stack in stacks], -1), embeddings


def _encoder_stack(p: Parameters, config: Config, stack: str, x: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Levels that read in alternating directions, with residual connections from the second on."""
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
            mask=mask if reverse or carries else None,  # in TensorFlow what stands after the end does not matter
            masking="carry" if carries else "zero",
            reverse=reverse,
        )
        x = states + x if level else states
    return x


def _attend_to(p: Parameters, config: Config, x: tf.Tensor, mask: tf.Tensor) -> tuple[_Memory, tf.Tensor]:
    """The encoder, and what the decoder makes of it before its first step: memory and initial state."""
    context, embeddings = _encode(p, config, x, mask)
    attention = p / "decoder/base/attention"
    hidden = project(attention, context, "context_to_hidden", "hidden_bias", leaves(p, "hidden_context_norm/"))
    share = (mask / tf.reduce_sum(mask, 0))[..., None]
    initial = tf.tanh(feed_forward(p / "decoder/initial_state_constructor", tf.reduce_sum(context * share, 0)))
    return _Memory(context, hidden, embeddings, mask), initial


def _decode(
    p: Parameters, config: Config, memory: _Memory, states: list[tf.Tensor], words: tf.Tensor, *, old: bool = False
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Logits of any number of steps, given the words before them, and the last states.

    old: as v0.3 scores, without a residual connection around the first high level.
    """
    base, *highs = states
    tops, attended, weights = tf.scan(
        lambda state, from_word: _base_step(p, config, memory, state[0], from_word),
        nematus_input(p / "decoder/base/gru0", words, config.gru_bias("base", 0)),
        (base, tf.zeros_like(memory.context[0]), tf.zeros_like(memory.mask)),
    )
    top, new = tops, [tops[-1]]
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
    """One word further: the conditional GRU with attention. State, attended context, attention weights."""
    state = nematus_step(p / "decoder/base/gru0", state, from_word, config.gru_bias("base", 0))
    attended, weights = _attend(p / "decoder/base/attention", state, memory)
    biases = [config.gru_bias("base", index) for index in range(1, config.rnn_dec_base_transition_depth)]
    from_context = nematus_input(p / "decoder/base/gru1", attended, biases[0])
    return nematus_deep_step(p / "decoder/base", state, from_context, biases, first=1), attended, weights


def _attend(p: Parameters, state: tf.Tensor, memory: _Memory) -> tuple[tf.Tensor, tf.Tensor]:
    """sum_t a_t context_t, a = softmax over the words of tanh(hidden_t + norm(state W)) v."""
    from_state = project(p, state, "state_to_hidden", None, leaves(p, "hidden_state_norm/"))
    scores = multiply(tf.tanh(memory.hidden + from_state), p["hidden_to_score"])[..., 0]
    # The greatest of all, padding too, as Nematus does.
    weights = tf.exp(scores - tf.stop_gradient(tf.reduce_max(scores, 0))) * memory.mask
    weights = weights / tf.reduce_sum(weights, 0)
    return tf.reduce_sum(memory.context * weights[..., None], 0), weights
