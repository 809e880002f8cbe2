"""What a step draws: from its number and the seed alone, the same for every norm."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from rmsnorm.specification import errors


def generator(seed: int, *numbers: int) -> np.random.Generator:
    """What a step draws from: the same for every norm."""
    return np.random.default_rng([seed, *numbers])


def check_batch(size: int, count: int) -> None:
    """Raise ValueError if a batch is larger than the training set."""
    if size > count:
        raise errors.out_of_domain("experiments", "batch_size", size, f"at most {count}, all of the data", "take less")


def batch_of(count: int, size: int, seed: int, number: int) -> np.ndarray[Any, Any]:
    """The rows of a batch: every epoch takes them in another order, and leaves out what is less than a batch."""
    epoch, batch = divmod(number, count // size)
    return _order(count, seed, epoch)[batch * size : (batch + 1) * size]


@lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> np.ndarray[Any, Any]:
    return generator(seed, epoch).permutation(count)
