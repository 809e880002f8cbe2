"""Nematus's two beam searches: the sampler of master, and the search of v0.3 and v0.4.

They differ in the hypotheses that they keep. A model is a function ``step(states, ids) -> (log_p, states)``:
    ids: (rows,), the words that were just chosen; None before the first word.
    log_p: (rows, vocabulary), a NumPy array.
    states: a list of arrays of any library, whose first axis are rows; ``state[indices]`` must return rows.
Every sentence has beam_size adjacent rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rmsnorm import errors

Array: TypeAlias = npt.NDArray[Any]
States: TypeAlias = list[Any]
Step: TypeAlias = Callable[[States, Array | None], tuple[Array, States]]

_NEVER = np.finfo(np.float32).min.item()  # Nematus's log-probability of an impossible word
_LOW = -1e7  # Nematus's score of an empty place in the beam


class Translations(NamedTuple):
    """The hypotheses of every sentence, best first.

    sequences: ids, (batch, beam, length), up to the end of sentence, which is 0, and then zeros.
    scores: log-probabilities over length^alpha, (batch, beam).
    """

    sequences: Array
    scores: Array


def check(beam_size: int, max_length: int) -> None:
    """Raise ValueError if a search cannot be as wide or as long as this."""
    for name, value in (("beam_size", beam_size), ("max_length", max_length)):
        if not isinstance(value, int | np.integer) or value < 1:
            raise errors.out_of_domain("translate", name, value, "an integer >= 1", "pass 12 or so")


def search(name: str, step: Step, states: States, beam_size: int, max_length: int, alpha: float) -> Translations:
    """Run the search ``sampler`` or ``costs`` from states with beam_size equal rows for every sentence.

    Raises:
        ValueError: the beam is wider than the vocabulary.
    """
    find = _sampler if name == "sampler" else _costs
    sequences, scores = find(step, states, len(states[0]) // beam_size, beam_size, max_length, alpha)
    order = np.argsort(-scores, axis=1, kind="stable")
    return Translations(_take(sequences, order), _take(scores, order))


def _sampler(step: Step, states: States, batch: int, size: int, max_length: int, alpha: float) -> tuple[Array, Array]:
    """Keep finished hypotheses in a list of their own.

    Stops when no sentence can improve, or after max_length - 1 words.
    """
    row: Array = np.arange(batch)[:, None] * size
    alive: Array = np.zeros((batch, size, 0), np.int64)
    alive_scores = np.zeros((batch, size))
    finished = np.zeros((batch, size, 0), np.int64)
    finished_scores = np.full((batch, size), _LOW)
    is_finished: Array = np.zeros((batch, size), bool)
    for time in range(1, max_length):
        worst = (finished_scores * is_finished).min(axis=1) + np.where(is_finished.any(axis=1), 0, _LOW)
        if (worst > alive_scores[:, 0]).all():
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
        states = [state[(row + _take(parent, order)).ravel()] for state in states]

        finished = np.concatenate((np.pad(finished, ((0, 0), (0, 0), (0, 1))), top), axis=1)
        finished_scores = np.concatenate((finished_scores, top_scores + ~ended * _LOW), axis=1)
        is_finished = np.concatenate((is_finished, ended), axis=1)
        order = _top(finished_scores, size)
        finished, finished_scores = _take(finished, order), _take(finished_scores, order)
        is_finished = _take(is_finished, order)
    any_finished: Array = np.asarray(is_finished.any(axis=1))[:, None]
    sequences = np.where(any_finished[:, :, None], finished, alive)
    ends = np.concatenate((sequences == 0, np.ones((batch, size, 1), bool)), axis=2)
    lengths = ends.argmax(axis=2) + 1  # the end of sentence counts, even if the search did not reach it
    return sequences, np.where(any_finished, finished_scores, alive_scores) / lengths**alpha


def _costs(step: Step, states: States, batch: int, size: int, max_length: int, alpha: float) -> tuple[Array, Array]:
    """All hypotheses are in one list. A finished one stays at no cost; its score becomes positive, above all others."""
    row = np.arange(batch)[:, None] * size
    words = np.zeros((batch, size, 0), np.int64)
    scores = np.tile([0.0] + [_NEVER] * (size - 1), (batch, 1))
    previous = None
    while words.shape[2] < max_length and (previous is None or previous.any()):
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
        states = [state[(row + parent).ravel()] for state in states]
        previous = word.ravel()
    sequences = np.pad(words, ((0, 0), (0, 0), (0, 1)))  # the end of sentence, even if the search did not reach it
    lengths = sequences.shape[2] - (sequences[:, :, ::-1] != 0).argmax(axis=2) + 1
    lengths = np.where(sequences.any(axis=2), lengths, 1)
    return sequences, -np.abs(scores) / lengths**alpha


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


def _check_beam(size: int, log_p: Array) -> None:
    """The first step fills the beam with different words; with too few words Nematus fails or returns wrong results."""
    if size > log_p.shape[-1]:
        raise errors.out_of_domain(
            "translate", "beam_size", size, f"at most {log_p.shape[-1]}, the target vocabulary", "pass a smaller one"
        )
