"""Colour images of 32×32: the archive of CIFAR-10, or digits in colour, and their whitening."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from experiments.images import CLASSES, Images, digits
from experiments.pickles import load_pickle
from rmsnorm.files import check_regular, reading

Array = np.ndarray[Any, Any]

ARCHIVE: Final = "cifar-10-python.tar.gz"
SIDE: Final = 32
_TRAIN: Final = tuple(f"cifar-10-batches-py/data_batch_{number}" for number in range(1, 6))
_TEST: Final = "cifar-10-batches-py/test_batch"
_LARGEST: Final = 2**26  # bytes of a file in the archive; those of CIFAR-10 have 31 MB
_WANTED: Final = "the archive of CIFAR-10 for Python"
_SCALE: Final = 2  # of a digit of 8×8 in an image
_CANVAS: Final = 16  # pixels of a side of such an image
_NOISE: Final = 0.1  # the largest brightness of its background


def cifar(folder: Path) -> Images:
    """The images in cifar-10-python.tar.gz, whose pickles are not run: see experiments.pickles.

    Raises:
        FileNotFoundError: the archive is not in the folder.
        ValueError: it is damaged, or its pickles hold something else than the images.
    """
    path = folder / ARCHIVE
    check_regular("experiments", path, _WANTED)
    with reading("experiments", path, _WANTED), tarfile.open(path) as archive:
        files = {name: _read(archive, name) for name in (*_TRAIN, _TEST)}
    train = [np.concatenate(arrays) for arrays in zip(*(files[name] for name in _TRAIN), strict=True)]
    return Images(train[0], train[1], *files[_TEST])


def _read(archive: tarfile.TarFile, name: str) -> tuple[Array, Array]:
    entry = archive.getmember(name)
    if not entry.isfile() or entry.size > _LARGEST:
        raise ValueError(f"{name} is no file of at most {_LARGEST} bytes")
    file = archive.extractfile(entry)
    entries = load_pickle(file.read() if file else b"", _CLASSES, "latin-1")
    images, classes = (_entry(name, entries, key) for key in ("data", "labels"))
    if not isinstance(images, _Array) or images.shape != (len(classes), 3 * SIDE**2) or not classes:
        raise ValueError(f"{name} has no image of {3 * SIDE**2} bytes for each of {len(classes)} labels")
    if not all(type(label) is int and 0 <= label < CLASSES for label in classes):
        raise ValueError(f"{name} has labels that are not from 0 to {CLASSES - 1}")
    return (images.value().reshape(-1, 3, SIDE, SIDE) / 255).astype(np.float32), np.array(classes)


def _entry(file: str, entries: Any, key: str) -> Any:
    """Keys are texts, or bytes where Python 3 wrote them."""
    if not isinstance(entries, dict) or not {key, key.encode()} & entries.keys():
        raise ValueError(f"{file} has no {key}")
    return entries.get(key, entries.get(key.encode()))


class _Dtype:
    """The dtype of a pickled array. What NumPy adds to it, byte order and alignment, bytes have not."""

    def __init__(self, code: Any = None, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        pass


class _Array:
    """What a pickle says of an array. NumPy's own code would believe whatever that is."""

    def __init__(self, *_: Any) -> None:
        self.shape: Any = ()

    def __setstate__(self, state: Any) -> None:
        _, self.shape, dtype, self.is_fortran, self.data = state
        if not isinstance(dtype, _Dtype) or dtype.code not in ("u1", "|u1", b"u1", b"|u1"):
            raise ValueError(f"an array has the dtype {getattr(dtype, 'code', dtype)!r}, not uint8")

    def value(self) -> Array:
        data = self.data.encode("latin-1") if isinstance(self.data, str) else self.data  # Python 2 has one type
        return np.frombuffer(data, np.uint8).reshape(self.shape, order="F" if self.is_fortran else "C")


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes for Python 2."""
    return text.encode(encoding)


_CLASSES: Final = {
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy.ndarray": _Array,
    "numpy.dtype": _Dtype,
    "_codecs.encode": _encode,
}


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
