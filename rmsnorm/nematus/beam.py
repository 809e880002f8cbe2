"""The beam search of Nematus's master, of its v0.3 and v0.4, and of zero: they differ in the hypotheses that they keep.

A model is a function ``step(states, ids) -> (log_p, states)``:
    ids: (rows,), the words that were just chosen; None before the first word.
    log_p: (rows, vocabulary), a NumPy array.
    states: a list of arrays of any library, whose first axis are rows; a function takes rows of them.
Every sentence has beam_size adjacent rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import getitem
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rmsnorm.nematus.dialects import RULES
from rmsnorm.specification import errors

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

ZERO_END: Final = RULES["zero"].end  # the id that ends a sentence in zero

Array: TypeAlias = npt.NDArray[Any]
States: TypeAlias = list[Any]
Step: TypeAlias = Callable[[States, Array | None], tuple[Array, States]]

_NEVER = np.finfo(np.float32).min.item()  # Nematus's log-probability of an impossible word
_LOW = -1e7  # Nematus's score of an empty place in the beam


class Translations(NamedTuple):
    """The hypotheses of every sentence, best first.

    sequences: ids, (batch, beam, length), up to the end of sentence, which is 0 and in zero 2, and then zeros.
    scores: log-probabilities over length^alpha, in zero over ((5 + length) / 6)^alpha, (batch, beam).
    """

    sequences: Array
    scores: Array


class Plan(NamedTuple):
    """What a search does with a model of this config."""

    config: Config
    beam_size: int
    lengths: Array  # the most words of each translation
    alpha: float

    @property
    def steps(self) -> int:
        """The most steps that there can be."""
        return int(self.lengths.max())


def finite_alpha(op: str, alpha: float) -> float:
    """The alpha of length^alpha; ValueError if it is not finite: with NaN no hypothesis is the best one."""
    if not math.isfinite(alpha):
        raise errors.out_of_domain(op, "alpha", alpha, "a finite number", "pass 1 or so")
    return alpha


def plan(config: Config, words: Any, beam_size: int | None, max_length: int | None, alpha: float | None) -> Plan:
    """What ``translate`` does for sources of so many words, with their ends; None stands for what the config says."""
    beam_size = config.beam_size if beam_size is None else beam_size
    max_length = config.translation_maxlen if max_length is None else max_length
    for name, value in (("beam_size", beam_size), ("max_length", max_length)):
        if not isinstance(value, int | np.integer) or value < 1:
            raise errors.out_of_domain("translate", name, value, "an integer >= 1", "pass 12 or so")
    lengths = max_length + np.asarray(words) * config.rules.is_zero
    alpha = finite_alpha("translate", config.normalization_alpha if alpha is None else alpha)
    return Plan(config, beam_size, lengths, alpha)


def is_first(config: Config, previous: Any) -> bool:
    """Whether nothing precedes the words of a step. zero thinks so, too, where 0 was chosen for all sentences."""
    return previous is None or (config.rules.is_zero and not previous.any())


class _Finished:
    """The best hypotheses of every sentence that have ended. ``low`` is the score of an empty place."""

    def __init__(self, words: Array, low: np.floating[Any]) -> None:
        self.words, self.low = words, low
        self.scores: Array = np.full(words.shape[:2], low)
        self.is_ended: Array = np.zeros(words.shape[:2], bool)

    def worst(self) -> Array:
        """The lowest score in every sentence of what has ended; low if nothing has."""
        lowest: Array = (self.scores * self.is_ended).min(axis=1)
        return lowest + ~self.is_ended.any(axis=1) * self.low

    def add(self, words: Array, scores: Array, ended: Array) -> None:
        """Keep the best of these and of what is here."""
        words = np.concatenate((np.pad(self.words, ((0, 0), (0, 0), (0, 1))), words), axis=1)
        scores = np.concatenate((self.scores, scores + ~ended * self.low), axis=1)
        ended = np.concatenate((self.is_ended, ended), axis=1)
        best = _top(scores, self.words.shape[1])
        self.words, self.scores, self.is_ended = _take(words, best), _take(scores, best), _take(ended, best)


def search(plan: Plan, step: Step, states: States, rows: Callable[[Any, Array], Any] = getitem) -> Translations:
    """Search from states with beam_size equal rows a sentence; ``rows(state, indices)`` are those of these indices.

    - ``sampler``: finished hypotheses have a list of their own. It stops when no sentence can improve, or one word
      before the longest.
    - ``costs``: all hypotheses are in one list. A finished one stays at no cost; its score becomes positive, above all
      others.
    - ``zero``: a list of their own, too, and twice as many candidates. Scores are log p / ((5 + length) / 6)^alpha in
      float32, as in zero, where impossible hypotheses become minus infinity, which decides in what order they come.
    """
    kind, end, size, batch = plan.config.search, plan.config.rules.end, plan.beam_size, len(plan.lengths)
    dtype = np.float32 if kind == "zero" else np.float64
    alive: Array = np.zeros((batch, size, 0), np.int64)  # the words of the hypotheses that become longer
    finished = _Finished(alive, dtype(_NEVER if kind == "zero" else _LOW))
    # Before the first word the hypotheses of a sentence are equal, and all but one are impossible.
    total: Array = np.tile(np.array([0.0] + [_NEVER] * (size - 1), dtype), (batch, 1))
    scores, stays = np.zeros_like(total), 0.0 if kind == "costs" else _NEVER  # what an end adds to what has ended

    def penalty(length: Any) -> Any:
        if kind != "zero":
            return 1.0
        return np.power((5 + np.asarray(length, np.float32)) / 6, np.float32(plan.alpha)).astype(np.float32)

    for time in range(plan.steps - (kind == "sampler")):
        last = alive[:, :, -1] if time else None
        if kind == "costs":
            is_over = last is not None and not last.any()
        else:
            is_over = (finished.worst() > total[:, 0] / penalty(plan.lengths)).all()
        if is_over:
            break
        log_p, states = step(states, None if last is None else last.ravel())
        if size > log_p.shape[-1] and kind != "zero":  # the first step needs different words
            want = f"at most {log_p.shape[-1]}, the target vocabulary"
            raise errors.out_of_domain("translate", "beam_size", size, want, "pass a smaller one")
        log_p = _tempered(plan.config, log_p.reshape(batch, size, -1).astype(dtype))
        if kind == "zero":
            log_p[:, :, end] += dtype(plan.config.masked_score if time == 0 else 0)  # no end as first word
        elif last is not None:  # nothing but ends follow those that have ended
            after_end = np.append(stays, np.full(log_p.shape[-1] - 1, _NEVER))
            log_p = np.where(last[:, :, None] == end, after_end, log_p)
        with np.errstate(over="ignore"):
            candidates = ((log_p + total[:, :, None]) / penalty(time + 1)).reshape(batch, -1)
            best = _top(candidates, 2 * size if kind == "zero" else size)
            parent, word = np.divmod(best, log_p.shape[-1])
            words, best = np.concatenate((_take(alive, parent), word[:, :, None]), axis=2), _take(candidates, best)
            ended = word == end
            if kind == "costs":
                total = np.where(ended, np.abs(best), best)
            else:
                ended |= (kind == "zero") & (plan.lengths <= time)[:, None]
                finished.add(words, best, ended)
                order = _top(best + ended * finished.low, size)
                scores = _take(best + ended * finished.low if kind == "zero" else best, order)
                total, words, parent = scores * penalty(time + 1), _take(words, order), _take(parent, order)
        alive, indices = words, (np.arange(batch)[:, None] * size + parent).ravel()
        states = [rows(state, indices) for state in states]
    if kind == "costs":
        sequences, scores = np.pad(alive, ((0, 0), (0, 0), (0, 1))), total
    else:  # those that are alive where none has ended
        any_ended: Array = np.asarray(finished.is_ended.any(axis=1))[:, None]
        sequences = np.where(any_ended[:, :, None], finished.words, alive)
        scores = np.where(any_ended, finished.scores, scores)
    if kind == "zero":
        return Translations(sequences, scores)
    ends = np.concatenate((sequences == end, np.ones((*scores.shape, 1), bool)), axis=2)
    lengths = ends.argmax(axis=2) + 1  # the end of sentence counts, even if the search did not reach it
    scores = -np.abs(scores) / lengths**plan.alpha
    order = np.argsort(-scores, axis=1, kind="stable")
    return Translations(_take(sequences, order), _take(scores, order))


def _tempered(config: Config, log_p: Array) -> Array:
    """log softmax(log_p / temperature); log_p and logits differ by a constant."""
    if config.beam_temperature != 1:
        log_p = log_p / np.float32(config.beam_temperature)
        log_p = log_p - log_p.max(axis=-1, keepdims=True)
        log_p = log_p - np.log(np.exp(log_p).sum(axis=-1, keepdims=True))
    return log_p


def _top(scores: Array, size: int) -> Array:
    """Indices of the largest scores, in order; of equal scores the first one first. Sorts only possible candidates."""
    indices = np.empty((len(scores), size), np.int64)
    for i, (row, smallest) in enumerate(zip(scores, np.partition(scores, -size, axis=1)[:, -size], strict=True)):
        candidates = np.flatnonzero(~(row < smallest))
        indices[i] = candidates[np.argsort(-row[candidates], kind="stable")[:size]]
    return indices


def _take(values: Array, order: Array) -> Array:
    """The entries of these hypotheses of every sentence."""
    return np.take_along_axis(values, order.reshape(*order.shape, *[1] * (values.ndim - 2)), axis=1)
