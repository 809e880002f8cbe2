"""Checks of batches of sentences, as Nematus makes them: ids, and masks of ones and zeros."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rmsnorm.specification import errors

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

Array: TypeAlias = npt.NDArray[Any]


def source(op: str, x: Any, x_mask: Any, config: Config) -> tuple[Array, Array]:
    """Ids (factors, length, batch), checked against the sizes of the vocabularies, and their mask (length, batch)."""
    sizes = config.source_vocab_sizes
    x, mask = np.asarray(x), np.asarray(x_mask, np.float64)
    if x.ndim != 3 or len(x) != len(sizes):
        want = f"the shape ({len(sizes)}, length, batch)"
        raise errors.out_of_domain(op, "x", x.shape, want, "give each factor a row of its own")
    for factor, size in zip(x, sizes, strict=True):
        check_ids(op, "x", factor, size)
    if mask.shape != x.shape[1:]:
        raise errors.wrong_shape(op, "x_mask", mask.shape, x.shape[1:], "length and batch of x")
    if not mask.any(axis=0).all():
        want = "at least one word in every sentence"
        raise errors.out_of_domain(op, "x_mask", 0, want, "leave empty sentences out, or end them")
    return _that_count(x, mask, config)


def target(op: str, y: Any, y_mask: Any, batch: int, config: Config) -> tuple[Array, Array]:
    """Ids (length, batch) and their mask, as source; without a mask all are words, but in zero those that are 0."""
    y = np.asarray(y)
    if y.ndim != 2 or y.shape[1] != batch or not len(y):
        raise errors.out_of_domain(op, "y", y.shape, f"the shape (length, {batch})", "give x and y the same sentences")
    check_ids(op, "y", y, config.target_vocab_size)
    words = y != 0 if config.rules.is_zero else np.ones(y.shape)
    mask = np.asarray(words if y_mask is None else y_mask, np.float64)
    if mask.shape != y.shape:
        raise errors.wrong_shape(op, "y_mask", mask.shape, y.shape, "y")
    return _that_count(y, mask, config)


def _that_count(ids: Array, mask: Array, config: Config) -> tuple[Array, Array]:
    """In zero the first places and those that are not padding in all sentences; else all."""
    kept = np.append(True, mask[1:].any(axis=1)) if config.rules.is_zero else slice(None)
    return ids[..., kept, :], mask[kept]


def check_ids(op: str, name: str, ids: Array, size: int) -> None:
    """Raise TypeError unless these are integers, ValueError unless they are ids of a vocabulary of this size."""
    if ids.dtype.kind not in "iu":
        raise errors.wrong_type(op, name, ids.dtype, "an array of integers", "pass ids of the vocabulary")
    if ids.size and not (ids.min() >= 0 and ids.max() < size):
        worst, want = int(ids.min() if ids.min() < 0 else ids.max()), f"0 to {size - 1}, the vocabulary"
        raise errors.out_of_domain(op, f"an id of {name}", worst, want, "map unknown words to the id for them")
