"""Translates and scores lines of words with a model; batches, order and output format are those of Nematus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from rmsnorm import errors
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.vocabulary import Vocabulary, batch

Progress = Callable[[int, int], None]

_SORTED: Final = 20  # the number of batches that are sorted by length together


def translate(
    model: Any,
    config: Config,
    lines: Sequence[str],
    sources: Sequence[Vocabulary],
    target: Vocabulary,
    *,
    beam_size: int | None = None,
    max_length: int | None = None,
    alpha: float | None = None,
    n_best: bool = False,
    batch_size: int | None = None,
    on_progress: Progress | None = None,
) -> list[str]:
    """The best translation of every line, or all hypotheses of the beam with their scores.

    Args:
        model: RNNSearch or Transformer of any framework.
        lines: words separated by spaces, their factors by ``|``.
        sources, target: as ``vocabularies`` returns them.
        beam_size, max_length, alpha: as for ``model.translate``.
        n_best: whether to return ``line ||| words ||| score`` for every hypothesis; lines are numbered from 0.
        batch_size: sentences in a batch; by default 80, in the dialect ``zero`` its eval_batch_size. zero drops empty
            lines; here their translations are empty.

    Raises:
        ValueError: there is no line, or an argument or a word is not valid.
    """
    options = {"beam_size": beam_size, "max_length": max_length, "normalization_alpha": alpha}
    translations: list[list[str]] = [[] for _ in lines]
    if config.dialect == "zero":
        translations = [[] if line.split() else [""] for line in lines]
    for rows in _batches(config, [lines], batch_size, on_progress):
        x, x_mask = batch([lines[row] for row in rows], sources)
        sequences, scores = model.translate(x, x_mask, **options)
        values = -scores if config.search == "costs" else scores  # v0.3 and v0.4 write costs
        for row, beam, beam_values in zip(rows, sequences, values, strict=True):
            hypotheses = [_words(target, config, sequence) for sequence in beam]
            translations[row] = hypotheses[:1]
            if n_best:
                pairs = zip(hypotheses, beam_values, strict=True)
                translations[row] = [f"{row} ||| {words} ||| {_number(value)}" for words, value in pairs]
    return [line for hypotheses in translations for line in hypotheses]


def score(
    model: Any,
    config: Config,
    lines: Sequence[str],
    targets: Sequence[str],
    sources: Sequence[Vocabulary],
    target: Vocabulary,
    *,
    alpha: float = 0.0,
    batch_size: int | None = None,
    on_progress: Progress | None = None,
) -> list[str]:
    """-log p of every target line given its source line, divided by length^alpha; in zero also by the length.

    Args: as for translate; ``targets`` has as many lines as ``lines``.

    Raises:
        ValueError: as translate; also if the numbers of lines differ.
    """
    if lines and len(lines) != len(targets):
        raise errors.out_of_domain(
            "score", "the target", len(targets), f"{len(lines)} lines, as the source has", "align the files"
        )
    scores = [""] * len(lines)
    for rows in _batches(config, [lines, targets], batch_size, on_progress):
        x, x_mask = batch([lines[row] for row in rows], sources)
        y, y_mask = batch([targets[row] for row in rows], [target])
        losses = model.loss(x, x_mask, y[0], y_mask) / y_mask.sum(axis=0) ** alpha
        for row, loss in zip(rows, losses, strict=True):
            scores[row] = _number(loss)
    return scores


def _batches(
    config: Config, texts: Sequence[Sequence[str]], size: int | None, on_progress: Progress | None
) -> Iterator[list[int]]:
    """The numbers of the lines of every batch; lines of a batch have about the same length."""
    count = len(texts[0])
    if not count:
        raise errors.out_of_domain("port", "the source", [], "at least one line", "is the file empty?")
    order = _batches_of_zero if config.dialect == "zero" else _batches_of_nematus
    done = 0
    for rows in order(config, texts, size):
        if on_progress is not None:
            on_progress(done, count)
        yield rows
        done += len(rows)
    if on_progress is not None:
        on_progress(count, count)


def _batches_of_nematus(config: Config, texts: Sequence[Sequence[str]], size: int | None) -> Iterator[list[int]]:
    size = size or 80
    lengths = [len(line.split()) for line in texts[0]]
    for start in range(0, len(lengths), size * _SORTED):
        order = sorted(range(start, min(start + size * _SORTED, len(lengths))), key=lengths.__getitem__)
        yield from _parts(order, size)


def _batches_of_zero(config: Config, texts: Sequence[Sequence[str]], size: int | None) -> Iterator[list[int]]:
    """The batches of zero, on which its translations depend: batches that are too small wait for more lines."""
    size = size or int(_option(config, "eval_batch_size", 32, 1))
    least, buffered = size * _option(config, "data_leak_ratio", 0.5, 0), _option(config, "buffer_size", 100, 1)
    lengths = [max(len(line.split()) for line in lines) for lines in zip(*texts, strict=True)]
    waiting: list[int] = []
    for row in range(len(lengths)):
        waiting += [row] if all(text[row].split() for text in texts) or len(texts) > 1 else []
        if len(waiting) >= buffered:
            batches = list(_parts(sorted(waiting, key=lengths.__getitem__), size))
            waiting = [row for rows in batches if len(rows) < least for row in rows]
            yield from (rows for rows in batches if len(rows) >= least)
    yield from _parts(sorted(waiting, key=lengths.__getitem__), size)


def _option(config: Config, name: str, default: float, least: float) -> float:
    value = config.options.get(name, default)
    if not isinstance(value, int | float) or not least <= value:
        raise errors.out_of_domain("port", f"{name} in the options", value, f"a number >= {least}", "mend it")
    return value


def _parts(order: list[int], size: int) -> Iterator[list[int]]:
    for first in range(0, len(order), size):
        yield order[first : first + size]


def _words(target: Vocabulary, config: Config, sequence: Any) -> str:
    """The words of a sequence; like Nematus with a space before the end of sentence, which has no word."""
    words = target.words(sequence)
    return f"{words} " if words and config.dialect != "zero" and target.end in sequence else words


def _number(value: Any) -> str:
    return str(np.float32(value))
