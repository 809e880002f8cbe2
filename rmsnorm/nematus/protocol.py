"""The interface of Nematus's models, written once: those of every framework have these methods and arguments.

The classes check the arguments and search for translations; each framework computes. The models take anything that the
framework makes an array of. Sequences are time-major, (length, batch, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial as bind
from itertools import count
from typing import Any, ClassVar, TypeAlias

import numpy as np

from rmsnorm.nematus import beam, sentences
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.models import rnnsearch, transformer
from rmsnorm.nematus.models.parameters import first_word

Array: TypeAlias = Any


class Model:
    """What RNNSearch and the Transformer have in common: scores, losses and translations.

    Masks, states and probabilities have the dtype of the parameters; NumPy computes in float64. The loss is computed in
    at least float32. In training the models drop out what Nematus drops out, at the rates of the config, but for those
    of NumPy, which have no gradients. PyTorch and Flax have a training mode (new models are in evaluation mode);
    ``training`` says otherwise for one call. ``translate`` never drops anything.

    All methods raise TypeError or ValueError if an array has a wrong shape or dtype, or if an id is not in the
    vocabulary. The values of ids and masks are not checked while a compiler or a tracer is at work.

    Args:
        config: of the model; ``config.dialect`` names the version whose rules it follows.
        parameters: arrays under the names of Nematus master, as ``rmsnorm.nematus.load`` returns them. The model has
            their dtype, and in PyTorch their device.
    """

    network: ClassVar[Any]  # the module with the arithmetic: encode, score, loss, begin and step
    operations: ClassVar[Any]  # of the framework
    config: Config

    def __init__(self, config: Config, parameters: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def runner(self, *, training: bool) -> tuple[Callable[..., Any], Any]:
        """What calls a function of the network with the parameters as they are now, and one parameter."""
        raise NotImplementedError

    def is_training(self) -> bool:
        """Whether the model is in training mode."""
        return False

    def encode(self, x: Any, x_mask: Any, *, training: bool | None = None) -> Array:
        """What the decoder attends to.

        Args:
            x: ids, (factors, source length, batch).
            x_mask: 1 on words and on the end of sentence, 0 after it, (source length, batch).
            training: whether to drop out; by default as the mode of the model says.

        Returns:
            (source length, batch, 2 state_size) of RNNSearch, (batch, source length, state_size) of a Transformer.
        """
        return self._compute("encode", x, x_mask, training=training)

    def loss(self, x: Any, x_mask: Any, y: Any, y_mask: Any, *, training: bool | None = None) -> Array:
        """Cross-entropy of each sentence, summed over its words: (batch,), with the label smoothing of the config.

        A Transformer smooths in training only, and then the smallest loss that is possible is subtracted. y and y_mask
        are ids and their mask, (target length, batch); the other arguments are those of encode.
        """
        return self._compute("loss", x, x_mask, y, y_mask, training=training)

    def translate(
        self,
        x: Any,
        x_mask: Any,
        beam_size: int | None = None,
        max_length: int | None = None,
        *,
        normalization_alpha: float | None = None,
    ) -> beam.Translations:
        """The best translations that a beam search finds, with Nematus's rules and orders: (sequences, scores).

        What is left out is as the config says; that of Nematus has 5 hypotheses and alpha 0.

        Args:
            x, x_mask: as for encode.
            beam_size: 1 is greedy.
            max_length: Nematus's translation_maxlen. Nematus master, and every version with a Transformer, stops one
                word earlier. In the dialect ``zero`` its decode_length: how many words more than its source, with its
                end, a translation may have.
            normalization_alpha: scores are divided by length^alpha, in zero by ((5 + length) / 6)^alpha.
        """
        run, like = self.runner(training=False)
        ops, config = self.operations, self.config
        ids, mask = self._checked(bind(sentences.source, "translate"), like, x, x_mask)
        lengths = ops.to_host(mask != 0).sum(axis=0)
        plan = beam.plan(config, lengths, beam_size, max_length, normalization_alpha)
        rows, length = len(plan.lengths) * plan.beam_size, plan.steps if ops.cached else 0
        memory, states = run(self.network.begin, ids, mask, beam_size=plan.beam_size, length=length)
        times = count()

        def step(states: list[Array], previous: Any) -> tuple[Any, list[Array]]:
            words = np.full(rows, first_word(config)) if beam.is_first(config, previous) else previous
            log_p, states = run(self.network.step, memory, states, ops.as_ids(words, like), next(times))
            return ops.to_host(log_p), states

        return beam.search(plan, step, states, ops.rows)

    def _compute(
        self, name: str, x: Any, x_mask: Any, *target: Any, training: bool | None = None, **options: Any
    ) -> Array:
        training = self.is_training() if training is None else training
        run, like = self.runner(training=training)
        ids, mask = self._checked(bind(sentences.source, name), like, x, x_mask)
        if name == "encode":
            return run(self.network.encode, ids, mask)
        y, y_mask = self._checked(bind(sentences.target, name, batch=ids.shape[2]), like, *target)
        if name == "logits":
            return run(self.network.score, ids, mask, y, **options)
        return run(self.network.loss, ids, mask, y, y_mask, training=training)

    def _checked(self, check: Callable[..., Any], like: Any, ids: Any, mask: Any) -> tuple[Array, Array]:
        """Ids, checked against the sizes of the vocabularies, and their mask; without a mask all are words."""
        ops = self.operations
        ids, mask = ops.checked(bind(check, config=self.config), ids, mask)
        ids = ops.as_ids(ids, like)
        if mask is None:
            mask = ids != 0 if self.config.rules.is_zero else ids >= 0
        return ids, ops.cast(mask, like)


class RNNSearch(Model):
    """Nematus's attentional encoder-decoder: scores, losses and translations.

    In the dialect ``zero`` it is the RNNSearch of that toolkit, with its names but for the scope. The loss is the mean
    over the words of a sentence, minus the smallest loss that label smoothing leaves. Words of y that are 0 are
    padding, and places that are padding in all sentences are left out, also of the results.

    Source: github.com/EdinburghNLP/nematus: rnn_model.py and beam_search_sampler.py of master, model.py and
    inference.py of v0.3, nmt.py of Theano Nematus; github.com/bzhangGo/zero: rnnsearch.py, search.py.

    Example:
        >>> import numpy as np
        >>> from rmsnorm.nematus import numpy_models
        >>> from rmsnorm.nematus.names import variables
        >>> config = Config(embedding_size=2, state_size=2, source_vocab_sizes=(4,), target_vocab_size=3)
        >>> model = numpy_models.RNNSearch(config, {row.name: np.zeros(row.shape) for row in variables(config)})
        >>> x, y = np.array([[[3], [2], [0]]]), np.array([[1], [0]])
        >>> model.loss(x, np.ones((3, 1)), y, np.ones((2, 1))).round(4)  # 2 log 3
        array([2.1972])
    """

    network: ClassVar[Any] = rnnsearch

    def logits(self, x: Any, x_mask: Any, y: Any, *, stepwise: bool = False, training: bool | None = None) -> Array:
        """Logits of every target word, given the words before it: (target length, batch, vocabulary).

        stepwise: whether to use the rules of decoding where those of scoring differ (dialect ``tensorflow-v0.3``).
        """
        return self._compute("logits", x, x_mask, y, None, stepwise=stepwise, training=training)


class Transformer(Model):
    """Nematus's Transformer: pre-norm, sinusoids for positions, one more norm at the end of each stack.

    Logits and the output of the encoder are batch-major, as in Nematus.

    In the dialect ``zero`` it is the Transformer of that toolkit, or its ReLA Transformer: norms follow the sums. What
    is said of RNNSearch in that dialect holds, but labels are smoothed in training only.

    Source: Nematus master, transformer.py and transformer_inference.py; zero, transformer.py and transformer_rela.py.
    """

    network: ClassVar[Any] = transformer

    def logits(self, x: Any, x_mask: Any, y: Any, *, training: bool | None = None) -> Array:
        """Logits of every target word, given the words before it: (batch, target length, vocabulary)."""
        return self._compute("logits", x, x_mask, y, None, training=training)
