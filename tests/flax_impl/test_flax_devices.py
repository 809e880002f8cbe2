"""Arrays over eight virtual devices: the numbers of one device, and nothing of x's size goes between them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from programs import printed

pytest.importorskip("jax")
pytest.importorskip("flax")

from rmsnorm.specification import dtypes

ROWS, WIDTH = 16, 64
CELLS = [f"{kind[0]} {spec} {kind[1]}" for kind in (("Auto", "float32 masked"), ("Explicit", "bfloat16"))
         for spec in ("batch", "features", "both")]  # fmt: skip
WAYS = ("nnx, shard_map", "linen, pmap", "nnx in groups, pmap")


def computed(*only: str) -> Any:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    program = Path(__file__).with_name("flax_devices.py")
    results = json.loads(printed("-W", "error", program, *only, timeout=500, XLA_FLAGS=flags, JAX_PLATFORMS="cpu"))
    assert results["shape"] == [ROWS, WIDTH]
    return results


@pytest.fixture(scope="module")
def results() -> Any:
    """Everything that the program computes, which takes half a minute."""
    return computed()


def few(dtype: str) -> float:
    """Roundings of two programs of the same formula: of sums of a row, and over rows, in two orders, and of results."""
    u = dtypes.unit_roundoff(dtype)
    return 2 * (WIDTH + ROWS) * min(u, 2.0**-24) + 2 * u


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_arrays_over_devices(results: Any, cell: str) -> None:
    _, spec, dtype, *_ = cell.split()
    assert max(results[cell]["apart"]) <= few(dtype)
    assert results[cell]["kernels"] == 0
    assert all(results[cell]["kept"]), "y and the gradients lie as x and the parameters do"
    assert {kind for kind, _ in results[cell]["collectives"]} == {"all-reduce"}
    assert max(size for _, size in results[cell]["collectives"]) <= (ROWS if spec in ("features", "both") else WIDTH)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["shard_map", "pmap", "formula", "slice"])
def test_whole_rows_are_as_on_one_device(results: Any, way: str) -> None:
    assert max(results[way]["apart"]) <= few("float32")
    assert results[way]["kernels"] == 0


@pytest.mark.slow
def test_the_inspection_finds_what_is_gathered_or_sent_about(results: Any) -> None:
    assert ["all-gather", ROWS * WIDTH] in results["gathered"]
    assert "all-to-all" in {kind for kind, _ in results["sent about"]}


@pytest.mark.slow
def test_layers_over_a_named_axis(results: Any) -> None:
    """The built-in one averages the means of the devices, as if each counted as many elements."""
    for way in WAYS:
        assert max(results[f"{way} float32"]) <= few("float32")
    for way in WAYS[:2]:
        assert results[f"{way}, built-in"] > 0.1


def test_layers_over_a_named_axis_in_float64() -> None:
    results = computed("float64")
    for way in WAYS:
        assert max(results[f"{way} float64"]) <= few("float64")
    # sums of 64 elements and of 16 rows in another order
    assert max(results["second over a named axis"]) <= 1e-13
