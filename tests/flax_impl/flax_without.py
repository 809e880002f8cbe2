"""RMSNorm in a JAX that lacks what private.py asks for: the program of test_private.

The names are the arguments. Each is away while rmsnorm is imported, as it would be in a version without it; one that
older versions have elsewhere is put there.
"""

from __future__ import annotations

import json
import sys
from functools import reduce
from typing import Any

import jax
import jax.core
import jax.experimental
import jax.extend.core
import numpy as np
from jax import numpy as jnp
from jax.interpreters import mlir

OLDER = {"enable_x64": (jax.experimental, "enable_x64"), "typeof": (jax.core, "get_aval")}
MISSING = (*OLDER, "interpreters.mlir.ShardingContext")


def take_away(names: list[str]) -> None:
    for name in names:
        *path, last = name.split(".")
        owner: Any = reduce(getattr, path, jax)
        if name in OLDER:
            setattr(*OLDER[name], getattr(owner, last))
        delattr(owner, last)


def results() -> dict[str, Any]:
    """The bits of what a program may do with the functions, each as a list."""
    from rmsnorm.flax_impl import rms_norm, rms_norm_vjp

    found: dict[str, Any] = {}

    def note(name: str, *arrays: Any) -> None:
        found[name] = [np.asarray(array).astype(np.float64).ravel().tolist() for array in arrays]

    random = np.random.default_rng(0)
    x, dy = (jnp.asarray(random.normal(size=(3, 5, 8)), "bfloat16") for _ in range(2))
    scale = jnp.asarray(random.normal(size=8), "bfloat16")
    loss = lambda x, scale: jnp.sum(rms_norm(x, scale).astype("float32") * dy.astype("float32"))  # noqa: E731
    note("eager", rms_norm(x, scale))
    note("compiled", jax.jit(rms_norm)(x, scale), *jax.jit(jax.grad(loss, (0, 1)))(x, scale))
    note("formula", *rms_norm_vjp(dy, x, scale)[:2])
    note("vmap", jax.vmap(rms_norm, (0, None))(x, scale))
    note("forward mode", *jax.jvp(rms_norm, (x, scale), (dy, scale)))
    note("mask", rms_norm(x, scale, mask=dy > 0))
    return found


def main(names: list[str]) -> None:
    kept = mlir.ShardingContext
    take_away(names)
    from rmsnorm.flax_impl import private  # noqa: F401  # which now finds them away

    mlir.ShardingContext = kept  # type: ignore[misc]  # JAX itself needs it
    print(json.dumps(results()))


if __name__ == "__main__":
    main(sys.argv[1:])
