"""Sums over rows in JAX are in float64, so that neither batching nor threads change a gradient of up to 32 bits.

Float64 sums in another order round to another float32 only next to a tie: less than one in 2^20 here. Seeds are fixed.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from flax_arrays import normal  # noqa: E402

from rmsnorm.flax_impl import rms_norm, rms_norm_vjp  # noqa: E402

ROWS, WIDTH = 96, 40
SHAPES = [(ROWS,), (4, 24), (24, 2, 2)]


def derived(x: Any, scale: Any, bias: Any, dy: Any) -> Any:
    return jax.vjp(rms_norm, x, scale, bias)[1](dy)[1:]


def formula(x: Any, scale: Any, bias: Any, dy: Any) -> Any:
    return rms_norm_vjp(dy, x, scale, bias)[1:]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("function", [derived, formula])
def test_however_rows_are_batched(function: Any, dtype: str) -> None:
    """With jit and without it. Nothing is wider than float64: two orders of its sums differ by their roundings."""
    parameters = "float64" if dtype == "float64" else "float32"
    with jax.enable_x64(True):
        x, dy = (normal(seed, ROWS, WIDTH, dtype=dtype) for seed in (0, 1))
        scale, bias = (normal(seed, WIDTH, dtype=parameters) for seed in (2, 3))
        results = [
            [np.asarray(gradient) for gradient in way(x.reshape(*shape, WIDTH), scale, bias, dy.reshape(*shape, WIDTH))]
            for way, shapes in ((jax.jit(function), SHAPES), (function, SHAPES[1:2]))
            for shape in shapes
        ]
        normalised = np.asarray(abs(rms_norm(x)), np.float64)
    terms = [np.sum(np.abs(np.asarray(dy, np.float64)) * factor, 0) for factor in (normalised, 1.0)]
    for gradients in results:
        for got, want, size in zip(gradients, results[0], terms, strict=True):
            if dtype == "float64":
                assert np.all(np.abs(got - want) <= 2 * ROWS * 2.0**-53 * size)
            else:
                assert got.tobytes() == want.tobytes()


def digests() -> dict[str, str]:
    """Digests of results that are large enough for XLA to share out among threads."""
    digests = {}
    for dtype in ("bfloat16", "float32"):
        x, dy = (normal(seed, 512, 2048, dtype=dtype) for seed in (0, 1))
        scale, bias = (normal(seed, 2048) for seed in (2, 3))
        for name, way in {"derived": derived, "formula": formula}.items():
            results = jax.jit(way)(x, scale, bias, dy)
            joined = b"".join(np.asarray(result).tobytes() for result in results)
            digests[f"{dtype} {name}"] = hashlib.sha256(joined).hexdigest()
    return digests


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="XLA starts a thread for each core it may use")
def test_however_many_threads() -> None:
    """One thread in a separate process, and as many as there are cores in this one."""
    code = "import os; os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1]); import test_jax_order, json"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{code}; print(json.dumps(test_jax_order.digests()))"],
        capture_output=True, text=True, timeout=120, cwd=os.path.dirname(__file__), check=False,
        env={**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == digests()
