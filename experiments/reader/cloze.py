"""Questions about documents in which entities are markers: generated, or from the files of CNN and Daily Mail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.files import read_text
from rmsnorm.specification import errors

OP: Final = "experiments"
MARKER: Final = "@entity"
SPECIAL: Final = ("</s>", "<unk>")  # ids 0 and 1
_WANTED: Final = "a question of CNN or Daily Mail: URL, document, query, answer and entities with empty lines between"
_ENTITIES, _FACTS = 6, 3
_VERBS: Final = "saw bought sold".split()  # noqa: SIM905
_THINGS: Final = "house car boat dog".split()  # noqa: SIM905

Words = list[str]


class Question(NamedTuple):
    """A document, a query and its answer, as ids."""

    document: np.ndarray
    query: np.ndarray
    answer: int


class Cloze(NamedTuple):
    """Questions to learn from and questions to be tested with.

    Attributes:
        entities: ids of the markers.
        words: size of the vocabulary.
    """

    train: list[Question]
    test: list[Question]
    entities: np.ndarray
    words: int


def generated(count: int, tested: int) -> Cloze:
    """Documents of three facts of a few words, as "@entity7 met the dog .", and one of them as the question.

    The markers of a document are drawn anew, so that only the document tells the answer.
    """
    rng = np.random.default_rng(0)

    def question() -> tuple[Words, Words, str]:
        markers = [f"{MARKER}{number}" for number in rng.permutation(_ENTITIES)[:_FACTS]]
        things, verbs = rng.permutation(_THINGS)[:_FACTS], rng.choice(_VERBS, _FACTS)
        facts = [[marker, verb, thing] for marker, verb, thing in zip(markers, verbs, things, strict=True)]
        answer, *rest = facts[rng.integers(_FACTS)]
        return [word for fact in facts for word in fact], ["@placeholder", *rest], answer

    texts = [question() for _ in range(count + tested)]
    return _encoded(texts[:count], texts[count:], size=10**6)


def read(folder: Path, count: int, tested: int, longest: int, vocabulary: int) -> Cloze:
    """The questions in the folders training and validation of the release, in the order of their names.

    Args:
        count, tested: how many at most; 0 are all.
        longest: words of a document that are read.
        vocabulary: how many words; the markers and the most frequent others. The rest are unknown.

    Raises:
        FileNotFoundError: a folder has no questions.
        ValueError: a file is no question.
    """
    base = folder / "questions" if (folder / "questions").is_dir() else folder
    texts = [
        list(_questions(base / name, most, longest)) for name, most in (("training", count), ("validation", tested))
    ]
    return _encoded(texts[0], texts[1], size=vocabulary)


def _questions(folder: Path, most: int, longest: int) -> Iterator[tuple[Words, Words, str]]:
    paths = sorted(folder.glob("*.question"))
    if not paths:
        raise FileNotFoundError(
            f"{OP}: {folder} has no *.question, expected the release of CNN or Daily Mail; see --data"
        )
    for path in paths[: most or None]:
        parts = read_text(OP, path, _WANTED).split("\n\n")
        if len(parts) < 4 or not all(part.split() for part in parts[1:4]) or not parts[3].startswith(MARKER):
            raise errors.damaged(OP, path, "parts are missing", _WANTED)
        yield parts[1].split()[:longest], parts[2].split(), parts[3].strip()


def _encoded(train: list[Any], test: list[Any], size: int) -> Cloze:
    counts: Counter[str] = Counter()
    for document, query, answer in train:
        counts.update((*document, *query, answer))
    markers = sorted({word for text in (train, test) for question in text for word in _markers(question)})
    others = [word for word, _ in counts.most_common() if not word.startswith(MARKER)]
    names = [*SPECIAL, *markers, *others][: max(size, len(SPECIAL) + len(markers))]
    ids = {name: number for number, name in enumerate(names)}

    def encode(words: Iterable[str]) -> np.ndarray:
        return np.array([ids.get(word, 1) for word in words], np.int32)

    def questions(text: list[Any]) -> list[Question]:
        return [Question(encode(document), encode(query), ids[answer]) for document, query, answer in text]

    return Cloze(questions(train), questions(test), encode(markers), len(names))


def _markers(question: tuple[Words, Words, str]) -> Iterator[str]:
    document, query, answer = question
    return (word for word in (*document, *query, answer) if word.startswith(MARKER))


def batch(questions: list[Question]) -> tuple[np.ndarray, ...]:
    """Ids and masks, (words, batch), of documents and queries, and the answers, (batch)."""
    arrays: list[np.ndarray] = []
    for texts in ([question.document for question in questions], [question.query for question in questions]):
        ids = np.zeros((max(map(len, texts)), len(texts)), np.int64)
        mask = np.zeros(ids.shape, np.float32)
        for column, text in enumerate(texts):
            ids[: len(text), column], mask[: len(text), column] = text, 1
        arrays += [ids, mask]
    return *arrays, np.array([question.answer for question in questions])
