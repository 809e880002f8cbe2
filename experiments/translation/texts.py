"""Pairs of sentences with Nematus's dictionaries: text files, or a generated language and its translation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from rmsnorm.files import read_text
from rmsnorm.nematus.vocabulary import Vocabulary, read_entries, read_vocabulary, write_entries
from rmsnorm.specification import errors

FILES: Final = ("train.src", "train.trg", "test.src", "test.trg")
SPECIAL: Final = ("<EOS>", "<GO>", "<UNK>")
TESTED: Final = 200  # generated sentences of the test
_SHARED: Final = 0.5  # of the words of a text are in a vocabulary that fits, or of its own words in the text
_ENDS: Final = ("<EOS>", "eos", "</s>")

_SYLLABLES: Final = ("ba", "de", "fi", "go", "lu", "ma", "ne", "ri", "so", "tu")
_NOUNS, _ADJECTIVES, _VERBS, _PREPOSITIONS = 12, 6, 6, 3


class Texts(NamedTuple):
    """Lines of both languages, and their vocabularies."""

    source: Sequence[str]
    target: Sequence[str]
    test_source: Sequence[str]
    test_target: Sequence[str]
    vocabularies: tuple[Vocabulary, Vocabulary]


def read(folder: Path, words: int) -> Texts:
    """train.src, train.trg, test.src and test.trg in a folder, one sentence a line, words separated by spaces.

    The dictionaries are train.src.json and train.trg.json, which are made where they are missing, as Nematus makes
    them: the most frequent words first, after <EOS>, <GO> and <UNK>.

    Raises:
        FileNotFoundError: a text is missing.
        ValueError: the numbers of lines differ, a text is empty or no UTF-8, or a dictionary does not fit its text.
    """
    texts = [read_text("experiments", folder / name, "sentences, one a line").splitlines() for name in FILES]
    for source, target, name in zip(texts[::2], texts[1::2], FILES[1::2], strict=True):
        if len(source) != len(target) or not source:
            want = f"{len(source)} as its source has, and at least one"
            raise errors.out_of_domain("experiments", f"lines in {folder / name}", len(target), want, "align the files")
    first, second = (_vocabulary(folder / name, lines, words) for name, lines in zip(FILES[:2], texts[:2], strict=True))
    return Texts(texts[0], texts[1], texts[2], texts[3], (first, second))


def _vocabulary(path: Path, lines: Sequence[str], words: int) -> Vocabulary:
    file = path.with_name(f"{path.name}.json")
    counts = Counter(word for line in lines for word in line.split())
    if not file.exists():
        write_entries(file, _entries(counts, words), "tensorflow")
    vocabulary = read_vocabulary(file, len(read_entries(file, "tensorflow")), SPECIAL.index("<UNK>"))
    shared = counts.keys() & vocabulary.ids.keys()
    of_text = sum(counts[word] for word in shared) / max(1, counts.total())
    fits = max(of_text, len(shared) / max(1, len(vocabulary.ids) - len(SPECIAL))) >= _SHARED
    if not fits or vocabulary.named[0] not in _ENDS:
        got, want = f"{of_text:.0%} of the words of {path.name}", f"at least {_SHARED:.0%}, or that share of its own"
        want += f", and {' or '.join(_ENDS)} as 0"
        raise errors.out_of_domain("experiments", f"what {file} knows", got, want, "delete it to make it new")
    return vocabulary


def _entries(counts: Counter[str], words: int) -> dict[str, int]:
    frequent = sorted(counts, key=lambda word: (-counts[word], word))
    own = [word for word in frequent if word not in SPECIAL][: max(0, words - len(SPECIAL))]
    return {word: index for index, word in enumerate([*SPECIAL, *own])}


def generated(count: int) -> Texts:
    """Sentences of a small grammar and their translation, for training and, all different from these, for the test.

    A sentence is subject, verb, object and perhaps a place; a noun phrase is an article, up to two adjectives and a
    noun. The translation puts the place first and the verb last, adjectives in reverse order after their noun, and the
    article into the ending of every word of its phrase. The way back is as plain, so nothing is lost.
    """
    draw = np.random.default_rng(0)
    pairs: dict[str, str] = {}
    while len(pairs) < count + TESTED:
        source, target = _sentence(draw)
        pairs[source] = target
    sources, targets = list(pairs), list(pairs.values())
    vocabularies = [
        Vocabulary(_entries(Counter(word for line in lines[:count] for word in line.split()), 10**6), unknown=2)
        for lines in (sources, targets)
    ]
    return Texts(sources[:count], targets[:count], sources[count:], targets[count:], (vocabularies[0], vocabularies[1]))


def _sentence(draw: np.random.Generator) -> tuple[str, str]:
    subject, thing, place = (_phrase(draw) for _ in range(3))
    verb, preposition = int(draw.integers(_VERBS)), int(draw.integers(_PREPOSITIONS))
    source, target = [*subject[0], _word("ve", verb), *thing[0]], [*thing[1], *subject[1], _word("ka", verb)]
    if draw.random() < 0.5:
        source, target = [*source, _word("pe", preposition), *place[0]], [*place[1], _word("ko", preposition), *target]
    return " ".join(source), " ".join(target)


def _phrase(draw: np.random.Generator) -> tuple[list[str], list[str]]:
    article, noun = int(draw.integers(3)), int(draw.integers(_NOUNS))
    adjectives = draw.integers(_ADJECTIVES, size=draw.integers(3)).tolist()
    ending = ("", "m", "sh")[article]
    source = [("a", "the", "that")[article], *(_word("ja", index) for index in adjectives), _word("no", noun)]
    target = [_word("hu", noun) + ending, *(_word("wi", index) + ending for index in reversed(adjectives))]
    return source, target


def _word(kind: str, index: int) -> str:
    return kind + _SYLLABLES[index // len(_SYLLABLES)] + _SYLLABLES[index % len(_SYLLABLES)]
