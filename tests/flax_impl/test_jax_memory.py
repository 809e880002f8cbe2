"""What XLA's CPU compiler stores between its kernels: arrays of x's size there would make a norm slow."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from flax_arrays import gradients  # noqa: E402

from rmsnorm import cpu  # noqa: E402
from rmsnorm.flax_impl.functional import rms_norm  # noqa: E402

GAINS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="other compilers fuse otherwise")


def temporaries(function: Any, *arrays: Any) -> int:
    size: int = jax.jit(function).lower(*arrays).compile().memory_analysis().temp_size_in_bytes
    return size


@pytest.mark.skipif(not cpu.is_available(), reason="there are no kernels")
@pytest.mark.parametrize(
    "options",
    [{}, {"variant": "llama"}, {"variant": "gemma"}, {"partial": 0.9}, {"partial": 0.0625}, {"out_dtype": "float32"}],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "gain"), [*GAINS, ("float16", "float16")])
@pytest.mark.parametrize("shape", [(4096, 4096), (8192, 1024)], ids=str)
def test_beside_kernels_nothing(shape: tuple[int, int], dtype: str, gain: str, options: dict[str, Any]) -> None:
    """Compiled, not run. A row needs 8 bytes for its 1 / rho, which is 0.4 % of a row of 1024 in 16 bits."""
    x, scale = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[1:], gain)
    norm = functools.partial(rms_norm, **options)
    dy = jax.eval_shape(norm, x, scale)
    size = np.prod(shape) * x.dtype.itemsize
    assert temporaries(norm, x, scale) < size / 100
    assert temporaries(functools.partial(gradients, norm), x, scale, dy) < size / 100


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "gain"), GAINS)
def test_the_recipe_stores_no_more_than_the_layer_of_flax(
    dtype: str, gain: str, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    linen = pytest.importorskip("flax.linen")
    monkeypatch.setattr(cpu, "missing", lambda *_: "there are none")
    shape = (4096, 1024)
    x, scale = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[1:], gain)
    mask = jax.ShapeDtypeStruct(shape, "bool") if masked else None

    def ours(mask: Any, x: Any, scale: Any) -> Any:
        return rms_norm(x, scale, mask=mask, variant="flax")

    def theirs(mask: Any, x: Any, scale: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return linen.RMSNorm(param_dtype=gain).apply({"params": {"scale": scale}}, x, mask=mask)

    dy = jax.eval_shape(ours, mask, x, scale)

    def stored(norm: Any) -> list[int]:
        derive = lambda mask, *arrays: gradients(functools.partial(norm, mask), *arrays)  # noqa: E731
        return [temporaries(norm, mask, x, scale), temporaries(derive, mask, x, scale, dy)]

    few = np.prod(shape) * x.dtype.itemsize / 100  # numbers of the rows
    assert all(own <= other + few for own, other in zip(stored(ours), stored(theirs), strict=True))


def test_it_is_seen() -> None:
    """The test can fail: a conversion that two operations share is stored."""

    def shares(x: Any) -> Any:
        wide = x.astype(np.float32)
        return wide.sum(-1), wide.sum(0)

    x = jax.ShapeDtypeStruct((1024, 1024), "float16")
    assert temporaries(shares, x) >= 2 * 2**20
