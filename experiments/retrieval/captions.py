"""Images as features, with five captions an image: generated, or from files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.files import check_regular, read_text, reading
from rmsnorm.specification import errors

OP: Final = "experiments"
CAPTIONS: Final = 5  # an image
UNKNOWN: Final = 1  # 0 ends a caption; the authors' program counts words from 2
_FEATURES: Final = "features of images, an array (images, features) of NumPy (*.npy)"
_CONCEPTS: Final = 40
_SHOWN: Final = (3, 6)  # concepts of an image, from and below
_WORDS: Final = 3  # for a concept


class Pairs(NamedTuple):
    """Images and captions: those of image i are 5 i to 5 i + 4.

    Attributes:
        images: features (images, features), float32.
        captions: ids, without the end.
    """

    images: np.ndarray
    captions: list[np.ndarray]


class Dataset(NamedTuple):
    """Pairs to learn from and pairs to be tested with; ``words`` is the size of the vocabulary."""

    train: Pairs
    test: Pairs
    words: int


def generated(images: int, tested: int, features: int) -> Dataset:
    """Images that show some of forty concepts; a caption names most of those of its image, in any order.

    The features are a random linear map of the concepts, and noise; every concept has three words.
    """
    rng = np.random.default_rng(0)
    directions = rng.standard_normal((_CONCEPTS, features))
    shown, captions = np.zeros((images + tested, _CONCEPTS)), []
    for row in shown:
        concepts = rng.permutation(_CONCEPTS)[: rng.integers(*_SHOWN)]
        row[concepts] = rng.uniform(0.5, 1.5, len(concepts))
        for _ in range(CAPTIONS):
            named = rng.permutation(concepts)[: len(concepts) - rng.integers(2)]
            captions.append(2 + named * _WORDS + rng.integers(_WORDS, size=len(named)))
    values = (shown @ directions + 1.0 * rng.standard_normal((len(shown), features))).astype(np.float32)
    train = Pairs(values[:images], captions[: CAPTIONS * images])
    return Dataset(train, Pairs(values[images:], captions[CAPTIONS * images :]), words=2 + _CONCEPTS * _WORDS)


def read(folder: Path) -> Dataset:
    """Features in train.npy and test.npy, in the folder or in images/<network>; captions in train.txt and test.txt.

    A caption is a line of words with spaces between; five lines an image, in the order of the images. All words of the
    training captions are known.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, holds NaN or objects, or captions and images do not fit.
    """
    texts = {
        name: read_text(OP, folder / f"{name}.txt", "captions, one a line").splitlines() for name in ("train", "test")
    }
    counts = Counter(word for line in texts["train"] for word in line.split())
    ids = {word: 2 + number for number, (word, _) in enumerate(counts.most_common())}
    train, test = (_pairs(folder, name, lines, ids) for name, lines in texts.items())
    if train.images.shape[1] != test.images.shape[1]:
        want = f"{train.images.shape[1]} as for training"
        raise errors.out_of_domain(OP, "features of the test images", test.images.shape[1], want, "use one network")
    return Dataset(train, test, words=2 + len(ids))


def _pairs(folder: Path, name: str, lines: list[str], ids: dict[str, int]) -> Pairs:
    path = next(iter(sorted(folder.glob(f"images/*/{name}.npy"))), folder / f"{name}.npy")
    check_regular(OP, path, _FEATURES)
    with reading(OP, path, _FEATURES):
        images: Any = np.load(path, mmap_mode="r", allow_pickle=False)
        if images.ndim != 2 or images.dtype.kind != "f" or not images.size:
            raise ValueError(f"an array {images.dtype}{list(images.shape)}")
        for part in np.array_split(images, 1 + images.size // 2**24):
            if not np.isfinite(part).all():
                raise ValueError("it holds NaN or infinite values")
            if not part.any(axis=1).all():  # the embedding of zeros is 0 / 0
                raise ValueError("all features of an image are 0")
    if len(lines) != CAPTIONS * len(images):
        want = f"{CAPTIONS * len(images)}, five for every image in {path.name}"
        raise errors.out_of_domain(
            OP, f"lines of {folder / name}.txt", len(lines), want, "are they of the same images?"
        )
    return Pairs(images, [np.array([ids.get(word, UNKNOWN) for word in line.split()], np.int64) for line in lines])


def batch(captions: list[np.ndarray], multiple: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Ids and masks (words, batch), with an end that counts as a word; lengths are multiples, for few shapes."""
    longest = 1 + max(map(len, captions))
    ids = np.zeros((-(-longest // multiple) * multiple, len(captions)), np.int32)
    mask = np.zeros(ids.shape, np.float32)
    for column, caption in enumerate(captions):
        ids[: len(caption), column], mask[: len(caption) + 1, column] = caption, 1
    return ids, mask
