"""Colour images of 32×32: the archive of CIFAR-10, or digits in colour, and their whitening."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from experiments.images import CLASSES, Images, digits
from rmsnorm.files import check_regular, reading

Array = np.ndarray[Any, Any]

ARCHIVE: Final = "cifar-10-binary.tar.gz"
SIDE: Final = 32
_RECORD: Final = 1 + 3 * SIDE**2  # bytes
_TRAIN: Final = [f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6)]
_TEST: Final = ["cifar-10-batches-bin/test_batch.bin"]
_LARGEST: Final = 2**26  # bytes of a file in the archive; those of CIFAR-10 have 31 MB
_WANTED: Final = "the archive of CIFAR-10 in binary form"
_SCALE: Final = 2  # of a digit of 8×8 in an image
_CANVAS: Final = 16  # pixels of a side of such an image
_NOISE: Final = 0.1  # the largest brightness of its background


def cifar(folder: Path) -> Images:
    """The images in cifar-10-binary.tar.gz: 3,073 bytes each, the class and then the planes of red, green and blue.

    Raises:
        FileNotFoundError: the archive is not in the folder.
        ValueError: it is damaged.
    """
    path = folder / ARCHIVE
    check_regular("experiments", path, _WANTED)
    with reading("experiments", path, _WANTED), tarfile.open(path) as archive:
        train, test = (np.concatenate([_read(archive, name) for name in names]) for names in (_TRAIN, _TEST))
    (train, train_classes), (test, test_classes) = map(_split, (train, test))
    return Images(train, train_classes, test, test_classes)


def _read(archive: tarfile.TarFile, name: str) -> Array:
    entry = archive.getmember(name)
    file = archive.extractfile(entry) if entry.isfile() and entry.size <= _LARGEST else None
    data = np.frombuffer(file.read() if file else b"", np.uint8)
    if not data.size or data.size % _RECORD or data[::_RECORD].max() >= CLASSES:
        raise ValueError(f"{name} has {data.size} bytes, not a class from 0 to 9 and {_RECORD - 1} bytes an image")
    return data.reshape(-1, _RECORD)


def _split(records: Array) -> tuple[Array, Array]:
    images = records[:, 1:].reshape(-1, 3, SIDE, SIDE)
    return (images / 255).astype(np.float32), records[:, 0].astype(np.int64)


def digits_in_colour(count: int) -> Images:
    """scikit-learn's digits, twice as large, on faint noise, in a colour that says nothing of the class.

    The first ``count`` of the training images, and all test images.
    """
    plain = digits()
    draw = np.random.default_rng(0)

    def painted(images: Array) -> Array:
        large = images.reshape(-1, 8, 8).repeat(_SCALE, axis=1).repeat(_SCALE, axis=2)
        size = large.shape[1]
        canvas = draw.uniform(0, _NOISE, (len(large), 3, _CANVAS, _CANVAS)).astype(np.float32)
        colours = draw.uniform(0.3, 1, (len(large), 3, 1, 1)).astype(np.float32)
        corners = draw.integers(0, _CANVAS - size + 1, (len(large), 2))
        for image, ink, colour, (top, left) in zip(canvas, large, colours, corners, strict=True):
            window = image[:, top : top + size, left : left + size]
            window += ink * (colour - window)
        return canvas

    train, test = painted(plain.train[:count]), painted(plain.test)
    return Images(train, plain.train_classes[:count], test, plain.test_classes)


def whitened(images: Images, regularization: float) -> Images:
    """ZCA: x V (s + r)^(-1/2) V^T for x without the mean, s and V the variances and axes of the training images."""
    flat = images.train.reshape(len(images.train), -1).astype(np.float64)
    mean = flat.mean(0)
    flat -= mean
    if len(flat) < flat.shape[1]:  # all other axes have no variance
        _, singular, axes = np.linalg.svd(flat, full_matrices=False)
        variances = singular**2 / len(flat)
    else:
        variances, columns = np.linalg.eigh(flat.T @ flat / len(flat))
        variances, axes = variances.clip(0), columns.T
    rest = regularization**-0.5
    factors = (variances + regularization) ** -0.5 - rest

    def white(part: Array) -> Array:
        x = part.reshape(len(part), -1) - mean
        return (x * rest + ((x @ axes.T) * factors) @ axes).astype(np.float32).reshape(part.shape)

    return images._replace(train=white(images.train), test=white(images.test))
