"""Arrays for tests of JAX and Flax."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import numpy as jnp


def normal(seed: int, *shape: int, dtype: Any = "float32") -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)
