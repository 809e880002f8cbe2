"""Translates and scores lines of words with a model; batches, order and output format are those of Nematus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import chain, islice, zip_longest
from typing import Any, Final, TypeAlias

import numpy as np

from rmsnorm.nematus.beam import finite_alpha
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.vocabulary import Vocabulary, batch
from rmsnorm.specification import errors

Progress = Callable[[int, int | None], None]
Row: TypeAlias = tuple[int, tuple[str, ...]]  # the number of a line, and the texts that belong together
Rows: TypeAlias = list[Row]
_SORTED: Final = 20  # the number of batches that are sorted by length together


def translate(
    model: Any, config: Config, lines: Iterable[str], sources: Sequence[Vocabulary], target: Vocabulary, *,
    beam_size: int | None = None, max_length: int | None = None, alpha: float | None = None,
    n_best: bool = False, batch_size: int | None = None, on_progress: Progress | None = None,
) -> Iterator[str]:  # fmt: skip
    """The best translation of every line, or all hypotheses of the beam with their scores, as soon as they are there.

    With n_best, ``line ||| words ||| score`` for every hypothesis. Of lines without a length, as from a pipe, a batch
    begins when its last line has come. batch_size is by default 80, in the dialect ``zero`` its eval_batch_size; zero
    drops empty lines, here their translations are empty. on_progress gets how many lines are done, and of how many.
    """
    options = {"beam_size": beam_size, "max_length": max_length, "normalization_alpha": alpha}

    def answers(rows: Rows) -> Iterator[list[str]]:
        x, x_mask = batch([line for _, (line,) in rows], sources)
        sequences, scores = model.translate(x, x_mask, **options)
        values = -scores if config.search == "costs" else scores  # v0.3 and v0.4 write costs
        for (row, _), beam, beam_values in zip(rows, sequences, values, strict=True):
            translations = [_words(target, config, sequence) for sequence in beam]
            pairs = zip(translations, beam_values, strict=True)
            yield [f"{row} ||| {words} ||| {_number(value)}" for words, value in pairs] if n_best else translations[:1]

    count = len(lines) if isinstance(lines, Sized) else None
    texts = ((line,) for line in lines)
    return _in_order(config, texts, count, batch_size, answers, config.rules.is_zero, on_progress)


def score(
    model: Any, config: Config, lines: Iterable[str], targets: Iterable[str], sources: Sequence[Vocabulary],
    target: Vocabulary, *, alpha: float = 0.0, batch_size: int | None = None, on_progress: Progress | None = None,
) -> Iterator[str]:  # fmt: skip
    """-log p of every target line given its source line, divided by length^alpha; in zero also by the length."""
    finite_alpha("score", alpha)

    def answers(rows: Rows) -> Iterator[list[str]]:
        x, x_mask = batch([line for _, (line, _) in rows], sources)
        y, y_mask = batch([line for _, (_, line) in rows], [target])
        for loss in model.loss(x, x_mask, y[0], y_mask) / y_mask.sum(axis=0) ** alpha:
            yield [_number(loss)]

    count = None
    if isinstance(lines, Sized) and isinstance(targets, Sized):
        count = len(lines)
        if lines and count != len(targets):
            want = f"{count} lines, as the source has"
            raise errors.out_of_domain("score", "the target", len(targets), want, "align the files")
    pairs = _pairs(lines, targets) if count != 0 else iter(())
    return _in_order(config, pairs, count, batch_size, answers, False, on_progress)


def _pairs(lines: Iterable[str], targets: Iterable[str]) -> Iterator[tuple[str, ...]]:
    for number, pair in enumerate(zip_longest(lines, targets)):
        if None in pair:
            longer, ended = ("source", "target") if pair[1] is None else ("target", "source")
            want = f"more lines, as the {longer} has"
            raise errors.out_of_domain("score", f"the {ended}", number, want, "align the files")
        yield pair


def _in_order(
    config: Config, texts: Iterator[tuple[str, ...]], count: int | None, size: int | None,
    answers: Callable[[Rows], Iterator[list[str]]], drops_empty: bool, on_progress: Progress | None,
) -> Iterator[str]:  # fmt: skip
    """What is answered to every line, in order, as soon as it is there; with drops_empty nothing to empty ones."""
    report = on_progress or (lambda done, total: None)
    done: dict[int, list[str]] = {}
    written = finished = 0

    def asked() -> Iterator[Row]:
        nonlocal finished
        for row, line in enumerate(texts):
            if drops_empty and not line[0].split():
                done[row] = [""]
                finished += 1
            else:
                yield row, line

    batches = _batches_of_zero if config.rules.is_zero else _batches_of_nematus
    for rows in chain(batches(config, asked(), count, size), ([],)):
        if rows:
            report(finished, count)
            done.update(zip((row for row, _ in rows), answers(rows), strict=True))
            finished += len(rows)
        while written in done:
            yield from done.pop(written)
            written += 1
    if not finished:
        raise errors.out_of_domain("port", "the source", [], "at least one line", "is the file empty?")
    report(finished, count)


def _batches_of_nematus(config: Config, rows: Iterator[Row], count: int | None, size: int | None) -> Iterator[Rows]:
    """Lines of about the same length; where others may still have to be written, those that have come."""
    size = size or 80
    while together := list(islice(rows, size if count is None else size * _SORTED)):
        yield from _parts(together, size, lambda row: len(row[1][0].split()))


def _batches_of_zero(config: Config, rows: Iterator[Row], count: int | None, size: int | None) -> Iterator[Rows]:
    """The batches of zero, on which its translations depend: batches that are too small wait for more lines."""

    def option(name: str, default: float, least: float) -> float:
        value = config.options.get(name, default)
        if not isinstance(value, int | float) or not least <= value:
            raise errors.out_of_domain("port", f"{name} in the options", value, f"a number >= {least}", "mend it")
        return value

    def longest(row: Row) -> int:
        return max(len(line.split()) for line in row[1])

    size = size or int(option("eval_batch_size", 32, 1))
    least, buffered = size * option("data_leak_ratio", 0.5, 0), option("buffer_size", 100, 1)
    waiting: Rows = []
    for row in rows:
        waiting.append(row)
        if len(waiting) >= buffered:
            batches = list(_parts(waiting, size, longest))
            waiting = [row for part in batches if len(part) < least for row in part]
            yield from (part for part in batches if len(part) >= least)
    yield from _parts(waiting, size, longest)


def _parts(rows: Rows, size: int, length: Callable[[Row], int]) -> Iterator[Rows]:
    """Batches of rows in the order of their lengths."""
    order = sorted(rows, key=length)
    for first in range(0, len(order), size):
        yield order[first : first + size]


def _words(target: Vocabulary, config: Config, sequence: Any) -> str:
    """The words of a sequence; like Nematus with a space before the end of sentence, which has no word."""
    words = target.words(sequence)
    return f"{words} " if words and not config.rules.is_zero and target.end in sequence else words


def _number(value: Any) -> str:
    return str(np.float32(value))
