"""Three beam searches: Nematus's sampler of master, its search of v0.3 and v0.4, and that of zero.

They differ in the hypotheses that they keep. A model is a function ``step(states, ids) -> (log_p, states)``:
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

from rmsnorm import errors
from rmsnorm.nematus.dialects import rules

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

ZERO_END: Final = 2  # the id that ends a sentence in zero

Array: TypeAlias = npt.NDArray[Any]
States: TypeAlias = list[Any]
Step: TypeAlias = Callable[[States, Array | None], tuple[Array, States]]
Rows: TypeAlias = Callable[[Any, Array], Any]

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
    """What a search does.

    Attributes:
        name: ``sampler``, ``costs`` or ``zero``.
        lengths: how long the translations may be, of each sentence.
        end: the id that ends a translation; only zero's is not 0.
        temperature, noise: log-probabilities are those of (logits + Gumbel's noise) / temperature; of zero alone.
        forbidden: what zero adds to the log-probability of an end in the place of the first word.
    """

    name: str
    beam_size: int
    lengths: Array
    alpha: float
    temperature: float
    noise: bool
    forbidden: float

    @property
    def steps(self) -> int:
        """The most steps that there can be."""
        return int(self.lengths.max())


def finite_alpha(op: str, alpha: float) -> float:
    """The alpha of length^alpha.

    Raises:
        ValueError: it is not finite: with NaN no hypothesis is the best one.
    """
    if not math.isfinite(alpha):
        raise errors.out_of_domain(op, "alpha", alpha, "a finite number", "pass 1 or so")
    return alpha


def plan(config: Config, words: Any, beam_size: int | None, max_length: int | None, alpha: float | None) -> Plan:
    """What ``translate`` does with these arguments; None stands for what the config says.

    words: numbers of words of the source sentences, with their ends.

    Raises:
        ValueError: a search cannot be as wide or as long.
    """
    beam_size = config.beam_size if beam_size is None else beam_size
    max_length = config.translation_maxlen if max_length is None else max_length
    for name, value in (("beam_size", beam_size), ("max_length", max_length)):
        if not isinstance(value, int | np.integer) or value < 1:
            raise errors.out_of_domain("translate", name, value, "an integer >= 1", "pass 12 or so")
    words = np.asarray(words)
    lengths = max_length + (words if config.search == "zero" else 0 * words)
    alpha = finite_alpha("translate", config.normalization_alpha if alpha is None else alpha)
    temperature, noise, forbidden = config.beam_temperature, config.beam_noise, config.masked_score
    return Plan(config.search, beam_size, lengths, alpha, temperature, noise, forbidden)


def is_first(config: Config, previous: Any) -> bool:
    """Whether nothing precedes the words of a step. zero thinks so, too, where 0 was chosen for all sentences."""
    return previous is None or (rules(config).pads_with_zero and not previous.any())


def search(plan: Plan, step: Step, states: States, rows: Rows = getitem) -> Translations:
    """Run a search from states with beam_size equal rows for every sentence.

    rows: ``rows(state, indices)`` are the rows of these indices.

    Raises:
        ValueError: the beam is wider than the vocabulary.
    """
    find = {"sampler": _sampler, "costs": _costs, "zero": _zero}[plan.name]
    return find(plan, step, states, rows)


class _Finished:
    """The best hypotheses of every sentence that have ended. ``low`` is the score of an empty place."""

    def __init__(self, batch: int, size: int, low: np.floating[Any]) -> None:
        self.words: Array = np.zeros((batch, size, 0), np.int64)
        self.scores: Array = np.full((batch, size), low)
        self.is_ended: Array = np.zeros((batch, size), bool)
        self.size, self.low = size, low

    def worst(self) -> Array:
        """The lowest score in every sentence of what has ended; low if nothing has."""
        lowest: Array = (self.scores * self.is_ended).min(axis=1)
        return lowest + ~self.is_ended.any(axis=1) * self.low

    def add(self, words: Array, scores: Array, ended: Array) -> None:
        """Takes what has ended of hypotheses that are one word longer, and keeps the best."""
        words = np.concatenate((np.pad(self.words, ((0, 0), (0, 0), (0, 1))), words), axis=1)
        scores = np.concatenate((self.scores, scores + ~ended * self.low), axis=1)
        ended = np.concatenate((self.is_ended, ended), axis=1)
        order = _top(scores, self.size)
        self.words, self.scores, self.is_ended = _take(words, order), _take(scores, order), _take(ended, order)

    def or_else(self, alive: Array, scores: Array) -> tuple[Array, Array]:
        """Words and scores; those of the others in a sentence in which none has ended."""
        any_ended: Array = np.asarray(self.is_ended.any(axis=1))[:, None]
        return np.where(any_ended[:, :, None], self.words, alive), np.where(any_ended, self.scores, scores)


def _sampler(plan: Plan, step: Step, states: States, rows: Rows) -> Translations:
    """Keep finished hypotheses in a list of their own.

    Stops when no sentence can improve, or one word before the longest translation.
    """
    batch, size = len(plan.lengths), plan.beam_size
    row: Array = np.arange(batch)[:, None] * size
    alive: Array = np.zeros((batch, size, 0), np.int64)
    alive_scores = np.zeros((batch, size))
    finished = _Finished(batch, size, np.float64(_LOW))
    for time in range(1, plan.steps):
        if (finished.worst() > alive_scores[:, 0]).all():
            break
        previous = None if time == 1 else alive[:, :, -1].ravel()
        log_p, states = step(states, previous)
        log_p = log_p.reshape(batch, size, -1)
        if previous is not None:
            log_p = np.where(previous.reshape(batch, size, 1) == 0, _NEVER, log_p)
        scores = log_p + alive_scores[:, :, None]
        _check_beam(size, log_p)
        scores = scores[:, 0] if time == 1 else scores.reshape(batch, -1)
        best = _top(scores, size)
        parent, word = np.divmod(best, log_p.shape[-1])
        top_scores = _take(scores, best)
        top = np.concatenate((_take(alive, parent), word[:, :, None]), axis=2)
        ended = word == 0

        order = _top(top_scores + ended * _LOW, size)
        alive, alive_scores = _take(top, order), _take(top_scores, order)
        states = [rows(state, (row + _take(parent, order)).ravel()) for state in states]
        finished.add(top, top_scores, ended)
    sequences, scores = finished.or_else(alive, alive_scores)
    ends = np.concatenate((sequences == 0, np.ones((batch, size, 1), bool)), axis=2)
    lengths = ends.argmax(axis=2) + 1  # the end of sentence counts, even if the search did not reach it
    return _best_first(sequences, scores / lengths**plan.alpha)


def _costs(plan: Plan, step: Step, states: States, rows: Rows) -> Translations:
    """All hypotheses are in one list. A finished one stays at no cost; its score becomes positive, above all others."""
    batch, size = len(plan.lengths), plan.beam_size
    row = np.arange(batch)[:, None] * size
    words = np.zeros((batch, size, 0), np.int64)
    scores = np.tile([0.0] + [_NEVER] * (size - 1), (batch, 1))
    previous = None
    while words.shape[2] < plan.steps and (previous is None or previous.any()):
        log_p, states = step(states, previous)
        log_p = log_p.reshape(batch, size, -1)
        if previous is not None:
            ended = np.full(log_p.shape[-1], _NEVER)
            ended[0] = 0.0
            log_p = np.where(previous.reshape(batch, size, 1) == 0, ended, log_p)
        _check_beam(size, log_p)
        candidates = (log_p + scores[:, :, None]).reshape(batch, -1)
        best = _top(candidates, size)
        parent, word = np.divmod(best, log_p.shape[-1])
        scores = _take(candidates, best)
        scores = np.where(word == 0, np.abs(scores), scores)
        words = np.concatenate((_take(words, parent), word[:, :, None]), axis=2)
        states = [rows(state, (row + parent).ravel()) for state in states]
        previous = word.ravel()
    sequences = np.pad(words, ((0, 0), (0, 0), (0, 1)))  # the end of sentence, even if the search did not reach it
    lengths = sequences.shape[2] - (sequences[:, :, ::-1] != 0).argmax(axis=2) + 1
    lengths = np.where(sequences.any(axis=2), lengths, 1)
    return _best_first(sequences, -np.abs(scores) / lengths**plan.alpha)


def _zero(plan: Plan, step: Step, states: States, rows: Rows) -> Translations:
    """Keep alive hypotheses and finished ones in two lists, ranked by score: log p / ((5 + length) / 6)^alpha.

    Stops when in no sentence an alive one can become better than the worst finished one. float32 as in zero, where
    impossible hypotheses become minus infinity, which decides in what order they come.
    """
    batch, size = len(plan.lengths), plan.beam_size
    row, low = np.arange(batch)[:, None] * size, np.float32(_NEVER)
    rng = np.random.default_rng()
    alive: Array = np.zeros((batch, size, 0), np.int64)
    alive_log_p: Array = np.tile(np.array([0.0] + [low] * (size - 1), np.float32), (batch, 1))
    alive_scores = np.zeros((batch, size), np.float32)
    finished = _Finished(batch, size, low)

    def penalty(length: Any) -> Array:
        return np.power((5 + np.asarray(length, np.float32)) / 6, np.float32(plan.alpha)).astype(np.float32)

    with np.errstate(over="ignore"):
        for time in range(plan.steps):
            if (finished.worst() > alive_log_p[:, 0] / penalty(plan.lengths)).all():
                break
            log_p, states = step(states, alive[:, :, -1].ravel() if time else None)
            log_p = _tempered(plan, log_p.astype(np.float32), rng)
            log_p[:, ZERO_END] += np.float32(plan.forbidden if time == 0 else 0)
            vocabulary = log_p.shape[-1]
            log_p = log_p.reshape(batch, size, vocabulary) + alive_log_p[:, :, None]
            scores = (log_p / penalty(time + 1)).reshape(batch, -1)
            best = _top(scores, 2 * size)
            parent, word = np.divmod(best, vocabulary)
            top_scores = _take(scores, best)
            top = np.concatenate((_take(alive, parent), word[:, :, None]), axis=2)
            ended = (word == ZERO_END) | (plan.lengths <= time)[:, None]

            kept_scores = top_scores + ended * low
            order = _top(kept_scores, size)
            alive, alive_scores = _take(top, order), _take(kept_scores, order)
            alive_log_p = alive_scores * penalty(time + 1)
            states = [rows(state, (row + _take(parent, order)).ravel()) for state in states]
            finished.add(top, top_scores, ended)
    return Translations(*finished.or_else(alive, alive_scores))


def _tempered(plan: Plan, log_p: Array, rng: np.random.Generator) -> Array:
    """log softmax((log_p + noise) / temperature); log_p and logits differ by a constant."""
    if plan.noise:
        log_p = log_p + rng.gumbel(size=log_p.shape).astype(np.float32)
    if plan.noise or plan.temperature != 1:
        log_p = log_p / np.float32(plan.temperature)
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


def _best_first(sequences: Array, scores: Array) -> Translations:
    order = np.argsort(-scores, axis=1, kind="stable")
    return Translations(_take(sequences, order), _take(scores, order))


def _check_beam(size: int, log_p: Array) -> None:
    """The first step fills the beam with different words; with too few words Nematus fails or returns wrong results."""
    if size > log_p.shape[-1]:
        raise errors.out_of_domain(
            "translate", "beam_size", size, f"at most {log_p.shape[-1]}, the target vocabulary", "pass a smaller one"
        )
