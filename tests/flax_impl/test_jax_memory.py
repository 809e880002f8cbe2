"""XLA's CPU compiler stores nothing of x's size between its kernels: such arrays would make a norm slow."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from flax_arrays import gradients  # noqa: E402

from rmsnorm import cpu  # noqa: E402
from rmsnorm.flax_impl.functional import rms_norm  # noqa: E402

FUSES = pytest.mark.needs("jax>=0.10.2", "an older XLA stores the row in float64")
GAINS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]


def temporaries(function: Any, *arrays: Any) -> int:
    size: int = jax.jit(function).lower(*arrays).compile().memory_analysis().temp_size_in_bytes
    return size


@pytest.fixture(params=["kernels", pytest.param("operations", marks=FUSES)])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "kernels" and not cpu.is_available():
        pytest.skip("there are no kernels")
    if request.param == "operations":
        monkeypatch.setattr(cpu, "missing", lambda *_: "there are none")
    return request.param


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other compilers fuse otherwise")
@pytest.mark.parametrize("variant", ["standard", "llama", "gemma", "flax"])
@pytest.mark.parametrize(("dtype", "gain"), GAINS)
@pytest.mark.parametrize("shape", [(4096, 4096), (8192, 1024)], ids=str)
def test_nothing_of_xs_size_is_stored(shape: tuple[int, int], dtype: str, gain: str, variant: str, how: str) -> None:
    """Compiled, not run. A row needs up to 16 bytes for its 1 / rho, which is 0.8 % of a row of 1024 in 16 bits."""
    if how == "operations" and dtype == "bfloat16" and jax.__version_info__ >= (0, 12):
        pytest.xfail("XLA of JAX 0.12 keeps a float64 array between the two kernels of the gradient")
    check_temporaries(shape, dtype, gain, variant=variant)


@pytest.mark.skipif(jax.default_backend() != "cpu" or not cpu.is_available(), reason="operations store more")
@pytest.mark.parametrize("options", [{}, {"partial": 0.9}, {"partial": 0.0625}, {"out_dtype": "float32"}], ids=str)
@pytest.mark.parametrize(("dtype", "gain"), [*GAINS, ("float16", "float16")])
def test_kernels_store_no_part_either(dtype: str, gain: str, options: dict[str, Any]) -> None:
    check_temporaries((4096, 1024), dtype, gain, **options)


def check_temporaries(shape: tuple[int, int], dtype: str, gain: str, **options: Any) -> None:
    x, scale = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[1:], gain)
    norm = functools.partial(rms_norm, **options)
    dy = jax.eval_shape(norm, x, scale)
    size = np.prod(shape) * x.dtype.itemsize
    assert temporaries(norm, x, scale) < size / 100
    assert temporaries(functools.partial(gradients, norm), x, scale, dy) < size / 100


def test_it_is_seen() -> None:
    """The test can fail: a conversion that two operations share is stored."""

    def shares(x: Any) -> Any:
        wide = x.astype(np.float32)
        return wide.sum(-1), wide.sum(0)

    x = jax.ShapeDtypeStruct((1024, 1024), "float16")
    assert temporaries(shares, x) >= 2 * 2**20
