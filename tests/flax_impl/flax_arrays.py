"""Arrays and gradients for tests of JAX and Flax."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import numpy as jnp


def normal(seed: int, *shape: int, dtype: Any = "float32") -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def gradients(norm: Any, *arrays: Any) -> Any:
    """y, and the gradients of all arrays but the last, which is that of y."""
    *primals, dy = arrays
    y, pull = jax.vjp(norm, *primals)
    return y, *pull(jnp.asarray(dy, y.dtype))
