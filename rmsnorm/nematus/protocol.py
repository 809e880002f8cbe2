"""The interface of Nematus's cells and models, written once: ``rmsnorm.nematus.numpy``, ``torch``, ``tf``, ``flax``.

The four packages have these names, with these arguments in this order. The classes check the arguments and search for
translations; each package computes. An array is an array of the framework; the models take anything that the framework
makes an array of. Sequences are time-major, (length, batch, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial as bind
from itertools import count
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from rmsnorm.nematus import beam, sentences
from rmsnorm.nematus.cells import PARTIAL, CellNorm, authors_gru
from rmsnorm.nematus.config import Bias, Config
from rmsnorm.nematus.dialects import first_word, rules

Array: TypeAlias = Any


class Cells:
    """The recurrent cells over whole sequences: functions of each package. The dtype is that of the arguments.

    PyTorch, Keras and Flax have layers of them, too: ``NematusGRU``, ``GRU``, ``LSTM``.

    Args:
        run: computes Nematus's GRU or the LSTM: run(``gru`` or ``lstm``, parameters, x, the first states and the mask,
            norm=, partial=, and for the GRU biases=, masking=, reverse=).
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def nematus_gru(
        self,
        x: Array,
        h0: Array,
        parameters: Mapping[str, Array],
        *,
        biases: Sequence[Bias] = ("input",),
        mask: Array | None = None,
        masking: Literal["zero", "carry"] = "zero",
        reverse: bool = False,
        norm: CellNorm = "none",
        partial: float = PARTIAL,
    ) -> Array:
        """Nematus's GRU with deep transition.

            r, u = sigmoid(norm(h U) + norm(x W + b))        h' = u h + (1 - u) tanh(r norm(h Ux) + norm(x Wx + bx))

        Args:
            x: (length, batch, features).
            h0: (batch, state).
            parameters: under Nematus's names, ``gru0/state_to_gates`` and so on; the transitions ``gru1/...`` have no
                input.
            biases: where each GRU of a step adds its bias: inside the norm of the projected ``input`` or ``state``,
                ``outside`` of both norms, or ``none``. One entry for each GRU.
            mask: (length, batch), 1 where there is a word.
            masking: ``zero`` multiplies the state by the mask; ``carry`` keeps the old state, as Theano does.
            reverse: from the last word to the first.
            norm: ``none``, ``layer``, ``rms``, or ``prms`` over the first ``partial`` of the features.

        Returns:
            The states, (length, batch, state).

        Raises:
            ValueError: norm is none of these.
            KeyError: a parameter is missing.

        Source: Nematus master, layers.py; the dialects differ in ``biases`` and ``masking``. For what is
        made of it see rmsnorm.nematus.protocol.RNNSearch.

        Example:
            >>> import numpy as np
            >>> from rmsnorm.nematus.numpy import nematus_gru
            >>> weights = {"gru0/state_to_gates": np.ones((1, 2)), "gru0/state_to_proposal": np.ones((1, 1))}
            >>> weights |= {"gru0/input_to_gates": np.ones((1, 2)), "gru0/input_to_proposal": np.ones((1, 1))}
            >>> weights |= {"gru0/gates_bias": np.zeros(2), "gru0/proposal_bias": np.zeros(1)}
            >>> nematus_gru(np.zeros((2, 1, 1)), np.ones((1, 1)), weights).round(4).ravel()
            array([0.8988, 0.802 ])
        """
        options = {"biases": tuple(biases), "masking": masking, "reverse": reverse}
        return self.run("gru", parameters, x, h0, mask, norm=norm, partial=partial, **options)

    def gru(
        self,
        x: Array,
        h0: Array,
        parameters: Mapping[str, Array],
        *,
        mask: Array | None = None,
        norm: CellNorm = "none",
        partial: float = PARTIAL,
    ) -> Array:
        """The GRU of the authors' Theano code: ``gru``, ``lngru``, ``rlngru``.

            r, u = sigmoid(norm(h U; s3) + norm(x W + b; s1))
            h' = u h + (1 - u) tanh(r norm(h Ux; s4) + norm(x Wx + bx; s2)),    then m h' + (1 - m) h

        Args:
            x, h0, norm, partial: as for nematus_gru, see rmsnorm.nematus.protocol.Cells.
            parameters: W, U, b, Wx, Ux, bx; with a norm the gains s1 to s4; with LayerNorm also the offsets b1 to b4.
            mask: m, (length, batch), any numbers.

        Returns, Raises: as nematus_gru.

        Source: Zhang & Sennrich 2019, layers.py. It is Nematus's GRU under other names.

        Example:
            >>> import numpy as np
            >>> from rmsnorm.nematus.numpy import gru
            >>> weights = {"W": np.ones((1, 2)), "U": np.ones((1, 2)), "b": np.zeros(2)}
            >>> weights |= {"Wx": np.ones((1, 1)), "Ux": np.ones((1, 1)), "bx": np.zeros(1)}
            >>> gru(np.zeros((2, 1, 1)), np.ones((1, 1)), weights, mask=np.array([[1.0], [0.0]])).round(4).ravel()
            array([0.8988, 0.8988])
        """
        own = authors_gru(parameters, norm)
        return self.nematus_gru(x, h0, own, mask=mask, masking="carry", norm=norm, partial=partial)

    def lstm(
        self,
        x: Array,
        h0: Array,
        c0: Array,
        parameters: Mapping[str, Array],
        *,
        mask: Array | None = None,
        norm: CellNorm = "none",
        partial: float = PARTIAL,
    ) -> tuple[Array, Array]:
        """The LSTM of the authors' Theano code: ``lstm``, ``lnlstm``, ``rlnlstm``.

            i, f, o, g = norm(x W + b; s1) + norm(h U; s2) + b,    sigmoid of i, f, o and tanh of g
            c' = f c + i g,    then m c' + (1 - m) c;    h' = o tanh(norm(c'; s3)),    then m h' + (1 - m) h

        b is added twice, as in the authors' code.

        Args:
            x, norm, partial: as for nematus_gru, see rmsnorm.nematus.protocol.Cells.
            h0, c0: (batch, state).
            parameters: W, U, b; with a norm the gains s1 to s3; with LayerNorm also the offsets b1 to b3.
            mask: m, (length, batch), any numbers.

        Returns:
            (h, c), both (length, batch, state).

        Raises:
            ValueError, KeyError: as nematus_gru.

        Source: Zhang & Sennrich 2019, README and layers.py.

        Example:
            >>> import numpy as np
            >>> from rmsnorm.nematus.numpy import lstm
            >>> weights = {"W": np.ones((1, 4)), "U": np.ones((1, 4)), "b": np.zeros(4)}
            >>> h, c = lstm(np.zeros((1, 1, 1)), np.ones((1, 1)), np.ones((1, 1)), weights)
            >>> h.round(4).item(), c.round(4).item()
            (0.6277, 1.2878)
        """
        h, c = self.run("lstm", parameters, x, h0, c0, mask, norm=norm, partial=partial)
        return h, c


class Model:
    """What RNNSearch and the Transformer have in common: scores, losses and translations.

    Masks, states and probabilities have the dtype of the parameters; NumPy computes in float64. The loss is computed in
    at least float32.

    In training the models drop out what Nematus drops out, at the rates of the config, but for those of NumPy, which
    have no gradients. PyTorch and Flax have a training mode (new models are in evaluation mode); ``training`` says
    otherwise for one call. ``translate`` never drops anything.

    Args:
        config: of the model; ``config.dialect`` names the version whose rules it follows.
        parameters: arrays under the names of Nematus master, as ``rmsnorm.nematus.load`` returns them. The model has
            their dtype, and in PyTorch their device.

    Attributes:
        network: the module with the arithmetic: ``encode``, ``score``, ``loss``, ``begin`` and ``step``.
        operations: what the framework has of ``rmsnorm.nematus.models.operations``.
    """

    network: ClassVar[Any]
    operations: ClassVar[Any]
    config: Config

    def __init__(self, config: Config, parameters: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def runner(self, *, training: bool) -> tuple[Callable[..., Any], Any]:
        """What calls a function of the network with the parameters as they are now, and one parameter.

        training: whether the function drops out.
        """
        raise NotImplementedError

    def is_training(self) -> bool:
        """Whether the model is in training mode."""
        return False

    def encode(self, x: Any, x_mask: Any, *, training: bool | None = None) -> Array:
        """What the decoder attends to.

        (source length, batch, 2 state_size) of RNNSearch, (batch, source length, state_size) of a Transformer.

        Args:
            x: ids, (factors, source length, batch).
            x_mask: 1 on words and on the end of sentence, 0 after it, (source length, batch).
            training: whether to drop out; by default as the mode of the model says.

        Raises:
            TypeError, ValueError: an array has a wrong shape or dtype, or an id is not in the vocabulary. The values of
                ids and masks are not checked while a compiler or a tracer is at work.
        """
        return self._compute("encode", x, x_mask, training=training)

    def loss(self, x: Any, x_mask: Any, y: Any, y_mask: Any, *, training: bool | None = None) -> Array:
        """Cross-entropy of each sentence, summed over its words: (batch,), with the label smoothing of the config.

        A Transformer smooths in training only, and then the smallest loss that is possible is subtracted.

        Args:
            x, x_mask, y, training: as for logits.
            y_mask: as x_mask, (target length, batch).

        Raises:
            TypeError, ValueError: as encode.
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
        seed: int | None = None,
    ) -> beam.Translations:
        """The best translations that a beam search finds, with Nematus's rules and orders.

        Args:
            x, x_mask: as for encode.
            beam_size: 1 is greedy; by default that of the config, which is 5 for Nematus.
            max_length: Nematus's translation_maxlen, by default that of the config. Nematus master, and every version
                with a Transformer, stops one word earlier. In the dialect ``zero`` its decode_length: how many words
                more than its source, with its end, a translation may have.
            normalization_alpha: scores are divided by length^alpha, in zero by ((5 + length) / 6)^alpha; by default
                that of the config, which is 0 for Nematus.
            seed: of the noise of zero's search, which is used where the config has ``beam_noise``; by default that of
                the config. The same seed gives the same translations of the same batch.

        Returns:
            (sequences, scores), best first, as NumPy arrays.

        Raises:
            TypeError, ValueError: as encode; also if beam_size, max_length or seed is out of its domain.
        """
        run, like = self.runner(training=False)
        ops, config = self.operations, self.config
        ids, mask = self._checked(bind(sentences.source, "translate"), like, x, x_mask)
        lengths = ops.to_host(mask != 0).sum(axis=0)
        plan = beam.plan(config, ops.to_host(ids), lengths, beam_size, max_length, normalization_alpha, seed)
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
            mask = ids != 0 if rules(self.config).pads_with_zero else ids >= 0
        return ids, ops.cast(mask, like)


class RNNSearch(Model):
    """Nematus's attentional encoder-decoder: scores, losses and translations.

    In the dialect ``zero`` it is the RNNSearch of that toolkit, with its names but for the scope. The loss is the mean
    over the words of a sentence, minus the smallest loss that label smoothing leaves. Words of y that are 0 are
    padding, and places that are padding in all sentences are left out, also of the results.

    Source: github.com/EdinburghNLP/nematus: rnn_model.py and beam_search_sampler.py of master, model.py and
    inference.py of v0.3, nmt.py of Theano Nematus; github.com/bzhangGo/zero: rnnsearch.py, search.py.
    """

    def logits(self, x: Any, x_mask: Any, y: Any, *, stepwise: bool = False, training: bool | None = None) -> Array:
        """Logits of every target word, given the words before it: (target length, batch, vocabulary).

        Args:
            x, x_mask, training: as for encode.
            y: ids, (target length, batch).
            stepwise: whether to use the rules of decoding where those of scoring differ (dialect
                ``tensorflow-v0.3``).

        Raises:
            TypeError, ValueError: as encode.
        """
        return self._compute("logits", x, x_mask, y, None, stepwise=stepwise, training=training)


class Transformer(Model):
    """Nematus's Transformer: pre-norm, sinusoids for positions, one more norm at the end of each stack.

    Logits and the output of the encoder are batch-major, as in Nematus.

    In the dialect ``zero`` it is the Transformer of that toolkit, or its ReLA Transformer: norms follow the sums. What
    is said of RNNSearch in that dialect holds, but labels are smoothed in training only.

    Source: Nematus master, transformer.py and transformer_inference.py; zero, transformer.py and transformer_rela.py.
    """

    def logits(self, x: Any, x_mask: Any, y: Any, *, training: bool | None = None) -> Array:
        """Logits of every target word, given the words before it: (batch, target length, vocabulary).

        Args, Raises: as RNNSearch.logits.
        """
        return self._compute("logits", x, x_mask, y, None, training=training)
