"""Random calls, and compositions of transforms, in every framework: 2,000 in `make nightly`, or a few.

The compositions are those of the seed in RMSNORM_FUZZ_SEED or of the date.
"""

from __future__ import annotations

import os
import zlib
from datetime import date
from typing import Any

import calls
import numpy as np
import pytest
import transforms
from hypothesis import settings
from table.test_calls import failures, hold
from table.test_calls import pytestmark as of_calls
from table.test_derivatives import DIFFERENTIABLE
from table.test_derivatives import pytestmark as of_derivatives

COUNT = settings().max_examples  # 2,000 with --hypothesis-profile nightly
pytestmark = [pytest.mark.timeout(14400), *of_calls, *of_derivatives]


@pytest.mark.parametrize("way", ["fast", "torch", "tf", "flax"], indirect=True)
def test_drawn_calls(way: Any, engine: str) -> None:
    """Of JAX, which compiles, an eighth."""
    random = np.random.default_rng(zlib.crc32(f"{way.name} {engine} {date.today()}".encode()))
    hold(failures(way, calls.drawn(COUNT // (8 if way.name == "flax" else 1), random), engine))


@pytest.mark.parametrize("framework", DIFFERENTIABLE, indirect=True)
def test_compositions(framework: Any, engine: str) -> None:
    """Two to four transforms at random, of which two differentiate at least."""
    kind, count = transforms.KINDS[framework.name](), COUNT // 2 if COUNT > 100 else 3
    seed = os.environ.get("RMSNORM_FUZZ_SEED") or f"{date.today()}"
    random, done = np.random.default_rng(zlib.crc32(f"{framework.name} {engine} {seed}".encode())), 0
    for row in calls.drawn(3 * count, random, calls.COMPOSED):
        names = [str(random.choice(kind.derivatives)) for _ in range(2)]
        names += [str(random.choice([*kind.derivatives, *kind.others])) for _ in range(random.integers(3))]
        random.shuffle(names)
        done += transforms.compared(kind, row, names, random)
        if done == count:
            return
    assert done >= count / 2, f"of {3 * count} compositions {done} could be compared"
