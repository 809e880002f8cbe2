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
from zlib import crc32

import numpy as np
import numpy.typing as npt

from rmsnorm.nematus.dialects import rules
from rmsnorm.nematus.rules import RULES
from rmsnorm.specification import errors

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

ZERO_END: Final = RULES["zero"].end  # the id that ends a sentence in zero

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
    """What a search does with a model of this config. ``lengths`` says how long the translations may be, of each.

    seed: of the noise.
    """

    config: Config
    beam_size: int
    lengths: Array
    alpha: float
    seed: tuple[int, ...]

    @property
    def steps(self) -> int:
        """The most steps that there can be."""
        return int(self.lengths.max())


def finite_alpha(op: str, alpha: float) -> float:
    """The alpha of length^alpha; ValueError if it is not finite: with NaN no hypothesis is the best one."""
    if not math.isfinite(alpha):
        raise errors.out_of_domain(op, "alpha", alpha, "a finite number", "pass 1 or so")
    return alpha


def plan(
    config: Config,
    ids: Any,
    words: Any,
    beam_size: int | None,
    max_length: int | None,
    alpha: float | None,
    seed: int | None = None,
) -> Plan:
    """What ``translate`` does for sources of so many words, with their ends; None stands for what the config says.

    The noise depends on the ids, too, so that batches with the same seed have noise of their own.
    """
    beam_size = config.beam_size if beam_size is None else beam_size
    max_length = config.translation_maxlen if max_length is None else max_length
    seed = config.beam_seed if seed is None else seed
    for name, value, least in (("beam_size", beam_size, 1), ("max_length", max_length, 1), ("seed", seed, 0)):
        if not isinstance(value, int | np.integer) or value < least:
            raise errors.out_of_domain("translate", name, value, f"an integer >= {least}", "pass 12 or so")
    words = np.asarray(words)
    lengths = max_length + words * rules(config).source_lengthens
    alpha = finite_alpha("translate", config.normalization_alpha if alpha is None else alpha)
    return Plan(config, beam_size, lengths, alpha, (seed, crc32(np.asarray(ids, np.int64).tobytes())))


def is_first(config: Config, previous: Any) -> bool:
    """Whether nothing precedes the words of a step. zero thinks so, too, where 0 was chosen for all sentences."""
    return previous is None or (rules(config).pads_with_zero and not previous.any())


def search(plan: Plan, step: Step, states: States, rows: Rows = getitem) -> Translations:
    """Search from states with beam_size equal rows a sentence; ``rows(state, indices)`` are those of these indices."""
    find = {"sampler": _sampler, "costs": _costs, "zero": _zero}[plan.config.search]
    return find(plan, _Alive(plan, step, states, rows))


class _Alive:
    """The hypotheses of every sentence that a search makes longer: their words, (batch, beam, time), and states."""

    def __init__(self, plan: Plan, step: Step, states: States, rows: Rows) -> None:
        self.words: Array = np.zeros((len(plan.lengths), plan.beam_size, 0), np.int64)
        self.plan, self.step, self.states, self.rows = plan, step, states, rows

    @property
    def last(self) -> Array | None:
        """The last words, (batch, beam); None before the first ones."""
        return self.words[:, :, -1] if self.words.shape[2] else None

    def log_p(self) -> Array:
        """The log-probabilities of the words that may follow, (batch, beam, vocabulary)."""
        batch, size, _ = self.words.shape
        log_p, self.states = self.step(self.states, None if self.last is None else self.last.ravel())
        if size > log_p.shape[-1] and not rules(self.plan.config).wide_beams:  # the first step needs different words
            want = f"at most {log_p.shape[-1]}, the target vocabulary"
            raise errors.out_of_domain("translate", "beam_size", size, want, "pass a smaller one")
        return log_p.reshape(batch, size, -1)

    def longer(self, scores: Array, size: int) -> tuple[Array, Array, Array]:
        """The best hypotheses that are one word longer, by scores like log_p: words, scores, what they continue."""
        flat = scores.reshape(len(scores), -1)
        best = _top(flat, size)
        parent, word = np.divmod(best, scores.shape[-1])
        return np.concatenate((_take(self.words, parent), word[:, :, None]), axis=2), _take(flat, best), parent

    def become(self, words: Array, parent: Array) -> None:
        """Go on with these hypotheses."""
        batch, size, _ = self.words.shape
        order = (np.arange(batch)[:, None] * size + parent).ravel()
        self.words, self.states = words, [self.rows(state, order) for state in self.states]


class _Finished:
    """The best hypotheses of every sentence that have ended. ``low`` is the score of an empty place."""

    def __init__(self, alive: _Alive, low: np.floating[Any]) -> None:
        self.words, self.low = alive.words, low
        self.scores: Array = np.full(alive.words.shape[:2], low)
        self.is_ended: Array = np.zeros(alive.words.shape[:2], bool)

    def worst(self) -> Array:
        """The lowest score in every sentence of what has ended; low if nothing has."""
        lowest: Array = (self.scores * self.is_ended).min(axis=1)
        return lowest + ~self.is_ended.any(axis=1) * self.low

    def divide(self, alive: _Alive, words: Array, scores: Array, parent: Array, ended: Array) -> Array:
        """Keep the best of what has ended of hypotheses that are one word longer; the order of those that go on."""
        order = _top(scores + ended * self.low, alive.plan.beam_size)
        alive.become(_take(words, order), _take(parent, order))
        words = np.concatenate((np.pad(self.words, ((0, 0), (0, 0), (0, 1))), words), axis=1)
        scores = np.concatenate((self.scores, scores + ~ended * self.low), axis=1)
        ended = np.concatenate((self.is_ended, ended), axis=1)
        best = _top(scores, self.words.shape[1])
        self.words, self.scores, self.is_ended = _take(words, best), _take(scores, best), _take(ended, best)
        return order

    def or_else(self, alive: Array, scores: Array) -> tuple[Array, Array]:
        """Words and scores; those of the others in a sentence in which none has ended."""
        any_ended: Array = np.asarray(self.is_ended.any(axis=1))[:, None]
        return np.where(any_ended[:, :, None], self.words, alive), np.where(any_ended, self.scores, scores)


def _sampler(plan: Plan, alive: _Alive) -> Translations:
    """Finished ones have a list of their own. Stops when no sentence can improve, or one word before the longest."""
    scores: Array = np.zeros((len(plan.lengths), plan.beam_size))
    finished = _Finished(alive, np.float64(_LOW))
    for _ in range(1, plan.steps):
        if (finished.worst() > scores[:, 0]).all():
            break
        candidates = alive.log_p() + scores[:, :, None]
        if alive.last is None:  # all hypotheses are equal
            candidates = candidates[:, :1]
        else:  # nothing follows those that have ended
            candidates = np.where(alive.last[:, :, None] == 0, _NEVER + scores[:, :, None], candidates)
        words, best, parent = alive.longer(candidates, plan.beam_size)
        scores = _take(best, finished.divide(alive, words, best, parent, words[:, :, -1] == 0))
    sequences, scores = finished.or_else(alive.words, scores)
    ends = np.concatenate((sequences == 0, np.ones((*scores.shape, 1), bool)), axis=2)
    lengths = ends.argmax(axis=2) + 1  # the end of sentence counts, even if the search did not reach it
    return _best_first(sequences, scores / lengths**plan.alpha)


def _costs(plan: Plan, alive: _Alive) -> Translations:
    """All hypotheses are in one list. A finished one stays at no cost; its score becomes positive, above all others."""
    scores = _first_alone(plan)
    while alive.words.shape[2] < plan.steps and (alive.last is None or alive.last.any()):
        log_p = alive.log_p()
        if alive.last is not None:
            stays = np.append(0.0, np.full(log_p.shape[-1] - 1, _NEVER))
            log_p = np.where(alive.last[:, :, None] == 0, stays, log_p)
        words, best, parent = alive.longer(log_p + scores[:, :, None], plan.beam_size)
        scores = np.where(words[:, :, -1] == 0, np.abs(best), best)
        alive.become(words, parent)
    sequences = np.pad(alive.words, ((0, 0), (0, 0), (0, 1)))  # with the end, even if the search did not reach it
    lengths = sequences.shape[2] - (sequences[:, :, ::-1] != 0).argmax(axis=2) + 1
    lengths = np.where(sequences.any(axis=2), lengths, 1)
    return _best_first(sequences, -np.abs(scores) / lengths**plan.alpha)


def _zero(plan: Plan, alive: _Alive) -> Translations:
    """Keep alive hypotheses and finished ones in two lists, ranked by score: log p / ((5 + length) / 6)^alpha.

    Stops when in no sentence an alive one can become better than the worst finished one. float32 as in zero, where
    impossible hypotheses become minus infinity, which decides in what order they come.
    """
    low, rng = np.float32(_NEVER), np.random.default_rng(plan.seed)
    total: Array = _first_alone(plan).astype(np.float32)
    scores: Array = np.zeros_like(total)
    finished = _Finished(alive, low)

    def penalty(length: Any) -> Array:
        return np.power((5 + np.asarray(length, np.float32)) / 6, np.float32(plan.alpha)).astype(np.float32)

    with np.errstate(over="ignore"):
        for time in range(plan.steps):
            if (finished.worst() > total[:, 0] / penalty(plan.lengths)).all():
                break
            log_p = _tempered(plan.config, alive.log_p().astype(np.float32), rng)
            log_p[:, :, ZERO_END] += np.float32(plan.config.masked_score if time == 0 else 0)  # no end as first word
            words, best, parent = alive.longer((log_p + total[:, :, None]) / penalty(time + 1), 2 * plan.beam_size)
            ended = (words[:, :, -1] == ZERO_END) | (plan.lengths <= time)[:, None]
            scores = _take(best + ended * low, finished.divide(alive, words, best, parent, ended))
            total = scores * penalty(time + 1)
    return Translations(*finished.or_else(alive.words, scores))


def _first_alone(plan: Plan) -> Array:
    """The scores before the first word: the hypotheses of a sentence are equal, and all but one are impossible."""
    return np.tile([0.0] + [_NEVER] * (plan.beam_size - 1), (len(plan.lengths), 1))


def _tempered(config: Config, log_p: Array, rng: np.random.Generator) -> Array:
    """log softmax((log_p + noise) / temperature), with Gumbel's noise; log_p and logits differ by a constant."""
    if config.beam_noise:
        log_p = log_p + rng.gumbel(size=log_p.shape).astype(np.float32)
    if config.beam_noise or config.beam_temperature != 1:
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


def _best_first(sequences: Array, scores: Array) -> Translations:
    order = np.argsort(-scores, axis=1, kind="stable")
    return Translations(_take(sequences, order), _take(scores, order))
