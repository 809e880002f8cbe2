"""Images and their classes: handwritten digits of scikit-learn, the files of MNIST, and those of CIFAR-10."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.files import check_regular
from rmsnorm.specification import errors

Array = np.ndarray[Any, Any]

LARGEST: Final = 2**28  # bytes of an expanded file; MNIST has 47 MB
_MNIST: Final = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte",
                 "t10k-labels-idx1-ubyte")  # fmt: skip
_UNSIGNED_BYTE: Final = 8  # the code of the dtype in an IDX file
CLASSES: Final = 10


class Images(NamedTuple):
    """Training and test images, (count, ...) float32 in [0, 1], and their classes, (count,) int64."""

    train: Array
    train_classes: Array
    test: Array
    test_classes: Array


def digits() -> Images:
    """The 1,797 digits of scikit-learn, 8×8; a fifth of them for the test.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise errors.missing_framework("scikit-learn", "experiments") from None
    images, classes = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, classes = (images[order] / 16).astype(np.float32), classes[order].astype(np.int64)
    test = len(images) // 5
    return Images(images[test:], classes[test:], images[:test], classes[:test])


def mnist(folder: Path) -> Images:
    """The four IDX files of MNIST in a folder, each with .gz or without.

    Raises:
        FileNotFoundError: one is missing.
        ValueError: one is damaged, or images and classes do not fit.
    """
    arrays = [_idx(folder, name, 3 if "images" in name else 1) for name in _MNIST]
    for images, classes, name in zip(arrays[::2], arrays[1::2], _MNIST[::2], strict=True):
        if len(images) != len(classes) or not len(images):
            want = f"{len(classes)} as there are classes, and at least one"
            raise errors.out_of_domain("experiments", f"images in {folder / name}", len(images), want, "copy all again")
        if classes.max() >= CLASSES:
            raise errors.damaged("experiments", folder / name, f"class {classes.max()}", "classes from 0 to 9")
    train, train_classes, test, test_classes = arrays
    if train.shape[1:] != test.shape[1:]:
        want = f"{train.shape[1:]} as for training"
        raise errors.out_of_domain("experiments", "size of the test images", test.shape[1:], want, "copy all again")
    return Images(_flat(train), train_classes.astype(np.int64), _flat(test), test_classes.astype(np.int64))


def _flat(images: Array) -> Array:
    return (images.reshape(len(images), -1) / 255).astype(np.float32)


def _idx(folder: Path, name: str, rank: int) -> Array:
    """The array in an IDX file: bytes 0, 0, dtype, rank; sizes as 4 bytes, highest first; the values."""
    wanted = f"the IDX file {name} of MNIST"
    path = next((path for path in (folder / f"{name}.gz", folder / name) if path.exists()), folder / f"{name}.gz")
    check_regular("experiments", path, wanted)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(LARGEST)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise errors.damaged("experiments", path, error, wanted) from None
    begin = 4 + 4 * rank
    shape = tuple(int.from_bytes(data[first : first + 4], "big") for first in range(4, begin, 4))
    if data[:4] != bytes([0, 0, _UNSIGNED_BYTE, rank]) or len(data) != begin + int(np.prod(shape, dtype=object)):
        raise errors.damaged("experiments", path, f"{len(data)} bytes that begin with {data[:begin].hex()}", wanted)
    return np.frombuffer(data, np.uint8, offset=begin).reshape(shape)
