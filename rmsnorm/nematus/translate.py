"""Lines of words through a model: translations and scores, batched, ordered and written as Nematus does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from rmsnorm import errors
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.vocabulary import END, Vocabulary, batch

Progress = Callable[[int, int], None]

_SORTED: Final = 20  # so many batches are read, and sorted by length, together


def translate(
    model: Any,
    config: Config,
    lines: Sequence[str],
    sources: Sequence[Vocabulary],
    target: Vocabulary,
    *,
    beam_size: int,
    max_length: int | None = None,
    alpha: float = 0.0,
    n_best: bool = False,
    batch_size: int = 80,
    on_progress: Progress | None = None,
) -> list[str]:
    """The best translation of every line; or of every line all that the beam holds, with their scores.

    Args:
        model: of any wing.
        lines: words separated by spaces, their factors by ``|``.
        sources, target: as ``vocabularies`` gives them.
        beam_size, max_length, alpha: as for ``model.translate``.
        n_best: ``number ||| words ||| score`` for each in the beam, numbered from 0.
        batch_size: sentences at once.

    Raises:
        ValueError: there is no line, or an argument or a word does not fit.
    """
    options = {"beam_size": beam_size, "max_length": max_length, "normalization_alpha": alpha}
    found: list[list[str]] = [[] for _ in lines]
    for rows in _batches(lines, batch_size, on_progress):
        x, x_mask = batch([lines[row] for row in rows], sources)
        sequences, scores = model.translate(x, x_mask, **options)
        costs = -scores if config.search == "costs" else scores  # of which v0.3 and v0.4 write the costs
        for row, beam, values in zip(rows, sequences, costs, strict=True):
            words = [_words(target, sequence) for sequence in beam]
            found[row] = [
                f"{row} ||| {each} ||| {_number(value)}" for each, value in zip(words, values, strict=True)
            ] if n_best else words[:1]  # fmt: skip
    return [line for each in found for line in each]


def score(
    model: Any,
    lines: Sequence[str],
    targets: Sequence[str],
    sources: Sequence[Vocabulary],
    target: Vocabulary,
    *,
    alpha: float = 0.0,
    batch_size: int = 80,
    on_progress: Progress | None = None,
) -> list[str]:
    """-log p of every target line given its source line, over its length^alpha.

    Args: as for translate; ``targets`` are as many lines.

    Raises:
        ValueError: as translate; also when there are not as many lines of each.
    """
    if lines and len(lines) != len(targets):
        raise errors.out_of_domain(
            "score", "the target", len(targets), f"{len(lines)} lines, as the source has", "align the files"
        )
    found = [""] * len(lines)
    for rows in _batches(lines, batch_size, on_progress):
        x, x_mask = batch([lines[row] for row in rows], sources)
        y, y_mask = batch([targets[row] for row in rows], [target])
        losses = model.loss(x, x_mask, y[0], y_mask) / y_mask.sum(axis=0) ** alpha
        for row, loss in zip(rows, losses, strict=True):
            found[row] = _number(loss)
    return found


def _batches(lines: Sequence[str], size: int, on_progress: Progress | None) -> Iterator[list[int]]:
    """Numbers of lines of about the same length, batch by batch."""
    if not lines:
        raise errors.out_of_domain("port", "the source", [], "at least one line", "is the file empty?")
    lengths = [len(line.split()) for line in lines]
    done = 0
    for start in range(0, len(lines), size * _SORTED):
        order = sorted(range(start, min(start + size * _SORTED, len(lines))), key=lengths.__getitem__)
        for first in range(0, len(order), size):
            if on_progress is not None:
                on_progress(done, len(lines))
            yield order[first : first + size]
            done += len(order[first : first + size])
    if on_progress is not None:
        on_progress(done, len(lines))


def _words(target: Vocabulary, sequence: Any) -> str:
    """With a space before the end of sentence, which has no word."""
    words = target.words(sequence)
    return f"{words} " if words and END in sequence else words


def _number(value: Any) -> str:
    return str(np.float32(value))
