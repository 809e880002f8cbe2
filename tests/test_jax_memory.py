"""What XLA's CPU compiler stores between its kernels, which is what makes a norm slow there: nothing of x's size."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from rmsnorm.flax_impl.functional import rms_norm  # noqa: E402

GAINS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]


def temporaries(function: Any, *arrays: Any) -> int:
    found: int = jax.jit(function).lower(*arrays).compile().memory_analysis().temp_size_in_bytes
    return found


def gradients(norm: Any, x: Any, scale: Any, dy: Any) -> Any:
    y, pull = jax.vjp(norm, x, scale)
    return y, pull(dy)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other compilers fuse otherwise")
@pytest.mark.parametrize("variant", ["standard", "llama", "gemma", "flax"])
@pytest.mark.parametrize(("dtype", "gain"), GAINS)
@pytest.mark.parametrize("shape", [(4096, 4096), (8192, 1024)], ids=str)
def test_nothing_of_xs_size_is_stored(shape: tuple[int, int], dtype: str, gain: str, variant: str) -> None:
    """Compiled, not run. A row needs up to 16 bytes for its 1 / rho, which is 0.8 % of a row of 1024 in 16 bits."""
    x, scale = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[1:], gain)
    norm = functools.partial(rms_norm, variant=variant)
    dy = jax.eval_shape(norm, x, scale)
    size = np.prod(shape) * x.dtype.itemsize
    assert temporaries(norm, x, scale) < size / 100
    assert temporaries(functools.partial(gradients, norm), x, scale, dy) < size / 100


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other compilers fuse otherwise")
@pytest.mark.parametrize(("dtype", "gain"), GAINS)
@pytest.mark.parametrize("partial", [0.9, 0.5, 0.0625])
def test_of_a_part_no_more_than_sums_is_stored(partial: float, dtype: str, gain: str) -> None:
    """Eight sums a row in float64, and in float32 of parts; for the gradients in 16 bits a selection, in float32."""
    x, scale = jax.ShapeDtypeStruct((4096, 1024), dtype), jax.ShapeDtypeStruct((1024,), gain)
    norm = functools.partial(rms_norm, partial=partial)
    dy = jax.eval_shape(norm, x, scale)
    sums, selected = (4096 * 8 * 8, 0) if dtype == "float32" else (4096 * 8 * (8 + 4), x.size * 4)
    rest = x.size * x.dtype.itemsize / 100
    assert temporaries(norm, x, scale) < sums + rest
    assert temporaries(functools.partial(gradients, norm), x, scale, dy) < sums + selected + rest


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other compilers fuse otherwise")
@pytest.mark.parametrize("partial", [None, 0.5])
@pytest.mark.parametrize("out_dtype", ["float16", "float32"])
def test_of_float16_no_more_than_sums_is_stored(out_dtype: str, partial: float | None) -> None:
    """Sixteen sums a row in float32 or eight in float64; the backward pass stores conversions."""
    x, scale = jax.ShapeDtypeStruct((4096, 1024), "float16"), jax.ShapeDtypeStruct((1024,), "float16")
    norm = functools.partial(rms_norm, out_dtype=out_dtype, partial=partial)
    assert temporaries(norm, x, scale) < 4096 * 64 + x.size * x.dtype.itemsize / 100


def test_it_is_seen() -> None:
    """A conversion that two consumers share is stored, and found here."""

    def shares(x: Any) -> Any:
        wide = x.astype(np.float32)
        return wide.sum(-1), wide.sum(0)

    x = jax.ShapeDtypeStruct((1024, 1024), "float16")
    assert temporaries(shares, x) >= 2 * 2**20
